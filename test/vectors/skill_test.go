package vectors

import (
	"testing"

	"github.com/herdgate/herdgate/internal/skill"
)

// SKILL-01, SKILL-02, SKILL-03
func runSkillMerge(t *testing.T, c vectorCase) {
	in := into[struct {
		Parent  []string `json:"parent"`
		Child   []string `json:"child"`
		Config  []string `json:"config_skills"`
		Enabled []string `json:"enabled_catalogue"`
	}](t, c.inputs)
	if in.Enabled != nil { // loading
		var all []skill.Skill
		for _, name := range in.Enabled {
			all = append(all, skill.Skill{Name: name, Enabled: true})
		}
		loaded := []string{}
		for _, s := range skill.NewCatalogue(all...).Select(in.Config) {
			loaded = append(loaded, s.Name)
		}
		equal(t, "Select", loaded, c.expected)
		return
	}
	equal(t, "Merge", skill.Merge(in.Parent, in.Child), c.expected)
}
