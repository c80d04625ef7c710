package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// drops is a piece that leaves the first message and the newest step once the
// conversation has more than limit messages.
func drops(limit int) Before {
	return func(_ context.Context, now State) (Change, error) {
		if len(now.Messages) <= limit {
			return Change{}, nil
		}
		start := len(now.Messages) - 1
		for now.Messages[start].Role == model.RoleTool {
			start--
		}
		return Change{Messages: append([]model.Message{now.Messages[0]}, now.Messages[start:]...), Usage: &contract.Usage{InputTokens: 3, OutputTokens: 1, TotalTokens: 4}}, nil
	}
}

// COMPACT-09, STEP-04: over a conversation that gets shorter, ids and ordinals go on,
// every message is told once, and what was spent on it counts.
func TestShorten(t *testing.T) {
	t.Parallel()
	var told, ordinals, callIDs []string
	var shortened []int
	m := &fakeModel{generate: func(_ context.Context, _ model.Request, n int) (model.Response, error) {
		msg := text("done")
		if n < 8 {
			msg = calls(call("same", "good", ""), call("", "good", ""))
		}
		return model.Response{Message: msg, Usage: &contract.Usage{InputTokens: 10, TotalTokens: 10}}, nil
	}}
	res := run(t, Config{
		Model: m, Chain: []Piece{{Name: "summarisation", BeforeModel: drops(6)}},
		Tools: []tool.Tool{&fakeTool{"good", func(_ context.Context, c tool.Call) (tool.Result, error) {
			if c.Position == 0 {
				ordinals = append(ordinals, fmt.Sprint(c.Message))
			}
			return tool.Result{Text: "ok"}, nil
		}}},
		MaxParallel: 1,
		OnMessage: func(_ context.Context, msg model.Message, _ *contract.Usage, _ string) error {
			told = append(told, msg.ID)
			for _, c := range msg.ToolCalls {
				callIDs = append(callIDs, c.ID)
			}
			return nil
		},
		OnShorten: func(_ context.Context, now Result) error {
			shortened = append(shortened, len(now.Messages))
			return nil
		},
	})
	var want []string
	for i := 1; i <= 7*3+1; i++ {
		want = append(want, fmt.Sprint("m", i))
	}
	if !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
	if !slices.Equal(ordinals, strings.Fields("0 1 2 3 4 5 6")) {
		t.Errorf("ordinals = %q", ordinals)
	}
	if len(shortened) == 0 || slices.Max(shortened) > 4 || res.Gone.Messages+len(res.Messages) != 23 || res.Gone.Assistants == 0 {
		t.Errorf("shortened to %v, gone %+v with %d messages", shortened, res.Gone, len(res.Messages))
	}
	if res.LastAssistant() == nil || res.LastAssistant().Text != "done" || res.Turns != 8 {
		t.Errorf("result = %+v", res)
	}
	if got := res.Usage.TotalTokens; got != int64(8*10+4*len(shortened)) {
		t.Errorf("%d tokens after %d shortenings", got, len(shortened))
	}
	ids := map[string]bool{}
	for _, id := range callIDs {
		if ids[id] {
			t.Errorf("the call id %s comes twice", id)
		}
		ids[id] = true
	}
	for _, req := range m.requests {
		replayed(t, req.Messages)
		if len(req.Messages) > 7 {
			t.Errorf("a request has %d messages", len(req.Messages))
		}
	}

	// COMPACT-09: a loop that is taken over goes on with the numbers.
	again, err := Run(limit(t), with(Config{Model: says(text("more")), Gone: res.Gone}), append(res.Messages, model.Message{ID: "x", Role: model.RoleUser, Text: "and?"}))
	if err != nil || again.LastAssistant().ID != "m24" {
		t.Errorf("%v, %+v", err, again.LastAssistant())
	}
}

// COMPACT-05, F-070: a piece that would tear a call from its result is not followed.
func TestShortenNeverTears(t *testing.T) {
	t.Parallel()
	history := append(user("go"), model.Message{ID: "m1", Role: model.RoleAssistant, ToolCalls: []model.ToolCall{call("a", "good", ""), call("b", "good", "")}},
		model.Message{ID: "m2", Role: model.RoleTool, ToolCallID: "a"}, model.Message{ID: "m3", Role: model.RoleTool, ToolCallID: "b"})
	for name, c := range map[string]struct {
		keep []int
		torn bool
	}{
		"all": {[]int{0, 1, 2, 3}, false}, "the step is gone": {[]int{0}, false}, "without the question": {[]int{1, 2, 3}, false},
		"results alone": {[]int{0, 2, 3}, true}, "a call alone": {[]int{0, 1, 2}, true}, "calls alone": {[]int{0, 1}, true}, "parted": {[]int{1, 0, 2, 3}, true},
	} {
		var now []model.Message
		for _, i := range c.keep {
			now = append(now, history[i])
		}
		m := says(text("done"))
		res, err := Run(limit(t), with(Config{Model: m, BeforeModel: []Before{func(context.Context, State) (Change, error) { return Change{Messages: now}, nil }}}), history)
		if err != nil {
			t.Fatal(err)
		}
		want := len(now)
		if c.torn {
			want = len(history)
		}
		if len(res.Messages) != want+1 {
			t.Errorf("%s: %d messages are left, want %d", name, len(res.Messages)-1, want)
		}
		replayed(t, m.requests[0].Messages)
	}
}

// F-070: a result that had lost its call before stands in the way of no shortening,
// and no provider sees it.
func TestShortenBesideAStrayResult(t *testing.T) {
	t.Parallel()
	history := append(user("go"), model.Message{ID: "m1", Role: model.RoleAssistant, Text: "hm"}, model.Message{ID: "m2", Role: model.RoleTool, ToolCallID: "lost", Text: "stray"},
		model.Message{ID: "m3", Role: model.RoleAssistant, ToolCalls: []model.ToolCall{call("a", "good", "")}}, model.Message{ID: "m4", Role: model.RoleTool, ToolCallID: "a"})
	m := says(text("done"))
	res, err := Run(limit(t), with(Config{Model: m, BeforeModel: []Before{func(context.Context, State) (Change, error) { return Change{Messages: history[1:]}, nil }}}), history)
	if err != nil || len(res.Messages) != len(history) || res.Gone.Messages != 1 {
		t.Errorf("%v: %d messages, %+v gone", err, len(res.Messages), res.Gone)
	}
	replayed(t, m.requests[0].Messages)
}

// F-070, COMPACT-11: a conversation that the provider refuses as too long is
// shortened and sent once more, in the same turn; if nobody can shorten it, the
// refusal stands.
func TestShortenAfterARefusal(t *testing.T) {
	t.Parallel()
	tooLong := &model.Error{Kind: model.KindPermanent, Code: "http_400", Message: "status 400 Bad Request: context length exceeded"}
	for _, helps := range []bool{true, false} {
		var refused []bool
		m := &fakeModel{generate: func(_ context.Context, req model.Request, n int) (model.Response, error) {
			if n == 1 || !helps {
				return model.Response{}, tooLong
			}
			return model.Response{Message: text(fmt.Sprint(len(req.Messages)))}, nil
		}}
		cfg := with(Config{Model: m, BeforeModel: []Before{func(_ context.Context, now State) (Change, error) {
			refused = append(refused, now.Refused)
			if now.Refused && helps {
				return Change{Messages: now.Messages[:1]}, nil
			}
			return Change{}, nil
		}}})
		res, err := Run(limit(t), cfg, append(user("go"), model.Message{ID: "m1", Role: model.RoleUser, Text: "more"}))
		last := res.LastAssistant()
		if err != nil || res.Turns != 1 || !slices.Equal(refused, []bool{false, true}) || last == nil {
			t.Fatalf("%v: %d turns, asked %v", err, res.Turns, refused)
		}
		if helps && (last.Text != "1" || last.ErrorFallback) || !helps && (!last.ErrorFallback || len(m.requests) != 1) {
			t.Errorf("helps %v: %+v after %d requests", helps, last, len(m.requests))
		}
	}
}

// CANCEL-01: what a piece or OnShorten refuses ends the loop with it.
func TestShortenStops(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]Config{
		"the piece": {BeforeModel: []Before{func(context.Context, State) (Change, error) {
			return Change{Usage: &contract.Usage{InputTokens: 5}}, errNo
		}}},
		"the store": {
			BeforeModel: []Before{func(_ context.Context, now State) (Change, error) { return Change{Messages: now.Messages}, nil }},
			OnShorten:   func(context.Context, Result) error { return errNo },
		},
	} {
		m := says(text("done"))
		cfg.Model = m
		res, err := Run(limit(t), with(cfg), user("go"))
		if !errors.Is(err, errNo) || len(m.requests) != 0 || name == "the piece" && (res.Usage == nil || res.Usage.TotalTokens != 5) {
			t.Errorf("%s: %v after %d requests, %+v", name, err, len(m.requests), res.Usage)
		}
	}
}

// F-070: what providers say when a conversation does not fit is understood.
func TestTooLong(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"This model's maximum context length is 8192 tokens": true, "prompt is too long: 210000 tokens > 200000 maximum": true,
		"input length and `max_tokens` exceed context limit: the context window": true, "unknown field messages[0].x": false, "": false,
	} {
		err := fmt.Errorf("asked: %w", &model.Error{Kind: model.KindPermanent, Code: "http_400", Message: text})
		if got := model.TooLong(err); got != want {
			t.Errorf("TooLong(%q) = %v", text, got)
		}
	}
	if model.TooLong(errNo) || model.TooLong(nil) || model.TooLong(&model.Error{Kind: model.KindTransient, Message: "context length"}) {
		t.Error("another error counts as too long")
	}
}
