package skill

import "slices"

// Merge is the list of skills that a sub-agent has under its parent's: nil means
// all, empty none. Either's nil gives the other's, and two lists what the child's
// has that the parent's has too, in the child's order and with its repetitions
// (SKILL-01, SKILL-02). The result is the caller's own.
func Merge(parent, child []string) []string {
	switch {
	case parent == nil:
		return slices.Clone(child)
	case child == nil:
		return slices.Clone(parent)
	}
	out := []string{}
	for _, name := range child {
		if slices.Contains(parent, name) {
			out = append(out, name)
		}
	}
	return out
}
