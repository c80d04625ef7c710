package subagent

import "slices"

// Tools that the filters know by name.
const (
	taskTool    = "task"
	uploadsTool = "list_uploaded_files"
	searchTool  = "tool_search"
)

// helperTools stay whatever a skill allows: without them an agent could
// neither read about a skill nor find a tool.
var helperTools = []string{"describe_skill", "read_file", "review_skill_package", searchTool}

// FilterTools returns the offered tools that a type may have, in the order in
// which they were offered. For allow, nil means all and empty none; a name on
// both lists is denied. Names compare exactly, unknown ones do no harm. The
// result is never nil.
func FilterTools(offered, allow, deny []string) []string {
	out := make([]string, 0, len(offered))
	for _, name := range offered {
		if allow != nil && !slices.Contains(allow, name) || slices.Contains(deny, name) {
			continue
		}
		out = append(out, name)
	}
	return out
}

// SkillPolicy joins what the active skills declare as their tools, nil being a
// skill without a declaration. As long as none declares anything there is no
// restriction; as soon as one does, those without add nothing.
func SkillPolicy(declarations [][]string) (allowed []string, unrestricted bool) {
	unrestricted = true
	for _, d := range declarations {
		if d == nil {
			continue
		}
		unrestricted = false
		for _, name := range d {
			if !slices.Contains(allowed, name) {
				allowed = append(allowed, name)
			}
		}
	}
	if !unrestricted && allowed == nil {
		allowed = []string{}
	}
	return allowed, unrestricted
}

// Stages is what decides about a sub-agent's tools. Each stage only narrows:
// nothing later gives back what an earlier one took.
type Stages struct {
	// ParentScope is the ceiling: what the parent may offer.
	ParentScope []string
	// Allow and Deny are the type's lists, as in [FilterTools].
	Allow, Deny []string
	// ActiveSkills are the declarations of the active skills, as in [SkillPolicy].
	ActiveSkills [][]string
	// SkillsUnresolvable: an active skill could not be authorised. Only helpers
	// remain then.
	SkillsUnresolvable bool
	// SearchTool: tools are deferred, so that the search tool is added. It is not
	// subject to the type's lists, because its catalogue holds only what passed
	// them.
	SearchTool bool
}

// Chain returns the tools that pass all stages. A sub-agent can never delegate
// and cannot list its parent's uploads, whatever the lists say.
func Chain(s Stages) []string {
	tools := FilterTools(s.ParentScope, nil, []string{taskTool, uploadsTool})
	tools = FilterTools(tools, s.Allow, s.Deny)
	if s.SearchTool && !slices.Contains(tools, searchTool) {
		tools = append(tools, searchTool)
	}
	return LimitOf(s.ActiveSkills, s.SkillsUnresolvable).Filter(tools)
}
