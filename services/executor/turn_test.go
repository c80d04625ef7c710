package executor

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// longTask is an agent loop with all pieces of the chain on, a history of so many
// messages before it, and a model and a tool that take no time.
type longTask struct {
	job     *job
	history []model.Message
}

func newLongTask(tb testing.TB, messages int) *longTask {
	tb.Helper()
	m := &fakeModel{}
	models, err := model.NewRegistry(m)
	if err != nil {
		tb.Fatal(err)
	}
	settings := config.Default()
	settings.Summarization.Enabled = true // with a trigger that is looked at and never reached
	settings.Summarization.Trigger = []config.Threshold{{Type: config.ThresholdMessages, Value: 100_000}}
	s, err := New(Config{Name: "bench", Settings: &settings}, Deps{Models: models, Log: zerolog.Nop()})
	if err != nil {
		tb.Fatal(err)
	}
	req := request("t_1")
	t := &longTask{job: &job{a: &attempt{s: s, grant: contract.Grant{TaskID: "t_1", Request: req}, log: s.log}, ctx: tb.Context(), model: m, tools: []tool.Tool{echo{"bash"}}}}
	t.history = t.job.firstMessages()
	for i := 0; len(t.history) < messages; i++ {
		id := fmt.Sprintf("h%d", i)
		t.history = append(t.history,
			model.Message{ID: "a" + id, Role: model.RoleAssistant, Text: "Looking at the next part.", FinishReason: "tool_calls", ToolCalls: []model.ToolCall{{ID: id, Name: "bash", Args: fmt.Sprintf(`{"command":"grep -n TODO part%d.go"}`, i)}}},
			model.Message{ID: "t" + id, Role: model.RoleTool, ToolCallID: id, ToolName: "bash", Text: strings.Repeat(fmt.Sprintf("part%d.go:12: // TODO look again\n", i), 8)},
		)
	}
	return t
}

// run makes n turns.
func (t *longTask) run(tb testing.TB, n int) {
	tb.Helper()
	chain, err := t.job.newChain()
	if err != nil {
		tb.Fatal(err)
	}
	m := t.job.model.(*fakeModel)
	m.calls = 0
	m.answer = func(_ context.Context, n int) (model.Response, error) {
		return model.Response{
			Message: model.Message{Text: "Next.", FinishReason: "tool_calls", ToolCalls: []model.ToolCall{{ID: fmt.Sprint("c", n), Name: "bash", Args: fmt.Sprintf(`{"command":"step %d"}`, n)}}},
			Usage:   &contract.Usage{InputTokens: 10, OutputTokens: 2, TotalTokens: 12}, Model: "fake-1",
		}, nil
	}
	res, err := agent.Run(tb.Context(), agent.Config{Agent: "general-purpose", Model: m, Tools: t.job.tools, MaxTurns: n, Chain: chain.pieces, Log: t.job.a.log}, t.history)
	if err != nil || res.Turns != n || len(res.Messages) != len(t.history)+2*n {
		tb.Fatalf("%d turns, %d messages, %v; want %d turns", res.Turns, len(res.Messages), err, n)
	}
}

// BenchmarkTurn measures what one turn costs beside the model and the tool: the
// request made of the history, all pieces of the chain, the answer and the result.
func BenchmarkTurn(b *testing.B) {
	for _, messages := range []int{50, 100, 500, 1000, 2000} {
		b.Run(fmt.Sprintf("history=%d", messages), func(b *testing.B) {
			t := newLongTask(b, messages)
			const each = 10
			b.ReportAllocs()
			for b.Loop() {
				t.run(b, each)
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*each), "µs/turn")
		})
	}
}

// EXEC-10: what a turn costs grows no worse than with the length of its history.
func TestTurnIsLinear(t *testing.T) {
	cost := func(messages int) (allocs float64, took time.Duration) {
		s := newLongTask(t, messages)
		allocs = testing.AllocsPerRun(1, func() { s.run(t, 4) }) // they do not depend on what else the machine does
		took = time.Hour
		for range 5 {
			began := time.Now()
			s.run(t, 4)
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
