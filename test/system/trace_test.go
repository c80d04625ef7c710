package system

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/admission"
	"github.com/herdgate/herdgate/services/admission/gate"
	"github.com/herdgate/herdgate/services/lead"
)

var updateTrace = flag.Bool("update-trace", false, "write testdata/trace.golden anew")

// unlucky is a lead with three tasks: one that waits to be cancelled, one that answers
// its second attempt only, and one that goes on until its turns are over.
type unlucky struct {
	mu   sync.Mutex
	lost int
}

func (*unlucky) Name() string      { return "unlucky" }
func (*unlucky) ModelName() string { return "unlucky-1" }

func (u *unlucky) Generate(ctx context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	resp := model.Response{Model: "unlucky-1", Usage: &contract.Usage{InputTokens: 10, OutputTokens: 5, TotalTokens: 15}}
	resp.Message.FinishReason = "stop"
	switch {
	case req.Agent == "lead" && req.Messages[len(req.Messages)-1].Role == model.RoleUser:
		resp.Message.FinishReason = "tool_calls"
		for i, typ := range []string{"general-purpose", "general-purpose", "scout"} {
			resp.Message.ToolCalls = append(resp.Message.ToolCalls, model.ToolCall{ID: fmt.Sprint("call_", i), Name: "task",
				Args: fmt.Sprintf(`{"description":"part %d","prompt":"part %d","subagent_type":%q}`, i, i, typ)})
		}
	case req.Agent == "lead":
		resp.Message.Text = "that is all"
	case req.Agent == "scout":
		n := len(req.Messages)
		resp.Message.FinishReason = "tool_calls"
		resp.Message.ToolCalls = []model.ToolCall{{ID: fmt.Sprint("look_", n), Name: "look", Args: "{}"}}
	case strings.Contains(taskOf(req), "part 1"):
		u.mu.Lock()
		u.lost++
		again := u.lost > 1
		u.mu.Unlock()
		if again {
			resp.Message.Text = "found"
			break
		}
		fallthrough
	default:
		<-ctx.Done()
		return model.Response{}, context.Cause(ctx)
	}
	return resp, nil
}

type look struct{}

func (look) Spec() model.ToolSpec {
	return model.ToolSpec{Name: "look", Description: "looks", Parameters: []byte(`{"type":"object"}`)}
}
func (look) Call(context.Context, tool.Call) (tool.Result, error) {
	return tool.Result{Text: "nothing"}, nil
}

// F-166, F-174, I10: the spans of a run with three sub-agents, of which one is stopped
// by its turn limit, one cancelled and one run again after its executor was lost, with
// their parents, links and the attributes that matter.
func TestTraceOfARun(t *testing.T) {
	t.Parallel()
	exporter := tracetest.NewInMemoryExporter()
	turns := 2
	s := New(t, Options{
		Model: &unlucky{}, TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter)),
		Tools: func(contract.TaskRequest) ([]tool.Tool, func(), error) {
			return []tool.Tool{look{}}, func() {}, nil
		},
		Subagents: subagent.Config{Custom: []subagent.Custom{{Name: "scout", Description: "looks", SystemPrompt: "Look.", MaxTurns: &turns}}},
	})
	feed := s.Follow()
	s.Sink("sink-1", t.TempDir())
	s.Admission("adm-1", func(c *admission.Config) { c.RetryLost = gate.RetryAlways })
	first := s.Executor("ex-1", 4, time.Second)
	_, c := s.Lead("lead-1", t.TempDir())
	acc, err := c.StartRun(timeout(t), wire.RunRequest{Input: "go"})
	if err != nil {
		t.Fatal(err)
	}
	task := func(n int) contract.TaskID { return contract.NewTaskID(acc.RunID, 0, n) }
	seen := func(typ contract.EventType, id contract.TaskID) func([]envelope.Event) bool {
		return func(all []envelope.Event) bool {
			return slices.ContainsFunc(all, func(e envelope.Event) bool { return e.Type == typ && e.TaskID == id })
		}
	}
	feed.Until("two tasks run and one has ended", func(all []envelope.Event) bool {
		return seen(contract.EventTaskStarted, task(0))(all) && seen(contract.EventTaskStarted, task(1))(all) && seen(contract.EventTaskFailed, task(2))(all)
	})
	s.Cancel(task(0))
	feed.Until("the first is cancelled", seen(contract.EventTaskCancelled, task(0)))
	first.Conn.Close()
	s.Executor("ex-2", 4, time.Second)
	natstest.Eventually(t, 2*Timeout, func() (bool, string) {
		run, err := c.GetRun(timeout(t), acc.RunID)
		return err == nil && run.Status == contract.RunCompleted, fmt.Sprint(run.Status, err)
	})
	run, err := c.GetRun(timeout(t), acc.RunID)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join("testdata", "trace.golden")
	want, err := os.ReadFile(file)
	if err != nil && !*updateTrace {
		t.Fatal(err)
	}
	ofRun := func() (string, bool) {
		return drawTrace(exporter.GetSpans(), run.TraceID, s.Bus.Names.Prefix())
	}
	if *updateTrace {
		natstest.Eventually(t, Timeout, func() (bool, string) {
			got, whole := ofRun()
			return whole && strings.Contains(got, "lease_over") && strings.Count(got, "herdgate.status=") >= 7, got
		})
		got, _ := ofRun()
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	natstest.Eventually(t, Timeout, func() (bool, string) {
		got, _ := ofRun()
		return got == string(want), "the trace differs from testdata/trace.golden (go test ./system -run TestTraceOfARun -update-trace writes it anew); it is\n" + got
	})
	for _, sp := range exporter.GetSpans() {
		if strings.HasSuffix(sp.InstrumentationScope.Name, "eventsink") && (sp.Parent.IsValid() || len(sp.Links) == 0) {
			t.Errorf("a batch of the sink has the parent %v and %d links; want links alone", sp.Parent, len(sp.Links))
		}
	}
}

// shown are the attributes in the drawing.
var shown = []attribute.Key{
	telemetry.AttrGenAIOperation, telemetry.AttrGenAIAgentName, telemetry.AttrGenAIRequestModel, telemetry.AttrGenAIResponseModel, telemetry.AttrGenAIFinishReasons,
	telemetry.AttrGenAIInputTokens, telemetry.AttrGenAIOutputTokens, telemetry.AttrGenAIToolName, telemetry.AttrGenAIToolCallID,
	telemetry.AttrMessagingSystem, telemetry.AttrMessagingConsumer, telemetry.AttrDeliveryAttempt, telemetry.AttrExecutor, telemetry.AttrSubagentType,
	telemetry.AttrAttempt, telemetry.AttrStatus, telemetry.AttrStopReason, telemetry.AttrErrorType,
}

// drawTrace draws the spans of a trace as a tree that is the same for the same work,
// and whether none of them lacks its parent.
func drawTrace(all tracetest.SpanStubs, traceID, prefix string) (string, bool) {
	byID := map[trace.SpanID]tracetest.SpanStub{}
	for _, sp := range all {
		if sp.SpanContext.TraceID().String() == traceID {
			byID[sp.SpanContext.SpanID()] = sp
		}
	}
	children := map[trace.SpanID][]tracetest.SpanStub{}
	whole := true
	for _, sp := range byID {
		parent := sp.Parent.SpanID()
		if _, known := byID[parent]; parent.IsValid() && !known {
			whole = false
		}
		children[parent] = append(children[parent], sp)
	}
	var draw func(parent trace.SpanID, indent string) string
	draw = func(parent trace.SpanID, indent string) string {
		var texts []string
		for _, sp := range children[parent] {
			var b strings.Builder
			fmt.Fprintf(&b, "%s%s [%s]", indent, sp.Name, sp.SpanKind)
			for _, key := range shown {
				for _, kv := range sp.Attributes {
					if kv.Key == key {
						fmt.Fprintf(&b, " %s=%s", key, kv.Value.String())
					}
				}
			}
			if sp.Status.Code == codes.Error {
				fmt.Fprintf(&b, " error=%q", sp.Status.Description)
			}
			for _, l := range sp.Links {
				if l.SpanContext.SpanID() == sp.Parent.SpanID() {
					b.WriteString(" link=parent")
				} else {
					fmt.Fprintf(&b, " link=%q", byID[l.SpanContext.SpanID()].Name)
				}
			}
			for _, ev := range sp.Events {
				if ev.Name != telemetry.EventLeaseRenewed && ev.Name != telemetry.EventWriteRetry { // these depend on how long it took
					b.WriteString(" event=" + ev.Name)
				}
			}
			b.WriteString("\n" + draw(sp.SpanContext.SpanID(), indent+"  "))
			texts = append(texts, b.String())
		}
		sort.Strings(texts)
		return strings.Join(texts, "")
	}
	return strings.ReplaceAll(draw(trace.SpanID{}, ""), prefix+".", "PREFIX."), whole
}

// F-174: the wait for a slot is a span of its own, with the place in the queue and its
// depth at entry; it begins when the request was stored, and ends before the task begins.
func TestWaitIsASpan(t *testing.T) {
	t.Parallel()
	exporter := tracetest.NewInMemoryExporter()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 1, Model: held, TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter))})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	for i := range 3 {
		req := Request(fmt.Sprint("hold ", i))
		s.Submit(req)
		await := contract.EventTaskQueued
		if i == 0 { // from then on the gate is open and the slot taken
			await = contract.EventTaskStarted
		}
		feed.Until(string(await), func(all []envelope.Event) bool {
			return slices.ContainsFunc(all, func(e envelope.Event) bool { return e.TaskID == req.TaskID && e.Type == await })
		})
	}
	for i := range 3 {
		held.LetGo(fmt.Sprint("hold ", i))
	}
	feed.Ended(3)
	var got []string
	natstest.Eventually(t, Timeout, func() (bool, string) {
		got = nil
		for _, sp := range exporter.GetSpans() {
			if sp.Name != "wait for admission" {
				continue
			}
			got = append(got, "")
			for _, kv := range sp.Attributes {
				if kv.Key == telemetry.AttrQueuePosition || kv.Key == telemetry.AttrQueueDepth {
					got[len(got)-1] += kv.Value.String() + " "
				}
				if kv.Key == telemetry.AttrQueueMS && sp.EndTime.Sub(sp.StartTime).Milliseconds() != kv.Value.AsInt64() {
					t.Errorf("the wait took %v, its attribute says %d ms", sp.EndTime.Sub(sp.StartTime), kv.Value.AsInt64())
				}
			}
		}
		return len(got) == 3 && slices.Equal(got[1:], []string{"1 1 ", "2 2 "}), fmt.Sprintf("places and depths %q", got)
	})
}

// F-168, CTX: what the root of a trace decided on its recording holds over all hops,
// whatever the share of new traces; what is no trace context starts a new trace and
// fails nothing.
func TestSamplingHoldsOverAllHops(t *testing.T) {
	t.Parallel()
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	parent := func(flags string) string { return "00-" + id + "-00f067aa0ba902b7-" + flags }
	for ratio, cases := range map[float64]map[string]bool{
		0: {"": false, parent("01"): true, parent("00"): false},
		1: {"": true, parent("01"): true, parent("00"): false, "00-nonsense": true},
	} {
		t.Run(fmt.Sprint("ratio ", ratio), func(t *testing.T) {
			t.Parallel()
			exporter := tracetest.NewInMemoryExporter()
			s := New(t, Options{Model: Delegator{}, TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter), sdktrace.WithSampler(telemetry.Sampler(ratio)))})
			s.Admission("adm-1")
			s.Executor("ex-1", 4, time.Second)
			_, addr := s.LeadOf("lead-1", t.TempDir(), lead.HTTPConfig{AuthMode: "none"})
			c := s.client(addr, "")
			for header, recorded := range cases {
				exporter.Reset()
				req, err := http.NewRequestWithContext(timeout(t), http.MethodPost, "http://"+addr+"/v1/runs", bytes.NewReader([]byte(`{"input":"one"}`)))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Content-Type", "application/json")
				req.Header.Set("Baggage", "user_id=admin,tenant=other")
				if header != "" {
					req.Header.Set("Traceparent", header)
				}
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				var acc wire.RunAccepted
				err = json.NewDecoder(resp.Body).Decode(&acc)
				_ = resp.Body.Close()
				if err != nil || acc.RunID == "" {
					t.Fatalf("traceparent %q: the run was not taken: %v, status %d", header, err, resp.StatusCode)
				}
				var run wire.Run
				natstest.Eventually(t, Timeout, func() (bool, string) {
					run, err = c.GetRun(timeout(t), acc.RunID)
					return err == nil && run.Status == contract.RunCompleted, fmt.Sprint(run.Status, err)
				})
				if outside := len(header) == 55; run.TraceID == "" || outside != (run.TraceID == id) {
					t.Errorf("traceparent %q: the run's trace is %q", header, run.TraceID)
				}
				if recorded {
					natstest.Eventually(t, Timeout, func() (bool, string) {
						names := map[string]bool{}
						for _, sp := range exporter.GetSpans() {
							if sp.SpanContext.TraceID().String() == run.TraceID {
								names[sp.Name] = true
							}
						}
						return names["invoke_agent lead"] && names["wait for admission"] && names["invoke_agent general-purpose"], fmt.Sprintf("traceparent %q: spans %v", header, names)
					})
					continue
				}
				for _, sp := range exporter.GetSpans() {
					if sp.SpanContext.TraceID().String() == run.TraceID {
						t.Errorf("traceparent %q, ratio %v: span %q is recorded", header, ratio, sp.Name)
					}
				}
			}
		})
	}
}

// What models and tools are told and answer is in spans only where that is asked for,
// of the lead and of sub-agents, and without secrets.
func TestContentIsCapturedWhenAsked(t *testing.T) {
	t.Parallel()
	for name, content := range map[string]*telemetry.Content{"off": nil, "on": telemetry.NewContent([]string{})} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			exporter := tracetest.NewInMemoryExporter()
			s := New(t, Options{Model: Delegator{}, Content: content, TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter))})
			run, err := s.Whole().RunToEnd(timeout(t), wire.RunRequest{Input: "find the password=hunter2hunter2"})
			if err != nil {
				t.Fatal(err)
			}
			all := fmt.Sprint(exporter.GetSpans())
			if strings.Contains(strings.ToLower(all), "hunter2") {
				t.Error("a secret is in the spans")
			}
			seen := map[string]bool{}
			for _, sp := range exporter.GetSpans() {
				for _, kv := range sp.Attributes {
					switch kv.Key {
					case telemetry.AttrGenAIInputMessages, telemetry.AttrGenAIOutputMessages, telemetry.AttrGenAIToolArguments, telemetry.AttrGenAIToolResult:
						agent := ""
						for _, a := range sp.Attributes {
							if a.Key == telemetry.AttrGenAIAgentName {
								agent = a.Value.AsString()
							}
						}
						seen[agent+" "+string(kv.Key)] = true
					}
				}
			}
			want := 0
			if content != nil {
				want = 6 // two of each agent's calls of its model, two of the call of the tool
			}
			if len(seen) != want || run.Status != contract.RunCompleted {
				t.Errorf("the run has %s; captured are %v, want %d", run.Status, seen, want)
			}
		})
	}
}
