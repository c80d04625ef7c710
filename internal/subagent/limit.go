package subagent

import (
	"context"
	"slices"
)

// ToolLimit is what the active skills leave of an agent's tools. The zero value
// leaves all of them.
type ToolLimit struct {
	limited bool
	names   []string // beside the helpers
}

// LimitOf makes the limit of the active skills' declarations, as in [SkillPolicy].
// Where an active skill could not be authorised, only the helpers remain
// (SKILL-07, SKILL-08).
func LimitOf(declarations [][]string, unresolvable bool) ToolLimit {
	if unresolvable {
		return ToolLimit{limited: true}
	}
	allowed, unrestricted := SkillPolicy(declarations)
	return ToolLimit{limited: !unrestricted, names: allowed}
}

// Limited reports whether any tool is taken away.
func (l ToolLimit) Limited() bool { return l.limited }

// Names are the tools that the skills allow, without the helpers, sorted.
func (l ToolLimit) Names() []string { return slices.Sorted(slices.Values(l.names)) }

// Allows reports whether the tool may be used, searched for and promoted.
func (l ToolLimit) Allows(name string) bool {
	return !l.limited || slices.Contains(helperTools, name) || slices.Contains(l.names, name)
}

// Filter returns what is allowed of names, in their order.
func (l ToolLimit) Filter(names []string) []string {
	out := make([]string, 0, len(names))
	for _, name := range names {
		if l.Allows(name) {
			out = append(out, name)
		}
	}
	return out
}

type limitKey struct{}

// WithToolLimit returns a context for a model call or a tool call that tells the
// limit to whatever offers, searches or promotes tools beneath it.
func WithToolLimit(ctx context.Context, l ToolLimit) context.Context {
	return context.WithValue(ctx, limitKey{}, l)
}

// ToolLimitOf is the limit that ctx tells; without one all tools are left.
func ToolLimitOf(ctx context.Context) ToolLimit {
	l, _ := ctx.Value(limitKey{}).(ToolLimit)
	return l
}

// MetaMatches is the metadata key under which a result of the search tool names the
// tools that it tells of, as a []string. While tools are limited, a result without
// it, or with a tool that is not allowed, is not shown (SKILL-08).
const MetaMatches = "tool_search_matches"
