package agent

import (
	"context"
	"slices"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Before looks at the stored conversation before the model is asked and may give
// a shorter one in its place. An error ends the loop with it.
type Before func(ctx context.Context, now State) (Change, error)

// State is a conversation as a [Before] sees it. It must not be changed.
type State struct {
	Messages []model.Message
	Tools    []model.ToolSpec
	// Refused says that the provider has just refused this conversation because it
	// is too long. If it gets shorter, the model is asked once more.
	Refused bool
}

// Change is what a [Before] wants.
type Change struct {
	// Messages takes the place of the conversation; nil leaves it. Every result
	// that it has stands behind its call, and no call has lost its result.
	Messages []model.Message
	// Usage is what the change cost, if anything.
	Usage *contract.Usage
}

// Gone counts what is not in a conversation any more because it was shortened.
// Ids and ordinals of later messages go on from it, so that none comes twice.
type Gone struct {
	Messages   int `json:"messages,omitempty"`
	Assistants int `json:"assistants,omitempty"`
}

// before lets the pieces shorten the conversation. It reports whether one did.
func (l *loop) before(ctx context.Context, refused bool) (bool, error) {
	changed := false
	for _, f := range l.cfg.BeforeModel {
		c, err := f(ctx, State{Messages: l.result.Messages, Tools: l.specs, Refused: refused})
		l.spend(c.Usage)
		if err != nil {
			return false, err
		}
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		if c.Messages == nil {
			continue
		}
		if torn(l.result.Messages, c.Messages) {
			l.cfg.Log.Error().Msg("a shortened conversation would have lost a call or its result; it is left as it was")
			continue
		}
		old := l.result.Messages
		l.result.Messages = slices.Clip(c.Messages)
		l.repaired.reset()
		l.result.Gone.Messages += len(old) - len(c.Messages)
		l.result.Gone.Assistants += assistants(old) - assistants(c.Messages)
		changed = true
		if l.cfg.OnShorten != nil {
			if err := l.cfg.OnShorten(ctx, l.result); err != nil {
				return false, err
			}
		}
	}
	if changed {
		// It may have taken long.
		return true, l.stopped(ctx)
	}
	return false, nil
}

// spend counts what a piece's own work cost, and tells the pieces.
func (l *loop) spend(u *contract.Usage) {
	if u = normalUsage(u); u == nil {
		return
	}
	l.result.Usage = l.result.Usage.Add(u)
	for _, f := range l.cfg.Spent {
		f(u)
	}
}

// torn reports whether a shortened conversation has a result without its call, or
// a call without the result that it had. A result that had lost its call before is
// none of the shortening's doing; requests leave it out.
func torn(old, now []model.Message) bool {
	had, _ := answered(old)
	have, stray := answered(now)
	for id := range stray {
		if had[id] {
			return true
		}
	}
	for _, m := range now {
		for _, c := range m.ToolCalls {
			if had[c.ID] && !have[c.ID] {
				return true
			}
		}
	}
	return len(now) > len(old)
}

// answered tells the ids of the results that stand directly behind their calls from
// those that do not.
func answered(messages []model.Message) (have, stray map[string]bool) {
	have, stray = map[string]bool{}, map[string]bool{}
	calls := map[string]bool{}
	for _, m := range messages {
		switch {
		case m.Role != model.RoleTool:
			clear(calls)
			for _, c := range m.ToolCalls {
				calls[c.ID] = true
			}
		case calls[m.ToolCallID]:
			have[m.ToolCallID] = true
		default:
			stray[m.ToolCallID] = true
		}
	}
	return have, stray
}

func assistants(messages []model.Message) int {
	n := 0
	for _, m := range messages {
		if m.Role == model.RoleAssistant {
			n++
		}
	}
	return n
}
