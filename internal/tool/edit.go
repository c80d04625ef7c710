package tool

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// Bounds of the help for an edit that did not fit.
const (
	maxShownLines = 10     // line numbers that are named
	maxNearLines  = 50_000 // lines that are compared
	maxNearLine   = 400    // bytes of a line that are compared
	minNear       = 0.6    // least likeness that is worth telling
)

var numberedLine = regexp.MustCompile(`^ *\d+\t`)

// replaceText makes an edit of content. Line ends follow the file: models write
// \n, and a file with \r\n keeps them.
func replaceText(content []byte, name, old, repl string, all bool) (out []byte, n int, err error) {
	crlf := bytes.Count(content, []byte("\r\n"))
	switch {
	case crlf > 0 && crlf == bytes.Count(content, []byte("\n")):
		old, repl = toCRLF(old), toCRLF(repl)
	case crlf == 0 && strings.Contains(old, "\r\n"):
		old, repl = strings.ReplaceAll(old, "\r\n", "\n"), strings.ReplaceAll(repl, "\r\n", "\n")
	}
	if old == repl {
		return nil, 0, errors.New("old_str and new_str differ in their line ends only, and those stay as the file has them; nothing to do")
	}
	n = bytes.Count(content, []byte(old))
	switch {
	case n == 0:
		return nil, 0, fmt.Errorf("old_str does not occur in %s; %s", quote(name), whyNot(string(content), old))
	case n > 1 && !all:
		return nil, 0, fmt.Errorf("old_str occurs %d times in %s, at %s; make it longer until it is unique, or set replace_all", n, quote(name), linesOf(content, []byte(old)))
	}
	if len(content)+n*(len(repl)-len(old)) > maxWriteBytes {
		return nil, 0, fmt.Errorf("the file would be larger than %d bytes", maxWriteBytes)
	}
	return bytes.ReplaceAll(content, []byte(old), []byte(repl)), n, nil
}

func toCRLF(s string) string {
	return strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "\n", "\r\n")
}

// linesOf names the lines where old begins.
func linesOf(content, old []byte) string {
	var b strings.Builder
	b.WriteString("lines ")
	line := 1
	for i := 0; ; i++ {
		at := bytes.Index(content, old)
		if at < 0 {
			return b.String()
		}
		if i == maxShownLines {
			return b.String() + " and more"
		}
		line += bytes.Count(content[:at], []byte("\n"))
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprint(&b, line)
		line += bytes.Count(content[at:at+len(old)], []byte("\n"))
		content = content[at+len(old):]
	}
}

// whyNot tells what in the file comes nearest to a text that is not in it.
func whyNot(content, old string) string {
	const copyIt = "read the file and copy the text with its white space"
	want := strings.Split(strings.ReplaceAll(strings.TrimSuffix(old, "\n"), "\r\n", "\n"), "\n")
	numbers := true
	for _, l := range want {
		numbers = numbers && numberedLine.MatchString(l)
	}
	if numbers {
		return "leave out the line numbers that read_file puts before the text"
	}
	if strings.ContainsRune(old, utf8.RuneError) && !utf8.ValidString(content) {
		return "the file holds bytes that are no UTF-8, which read_file shows as \uFFFD; leave them out of old_str"
	}
	have := strings.SplitN(content, "\n", maxNearLines+1)
	if len(have) > maxNearLines {
		have = have[:maxNearLines]
	}
	first := 0
	for first < len(want)-1 && strings.TrimSpace(want[first]) == "" {
		first++
	}
	anchor := strings.TrimSpace(want[first])
	if anchor == "" {
		return copyIt
	}
	// Where its first line is, and most of what follows.
	at, run := -1, 0
	for i := range have {
		if strings.TrimSpace(have[i]) != anchor {
			continue
		}
		n := 1
		for first+n < len(want) && i+n < len(have) && strings.TrimSpace(have[i+n]) == strings.TrimSpace(want[first+n]) {
			n++
		}
		if n > run {
			at, run = i, n
		}
		if first+n == len(want) {
			break
		}
	}
	switch {
	case at < 0:
		if n, like := nearest(have, anchor); like >= minNear {
			return fmt.Sprintf("the nearest is line %d, %s; %s", n+1, quote(strings.TrimRight(have[n], "\r")), copyIt)
		}
		return copyIt
	case first+run == len(want):
		for i := range run {
			if got := strings.TrimRight(have[at+i], "\r"); got != want[first+i] {
				return fmt.Sprintf("lines %d to %d differ from it in white space only: line %d is %s, where old_str has %s",
					at+1, at+run, at+i+1, quote(got), quote(want[first+i]))
			}
		}
		return copyIt
	case at+run >= len(have):
		return fmt.Sprintf("it begins like line %d, but the file ends after line %d", at+1, at+run)
	}
	return fmt.Sprintf("it begins like line %d, but line %d is %s, where old_str has %s",
		at+1, at+run+1, quote(strings.TrimRight(have[at+run], "\r")), quote(want[first+run]))
}

// nearest finds the line that is most like text, 1 being the same: by the pairs
// of bytes that both have.
func nearest(lines []string, text string) (at int, like float64) {
	pairs := func(s string) (m map[[2]byte]int, n int) {
		s = strings.TrimSpace(s)
		s = s[:min(len(s), maxNearLine)]
		m = map[[2]byte]int{}
		for i := 1; i < len(s); i++ {
			m[[2]byte{s[i-1], s[i]}]++
			n++
		}
		return m, n
	}
	want, total := pairs(text)
	for i, l := range lines {
		// A line of quite another length cannot be near.
		if n := len(strings.TrimSpace(l)); n < 2 || (n < maxNearLine && (n > 3*len(text) || 3*n < len(text))) {
			continue
		}
		have, n := pairs(l)
		common := 0
		for p, k := range have {
			common += min(k, want[p])
		}
		if f := 2 * float64(common) / float64(n+total); f > like {
			at, like = i, f
		}
	}
	return at, like
}
