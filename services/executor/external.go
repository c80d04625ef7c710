package executor

import (
	"context"
	"slices"
	"time"

	"github.com/herdgate/herdgate/internal/deferral"
	"github.com/herdgate/herdgate/internal/external"
	"github.com/herdgate/herdgate/internal/mcp"
	"github.com/herdgate/herdgate/internal/tool"
)

// openExternal brings in the tools of MCP servers and narrows all tools to those that
// the task may have. Servers whose tools its lists leave out are not even asked.
func (j *job) openExternal(ctx context.Context, own []tool.Tool) error {
	a, req := j.a, j.a.grant.Request
	m := a.s.deps.MCP
	if m.Enabled() {
		a.turn.giveWay() // a server may have to be started
	}
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(req.Subagent.TimeoutSeconds)*time.Second, errTimeout)
	defer cancel()
	var err error
	j.external, j.tools, err = external.Open(ctx, m, a.s.cfg.Settings.ToolSearch, own, mcp.Wanted(req.OfferedTools, req.Subagent.Tools), func(all []tool.Tool) []tool.Tool {
		return a.authorised(a.allowed(all))
	})
	return err
}

// addDeferral adds what takes tools on demand out of requests. Every task starts with
// none of them (DEFER-10).
func (c *chain) addDeferral(j *job) {
	j.external.Replay(deferral.State{}, nil, j.a.grant.Request.Prompt)
	c.pieces = append(c.pieces, j.external.Pieces()...)
}

// authorised leaves the tools that whoever the task works for may use, before anything
// is deferred (TOOL-03).
func (a *attempt) authorised(tools []tool.Tool) []tool.Tool {
	may := a.s.deps.Authorise
	if may == nil {
		return tools
	}
	who := a.grant.Request.Identity
	return slices.DeleteFunc(tools, func(t tool.Tool) bool { return !may(who, t.Spec().Name) })
}
