package workspace

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// entry is a file or a link of a snapshot.
type entry struct {
	SHA256 string `json:"sha256,omitempty"`
	Size   int64  `json:"size,omitempty"`
	Exec   bool   `json:"exec,omitempty"`
	Link   string `json:"link,omitempty"`
}

// tree is what a snapshot holds, by path in slash form.
type tree map[string]entry

// check compares a tree with the limits.
func (t tree) check(l Limits) error {
	if len(t) > l.Files {
		return fmt.Errorf("%w: it has %d files; want at most %d", ErrLimit, len(t), l.Files)
	}
	var sum int64
	for p, e := range t {
		if e.Size > l.FileBytes {
			return fmt.Errorf("%w: %q has %d bytes; want at most %d", ErrLimit, p, e.Size, l.FileBytes)
		}
		sum += e.Size
	}
	if sum > l.Bytes {
		return fmt.Errorf("%w: its files have %d bytes together; want at most %d", ErrLimit, sum, l.Bytes)
	}
	return nil
}

// changes counts the paths in which two trees differ.
func changes(a, b tree) int {
	n := 0
	for p, e := range a {
		if f, ok := b[p]; !ok || e != f {
			n++
		}
	}
	for p := range b {
		if _, ok := a[p]; !ok {
			n++
		}
	}
	return n
}

// conflictDir holds the later versions of files in conflict.
const conflictDir = ".conflicts"

// merge puts what changed from base to mine on top of theirs. Where both changed
// the same file in different ways, theirs stays, and mine is kept under a name
// that holds who. Nothing of theirs is ever lost.
func merge(base, mine, theirs tree, who string) (tree, []Conflict) {
	out := maps.Clone(theirs)
	if out == nil {
		out = tree{}
	}
	lost := tree{} // of mine, where theirs stays; without content: removed
	paths := map[string]bool{}
	for p := range base {
		paths[p] = true
	}
	for p := range mine {
		paths[p] = true
	}
	for p := range paths {
		b, inBase := base[p]
		m, inMine := mine[p]
		t, inTheirs := theirs[p]
		switch {
		case inMine == inBase && m == b: // not changed here
		case inMine == inTheirs && m == t: // changed alike
		case inTheirs == inBase && t == b: // changed here alone
			if inMine {
				out[p] = m
			} else {
				delete(out, p)
			}
		default:
			lost[p] = m
		}
	}
	// A file cannot be where the folder of another is. Theirs fit one another, and
	// so do mine, so that in each such pair one is mine alone.
	for _, p := range slices.Sorted(maps.Keys(out)) {
		for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
			e, clash := out[dir]
			if !clash {
				continue
			}
			if _, old := theirs[p]; !old {
				lost[p] = out[p]
				delete(out, p)
				break
			}
			lost[dir] = e
			delete(out, dir)
		}
	}
	if len(lost) == 0 {
		return out, nil
	}
	var conflicts []Conflict
	place := conflictPlace(out, who)
	for _, p := range slices.Sorted(maps.Keys(lost)) {
		c := Conflict{Path: p}
		if e := lost[p]; e != (entry{}) {
			c.Kept = place + "/" + p
			out[c.Kept] = e
		}
		conflicts = append(conflicts, c)
	}
	return out, conflicts
}

// conflictPlace finds a folder that nothing is in, nor in the way of.
func conflictPlace(t tree, who string) string {
	taken := func(dir string) bool {
		for p := range t {
			if p == dir || strings.HasPrefix(p, dir+"/") {
				return true
			}
		}
		return false
	}
	top := conflictDir
	for n := 2; ; n++ {
		if _, file := t[top]; !file {
			break
		}
		top = fmt.Sprintf("%s-%d", conflictDir, n)
	}
	dir := top + "/" + who
	for n := 2; taken(dir); n++ {
		dir = fmt.Sprintf("%s/%s-%d", top, who, n)
	}
	return dir
}
