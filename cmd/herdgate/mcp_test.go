package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/mcpserver"
	"github.com/herdgate/herdgate/internal/natstest"
)

// mcpClientEnv makes this test binary an MCP client that waits for a slow task of the
// server whose command line follows; see TestMain.
const mcpClientEnv = "TEST_MCP_CLIENT"

func mcpClient() int {
	ctx := context.Background()
	started := &sdk.ClientOptions{ProgressNotificationHandler: func(_ context.Context, r *sdk.ProgressNotificationClientRequest) {
		fmt.Println(r.Params.Message)
	}}
	args := strings.Fields(os.Getenv(mcpClientEnv))
	cs, err := sdk.NewClient(&sdk.Implementation{Name: "test"}, started).Connect(ctx, &sdk.CommandTransport{Command: exec.Command(args[0], args[1:]...)}, nil)
	if err == nil {
		p := &sdk.CallToolParams{Name: mcpserver.ToolTask, Arguments: map[string]any{"subagent_type": "general-purpose", "prompt": "slow", "description": "abandoned"}}
		p.SetProgressToken("tok")
		_, err = cs.CallTool(ctx, p)
	}
	fmt.Println(err)
	return 1
}

// mcpServer is `herdgate mcp`, and a client that talks to it.
type mcpServer struct {
	*sdk.ClientSession
	t      *testing.T
	cmd    *exec.Cmd
	stdin  io.Closer
	ended  chan struct{}
	stderr *natstest.Output
}

func startMCP(t *testing.T, dir string, env []string, opts *sdk.ClientOptions, args ...string) *mcpServer {
	t.Helper()
	s := &mcpServer{t: t, cmd: exec.Command(binary, append([]string{"mcp"}, args...)...), ended: make(chan struct{}), stderr: &natstest.Output{}}
	s.cmd.Dir, s.cmd.Env, s.cmd.Stderr = dir, append(cleanEnv(), env...), s.stderr
	in, out := pipe(t), pipe(t)
	s.cmd.Stdin, s.cmd.Stdout, s.stdin = in.r, out.w, in.w
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = in.r.Close(), out.w.Close()
	go func() {
		defer close(s.ended)
		_ = s.cmd.Wait() // its state tells
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.ended
		if t.Failed() {
			t.Logf("herdgate mcp %s: stderr:\n%s", strings.Join(args, " "), clip(s.stderr.String()))
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	var err error
	if s.ClientSession, err = sdk.NewClient(&sdk.Implementation{Name: "test"}, opts).Connect(ctx, &sdk.IOTransport{Reader: out.r, Writer: in.w}, nil); err != nil {
		t.Fatal(err)
	}
	return s
}

type pipeEnds struct{ r, w *os.File }

func pipe(t *testing.T) pipeEnds {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = r.Close(), w.Close() })
	return pipeEnds{r, w}
}

// exited waits for the end in order.
func (s *mcpServer) exited() {
	s.t.Helper()
	select {
	case <-s.ended:
	case <-time.After(deadline):
		s.t.Fatal("the server has not ended")
	}
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		s.t.Errorf("exit code %d, want 0", code)
	}
}

type toolAnswer struct {
	res *sdk.CallToolResult
	err error
}

func callTool(ctx context.Context, cs *sdk.ClientSession, name string, args map[string]any) <-chan toolAnswer {
	out := make(chan toolAnswer, 1)
	go func() {
		p := &sdk.CallToolParams{Name: name, Arguments: args}
		p.SetProgressToken(fmt.Sprint(args["description"]))
		res, err := cs.CallTool(ctx, p)
		out <- toolAnswer{res, err}
	}()
	return out
}

func answered(t *testing.T, c <-chan toolAnswer) toolAnswer {
	t.Helper()
	select {
	case a := <-c:
		return a
	case <-time.After(deadline):
		t.Fatal("the call has not ended")
		return toolAnswer{}
	}
}

func (a toolAnswer) text() string {
	if a.res == nil || len(a.res.Content) == 0 {
		return fmt.Sprint(a.err)
	}
	c, _ := a.res.Content[0].(*sdk.TextContent)
	return c.Text
}

func generalTask(prompt string) map[string]any {
	return map[string]any{"subagent_type": "general-purpose", "prompt": prompt, "description": prompt}
}

func heardBy(heard chan<- string) *sdk.ClientOptions {
	return &sdk.ClientOptions{ProgressNotificationHandler: func(_ context.Context, r *sdk.ProgressNotificationClientRequest) {
		heard <- fmt.Sprintf("%v: %s", r.Params.ProgressToken, r.Params.Message)
	}}
}

func hear(t *testing.T, heard <-chan string, want string) {
	t.Helper()
	for end := time.After(deadline); ; {
		select {
		case m := <-heard:
			if strings.HasPrefix(m, want) {
				return
			}
		case <-end:
			t.Fatalf("no progress %q came", want)
		}
	}
}

// Nothing set up: a client starts `herdgate mcp`, which is a whole system, and leaves
// nothing behind.
func TestMCPEmbedded(t *testing.T) {
	t.Parallel()
	dir, tmp := testConfig(t, ""), t.TempDir()
	heard := make(chan string, 1000)
	s := startMCP(t, dir, []string{"TMPDIR=" + tmp}, heardBy(heard))
	list, err := s.ListTools(t.Context(), nil)
	if err != nil || len(list.Tools) != 3 {
		t.Fatalf("tools = %+v, %v", list, err)
	}
	for _, tool := range list.Tools {
		if tool.Name == mcpserver.ToolTask && !strings.Contains(tool.Description, "- general-purpose: ") {
			t.Errorf("the types are not in %q", tool.Description)
		}
	}
	// Side by side, as far as there are slots.
	one, two := callTool(t.Context(), s.ClientSession, mcpserver.ToolTask, generalTask("quick")), callTool(t.Context(), s.ClientSession, mcpserver.ToolTask, generalTask("quick"))
	for _, c := range []<-chan toolAnswer{one, two} {
		if a := answered(t, c); a.err != nil || a.res.IsError || a.text() != "Task succeeded. Result:\nnothing there" {
			t.Errorf("%v %q", a.err, a.text())
		}
	}
	hear(t, heard, "quick: step 1: ls")
	if a := answered(t, callTool(t.Context(), s.ClientSession, mcpserver.ToolTask, map[string]any{"subagent_type": "nobody", "prompt": "x"})); a.err != nil || !a.res.IsError || !strings.Contains(a.text(), "there are: general-purpose") {
		t.Errorf("an unknown type: %v %q", a.err, a.text())
	}
	// The client ends while a task runs: so does everything.
	last := callTool(t.Context(), s.ClientSession, mcpserver.ToolTask, generalTask("slow"))
	hear(t, heard, "slow: started")
	if err := s.stdin.Close(); err != nil {
		t.Fatal(err)
	}
	s.exited()
	answered(t, last)
	for _, where := range []string{tmp, dir} {
		left, err := os.ReadDir(where)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range left {
			if strings.HasPrefix(f.Name(), "herdgate-mcp-") || f.Name() == ".herdgate" {
				t.Errorf("%s is left in %s", f.Name(), where)
			}
		}
	}
}

// Nothing but the protocol is on the standard output, and SIGTERM is an end in order.
func TestMCPOutput(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	p := startWith(t, r, t.TempDir(), nil, "mcp", "--log-level", "debug")
	_ = r.Close()
	for _, line := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}`,
		`{"jsonrpc":"2.0","method":"notifications/initialized"}`,
		`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"task","arguments":{"subagent_type":"general-purpose","prompt":"hello"},"_meta":{"progressToken":1}}}`,
	} {
		if _, err := fmt.Fprintln(w, line); err != nil {
			t.Fatal(err)
		}
	}
	p.saw(&p.stdout, `"id":2,"result"`)
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != 0 {
		t.Errorf("exit code %d after SIGTERM, want 0", code)
	}
	for line := range strings.Lines(p.stdout.String()) {
		if !json.Valid([]byte(line)) || !strings.Contains(line, `"jsonrpc"`) {
			t.Errorf("not the protocol: %q", line)
		}
	}
	contains(t, "stderr", p.stderr.String(), "no model is configured")
}

type mcpBearer string

func (b mcpBearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+string(b))
	return http.DefaultTransport.RoundTrip(r)
}

// Clients of a running system, on stdio and over HTTP, of two tenants. Whoever is gone
// takes its tasks along, however it went.
func TestMCPOnARunningSystem(t *testing.T) {
	t.Parallel()
	dir := testConfig(t, "http: {auth: {mode: tokens, tokens: [{name: acme, token_env: ACME, tenant: acme}, {name: other, token_env: OTHER, tenant: other}]}}\n")
	env := []string{"ACME=a-secret-of-some-length", "OTHER=another-secret-of-it"}
	p, server := up(t, dir, env)
	acme := []string{"--server", server, "--token-env", "ACME"}
	heard := make(chan string, 1000)
	s := startMCP(t, t.TempDir(), env, heardBy(heard), acme...)
	dial := func(token string, opts *sdk.ClientOptions) *sdk.ClientSession {
		t.Helper()
		cs, err := sdk.NewClient(&sdk.Implementation{Name: "test"}, opts).Connect(t.Context(), &sdk.StreamableClientTransport{Endpoint: server + "/mcp", HTTPClient: &http.Client{Transport: mcpBearer(token)}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cs.Close() })
		return cs
	}
	over := make(chan string, 1000)
	mine, strange := dial("a-secret-of-some-length", heardBy(over)), dial("another-secret-of-it", nil)

	// Two clients at once.
	stdio, http := callTool(t.Context(), s.ClientSession, mcpserver.ToolTask, generalTask("quick")), callTool(t.Context(), mine, mcpserver.ToolTask, generalTask("quick"))
	var id string
	for _, c := range []<-chan toolAnswer{stdio, http} {
		a := answered(t, c)
		if a.err != nil || a.res.IsError || a.text() != "Task succeeded. Result:\nnothing there" {
			t.Fatalf("%v %q", a.err, a.text())
		}
		id, _ = a.res.StructuredContent.(map[string]any)["task_id"].(string)
	}
	hear(t, heard, "quick: completed")
	hear(t, over, "quick: completed")
	for cs, want := range map[*sdk.ClientSession]string{s.ClientSession: "Task succeeded", mine: "Task succeeded", strange: "not_found: "} {
		if a := answered(t, callTool(t.Context(), cs, mcpserver.ToolTaskStatus, map[string]any{"task_id": id})); a.err != nil || !strings.HasPrefix(a.text(), want) {
			t.Errorf("task_status = %v %q, want %q", a.err, a.text(), want)
		}
	}

	// cancelled waits until the task with the description has ended as cancelled.
	cancelled := func(description string) {
		t.Helper()
		natstest.Eventually(t, deadline, func() (bool, string) {
			out := herdgate(t, dir, env, append([]string{"tasks", "list", "--output", "json"}, acme...)...).want(t, 0).stdout
			for _, x := range decode[wire.TaskPage](t, out).Tasks {
				if x.Description == description {
					return x.Status == "cancelled", string(x.Status)
				}
			}
			return false, out
		})
	}
	slow := func(description string) map[string]any {
		return map[string]any{"subagent_type": "general-purpose", "prompt": "slow", "description": description}
	}
	ctx, cancel := context.WithCancel(t.Context())
	one, two := callTool(ctx, s.ClientSession, mcpserver.ToolTask, slow("taken back on stdio")), callTool(ctx, mine, mcpserver.ToolTask, slow("taken back over HTTP"))
	hear(t, heard, "taken back on stdio: started")
	hear(t, over, "taken back over HTTP: started")
	cancel()
	answered(t, one)
	answered(t, two)
	cancelled("taken back on stdio")
	cancelled("taken back over HTTP")

	// kill -9 of the client.
	c := exec.Command(os.Args[0])
	c.Env = append(append(cleanEnv(), env...), mcpClientEnv+"="+binary+" mcp "+strings.Join(acme, " "))
	said := &natstest.Output{}
	c.Stdout = said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, deadline, func() (bool, string) { return strings.Contains(said.String(), "started"), said.String() })
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	cancelled("abandoned")

	// A client that reads no more, and has not closed its end for writing.
	limit, done := context.WithTimeout(t.Context(), deadline)
	defer done()
	deaf := exec.CommandContext(limit, binary, append([]string{"mcp"}, acme...)...)
	deaf.Env = append(cleanEnv(), env...)
	in, err := deaf.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := deaf.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := deaf.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = deaf.Process.Kill() })
	_ = out.Close()
	if _, err := io.WriteString(in, `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"task","arguments":{"subagent_type":"general-purpose","prompt":"slow","description":"unheard"},`+
		`"_meta":{"progressToken":1,"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"x","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}}`+"\n"); err != nil {
		t.Fatal(err)
	}
	if err := deaf.Wait(); err != nil { // the pipe is still open
		t.Errorf("a server whose client is deaf: %v", err)
	}
	cancelled("unheard")

	// SIGTERM to the server on stdio.
	last := callTool(t.Context(), s.ClientSession, mcpserver.ToolTask, slow("terminated"))
	hear(t, heard, "terminated: started")
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.exited()
	answered(t, last)
	cancelled("terminated")
	if strings.Contains(p.stderr.String()+s.stderr.String(), "-secret-") {
		t.Error("a token is in the log")
	}
	stopped(t, p)
}

// What docs/mcp.md says about trying it by hand.
func TestMCPByHand(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "mcp.md"))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^curl -sN 127\.0\.0\.1:8484(/mcp)((?: -H '[^']+')+) -d '([^']+)'$`).FindStringSubmatch(string(page))
	if m == nil {
		t.Fatal("docs/mcp.md has no such line")
	}
	p, server := up(t, t.TempDir(), nil)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, server+m[1], strings.NewReader(m[3]))
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range regexp.MustCompile(`-H '([^:]+): ([^']+)'`).FindAllStringSubmatch(m[2], -1) {
		req.Header.Set(h[1], h[2])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	contains(t, "the answer", string(body), `"method":"notifications/progress"`, `"message":"started with offline"`, `"status":"completed"`)
	stopped(t, p)
}

// A server that is not there is told to the model, not to a wall.
func TestMCPWithoutServer(t *testing.T) {
	t.Parallel()
	s := startMCP(t, t.TempDir(), nil, nil, "--server", "http://127.0.0.1:1")
	if list, err := s.ListTools(t.Context(), nil); err != nil || len(list.Tools) != 3 {
		t.Errorf("tools = %+v, %v", list, err)
	}
	if a := answered(t, callTool(t.Context(), s.ClientSession, mcpserver.ToolTask, generalTask("quick"))); a.err != nil || !a.res.IsError || !strings.Contains(a.text(), "unavailable: nobody answers at") {
		t.Errorf("%v %q", a.err, a.text())
	}
}
