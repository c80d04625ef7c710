package skill

import (
	"slices"
	"strings"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/subagent"
)

// MetaRead is the metadata key by which the result of a read_file names the skill
// whose SKILL.md was read. The program sets it, no tool does.
const MetaRead = "skill_read"

// readTool is the tool whose results can activate a skill.
const readTool = "read_file"

// State says which skills of a conversation are active. It is a fold over the
// conversation's messages, see [State.With], so that whoever takes one over has the
// same state; the fold can be kept where messages are not.
type State struct {
	// Slash is the skill that the task began with. While there is one, it alone counts.
	Slash string `json:"slash,omitempty"`
	// Read are the skills that were read, in that order.
	Read []string `json:"read,omitempty"`
}

// With is the state after one more message. Known are the skills that the agent was
// shown: what others write of any other name activates nothing (SKILL-11). Text of
// tools and of the program activates nothing either.
func (s State) With(m model.Message, known func(name string) bool) State {
	switch {
	case m.Role == model.RoleUser && !m.Marked(model.MetaHidden):
		if name := Slash(m.Text); name != "" && known(name) {
			s.Slash = name
		}
	case m.Role == model.RoleTool && m.ToolName == readTool && !m.IsError:
		if name, _ := m.Metadata[MetaRead].(string); name != "" && known(name) && !slices.Contains(s.Read, name) {
			s.Read = append(slices.Clone(s.Read), name)
		}
	}
	return s
}

// Active names the active skills.
func (s State) Active() []string {
	if s.Slash != "" {
		return []string{s.Slash}
	}
	return s.Read
}

// Slash is the name in a text that begins with /NAME, or "". Whether there is such a
// skill is another matter: a text may begin with a path.
func Slash(text string) string {
	rest, ok := strings.CutPrefix(strings.TrimLeft(text, " \t\r\n"), "/")
	if !ok {
		return ""
	}
	name := rest
	if end := strings.IndexAny(rest, " \t\r\n"); end >= 0 {
		name = rest[:end]
	}
	if !namePattern.MatchString(name) {
		return ""
	}
	return name
}

// Limit is what the active skills leave of the tools. Those that are not among the
// disclosed any more are passed over; if none is left of those that were activated,
// only the helpers remain (SKILL-06 to SKILL-08).
func (s State) Limit(disclosed []Skill) subagent.ToolLimit {
	active := s.Active()
	var declared [][]string
	for _, name := range active {
		if i := slices.IndexFunc(disclosed, func(o Skill) bool { return o.Name == name }); i >= 0 {
			declared = append(declared, disclosed[i].AllowedTools)
		}
	}
	return subagent.LimitOf(declared, len(active) > 0 && len(declared) == 0)
}
