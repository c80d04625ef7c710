package run

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/lead/internal/dispatch"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 20 * time.Second

// scripted is a model that answers by a function and keeps what it was asked.
// It is as strict about a conversation as providers are.
type scripted struct {
	t      testing.TB
	answer func(ctx context.Context, turn int, req model.Request) (model.Response, error)

	mu    sync.Mutex
	asked []model.Request
}

func (*scripted) Name() string      { return "main" }
func (*scripted) ModelName() string { return "fake-1" }

func (s *scripted) Generate(ctx context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	if err := paired(req.Messages); err != nil {
		s.t.Errorf("a strict provider refuses the conversation: %v", err)
	}
	s.mu.Lock()
	turn := len(s.asked)
	s.asked = append(s.asked, req)
	s.mu.Unlock()
	return s.answer(ctx, turn, req)
}

func (s *scripted) requests() []model.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.asked)
}

// paired checks what strict providers check.
func paired(messages []model.Message) error {
	seen := map[string]bool{}
	for i := 0; i < len(messages); i++ {
		m := messages[i]
		if m.Role == model.RoleTool {
			return fmt.Errorf("message %d: a result without its call", i)
		}
		for n, c := range m.ToolCalls {
			switch {
			case strings.TrimSpace(c.Name) == "":
				return fmt.Errorf("message %d: a call without a name", i)
			case c.ID == "" || seen[c.ID]:
				return fmt.Errorf("message %d: call id %q is empty or used twice", i, c.ID)
			case !json.Valid([]byte(c.Args)):
				return fmt.Errorf("message %d: arguments are no JSON: %s", i, c.Args)
			}
			seen[c.ID] = true
			if at := i + 1 + n; at >= len(messages) || messages[at].ToolCallID != c.ID {
				return fmt.Errorf("message %d: call %q has no result directly after it", i, c.ID)
			}
		}
		i += len(m.ToolCalls)
	}
	return nil
}

// say answers with text, call with tool calls.
func say(text string) (model.Response, error) {
	return model.Response{Model: "fake-1", Usage: &contract.Usage{InputTokens: 10, OutputTokens: 2, TotalTokens: 12}, Message: model.Message{Role: model.RoleAssistant, Text: text, FinishReason: "stop"}}, nil
}

func call(text string, calls ...model.ToolCall) (model.Response, error) {
	r, err := say(text)
	r.Message.ToolCalls, r.Message.FinishReason = calls, "tool_calls"
	return r, err
}

func taskCall(id, city string) model.ToolCall {
	return model.ToolCall{ID: id, Name: "task", Args: fmt.Sprintf(`{"description":%q,"prompt":"Say one fact about %s.","subagent_type":"general-purpose"}`, city, city)}
}

// results are the tool messages that stand after the newest assistant message.
func results(req model.Request) []model.Message {
	i := len(req.Messages)
	for i > 0 && req.Messages[i-1].Role == model.RoleTool {
		i--
	}
	return req.Messages[i:]
}

// world is a server with a gate and an executor in one, and engines on it.
type world struct {
	t    testing.TB
	srv  *natstest.Server
	conn *bus.Conn
	gate *gate
}

func newWorld(t testing.TB, handle func(req contract.TaskRequest) *contract.TaskRecord) *world {
	return newWorldWith(t, provision.Config{MaxRunning: 3, MaxQueued: 64}, handle)
}

func newWorldWith(t testing.TB, cfg provision.Config, handle func(req contract.TaskRequest) *contract.TaskRecord) *world {
	t.Helper()
	srv := natstest.Start(t)
	srv.Provision(cfg)
	w := &world{t: t, srv: srv, conn: srv.Conn("test")}
	w.gate = startGate(t, srv.Conn("gate"), handle)
	return w
}

func (w *world) limits(l contract.AdmissionLimits) {
	w.t.Helper()
	body, err := json.Marshal(l)
	if err != nil {
		w.t.Fatal(err)
	}
	w.publish(bus.Write{Subject: w.conn.KV(contract.LimitsKey), Data: body})
}

func (w *world) publish(m bus.Write) bus.Ack {
	w.t.Helper()
	ack, err := w.conn.Publish(w.t.Context(), m)
	if err != nil {
		w.t.Fatal(err)
	}
	return ack
}

// lead is one engine that runs.
type lead struct {
	*Engine
	w     *world
	conn  *bus.Conn
	drain context.CancelFunc
	done  chan struct{}
}

type leadOption func(*Config, *Deps)

func (w *world) lead(name string, m *scripted, opts ...leadOption) *lead {
	w.t.Helper()
	m.t = w.t
	reg, err := subagent.NewRegistry(subagent.Config{})
	if err != nil {
		w.t.Fatal(err)
	}
	models, err := model.NewRegistry(m)
	if err != nil {
		w.t.Fatal(err)
	}
	conn := w.srv.Conn(name)
	cfg := Config{Name: name, SubagentsEnabled: true, LeaseTTL: 2 * time.Second, DrainTimeout: 100 * time.Millisecond}
	deps := Deps{
		Bus: conn, Models: models, Catalogue: reg, Log: zerolog.New(zerolog.NewTestWriter(w.t)).Level(zerolog.WarnLevel),
		Dispatch: dispatch.New(conn, time.Now, zerolog.Nop(), noop.NewTracerProvider()),
	}
	for _, o := range opts {
		o(&cfg, &deps)
	}
	e, err := New(cfg, deps)
	if err != nil {
		w.t.Fatal(err)
	}
	l := &lead{Engine: e, w: w, conn: conn, done: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	l.drain = cancel
	go func() {
		defer close(l.done)
		if err := e.Run(ctx); err != nil {
			w.t.Errorf("engine %s: %v", name, err)
		}
	}()
	w.t.Cleanup(l.die)
	return l
}

// die stops the engine as a crash does: without any further write.
func (l *lead) die() {
	l.kill(context.Canceled)
	l.drain()
	select {
	case <-l.done:
	case <-time.After(patience):
		l.w.t.Error("the engine did not stop")
	}
}

func withTools(tools ...tool.Tool) leadOption {
	return func(_ *Config, d *Deps) {
		d.Tools = func(contract.Tenant, contract.ThreadID) ([]tool.Tool, func(), error) {
			return slices.Clone(tools), nil, nil
		}
	}
}

func (l *lead) start(in runapi.RunInput) contract.RunRecord {
	l.w.t.Helper()
	if in.Tenant == "" {
		in.Tenant = contract.DefaultTenant
	}
	if in.Input == "" {
		in.Input = "go"
	}
	rec, err := l.Start(l.w.t.Context(), in)
	if err != nil {
		l.w.t.Fatal(err)
	}
	return rec
}

func (l *lead) wait(id contract.RunID) contract.RunRecord {
	l.w.t.Helper()
	ctx, cancel := context.WithTimeout(l.w.t.Context(), patience)
	defer cancel()
	rec, err := l.Wait(ctx, contract.DefaultTenant, id)
	if err != nil {
		l.w.t.Fatalf("run %s: %v (status %s)", id, err, rec.Status)
	}
	return rec
}

// events reads the stored events of a run until its last one, in order.
func (w *world) events(id contract.RunID) []envelope.Event {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	var out []envelope.Event
	ended := false
	err := w.conn.Watch(ctx, bus.Watch{Stream: w.conn.Names.EventStream(), Subjects: []string{w.conn.Names.Events(contract.EventSubject{Run: id})}},
		func(m bus.Message, _ uint64) error {
			ev, err := envelope.Decode(m.Data)
			if err != nil {
				return err
			}
			out = append(out, ev)
			if ev.Type.RunTerminal() {
				ended = true
				return errDone
			}
			return nil
		})
	if !ended {
		w.t.Fatalf("run %s: no last event: %v", id, err)
	}
	return out
}

func types(events []envelope.Event) []string {
	var out []string
	for _, ev := range events {
		out = append(out, string(ev.Type))
	}
	return out
}

// gate is admission and executor in one: it answers requests with terminal
// records and events.
type gate struct {
	t      testing.TB
	c      *bus.Conn
	handle func(req contract.TaskRequest) *contract.TaskRecord

	mu      sync.Mutex
	reqs    []contract.TaskRequest
	headers []nats.Header
	held    map[contract.TaskID]contract.TaskRequest
	arrived chan struct{}
}

func completed(result string) *contract.TaskRecord {
	return &contract.TaskRecord{State: contract.StateCompleted, Result: result, ModelName: "child-1", Usage: &contract.Usage{InputTokens: 100, OutputTokens: 20, TotalTokens: 120}}
}

// startGate answers each request by what handle returns; nil holds the task
// until it is cancelled or released.
func startGate(t testing.TB, c *bus.Conn, handle func(req contract.TaskRequest) *contract.TaskRecord) *gate {
	g := &gate{t: t, c: c, handle: handle, held: map[contract.TaskID]contract.TaskRequest{}, arrived: make(chan struct{}, 1024)}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = c.Watch(ctx, bus.Watch{Stream: c.Names.WorkStream(), Subjects: []string{c.Names.TaskRequests()}}, func(m bus.Message, _ uint64) error {
			req, err := contract.DecodeTaskRequest(m.Data)
			if err != nil {
				t.Errorf("request %d: %v", m.Seq, err)
				return nil
			}
			g.mu.Lock()
			g.reqs = append(g.reqs, req)
			g.headers = append(g.headers, m.Header)
			g.held[req.TaskID] = req
			g.mu.Unlock()
			g.arrived <- struct{}{}
			if rec := handle(req); rec != nil {
				g.end(ctx, req.TaskID, *rec)
			}
			return nil
		})
	})
	wg.Go(func() {
		_ = c.Watch(ctx, bus.Watch{Stream: c.TaskStream(), Subjects: []string{c.KV(contract.CancelKey("*"))}}, func(m bus.Message, _ uint64) error {
			id := contract.TaskID(m.Subject[len(c.KV(contract.CancelKey(""))):])
			g.end(ctx, id, contract.TaskRecord{State: contract.StateCancelled, Error: "Cancelled by user.", Usage: &contract.Usage{InputTokens: 7, OutputTokens: 1, TotalTokens: 8}})
			return nil
		})
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return g
}

// end writes the terminal record of a held task and then its event.
func (g *gate) end(ctx context.Context, id contract.TaskID, rec contract.TaskRecord) {
	g.mu.Lock()
	req, ok := g.held[id]
	delete(g.held, id)
	g.mu.Unlock()
	if !ok {
		return
	}
	now := time.Now().UTC()
	rec.TaskID, rec.RunID, rec.ThreadID, rec.Tenant = req.TaskID, req.RunID, req.ThreadID, req.Tenant
	rec.Attempt, rec.SubagentType, rec.QueuedAt, rec.FinishedAt = 1, req.Subagent.Name, req.CreatedAt, &now
	body, err := json.Marshal(rec)
	if err != nil {
		g.t.Error(err)
		return
	}
	if _, err := g.c.Publish(ctx, bus.Write{Subject: g.c.KV(contract.TaskKey(id)), Data: body, Expect: bus.Seq(0)}); err != nil {
		if ctx.Err() == nil {
			g.t.Errorf("record of %s: %v", id, err)
		}
		return
	}
	ev, err := event.Terminal(rec, "/test/gate")
	if err != nil {
		g.t.Error(err)
		return
	}
	body, err = envelope.Encode(ev)
	if err != nil {
		g.t.Error(err)
		return
	}
	if _, err := g.c.Publish(ctx, bus.Write{Subject: ev.NATSSubject(g.c.Names), Data: body, Header: nats.Header(ev.Headers()), Expect: bus.Seq(0)}); err != nil && ctx.Err() == nil {
		g.t.Errorf("event of %s: %v", id, err)
	}
}

func (g *gate) requests() []contract.TaskRequest {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.reqs)
}

// await returns once n requests have come in all.
func (g *gate) await(n int) {
	g.t.Helper()
	deadline := time.After(patience)
	for len(g.requests()) < n {
		select {
		case <-g.arrived:
		case <-deadline:
			g.t.Fatalf("%d requests came; want %d", len(g.requests()), n)
		}
	}
}
