package workspace

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"testing"
)

func treeOf(files ...string) tree {
	t := tree{}
	for _, f := range files {
		p, c, _ := strings.Cut(f, "=")
		t[p] = entry{SHA256: c, Size: int64(len(c))}
	}
	return t
}

func (t tree) String() string {
	var out []string
	for _, p := range slices.Sorted(maps.Keys(t)) {
		out = append(out, p+"="+t[p].SHA256+t[p].Link)
	}
	return strings.Join(out, " ")
}

// What two copies changed comes together; where both changed one file, what was
// there first stays and the other version is kept beside it.
func TestMerge(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		base, mine, theirs tree
		want, conflicts    string
	}{
		"nothing":          {treeOf("a=1"), treeOf("a=1"), treeOf("a=1"), "a=1", ""},
		"first snapshot":   {nil, treeOf("a=1"), nil, "a=1", ""},
		"mine alone":       {treeOf("a=1", "d=1"), treeOf("a=2", "b=1"), treeOf("a=1", "d=1"), "a=2 b=1", ""},
		"theirs alone":     {treeOf("a=1", "d=1"), treeOf("a=1", "d=1"), treeOf("a=2", "b=1"), "a=2 b=1", ""},
		"different files":  {treeOf("a=1", "b=1"), treeOf("a=2", "b=1", "m=1"), treeOf("a=1", "b=2", "t=1"), "a=2 b=2 m=1 t=1", ""},
		"the same change":  {treeOf("a=1"), treeOf("a=2", "n=1"), treeOf("a=2", "n=1"), "a=2 n=1", ""},
		"both removed":     {treeOf("a=1"), treeOf(), treeOf(), "", ""},
		"both changed":     {treeOf("a=1"), treeOf("a=2"), treeOf("a=3"), ".conflicts/me/a=2 a=3", "a>.conflicts/me/a"},
		"both made":        {nil, treeOf("x/a=2"), treeOf("x/a=3"), ".conflicts/me/x/a=2 x/a=3", "x/a>.conflicts/me/x/a"},
		"removed, changed": {treeOf("a=1"), treeOf(), treeOf("a=3"), "a=3", "a>"},
		"changed, removed": {treeOf("a=1"), treeOf("a=2"), treeOf(), ".conflicts/me/a=2", "a>.conflicts/me/a"},
		"file in a folder": {nil, treeOf("a/b=1"), treeOf("a=1"), ".conflicts/me/a/b=1 a=1", "a/b>.conflicts/me/a/b"},
		"folder of a file": {nil, treeOf("a=1"), treeOf("a/b/c=1"), ".conflicts/me/a=1 a/b/c=1", "a>.conflicts/me/a"},
		"file for folder":  {treeOf("a/b=1"), treeOf("a=1"), treeOf("a/b=1", "a/c=1"), ".conflicts/me/a=1 a/c=1", "a>.conflicts/me/a"},
		"taken name":       {treeOf("a=1"), treeOf("a=2"), treeOf("a=3", ".conflicts/me/x=1"), ".conflicts/me-2/a=2 .conflicts/me/x=1 a=3", "a>.conflicts/me-2/a"},
		"file in the way":  {treeOf("a=1"), treeOf("a=2"), treeOf("a=3", ".conflicts=1"), ".conflicts=1 .conflicts-2/me/a=2 a=3", "a>.conflicts-2/me/a"},
	} {
		got, conflicts := merge(c.base, c.mine, c.theirs, "me")
		var told []string
		for _, k := range conflicts {
			told = append(told, k.Path+">"+k.Kept)
		}
		if got.String() != c.want || strings.Join(told, " ") != c.conflicts {
			t.Errorf("%s: %s, conflicts %v; want %s, %s", name, got, told, c.want, c.conflicts)
		}
	}
}

// Whatever two copies did: nothing of theirs is lost but what was not changed
// there, no version of mine is lost, every loss of a place is told, and files and
// folders do not clash.
func TestMergeLosesNothing(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20_000) {
		r := rand.New(rand.NewPCG(seed, 1))
		random := func(from tree) tree {
			out := maps.Clone(from)
			if out == nil {
				out = tree{}
			}
			for range r.IntN(5) {
				p := []string{"a", "a/b", "a/b/c", "d", "d/e", "f"}[r.IntN(6)]
				for q := range out { // a file and a folder of one name cannot be
					if q == p || strings.HasPrefix(q, p+"/") || strings.HasPrefix(p, q+"/") {
						delete(out, q)
					}
				}
				if r.IntN(4) > 0 {
					out[p] = entry{SHA256: fmt.Sprint(r.IntN(4)), Size: 1}
				}
			}
			return out
		}
		base := random(nil)
		mine, theirs := random(base), random(base)
		got, conflicts := merge(base, mine, theirs, "me")
		kept := map[string]string{}
		for _, c := range conflicts {
			kept[c.Path] = c.Kept
		}
		fail := func(why string) {
			t.Fatalf("seed %d: base %s, mine %s, theirs %s: %s, %v: %s", seed, base, mine, theirs, got, conflicts, why)
		}
		for p, e := range theirs {
			m, ok := mine[p]
			changedThere, changedHere := e != base[p], !ok || m != base[p]
			if got[p] != e && (changedThere || !changedHere) {
				fail("theirs is lost: " + p)
			}
		}
		for p, e := range mine {
			if e != base[p] && got[p] != e && got[kept[p]] != e {
				fail("mine is lost: " + p)
			}
		}
		for p := range base {
			if _, ok := mine[p]; !ok && got[p] != (entry{}) && got[p] != theirs[p] {
				fail("what was removed came back: " + p)
			}
		}
		for p := range got {
			for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
				if _, clash := got[dir]; clash {
					fail(dir + " is a file and a folder")
				}
			}
		}
	}
}
