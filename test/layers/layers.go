// Package layers keeps Herdgate's imports pointing one way:
//
//	cmd → services → internal → pkg/envelope → pkg/contract → standard library
//
// Its rules are functions over what the go tool says about the workspace, so
// that they can be shown to fail as well as to hold.
package layers

import (
	"fmt"
	"slices"
	"strings"
)

// Module is the path that all modules of the workspace begin with.
const Module = "github.com/herdgate/herdgate"

// Package is what the rules need to know of a package.
type Package struct {
	ImportPath string
	Standard   bool
	// Imports are those of the package and, where the package is ours, of its tests.
	Imports []string
	// Tests are those of Imports that only its tests need.
	Tests []string
	// Deps is everything that the package's own code links, without tests.
	Deps []string
}

// A place is where a package stands. Packages of one unit may import each other.
type place struct {
	layer int
	unit  string
}

// where returns the place of a package of ours.
func where(path string) (place, error) {
	rel := strings.TrimPrefix(path, Module+"/")
	top, rest, _ := strings.Cut(rel, "/")
	name, _, _ := strings.Cut(rest, "/")
	switch {
	case top == "pkg" && name == "contract":
		return place{0, "pkg/contract"}, nil
	case top == "pkg" && name == "envelope":
		return place{1, "pkg/envelope"}, nil
	case top == "internal":
		return place{2, "internal"}, nil
	case top == "services" && name != "":
		return place{3, "services/" + name}, nil
	case top == "cmd" && name != "":
		return place{4, "cmd/" + name}, nil
	case top == "test":
		return place{5, "test"}, nil
	}
	return place{}, fmt.Errorf("%s stands in none of the layers", path)
}

func ours(path string) bool { return strings.HasPrefix(path, Module+"/") }

// Arrows returns the imports among our packages that do not point downwards.
func Arrows(pkgs []Package) []string {
	var bad []string
	for _, p := range pkgs {
		from, err := where(p.ImportPath)
		if err != nil {
			bad = append(bad, err.Error())
			continue
		}
		for _, imp := range p.Imports {
			if !ours(imp) {
				continue
			}
			to, err := where(imp)
			if err != nil {
				bad = append(bad, err.Error())
			} else if to.unit != from.unit && to.layer >= from.layer {
				bad = append(bad, fmt.Sprintf("%s imports %s", p.ImportPath, imp))
			}
		}
	}
	return bad
}

// Strangers returns what the packages in pkg/ import beside the standard
// library and each other. standard tells which paths are the library's.
func Strangers(pkgs []Package, standard func(string) bool) []string {
	var bad []string
	for _, p := range pkgs {
		if !strings.HasPrefix(p.ImportPath, Module+"/pkg/") {
			continue
		}
		for _, imp := range p.Imports {
			if !standard(imp) && !strings.HasPrefix(imp, Module+"/pkg/") {
				bad = append(bad, fmt.Sprintf("%s imports %s", p.ImportPath, imp))
			}
		}
	}
	return bad
}

// Links tells for each prefix how many dependencies of p begin with it, and
// which is the first; nothing for a prefix that none begins with.
func Links(p Package, prefixes ...string) []string {
	var bad []string
	for _, prefix := range prefixes {
		count, first := 0, ""
		for _, dep := range p.Deps {
			if dep != prefix && !strings.HasPrefix(dep, prefix+"/") {
				continue
			}
			if count++; count == 1 {
				first = dep
			}
		}
		if count > 0 {
			bad = append(bad, fmt.Sprintf("%s links %d packages of %s: %s …", p.ImportPath, count, prefix, first))
		}
	}
	return bad
}

// Mod is a go.mod file of the workspace.
type Mod struct {
	Path     string
	Requires []string
	Replaces []string
}

// MissingLinks returns the require and replace lines that modules lack: each
// needs both for every local module that it reaches, directly or not, because
// neither go mod tidy nor a build outside of the workspace reads go.work.
func MissingLinks(mods []Mod) []string {
	byPath := map[string]Mod{}
	for _, m := range mods {
		byPath[m.Path] = m
	}
	var bad []string
	for _, m := range mods {
		seen := map[string]bool{m.Path: true}
		for todo := []Mod{m}; len(todo) > 0; todo = todo[1:] {
			for _, dep := range todo[0].Requires {
				if !ours(dep) || seen[dep] {
					continue
				}
				seen[dep] = true
				next, ok := byPath[dep]
				if !ok {
					bad = append(bad, fmt.Sprintf("%s reaches %s, which go.work does not use", m.Path, dep))
					continue
				}
				todo = append(todo, next)
				if !slices.Contains(m.Requires, dep) {
					bad = append(bad, fmt.Sprintf("%s reaches %s without a require line", m.Path, dep))
				}
				if !slices.Contains(m.Replaces, dep) {
					bad = append(bad, fmt.Sprintf("%s reaches %s without a replace line", m.Path, dep))
				}
			}
		}
	}
	return bad
}
