package guard

import (
	"context"
	"fmt"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/tool"
)

// OutputBudget bounds what a tool's result puts into the conversation. The tools
// of a workspace keep within the limit by themselves, in ways that suit them;
// this is for all others, so what is a little longer passes.
func OutputBudget(maxChars int) agent.Piece {
	return agent.Piece{Name: "tool_output_budget", Tool: func(next agent.Invoke) agent.Invoke {
		return func(ctx context.Context, t tool.Tool, call tool.Call) (tool.Result, error) {
			res, err := next(ctx, t, call)
			res.Text = shorten(res.Text, maxChars)
			return res, err
		}
	}}
}

// shorten keeps two thirds of the limit from the beginning and the rest from the
// end of a text that is much longer than it.
func shorten(s string, limit int) string {
	slack := limit/10 + 1000
	if limit <= 0 || len(s) <= limit+slack || utf8.RuneCountInString(s) <= limit+slack {
		return s
	}
	r := []rune(s)
	head := limit * 2 / 3
	tail := limit - head
	return fmt.Sprintf("%s\n[… %d of %d characters are left out here; ask for less at a time …]\n%s", string(r[:head]), len(r)-limit, len(r), string(r[len(r)-tail:]))
}
