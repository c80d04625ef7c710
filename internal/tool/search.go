package tool

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/herdgate/herdgate/internal/model"
)

// Limits of searches.
const (
	maxPatternBytes = 1000
	maxGlobWalk     = 200_000 // entries looked at
	maxGlobKept     = 20_000  // matches that are sorted
	maxGlobShown    = 1000
	maxGrepShown    = 500
	maxGrepFile     = 16 << 20
	maxGrepLine     = 300 // characters shown of a line
	maxGrepRead     = 1 << 20
)

// skipped are folders that searches leave out: caches of version control, and
// our own temporary files.
func skipped(rel string) bool {
	return rel == TempDir || path.Base(rel) == ".git"
}

func glob(w *Workspace, maxChars int) Tool {
	return &fileTool{
		spec: model.ToolSpec{
			Name:        "glob",
			Description: "Find files of the workspace by name pattern, such as **/*.go. Sorted by path. What .gitignore files leave out is left out.",
			Parameters: schema("pattern", `
				"pattern":{"type":"string","description":"*, ?, [abc], {a,b} and ** for any folders"},
				"path":{"type":"string","description":"folder to search in, default the workspace"},
				"include_ignored":{"type":"boolean","description":"also what .gitignore files leave out, default false"}`),
		},
		call: func(ctx context.Context, a *args) (Result, error) {
			pattern, base := a.need("pattern", "glob"), a.str("path", "dir", "directory")
			ignored := a.flag("include_ignored")
			if a.err != nil {
				return Result{}, a.err
			}
			pattern, base = patternFolder(ctx, pattern, base)
			w, done, err := w.reading(ctx, base)
			if err != nil {
				return Result{}, err
			}
			defer done()
			pattern, err = cleanPattern(w, pattern)
			if err != nil {
				return Result{}, err
			}
			var found []string
			more := 0
			seen, err := walk(ctx, w, base, ignored, func(rel, below string, d fs.DirEntry) error {
				if d.IsDir() || !doublestar.MatchUnvalidated(pattern, below) {
					return nil
				}
				if len(found) >= maxGlobKept {
					more++
					return nil
				}
				found = append(found, rel)
				return nil
			})
			if err != nil {
				return Result{}, err
			}
			if len(found) == 0 {
				return Result{Text: "No file matches " + quote(pattern) + "." + seen.note()}, nil
			}
			slices.Sort(found)
			out := newLines(maxChars, maxGlobShown, "files")
			for _, f := range found {
				out.add(w.shown(f))
			}
			out.total += more
			return Result{Text: out.text() + seen.cutNote()}, nil
		},
	}
}

// cleanPattern checks a pattern and makes an absolute one relative.
func cleanPattern(w *Workspace, p string) (string, error) {
	if len(p) > maxPatternBytes {
		return "", fmt.Errorf("pattern has %d bytes; want at most %d", len(p), maxPatternBytes)
	}
	if path.IsAbs(p) {
		rest, ok := inside(w.dir, p)
		if !ok {
			rest, ok = inside(w.real, p)
		}
		if !ok {
			return "", outside(p)
		}
		p = rest
	}
	p = strings.TrimPrefix(p, "./")
	if slices.Contains(strings.Split(p, "/"), "..") {
		return "", outside(p)
	}
	if !doublestar.ValidatePattern(p) {
		return "", fmt.Errorf("pattern %s is not valid; it may hold *, ?, [abc], {a,b} and **", quote(p))
	}
	return p, nil
}

// walked is what a walk has not visited.
type walked struct {
	ignored int  // files and folders that ignore files leave out
	cut     bool // there was more than a walk looks at
}

// note tells why there may be more than was found.
func (w walked) note() string {
	s := ""
	if w.ignored > 0 {
		s = fmt.Sprintf("\n(%d files or folders that .gitignore names were left out; include_ignored searches them too)", w.ignored)
	}
	return s + w.cutNote()
}

func (w walked) cutNote() string {
	if !w.cut {
		return ""
	}
	return fmt.Sprintf("\n(stopped after %d files and folders; give a path to search in)", maxGlobWalk)
}

// walk visits everything beneath base in order of names: rel is the path in the
// workspace, below the one beneath base. It follows no links, and unless
// ignored is set it leaves out what ignore files name. A base that is a file is
// visited alone; base itself is never left out.
func walk(ctx context.Context, w *Workspace, base string, ignored bool, visit func(rel, below string, d fs.DirEntry) error) (walked, error) {
	var res walked
	if base == "" {
		base = "."
	}
	root, err := w.locate(base)
	if err != nil {
		return res, err
	}
	seen := 0
	rules := ignores{w: w}
	if !ignored {
		rules.above(root)
	}
	err = fs.WalkDir(w.FS(), root, func(rel string, d fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			if rel == root {
				return w.explain(base, err)
			}
			return nil // gone or not readable: others may be
		}
		if seen++; seen > maxGlobWalk {
			res.cut = true
			return fs.SkipAll
		}
		if d.IsDir() && rel != root && skipped(rel) {
			return fs.SkipDir
		}
		if !ignored && rel != root && rules.match(rel, d.IsDir()) {
			res.ignored++
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if !ignored && d.IsDir() {
			rules.enter(rel)
		}
		below := rel
		switch {
		case rel == root && !d.IsDir():
			below = path.Base(rel)
		case root != ".":
			below = strings.TrimPrefix(strings.TrimPrefix(rel, root), "/")
		}
		return visit(rel, below, d)
	})
	return res, err
}

func grep(w *Workspace, maxChars int) Tool {
	return &fileTool{
		spec: model.ToolSpec{
			Name:        "grep",
			Description: "Search the files of the workspace with a regular expression (RE2). One match a line, as path:line: text. Binary files and what .gitignore files leave out are left out.",
			Parameters: schema("pattern", `
				"pattern":{"type":"string","description":"regular expression"},
				"path":{"type":"string","description":"file or folder to search in, default the workspace"},
				"glob":{"type":"string","description":"only files of this pattern, such as *.go or src/**/*.ts"},
				"ignore_case":{"type":"boolean","description":"default false"},
				"include_ignored":{"type":"boolean","description":"also what .gitignore files leave out, default false"},
				"max_results":{"type":"integer","minimum":1,"description":"default 200, at most 500"}`),
		},
		call: func(ctx context.Context, a *args) (Result, error) {
			pattern, base := a.need("pattern", "regex"), a.str("path", "dir", "directory")
			filter, fold := a.str("glob", "include"), a.flag("ignore_case")
			ignored := a.flag("include_ignored")
			limit := a.int("max_results", 200, 1, maxGrepShown)
			if a.err != nil {
				return Result{}, a.err
			}
			if len(pattern) > maxPatternBytes {
				return Result{}, fmt.Errorf("pattern has %d bytes; want at most %d", len(pattern), maxPatternBytes)
			}
			if fold {
				pattern = "(?i)" + pattern
			}
			re, err := regexp.Compile(pattern)
			if err != nil {
				return Result{}, fmt.Errorf("pattern: %w", err)
			}
			w, done, err := w.reading(ctx, base)
			if err != nil {
				return Result{}, err
			}
			defer done()
			if filter != "" {
				if filter, err = cleanPattern(w, filter); err != nil {
					return Result{}, err
				}
			}
			out := newLines(maxChars, limit, "matches")
			tooLarge := 0
			seen, err := walk(ctx, w, base, ignored, func(rel, below string, d fs.DirEntry) error {
				if !d.Type().IsRegular() || !fits(filter, rel, below) {
					return nil
				}
				err := grepFile(ctx, w, rel, re, out)
				if errors.Is(err, errTooLarge) {
					tooLarge++
					return nil
				}
				return err
			})
			full := errors.Is(err, errFull)
			if err != nil && !full {
				return Result{}, err
			}
			if out.total == 0 {
				return Result{Text: "No match." + seen.note() + largeNote(tooLarge)}, nil
			}
			text := out.text()
			if full {
				text = fmt.Sprintf("%s(only the first %d matches are shown; narrow the search to see others)", out.b.String(), out.kept)
			}
			return Result{Text: text + seen.cutNote() + largeNote(tooLarge)}, nil
		},
	}
}

var (
	errFull     = errors.New("no more matches are kept")
	errTooLarge = errors.New("the file or one of its lines is too large")
)

func largeNote(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("\n(%d files were not searched to their end: larger than %d MiB, or with a line above %d MiB)", n, maxGrepFile>>20, maxGrepRead>>20)
}

// fits reports whether a file passes the filter: a pattern without a slash is
// for the name, others for the path.
func fits(filter, rel, below string) bool {
	if filter == "" {
		return true
	}
	if !strings.Contains(filter, "/") {
		return doublestar.MatchUnvalidated(filter, path.Base(rel))
	}
	return doublestar.MatchUnvalidated(filter, below) || doublestar.MatchUnvalidated(filter, rel)
}

// grepFile searches one file. What cannot be read is left out.
func grepFile(ctx context.Context, w *Workspace, rel string, re *regexp.Regexp, out *lines) error {
	f, info, err := w.open(rel)
	if err != nil {
		return nil
	}
	defer f.Close()
	if info.Size() > maxGrepFile {
		return errTooLarge
	}
	r := bufio.NewReaderSize(io.LimitReader(f, maxGrepFile), 64<<10)
	if head, _ := r.Peek(binaryProbe); bytes.IndexByte(head, 0) >= 0 {
		return nil
	}
	for n := 1; ; n++ {
		line, err := r.ReadString('\n')
		if line == "" {
			return nil
		}
		if len(line) > maxGrepRead {
			return errTooLarge
		}
		if n%256 == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		line = strings.TrimRight(line, "\r\n")
		if at := re.FindStringIndex(line); at != nil && !out.add(fmt.Sprintf("%s:%d: %s", w.shown(rel), n, excerpt(line, at[0]))) {
			return errFull
		}
		if err != nil {
			return nil
		}
	}
}

// excerpt shortens a long line to the part around byte at.
func excerpt(line string, at int) string {
	if utf8.RuneCountInString(line) <= maxGrepLine {
		return line
	}
	runes := []rune(line)
	start := min(max(utf8.RuneCountInString(line[:at])-maxGrepLine/3, 0), len(runes)-maxGrepLine)
	s := string(runes[start : start+maxGrepLine])
	if start > 0 {
		s = "…" + s
	}
	if start+maxGrepLine < len(runes) {
		s += "…"
	}
	return s
}
