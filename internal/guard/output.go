package guard

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
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

// RemoteResults defuses the results of tools whose text comes from outside: strangers
// must not speak with the framework's voice. It comes after all that wraps the tools,
// because a cut may make a tag of what was none. Files of the workspace are shown as
// they are, or no edit of them could be exact.
func RemoteResults() agent.Piece {
	return agent.Piece{Name: "remote_result_sanitising", AfterTool: func(call model.ToolCall, res tool.Result) tool.Result {
		if remote(call.Name) {
			res.Text = prompt.Defuse(res.Text)
		}
		return res
	}}
}

// remote reports whether a tool brings text from outside: pages, and whatever the
// tools of other servers (SERVER__TOOL) say.
func remote(name string) bool {
	return strings.HasPrefix(name, "web_") || strings.Contains(name, "__")
}
