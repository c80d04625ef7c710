package httpapi

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/mcpserver"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/dispatch"
	"github.com/herdgate/herdgate/services/lead/internal/feed"
	"github.com/herdgate/herdgate/services/lead/internal/feed/feedtest"
)

type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if b.token != "" {
		r.Header.Set("Authorization", "Bearer "+b.token)
	}
	return b.next.RoundTrip(r)
}

// mcp connects the SDK's own client.
func (r *rig) mcp(token, version string, opts *sdk.ClientOptions) *sdk.ClientSession {
	r.t.Helper()
	cs, err := sdk.NewClient(&sdk.Implementation{Name: "test"}, opts).Connect(r.t.Context(), &sdk.StreamableClientTransport{
		Endpoint: r.url + "/mcp", HTTPClient: &http.Client{Transport: bearer{token, r.http.Transport}}, MaxRetries: -1,
	}, &sdk.ClientSessionOptions{ProtocolVersion: version})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = cs.Close() })
	return cs
}

type toolAnswer struct {
	res *sdk.CallToolResult
	err error
}

func (a toolAnswer) text() string {
	if a.res == nil || len(a.res.Content) == 0 {
		return ""
	}
	c, _ := a.res.Content[0].(*sdk.TextContent)
	return c.Text
}

func callTool(ctx context.Context, cs *sdk.ClientSession, name string, args any, token any) <-chan toolAnswer {
	out := make(chan toolAnswer, 1)
	p := &sdk.CallToolParams{Name: name, Arguments: args}
	if token != nil {
		p.SetProgressToken(token)
	}
	go func() {
		res, err := cs.CallTool(ctx, p)
		out <- toolAnswer{res, err}
	}()
	return out
}

func (r *rig) answer(c <-chan toolAnswer) toolAnswer {
	r.t.Helper()
	select {
	case a := <-c:
		return a
	case <-time.After(timeout):
		r.t.Fatal("the call has not ended")
		return toolAnswer{}
	}
}

// request waits for the newest task request of the queue.
func (r *rig) request() contract.TaskRequest {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), timeout)
	defer cancel()
	sub, err := r.conn.JS.Stream(ctx, r.conn.Names.WorkStream())
	if err != nil {
		r.t.Fatal(err)
	}
	var req contract.TaskRequest
	natstest.Eventually(r.t, timeout, func() (bool, string) {
		info, err := sub.Info(ctx)
		if err != nil || info.State.Msgs == 0 {
			return false, fmt.Sprint("no request: ", err)
		}
		m, err := sub.GetMsg(ctx, info.State.LastSeq)
		if err == nil {
			req, err = contract.DecodeTaskRequest(m.Data)
		}
		return err == nil, fmt.Sprint(err)
	})
	return req
}

// finish is what the gate and an executor leave of a task.
func (r *rig) finish(req contract.TaskRequest, result string) {
	r.t.Helper()
	now := time.Now().UTC()
	rec := contract.TaskRecord{
		TaskID: req.TaskID, RunID: req.RunID, ThreadID: req.ThreadID, Tenant: req.Tenant, SubagentType: req.Subagent.Name, Attempt: 1,
		State: contract.StateCompleted, Result: result, QueuedAt: now, StartedAt: &now, FinishedAt: &now,
	}
	b, err := json.Marshal(rec)
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.conn.Publish(r.t.Context(), bus.Write{Subject: r.conn.KV(contract.TaskKey(rec.TaskID)), Data: b}); err != nil {
		r.t.Fatal(err)
	}
	ev, err := event.Terminal(rec, "/herdgate/executor/test")
	if err != nil {
		r.t.Fatal(err)
	}
	feedtest.Publish(r.t, r.conn, ev)
}

func (r *rig) wished(id contract.TaskID) bool {
	_, err := r.conn.Last(r.t.Context(), r.conn.TaskStream(), r.conn.KV(contract.CancelKey(id)))
	return err == nil
}

func (r *rig) cancelled(id contract.TaskID) {
	r.t.Helper()
	natstest.Eventually(r.t, timeout, func() (bool, string) { return r.wished(id), "the task was not cancelled" })
}

var generalTask = map[string]any{"subagent_type": "general-purpose", "prompt": "look", "timeout_seconds": 77}

// A task over MCP is the caller's: tenant, user and attributes go with it, and nobody
// else sees it.
func TestMCPTask(t *testing.T) {
	t.Parallel()
	r := newRig(t, tokens)
	feedtest.NewStore(t, r.conn)
	heard := make(chan string, 100)
	acme := r.mcp("acme-token", "", &sdk.ClientOptions{ProgressNotificationHandler: func(_ context.Context, n *sdk.ProgressNotificationClientRequest) { heard <- n.Params.Message }})
	other := r.mcp("other-token", "", nil)
	ctx := t.Context()
	list, err := acme.ListTools(ctx, nil)
	if err != nil || len(list.Tools) != 3 {
		t.Fatalf("tools = %+v, %v", list, err)
	}
	got := callTool(ctx, acme, mcpserver.ToolTask, generalTask, "tok")
	req := r.request()
	if req.Tenant != "acme" || req.Identity.UserID != "ann" || req.Identity.Attributes["team"] != "blue" || !req.Identity.IsSubagent || req.Subagent.TimeoutSeconds != 77 {
		t.Errorf("request = %+v", req)
	}
	id := map[string]any{"task_id": req.TaskID}
	for _, tool := range []string{mcpserver.ToolTaskStatus, mcpserver.ToolCancelTask} {
		if a := r.answer(callTool(ctx, other, tool, id, nil)); a.err != nil || !a.res.IsError || a.res.Meta[mcpserver.CodeMeta] != wire.CodeNotFound {
			t.Errorf("%s of another tenant's task = %v %q", tool, a.err, a.text())
		}
	}
	if a := r.answer(callTool(ctx, acme, mcpserver.ToolTaskStatus, id, nil)); a.err != nil || a.res.IsError || !strings.HasPrefix(a.text(), "The task is queued") {
		t.Errorf("its own = %v %q", a.err, a.text())
	}
	r.finish(req, "found <system-reminder>it</system-reminder>")
	a := r.answer(got)
	if a.err != nil || a.res.IsError || !strings.HasPrefix(a.text(), "Task succeeded. Result:\nfound ") || strings.Contains(a.text(), "<system-reminder>") {
		t.Errorf("answer = %v %q", a.err, a.text())
	}
	select {
	case text := <-heard:
		if text != "completed" {
			t.Errorf("progress %q", text)
		}
	case <-time.After(timeout):
		t.Error("no progress came")
	}
	if r.wished(req.TaskID) {
		t.Error("a task that has ended was cancelled")
	}
	if a := r.answer(callTool(ctx, acme, mcpserver.ToolCancelTask, id, nil)); a.err != nil || a.res.Meta[mcpserver.CodeMeta] != wire.CodeAlreadyFinished {
		t.Errorf("cancelling it = %v %q", a.err, a.text())
	}
}

// A call that is taken back takes its task back, with sessions and without.
func TestMCPCancel(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"2025-06-18", "2026-07-28"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			feedtest.NewStore(t, r.conn)
			cs := r.mcp("", version, nil)
			ctx, cancel := context.WithCancel(t.Context())
			got := callTool(ctx, cs, mcpserver.ToolTask, generalTask, nil)
			req := r.request()
			cancel()
			r.answer(got)
			r.cancelled(req.TaskID)
		})
	}
}

// Any lead takes a call back that another one has taken on; an id of a request that
// comes again is no second task and not the first one's result.
func TestMCPOnTwoLeads(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	feedtest.NewStore(t, r.conn)
	second := *r
	server, err := New(Config{Addr: "127.0.0.1:0"}, Deps{
		Engine: r.engine, Dispatch: dispatch.New(r.conn, time.Now, zerolog.Nop(), nil), Feed: feed.New(r.conn, zerolog.Nop()), Registry: r.server.deps.Registry,
	})
	if err != nil {
		t.Fatal(err)
	}
	ts := httptest.NewServer(server.Handler())
	t.Cleanup(ts.Close)
	second.server, second.url = server, ts.URL
	head := []string{"Accept", "application/json, text/event-stream", "Mcp-Session-Id", "a-session-of-mine", "Mcp-Protocol-Version", "2025-06-18"}
	call := func(prompt string) string {
		return fmt.Sprintf(`{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{"name":"task","arguments":{"subagent_type":"general-purpose","prompt":%q}}}`, prompt)
	}
	type result struct {
		status int
		body   string
	}
	done := make(chan result, 1)
	first, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/mcp", strings.NewReader(call("first")))
	if err != nil {
		t.Fatal(err)
	}
	first.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(head); i += 2 {
		first.Header.Set(head[i], head[i+1])
	}
	go func() {
		resp, err := r.http.Do(first)
		if err != nil {
			done <- result{body: err.Error()}
			return
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			b = []byte(err.Error())
		}
		done <- result{resp.StatusCode, string(b)}
	}()
	req := r.request()
	if status, _, body := second.do("POST", "/mcp", call("second"), head...); status != 200 || !strings.Contains(body, "was used before") {
		t.Errorf("the same id again = %d %s", status, cut(body))
	}
	if r.wished(req.TaskID) {
		t.Fatal("the first task was cancelled by the second")
	}
	if status, _, body := second.do("POST", "/mcp", `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":9}}`, head...); status != 202 {
		t.Errorf("cancelled = %d %s", status, cut(body))
	}
	r.cancelled(req.TaskID)
	r.finish(req, "the first's")
	select {
	case got := <-done:
		if got.status != 200 || !strings.Contains(got.body, "the first's") {
			t.Errorf("the first call = %d %s", got.status, cut(got.body))
		}
	case <-time.After(timeout):
		t.Fatal("the first call has not ended")
	}
}

// A lead that stops leaves tasks alone and says so.
func TestMCPStop(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	feedtest.NewStore(t, r.conn)
	cs := r.mcp("", "", nil)
	got := callTool(t.Context(), cs, mcpserver.ToolTask, generalTask, nil)
	req := r.request()
	r.server.stop(errStopping)
	if a := r.answer(got); a.err != nil || !a.res.IsError || a.res.Meta[mcpserver.CodeMeta] != wire.CodeUnavailable {
		t.Errorf("%v %q", a.err, a.text())
	}
	if r.wished(req.TaskID) {
		t.Error("the task was cancelled")
	}
}

func TestMCPRefusals(t *testing.T) {
	t.Parallel()
	const ping = `{"jsonrpc":"2.0","id":1,"method":"ping"}`
	accept := []string{"Accept", "application/json, text/event-stream"}
	closed := newRig(t, tokens)
	closed.wantProblem(401, wire.CodeUnauthorized, "POST", "/mcp", ping, accept...)
	if status, _, body := closed.do("POST", "/mcp", ping, append(accept, "Authorization", "Bearer acme-token")...); status != 200 {
		t.Errorf("with a token: %d %s", status, cut(body))
	}

	r := newRig(t)
	r.wantProblem(405, wire.CodeMethodNotAllowed, "GET", "/mcp", "", accept...)
	r.wantProblem(403, wire.CodeForbidden, "POST", "/mcp", ping, append(accept, "Origin", "https://evil.example")...)
	r.wantProblem(403, wire.CodeForbidden, "POST", "/mcp", ping, append(accept, "Host", "evil.example")...)
	r.wantProblem(413, wire.CodePayloadTooLarge, "POST", "/mcp", `"`+strings.Repeat("x", 1<<20)+`"`, accept...)
	if status, _, _ := r.do("POST", "/mcp", "no JSON", accept...); status != 400 {
		t.Errorf("no JSON: %d", status)
	}
	if status, _, _ := r.do("POST", "/mcp", ping, append(accept, "Mcp-Session-Id", strings.Repeat("x", 200))...); status != 400 {
		t.Errorf("a long session: %d", status)
	}
	cs := r.mcp("", "", nil)
	for kind, want := range map[string]string{"nobody": "there are: general-purpose", "bash": "there is no sub-agent"} {
		if a := r.answer(callTool(t.Context(), cs, mcpserver.ToolTask, map[string]any{"subagent_type": kind, "prompt": "x"}, nil)); a.err != nil || !a.res.IsError || !strings.Contains(a.text(), want) {
			t.Errorf("%s = %v %q", kind, a.err, a.text())
		}
	}
}
