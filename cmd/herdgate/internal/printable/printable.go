// Package printable makes text of strangers safe to look at. What a model or a
// tool has said may hold escape sequences that rewrite the screen, change the
// window's title or paste into the shell; here they become visible instead.
package printable

import (
	"bytes"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Line returns s as one line: line breaks and tabs become a space each,
// everything else that is not text is written as an escape such as \x1b.
func Line(s string) string { return escape(s, false) }

// Block returns s with its line breaks and tabs; everything else that is not
// text is written as an escape such as \x1b.
func Block(s string) string { return escape(s, true) }

// Cut is [Line], cut to at most limit characters with a trailing ellipsis.
func Cut(s string, limit int) string {
	// Every character of s gives at least one; more of it cannot be shown.
	if n := 4 * (limit + 1); len(s) > n {
		s = strings.ToValidUTF8(s[:n], "")
	}
	r := []rune(strings.TrimSpace(Line(s)))
	if len(r) <= limit {
		return string(r)
	}
	return strings.TrimSpace(string(r[:max(limit-1, 0)])) + "…"
}

func escape(s string, block bool) string {
	if strings.IndexFunc(s, func(r rune) bool { return r == utf8.RuneError || hidden(r) }) < 0 {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 16)
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r == '\r' && strings.HasPrefix(s[i+1:], "\n"): // the line break follows
		case r == '\n' || r == '\t':
			if !block {
				r = ' '
			}
			b.WriteRune(r)
		case hidden(r):
			b.WriteString(visible(r))
		default:
			b.WriteRune(r)
		}
		i += n
	}
	return b.String()
}

// hidden reports whether a terminal may do something else with r than show it:
// control characters, and those that reorder the text around them.
func hidden(r rune) bool {
	switch {
	case unicode.IsControl(r), r == '\u2028', r == '\u2029', r == '\u061c', r == '\u200e', r == '\u200f':
		return true
	case r >= '\u202a' && r <= '\u202e', r >= '\u2066' && r <= '\u2069':
		return true
	case r >= 0xe0000 && r <= 0xe007f: // invisible tags
		return true
	}
	return false
}

func visible(r rune) string {
	switch {
	case r < 0x80:
		return fmt.Sprintf(`\x%02x`, r)
	case r < 0x10000:
		return fmt.Sprintf(`\u%04x`, r)
	}
	return fmt.Sprintf(`\U%08x`, r)
}

// JSON escapes in encoded JSON what encoding/json leaves as it is. The values
// stay the same: outside of strings JSON has no such characters.
func JSON(b []byte) []byte {
	if bytes.IndexFunc(b, func(r rune) bool { return r >= 0x7f && hidden(r) }) < 0 {
		return b
	}
	out := make([]byte, 0, len(b)+16)
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		switch {
		case r < 0x7f || !hidden(r):
			out = append(out, b[:n]...)
		case r < 0x10000:
			out = fmt.Appendf(out, `\u%04x`, r)
		default:
			out = fmt.Appendf(out, `\u%04x\u%04x`, 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff)
		}
		b = b[n:]
	}
	return out
}
