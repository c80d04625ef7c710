// Package agentfile reads the sub-agent definitions of folders with Markdown
// files.
//
// Folders are read again and again, by content, instead of by notices of the file
// system: those do not come through every mount that containers have (network
// file systems, folders of the host, replaced volumes of Kubernetes).
package agentfile

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/subagent"
)

// Bounds of what is read.
const (
	// MaxFiles is how many files are read, of all folders together.
	MaxFiles = 1000
	// maxTotal bounds their bytes.
	maxTotal = 32 << 20
)

// Warning is something in a folder that is not as it should be. The rest is read.
type Warning struct {
	// Place is FILE:LINE, or a folder.
	Place string
	Text  string
}

// String is the warning in one line.
func (w Warning) String() string { return w.Place + ": " + w.Text }

// Load reads the Markdown files of folders, in the order of the folders and of the
// names in them, folders in folders included. Of two with the same name the first
// counts. Names that begin with a dot are passed over, and so are README files.
// A link that leads out of its folder is not followed.
func Load(folders []string, md subagent.Markdown) ([]subagent.File, []Warning) {
	l := load(folders)
	return l.parse(md)
}

type source struct {
	place string
	data  []byte
}

type loaded struct {
	sources  []source
	warnings []Warning
	total    int
}

func (l *loaded) warn(place, format string, args ...any) {
	l.warnings = append(l.warnings, Warning{place, fmt.Sprintf(format, args...)})
}

func load(folders []string) *loaded {
	l := &loaded{}
	for _, folder := range folders {
		l.folder(folder)
	}
	return l
}

func (l *loaded) folder(folder string) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		l.warn(folder, "the folder cannot be read (%v); want a folder with Markdown files", reason(err))
		return
	}
	defer root.Close()
	_ = fs.WalkDir(root.FS(), ".", func(name string, e fs.DirEntry, err error) error {
		place := filepath.Join(folder, filepath.FromSlash(name))
		base := path.Base(name)
		switch {
		case err != nil:
			l.warn(place, "it cannot be read (%v)", reason(err))
			return nil
		case name != "." && strings.HasPrefix(base, "."):
			if e.IsDir() {
				return fs.SkipDir
			}
			return nil
		case e.IsDir() || !strings.EqualFold(path.Ext(base), ".md") || strings.EqualFold(base, "README.md"):
			return nil
		case len(l.sources) >= MaxFiles:
			l.warn(folder, "there are more than %d files; the others are left out", MaxFiles)
			return fs.SkipAll
		}
		data, err := read(root, name)
		if err == nil && l.total+len(data) > maxTotal {
			l.warn(folder, "the files have more than %d bytes together; the others are left out", maxTotal)
			return fs.SkipAll
		}
		if err != nil {
			l.warn(place, "it cannot be read (%v); want a Markdown file inside of the folder", reason(err))
			return nil
		}
		l.total += len(data)
		l.sources = append(l.sources, source{place, data})
		return nil
	})
}

func read(root *os.Root, name string) ([]byte, error) {
	// A pipe would be waited for.
	info, err := root.Stat(filepath.FromSlash(name))
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("it is no file")
	}
	f, err := root.Open(filepath.FromSlash(name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, subagent.MaxMarkdownBytes+1))
}

// reason is an error without the name of the file, which the place tells.
func reason(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

func (l *loaded) parse(md subagent.Markdown) ([]subagent.File, []Warning) {
	var files []subagent.File
	warnings := slices.Clone(l.warnings)
	owner := map[string]string{}
	for _, s := range l.sources {
		at := func(line int) string {
			if line == 0 {
				return s.place
			}
			return fmt.Sprintf("%s:%d", s.place, line)
		}
		c, notes, err := md.Parse(s.data)
		if err != nil {
			line, text := 0, err.Error()
			if e, ok := subagent.IsLineError(err); ok {
				line, text = e.Line, e.Text
			}
			warnings = append(warnings, Warning{at(line), "the definition is left out: " + text})
			continue
		}
		for _, n := range notes {
			warnings = append(warnings, Warning{at(n.Line), n.Text})
		}
		if first, taken := owner[c.Name]; taken {
			warnings = append(warnings, Warning{s.place, fmt.Sprintf("the definition is left out: %s has the name %s already; rename one of them", first, c.Name)})
			continue
		}
		owner[c.Name] = s.place
		files = append(files, subagent.File{Custom: c, Path: s.place})
	}
	return files, warnings
}

// Reader reads folders, and tells what is wrong with them when that changes.
type Reader struct {
	folders []string
	md      subagent.Markdown
	log     zerolog.Logger

	mu   sync.Mutex
	last [sha256.Size]byte
	read bool
}

// NewReader returns a reader of folders.
func NewReader(folders []string, md subagent.Markdown, log zerolog.Logger) *Reader {
	return &Reader{folders: folders, md: md, log: log}
}

// Read reads the folders; changed is false, and nothing is returned, when they hold
// what they held the last time.
func (r *Reader) Read() (files []subagent.File, changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := load(r.folders)
	h := sha256.New()
	for _, s := range l.sources {
		fmt.Fprintf(h, "%q %d ", s.place, len(s.data))
		h.Write(s.data)
	}
	for _, w := range l.warnings {
		fmt.Fprintf(h, "%q ", w.String())
	}
	sum := [sha256.Size]byte(h.Sum(nil))
	if r.read && sum == r.last {
		return nil, false
	}
	r.last, r.read = sum, true
	files, warnings := l.parse(r.md)
	for _, w := range warnings {
		r.log.Warn().Str("place", w.Place).Msg("sub-agent definition: " + w.Text)
	}
	return files, true
}
