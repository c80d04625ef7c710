package layers

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Each case of docs/field-cases.md is held by tests that exist and whose file names
// it, or says why there is none; and each case that a test names is in the table.
func TestFieldCasesAreHeld(t *testing.T) {
	t.Parallel()
	dir, err := root()
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(dir, "docs", "field-cases.md"))
	if err != nil {
		t.Fatal(err)
	}
	// holds gives the text of the file that declares a test, or nothing.
	holds := func(folder, name string) string {
		files, _ := filepath.Glob(filepath.Join(dir, folder, "*_test.go"))
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err == nil && strings.Contains(string(b), "\nfunc "+name+"(") {
				return string(b)
			}
		}
		return ""
	}
	row := regexp.MustCompile(`(?m)^\| (F-\d{3}) \| .+ \| (.+) \|$`)
	ref := regexp.MustCompile("`([a-z0-9/]+)\\.((?:Test|Fuzz)\\w+)`")
	listed := map[string]bool{}
	for _, m := range row.FindAllStringSubmatch(string(page), -1) {
		id, by := m[1], m[2]
		if listed[id] {
			t.Errorf("%s is listed twice", id)
		}
		listed[id] = true
		none := strings.HasPrefix(by, "none: ")
		tests := ref.FindAllStringSubmatch(by, -1)
		if !none && len(tests) == 0 {
			t.Errorf("%s: %q names no test and no reason", id, by)
		}
		for _, r := range tests {
			text := holds(r[1], r[2])
			switch {
			case text == "":
				t.Errorf("%s: there is no test %s in %s", id, r[2], r[1])
			case !none && !strings.Contains(text, id):
				t.Errorf("%s: the file of %s.%s does not name it", id, r[1], r[2])
			}
		}
	}
	if len(listed) < 90 {
		t.Errorf("%d cases are listed, want all", len(listed))
	}
	named := regexp.MustCompile(`\bF-\d{3}\b`)
	for _, module := range []string{"cmd", "internal", "pkg", "services", "test"} {
		err := filepath.WalkDir(filepath.Join(dir, module), func(path string, _ os.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			b, err := os.ReadFile(path)
			for _, id := range named.FindAllString(string(b), -1) {
				if !listed[id] {
					t.Errorf("%s names %s, which docs/field-cases.md does not list", path, id)
				}
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}
