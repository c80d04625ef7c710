package tokens_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/tokens"
)

type echo struct{ calls int }

func (*echo) Name() string      { return "main" }
func (*echo) ModelName() string { return "echo" }
func (e *echo) Generate(context.Context, model.Request, func(model.Delta)) (model.Response, error) {
	e.calls++
	return model.Response{}, nil
}

// A request that is clearly too large is not sent, and the error is the one that
// has a conversation compacted. What is about as large as the limit is sent.
func TestLimit(t *testing.T) {
	t.Parallel()
	word := " hello" // one token
	for _, c := range []struct {
		n    int
		sent bool
	}{{10, true}, {950, true}, {1050, true}, {1200, false}, {1_000_000, false}} {
		e := &echo{}
		m := tokens.Limit(e, 1000)
		req := model.Request{Messages: []model.Message{{Role: model.RoleUser, Text: strings.Repeat(word, c.n)}}}
		for range 2 { // counted, and remembered
			_, err := m.Generate(t.Context(), req, nil)
			if c.sent {
				if err != nil {
					t.Errorf("%d words: %v, want them sent", c.n, err)
				}
				continue
			}
			var failed *model.Error
			if !errors.As(err, &failed) || !model.TooLong(err) || !strings.Contains(failed.Message, `"main" reads 1000 (max_input_tokens)`) {
				t.Errorf("%d words: %v, want a refusal that names the limit", c.n, err)
			}
		}
		if got := e.calls > 0; got != c.sent {
			t.Errorf("%d words: sent %v, want %v", c.n, got, c.sent)
		}
	}
	// Calls and tools count as well.
	for name, req := range map[string]model.Request{
		"calls": {Messages: []model.Message{{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{{Name: "f", Args: strings.Repeat(word, 1500)}}}}},
		"tools": {Tools: []model.ToolSpec{{Name: "f", Description: strings.Repeat(word, 1500)}}},
	} {
		if _, err := tokens.Limit(&echo{}, 1000).Generate(t.Context(), req, nil); !model.TooLong(err) {
			t.Errorf("%s: %v, want a refusal", name, err)
		}
	}
}

// The size of a conversation costs once: each turn only what is new is counted.
func BenchmarkLimit(b *testing.B) {
	m := tokens.Limit(&echo{}, 1_000_000)
	req := model.Request{}
	for i := range 2000 {
		req.Messages = append(req.Messages, model.Message{Role: model.RoleUser, Text: strings.Repeat("some words of a message ", 30) + strings.Repeat("x", i%7)})
	}
	for b.Loop() {
		if _, err := m.Generate(b.Context(), req, nil); err != nil {
			b.Fatal(err)
		}
	}
}
