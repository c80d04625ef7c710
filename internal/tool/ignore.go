package tool

import (
	"path"
	"strings"

	"github.com/bmatcuk/doublestar/v4"
)

// maxIgnoreFile bounds an ignore file; what is larger is not heeded.
const maxIgnoreFile = 256 << 10

// ignoreRule is one line of a .gitignore file.
type ignoreRule struct {
	pattern  string
	keep     bool // begins with !: takes back what an earlier rule left out
	dirOnly  bool // ends with /
	anchored bool // holds a / elsewhere: for the path beneath the file's folder
	plain    bool // no wildcards
}

// parseIgnore reads the rules of a .gitignore file. What is no valid pattern is
// left out.
func parseIgnore(text string) []ignoreRule {
	var rules []ignoreRule
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		for strings.HasSuffix(line, " ") && !strings.HasSuffix(line, `\ `) {
			line = line[:len(line)-1]
		}
		if line == "" || line[0] == '#' {
			continue
		}
		var r ignoreRule
		line, r.keep = strings.CutPrefix(line, "!")
		line, r.dirOnly = strings.CutSuffix(line, "/")
		r.anchored = strings.Contains(line, "/")
		line = strings.TrimPrefix(line, "/")
		// Braces mean themselves here, and a/** does not mean a.
		line = strings.NewReplacer("{", `\{`, "}", `\}`).Replace(line)
		if strings.HasSuffix(line, "/**") {
			line += "/*"
		}
		if line == "" || !doublestar.ValidatePattern(line) {
			continue
		}
		r.pattern, r.plain = line, !strings.ContainsAny(line, `*?[\`)
		rules = append(rules, r)
	}
	return rules
}

func (r *ignoreRule) matches(below string, dir bool) bool {
	if r.dirOnly && !dir {
		return false
	}
	if !r.anchored {
		below = path.Base(below)
	}
	if r.plain {
		return r.pattern == below
	}
	return doublestar.MatchUnvalidated(r.pattern, below)
}

// ignores are the ignore files that hold at one place of a walk, the outermost
// first.
type ignores struct {
	w     *Workspace
	files []ignoreFile
}

type ignoreFile struct {
	dir   string
	rules []ignoreRule
}

// enter reads the ignore file of a folder, if it has one.
func (g *ignores) enter(dir string) {
	if b, err := g.w.read(path.Join(dir, ".gitignore"), maxIgnoreFile); err == nil {
		if rules := parseIgnore(string(b)); len(rules) > 0 {
			g.files = append(g.files, ignoreFile{dir, rules})
		}
	}
}

// above reads the ignore files of all folders above dir.
func (g *ignores) above(dir string) {
	if dir == "." {
		return
	}
	g.above(path.Dir(dir))
	g.enter(path.Dir(dir))
}

// match reports whether a path is ignored: the innermost file and its last rule
// that matches decide. Paths must come in the order of a walk.
func (g *ignores) match(rel string, dir bool) bool {
	for n := len(g.files); n > 0; n = len(g.files) {
		if _, ok := beneath(g.files[n-1].dir, rel); ok {
			break
		}
		g.files = g.files[:n-1] // the walk has left it
	}
	for i := len(g.files) - 1; i >= 0; i-- {
		below, _ := beneath(g.files[i].dir, rel)
		for j := len(g.files[i].rules) - 1; j >= 0; j-- {
			if r := &g.files[i].rules[j]; r.matches(below, dir) {
				return !r.keep
			}
		}
	}
	return false
}

// beneath gives rel relative to dir if it lies beneath it.
func beneath(dir, rel string) (string, bool) {
	if dir == "." {
		return rel, rel != "."
	}
	return strings.CutPrefix(rel, dir+"/")
}
