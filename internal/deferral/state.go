package deferral

import (
	"slices"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/subagent"
)

// ToolName is the name of the tool that searches.
const ToolName = "tool_search"

// MetaHash is the metadata key under which a result of the search tells the catalogue
// that it is about.
const MetaHash = "tool_search_catalogue"

// State is what was found so far. It is a fold over the conversation's messages, see
// [State.With]; the fold can be kept where messages are not.
type State struct {
	// Hash is the catalogue that the promotions belong to.
	Hash string `json:"hash,omitempty"`
	// Names are the promoted tools, sorted.
	Names []string `json:"names,omitempty"`
}

// Promote adds tools of a catalogue. Promotions under another one are gone: its tools
// may be others of the same name (DEFER-06).
func (s State) Promote(hash string, names []string) State {
	if len(names) == 0 {
		return s
	}
	if s.Hash != hash {
		s = State{Hash: hash}
	}
	all := slices.Sorted(slices.Values(slices.Concat(s.Names, names)))
	s.Names = slices.Compact(all)
	return s
}

// With is the state after one more message.
func (s State) With(m model.Message) State {
	if m.Role != model.RoleTool || m.ToolName != ToolName || m.IsError {
		return s
	}
	hash, _ := m.Metadata[MetaHash].(string)
	if hash == "" {
		return s
	}
	return s.Promote(hash, texts(m.Metadata[subagent.MetaMatches]))
}

// texts reads a list of texts that may have been stored in between.
func texts(v any) []string {
	switch v := v.(type) {
	case []string:
		return v
	case []any:
		var out []string
		for _, x := range v {
			if t, ok := x.(string); ok {
				out = append(out, t)
			}
		}
		return out
	}
	return nil
}

// Promoted are the promoted tools of a catalogue; a state under another one exposes
// nothing.
func (s State) Promoted(c *Catalogue) []string {
	if s.Hash != c.Hash() {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(s.Names), func(n string) bool { return !c.Has(n) })
}
