package run

import (
	"fmt"

	"github.com/herdgate/herdgate/internal/skill"
)

// openSkills reads the skills that the run may use. It works for the run's user, as
// its sub-agents do (SKILL-04, SKILL-05).
func (d *drive) openSkills() error {
	disclosed, warnings, err := d.e.deps.Skills.Disclosed(d.rec.Tenant, d.conv.UserID, d.rec.Options.AvailableSkills)
	for _, w := range warnings {
		d.log.Debug().Str("file", w.File).Int("line", w.Line).Bool("left_out", w.Broken).Msg("skill: " + w.Text)
	}
	if err != nil {
		return fmt.Errorf("the skills cannot be read: %w", err)
	}
	d.skills = skill.NewSession(disclosed)
	return nil
}
