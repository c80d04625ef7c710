package executor

import (
	"fmt"

	"github.com/herdgate/herdgate/internal/skill"
)

// openSkills reads the skills that the task is shown: those of its user (SKILL-04),
// as far as the request's list goes. Folders of skills that cannot be read fail the
// task before anything of it begins (SKILL-09).
func (a *attempt) openSkills() (*skill.Session, error) {
	req := a.grant.Request
	disclosed, warnings, err := a.s.deps.Skills.Disclosed(req.Tenant, req.Identity.UserID, req.Subagent.Skills)
	for _, w := range warnings {
		a.log.Debug().Str("file", w.File).Int("line", w.Line).Bool("left_out", w.Broken).Msg("skill: " + w.Text)
	}
	if err != nil {
		return nil, fmt.Errorf("the skills cannot be read: %w", err)
	}
	return skill.NewSession(disclosed), nil
}

// addSkills adds what activates skills and keeps to what they allow.
func (c *chain) addSkills(j *job) {
	j.skills.Replay(skill.State{}, j.firstMessages())
	c.pieces = append(c.pieces, j.skills.Pieces()...)
}
