package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const top = "../.."

func TestRulebookIsWhole(t *testing.T) {
	t.Parallel()
	rules, err := readRulebook(filepath.Join(top, "docs", "behaviours.md"))
	if err != nil {
		t.Fatal(err)
	}
	if len(rules) != 355 {
		t.Errorf("the rulebook has %d rules, want 355: a rule may be reworded or added, never dropped", len(rules))
	}
	var order []string
	next := map[string]int{}
	for _, r := range rules {
		if !slices.Contains(order, r.Chapter()) {
			order = append(order, r.Chapter())
		}
		next[r.Chapter()]++
		if want := fmt.Sprintf("%s-%02d", r.Chapter(), next[r.Chapter()]); r.Number != want {
			t.Errorf("found %s where %s should stand", r.Number, want)
		}
		if n := len([]rune(r.Text)); n > 300 {
			t.Errorf("%s has %d characters; a rule is one short line", r.Number, n)
		}
	}
	if !slices.Equal(order, Chapters) {
		t.Errorf("chapters of the rulebook are %v, want %v", order, Chapters)
	}
}

func TestTestsNameKnownRulesOnly(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	unknown, err := report(&out, top, true, nil)
	if err != nil {
		t.Fatal(err)
	}
	if unknown {
		t.Error(out.String())
	}
}

func TestNumbers(t *testing.T) {
	t.Parallel()
	tests := []struct{ text, want string }{
		{"ADM-05", "ADM-05"},
		{"// ADM-05: strict order", "ADM-05"},
		{"ADM-05, 07", "ADM-05 ADM-07"},
		{"ADM-05, ADM-07 and CAP-01", "ADM-05 ADM-07 CAP-01"},
		{"CAP-01 to 03", "CAP-01 CAP-02 CAP-03"},
		{"CAP-01 to CAP-03", "CAP-01 CAP-02 CAP-03"},
		{"CAP-01..03", "CAP-01 CAP-02 CAP-03"},
		{"STATUS-01…03", "STATUS-01 STATUS-02 STATUS-03"},
		{"GUARD-11, 12, 14 to 16", "GUARD-11 GUARD-12 GUARD-14 GUARD-15 GUARD-16"},
		{"STEP-05/06", "STEP-05"},
		{"SHA-256 and RFC-3339", ""},
		{"BADM-05", ""},
		{"ADM-5", ""},
		{"ADM-05, 300 tasks", "ADM-05"},
	}
	for _, tt := range tests {
		if got := strings.Join(numbers(tt.text), " "); got != tt.want {
			t.Errorf("numbers(%q) = %q, want %q", tt.text, got, tt.want)
		}
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		file := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("docs/behaviours.md", "# Rules\n\n- **CAP-01** The limit.\n- **CAP-02** The default.\n- **ADM-01** One gate.\n")
	write("a/a_test.go", "package a\n\n// CAP-01\nfunc TestA(t *testing.T) {}\n\nfunc TestB(t *testing.T) { t.Run(\"ADM-01\", nil) }\n")
	write("a/_sample/b_test.go", "package b // CAP-02\n")

	var out strings.Builder
	unknown, err := report(&out, dir, false, nil)
	if err != nil || unknown {
		t.Fatalf("report: unknown %v, err %v\n%s", unknown, err, out.String())
	}
	for _, want := range []string{"CAP-01      a.TestA", "CAP-02      -- no test: The default.", "ADM-01      a.TestB", "2 of 3 rules"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("report lacks %q:\n%s", want, out.String())
		}
	}

	write("a/c_test.go", "package a\n\n// CAP-99 does not exist.\n")
	if unknown, err := report(io.Discard, dir, false, nil); err != nil || !unknown {
		t.Errorf("a rule that the rulebook does not have: unknown %v, err %v", unknown, err)
	}
	if _, err := report(io.Discard, dir, true, []string{"CAP"}); err != nil {
		t.Error(err)
	}

	write("docs/behaviours.md", "- **CAP-1** Wrong.\n")
	if _, err := report(io.Discard, dir, false, nil); err == nil || !strings.Contains(err.Error(), "behaviours.md:1") {
		t.Errorf("a malformed line gives %v, want an error that names it", err)
	}
}
