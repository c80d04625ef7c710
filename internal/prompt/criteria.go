package prompt

import (
	"strings"
	"unicode/utf8"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Criteria makes acceptance criteria usable. They are written by a model: what is
// no text or blank is dropped, each is trimmed, cut and defused, and no more are
// kept than a request may carry (REPORT-06). Defusing makes text longer, and never
// longer than the bound (REPORT-10).
func Criteria[T any](list []T) []string {
	var out []string
	for _, v := range list {
		s, ok := any(v).(string)
		if !ok {
			continue
		}
		if s = criterion(strings.ToValidUTF8(s, "\uFFFD")); s == "" {
			continue
		}
		if out = append(out, s); len(out) == contract.MaxCriteria {
			break
		}
	}
	return out
}

func criterion(s string) string {
	s = shorten(strings.TrimSpace(s))
	for {
		// A cut may expose a tag: <systematic> is none, its beginning is.
		safe := shorten(Defuse(s))
		if safe == s {
			return s
		}
		s = safe
	}
}

// shorten cuts a criterion to its bound.
func shorten(s string) string { return strings.TrimSpace(cut(s, contract.MaxCriterionChars)) }

// cut returns the first max characters.
func cut(s string, max int) string {
	if utf8.RuneCountInString(s) <= max {
		return s
	}
	return string([]rune(s)[:max])
}
