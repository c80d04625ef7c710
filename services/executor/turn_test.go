package executor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// longTask is an agent loop as a task has it, with all pieces of the chain on, a
// history of so many messages before it, and a model and a tool that take no time.
type longTask struct {
	job     *job
	history []model.Message
}

func newLongTask(tb testing.TB, messages int, triggers ...config.Threshold) *longTask {
	tb.Helper()
	m := &fakeModel{}
	models, err := model.NewRegistry(m)
	if err != nil {
		tb.Fatal(err)
	}
	settings := config.Default()
	settings.Summarization.Enabled = true // with triggers that are looked at and never reached
	settings.Summarization.Trigger = append(triggers, config.Threshold{Type: config.ThresholdMessages, Value: 100_000})
	s, err := New(Config{Name: "bench", Settings: &settings}, Deps{Models: models, Log: zerolog.Nop()})
	if err != nil {
		tb.Fatal(err)
	}
	a := &attempt{s: s, grant: contract.Grant{TaskID: "t_1", Request: request("t_1")}, log: s.log, base: s.now(), today: s.now(), cancel: func(error) {}, span: noop.Span{}}
	a.rec = contract.TaskRecord{TaskID: "t_1", RunID: a.grant.Request.RunID, Tenant: a.grant.Request.Tenant, ThreadID: a.grant.Request.ThreadID}
	a.until.Store(int64(time.Hour))
	t := &longTask{job: &job{a: a, ctx: tb.Context(), model: m, tools: []tool.Tool{echo{"bash"}}, skills: skill.NewSession(nil)}}
	t.history = t.job.firstMessages()
	chain := t.chain(tb)
	for i := 0; len(t.history) < messages; i++ {
		call := model.ToolCall{ID: fmt.Sprintf("h%d", i), Name: "bash", Args: fmt.Sprintf(`{"command":"grep -n TODO part%d.go"}`, i)}
		res := chain.receipts.Piece().AfterTool(call, tool.Result{Text: strings.Repeat(fmt.Sprintf("part%d.go:12: // TODO look again\n", i), 8)})
		t.history = append(t.history,
			model.Message{ID: "a" + call.ID, Role: model.RoleAssistant, Text: "Looking at the next part.", FinishReason: "tool_calls", ToolCalls: []model.ToolCall{call}},
			model.Message{ID: "t" + call.ID, Role: model.RoleTool, ToolCallID: call.ID, ToolName: "bash", Text: res.Text, Metadata: res.Metadata},
		)
	}
	return t
}

// everyPiece is what a chain with everything on has.
var everyPiece = []string{
	"receipts", "input_sanitising", "tool_output_budget", "remote_result_sanitising", "read_before_write", "skill_activation", "skill_policy",
	"loop_guard", "token_guard", "safety_guard", "durable_context", "summarisation", "date_context", "system_coalescing",
}

func (t *longTask) chain(tb testing.TB) *chain {
	tb.Helper()
	c, err := t.job.newChain()
	if err != nil {
		tb.Fatal(err)
	}
	var names []string
	for _, p := range c.pieces {
		names = append(names, p.Name)
	}
	if !slices.Equal(names, everyPiece) {
		tb.Fatalf("the chain is %q, want %q", names, everyPiece)
	}
	return c
}

// run makes n turns after a first one, which reads the whole history once. began
// is called when the first one is over, and is not nil.
func (t *longTask) run(tb testing.TB, n int, began func()) {
	tb.Helper()
	m := t.job.model.(*fakeModel)
	m.calls = 0
	m.answer = func(_ context.Context, n int) (model.Response, error) {
		if n == 2 {
			began()
		}
		return model.Response{
			Message: model.Message{Text: "Next.", FinishReason: "tool_calls", ToolCalls: []model.ToolCall{{ID: fmt.Sprint("c", n), Name: "bash", Args: fmt.Sprintf(`{"command":"step %d"}`, n)}}},
			Usage:   &contract.Usage{InputTokens: 10, OutputTokens: 2, TotalTokens: 12}, Model: "fake-1",
		}, nil
	}
	a, cfg := t.job.a, t.job.loop(t.chain(tb))
	cfg.MaxTurns = n + 1
	steps := 0
	cfg.OnMessage = func(_ context.Context, msg model.Message, usage *contract.Usage, modelName string) error {
		steps++ // made, and not sent
		_ = event.Running(a.rec, steps, event.BuildStep(msg), modelName, usage, a.s.source(), a.s.now())
		return nil
	}
	res, err := agent.Run(tb.Context(), cfg, t.history)
	if err != nil || res.Turns != n+1 || len(res.Messages) != len(t.history)+2*(n+1) || steps != 2*(n+1) {
		tb.Fatalf("%d turns, %d messages, %d steps, %v; want %d turns", res.Turns, len(res.Messages), steps, err, n+1)
	}
}

// BenchmarkTurn measures what one turn costs beside the model and the tool: the
// request made of the history, all pieces of the chain, the answer, the result and
// their step events.
func BenchmarkTurn(b *testing.B) {
	for _, messages := range []int{50, 100, 500, 1000, 2000} {
		b.Run(fmt.Sprintf("history=%d", messages), func(b *testing.B) {
			t := newLongTask(b, messages, config.Threshold{Type: config.ThresholdTokens, Value: 100_000_000})
			const each = 10
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				t.run(b, each, b.StartTimer)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/1000/float64(b.N*each), "µs/turn")
		})
	}
}

// EXEC-10: what a turn costs grows no worse than with the length of its history.
func TestTurnIsLinear(t *testing.T) {
	cost := func(messages int) (allocs float64, took time.Duration) {
		s := newLongTask(t, messages)  // that no message's tokens are counted twice is a test of package compact
		turns := func(n int) float64 { // they do not depend on what else the machine does
			return testing.AllocsPerRun(1, func() { s.run(t, n, func() {}) })
		}
		allocs = turns(5) - turns(1)
		took = time.Hour
		for range 5 {
			var began time.Time
			s.run(t, 5, func() { began = time.Now() })
			took = min(took, time.Since(began))
		}
		return allocs, took
	}
	short, fast := cost(250)
	long, slow := cost(2000)
	t.Logf("four turns with a history of 250: %.0f allocations, %v; of 2000: %.0f and %v", short, fast, long, slow)
	if long > 12*short {
		t.Errorf("eight times the history takes %.1f times the allocations", long/short)
	}
	if slow > 40*fast { // quadratic were 64
		t.Errorf("eight times the history takes %.1f times as long", float64(slow)/float64(fast))
	}
}
