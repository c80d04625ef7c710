package executor

import (
	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/deferral"
	"github.com/herdgate/herdgate/internal/guard"
	"github.com/herdgate/herdgate/internal/mcp"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/receipt"
)

// chain is what stands around the model and the tools of one task. It is made of
// one snapshot of the settings, for this task alone (EXEC-08, EXEC-09); package
// agent gives its order.
type chain struct {
	pieces []agent.Piece
	// finish adds what the pieces know to the outcome, in the order of the list.
	finish []func(*outcome.Outcome, agent.Result)
	// receipts keeps the receipts; nil if they are switched off.
	receipts *receipt.Receipts
}

// newChain makes the chain of a task.
func (j *job) newChain() (*chain, error) {
	c := &chain{}
	c.addReceipts(j)
	c.addGuards(j)
	c.addPrompt(j)
	c.addSkills(j)
	c.addDeferral(j)
	if err := c.addCompaction(j); err != nil {
		return nil, err
	}
	var err error
	if c.pieces, err = agent.Chain(c.pieces...); err != nil {
		return nil, err
	}
	return c, deferral.Check(j.a.s.cfg.Settings.ToolSearch.Enabled, j.tools, mcp.Remote, c.pieces)
}

// addGuards adds the guards of the task (GUARD-16, GUARD-18).
func (c *chain) addGuards(j *job) {
	settings := j.a.s.cfg.Settings
	guards := guard.New(guard.Config{Loop: settings.LoopDetection, Budget: settings.TokenBudget(j.a.grant.Request.Subagent.Name)})
	c.pieces = append(append(c.pieces, guards.Pieces()...), guard.OutputBudget(settings.Workspace.ToolOutputMaxChars), guard.ReadBeforeWrite())
	c.finish = append(c.finish, func(o *outcome.Outcome, _ agent.Result) {
		for _, stop := range guards.Take() {
			o.Guards = append(o.Guards, stop.Reason)
			o.NoText = o.NoText || stop.NoText
		}
	})
}
