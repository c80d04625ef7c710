package guard

import (
	"context"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/tool"
)

// ReadBeforeWrite keeps an agent from replacing a file that it has not read as it
// is now: what its siblings wrote into their common workspace is not lost unseen.
func ReadBeforeWrite() agent.Piece {
	seen := &tool.Seen{}
	return agent.Piece{Name: "read_before_write", Tool: func(next agent.Invoke) agent.Invoke {
		return func(ctx context.Context, t tool.Tool, call tool.Call) (tool.Result, error) {
			return next(tool.WithSeen(ctx, seen), t, call)
		}
	}}
}
