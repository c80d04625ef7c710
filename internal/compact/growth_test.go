package compact

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
)

// long is a conversation of n messages.
func long(n int) []model.Message {
	out := first()
	for i := 0; len(out) < n; i++ {
		id := fmt.Sprint("c", i)
		out = append(out, model.Message{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{{ID: id, Name: "look", Args: `{"n":1}`}}},
			model.Message{Role: model.RoleTool, ToolCallID: id, ToolName: "look", Text: strings.Repeat("some words of a result ", 20)})
	}
	return out[:n]
}

// patient compacts at a size that is never reached.
func patient() *Compactor {
	s := settings(1, 20)
	s.Trigger = []config.Threshold{{Type: config.ThresholdTokens, Value: 1e9}}
	return New(Options{Settings: s})
}

// What was counted once is not counted again, so that a turn costs the same in a
// conversation of any length, but for one addition a message.
func TestTurnsDoNotCountAgain(t *testing.T) {
	for _, n := range []int{50, 500, 2000} {
		c := patient()
		now := agent.State{Messages: long(n)}
		turn := func() {
			if _, err := c.before(context.Background(), now); err != nil {
				t.Fatal(err)
			}
		}
		turn()
		if allocs := testing.AllocsPerRun(5, turn); allocs > 10 || len(c.sizes) != n {
			t.Errorf("a turn with %d messages, %d of them counted, makes %v allocations", n, len(c.sizes), allocs)
		}
	}
}

// BenchmarkTurn is what compaction adds to a turn in which two messages are new.
func BenchmarkTurn(b *testing.B) {
	for _, n := range []int{50, 500, 2000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			c := patient()
			c.kept.Summary = strings.Repeat("summary ", 500)
			now := agent.State{Messages: long(n)}
			generate := c.show(c.learn(func(context.Context, model.Request, func(model.Delta)) (model.Response, error) {
				return model.Response{}, nil
			}))
			if _, err := c.before(b.Context(), now); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				c.sizes = c.sizes[:n-2]
				if _, err := c.before(b.Context(), now); err != nil {
					b.Fatal(err)
				}
				if _, err := generate(b.Context(), model.Request{Messages: now.Messages}, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// COMPACT-01: after a compaction the size is what the provider counted less what
// went, and the data that is shown counts where no provider has counted.
func TestSizeAfterCompaction(t *testing.T) {
	t.Parallel()
	s := settings(1, 2)
	s.Trigger = []config.Threshold{{Type: config.ThresholdTokens, Value: 1000}}
	c := New(Options{Settings: s, Model: worker(0)})
	now := agent.State{Messages: long(22)}
	c.known, c.upTo = 2000, 22
	change, err := c.before(t.Context(), now)
	if err != nil || len(change.Messages) != 4 {
		t.Fatalf("%v: %d messages are left, want 4", err, len(change.Messages))
	}
	want := 2000 + Tokens(c.Kept().Summary)
	for _, m := range now.Messages[2:20] {
		want -= messageSize(m)
	}
	if got := c.size(agent.State{Messages: change.Messages}); got != want || got >= 1000 || c.futile != 0 {
		t.Errorf("%d tokens are left, want %d", got, want)
	}

	fresh := agent.State{Messages: long(4)}
	without, with := New(Options{Settings: s}), New(Options{Settings: s, Kept: Kept{Summary: strings.Repeat("kept words ", 100)}})
	if got, want := with.size(fresh)-without.size(fresh), Tokens(note)+Tokens(with.data()); got != want {
		t.Errorf("what is shown counts %d tokens, want %d", got, want)
	}
}
