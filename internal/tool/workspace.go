package tool

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Limits of a workspace.
const (
	maxPathBytes  = 4096
	maxWriteBytes = 8 << 20
	maxEditBytes  = 8 << 20
	maxReadBytes  = 64 << 20
	maxLinks      = 40
)

// tempAge is how long what lies in the folder for temporary files stays untouched before
// it goes.
const tempAge = 24 * time.Hour

// TempDir is the folder inside a workspace that commands have as TMPDIR. The
// tools that list and search leave it out.
const TempDir = ".tmp"

// ErrOutside is returned for a path that leaves the workspace.
var ErrOutside = errors.New("outside of the workspace")

// Workspace is the folder of one thread. Everything that the file tools do goes
// through a handle on it, so that no name leads outside: neither .. nor an
// absolute path nor a link, also when a command swaps them in between. It is
// safe for concurrent use.
type Workspace struct {
	dir  string // absolute, as given
	real string // with links resolved
	root *os.Root
	mu   *sync.Mutex // one writer at a time: edits read and write
	// aside: it is no workspace, but a folder beside one that can only be read.
	aside bool
}

// writers are shared by the workspaces of one folder, because the tasks of one
// thread run side by side, each with a handle of its own. Others share one now
// and then, which costs a short wait.
var (
	writers [64]sync.Mutex
	seed    = maphash.MakeSeed()
)

// NewWorkspace opens the folder root, which it creates if need be.
func NewWorkspace(root string) (*Workspace, error) {
	dir, err := filepath.Abs(root)
	if err != nil {
		return nil, fmt.Errorf("workspace %q: %w", root, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("workspace: %w", err)
	}
	resolved, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, fmt.Errorf("workspace: %w", err)
	}
	reopen(resolved)
	r, err := os.OpenRoot(resolved)
	if err != nil {
		return nil, fmt.Errorf("workspace: %w", err)
	}
	return &Workspace{dir: dir, real: resolved, root: r, mu: &writers[maphash.String(seed, resolved)%uint64(len(writers))]}, nil
}

// reopen lets us into the folder of a workspace that a command closed, even to us:
// no later task of the thread could work any more.
func reopen(dir string) {
	if info, err := os.Lstat(dir); err == nil && info.IsDir() && info.Mode().Perm()&0o700 != 0o700 {
		_ = os.Chmod(dir, info.Mode().Perm()|0o700) // what cannot be opened is told by its use
	}
}

// prepare makes the workspace ready for a command: it can be entered, and there is a
// folder for temporary files, without what was forgotten in it long ago.
func (w *Workspace) prepare() error {
	reopen(w.real)
	if info, err := w.root.Lstat(TempDir); err == nil && !info.IsDir() {
		_ = w.root.Remove(TempDir) // a command put something else there
	}
	if err := w.root.Mkdir(TempDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return w.explain(TempDir, err)
	}
	if info, err := w.root.Lstat(TempDir); err == nil && info.IsDir() && info.Mode().Perm() != 0o700 {
		_ = w.root.Chmod(TempDir, 0o700) // by the handle: a command beside us may swap it
	}
	entries, err := fs.ReadDir(w.FS(), TempDir)
	if err != nil {
		return w.explain(TempDir, err)
	}
	limit := time.Now().Add(-tempAge)
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.ModTime().Before(limit) {
			_ = w.root.RemoveAll(path.Join(TempDir, e.Name())) // the next command tries again
		}
	}
	return nil
}

// Dir is the absolute path of the folder.
func (w *Workspace) Dir() string { return w.real }

// Close lets go of the folder, which stays.
func (w *Workspace) Close() error { return w.root.Close() }

// FS is the folder to read from. Links inside work, others are errors.
func (w *Workspace) FS() fs.FS { return w.root.FS() }

// Rel maps a path that a model wrote to one relative to the workspace, in slash
// form. It looks at the text alone. Absolute paths inside the workspace are
// accepted; what leaves it is an error that wraps [ErrOutside].
func (w *Workspace) Rel(name string) (string, error) {
	switch {
	case strings.TrimSpace(name) == "":
		return "", errors.New("the path is empty; give a path inside the workspace, such as notes/a.txt")
	case len(name) > maxPathBytes:
		return "", fmt.Errorf("the path has %d bytes; want at most %d", len(name), maxPathBytes)
	case strings.ContainsRune(name, 0):
		return "", errors.New("the path holds a NUL character")
	}
	p := filepath.Clean(filepath.FromSlash(name))
	if filepath.IsAbs(p) {
		rel, ok := inside(w.dir, p)
		if !ok {
			rel, ok = inside(w.real, p)
		}
		if !ok {
			return "", outside(name)
		}
		p = rel
	}
	if !filepath.IsLocal(p) {
		return "", outside(name)
	}
	return filepath.ToSlash(p), nil
}

// inside gives p relative to dir if it is dir or beneath it.
func inside(dir, p string) (string, bool) {
	if p == dir {
		return ".", true
	}
	rest, ok := strings.CutPrefix(p, strings.TrimSuffix(dir, string(filepath.Separator))+string(filepath.Separator))
	return rest, ok
}

func outside(name string) error {
	return fmt.Errorf("path %s is %w; use a path inside it, such as notes/a.txt", quote(name), ErrOutside)
}

// locate is Rel with links followed, so that absolute links to a place inside
// work too, which the handle alone would refuse. The last name need not exist.
// What it finds is only a name: the handle still guards the access itself.
func (w *Workspace) locate(name string) (string, error) {
	rel, err := w.Rel(name)
	if err != nil {
		return "", err
	}
	todo := strings.Split(rel, "/")
	done := "."
	for links := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			if done == "." {
				return "", outside(name)
			}
			done = path.Dir(done)
			continue
		}
		next := path.Join(done, part)
		info, err := w.root.Lstat(next)
		if err != nil || info.Mode()&fs.ModeSymlink == 0 {
			done = next // what does not exist is told by the access itself
			continue
		}
		if links++; links > maxLinks {
			return "", fmt.Errorf("path %s goes through more than %d links", quote(name), maxLinks)
		}
		target, err := w.root.Readlink(next)
		if err != nil {
			return "", w.explain(name, err)
		}
		target = filepath.ToSlash(target)
		if path.IsAbs(target) {
			in, err := w.Rel(target)
			if err != nil {
				return "", outside(name)
			}
			target, done = in, "."
		}
		todo = append(strings.Split(target, "/"), todo...)
		if len(todo) > maxPathBytes {
			return "", fmt.Errorf("path %s goes through too many links", quote(name))
		}
	}
	return done, nil
}

// explain words an error of the file system for the model.
func (w *Workspace) explain(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrOutside) || strings.Contains(err.Error(), "path escapes from parent"):
		return outside(name)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s does not exist", quote(name))
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: permission denied", quote(name))
	}
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = pe.Err // without our own paths
	}
	var le *os.LinkError
	if errors.As(err, &le) {
		err = le.Err
	}
	return fmt.Errorf("%s: %w", quote(name), err)
}

// open opens a regular file to read. It never blocks: a pipe that a command
// made is refused.
func (w *Workspace) open(name string) (*os.File, fs.FileInfo, error) {
	rel, err := w.locate(name)
	if err != nil {
		return nil, nil, err
	}
	f, err := w.root.OpenFile(rel, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, w.explain(name, err)
	}
	info, err := f.Stat()
	switch {
	case err != nil:
		err = w.explain(name, err)
	case info.IsDir():
		err = fmt.Errorf("%s is a folder; use ls", quote(name))
	case !info.Mode().IsRegular():
		err = fmt.Errorf("%s is no regular file", quote(name))
	default:
		return f, info, nil
	}
	f.Close()
	return nil, nil, err
}

// read gives the whole of a file of at most limit bytes.
func (w *Workspace) read(name string, limit int64) ([]byte, error) {
	f, info, err := w.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info.Size() > limit {
		return nil, fmt.Errorf("%s has %d bytes; want at most %d", quote(name), info.Size(), limit)
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("has more than %d bytes", limit)
	}
	return b, w.explain(name, err)
}

// write puts content in place of a file at once: readers see the old or the new
// one. It creates missing folders. The caller holds mu.
func (w *Workspace) write(ctx context.Context, name string, content []byte) (existed bool, err error) {
	rel, err := w.locate(name)
	if err != nil {
		return false, err
	}
	if rel == "." {
		return false, fmt.Errorf("%s is a folder", quote(name))
	}
	mode := fs.FileMode(0o644)
	if info, err := w.root.Lstat(rel); err == nil {
		switch {
		case info.IsDir():
			return true, fmt.Errorf("%s is a folder", quote(name))
		case !info.Mode().IsRegular():
			return true, fmt.Errorf("%s is no regular file", quote(name))
		}
		existed, mode = true, info.Mode().Perm()
	}
	dir := path.Dir(rel)
	if err := w.root.MkdirAll(dir, 0o755); err != nil {
		return existed, w.explain(name, err)
	}
	var suffix [6]byte
	_, _ = rand.Read(suffix[:]) // never fails
	temp := path.Join(dir, ".write-"+hex.EncodeToString(suffix[:]))
	f, err := w.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return existed, w.explain(name, err)
	}
	_, err = f.Write(content)
	if err == nil && existed {
		err = f.Chmod(mode)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx) // nothing changes after the stop
	}
	if err == nil {
		err = w.root.Rename(temp, rel)
	}
	if err != nil {
		_ = w.root.Remove(temp)
		if ctx.Err() != nil {
			return existed, err
		}
		return existed, w.explain(name, err)
	}
	return existed, nil
}
