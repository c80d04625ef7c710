package event

import "unicode/utf8"

// CutBytes returns the longest beginning of s that has at most n bytes and ends
// at a character's end.
func CutBytes(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
