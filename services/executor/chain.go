package executor

import (
	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/outcome"
)

// chain is what stands around the model and the tools of one task. It is made of
// one snapshot of the settings, for this task alone (EXEC-08, EXEC-09); package
// agent gives its order.
type chain struct {
	pieces []agent.Piece
	// finish adds what the pieces know to the outcome, in the order of the list.
	finish []func(*outcome.Outcome, agent.Result)
}

// newChain makes the chain of a task.
func (j *job) newChain() (*chain, error) {
	c := &chain{}
	var err error
	c.pieces, err = agent.Chain(c.pieces...)
	return c, err
}
