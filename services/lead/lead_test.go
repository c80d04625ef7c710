package lead

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 20 * time.Second

// lister asks for a listing of its workspace and quotes it.
type lister struct{}

func (lister) Name() string      { return "main" }
func (lister) ModelName() string { return "fake-1" }

func (lister) Generate(_ context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	last := req.Messages[len(req.Messages)-1]
	msg := model.Message{Role: model.RoleAssistant}
	if last.Role == model.RoleTool {
		msg.Text = "I see " + last.Text
	} else {
		msg.ToolCalls = []model.ToolCall{{ID: "w", Name: "write_file", Args: `{"path":"hello.txt","content":"hi"}`}, {ID: "l", Name: "read_file", Args: `{"path":"hello.txt"}`}}
	}
	return model.Response{Message: msg, Model: "fake-1"}, nil
}

type running struct {
	t    *testing.T
	conn *bus.Conn
	url  string
	stop func()
}

func start(t *testing.T, change ...func(*Config)) *running {
	t.Helper()
	srv, conn := natstest.New(t)
	models, err := model.NewRegistry(lister{})
	if err != nil {
		t.Fatal(err)
	}
	types, err := subagent.NewRegistry(subagent.Config{})
	if err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	cfg := Config{
		Name: "lead-1", Version: "1.2.3-test", SubagentsEnabled: true, WorkspaceRoot: t.TempDir(), RunLeaseTTL: 2 * time.Second,
		DrainTimeout: 100 * time.Millisecond, HTTP: HTTPConfig{Addr: "127.0.0.1:0"},
	}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(cfg, Deps{
		Bus: srv.Conn("lead"), Models: models, Subagents: types, Log: zerolog.Nop(),
		Ready: func(check string, err error) {
			if check == CheckName && err == nil {
				close(ready)
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	r := &running{t: t, conn: conn}
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run = %v", err)
			}
		case <-time.After(patience):
			t.Error("the service did not stop")
		}
	}
	t.Cleanup(r.stop)
	select {
	case <-ready:
	case err := <-done:
		t.Fatalf("Run = %v", err)
	case <-time.After(patience):
		t.Fatal("the service did not become ready")
	}
	r.url = "http://" + s.Addr().String()
	return r
}

func (r *running) post(path string, body any, into any) int {
	r.t.Helper()
	b, err := json.Marshal(body)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+path, bytes.NewReader(b))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := json.Unmarshal(out, into); err != nil {
		r.t.Fatalf("%s: %s: %v", path, out, err)
	}
	return resp.StatusCode
}

// ask calls an endpoint and returns its error code, "" if it has none.
func (r *running) ask(endpoint string, body string, into any) string {
	r.t.Helper()
	var msg *nats.Msg
	natstest.Eventually(r.t, patience, func() (bool, string) {
		ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
		defer cancel()
		var err error
		msg, err = r.conn.NC.RequestWithContext(ctx, r.conn.Names.Service("task", endpoint), []byte(body))
		return err == nil, "no answer"
	})
	if err := json.Unmarshal(msg.Data, into); err != nil {
		r.t.Fatalf("task.%s answered %s: %v", endpoint, msg.Data, err)
	}
	return msg.Header.Get("Nats-Service-Error-Code")
}

// A run over HTTP with the lead's own file tools, in the thread's workspace.
func TestRunOverHTTP(t *testing.T) {
	t.Parallel()
	r := start(t)
	var run wire.Run
	if status := r.post("/v1/runs?wait=true", map[string]any{"input": "look"}, &run); status != http.StatusOK {
		t.Fatalf("status %d: %+v", status, run)
	}
	if run.Status != contract.RunCompleted || run.Output == nil || !strings.Contains(*run.Output, "hi") {
		t.Errorf("run = %+v", run)
	}
	var again wire.Problem
	if status := r.post("/v1/runs/"+string(run.RunID)+"/cancel", nil, &again); status != http.StatusConflict || again.Code != wire.CodeAlreadyFinished {
		t.Errorf("cancel of an ended run: %d %+v", status, again)
	}
}

// EXEC-02, CANCEL-11: tasks over NATS, with the bodies of the HTTP API.
func TestTaskEndpoints(t *testing.T) {
	t.Parallel()
	r := start(t)
	var acc wire.TaskAccepted
	if code := r.ask("submit", `{"subagent_type":"general-purpose","prompt":"look\nhard","tenant":"acme","user_id":"u","user_role":"member","authz_attributes":{"team":"blue"}}`, &acc); code != "" {
		t.Fatalf("submit: %s", code)
	}
	m, err := r.conn.Last(t.Context(), r.conn.Names.WorkStream(), r.conn.Names.TaskRequest("acme", acc.TaskID))
	if err != nil {
		t.Fatal(err)
	}
	req, err := contract.DecodeTaskRequest(m.Data)
	if err != nil || req.Description != "look" || !req.Identity.IsSubagent || req.ParentModel != "main" {
		t.Errorf("request = %+v, %v", req, err)
	}
	if id := req.Identity; id.UserID != "u" || id.UserRole != "member" || id.Attributes["team"] != "blue" { // CTX-06
		t.Errorf("identity = %+v, want that of the request", id)
	}
	call := func(tenant string) string {
		return `{"tenant":"` + tenant + `","task_id":"` + string(acc.TaskID) + `"}`
	}
	var task wire.Task
	if code := r.ask("get", call("acme"), &task); code != "" || task.Status != contract.TaskQueued {
		t.Errorf("get: %q %+v", code, task)
	}
	var p wire.Problem
	if code := r.ask("get", call("default"), &p); code != "404" || p.Code != wire.CodeNotFound || !strings.Contains(p.Detail, string(acc.TaskID)) {
		t.Errorf("get for another tenant: %q %+v", code, p)
	}
	if code := r.ask("cancel", `{"task_id":"t_none"}`, &p); code != "404" {
		t.Errorf("cancel of an unknown task: %q %+v", code, p)
	}
	var c wire.Cancelling
	if code := r.ask("cancel", call("acme"), &c); code != "" || c.Status != wire.StatusCancelling {
		t.Errorf("cancel: %q %+v", code, c)
	}
	if _, err := r.conn.Last(t.Context(), r.conn.TaskStream(), r.conn.KV(contract.CancelKey(acc.TaskID))); err != nil {
		t.Errorf("the cancellation is not stored: %v", err)
	}
	for name, body := range map[string]string{
		"no JSON":       `{`,
		"deep":          strings.Repeat("[", 200),
		"unknown type":  `{"subagent_type":"nope","prompt":"x"}`,
		"blank prompt":  `{"subagent_type":"general-purpose","prompt":" "}`,
		"unknown model": `{"subagent_type":"general-purpose","prompt":"x","model":"nope"}`,
		"bad timeout":   `{"subagent_type":"general-purpose","prompt":"x","timeout_seconds":0}`,
		"bad tenant":    `{"subagent_type":"general-purpose","prompt":"x","tenant":"a.b"}`,
	} {
		if code := r.ask("submit", body, &p); code != "400" || p.Code != wire.CodeInvalidRequest {
			t.Errorf("submit with %s: %q %+v", name, code, p)
		}
	}
	if code := r.ask("submit", `{"subagent_type":"general-purpose","prompt":"`+strings.Repeat("x", contract.MaxPromptBytes+1)+`"}`, &p); code != "413" || p.Code != wire.CodePayloadTooLarge {
		t.Errorf("submit with a long prompt: %q %+v", code, p)
	}
}

// RECEIPT-15: a lead without receipts shows none, over NATS as over HTTP, whatever a
// record holds.
func TestNoReceiptsShown(t *testing.T) {
	t.Parallel()
	for _, on := range []bool{true, false} {
		settings := config.Default()
		settings.Verification.ReceiptsEnabled = on
		r := start(t, func(c *Config) { c.Settings = &settings })
		now := time.Now().UTC()
		data, err := json.Marshal(contract.TaskRecord{
			TaskID: "t_1", RunID: "r_1", ThreadID: "th", Tenant: contract.DefaultTenant, State: contract.StateCompleted, Attempt: 1, SubagentType: "x", QueuedAt: now, FinishedAt: &now,
			Result: "done", Receipts: []contract.Receipt{{ID: "r1", ToolName: "bash", Status: "success"}}, ReceiptVerdict: &contract.ReceiptVerdict{CitationResolved: true},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.conn.Publish(t.Context(), bus.Write{Subject: r.conn.KV(contract.TaskKey("t_1")), Data: data}); err != nil {
			t.Fatal(err)
		}
		var task wire.Task
		if code := r.ask("get", `{"task_id":"t_1"}`, &task); code != "" || task.Result == nil || (task.Receipts != nil) != on || (task.ReceiptVerdict != nil) != on {
			t.Errorf("on=%v: %q %+v", on, code, task)
		}
	}
}

// A service that is asked to stop gives its endpoints up.
func TestStop(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.stop()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := r.conn.NC.RequestWithContext(ctx, r.conn.Names.Service("task", "get"), []byte("{}")); err == nil {
		t.Error("an endpoint answers after the end")
	}
}
