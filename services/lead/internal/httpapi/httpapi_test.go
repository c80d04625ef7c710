package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/mcpserver"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/dispatch"
	"github.com/herdgate/herdgate/services/lead/internal/feed"
	"github.com/herdgate/herdgate/services/lead/internal/feed/feedtest"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	timeout = 60 * time.Second // only ends tests that hang
	parent  = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	traceID = "4bf92f3577b34da6a3ce929d0e0e4736"
)

// engine is a lead's engine of functions.
type engine struct {
	start  func(context.Context, runapi.RunInput) (contract.RunRecord, error)
	get    func(context.Context, contract.Tenant, contract.RunID) (contract.RunRecord, error)
	list   func(context.Context, runapi.RunQuery) (runapi.RunPage, error)
	cancel func(context.Context, contract.Tenant, contract.RunID) error
	wait   func(context.Context, contract.Tenant, contract.RunID) (contract.RunRecord, error)
}

func (e *engine) Start(ctx context.Context, in runapi.RunInput) (contract.RunRecord, error) {
	return e.start(ctx, in)
}
func (e *engine) Get(ctx context.Context, t contract.Tenant, id contract.RunID) (contract.RunRecord, error) {
	return e.get(ctx, t, id)
}
func (e *engine) List(ctx context.Context, q runapi.RunQuery) (runapi.RunPage, error) {
	return e.list(ctx, q)
}
func (e *engine) Cancel(ctx context.Context, t contract.Tenant, id contract.RunID) error {
	return e.cancel(ctx, t, id)
}
func (e *engine) Wait(ctx context.Context, t contract.Tenant, id contract.RunID) (contract.RunRecord, error) {
	return e.wait(ctx, t, id)
}

type rig struct {
	t      *testing.T
	engine *engine
	conn   *bus.Conn
	nats   *natstest.Server
	server *Server
	url    string
	http   *http.Client
	logs   *natstest.Output
}

// newRig serves the interface over real HTTP and a real NATS.
func newRig(t *testing.T, change ...func(*Config, *Deps)) *rig {
	t.Helper()
	srv, conn := natstest.New(t)
	reg, err := subagent.NewRegistry(subagent.Config{})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, engine: &engine{}, conn: conn, nats: srv, logs: &natstest.Output{}}
	log := zerolog.New(r.logs)
	tp := sdktrace.NewTracerProvider()
	cfg := Config{Addr: "127.0.0.1:0"}
	deps := Deps{
		Engine: r.engine, Dispatch: dispatch.New(conn, time.Now, log, tp), Feed: feed.New(conn, log),
		Registry: FromRegistry(reg, false), Log: log, TracerProvider: tp,
		Probes: telemetry.NewMetrics("lead", "test").Handler(),
	}
	for _, f := range change {
		f(&cfg, &deps)
	}
	r.server, err = New(cfg, deps)
	if err != nil {
		t.Fatal(err)
	}
	ts := httptest.NewServer(r.server.Handler())
	t.Cleanup(func() {
		r.server.stop(errStopping)
		ts.Close()
	})
	r.url, r.http = ts.URL, &http.Client{Transport: &http.Transport{}}
	t.Cleanup(r.http.CloseIdleConnections)
	return r
}

func (r *rig) client(token string) *client.Client {
	r.t.Helper()
	c, err := client.New(r.url, token, r.http)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// do sends a request and returns status, headers and body.
func (r *rig) do(method, path, body string, header ...string) (int, http.Header, string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), timeout)
	defer cancel()
	var rd io.Reader
	if body != "" {
		rd = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, r.url+path, rd)
	if err != nil {
		r.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
			continue
		}
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := r.http.Do(req)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp.StatusCode, resp.Header, string(b)
}

// wantProblem checks that an answer is a problem with status and code.
func (r *rig) wantProblem(status int, code string, method, path, body string, header ...string) wire.Problem {
	r.t.Helper()
	got, h, text := r.do(method, path, body, header...)
	var p wire.Problem
	err := json.Unmarshal([]byte(text), &p)
	if got != status || p.Code != code || p.Status != status || h.Get("Content-Type") != wire.ProblemType || err != nil {
		r.t.Errorf("%s %s = %d %s %s; want a problem %d %s", method, path, got, h.Get("Content-Type"), cut(text), status, code)
	}
	return p
}

func cut(s string) string {
	if len(s) > 300 {
		return s[:300] + "…"
	}
	return s
}

func runRecord(id contract.RunID, status contract.RunStatus) contract.RunRecord {
	return contract.RunRecord{RunID: id, ThreadID: "th", Tenant: "default", Status: status, Input: "in", TraceID: traceID, CreatedAt: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)}
}

// CTX-11: every accepted run names its run id. The whole of the input reaches
// the engine, null and [] apart.
func TestStartRun(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	inputs := make(chan runapi.RunInput, 1)
	r.engine.start = func(ctx context.Context, in runapi.RunInput) (contract.RunRecord, error) {
		inputs <- in
		sc := trace.SpanContextFromContext(ctx)
		if sc.TraceID().String() != traceID || sc.SpanID().String() == "00f067aa0ba902b7" {
			t.Errorf("the engine runs under %v; want a span of the server in the caller's trace", sc)
		}
		return runRecord("r_1", contract.RunRunning), nil
	}
	status, h, text := r.do("POST", "/v1/runs", `{"input":"go","thread_id":"th ü","model":"m","max_concurrent_subagents":2,"max_total_subagents":9,
		"subagent_enabled":false,"allowed_subagents":[],"available_skills":[],"metadata":{"a":"b"},"tags":["x"]}`, "Traceparent", parent)
	if status != http.StatusAccepted || h.Get("Location") != "/v1/runs/r_1" {
		t.Fatalf("POST /v1/runs = %d %v %s", status, h, text)
	}
	var acc map[string]any
	if err := json.Unmarshal([]byte(text), &acc); err != nil || acc["run_id"] != "r_1" || acc["thread_id"] != "th" || acc["status"] != "running" || acc["trace_id"] != traceID || len(acc) != 4 {
		t.Errorf("answer = %s", text)
	}
	in := <-inputs
	if in.Tenant != "default" || in.Input != "go" || in.ThreadID != "th ü" || in.Model != "m" || *in.MaxConcurrentSubagents != 2 || *in.MaxTotalSubagents != 9 ||
		*in.SubagentEnabled || in.AllowedSubagents == nil || len(in.AllowedSubagents) != 0 || in.AvailableSkills == nil || in.Metadata["a"] != "b" || in.Tags[0] != "x" {
		t.Errorf("engine got %+v", in)
	}
	if status, _, text := r.do("POST", "/v1/runs", `{"input":"go","allowed_subagents":null,"available_skills":null}`, "Traceparent", parent); status != http.StatusAccepted {
		t.Fatalf("null allowed_subagents = %d %s", status, text)
	}
	if in := <-inputs; in.AllowedSubagents != nil || in.AvailableSkills != nil || in.MaxTotalSubagents != nil || in.SubagentEnabled != nil {
		t.Errorf("null and absent fields arrived as %+v", in)
	}
	// REG-15: a name that nobody has is not refused; it permits nothing.
	if status, _, text := r.do("POST", "/v1/runs", `{"input":"go","allowed_subagents":["nobody"]}`, "Traceparent", parent); status != http.StatusAccepted {
		t.Fatalf("unknown allowed_subagents = %d %s", status, text)
	}
	if in := <-inputs; len(in.AllowedSubagents) != 1 {
		t.Errorf("engine got %+v", in)
	}
}

func TestStartRunRefusesBadInput(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(_ *Config, d *Deps) { d.Models = []string{"main"} })
	for body, status := range map[string]int{
		`{}`:             422,
		`{"input":""}`:   422,
		`{"input":"  "}`: 400,
		`{"input":7}`:    422,
		`{"input":"x","max_total_subagents":true}`:                           422,
		`{"input":"x","unknown_field":1}`:                                    422,
		`{"input":"x","thread_id":"a\u0007"}`:                                400,
		`{"input":"x","model":"none"}`:                                       400,
		`{"input":"x","tags":[""]}`:                                          400,
		`{"input":"x"`:                                                       400,
		`{"input":"x","allowed_subagents":"general-purpose"}`:                422,
		`{"input":"x","metadata":{"k":"` + strings.Repeat("v", 5000) + `"}}`: 400,
		`{"input":"x","metadata":` + strings.Repeat(`{"a":`, 200) + `1` + strings.Repeat("}", 201): 400,
	} {
		r.wantProblem(status, wire.CodeInvalidRequest, "POST", "/v1/runs", body)
	}
	r.wantProblem(413, wire.CodePayloadTooLarge, "POST", "/v1/runs", `{"input":"`+strings.Repeat("z", 1<<20)+`"}`)
	// Within the limit of a body, above that of a prompt.
	for path, body := range map[string]string{
		"/v1/runs":  `{"input":"` + strings.Repeat("y", runapi.MaxInputBytes+1) + `"}`,
		"/v1/tasks": `{"subagent_type":"general-purpose","prompt":"` + strings.Repeat("y", contract.MaxPromptBytes+1) + `"}`,
	} {
		p := r.wantProblem(413, wire.CodePayloadTooLarge, "POST", path, body)
		if !strings.Contains(p.Detail, fmt.Sprintf("has %d bytes; want at most %d", contract.MaxPromptBytes+1, contract.MaxPromptBytes)) || len(p.Detail) > 500 {
			t.Errorf("%s is refused with %q", path, p.Detail)
		}
	}
	r.wantProblem(415, wire.CodeInvalidRequest, "POST", "/v1/runs", `input=x`, "Content-Type", "application/x-www-form-urlencoded")
	r.wantProblem(422, wire.CodeInvalidRequest, "GET", "/v1/runs?status=odd", "")
	r.wantProblem(422, wire.CodeInvalidRequest, "GET", "/v1/runs?limit=0", "")
	r.wantProblem(422, wire.CodeInvalidRequest, "GET", "/v1/events?limit=2001", "")
	r.wantProblem(422, wire.CodeInvalidRequest, "GET", "/v1/events?after_seq=-1", "")
	r.wantProblem(400, wire.CodeInvalidRequest, "GET", "/v1/events?run_id=a.%3E", "", "Accept", "text/event-stream")
	r.wantProblem(400, wire.CodeInvalidRequest, "GET", "/v1/events", "", "Accept", "text/event-stream", "Last-Event-ID", "abc")
	r.wantProblem(404, wire.CodeNotFound, "GET", "/v1/nothing", "")
	r.wantProblem(405, wire.CodeMethodNotAllowed, "DELETE", "/v1/runs", "")
}

func TestRuns(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	done := runRecord("r_1", contract.RunCompleted)
	done.Output = "the answer <&>"
	r.engine.get = func(_ context.Context, tenant contract.Tenant, id contract.RunID) (contract.RunRecord, error) {
		switch id {
		case "r_1":
			return done, nil
		case "r_panic":
			panic("boom")
		case "r_broken":
			return done, errors.New("secret path /etc/x")
		case "r_away":
			return done, fmt.Errorf("run: %w", leaderr.ErrUnavailable)
		}
		return done, fmt.Errorf("run %s of %s: %w", id, tenant, leaderr.ErrNotFound)
	}
	r.engine.cancel = func(_ context.Context, _ contract.Tenant, id contract.RunID) error {
		if id == "r_1" {
			return fmt.Errorf("cancel: %w", leaderr.RunFinished(id, contract.RunCompleted))
		}
		return nil
	}
	var asked atomic.Pointer[runapi.RunQuery]
	r.engine.list = func(_ context.Context, q runapi.RunQuery) (runapi.RunPage, error) {
		asked.Store(&q)
		return runapi.RunPage{Runs: []contract.RunRecord{done}, NextCursor: "next"}, nil
	}
	status, _, text := r.do("GET", "/v1/runs/r_1", "")
	var run map[string]any
	if err := json.Unmarshal([]byte(text), &run); err != nil || status != 200 || run["output"] != "the answer <&>" || run["error"] != nil || run["finished_at"] != nil {
		t.Errorf("GET run = %d %s", status, text)
	}
	for _, key := range []string{"run_id", "thread_id", "status", "output", "error", "stop_reason", "usage", "delegations", "trace_id", "created_at", "finished_at"} {
		if _, ok := run[key]; !ok {
			t.Errorf("GET run has no %s", key)
		}
	}
	r.wantProblem(404, wire.CodeNotFound, "GET", "/v1/runs/r_2", "")
	r.wantProblem(404, wire.CodeNotFound, "GET", "/v1/runs/r.2", "")
	r.wantProblem(503, wire.CodeUnavailable, "GET", "/v1/runs/r_away", "")
	if p := r.wantProblem(500, wire.CodeInternal, "GET", "/v1/runs/r_broken", ""); strings.Contains(p.Detail, "secret") {
		t.Errorf("an internal error tells its text: %q", p.Detail)
	}
	r.wantProblem(500, wire.CodeInternal, "GET", "/v1/runs/r_panic", "")
	if l := r.logs.String(); !strings.Contains(l, "boom") || !strings.Contains(l, "secret path") {
		t.Error("the log does not have the panic and the internal error")
	}
	if p := r.wantProblem(409, wire.CodeAlreadyFinished, "POST", "/v1/runs/r_1/cancel", ""); p.FinishedStatus != "completed" {
		t.Errorf("finished_status = %q", p.FinishedStatus)
	}
	if status, _, text := r.do("POST", "/v1/runs/r_3/cancel", ""); status != 202 || !strings.Contains(text, `"cancelling"`) {
		t.Errorf("cancel = %d %s", status, text)
	}
	page, err := r.client("").ListRuns(t.Context(), client.RunQuery{ThreadID: "t h", Status: contract.RunCompleted, Limit: 7, Cursor: "c"})
	if err != nil || len(page.Runs) != 1 || page.NextCursor != "next" {
		t.Errorf("list = %+v, %v", page, err)
	}
	if q := asked.Load(); *q != (runapi.RunQuery{Tenant: "default", ThreadID: "t h", Status: "completed", Limit: 7, Cursor: "c"}) {
		t.Errorf("the engine was asked %+v", *q)
	}
}

func TestStartRunWait(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.engine.start = func(context.Context, runapi.RunInput) (contract.RunRecord, error) {
		return runRecord("r_1", contract.RunRunning), nil
	}
	r.engine.wait = func(_ context.Context, _ contract.Tenant, id contract.RunID) (contract.RunRecord, error) {
		return runRecord(id, contract.RunFailed), nil
	}
	run, err := r.client("").RunToEnd(t.Context(), wire.RunRequest{Input: "go"})
	if err != nil || run.Status != contract.RunFailed || run.RunID != "r_1" {
		t.Errorf("wait=true = %+v, %v", run, err)
	}
	r.engine.wait = func(ctx context.Context, _ contract.Tenant, _ contract.RunID) (contract.RunRecord, error) {
		r.server.stop(errStopping)
		<-ctx.Done()
		return contract.RunRecord{}, ctx.Err()
	}
	r.wantProblem(503, wire.CodeUnavailable, "POST", "/v1/runs?wait=true", `{"input":"go"}`)
}

// The deadline for the body must not end a request that is answered late, and
// a body that never comes must not hold one.
func TestBodyTimeout(t *testing.T) {
	t.Parallel()
	const limit = 300 * time.Millisecond
	r := newRig(t, func(c *Config, _ *Deps) { c.BodyTimeout = limit })
	r.engine.start = func(context.Context, runapi.RunInput) (contract.RunRecord, error) {
		return runRecord("r_1", contract.RunRunning), nil
	}
	r.engine.wait = func(ctx context.Context, _ contract.Tenant, id contract.RunID) (contract.RunRecord, error) {
		select {
		case <-ctx.Done():
			return contract.RunRecord{}, ctx.Err()
		case <-time.After(2 * limit):
			return runRecord(id, contract.RunCompleted), nil
		}
	}
	if status, _, text := r.do("POST", "/v1/runs?wait=true", `{"input":"go"}`); status != 200 {
		t.Errorf("an answer after the body's deadline = %d %s, want 200", status, text)
	}
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(timeout))
	fmt.Fprint(conn, "POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
	answer, err := io.ReadAll(conn)
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 400") {
		t.Errorf("a body that never comes = %q, %v; want 400", answer, err)
	}
}

func TestTasks(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ctx := t.Context()
	c := r.client("")
	prompt := "\n  Look at the first line of this prompt, which is rather long and goes on and on and on, well over eighty\nmore"
	status, h, text := r.do("POST", "/v1/tasks", `{"subagent_type":"general-purpose","prompt":`+quote(prompt)+`,"acceptance_criteria":["a","b"],"model":"m","timeout_seconds":77}`, "traceparent", parent)
	var acc map[string]any
	if err := json.Unmarshal([]byte(text), &acc); err != nil || status != 202 || acc["status"] != "queued" || acc["queue_position"] != 0.0 || len(acc) != 5 {
		t.Fatalf("POST /v1/tasks = %d %s", status, text)
	}
	id, run := acc["task_id"].(string), acc["run_id"].(string)
	// CTX-11: without a lead every call still has a run id of its own.
	if !strings.HasPrefix(id, "t_") || !strings.HasPrefix(run, "r_") || acc["thread_id"] == "" || h.Get("Location") != "/v1/tasks/"+id || strings.ToLower(id) != id {
		t.Errorf("ids: %s", text)
	}
	m, err := r.conn.Last(ctx, r.conn.Names.WorkStream(), r.conn.Names.TaskRequest("default", contract.TaskID(id)))
	if err != nil {
		t.Fatal(err)
	}
	req, err := contract.DecodeTaskRequest(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	if req.Prompt != prompt || req.Subagent.Model != "m" || req.Subagent.TimeoutSeconds != 77 || req.Subagent.SystemPrompt == "" || len(req.AcceptanceCriteria) != 2 || !req.Identity.IsSubagent {
		t.Errorf("request = %+v", req)
	}
	if d := []rune(req.Description); len(d) != 80 || !strings.HasPrefix(req.Description, "Look at the first line") || d[79] != '…' {
		t.Errorf("description = %q, want the beginning of the prompt", req.Description)
	}
	if got := m.Header.Get("traceparent"); !strings.HasPrefix(got, "00-"+traceID) {
		t.Errorf("the request's traceparent is %q; want the caller's trace", got)
	}

	task, err := c.GetTask(ctx, contract.TaskID(id))
	if err != nil || task.Status != contract.TaskQueued || task.TraceID != traceID {
		t.Errorf("GET task = %+v, %v", task, err)
	}
	page, err := c.ListTasks(ctx, client.TaskQuery{RunID: contract.RunID(run), Status: contract.TaskQueued})
	if err != nil || len(page.Tasks) != 1 {
		t.Errorf("list = %+v, %v", page, err)
	}
	if err := c.CancelTask(ctx, contract.TaskID(id)); err != nil {
		t.Errorf("cancel: %v", err)
	}
	if _, err := r.conn.Last(ctx, r.conn.TaskStream(), r.conn.KV(contract.CancelKey(contract.TaskID(id)))); err != nil {
		t.Errorf("the cancellation is not durable: %v", err)
	}
	rec := contract.TaskRecord{TaskID: contract.TaskID(id), RunID: req.RunID, ThreadID: req.ThreadID, Tenant: "default", State: contract.StateTimedOut}
	b, _ := json.Marshal(rec)
	if _, err := r.conn.Publish(ctx, bus.Write{Subject: r.conn.KV(contract.TaskKey(rec.TaskID)), Data: b}); err != nil {
		t.Fatal(err)
	}
	var e *client.Error
	if err := c.CancelTask(ctx, rec.TaskID); !errors.As(err, &e) || e.Status != 409 || e.Code != wire.CodeAlreadyFinished || e.FinishedStatus != "timed_out" {
		t.Errorf("cancelling an ended task = %v, want 409 with its status", err)
	}

	for body, status := range map[string]int{
		`{"subagent_type":"bash","prompt":"x"}`:                                                                 400, // hidden without shell
		`{"subagent_type":"nobody","prompt":"x"}`:                                                               400,
		`{"subagent_type":"general-purpose","prompt":" "}`:                                                      400,
		`{"subagent_type":"general-purpose"}`:                                                                   422,
		`{"subagent_type":"general-purpose","prompt":"x","timeout_seconds":0}`:                                  422,
		`{"subagent_type":"general-purpose","prompt":"x","timeout_seconds":true}`:                               422,
		`{"subagent_type":"general-purpose","prompt":"x","acceptance_criteria":"no"}`:                           422,
		`{"subagent_type":"general-purpose","prompt":"x","thread_id":"\u0000"}`:                                 400,
		`{"subagent_type":"general-purpose","prompt":"` + strings.Repeat("x", contract.MaxPromptBytes+1) + `"}`: 413,
	} {
		code := wire.CodeInvalidRequest
		if status == 413 {
			code = wire.CodePayloadTooLarge
		}
		if p := r.wantProblem(status, code, "POST", "/v1/tasks", body); strings.Contains(body, "nobody") && !strings.Contains(p.Detail, "general-purpose") {
			t.Errorf("unknown type: %q; want the visible names", p.Detail)
		}
	}
	if p := r.wantProblem(404, wire.CodeNotFound, "GET", "/v1/tasks/t_none", ""); !strings.Contains(p.Detail, "task t_none: not found") {
		t.Errorf("an unknown task is told as %q", p.Detail)
	}
	r.wantProblem(404, wire.CodeNotFound, "POST", "/v1/tasks/t_none/cancel", "")
	r.wantProblem(400, wire.CodeInvalidRequest, "GET", "/v1/tasks?cursor=%21", "")
	agents, err := c.Subagents(ctx)
	if err != nil || len(agents) != 1 || agents[0].Name != "general-purpose" || agents[0].Source != "builtin" {
		t.Errorf("subagents = %+v, %v", agents, err)
	}
	if a, err := c.Subagent(ctx, "general-purpose"); err != nil || !a.Enabled {
		t.Errorf("subagent = %+v, %v", a, err)
	}
	r.wantProblem(404, wire.CodeNotFound, "GET", "/v1/subagents/bash", "")
}

func quote(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

func TestQueueFull(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := r.client("")
	for range 67 {
		if _, err := c.SubmitTask(t.Context(), wire.TaskRequest{SubagentType: "general-purpose", Prompt: "x"}); err != nil {
			t.Fatal(err)
		}
	}
	var e *client.Error
	if _, err := c.SubmitTask(t.Context(), wire.TaskRequest{SubagentType: "general-purpose", Prompt: "x"}); !errors.As(err, &e) || e.Status != 429 || e.Code != wire.CodeQueueFull || e.RetryAfter <= 0 {
		t.Errorf("task 68 = %v, want 429 queue_full with Retry-After", err)
	}
	if a := r.answer(callTool(t.Context(), r.mcp("", "", nil), mcpserver.ToolTask, generalTask, nil)); a.err != nil || !a.res.IsError || a.res.Meta[mcpserver.CodeMeta] != wire.CodeQueueFull {
		t.Errorf("over MCP = %v %q, want queue_full", a.err, a.text())
	}
}

func TestAdmission(t *testing.T) {
	t.Parallel()
	r := newRig(t, tokens)
	sub, err := r.conn.NC.Subscribe(admissionapi.Subject(r.conn.Names), func(m *nats.Msg) {
		b, _ := json.Marshal(admissionapi.Status{Leader: "gate", MaxRunning: 3, Running: 1, Slots: []admissionapi.Slot{{Slot: 1, TaskID: "t_1", Executor: "ex"}}})
		_ = m.Respond(b)
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	admin, err := r.client("admin-token").Admission(t.Context())
	if err != nil || admin.Leader != "gate" || admin.Slots[0].TaskID != "t_1" {
		t.Errorf("admission for an administrator = %+v, %v", admin, err)
	}
	user, err := r.client("acme-token").Admission(t.Context())
	if err != nil || user.Running != 1 || user.Slots[0].TaskID != "" {
		t.Errorf("admission for a user = %+v, %v; want numbers without tasks of others", user, err)
	}
}

func TestUnavailableWithoutNATS(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wantProblem(503, wire.CodeUnavailable, "GET", "/v1/admission", "")
	r.wantProblem(503, wire.CodeUnavailable, "GET", "/v1/events", "") // no store
	r.nats.Kill()
	r.wantProblem(503, wire.CodeUnavailable, "GET", "/v1/tasks/t_1", "")
	if p := r.wantProblem(503, wire.CodeUnavailable, "GET", "/v1/tasks", ""); strings.Contains(p.Detail, "buffer") || !strings.Contains(p.Detail, "NATS") {
		t.Errorf("without NATS the reason is %q; want one that says so", p.Detail)
	}
	r.wantProblem(503, wire.CodeUnavailable, "GET", "/v1/events", "", "Accept", "text/event-stream")
	if status, _, _ := r.do("GET", "/healthz", ""); status != 200 {
		t.Errorf("healthz = %d", status)
	}
}

// tokens switches to two users of tenants and an administrator.
func tokens(c *Config, _ *Deps) {
	env := map[string]string{"A": "acme-token", "B": "other-token", "C": "admin-token"}
	c.AuthMode, c.Addr = AuthTokens, "0.0.0.0:0"
	c.Getenv = func(k string) string { return env[k] }
	c.Tokens = []Token{
		{Name: "acme", TokenEnv: "A", Tenant: "acme", UserID: "ann", Roles: []string{"user"}, Attributes: map[string]string{"team": "blue"}},
		{Name: "other", TokenEnv: "B", Tenant: "other", UserID: "bob"},
		{Name: "admin", TokenEnv: "C", Tenant: "acme", UserID: "root", Roles: []string{"admin"}},
	}
}

// Tenants do not see each other; nothing below /v1/ is open without a token.
func TestTokensAndTenants(t *testing.T) {
	t.Parallel()
	r := newRig(t, tokens)
	ctx := t.Context()
	for _, h := range []string{"", "Bearer", "Bearer wrong", "Basic acme-token", "acme-token", "Bearer acme-token x"} {
		for _, path := range []string{"/v1/runs", "/v1/events", "/v1/tasks/t_1", "/v1/none"} {
			r.wantProblem(401, wire.CodeUnauthorized, "GET", path, "", "Authorization", h)
		}
	}
	if status, _, _ := r.do("GET", "/healthz", ""); status != 200 {
		t.Errorf("healthz without a token = %d", status)
	}
	acme, other := r.client("acme-token"), r.client("other-token")
	acc, err := acme.SubmitTask(ctx, wire.TaskRequest{SubagentType: "general-purpose", Prompt: "x", ThreadID: "shared"})
	if err != nil {
		t.Fatal(err)
	}
	m, err := r.conn.Last(ctx, r.conn.Names.WorkStream(), r.conn.Names.TaskRequest("acme", acc.TaskID))
	if err != nil {
		t.Fatal(err)
	}
	if req, err := contract.DecodeTaskRequest(m.Data); err != nil || req.Identity.UserID != "ann" || req.Identity.UserRole != "user" || req.Identity.Attributes["team"] != "blue" {
		t.Errorf("identity = %+v, %v; want that of the token", req.Identity, err)
	}
	var e *client.Error
	if _, err := other.GetTask(ctx, acc.TaskID); !errors.As(err, &e) || e.Code != wire.CodeNotFound {
		t.Errorf("another tenant's task = %v, want not_found", err)
	}
	if err := other.CancelTask(ctx, acc.TaskID); !errors.As(err, &e) || e.Code != wire.CodeNotFound {
		t.Errorf("cancelling another tenant's task = %v, want not_found", err)
	}
	if p, err := other.ListTasks(ctx, client.TaskQuery{}); err != nil || len(p.Tasks) != 0 {
		t.Errorf("another tenant's list = %+v, %v", p, err)
	}
	r.engine.get = func(_ context.Context, tenant contract.Tenant, id contract.RunID) (contract.RunRecord, error) {
		if tenant != "acme" {
			return contract.RunRecord{}, leaderr.ErrNotFound
		}
		return runRecord(id, contract.RunRunning), nil
	}
	if _, err := acme.GetRun(ctx, "r_1"); err != nil {
		t.Errorf("own run: %v", err)
	}
	if _, err := other.GetRun(ctx, "r_1"); !errors.As(err, &e) || e.Code != wire.CodeNotFound {
		t.Errorf("another tenant's run = %v, want not_found", err)
	}
	// The same thread and run id in two tenants are two feeds.
	feedtest.Publish(t, r.conn, feedtest.Run{Tenant: "acme", Thread: "shared", ID: "r_1"}.End(contract.RunCompleted))
	end := feedtest.Run{Tenant: "other", Thread: "shared", ID: "r_1"}.End(contract.RunFailed)
	end.ID += ".other"
	feedtest.Publish(t, r.conn, end)
	for c, want := range map[*client.Client]string{acme: contract.RecordRunCompleted, other: contract.RecordRunFailed} {
		var got []string
		err := c.Stream(ctx, client.EventQuery{RunID: "r_1"}, 0, func(rec contract.EventRecord) error { got = append(got, rec.EventType); return nil })
		if err != nil || !slices.Equal(got, []string{want}) {
			t.Errorf("feed = %v, %v; want %s alone", got, err, want)
		}
	}
	if strings.Contains(r.logs.String(), "acme-token") {
		t.Error("a token is in the log")
	}
}

func TestNewRefusesUnsafeConfigurations(t *testing.T) {
	t.Parallel()
	env := map[string]string{"A": "same", "B": "same"}
	for name, c := range map[string]Config{
		"all addresses":    {Addr: "0.0.0.0:8484"},
		"empty host":       {Addr: ":8484"},
		"other host":       {Addr: "192.168.1.2:8484"},
		"a name":           {Addr: "lead.example:8484"},
		"no port":          {Addr: "127.0.0.1"},
		"unknown mode":     {Addr: "127.0.0.1:0", AuthMode: "maybe"},
		"no tokens":        {Addr: "127.0.0.1:0", AuthMode: AuthTokens},
		"unset variable":   {Addr: "127.0.0.1:0", AuthMode: AuthTokens, Tokens: []Token{{Name: "x", TokenEnv: "NONE"}}},
		"bad tenant":       {Addr: "127.0.0.1:0", AuthMode: AuthTokens, Tokens: []Token{{Name: "x", TokenEnv: "A", Tenant: "a.b"}}},
		"same token twice": {Addr: "127.0.0.1:0", AuthMode: AuthTokens, Tokens: []Token{{Name: "x", TokenEnv: "A"}, {Name: "y", TokenEnv: "B"}}},
	} {
		c.Getenv = func(k string) string { return env[k] }
		if _, err := newAuthenticator(c.withDefaults()); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0", "localhost:8484", "127.8.0.1:1"} {
		if _, err := newAuthenticator(Config{Addr: addr}.withDefaults()); err != nil {
			t.Errorf("%s: %v", addr, err)
		}
	}
	if _, err := newAuthenticator(Config{Addr: "0.0.0.0:1"}.withDefaults()); !errors.Is(err, ErrNotLoopback) {
		t.Errorf("0.0.0.0 = %v, want ErrNotLoopback", err)
	}
}

func TestPagesOfOtherOriginsAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wantProblem(403, wire.CodeForbidden, "POST", "/v1/runs", `{"input":"x"}`, "Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site")
	r.wantProblem(403, wire.CodeForbidden, "GET", "/v1/tasks", "", "Host", "evil.example")
}

// F-148: line breaks in headers and texts from outside never become headers or
// protocol of NATS.
func TestLineBreaksFromOutside(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	spy, err := r.conn.NC.SubscribeSync("qa.>")
	if err != nil {
		t.Fatal(err)
	}
	values := []string{"ok 1\r\nPUB qa.spy 2\r\nhi\r\n", "k=v\r\nX-Evil: 1", "a%0d%0aPUB qa.spy 2", "line\u2028sep", "nul\x00end"}
	for _, v := range values {
		// Raw bytes, as no client library would send them.
		conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(timeout))
		body := `{"subagent_type":"general-purpose","prompt":"x","description":` + quote(v) + `}`
		fmt.Fprintf(conn, "POST /v1/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\ntraceparent: %s\r\ntracestate: %s\r\nbaggage: %s\r\nIdempotency-Key: %s\r\n\r\n%s", len(body), parent, v, v, v, body)
		_, _ = io.Copy(io.Discard, conn)
		_ = conn.Close()
		// The description alone, over a well-formed request.
		if status, _, text := r.do("POST", "/v1/tasks", body); status != 202 {
			t.Errorf("description %q = %d %s", v, status, text)
		}
	}
	info, err := r.conn.JS.Stream(t.Context(), r.conn.Names.WorkStream())
	if err != nil {
		t.Fatal(err)
	}
	last := info.CachedInfo().State.LastSeq
	if last < uint64(len(values)) {
		t.Fatalf("the queue has %d requests, want at least %d", last, len(values))
	}
	allowed := []string{"Content-Type", "Nats-Msg-Id", "traceparent", "tracestate"}
	for seq := uint64(1); seq <= last; seq++ {
		m, err := r.conn.Get(t.Context(), r.conn.Names.WorkStream(), seq)
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range m.Header {
			if !slices.Contains(allowed, k) || strings.ContainsAny(strings.Join(v, ""), "\r\n\x00") {
				t.Errorf("request %d has header %q: %q", seq, k, v)
			}
		}
	}
	if err := r.conn.NC.Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, _ := spy.Pending(); n != 0 {
		t.Errorf("%d messages got out on qa.>", n)
	}
}

func TestOpenAPI(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	raw, err := r.client("").OpenAPI(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		OpenAPI string                    `json:"openapi"`
		Paths   map[string]map[string]any `json:"paths"`
	}
	if err := json.Unmarshal(raw, &doc); err != nil || !strings.HasPrefix(doc.OpenAPI, "3.1") {
		t.Fatalf("openapi = %q, %v", doc.OpenAPI, err)
	}
	for path, methods := range map[string][]string{
		"/v1/runs": {"get", "post"}, "/v1/runs/{run_id}": {"get"}, "/v1/runs/{run_id}/cancel": {"post"},
		"/v1/tasks": {"get", "post"}, "/v1/tasks/{task_id}": {"get"}, "/v1/tasks/{task_id}/cancel": {"post"},
		"/v1/events": {"get"}, "/v1/admission": {"get"}, "/v1/subagents": {"get"}, "/mcp": {"post"},
	} {
		for _, m := range methods {
			if doc.Paths[path][m] == nil {
				t.Errorf("the document lacks %s %s", m, path)
			}
		}
	}
	schemas := r.server.api.OpenAPI().Components.Schemas.Map()
	if schemas["Run"].AdditionalProperties != true || schemas["EventRecord"].AdditionalProperties != true || schemas["RunRequest"].AdditionalProperties != false {
		t.Error("answers must be open for later fields (I11), requests closed")
	}
	for _, want := range []string{`"queue_position"`, `"code"`, "text/event-stream", `"next_after_seq"`, wire.ProblemType} {
		if !bytes.Contains(raw, []byte(want)) {
			t.Errorf("the document does not mention %s", want)
		}
	}
	for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
		if status, _, text := r.do("GET", path, ""); status != 200 {
			t.Errorf("%s = %d %s", path, status, cut(text))
		}
	}
}
