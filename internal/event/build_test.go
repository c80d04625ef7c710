package event

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

const (
	traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	tracestate  = "vendor=1"
	source      = "/herdgate/executor/ex-1"
)

var queued = time.Date(2026, 1, 2, 3, 4, 5, 123456000, time.UTC)

func after(d time.Duration) *time.Time { at := queued.Add(d); return &at }

// record is a task's record in state, two seconds in the queue, three at work.
func record(s contract.State) contract.TaskRecord {
	rec := contract.TaskRecord{
		TaskID: "t_1", RunID: "r_1", ThreadID: "thread one", Tenant: "default", State: s, Attempt: 2, Slot: 1,
		SubagentType: "general-purpose", Description: "find it", TraceParent: traceparent, TraceState: tracestate,
		QueuedAt: queued, GrantedAt: after(2 * time.Second), StartedAt: after(2500 * time.Millisecond), Executor: "ex-1", ModelName: "main",
	}
	if s.Terminal() {
		rec.FinishedAt = after(5500 * time.Millisecond)
	}
	return rec
}

func run(s contract.RunStatus) contract.RunRecord {
	r := contract.RunRecord{
		RunID: "r_1", ThreadID: "thread one", Tenant: "default", Status: s, Input: "do it", Model: "main", Owner: "lead-1",
		TraceParent: traceparent, CreatedAt: queued,
	}
	if s.Terminal() {
		r.FinishedAt = after(time.Second)
	}
	return r
}

func request() contract.TaskRequest {
	return contract.TaskRequest{
		TaskID: "t_1", RunID: "r_1", ThreadID: "thread one", Tenant: "default",
		Subagent: contract.Subagent{Name: "general-purpose"}, Description: "find it", Prompt: "p",
	}
}

func must(t *testing.T) func(envelope.Event, error) envelope.Event {
	return func(ev envelope.Event, err error) envelope.Event {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return ev
	}
}

// everyEvent is one event of each type, in the order of a life, with what its
// id must be.
func everyEvent(t *testing.T) map[string]envelope.Event {
	t.Helper()
	at := queued.Add(3 * time.Second)
	usage := &contract.Usage{InputTokens: 1, OutputTokens: 2, TotalTokens: 3}
	tool := "bash"
	events := map[string]envelope.Event{
		"t_1.0.task_queued":      Queued(request(), traceparent, tracestate, 3, source, at),
		"t_1.2.task_admitted":    Admitted(record(contract.StateGranted), source, at),
		"t_1.2.task_started":     Started(record(contract.StateRunning), contract.TaskStartedData{ModelName: "main", MaxTurns: 5, TimeoutSeconds: 9, Executor: "ex-1"}, source, at),
		"t_1.2.task_running.1":   Running(record(contract.StateRunning), 1, BuildStep(model.Message{Role: model.RoleAssistant, Text: "x", ToolCalls: []model.ToolCall{{Name: "ls", Args: `{"a":1}`}}}), "main", usage, source, at),
		"t_1.2.task_running.2":   Running(record(contract.StateRunning), 2, contract.Step{Kind: contract.StepTool, Text: "y", ToolName: &tool}, "main", nil, source, at),
		"r_1.run_started":        RunStarted(run(contract.RunRunning), source, at),
		"r_1.run_message.1":      RunMessage(run(contract.RunRunning), 1, contract.Step{Kind: contract.StepAI, Text: "z"}, "main", usage, source, at),
		"r_1.end":                must(t)(RunEnd(run(contract.RunCompleted), source)),
		"t_1.end":                must(t)(Terminal(record(contract.StateCompleted), source)),
		"t_1.end (failed)":       must(t)(Terminal(record(contract.StateFailed), source)),
		"t_1.end (timed_out)":    must(t)(Terminal(record(contract.StateTimedOut), source)),
		"t_1.end (cancelled)":    must(t)(Terminal(record(contract.StateCancelled), source)),
		"r_1.end (run_failed)":   must(t)(RunEnd(run(contract.RunFailed), source)),
		"r_1.end (run_canceled)": must(t)(RunEnd(run(contract.RunCancelled), source)),
	}
	return events
}

// EVT-12, EVT-21: every event of a life can be published, has the id that makes
// its repetition recognisable, and hangs in the trace of its delegation.
func TestBuilders(t *testing.T) {
	t.Parallel()
	types := map[contract.EventType]bool{}
	for id, ev := range everyEvent(t) {
		id, _, _ = strings.Cut(id, " ")
		types[ev.Type] = true
		if ev.ID != id {
			t.Errorf("%s: id = %q, want %q", ev.Type, ev.ID, id)
		}
		b, err := envelope.Encode(ev)
		if err != nil {
			t.Errorf("%s: %v", ev.Type, err)
			continue
		}
		back, err := envelope.Decode(b)
		if err != nil {
			t.Errorf("%s: %v", ev.Type, err)
		}
		if back.TraceParent != traceparent || back.Source != source || back.Tenant != "default" || back.ThreadID != "thread one" || back.RunID != "r_1" {
			t.Errorf("%s: lost an attribute: %+v", ev.Type, back)
		}
		wantTask, wantSubject := contract.TaskID("t_1"), "t_1"
		if strings.HasPrefix(string(ev.Type), "run_") {
			wantTask, wantSubject = "", "r_1"
		}
		if back.TaskID != wantTask || back.Subject != wantSubject {
			t.Errorf("%s: task %q subject %q, want %q and %q", ev.Type, back.TaskID, back.Subject, wantTask, wantSubject)
		}
	}
	for _, typ := range contract.EventTypes() {
		if !types[typ] {
			t.Errorf("no builder made %s", typ)
		}
	}
}

// EVT-12: the terminal event is the same whoever makes it and whenever, because
// it is made from the record alone.
func TestTerminal(t *testing.T) {
	t.Parallel()
	rec := record(contract.StateCompleted)
	rec.Result, rec.Usage, rec.StopReason = strings.Repeat("界", 9000), &contract.Usage{InputTokens: 1, OutputTokens: 2, TotalTokens: 3}, contract.StopTokenCapped
	rec.Error = "must not show"
	ev := must(t)(Terminal(rec, source))
	if !ev.Time.Equal(*rec.FinishedAt) || ev.Attempt != 2 || ev.Type != contract.EventTaskCompleted {
		t.Errorf("time %v attempt %d type %s", ev.Time, ev.Attempt, ev.Type)
	}
	d := data[contract.TaskEndData](t, ev)
	if n := len([]rune(d.Result)); n != contract.MaxStepChars || !d.ResultTruncated || d.Error != "" || d.ErrorTruncated {
		t.Errorf("result has %d code points, truncated %v, error %q", n, d.ResultTruncated, d.Error)
	}
	if d.DurationMS != 3000 || d.QueueMS != 2000 || d.Status != contract.TaskCompleted || d.StopReason != contract.StopTokenCapped || d.Usage.TotalTokens != 3 || d.ModelName != "main" {
		t.Errorf("data = %+v", d)
	}

	rec = record(contract.StateFailed)
	rec.StartedAt, rec.Error, rec.ErrorCode, rec.Result = nil, strings.Repeat("e", 8193), contract.ErrLLM, "must not show"
	d = data[contract.TaskEndData](t, must(t)(Terminal(rec, source)))
	if d.DurationMS != 3500 || len(d.Error) != contract.MaxStepChars || !d.ErrorTruncated || d.Result != "" || d.ErrorCode != contract.ErrLLM {
		t.Errorf("claimed but not started: %+v", d)
	}

	rec.GrantedAt, rec.Attempt, rec.AdmissionFailure, rec.Error = nil, 0, true, "no slot"
	ev = must(t)(Terminal(rec, source))
	if d = data[contract.TaskEndData](t, ev); d.DurationMS != 0 || d.QueueMS != 5500 || !d.AdmissionFailure || ev.Attempt != 0 {
		t.Errorf("never granted: %+v, attempt %d", d, ev.Attempt)
	}

	rec = record(contract.StateCompleted)
	rec.Result, rec.ResultRef = "beginning", &contract.BlobRef{Name: "b"}
	if d = data[contract.TaskEndData](t, must(t)(Terminal(rec, source))); !d.ResultTruncated {
		t.Error("a result that lies elsewhere is not flagged")
	}

	rec = record(contract.StateCompleted)
	rec.FinishedAt = after(-time.Hour) // two machines, two clocks
	if d = data[contract.TaskEndData](t, must(t)(Terminal(rec, source))); d.DurationMS != 0 {
		t.Errorf("duration = %d, want 0", d.DurationMS)
	}

	for _, s := range []contract.State{contract.StateGranted, contract.StateRunning, contract.StateReleased, ""} {
		if _, err := Terminal(record(s), source); !errors.Is(err, ErrNotFinished) {
			t.Errorf("Terminal of %q: %v, want ErrNotFinished", s, err)
		}
	}
	rec = record(contract.StateFailed)
	rec.FinishedAt = nil
	if _, err := Terminal(rec, source); !errors.Is(err, ErrNotFinished) {
		t.Errorf("Terminal without a time: %v", err)
	}
}

func data[T any](t *testing.T, ev envelope.Event) T {
	t.Helper()
	var d T
	if err := json.Unmarshal(ev.Data, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// A terminal event always gets out, however large and foul what it tells.
func TestTerminalAlwaysFits(t *testing.T) {
	t.Parallel()
	foul := strings.Repeat("\x01<\u2028\xff\x00", 20_000)
	for _, s := range []contract.State{contract.StateCompleted, contract.StateFailed} {
		rec := record(s)
		rec.Result, rec.Error, rec.ModelName = foul, foul, foul
		rec.ThreadID = contract.ThreadID(strings.Repeat("<", contract.MaxThreadID))
		rec.TraceParent, rec.TraceState = "broken", "also\r\nbroken"
		ev := must(t)(Terminal(rec, source))
		if _, err := envelope.Encode(ev); err != nil {
			t.Errorf("%s: %v", s, err)
		}
		if ev.TraceParent != "" || ev.TraceState != "" {
			t.Errorf("malformed trace context was taken over: %q %q", ev.TraceParent, ev.TraceState)
		}
	}
	for _, s := range []contract.RunStatus{contract.RunCompleted, contract.RunFailed, contract.RunCancelled} {
		r := run(s)
		r.Output, r.Error, r.Model = foul, foul, foul
		ev := must(t)(RunEnd(r, source))
		if _, err := envelope.Encode(ev); err != nil {
			t.Errorf("run %s: %v", s, err)
		}
		if d := data[contract.RunEndData](t, ev); !d.OutputTruncated || !d.ErrorTruncated || len([]rune(d.Output)) != MaxRunOutputChars {
			t.Errorf("run %s: output is not cut", s)
		}
	}
	if _, err := RunEnd(run(contract.RunRunning), source); !errors.Is(err, ErrNotFinished) {
		t.Errorf("RunEnd of a running run: %v", err)
	}
	r := run(contract.RunRunning)
	r.Input = foul
	if _, err := envelope.Encode(RunStarted(r, source, queued)); err != nil {
		t.Error(err)
	}
}

// Trace context travels only as a whole and well-formed.
func TestTraceAttributes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ parent, state, wantParent, wantState string }{
		{traceparent, tracestate, traceparent, tracestate},
		{traceparent, strings.Repeat("x", 513), traceparent, ""},
		{traceparent, "a=1\r\nPUB x 0", traceparent, ""},
		{strings.ToUpper(traceparent), tracestate, "", ""},
		{"", tracestate, "", ""},
	} {
		ev := Queued(request(), c.parent, c.state, 0, source, queued)
		if ev.TraceParent != c.wantParent || ev.TraceState != c.wantState {
			t.Errorf("(%q, %.20q) gives (%q, %q)", c.parent, c.state, ev.TraceParent, ev.TraceState)
		}
	}
}
