package prompt

import (
	"fmt"
	"slices"
	"strings"
)

// Unavailable is a server whose tools an agent cannot have now.
type Unavailable struct{ Server, Reason string }

// Deferred lists the names of the tools that an agent finds on demand, sorted, and
// nothing else of them (DEFER-03, TOOL-06). It is empty where there are none. Names are
// other people's text.
func Deferred(names []string) string {
	if len(names) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("<available-deferred-tools>\nThese tools of other servers can be used once you have found them: search with `tool_search` " +
		"by name or by what you need, and what it finds can be called from your next step on. Calls of the others are refused.\n")
	for _, n := range slices.Sorted(slices.Values(names)) {
		b.WriteString("- " + skillText(n, 128) + "\n")
	}
	b.WriteString("</available-deferred-tools>")
	return b.String()
}

// Missing tells an agent which servers cannot be reached, so that it says what it
// could not do instead of looking for tools that are not there.
func Missing(servers []Unavailable) string {
	if len(servers) == 0 {
		return ""
	}
	lines := []string{"The tools of these servers are not available now; go on without them, and say in your answer what you could not do:"}
	for _, s := range servers {
		lines = append(lines, fmt.Sprintf("- %s: %s", skillText(s.Server, 64), skillText(s.Reason, 300)))
	}
	return strings.Join(lines, "\n")
}

// Routing hints which servers' tools fit what. It is empty where nothing does.
func Routing(hints []Hint) string {
	if len(hints) == 0 {
		return ""
	}
	lines := []string{"For work on these subjects prefer the tools of these servers:"}
	for _, h := range hints {
		words := make([]string, len(h.Keywords))
		for i, w := range h.Keywords {
			words[i] = skillText(w, 64)
		}
		lines = append(lines, fmt.Sprintf("- %s: %s", strings.Join(words, ", "), skillText(h.Server, 64)))
	}
	return strings.Join(lines, "\n")
}

// Hint is a server and the subjects that its tools are for.
type Hint struct {
	Server   string
	Keywords []string
}
