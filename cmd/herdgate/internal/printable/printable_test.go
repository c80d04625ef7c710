package printable

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestEscapes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ in, line, block string }{
		{"plain ä 漢 👩‍🚀", "plain ä 漢 👩‍🚀", "plain ä 漢 👩‍🚀"},
		{"\x1b]0;title\x07x", `\x1b]0;title\x07x`, `\x1b]0;title\x07x`},
		{"a\nb\tc\r\nd", "a b c d", "a\nb\tc\nd"},
		{"over\rwritten", `over\x0dwritten`, `over\x0dwritten`},
		{"csi \u009b31m", `csi \u009b31m`, `csi \u009b31m`},
		{"abc\u202ecba", `abc\u202ecba`, `abc\u202ecba`},
		{"bad \xff byte", `bad \xff byte`, `bad \xff byte`},
		{"tag \U000e0041", `tag \U000e0041`, `tag \U000e0041`},
		{"replacement \uFFFD stays", "replacement \uFFFD stays", "replacement \uFFFD stays"},
	} {
		if got := Line(c.in); got != c.line {
			t.Errorf("Line(%q) = %q, want %q", c.in, got, c.line)
		}
		if got := Block(c.in); got != c.block {
			t.Errorf("Block(%q) = %q, want %q", c.in, got, c.block)
		}
	}
}

func TestCut(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in    string
		limit int
		want  string
	}{
		{"short", 10, "short"},
		{"exactly ten", 11, "exactly ten"},
		{"a longer text", 8, "a longe…"},
		{"ends at a space here", 9, "ends at…"},
		{strings.Repeat("漢", 1000), 3, "漢漢…"},
		{"anything", 0, "…"},
	} {
		if got := Cut(c.in, c.limit); got != c.want {
			t.Errorf("Cut(%.20q, %d) = %q, want %q", c.in, c.limit, got, c.want)
		}
	}
}

func FuzzPrintable(f *testing.F) {
	for _, s := range []string{"", "a\x1b[31m", "\u009b\u202e", "\xff\xfe", "\U000e0041\r\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for _, out := range []string{Line(s), Cut(s, 20)} {
			if !utf8.ValidString(out) || strings.IndexFunc(out, hidden) >= 0 {
				t.Errorf("%q becomes %q", s, out)
			}
		}
		if out := Block(s); strings.IndexFunc(out, func(r rune) bool { return hidden(r) && r != '\n' && r != '\t' }) >= 0 {
			t.Errorf("%q becomes %q", s, out)
		}
		b, err := json.Marshal(s)
		if err != nil {
			t.Skip()
		}
		safe := JSON(b)
		var got, want string
		if err := json.Unmarshal(safe, &got); err != nil {
			t.Fatalf("JSON(%s) = %s: %v", b, safe, err)
		}
		_ = json.Unmarshal(b, &want)
		if got != want || strings.IndexFunc(string(safe), hidden) >= 0 {
			t.Errorf("JSON(%s) = %s", b, safe)
		}
	})
}
