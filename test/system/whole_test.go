package system

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Delegator is a lead that delegates each line of its input at once, and
// sub-agents that answer with their prompt in capitals.
type Delegator struct{}

// Name implements model.Model.
func (Delegator) Name() string { return "delegator" }

// ModelName implements model.Model.
func (Delegator) ModelName() string { return "delegator-1" }

// Generate implements model.Model.
func (Delegator) Generate(_ context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	usage := &contract.Usage{InputTokens: 10, OutputTokens: 5, TotalTokens: 15}
	last := req.Messages[len(req.Messages)-1]
	if req.Agent != "lead" {
		return model.Response{Message: model.Message{Text: strings.ToUpper(taskOf(req)), FinishReason: "stop"}, Model: "delegator-1", Usage: usage}, nil
	}
	if last.Role == model.RoleUser {
		msg := model.Message{FinishReason: "tool_calls"}
		for i, line := range strings.Split(last.Text, "\n") {
			msg.ToolCalls = append(msg.ToolCalls, model.ToolCall{
				ID: fmt.Sprint("call_", i), Name: "task", Args: fmt.Sprintf(`{"description":"part %d","prompt":%q,"subagent_type":"general-purpose"}`, i, line),
			})
		}
		return model.Response{Message: msg, Model: "delegator-1", Usage: usage}, nil
	}
	var parts []string
	for _, m := range req.Messages {
		if m.Role == model.RoleTool {
			parts = append(parts, m.Text)
		}
	}
	return model.Response{Message: model.Message{Text: strings.Join(parts, "\n"), FinishReason: "stop"}, Model: "delegator-1", Usage: usage}, nil
}

// F-166, I10: every span of a run with two tasks, over all services, hangs in one
// trace, and no span's parent is missing; the sink's batches link to it. ARCH-01, ARCH-03, ARCH-05, USAGE-01.
func TestOneTrace(t *testing.T) {
	t.Parallel()
	exporter := tracetest.NewInMemoryExporter()
	tp := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter))
	s := New(t, Options{Model: Delegator{}, TracerProvider: tp})
	c := s.Whole()
	run, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: "find foo\nfind bar"})
	if err != nil {
		t.Fatal(err)
	}
	if run.Status != contract.RunCompleted || run.Output == nil || !strings.Contains(*run.Output, "FIND FOO") || !strings.Contains(*run.Output, "FIND BAR") {
		t.Fatalf("run = %+v", run)
	}
	if len(run.Delegations) != 2 || run.Usage == nil || run.Usage.TotalTokens != 4*15 {
		t.Errorf("delegations %v, usage %+v; want 2 and 60 tokens", run.Delegations, run.Usage)
	}
	// The store is the last to see the run.
	natstest.Eventually(t, Timeout, func() (bool, string) {
		page, err := c.ListEvents(timeout(t), client.EventQuery{RunID: run.RunID, Types: []string{contract.RecordRunCompleted}}, 0)
		return err == nil && len(page.Events) == 1, fmt.Sprint("events: ", page, err)
	})
	var orphans string
	natstest.Eventually(t, Timeout, func() (bool, string) {
		orphans = check(exporter.GetSpans(), run.TraceID)
		return orphans == "", orphans
	})
}

// check says what is wrong with the trace, or nothing.
func check(spans tracetest.SpanStubs, traceID string) string {
	ids := map[string]bool{}
	scopes := map[string]int{}
	roots := 0
	names := map[string]int{}
	linked := false
	for _, sp := range spans {
		if sp.SpanContext.TraceID().String() != traceID {
			continue
		}
		ids[sp.SpanContext.SpanID().String()] = true
		scopes[sp.InstrumentationScope.Name]++
		names[sp.Name]++
	}
	for _, sp := range spans {
		if sp.SpanContext.TraceID().String() != traceID {
			batch := strings.HasSuffix(sp.InstrumentationScope.Name, "eventsink")
			switch {
			case batch:
				linked = linked || slices.ContainsFunc(sp.Links, func(l sdktrace.Link) bool { return l.SpanContext.TraceID().String() == traceID })
			case !strings.HasSuffix(sp.InstrumentationScope.Name, "httpapi"):
				return fmt.Sprintf("span %q is in another trace", sp.Name)
			}
			continue
		}
		switch {
		case !sp.Parent.IsValid():
			roots++
		case !ids[sp.Parent.SpanID().String()]:
			return fmt.Sprintf("span %q of %s has a parent that was not exported", sp.Name, sp.InstrumentationScope.Name)
		}
	}
	if roots != 1 {
		return fmt.Sprintf("%d root spans, want 1", roots)
	}
	for _, want := range []string{"lead", "admission", "executor"} {
		found := false
		for scope := range scopes {
			found = found || strings.Contains(scope, want)
		}
		if !found {
			return fmt.Sprintf("no span of the %s; scopes are %v", want, scopes)
		}
	}
	if !linked {
		return "no batch of the sink links to the trace"
	}
	if names["wait for admission"] != 2 || names["invoke_agent general-purpose"] != 2 {
		return fmt.Sprintf("spans %v; want two waits and two sub-agents", names)
	}
	return ""
}

// EVT-17, I6, ISO-08: what is listed for a run is what happened, in order, and
// the lead's own messages hold nothing of its sub-agents' but their results.
func TestStoredHistory(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Model: Delegator{}})
	feed := s.Follow()
	c := s.Whole()
	run, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: "one\ntwo\nthree"})
	if err != nil {
		t.Fatal(err)
	}
	page, err := c.ListEvents(timeout(t), client.EventQuery{RunID: run.RunID, Limit: 1000}, 0)
	if err != nil {
		t.Fatal(err)
	}
	published := feed.Ended(3)
	if len(page.Events) < len(published) {
		t.Errorf("%d events stored, %d published", len(page.Events), len(published))
	}
	var last uint64
	counts := map[string]int{}
	for _, e := range page.Events {
		if e.Seq <= last {
			t.Errorf("seq %d after %d", e.Seq, last)
		}
		last = e.Seq
		counts[e.EventType]++
		if e.EventType == contract.RecordRunMessage && strings.Contains(string(e.Content), "message_index\":0") {
			t.Errorf("a lead's message is not numbered: %s", e.Content)
		}
	}
	want := map[string]int{
		contract.RecordRunStarted: 1, contract.RecordRunMessage: 5, contract.RecordRunCompleted: 1,
		contract.RecordQueued: 3, contract.RecordAdmitted: 3, contract.RecordStart: 3, contract.RecordStep: 3, contract.RecordEnd: 3,
	}
	for typ, n := range want {
		if counts[typ] != n {
			t.Errorf("%d events of %s, want %d", counts[typ], typ, n)
		}
	}
}

// I2: the calls of one answer are queued in the order in which the model wrote
// them.
func TestCallsAreQueuedInOrder(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Model: Delegator{}})
	c := s.Whole()
	for range 10 {
		run, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: "a\nb\nc"})
		if err != nil {
			t.Fatal(err)
		}
		if run.Status != contract.RunCompleted {
			t.Fatalf("run = %+v", run)
		}
		page, err := c.ListEvents(timeout(t), client.EventQuery{RunID: run.RunID, Types: []string{contract.RecordAdmitted}}, 0)
		if err != nil {
			t.Fatal(err)
		}
		if len(page.Events) != 3 {
			t.Fatalf("%d tasks admitted, want 3", len(page.Events))
		}
		for i, e := range page.Events {
			if want := contract.NewTaskID(run.RunID, 0, i); e.TaskID != want {
				t.Errorf("%s was admitted in place %d, want %s", e.TaskID, i, want)
			}
		}
	}
}
