package tool

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/model"
)

// binaryProbe is how many bytes are looked at to tell text from the rest.
const binaryProbe = 8000

func readFile(w *Workspace, maxChars int) Tool {
	return &fileTool{
		spec: model.ToolSpec{
			Name:        "read_file",
			Description: "Read a text file of the workspace with line numbers. Long files come in parts; each part names the next start_line.",
			Parameters: schema("path", `
				"path":{"type":"string","description":"path inside the workspace"},
				"start_line":{"type":"integer","minimum":1,"description":"first line, default 1"},
				"end_line":{"type":"integer","minimum":1,"description":"last line, default the end"},
				"start_char":{"type":"integer","minimum":1,"description":"first character of start_line, for a line that is too long for one part"}`),
		},
		call: func(ctx context.Context, a *args) (Result, error) {
			name := a.need("path", "file_path", "filename", "file")
			first, last := a.lineRange()
			char := a.int("start_char", 1, 1, 1<<30)
			if a.err != nil {
				return Result{}, a.err
			}
			if last != 0 && last < first {
				return Result{}, fmt.Errorf("end_line is %d, before start_line %d", last, first)
			}
			at, done, err := w.reading(ctx, name)
			if err != nil {
				return Result{}, err
			}
			defer done()
			f, info, err := at.open(name)
			if err != nil {
				return Result{}, err
			}
			defer f.Close()
			if info.Size() > maxReadBytes {
				return Result{}, fmt.Errorf("%s has %d bytes; want at most %d: look into it with grep", quote(name), info.Size(), maxReadBytes)
			}
			r := bufio.NewReaderSize(io.LimitReader(f, maxReadBytes), 64<<10)
			if head, _ := r.Peek(binaryProbe); bytes.IndexByte(head, 0) >= 0 {
				return Result{}, fmt.Errorf("%s is a binary file of %d bytes", quote(name), info.Size())
			}
			text, err := numbered(ctx, r, first, last, char, maxChars)
			if err != nil {
				return Result{}, err
			}
			w.note(ctx, name, info) // of what lies beside it, nothing
			return Result{Text: text, Metadata: at.found(name)}, nil
		},
	}
}

// numbered writes the lines first to last (0 is the end) of r with their
// numbers, at most about maxChars characters. It cuts between lines and names
// the line to go on with; only a line that alone is too long is cut inside, and
// then the character to go on with is named as well (F-086).
func numbered(ctx context.Context, r *bufio.Reader, first, last, char, maxChars int) (string, error) {
	room := max(maxChars-200, 200) // for the hint
	var b strings.Builder
	used := 0
	for n := 1; ; n++ {
		if n%1000 == 0 && ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		line, err := r.ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return "", err
		}
		if line == "" {
			if first >= n && !(first == 1 && n == 1) {
				return "", fmt.Errorf("start_line is %d, but the file has %d lines", first, n-1)
			}
			if n == 1 {
				return "(the file is empty)", nil
			}
			return b.String(), nil
		}
		if n < first {
			continue
		}
		if last != 0 && n > last {
			return b.String(), nil
		}
		if n == 1 {
			line = strings.TrimPrefix(line, "\uFEFF")
		}
		// Counted as it is shown, so that the hint's start_char fits.
		// Edits keep the line ends, whatever they are.
		line = visible(strings.TrimSuffix(strings.TrimSuffix(line, "\n"), "\r"))
		runes := utf8.RuneCountInString(line)
		prefix := fmt.Sprintf("%6d\t", n)
		if n == first && char > 1 {
			if char > runes {
				return "", fmt.Errorf("start_char is %d, but line %d has %d characters", char, n, runes)
			}
			line = line[runeAt(line, char-1):]
			runes -= char - 1
		} else {
			char = 1
		}
		if used+len(prefix)+runes+1 <= room {
			b.WriteString(prefix + line + "\n")
			used += len(prefix) + runes + 1
			continue
		}
		if used > 0 {
			fmt.Fprintf(&b, "(cut here; go on with start_line=%d)", n)
			return b.String(), nil
		}
		shown := room - len(prefix) - 1
		b.WriteString(prefix + line[:runeAt(line, shown)] + "\n")
		fmt.Fprintf(&b, "(line %d is too long for one part: characters %d to %d of %d are shown; go on with start_line=%d start_char=%d)",
			n, char, char+shown-1, char+runes-1, n, char+shown)
		return b.String(), nil
	}
}

// runeAt is where in s its character n begins, counted from 0. A line may be as long as
// a file, so it is not taken apart.
func runeAt(s string, n int) int {
	for i := range s {
		if n == 0 {
			return i
		}
		n--
	}
	return len(s)
}

func writeFile(w *Workspace) Tool {
	return &fileTool{
		writes: true,
		spec: model.ToolSpec{
			Name:        "write_file",
			Description: "Write a file of the workspace, replacing what it held. Missing folders are created.",
			Parameters: schema("path content", `
				"path":{"type":"string","description":"path inside the workspace"},
				"content":{"type":"string","description":"the whole new content"}`),
		},
		call: func(ctx context.Context, a *args) (Result, error) {
			name := a.need("path", "file_path", "filename", "file")
			a.has("content")
			content := a.content("content")
			if a.err != nil {
				return Result{}, a.err
			}
			if len(content) > maxWriteBytes {
				return Result{}, fmt.Errorf("content has %d bytes; want at most %d", len(content), maxWriteBytes)
			}
			if err := w.mayWrite(ctx, name); err != nil {
				return Result{}, err
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			if err := w.mayReplace(ctx, name); err != nil {
				return Result{}, err
			}
			existed, err := w.write(ctx, name, []byte(content))
			if err != nil {
				return Result{}, err
			}
			w.noteNow(ctx, name)
			verb := "Created"
			if existed {
				verb = "Replaced"
			}
			return Result{Text: fmt.Sprintf("%s %s (%d bytes).", verb, name, len(content))}, nil
		},
	}
}

func strReplace(w *Workspace) Tool {
	return &fileTool{
		writes: true,
		spec: model.ToolSpec{
			Name:        "str_replace",
			Description: "Replace a text in a file of the workspace. old_str must occur exactly once, unless replace_all is true.",
			Parameters: schema("path old_str new_str", `
				"path":{"type":"string","description":"path inside the workspace"},
				"old_str":{"type":"string","description":"the text as it stands in the file, with its white space"},
				"new_str":{"type":"string","description":"the text to put in its place"},
				"replace_all":{"type":"boolean","description":"replace every occurrence, default false"}`),
		},
		call: func(ctx context.Context, a *args) (Result, error) {
			name := a.need("path", "file_path", "filename", "file")
			old, repl := a.str("old_str", "old_string"), a.str("new_str", "new_string")
			all := a.flag("replace_all")
			switch {
			case a.err != nil:
				return Result{}, a.err
			case old == "":
				return Result{}, errors.New("old_str is missing or empty; to write a new file use write_file")
			case old == repl:
				return Result{}, errors.New("old_str and new_str are the same; nothing to do")
			}
			if err := w.mayWrite(ctx, name); err != nil {
				return Result{}, err
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			b, err := w.read(name, maxEditBytes)
			if err != nil {
				return Result{}, err
			}
			out, n, err := replaceText(b, name, old, repl, all)
			if err != nil {
				return Result{}, err
			}
			known := w.mayReplace(ctx, name) == nil // an edit alone shows but a part of the file
			if _, err := w.write(ctx, name, out); err != nil {
				return Result{}, err
			}
			if known {
				w.noteNow(ctx, name)
			}
			return Result{Text: fmt.Sprintf("Replaced %d occurrence(s) in %s.", n, name)}, nil
		},
	}
}

// maxEntries bounds what ls shows.
const maxEntries = 1000

func listDir(w *Workspace, maxChars int) Tool {
	return &fileTool{
		spec: model.ToolSpec{
			Name:        "ls",
			Description: "List a folder of the workspace: folders end with /, files have their size in bytes.",
			Parameters:  schema("", `"path":{"type":"string","description":"path inside the workspace, default its root"}`),
		},
		call: func(ctx context.Context, a *args) (Result, error) {
			name := a.str("path", "dir", "directory")
			if a.err != nil {
				return Result{}, a.err
			}
			if name == "" {
				name = "."
			}
			w, done, err := w.reading(ctx, name)
			if err != nil {
				return Result{}, err
			}
			defer done()
			rel, err := w.locate(name)
			if err != nil {
				return Result{}, err
			}
			entries, err := fs.ReadDir(w.FS(), rel)
			if err != nil {
				return Result{}, w.explain(name, err)
			}
			out := newLines(maxChars, maxEntries, "entries")
			for _, e := range entries {
				if rel == "." && e.Name() == TempDir {
					continue
				}
				line := e.Name()
				switch {
				case e.IsDir():
					line += "/"
				case e.Type()&fs.ModeSymlink != 0:
					if target, err := w.root.Readlink(strings.TrimPrefix(rel+"/"+e.Name(), "./")); err == nil {
						line += " -> " + target
					}
				default:
					if info, err := e.Info(); err == nil {
						line += fmt.Sprintf("  %d", info.Size())
					}
				}
				out.add(line)
			}
			if out.total == 0 {
				return Result{Text: "(the folder is empty)"}, nil
			}
			return Result{Text: out.text()}, nil
		},
	}
}

// lines collects output lines within a bound and counts the rest.
type lines struct {
	b                  strings.Builder
	chars, maxChars    int
	kept, total, limit int
	what               string
}

func newLines(maxChars, limit int, what string) *lines {
	return &lines{maxChars: max(maxChars-200, 200), limit: limit, what: what}
}

// add appends a line; it reports whether further ones would be kept.
func (l *lines) add(line string) bool {
	l.total++
	line = strings.ReplaceAll(visible(line), "\n", "␊")
	n := utf8.RuneCountInString(line) + 1
	if l.total != l.kept+1 || l.kept >= l.limit || l.chars+n > l.maxChars {
		return false
	}
	l.b.WriteString(line + "\n")
	l.chars += n
	l.kept++
	return true
}

func (l *lines) text() string {
	if l.kept == l.total {
		return strings.TrimSuffix(l.b.String(), "\n")
	}
	return fmt.Sprintf("%s(%d of %d %s are shown; narrow the search to see the others)", l.b.String(), l.kept, l.total, l.what)
}
