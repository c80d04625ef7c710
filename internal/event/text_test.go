package event

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// STEP-06: the bound is in code points.
func TestTruncate(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text string
		max  int
		want string
		cut  bool
	}{
		{"", 0, "", false},
		{"a", 0, "", true},
		{"abc", 3, "abc", false},
		{"abcd", 3, "abc", true},
		{"界界界", 2, "界界", true},
		{"界界", 2, "界界", false},
		{"e\u0301x", 2, "e\u0301", true},
		{"😀😀", 1, "😀", true},
		{"abc", -1, "abc", false},
	} {
		if got, cut := Truncate(c.text, c.max); got != c.want || cut != c.cut {
			t.Errorf("Truncate(%q, %d) = %q, %v, want %q, %v", c.text, c.max, got, cut, c.want, c.cut)
		}
	}
}

func TestCutBytes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in   string
		n    int
		want string
	}{{"abc", 3, "abc"}, {"abc", 2, "ab"}, {"a界", 3, "a"}, {"a界", 4, "a界"}, {"界", 2, ""}, {"", 0, ""}, {"\x80\x80", 1, ""}} {
		if got := CutBytes(c.in, c.n); got != c.want {
			t.Errorf("CutBytes(%q, %d) = %q, want %q", c.in, c.n, got, c.want)
		}
	}
}

func TestSanitize(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"plain ✓":       "plain ✓",
		"a\x00b":        "a\ufffdb",
		"\xff\xfe":      "\ufffd\ufffd",
		"\xed\xa0\x80x": "\ufffd\ufffd\ufffdx", // a surrogate written as UTF-8
		`\u0000`:        `\u0000`,              // the six characters, no NUL
	} {
		if got := Sanitize(in); got != want {
			t.Errorf("Sanitize(%q) = %q, want %q", in, got, want)
		}
	}
}

// Only what cannot be stored is replaced, wherever it stands; an escaped
// backslash before u0000 is honest text.
func TestSanitizeJSON(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ in, want string }{
		{`{"a":"\u0000"}`, `{"a":"` + "\ufffd" + `"}`},
		{`{"k\u0000":1.50}`, `{"k` + "\ufffd" + `":1.50}`},
		{`[[{"x":["deep\u0000"]}]]`, `[[{"x":["deep` + "\ufffd" + `"]}]]`},
		{`["\ud800"]`, `["` + "\ufffd" + `"]`},
		{`["\udc00\ud800"]`, `["` + "\ufffd\ufffd" + `"]`},
		{`["\ud800\u0041"]`, `["` + "\ufffd" + `A"]`},
		{"[\"\xff\"]", `["` + "\ufffd" + `"]`},
		// A number that no reader can hold would make the whole event unreadable.
		{`{"n":1e400,"a":"<&>"}`, `{"a":"<&>","n":"1e400"}`},
		{`[-1E+999,{"a":[` + strings.Repeat("9", 4000) + `]}]`, `["-1E+999",{"a":["` + strings.Repeat("9", 4000) + `"]}]`},
	} {
		got, changed := SanitizeJSON(json.RawMessage(c.in))
		if string(got) != c.want || !changed {
			t.Errorf("SanitizeJSON(%s) = %s, %v, want %s, true", c.in, got, changed, c.want)
		}
	}
	for _, in := range []string{`{"a":"\\u0000"}`, `["\\\\u0000"]`, `["\ud83d\ude00"]`, `{"n":1e300,"a":"<&>"}`, `[0.` + strings.Repeat("1", 4000) + `,1e-999,-0]`, `["1e400","\"",-1e308]`, `null`} {
		got, changed := SanitizeJSON(json.RawMessage(in))
		if string(got) != in || changed {
			t.Errorf("SanitizeJSON(%s) = %s, %v, want it untouched", in, got, changed)
		}
	}
}

func FuzzSanitizeJSON(f *testing.F) {
	for _, s := range []string{`{"a":"\u0000"}`, `["\\u0000","\ud800"]`, `{"k\u0000":{"k\ufffd":1}}`, `"\ud83d\ude00"`, `[1.0,true,null]`, "\"\xff\""} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if !json.Valid(in) {
			return
		}
		once, _ := SanitizeJSON(in)
		if !json.Valid(once) {
			t.Fatalf("SanitizeJSON(%q) = %q, no JSON", in, once)
		}
		if twice, changed := SanitizeJSON(once); changed || string(twice) != string(once) {
			t.Fatalf("not settled after one pass: %q, then %q", once, twice)
		}
		if v, err := decode(once); err == nil && holdsNUL(v) {
			t.Fatalf("a NUL is left in %q", once)
		}
	})
}

func holdsNUL(v any) bool {
	switch v := v.(type) {
	case string:
		return strings.ContainsRune(v, 0)
	case []any:
		return slices.ContainsFunc(v, holdsNUL)
	case map[string]any:
		for k, e := range v {
			if holdsNUL(k) || holdsNUL(e) {
				return true
			}
		}
	}
	return false
}

func FuzzTruncate(f *testing.F) {
	f.Add("界a😀", 2)
	f.Add("\xffx", 1)
	f.Fuzz(func(t *testing.T, s string, max int) {
		got, cut := Truncate(s, max)
		if !strings.HasPrefix(s, got) || cut == (got == s) {
			t.Fatalf("Truncate(%q, %d) = %q, %v", s, max, got, cut)
		}
		if max >= 0 && utf8.RuneCountInString(got) > max {
			t.Fatalf("Truncate(%q, %d) has %d code points", s, max, utf8.RuneCountInString(got))
		}
	})
}
