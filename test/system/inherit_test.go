package system

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/modeltest"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// herder delegates once, with a prompt of its own, and its sub-agents answer when
// they are let go.
type herder struct {
	*Held
	kind string

	mu   sync.Mutex
	sent []model.Request
}

func (h *herder) Generate(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	h.mu.Lock()
	h.sent = append(h.sent, req)
	h.mu.Unlock()
	usage := &contract.Usage{InputTokens: 10, OutputTokens: 5, TotalTokens: 15}
	if req.Agent != "lead" {
		res, err := h.Held.Generate(ctx, req, onDelta)
		res.Usage = usage
		return res, err
	}
	msg := model.Message{Text: "so it is", FinishReason: "stop"}
	if req.Messages[len(req.Messages)-1].Role == model.RoleUser {
		msg = call("task", fmt.Sprintf(`{"description":"part","prompt":"hold it","subagent_type":%q}`, h.kind))
	}
	return model.Response{Message: msg, Model: "held-1", Usage: usage}, nil
}

// of are the requests that agents of a type made.
func (h *herder) of(agent string) []model.Request {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []model.Request
	for _, r := range h.sent {
		if r.Agent == agent {
			out = append(out, r)
		}
	}
	return out
}

func scout(prompt string, turns int) subagent.Config {
	limit := 60
	return subagent.Config{Custom: []subagent.Custom{{Name: "scout", Description: "looks", SystemPrompt: prompt, MaxTurns: &turns, TimeoutSeconds: &limit}}}
}

// EXEC-08, REG-14, F-074: a task runs as its definition was when it was delegated, although
// a lead with another one has come meanwhile; and the settings of its executor are
// those of its start, although their owner has changed them under it.
func TestOneConfigurationForTheWholeTask(t *testing.T) {
	t.Parallel()
	settings := config.Default()
	settings.Verification.ReceiptsEnabled = false
	h := &herder{Held: NewHeld(), kind: "scout"}
	_, offer := shell(t)
	s := New(t, Options{Model: h, Settings: &settings, Tools: offer, Subagents: scout("You are the first.", 7)})
	feed := s.Follow()
	dir := t.TempDir()
	first, api := s.Lead("lead-1", dir)
	acc, err := api.SubmitTask(timeout(t), wire.TaskRequest{SubagentType: "scout", Prompt: "hold it"})
	if err != nil {
		t.Fatal(err)
	}
	first.Stop()
	s.Opts.Subagents = scout("You are the second.", 9)
	s.Lead("lead-2", dir)
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	feed.started(1)
	settings.Verification.ReceiptsEnabled = true
	settings.Summarization.Enabled = true
	h.LetAllGo()
	for _, e := range feed.Ended(1) {
		if e.Type != contract.EventTaskStarted {
			continue
		}
		var data contract.TaskStartedData
		if err := json.Unmarshal(e.Data, &data); err != nil || data.MaxTurns != 7 {
			t.Errorf("started with %+v, %v; want the 7 turns of the time of the delegation", data, err)
		}
	}
	sent := h.of("scout")
	if len(sent) != 1 || !strings.Contains(sent[0].Messages[0].Text, "You are the first.") || strings.Contains(sent[0].Messages[0].Text, "[r1") {
		t.Errorf("the model was sent %+v", sent)
	}
	if rec, _ := s.Record(acc.TaskID); rec.State != contract.StateCompleted || rec.Receipts != nil || rec.ReceiptVerdict != nil {
		t.Errorf("record = %+v; want no receipts, as they were off at the start", rec)
	}
}

// EXEC-11, CTX-07, ISO-02, ISO-03, ISO-06, ISO-07, USAGE-04: the spans and events of a
// task hang below its run; each of its model calls is traced once, with its type as the
// agent's name; it opens no run of its own; and the run counts what it used once.
func TestChildrenHangBelowTheirRun(t *testing.T) {
	t.Parallel()
	exporter := tracetest.NewInMemoryExporter()
	w := &Watched{}
	s := New(t, Options{Model: w, TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter))})
	feed := s.Follow()
	c := s.Whole()
	run, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: "alpha\nbeta"})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range w.Of("general-purpose") {
		if r.Agent != "general-purpose" {
			t.Errorf("a model call of a child is tagged %q", r.Agent)
		}
	}
	const tasks = 2
	attr := func(sp tracetest.SpanStub, key string) string {
		for _, a := range sp.Attributes {
			if a.Key == attribute.Key(key) {
				return a.Value.AsString()
			}
		}
		return ""
	}
	var wrong string
	natstest.Eventually(t, Timeout, func() (bool, string) {
		wrong = func() string {
			byID := map[trace.SpanID]tracetest.SpanStub{}
			for _, sp := range exporter.GetSpans() {
				byID[sp.SpanContext.SpanID()] = sp
			}
			chats := map[string]int{}
			children := 0
			for _, sp := range byID {
				if strings.HasPrefix(sp.Name, "chat ") {
					chats[attr(sp, "gen_ai.agent.name")]++
				}
				if !strings.HasPrefix(sp.Name, "invoke_agent ") || sp.Name == "invoke_agent lead" {
					continue
				}
				children++
				if sp.Name != "invoke_agent general-purpose" || attr(sp, "gen_ai.agent.name") != "general-purpose" {
					return fmt.Sprintf("a child's span is %q with the agent %q", sp.Name, attr(sp, "gen_ai.agent.name"))
				}
				above := []string{}
				for p := sp; p.Parent.IsValid(); {
					parent, ok := byID[p.Parent.SpanID()]
					if !ok {
						return "the parent of " + p.Name + " is not exported yet"
					}
					p = parent
					above = append(above, p.Name)
				}
				if !slices.Contains(above, "invoke_agent lead") || !slices.Contains(above, "execute_tool task") {
					return fmt.Sprintf("above a child's span stand %q", above)
				}
				if sp.SpanContext.TraceID().String() != run.TraceID {
					return "a child is in another trace"
				}
			}
			if children != tasks || !maps.Equal(chats, map[string]int{"lead": 2, "general-purpose": tasks}) {
				return fmt.Sprintf("%d children, model calls %v", children, chats)
			}
			return ""
		}()
		return wrong == "", wrong
	})
	for _, e := range feed.Ended(tasks) {
		if e.RunID != run.RunID || len(e.TraceParent) < 35 || e.TraceParent[3:35] != run.TraceID {
			t.Errorf("%s belongs to run %s, trace %q; want %s and %s", e.Type, e.RunID, e.TraceParent, run.RunID, run.TraceID)
		}
	}
	page, err := c.ListRuns(timeout(t), client.RunQuery{ThreadID: run.ThreadID})
	if err != nil || len(page.Runs) != 1 {
		t.Errorf("runs of the thread: %+v, %v; want the one", page.Runs, err)
	}
	var sum int64
	for _, d := range run.Delegations {
		sum += d.Usage.TotalTokens
	}
	if run.Usage == nil || run.Usage.TotalTokens != 2*15+sum || sum != tasks*15 {
		t.Errorf("the run has used %+v, its tasks %d; want 30 more than those, once", run.Usage, sum)
	}
}

// CTX-02, CTX-10, ISO-04, ISO-06, ISO-10: what crosses to an executor is what a task
// needs, and nothing else of its lead: no message, no checkpoint, no baggage. Its
// tools are opened for the thread of the request, and who nobody is, is the default
// user.
func TestWhatCrossesToAnExecutor(t *testing.T) {
	t.Parallel()
	h := &herder{Held: NewHeld(), kind: "general-purpose"}
	h.LetAllGo()
	opened := make(chan contract.TaskRequest, 1)
	s := New(t, Options{Model: h, Tools: func(req contract.TaskRequest) ([]tool.Tool, func(), error) {
		opened <- req
		return nil, func() {}, nil
	}})
	sub, err := s.Bus.NC.SubscribeSync(s.Bus.Names.TaskRequest("*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	c := s.Whole()
	run, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: "The password is SESAME.", ThreadID: "the thread", Metadata: map[string]string{"k": "SESAME"}})
	if err != nil || run.Status != contract.RunCompleted {
		t.Fatalf("run = %+v, %v", run, err)
	}
	msg, err := sub.NextMsg(Timeout)
	if err != nil {
		t.Fatal(err)
	}
	var sent map[string]json.RawMessage
	if err := json.Unmarshal(msg.Data, &sent); err != nil {
		t.Fatal(err)
	}
	want := []string{"contract_version", "created_at", "description", "identity", "offered_tools", "parent_model", "prompt", "run_id", "subagent", "task_id", "tenant", "thread_id", "tool_call_id"}
	if got := slices.Sorted(maps.Keys(sent)); !slices.Equal(got, want) {
		t.Errorf("a request has %q, want %q", got, want)
	}
	if all := fmt.Sprint(string(msg.Data), msg.Header); strings.Contains(all, "SESAME") || strings.Contains(strings.ToLower(all), "checkpoint") {
		t.Errorf("a request carries what is the lead's: %s", all)
	}
	headers := slices.Sorted(maps.Keys(msg.Header))
	for _, name := range headers {
		if l := strings.ToLower(name); l != "traceparent" && l != "tracestate" && !strings.HasPrefix(l, "nats-") && !strings.HasPrefix(l, "content-") && !strings.HasPrefix(l, "herdgate-") {
			t.Errorf("a request has the header %s", name)
		}
	}
	req, err := contract.DecodeTaskRequest(msg.Data)
	if err != nil || !reflect.DeepEqual(req.Identity, contract.Identity{UserID: contract.DefaultUser, IsSubagent: true}) || req.Tenant != contract.DefaultTenant || req.ThreadID != run.ThreadID || req.RunID != run.RunID {
		t.Errorf("request = %+v, %v", req, err)
	}
	if got := <-opened; got.ThreadID != "the thread" {
		t.Errorf("the tools were opened for thread %q", got.ThreadID)
	}
	for _, r := range h.of("general-purpose") {
		for _, m := range r.Messages {
			if strings.Contains(m.Text, "SESAME") {
				t.Errorf("a child is told %q", m.Text)
			}
		}
	}
}

// EXEC-13, ADM-05, STATUS-09: whoever waits for a run in one HTTP request goes the same
// way as everybody: its task waits for its turn, is told of by the same events, and has
// the same time limit, after which the run goes on.
func TestWaitingTakesTheSameWay(t *testing.T) {
	t.Parallel()
	h := &herder{Held: NewHeld(), kind: "scout"}
	types := scout("You look.", 5)
	*types.Custom[0].TimeoutSeconds = 1
	s := New(t, Options{Model: h, MaxRunning: 1, Subagents: types})
	feed := s.Follow()
	c := s.Whole()
	if _, err := c.SubmitTask(timeout(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: "hold the slot"}); err != nil {
		t.Fatal(err)
	}
	feed.started(1)
	told := map[string]string{} // by run, the events of its task
	var runs []wire.Run
	var wg sync.WaitGroup
	waited := make(chan wire.Run, 1)
	wg.Go(func() {
		run, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: "go"})
		if err != nil {
			t.Error(err)
		}
		waited <- run
	})
	feed.Until("the task that waits", func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskQueued)) == 2 })
	if n := Count(feed.Events(), Is(contract.EventTaskStarted)); n != 1 {
		t.Errorf("%d tasks have started beside the one that holds the slot", n-1)
	}
	h.LetGo("hold the slot")
	runs = append(runs, <-waited)
	wg.Wait()
	acc, err := c.StartRun(timeout(t), wire.RunRequest{Input: "go"})
	if err != nil {
		t.Fatal(err)
	}
	feed.Until("the end of the other run", func(ev []envelope.Event) bool {
		return slices.ContainsFunc(ev, func(e envelope.Event) bool { return e.RunID == acc.RunID && e.Type.RunTerminal() })
	})
	other, err := c.GetRun(timeout(t), acc.RunID)
	if err != nil {
		t.Fatal(err)
	}
	runs = append(runs, other)
	for _, e := range feed.Ended(3) {
		if e.TaskID != "" {
			told[string(e.RunID)] += " " + strings.TrimPrefix(string(e.Type), "task_")
		}
	}
	for i, run := range runs {
		if got := told[string(run.RunID)]; got != " queued admitted started timed_out" {
			t.Errorf("run %d: its task's events are%s", i, got)
		}
		if run.Status != contract.RunCompleted || len(run.Delegations) != 1 || run.Delegations[0].Status != string(contract.ToolTimedOut) || deref(run.Output) != "so it is" {
			t.Errorf("run %d = %+v", i, run)
		}
	}
}

// EXEC-12: those who follow tasks from outside are told of each start and end, and
// neither one that never reads nor one that never acknowledges holds up or fails any.
func TestFollowersHoldUpNoTask(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	release := make(chan struct{})
	deaf, err := s.Bus.NC.Subscribe(s.Bus.Names.AllEvents(), func(*nats.Msg) { <-release })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(release); _ = deaf.Unsubscribe() })
	cons, err := s.Bus.JS.CreateConsumer(timeout(t), s.Bus.Names.EventStream(), jetstream.ConsumerConfig{Durable: "never", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 1})
	if err != nil {
		t.Fatal(err)
	}
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	const tasks = 8
	for i := range tasks {
		s.Submit(Request(fmt.Sprint("task ", i)))
	}
	ev := feed.Ended(tasks)
	if n, m := Count(ev, Is(contract.EventTaskStarted)), Count(ev, Is(contract.EventTaskCompleted)); n != tasks || m != tasks {
		t.Errorf("%d starts and %d ends were told, want %d", n, m, tasks)
	}
	info, err := cons.Info(timeout(t))
	if err != nil || int(info.NumPending)+info.NumAckPending < tasks {
		t.Errorf("whoever reads nothing has %+v before it, %v", info, err)
	}
}

// USAGE-05, STATUS-11, EVT-12: after a restart of the lead everything about a task that
// has ended stands in its record and in its last event, also when the record is gone.
func TestEndsTellModelAndUsage(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	feed := s.Follow()
	dir := t.TempDir()
	s.Sink("sink-1", dir)
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("hello")
	s.Submit(req)
	feed.Ended(1)
	_, c := s.Lead("lead-2", dir)
	want := &contract.Usage{InputTokens: 3, OutputTokens: 2, TotalTokens: 5}
	task, err := c.GetTask(timeout(t), req.TaskID)
	if err != nil || task.ModelName == nil || *task.ModelName != "echo-1" || !reflect.DeepEqual(task.Usage, want) {
		t.Errorf("task = %+v, %v", task, err)
	}
	var end contract.EventRecord
	natstest.Eventually(t, Timeout, func() (bool, string) {
		page, err := c.ListEvents(timeout(t), client.EventQuery{TaskID: req.TaskID, Types: []string{contract.RecordEnd}}, 0)
		if err != nil || len(page.Events) != 1 {
			return false, fmt.Sprint("ends: ", page.Events, err)
		}
		end = page.Events[0]
		return true, ""
	})
	var told struct {
		Model string          `json:"model_name"`
		Usage *contract.Usage `json:"usage"`
	}
	if err := json.Unmarshal(end.Content, &told); err != nil || told.Model != "echo-1" || !reflect.DeepEqual(told.Usage, want) {
		t.Errorf("the stored end says %s, %v", end.Content, err)
	}
}

// TOOL-06: what a tool is like is bound to the request, for leads and sub-agents
// alike; no message speaks of a parameter.
func TestSchemasAreBoundToTheModel(t *testing.T) {
	t.Parallel()
	f := newField(t, nil)
	const name = "TOOL-06"
	lead := modeltest.New(t, modeltest.Calls(modeltest.Call{ID: "c", Name: "task", Args: `{"description":"d","prompt":"look around","subagent_type":"general-purpose"}`}), modeltest.Text("ok"))
	child := modeltest.New(t, modeltest.Text("seen"))
	f.routed.add(name, dial(t, "openai", lead.URL()))
	f.routed.add("look around", dial(t, "openai", child.URL()))
	if _, err := f.api.RunToEnd(timeout(t), wire.RunRequest{Input: name}); err != nil {
		t.Fatal(err)
	}
	for who, s := range map[string]*modeltest.Server{"lead": lead, "child": child} {
		var sent struct {
			Tools []struct {
				Function struct {
					Name, Description string
					Parameters        struct {
						Properties map[string]struct{ Description string }
					}
				}
			}
		}
		r := s.Requests()[0]
		if err := json.Unmarshal(r.Body, &sent); err != nil {
			t.Fatal(err)
		}
		if len(sent.Tools) < 5 {
			t.Errorf("%s: %d tools are bound", who, len(sent.Tools))
		}
		for _, tl := range sent.Tools {
			if len(tl.Function.Parameters.Properties) == 0 {
				t.Errorf("%s: %s is bound without parameters", who, tl.Function.Name)
			}
			for _, m := range r.Messages {
				text := prompt.Unframe(m.Text())
				if strings.Contains(text, `"properties"`) || strings.Contains(text, tl.Function.Description) {
					t.Errorf("%s: a message describes the tool %s: %q", who, tl.Function.Name, text)
				}
				for p, of := range tl.Function.Parameters.Properties {
					if of.Description != "" && strings.Contains(text, of.Description) {
						t.Errorf("%s: a message describes %s of %s", who, p, tl.Function.Name)
					}
				}
			}
		}
	}
}

// USAGE-02, USAGE-03, EVT-12: each step tells what the task has used up to it, and the
// end all of it; a later figure takes the place of the one before, and none falls.
func TestUsageSoFar(t *testing.T) {
	t.Parallel()
	_, offer := shell(t)
	s := New(t, Options{Tools: offer, Model: &Scripted{
		Turns: []model.Message{call("ls", `{}`), call("bash", `{"command":"echo hi"}`), {Text: "done", FinishReason: "stop"}},
		Usage: &contract.Usage{InputTokens: 7, OutputTokens: 1, TotalTokens: 8},
	}})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	s.Submit(Request("x"))
	var steps []int64
	for _, e := range feed.Ended(1) {
		var data struct{ Usage *contract.Usage }
		if e.Type != contract.EventTaskRunning && !e.Type.TaskTerminal() {
			continue
		}
		if err := json.Unmarshal(e.Data, &data); err != nil || data.Usage == nil {
			t.Fatalf("%s tells %s, %v; want the usage so far", e.Type, e.Data, err)
		}
		steps = append(steps, data.Usage.TotalTokens)
	}
	// Answer, result, answer, result, answer, end.
	if want := []int64{8, 8, 16, 16, 24, 24}; !slices.Equal(steps, want) {
		t.Errorf("told %v, want %v", steps, want)
	}
}
