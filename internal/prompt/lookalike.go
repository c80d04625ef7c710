package prompt

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
)

// What a reader takes for "<" and ">".
const (
	openers = "<\uFF1C\uFE64"
	closers = ">\uFF1E\uFE65"
)

// lookalikes are characters, mostly of other scripts, that look like one of ours.
var lookalikes = map[rune]string{
	'a': "аАαΑ", 'b': "ВΒ", 'c': "сСϲ", 'd': "ԁ", 'e': "еЕΕ", 'g': "ɡ", 'h': "һНΗ", 'i': "іІιΙ", 'j': "јЈ", 'k': "кКκΚ", 'l': "ӏӀ",
	'm': "мМΜ", 'n': "ոΝ", 'o': "оОοΟօ", 'p': "рРρΡ", 'q': "ԛ", 's': "ѕЅ", 't': "тТτΤ", 'u': "սυ", 'v': "ѵνⅴ", 'w': "ԝѡ", 'x': "хХχΧ",
	'y': "уУүΥ", 'z': "Ζ", '-': "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\uFE58\uFE63", '/': "\u2044\u2215",
}

// plain is what each lookalike looks like.
var plain = func() map[rune]rune {
	m := map[rune]rune{}
	for p, alike := range lookalikes {
		for _, r := range alike {
			m[r] = p
		}
	}
	return m
}()

// Characters of full width, and the letters of mathematics, one alphabet after the
// other.
const (
	wideFirst, wideLast = '\uFF01', '\uFF5E'
	mathFirst, mathLast = '\U0001D400', '\U0001D6A3'
)

// read is the character that a reader takes r for: small, and one of ours if it looks
// like one.
func read(r rune) rune {
	switch {
	case r >= wideFirst && r <= wideLast:
		r += '!' - wideFirst
	case r >= mathFirst && r <= mathLast:
		return 'a' + (r-mathFirst)%26
	}
	if p, ok := plain[r]; ok {
		return p
	}
	// Some letters fold into ours only by way of the large one.
	return unicode.ToLower(unicode.ToUpper(r))
}

// invisible are characters that do not show, or only as part of the one before.
const invisible = `\p{Cf}\p{Mn}\p{Me}\x{115F}\x{1160}\x{3164}\x{FFA0}`

func unseen(r rune) bool {
	return unicode.In(r, unicode.Cf, unicode.Mn, unicode.Me) || r == 0x115F || r == 0x1160 || r == 0x3164 || r == 0xFFA0
}

// like is a pattern of what is read as word, whatever is invisible in it.
func like(word string) string {
	var b strings.Builder
	for _, c := range word {
		b.WriteString("[")
		for _, r := range allRead {
			if read(r) == c {
				fmt.Fprintf(&b, `\x{%X}`, r)
			}
		}
		b.WriteString("][" + invisible + "]*")
	}
	return b.String()
}

// allRead are the characters that can be read as one of ours.
var allRead = func() []rune {
	out := []rune{'\u017F', '\u0131', '\u212A'} // they fold into ASCII
	for r := range plain {
		out = append(out, r)
	}
	for r := '!'; r <= '~'; r++ {
		out = append(out, r, r-'!'+wideFirst)
	}
	for r := mathFirst; r <= mathLast; r++ {
		out = append(out, r)
	}
	slices.Sort(out)
	return out
}()
