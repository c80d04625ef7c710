package deferral

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"unicode"

	"github.com/herdgate/herdgate/internal/model"
)

// MaxHits is how many tools a search by words finds at most.
const MaxHits = 5

// maxQuery bounds a query, and maxPatternText one that is a pattern, in bytes;
// maxPattern bounds the program that a pattern becomes, in instructions.
const (
	maxQuery       = 4 << 10
	maxPatternText = 256
	maxPattern     = 500
)

// Entry is one tool on demand.
type Entry struct {
	Spec model.ToolSpec
	// Prefer brings the tool in by itself where a keyword occurs; of several the one
	// of higher priority first (DEFER-07).
	Prefer   bool
	Priority int
	Keywords []string
}

// Catalogue is the tools that can be found. It does not change.
type Catalogue struct {
	entries []Entry // by name
	hash    string
}

// NewCatalogue makes the catalogue of what is left after all lists and authorisation.
func NewCatalogue(entries []Entry) *Catalogue {
	c := &Catalogue{entries: slices.Clone(entries)}
	slices.SortStableFunc(c.entries, func(a, b Entry) int { return strings.Compare(a.Spec.Name, b.Spec.Name) })
	c.entries = slices.CompactFunc(c.entries, func(a, b Entry) bool { return a.Spec.Name == b.Spec.Name })
	h := sha256.New()
	for _, e := range c.entries {
		schema := canonical(e.Spec.Parameters)
		for _, part := range [][]byte{[]byte(e.Spec.Name), schema} {
			h.Write(part)
			h.Write([]byte{0})
		}
	}
	c.hash = hex.EncodeToString(h.Sum(nil))[:16]
	return c
}

// canonical writes a schema in one way, however its server orders it.
func canonical(raw json.RawMessage) []byte {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var v any
	if dec.Decode(&v) == nil {
		if b, err := json.Marshal(v); err == nil { // keys of maps are sorted
			return b
		}
	}
	return raw
}

// Hash tells this catalogue from others: it is made of the names and schemas (DEFER-06).
func (c *Catalogue) Hash() string { return c.hash }

// Names are the names, sorted.
func (c *Catalogue) Names() []string {
	out := make([]string, len(c.entries))
	for i, e := range c.entries {
		out[i] = e.Spec.Name
	}
	return out
}

// Has reports whether the tool is in the catalogue.
func (c *Catalogue) Has(name string) bool {
	_, ok := slices.BinarySearchFunc(c.entries, name, func(e Entry, n string) int { return strings.Compare(e.Spec.Name, n) })
	return ok
}

// Search finds tools (DEFER-05):
//
//   - select:a,b finds exactly these, however many;
//   - +word rest finds those with word in their name, the best fit to rest first;
//   - anything else is a pattern over names and descriptions, whatever the case, those
//     with a hit in the name first; what is no valid pattern, or one that costs too much,
//     is taken literally;
//   - nothing finds nothing.
//
// Only what allowed permits is found; nil permits all.
func (c *Catalogue) Search(query string, allowed func(name string) bool) []string {
	query = strings.TrimSpace(query)
	if len(query) > maxQuery {
		query = strings.ToValidUTF8(query[:maxQuery], "")
	}
	var open []Entry
	for _, e := range c.entries {
		if allowed == nil || allowed(e.Spec.Name) {
			open = append(open, e)
		}
	}
	switch {
	case query == "":
		return nil
	case strings.HasPrefix(query, "select:"):
		var out []string
		for _, name := range strings.Split(strings.TrimPrefix(query, "select:"), ",") {
			name = strings.TrimSpace(name)
			if !slices.Contains(out, name) && slices.ContainsFunc(open, func(e Entry) bool { return e.Spec.Name == name }) {
				out = append(out, name)
			}
		}
		return out
	case strings.HasPrefix(query, "+"):
		word, rest, _ := strings.Cut(strings.TrimLeft(query, "+ "), " ")
		if word == "" {
			return nil
		}
		return best(open, func(name, description string) (int, bool) {
			if !strings.Contains(name, fold(word)) {
				return 0, false
			}
			score := 0
			for _, w := range strings.Fields(fold(rest)) {
				if strings.Contains(name, w) {
					score += 2
				}
				if strings.Contains(description, w) {
					score++
				}
			}
			return score, true
		})
	}
	return best(open, nil, compile(query))
}

// compile makes a pattern of a query. What is no valid one is taken literally, and so is
// one that is large once its repetitions are written out: the time of a search grows
// with that size, and nothing can interrupt it.
func compile(query string) *regexp.Regexp {
	if len(query) > maxPatternText {
		return regexp.MustCompile("(?i)" + regexp.QuoteMeta(query))
	}
	if tree, err := syntax.Parse("(?i)"+query, syntax.Perl); err == nil {
		if prog, err := syntax.Compile(tree.Simplify()); err == nil && len(prog.Inst) <= maxPattern {
			if pattern, err := regexp.Compile("(?i)" + query); err == nil {
				return pattern
			}
		}
	}
	return regexp.MustCompile("(?i)" + regexp.QuoteMeta(query))
}

// best returns the names of the entries that fit, those with the highest score first.
func best(entries []Entry, score func(name, description string) (int, bool), patterns ...*regexp.Regexp) []string {
	type hit struct {
		name  string
		score int
	}
	var hits []hit
	for _, e := range entries {
		n, ok := 0, false
		if score != nil {
			n, ok = score(fold(e.Spec.Name), fold(e.Spec.Description))
		}
		for _, p := range patterns {
			switch {
			case p.MatchString(e.Spec.Name):
				n, ok = 1, true
			case p.MatchString(e.Spec.Description):
				ok = true
			}
		}
		if ok {
			hits = append(hits, hit{e.Spec.Name, n})
		}
	}
	slices.SortStableFunc(hits, func(a, b hit) int { return cmp.Or(cmp.Compare(b.score, a.score), strings.Compare(a.name, b.name)) })
	var out []string
	for _, h := range hits[:min(len(hits), MaxHits)] {
		out = append(out, h.name)
	}
	return out
}

// Preferred are the tools whose keywords occur in the text, whatever the case, those
// of the highest priority first, and of one priority by name (DEFER-07).
func (c *Catalogue) Preferred(text string) []string {
	text = fold(text)
	var hits []Entry
	for _, e := range c.entries {
		if e.Prefer && slices.ContainsFunc(e.Keywords, func(k string) bool {
			k = strings.TrimSpace(fold(k))
			return k != "" && strings.Contains(text, k)
		}) {
			hits = append(hits, e)
		}
	}
	slices.SortStableFunc(hits, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), strings.Compare(a.Spec.Name, b.Spec.Name))
	})
	var out []string
	for _, e := range hits {
		out = append(out, e.Spec.Name)
	}
	return out
}

// fold makes texts equal that differ by case alone.
func fold(s string) string {
	return strings.Map(func(r rune) rune {
		least := r
		for next := unicode.SimpleFold(r); next != r; next = unicode.SimpleFold(next) {
			least = min(least, next)
		}
		return least
	}, s)
}
