package prompt

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

var (
	blocked     = map[string]bool{}
	longestName int
)

func init() {
	for _, n := range blockedTags {
		blocked[n] = true
		longestName = max(longestName, len(n))
	}
}

// BlockedTags returns the names of the tags that [Defuse] escapes.
func BlockedTags() []string { return append([]string(nil), blockedTags...) }

// brackets writes what is escaped in a tag.
var brackets = func() *strings.Replacer {
	var pairs []string
	for _, r := range openers {
		pairs = append(pairs, string(r), "&lt;")
	}
	for _, r := range closers {
		pairs = append(pairs, string(r), "&gt;")
	}
	return strings.NewReplacer(pairs...)
}()

// Defuse takes their meaning from tags of ours and from the markers of [Frame] in
// text that others wrote; all else stays as it is, ordinary markup included. What
// was defused once is not changed again.
//
// A tag is "<", blanks, perhaps "/", blanks, a blocked name that ends at the end of
// a word, and all up to the next ">", which may be missing. Whoever forges one writes
// for a reader, not for a parser: letters and brackets that only look like these
// count as well, and what does not show counts as nothing.
func Defuse(text string) string { return defuseMarkers(defuseTags(text)) }

func defuseTags(text string) string {
	var b strings.Builder
	done := 0
	for i := 0; i < len(text); {
		at := strings.IndexAny(text[i:], openers)
		if at < 0 {
			break
		}
		i += at
		_, size := utf8.DecodeRuneInString(text[i:])
		n, tag := tagAt(text[i+size:])
		if !tag {
			i += size
			continue
		}
		end := len(text)
		if gt := strings.IndexAny(text[i+size+n:], closers); gt >= 0 {
			gt += i + size + n
			_, last := utf8.DecodeRuneInString(text[gt:])
			end = gt + last
		}
		b.WriteString(text[done:i])
		_, _ = brackets.WriteString(&b, text[i:end])
		done, i = end, end
	}
	if done == 0 {
		return text
	}
	b.WriteString(text[done:])
	return b.String()
}

// tagAt reports whether what follows a "<" makes it a blocked tag, and how long
// that is up to the end of the name.
func tagAt(s string) (int, bool) {
	n := blanks(s)
	if r, size := utf8.DecodeRuneInString(s[n:]); read(r) == '/' {
		n += size
		n += blanks(s[n:])
	}
	// Every end of a word within the run may be the end of a name. What is longer
	// than any name is none.
	name := make([]rune, 0, longestName+1)
	for n < len(s) && len(name) <= longestName {
		r, size := utf8.DecodeRuneInString(s[n:])
		c := read(r)
		switch {
		case unseen(r):
			if blocked[string(name)] {
				return n, true
			}
		case inWord(c):
			name = append(name, c)
		case c == '-' && len(name) > 0:
			if blocked[string(name)] {
				return n, true
			}
			name = append(name, c)
		default:
			return n, blocked[string(name)]
		}
		n += size
	}
	return n, n == len(s) && blocked[string(name)]
}

func inWord(r rune) bool { return r == '_' || unicode.IsLetter(r) || unicode.IsNumber(r) }

// blanks is the length of the blanks at the beginning, those that do not show
// included.
func blanks(s string) int {
	return len(s) - len(strings.TrimLeftFunc(s, func(r rune) bool {
		return unicode.IsSpace(r) || unseen(r) || r >= 0x1C && r <= 0x1F
	}))
}

// The markers of [Frame].
const (
	inputBegin = "--- BEGIN USER INPUT ---"
	inputEnd   = "--- END USER INPUT ---"
)

// marker is what is read as one of them, from its first dash.
var marker = func() *regexp.Regexp {
	const blank = `[\s\p{Z}` + invisible + `]`
	dashes := `(?:` + like("-") + `){2,}`
	return regexp.MustCompile(`^` + dashes + blank + `*((?:` + like("begin") + `|` + like("end") + `)` + blank + `+` + like("user") + blank + `+` + like("input") + `)` + blank + `*` + dashes)
}()

// anyDash holds what is read as a dash.
var anyDash = func() string {
	out := ""
	for _, r := range allRead {
		if read(r) == '-' {
			out += string(r)
		}
	}
	return out
}()

func defuseMarkers(text string) string {
	var b strings.Builder
	done := 0
	for i := 0; i < len(text); {
		at := strings.IndexAny(text[i:], anyDash)
		if at < 0 {
			break
		}
		i += at
		m := marker.FindStringSubmatchIndex(text[i:])
		if m == nil {
			// None begins at another dash of the same row.
			i += len(text[i:]) - len(strings.TrimLeftFunc(text[i:], func(r rune) bool { return unseen(r) || strings.ContainsRune(anyDash, r) }))
			continue
		}
		b.WriteString(text[done:i] + "[" + text[i+m[2]:i+m[3]] + "]")
		i += m[1]
		done = i
	}
	if done == 0 {
		return text
	}
	return b.String() + text[done:]
}

// Frame defuses a task and puts it between markers that say where it begins and
// ends (PROMPT-06). What is framed already stays as it is.
func Frame(text string) string {
	return inputBegin + "\n" + Defuse(Unframe(text)) + "\n" + inputEnd
}

// Unframe returns what stands between the markers, or text itself if it is not
// framed.
func Unframe(text string) string {
	if inner, ok := strings.CutPrefix(text, inputBegin+"\n"); ok {
		if inner, ok = strings.CutSuffix(inner, "\n"+inputEnd); ok {
			return inner
		}
	}
	return text
}
