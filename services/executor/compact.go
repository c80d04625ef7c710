package executor

import "github.com/herdgate/herdgate/internal/compact"

// addCompaction adds what keeps the conversation within the model's limits, if it
// is on (COMPACT-01). It has no hooks: a sub-agent works in its parent's thread, and
// nothing of it belongs into the parent's memory (COMPACT-07).
func (c *chain) addCompaction(j *job) error {
	compactor, err := compact.For(j.a.s.cfg.Settings, j.a.s.deps.Models, j.model, compact.Options{Log: j.a.log})
	if err != nil {
		return err
	}
	c.pieces = append(c.pieces, compactor.Pieces()...)
	return nil
}
