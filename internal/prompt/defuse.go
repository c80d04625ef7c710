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
var brackets = strings.NewReplacer("<", "&lt;", ">", "&gt;")

// Defuse takes their meaning from tags of ours and from the markers of [Frame] in
// text that others wrote; all else stays as it is, ordinary markup included. What
// was defused once is not changed again.
//
// A tag is "<", blanks, perhaps "/", blanks, a blocked name that ends at the end of
// a word, and all up to the next ">", which may be missing.
func Defuse(text string) string { return defuseMarkers(defuseTags(text)) }

func defuseTags(text string) string {
	var b strings.Builder
	done := 0
	for i := 0; i < len(text); {
		at := strings.IndexByte(text[i:], '<')
		if at < 0 {
			break
		}
		i += at
		n, tag := tagAt(text[i+1:])
		if !tag {
			i++
			continue
		}
		end := len(text)
		if gt := strings.IndexByte(text[i+1+n:], '>'); gt >= 0 {
			end = i + 1 + n + gt + 1
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
	start := blanks(s)
	if start < len(s) && s[start] == '/' {
		start++
		start += blanks(s[start:])
	}
	// Every end of a word within the run may be the end of a name.
	n := start
	for n < len(s) && n-start <= 2*longestName {
		r, size := utf8.DecodeRuneInString(s[n:])
		if !inWord(r) && (r != '-' || n == start) {
			break
		}
		if r == '-' && isBlocked(s[start:n]) {
			return n, true
		}
		n += size
	}
	return n, isBlocked(s[start:n])
}

// isBlocked compares without case, the letters that fold into ASCII included. What
// is longer than any name is none.
func isBlocked(name string) bool {
	return len(name) <= 2*longestName && blocked[strings.ToLower(strings.ToUpper(name))]
}

func inWord(r rune) bool { return r == '_' || unicode.IsLetter(r) || unicode.IsNumber(r) }

// blanks is the length of the blanks at the beginning, those that do not show
// included.
func blanks(s string) int {
	return len(s) - len(strings.TrimLeftFunc(s, func(r rune) bool {
		return unicode.IsSpace(r) || unicode.Is(unicode.Cf, r) || r >= 0x1C && r <= 0x1F
	}))
}

// The markers of [Frame].
const (
	inputBegin = "--- BEGIN USER INPUT ---"
	inputEnd   = "--- END USER INPUT ---"
)

var markers = regexp.MustCompile(`(?i)-{2,}[\s\p{Z}\p{Cf}]*((?:BEGIN|END)[\s\p{Z}\p{Cf}]+USER[\s\p{Z}\p{Cf}]+INPUT)[\s\p{Z}\p{Cf}]*-{2,}`)

func defuseMarkers(text string) string { return markers.ReplaceAllString(text, "[$1]") }

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
