package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/tool"
)

// Tools of a real server over stdio: names, descriptions, results, errors, structured
// content, bounds (F-072, F-136).
func TestStdioServer(t *testing.T) {
	t.Parallel()
	m, _ := manager(t, map[string]config.MCPServer{"srv": own("sdk", nil), "off": {Command: "/does/not/exist"}})
	list := tools(t, m)
	if x := list["srv__echo"]; x == nil || x.Spec().Description != "About echo." || !strings.Contains(string(x.Spec().Parameters), `"text"`) || x.Server() != "srv" {
		t.Fatalf("tools are %v", list)
	}
	if r := call(t, list["srv__echo"], `{"text":"hello"}`); r.IsError || r.Text != "you said hello" {
		t.Errorf("result = %+v", r)
	}
	if r := call(t, list["srv__fail"], `{}`); !r.IsError || r.Text != "no such issue" {
		t.Errorf("an error reads %+v", r)
	}
	if r := call(t, list["srv__structured"], `{}`); r.Text != `{"answer":42}` {
		t.Errorf("structured content reads %+v", r)
	}
	if r := call(t, list["srv__big"], `{}`); len(r.Text) > 21000 || !strings.Contains(r.Text, "characters are left out") {
		t.Errorf("a big result has %d bytes", len(r.Text))
	}
	if r := call(t, list["srv__echo"], `{"text":7}`); !r.IsError {
		t.Errorf("wrong arguments: %+v", r)
	}
}

// A server that is killed loses the call that it runs, says so, and is there again for
// the next one.
func TestServerIsKilled(t *testing.T) {
	t.Parallel()
	m, _ := manager(t, map[string]config.MCPServer{"srv": own("sdk", nil)})
	list := tools(t, m)
	before := call(t, list["srv__pid"], `{}`).Text
	if r := call(t, list["srv__die"], `{}`); !r.IsError || !strings.Contains(r.Text, "srv was lost while this call ran") {
		t.Errorf("result = %+v", r)
	}
	after := call(t, list["srv__pid"], `{}`)
	if after.IsError || after.Text == before {
		t.Errorf("before %s, after %+v", before, after)
	}
	// kill -9 from outside, between two calls.
	pid, err := strconv.Atoi(after.Text)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, patience, func() (bool, string) {
		r := call(t, list["srv__pid"], `{}`)
		return !r.IsError && r.Text != after.Text, r.Text
	})
}

// A server that cannot be reached disables its own tools with a message, and is tried
// again after growing, bounded pauses. One that was there keeps its tools on offer.
func TestServerIsAway(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "server")
	m, l := manager(t, map[string]config.MCPServer{"gone": {Command: file, Enabled: true, Env: map[string]config.Secret{modeVar: "sdk"}}, "here": own("sdk", nil)},
		func(c *Config) { c.FirstPause, c.LastPause = time.Hour, time.Hour })
	list, missing, err := m.Tools(within(t), nil)
	if err != nil || len(missing) != 1 || missing[0].Server != "gone" || !strings.Contains(missing[0].Reason, "cannot be started") {
		t.Fatalf("missing = %+v, %v", missing, err)
	}
	if len(list) == 0 || ServerOf(list[0].Spec().Name) != "here" {
		t.Errorf("tools = %v", list)
	}
	// It is not tried again before its time.
	if _, missing, _ := m.Tools(within(t), nil); len(missing) != 1 || !strings.Contains(missing[0].Reason, "tried again in 3600 s") {
		t.Errorf("missing = %+v", missing)
	}
	if n := strings.Count(l.String(), "cannot be reached"); n != 1 {
		t.Errorf("it was tried %d times", n)
	}
	s := m.servers[0]
	s.mu.Lock()
	s.retryAt = time.Time{}
	s.mu.Unlock()
	if err := os.Symlink(os.Args[0], file); err != nil {
		t.Fatal(err)
	}
	echo := tools(t, m)["gone__echo"]
	if r := call(t, echo, `{"text":"a"}`); r.IsError {
		t.Errorf("result = %+v", r)
	}
	// It goes away for good: its tools stay on offer, and say what is wrong.
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	call(t, tools(t, m)["gone__die"], `{}`)
	if r := call(t, echo, `{}`); !r.IsError || !strings.Contains(r.Text, "The MCP server gone is not available") || !strings.Contains(r.Text, "Go on without it") {
		t.Errorf("result = %+v", r)
	}
	if tools(t, m)["gone__echo"] == nil {
		t.Error("the tools of a server that was there are not offered any more")
	}
}

func TestPauses(t *testing.T) {
	t.Parallel()
	s := newServer(New(Config{FirstPause: time.Second, LastPause: time.Minute}), "s", config.MCPServer{})
	for i, want := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		s.failedLocked(errors.New("x"))
		if got := time.Until(s.retryAt).Round(time.Second); got != want*time.Second {
			t.Errorf("pause %d is %v, want %d s", i, got, want)
		}
	}
}

// F-076, F-130: a call that is cancelled returns at once, the server is told, and it
// goes on for others; it is not tied to who connected it.
func TestCancelledCall(t *testing.T) {
	t.Parallel()
	m, _ := manager(t, map[string]config.MCPServer{"srv": own("sdk", nil)})
	first, end := context.WithCancel(within(t))
	list, _, err := m.Tools(first, nil)
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]Tool{}
	for _, x := range list {
		byName[x.Spec().Name] = x
	}
	pid := call(t, byName["srv__pid"], `{}`).Text
	file := filepath.Join(t.TempDir(), "seen")
	done := make(chan error, 1)
	go func() {
		_, err := byName["srv__hang"].Call(first, tool.Call{Args: json.RawMessage(fmt.Sprintf(`{"text":%q}`, file))})
		done <- err
	}()
	seen := func(want string) {
		t.Helper()
		natstest.Eventually(t, patience, func() (bool, string) {
			b, _ := os.ReadFile(file)
			return string(b) == want, string(b)
		})
	}
	seen("begun")
	end()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error = %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the call does not return")
	}
	seen("cancelled") // notifications/cancelled came through
	if got := call(t, byName["srv__pid"], `{}`); got.Text != pid {
		t.Errorf("the server is another one: %+v", got)
	}
}

// A server that does not answer costs its time limit, not the run; nor does one that
// never gets as far as its tools.
func TestSlowServer(t *testing.T) {
	t.Parallel()
	m, _ := manager(t, map[string]config.MCPServer{"srv": own("sdk", nil), "lies": own("raw", nil)})
	list := tools(t, m)
	m.cfg.CallTimeout = 300 * time.Millisecond
	file := filepath.Join(t.TempDir(), "seen")
	for name, args := range map[string]string{"srv__hang": fmt.Sprintf(`{"text":%q}`, file), "lies__stray": `{}`} {
		if r := call(t, list[name], args); !r.IsError || !strings.Contains(r.Text, "did not answer within 300ms") {
			t.Errorf("%s: %+v", name, r)
		}
	}
	m.cfg.CallTimeout = patience
	if r := call(t, list["lies__call"], `{}`); r.Text != "fine" {
		t.Errorf("afterwards: %+v", r)
	}
	m2, _ := manager(t, map[string]config.MCPServer{"mute": own("mute", nil)}, func(c *Config) { c.ConnectTimeout = 300 * time.Millisecond })
	if _, missing, err := m2.Tools(within(t), nil); err != nil || len(missing) != 1 || !strings.Contains(missing[0].Reason, "did not answer within 300ms of its start") {
		t.Errorf("missing = %v, %v", missing, err)
	}
}

// F-134: all but the bad tools are there; each bad one is named once. Long and odd names
// are made fit, and collisions told.
func TestBadTools(t *testing.T) {
	t.Parallel()
	m, l := manager(t, map[string]config.MCPServer{"srv": own("badtools", nil)})
	list := tools(t, m)
	long := ToolName("srv", strings.Repeat("n", 100))
	for _, name := range []string{"srv__good", "srv__typeless", "srv__a_b", long} {
		if list[name] == nil {
			t.Errorf("%s is not there", name)
		}
	}
	if len(list) != 4 || len(long) != 64 || list["srv__a_b"].(*remote).name != "a b" {
		t.Errorf("tools = %v", list)
	}
	if got := string(list["srv__typeless"].Spec().Parameters); got != `{"type":"object"}` {
		t.Errorf("schema = %s", got)
	}
	tools(t, m) // tells nothing a second time
	for _, want := range []string{`list\" of`, `none\" of`, "name 7", `text\" of`, `deep\" of`, `fat\" of`, `wrong\" of`, `reading\" of`, `a.b\" of`} {
		if n := strings.Count(l.String(), want); n != 1 {
			t.Errorf("%s is told %d times", want, n)
		}
	}
}

// A list of nothing but what is no tool is told of in a few lines, and once.
func TestManyBadTools(t *testing.T) {
	t.Parallel()
	m, l := manager(t, map[string]config.MCPServer{"srv": own("nulls", nil)})
	for range 2 {
		if list := tools(t, m); len(list) != 1 || list["srv__good"] == nil {
			t.Errorf("tools = %v", list)
		}
	}
	if n := strings.Count(l.String(), "cannot be read"); n != maxToldBad+1 {
		t.Errorf("it is told in %d lines: %.2000s", n, l.String())
	}
}

// Of pages of tools no more is held than what can be taken of them.
func TestSlim(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("x", 1<<20)
	got := slim(&sdk.Tool{Name: big, Title: big, Description: big, InputSchema: map[string]any{"type": "object", "description": big}, OutputSchema: map[string]any{"a": big}})
	if len(got.Name)+len(got.Title)+len(got.Description) > 64<<10 || got.OutputSchema != nil {
		t.Errorf("it holds %d, %d and %d bytes", len(got.Name), len(got.Title), len(got.Description))
	}
	if n, ok := got.InputSchema.(tooLarge); !ok || int(n) < 1<<20 {
		t.Errorf("the schema is held as %T", got.InputSchema)
	}
}

// A server that asks without end and reads no answer holds neither a call nor the end
// of the service (F-132).
func TestServerAsksWithoutEnd(t *testing.T) {
	t.Parallel()
	m, _ := manager(t, map[string]config.MCPServer{"srv": own("asking", nil)}, func(c *Config) { c.CallTimeout = time.Second })
	x := tools(t, m)["srv__call"]
	natstest.Eventually(t, patience, func() (bool, string) {
		r := call(t, x, `{}`)
		return strings.Contains(r.Text, "closed") || strings.Contains(r.Text, "does not read") || r.Text == "fine", r.Text
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		m.Close()
	}()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("the service does not end")
	}
}

// A server over HTTP that asks without end and takes no answer has a bounded number of
// our connections, and does not hold the end of the service (F-132).
func TestHTTPServerAsksWithoutEnd(t *testing.T) {
	t.Parallel()
	var replies, most atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			w.Header().Set("Content-Type", "text/event-stream")
			for n := 0; r.Context().Err() == nil; n++ {
				if _, err := fmt.Fprintf(w, "data: {\"jsonrpc\":\"2.0\",\"id\":\"p%d\",\"method\":\"ping\"}\n\n", n); err != nil {
					return
				}
			}
			return
		}
		var m struct {
			ID     json.RawMessage `json:"id"`
			Method string          `json:"method"`
		}
		_ = json.NewDecoder(r.Body).Decode(&m) // no message is no method
		w.Header().Set("Content-Type", "application/json")
		result := ""
		switch m.Method {
		case "initialize":
			result = `{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"raw","version":"1"}}`
		case "tools/list":
			result = `{"tools":[{"name":"call","inputSchema":{"type":"object"}}]}`
		case "":
			if n := replies.Add(1); n > most.Load() {
				most.Store(n)
			}
			<-r.Context().Done()
			replies.Add(-1)
			return
		default:
			w.WriteHeader(http.StatusAccepted)
			return
		}
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":%s}`, m.ID, result)
	}))
	defer srv.Close()
	m, _ := manager(t, map[string]config.MCPServer{"srv": {URL: config.Address(srv.URL), Enabled: true}})
	tools(t, m)
	natstest.Eventually(t, patience, func() (bool, string) {
		n := most.Load()
		return n >= maxReplies/2, fmt.Sprintf("%d answers are under way", n)
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		m.Close()
	}()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("the service does not end")
	}
	// One connection may be ending while the next one begins.
	if n := most.Load(); n > 4*maxReplies {
		t.Errorf("%d answers were under way at a time", n)
	}
}

// F-126, F-136: lies in answers cost what they are about.
func TestLyingServer(t *testing.T) {
	t.Parallel()
	m, l := manager(t, map[string]config.MCPServer{"srv": own("garbage", nil)})
	list := tools(t, m)
	if !strings.Contains(l.String(), "Server v1 ready!") {
		t.Error("what is no message is not told")
	}
	r := call(t, list["srv__odd"], `{}`)
	for _, want := range []string{"one", `[content of kind "hologram", `, "[content of no kind, 4 bytes", "[image, image/png, 1500 bytes", "[audio, audio/wav, 3 bytes", "[resource file:///x, X", `[content of kind "text", `, "[resource mem:y]\ninside"} {
		if !strings.Contains(r.Text, want) {
			t.Errorf("%q is missing in %s", want, r.Text)
		}
	}
	if r := call(t, list["srv__deep"], `{}`); !r.IsError || !strings.Contains(r.Text, "nest") {
		t.Errorf("deep: %+v", r)
	}
	if r := call(t, list["srv__huge"], `{}`); !r.IsError || !strings.Contains(r.Text, "longer than") {
		t.Errorf("huge: %.200s", r.Text)
	}
	if r := call(t, list["srv__call"], `{}`); r.Text != "fine" {
		t.Errorf("afterwards: %+v", r)
	}
	if n := strings.Count(l.String(), "connected to"); n != 1 {
		t.Errorf("it was connected %d times", n)
	}
}

// Pages without end are read up to a bound.
func TestEndlessPages(t *testing.T) {
	t.Parallel()
	m, l := manager(t, map[string]config.MCPServer{"srv": own("pages", nil)})
	if n := len(tools(t, m)); n != maxPages || !strings.Contains(l.String(), "lists more than") {
		t.Errorf("%d tools", n)
	}
}

// F-138: a list that changes without notice is seen by the next task; a call of a tool
// that is gone is an ordinary error.
func TestListChanges(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "swap")
	m, _ := manager(t, map[string]config.MCPServer{"srv": own("swap", map[string]config.Secret{"TEST_MCP_FILE": config.Secret(file)})})
	old := tools(t, m)["srv__old"]
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := call(t, old, `{}`); !r.IsError || !strings.Contains(r.Text, "unknown tool old") {
		t.Errorf("result = %+v", r)
	}
	if list := tools(t, m); list["srv__new"] == nil || len(list) != 1 {
		t.Errorf("tools = %v", list)
	}
}

// F-132: a server that reads nothing does not hold a call with much to say, and other
// servers go on.
func TestServerDoesNotRead(t *testing.T) {
	t.Parallel()
	m, _ := manager(t, map[string]config.MCPServer{"deaf": own("deaf", nil), "srv": own("sdk", nil)})
	list := tools(t, m)
	ctx, cancel := context.WithCancel(within(t))
	done := make(chan error, 1)
	go func() {
		_, err := list["deaf__call"].Call(ctx, tool.Call{Args: json.RawMessage(`{"text":"` + strings.Repeat("x", 1<<20) + `"}`)})
		done <- err
	}()
	if r := call(t, list["srv__echo"], `{"text":"a"}`); r.IsError {
		t.Errorf("the other server: %+v", r)
	}
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error = %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the call does not return")
	}
}

// F-128: a server that ignores the end of its input and SIGTERM is killed after its
// grace, and leaves no zombie.
func TestServerDoesNotExit(t *testing.T) {
	t.Parallel()
	m, _ := manager(t, map[string]config.MCPServer{"srv": own("stubborn", nil)})
	if r := call(t, tools(t, m)["srv__call"], `{}`); r.Text != "fine" {
		t.Fatalf("result = %+v", r)
	}
	closed := make(chan struct{})
	go func() { defer close(closed); m.Close() }()
	select {
	case <-closed:
	case <-time.After(patience):
		t.Fatal("closing waits for a server that does not exit")
	}
}

// Values of env and headers are in no log, no message, and no result if they come from
// our environment; nothing else of our environment reaches a server.
func TestSecretsAreHidden(t *testing.T) {
	t.Setenv("TEST_MCP_UNRELATED", "unrelated-value")
	t.Setenv("TEST_MCP_TOKEN", "token-of-ours-123")
	m, l := manager(t, map[string]config.MCPServer{"srv": own("sdk", map[string]config.Secret{"TOKEN": "$TEST_MCP_TOKEN", "WORD": "literal-value"})})
	r := call(t, tools(t, m)["srv__env"], `{}`)
	if !strings.Contains(r.Text, "TOKEN=(hidden)") || strings.Contains(r.Text, "token-of-ours") || strings.Contains(r.Text, "unrelated-value") || !strings.Contains(r.Text, "PATH=") {
		t.Errorf("the server's environment is %s", r.Text)
	}
	natstest.Eventually(t, patience, func() (bool, string) {
		return strings.Contains(l.String(), "my environment is"), l.String()
	})
	if s := l.String(); strings.Contains(s, "token-of-ours") || strings.Contains(s, "literal-value") {
		t.Errorf("the log holds secrets: %s", s)
	}
	m2, l2 := manager(t, map[string]config.MCPServer{"srv": own("sdk", map[string]config.Secret{"TOKEN": "$TEST_MCP_NOT_SET"}),
		"web": {URL: "http://user:pass-word@127.0.0.1:1/hooks/path-secret/mcp?key=query-secret", Enabled: true, Headers: map[string]config.Secret{"Authorization": "Bearer header-secret"}}})
	_, missing, _ := m2.Tools(within(t), nil)
	text := fmt.Sprint(missing, l2)
	if len(missing) != 2 || !strings.Contains(text, "env.TOKEN: environment variable TEST_MCP_NOT_SET is not set") || !strings.Contains(text, "refused") {
		t.Errorf("missing = %+v", missing)
	}
	for _, secret := range []string{"pass-word", "path-secret", "query-secret", "header-secret"} {
		if strings.Contains(text, secret) {
			t.Errorf("%s is told: %s", secret, text)
		}
	}
	// Of two that begin alike none leaves an end, and no bound cuts one in two.
	both := hiding([]string{"secret-1", "secret-1-and-more", "secret-1-and"})
	if got := both.Replace("secret-1-and-more secret-1 secret-1-and"); got != "(hidden) (hidden) (hidden)" {
		t.Errorf("hidden is %s", got)
	}
	cut := resultOf(&sdk.CallToolResult{Content: []sdk.Content{&sdk.TextContent{Text: strings.Repeat("x", 60) + "secret-1-and-more" + strings.Repeat("y", 90)}}}, 99, both)
	if strings.Contains(cut.Text, "secr") {
		t.Errorf("a bounded result is %s", cut.Text)
	}
}

// A server over streamable HTTP and one over SSE: headers, results, and a session that
// the server forgets.
func TestHTTPServer(t *testing.T) {
	t.Parallel()
	s := sdkServer()
	var mu sync.Mutex
	handler := sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return s }, nil)
	var auth []string
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		auth = append(auth, r.Header.Get("Authorization"))
		h := handler
		mu.Unlock()
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(web.Close)
	events := httptest.NewServer(sdk.NewSSEHandler(func(*http.Request) *sdk.Server { return sdkServer() }, nil))
	t.Cleanup(events.Close)
	m, _ := manager(t, map[string]config.MCPServer{
		"web": {URL: config.Address(web.URL), Enabled: true, Headers: map[string]config.Secret{"Authorization": "Bearer abcdefgh"}},
		"sse": {URL: config.Address(events.URL), Enabled: true, Transport: config.TransportSSE},
	})
	t.Cleanup(func() {
		m.Close() // before the servers: they wait for their streams
		for session := range s.Sessions() {
			_ = session.Close() // the forgotten one
		}
	})
	list := tools(t, m)
	for _, name := range []string{"web__echo", "sse__echo"} {
		if r := call(t, list[name], `{"text":"hello"}`); r.Text != "you said hello" {
			t.Errorf("%s: %+v", name, r)
		}
	}
	if r := call(t, list["web__big"], `{}`); len(r.Text) > 21000 {
		t.Errorf("a big result has %d bytes", len(r.Text))
	}
	mu.Lock()
	for _, a := range auth {
		if a != "Bearer abcdefgh" {
			t.Errorf("authorization = %q", a)
		}
	}
	handler = sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return s }, nil) // knows no session
	mu.Unlock()
	if r := call(t, list["web__echo"], `{"text":"again"}`); r.Text != "you said again" {
		t.Errorf("after the session was forgotten: %+v", r)
	}
}

// No header goes to another host: neither by a redirect, nor because the server's
// stream says so.
func TestOtherHosts(t *testing.T) {
	t.Parallel()
	asked := make(chan string, 10)
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked <- r.Header.Get("Authorization") }))
	t.Cleanup(other.Close)
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "event: endpoint\ndata: %s/messages\n\n", other.URL)
			_ = http.NewResponseController(w).Flush() // a client that is gone ends it
			<-r.Context().Done()
			return
		}
		http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
	}))
	t.Cleanup(web.Close)
	headers := map[string]config.Secret{"Authorization": "Bearer abcdefgh"}
	m, _ := manager(t, map[string]config.MCPServer{
		"http": {URL: config.Address(web.URL), Enabled: true, Headers: headers},
		"sse":  {URL: config.Address(web.URL), Enabled: true, Headers: headers, Transport: config.TransportSSE},
	})
	_, missing, err := m.Tools(within(t), nil)
	if err != nil || len(missing) != 2 {
		t.Fatalf("missing = %v, %v", missing, err)
	}
	for _, x := range missing {
		if !strings.Contains(x.Reason, "another host") {
			t.Errorf("%+v", x)
		}
	}
	select {
	case a := <-asked:
		t.Errorf("the other host was asked, with %q", a)
	default:
	}
}

// Many tasks share one server.
func TestSharedServer(t *testing.T) {
	t.Parallel()
	m, l := manager(t, map[string]config.MCPServer{"srv": own("sdk", nil)})
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			list, _, err := m.Tools(within(t), nil)
			if err != nil {
				t.Error(err)
				return
			}
			for _, x := range list {
				if x.Spec().Name == "srv__echo" {
					r, err := x.Call(within(t), tool.Call{Args: json.RawMessage(fmt.Sprintf(`{"text":"n%d"}`, i))})
					if err != nil || r.Text != fmt.Sprintf("you said n%d", i) {
						t.Errorf("%+v, %v", r, err)
					}
				}
			}
		})
	}
	wg.Wait()
	if n := strings.Count(l.String(), "connected to"); n != 1 {
		t.Errorf("it was connected %d times", n)
	}
}

func TestProbe(t *testing.T) {
	t.Parallel()
	n, warnings, err := Probe(within(t), "srv", own("badtools", nil), os.LookupEnv)
	if err != nil || n != 4 || len(warnings) < 7 {
		t.Errorf("%d tools, %v, %v", n, warnings, err)
	}
	if _, _, err := Probe(within(t), "srv", config.MCPServer{Command: "/does/not/exist"}, os.LookupEnv); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("error = %v", err)
	}
}
