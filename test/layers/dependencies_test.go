package layers

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var dependencyRow = regexp.MustCompile("^\\| `([^`]+)` \\|")

// Every module that is imported stands in docs/dependencies.md with its licence
// and its reason, and nothing else stands there.
func TestDependenciesAreExplained(t *testing.T) {
	t.Parallel()
	dir, err := root()
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "docs", "dependencies.md"))
	if err != nil {
		t.Fatal(err)
	}
	std, err := standard()
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		if m := dependencyRow.FindStringSubmatch(line); m != nil {
			used[m[1]] = false
		}
	}
	for _, p := range packages(t) {
		for _, imp := range p.Imports {
			if std[imp] || ours(imp) {
				continue
			}
			// The longest that fits: go.opentelemetry.io/otel holds modules in itself.
			best := ""
			for mod := range used {
				if (imp == mod || strings.HasPrefix(imp, mod+"/")) && len(mod) > len(best) {
					best = mod
				}
			}
			if best == "" {
				t.Errorf("%s imports %s, which docs/dependencies.md does not explain", p.ImportPath, imp)
				continue
			}
			used[best] = true
		}
	}
	var idle []string
	for mod, ok := range used {
		if !ok {
			idle = append(idle, mod)
		}
	}
	slices.Sort(idle)
	for _, mod := range idle {
		t.Errorf("docs/dependencies.md explains %s, which nothing imports", mod)
	}
}
