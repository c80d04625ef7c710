package executor

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// echo gives the same each time.
type echo struct{ name string }

func (e echo) Spec() model.ToolSpec { return model.ToolSpec{Name: e.name} }
func (echo) Call(context.Context, tool.Call) (tool.Result, error) {
	return tool.Result{Text: "hi"}, nil
}

// using makes a service whose settings a test has changed.
func (w *world) using(change func(*config.Config)) {
	w.Helper()
	settings := config.Default()
	change(&settings)
	w.svc = w.service(w.srv.Conn("ex-2"), func(c *Config) { c.Settings = &settings })
}

// GUARD-03, GUARD-07, GUARD-11, GUARD-12, GUARD-13, GUARD-15, GUARD-16, STATUS-07,
// F-064, F-068: turn, token and loop caps, each with and without usable text, never
// make another status; the reason is a field of its own.
func TestCaps(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.tools = []tool.Tool{echo{"bash"}}
	w.using(func(c *config.Config) {
		c.Subagents.TokenBudget = &config.TokenBudget{Enabled: true, MaxTokens: 1_000_000, WarnThreshold: 0.7, HardStopThreshold: 1}
		c.Subagents.Agents = map[string]config.AgentOverride{"general-purpose": {TokenBudget: &config.TokenBudget{Enabled: true, MaxTokens: 1000, WarnThreshold: 0.7, HardStopThreshold: 1}}}
	})
	for i, c := range []struct {
		name   string
		text   string
		turns  int
		tokens int64
		same   bool
		state  contract.State
		reason contract.StopReason
		told   string // in the result or the error
		asked  int
	}{
		{"loop with text", "half", 50, 0, true, contract.StateCompleted, contract.StopLoopCapped, "half\n\n[Stopped", 5},
		{"loop without", "", 50, 0, true, contract.StateFailed, contract.StopLoopCapped, "again and again", 5},
		{"tokens with text", "half", 50, 400, false, contract.StateCompleted, contract.StopTokenCapped, "half\n\n[Stopped", 3},
		{"tokens without", " ", 50, 400, false, contract.StateFailed, contract.StopTokenCapped, "token budget", 3},
		{"turns with text", " half ", 3, 0, false, contract.StateCompleted, contract.StopTurnCapped, "half", 3},
		{"turns without", "", 3, 0, false, contract.StateFailed, contract.StopTurnCapped, "3 turns", 3},
		{"loop at the last turn", "half", 5, 0, true, contract.StateCompleted, contract.StopLoopCapped, "half", 5},
		{"turns before the loop", "half", 4, 0, true, contract.StateCompleted, contract.StopTurnCapped, "half", 4},
	} {
		id := fmt.Sprint("t_", i)
		before := w.model.asked()
		w.model.answers(func(_ context.Context, n int) (model.Response, error) {
			if c.same {
				n = 0
			}
			return model.Response{
				Message: model.Message{Text: c.text, ToolCalls: []model.ToolCall{{Name: "bash", Args: fmt.Sprintf(`{"command":"echo %d"}`, n)}}, FinishReason: "tool_calls"},
				Usage:   &contract.Usage{InputTokens: c.tokens},
			}, nil
		})
		g := w.granted(id, 1)
		g.Request.Subagent.MaxTurns = c.turns
		w.background(w.begin(g))()
		rec, _ := w.record(id)
		if rec.State != c.state || rec.StopReason != c.reason || rec.ErrorCode != "" || !strings.Contains(rec.Result+rec.Error, c.told) {
			t.Errorf("%s: record = %+v", c.name, rec)
		}
		if c.state == contract.StateCompleted == (rec.Result == "") || c.state == contract.StateFailed == (rec.Error == "") {
			t.Errorf("%s: result %q, error %q", c.name, rec.Result, rec.Error)
		}
		if asked := w.model.asked() - before; asked != c.asked {
			t.Errorf("%s: %d model calls, want %d", c.name, asked, c.asked)
		}
		if ends := strings.Fields(w.events(id)); ends[len(ends)-1] != string(c.state) {
			t.Errorf("%s: events %v", c.name, ends)
		}
	}
}

// EXEC-09, GUARD-19: siblings of one run that do the same at the same time are
// counted each alone.
func TestSiblingsShareNoGuard(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.tools = []tool.Tool{echo{"bash"}}
	var mu sync.Mutex
	turns := map[string]int{}
	w.model.answers(func(ctx context.Context, _ int) (model.Response, error) {
		mu.Lock()
		defer mu.Unlock()
		id := fmt.Sprint(ctx.Value(siblingKey{}))
		if turns[id]++; turns[id] == 5 {
			return model.Response{Message: model.Message{Text: "done", FinishReason: "stop"}}, nil
		}
		return model.Response{Message: model.Message{ToolCalls: []model.ToolCall{{Name: "bash", Args: `{"command":"ls"}`}}, FinishReason: "tool_calls"}, Usage: &contract.Usage{InputTokens: 1000}}, nil
	})
	var waits, jobs []func()
	for i := range 3 {
		w.ctx = context.WithValue(w.ctx, siblingKey{}, i)
		jobs = append(jobs, w.begin(w.granted(fmt.Sprint("t_", i), 1)))
	}
	for _, j := range jobs {
		waits = append(waits, w.background(j))
	}
	for i := range 3 {
		waits[i]()
		if rec, _ := w.record(fmt.Sprint("t_", i)); rec.State != contract.StateCompleted || rec.StopReason != "" || rec.Result != "done" {
			t.Errorf("record = %+v", rec)
		}
	}
}

type siblingKey struct{}
