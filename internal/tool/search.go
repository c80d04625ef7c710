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

// errEnough ends a walk early.
var errEnough = errors.New("enough")

// skipped are folders that searches leave out: caches of version control, and
// our own temporary files.
func skipped(rel string) bool {
	return rel == tempDir || path.Base(rel) == ".git"
}

func glob(w *Workspace, maxChars int) Tool {
	return &fileTool{
		spec: model.ToolSpec{
			Name:        "glob",
			Description: "Find files of the workspace by name pattern, such as **/*.go. Sorted by path.",
			Parameters: schema("pattern", `
				"pattern":{"type":"string","description":"*, ?, [abc], {a,b} and ** for any folders"},
				"path":{"type":"string","description":"folder to search in, default the workspace"}`),
		},
		call: func(ctx context.Context, a *args) (Result, error) {
			pattern, base := a.need("pattern", "glob"), a.str("path", "dir", "directory")
			if a.err != nil {
				return Result{}, a.err
			}
			pattern, err := cleanPattern(w, pattern)
			if err != nil {
				return Result{}, err
			}
			var found []string
			more := 0
			err = walk(ctx, w, base, func(rel, below string, d fs.DirEntry) error {
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
				return Result{Text: "No file matches " + quote(pattern) + "."}, nil
			}
			slices.Sort(found)
			out := newLines(maxChars, maxGlobShown, "files")
			for _, f := range found {
				out.add(f)
			}
			out.total += more
			return Result{Text: out.text()}, nil
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

// walk visits everything beneath base in order of names: rel is the path in the
// workspace, below the one beneath base. It follows no links. A base that is a
// file is visited alone.
func walk(ctx context.Context, w *Workspace, base string, visit func(rel, below string, d fs.DirEntry) error) error {
	if base == "" {
		base = "."
	}
	root, err := w.locate(base)
	if err != nil {
		return err
	}
	seen := 0
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
			return errEnough
		}
		if d.IsDir() && rel != root && skipped(rel) {
			return fs.SkipDir
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
	if errors.Is(err, errEnough) {
		return nil
	}
	return err
}

func grep(w *Workspace, maxChars int) Tool {
	return &fileTool{
		spec: model.ToolSpec{
			Name:        "grep",
			Description: "Search the files of the workspace with a regular expression (RE2). One match a line, as path:line: text. Binary files are left out.",
			Parameters: schema("pattern", `
				"pattern":{"type":"string","description":"regular expression"},
				"path":{"type":"string","description":"file or folder to search in, default the workspace"},
				"glob":{"type":"string","description":"only files of this pattern, such as *.go or src/**/*.ts"},
				"ignore_case":{"type":"boolean","description":"default false"},
				"max_results":{"type":"integer","minimum":1,"description":"default 200, at most 500"}`),
		},
		call: func(ctx context.Context, a *args) (Result, error) {
			pattern, base := a.need("pattern", "regex"), a.str("path", "dir", "directory")
			filter, fold := a.str("glob", "include"), a.flag("ignore_case")
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
			if filter != "" {
				if filter, err = cleanPattern(w, filter); err != nil {
					return Result{}, err
				}
			}
			out := newLines(maxChars, limit, "matches")
			err = walk(ctx, w, base, func(rel, below string, d fs.DirEntry) error {
				if !d.Type().IsRegular() || !fits(filter, rel, below) {
					return nil
				}
				return grepFile(ctx, w, rel, re, out)
			})
			full := errors.Is(err, errFull)
			if err != nil && !full {
				return Result{}, err
			}
			if out.total == 0 {
				return Result{Text: "No match."}, nil
			}
			text := out.text()
			if full {
				text = fmt.Sprintf("%s(only the first %d matches are shown; narrow the search to see others)", out.b.String(), out.kept)
			}
			return Result{Text: text}, nil
		},
	}
}

var errFull = errors.New("no more matches are kept")

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
		return nil
	}
	r := bufio.NewReaderSize(io.LimitReader(f, maxGrepFile), 64<<10)
	if head, _ := r.Peek(binaryProbe); bytes.IndexByte(head, 0) >= 0 {
		return nil
	}
	for n := 1; ; n++ {
		line, err := r.ReadString('\n')
		if line == "" || len(line) > maxGrepRead {
			return nil
		}
		if n%256 == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		line = strings.TrimRight(line, "\r\n")
		if at := re.FindStringIndex(line); at != nil && !out.add(fmt.Sprintf("%s:%d: %s", rel, n, excerpt(line, at[0]))) {
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
