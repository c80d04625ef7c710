package workspace

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/tool"
)

// scan reads what lies in a folder. Names that cannot be kept are told apart.
// Nobody writes to the folder meanwhile.
func scan(ctx context.Context, root *os.Root, l Limits) (t tree, leftOut []string, err error) {
	t = tree{}
	var sum int64
	reopen(root.Name())
	err = fs.WalkDir(root.FS(), ".", func(p string, d fs.DirEntry, err error) error {
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return fmt.Errorf("the workspace cannot be read: %w", err)
		case p == ".":
			return nil
		case p == tool.TempDir && d.IsDir():
			return fs.SkipDir
		case p == tool.TempDir: // a command put a file or a link there: skipping the folder would skip all that follows
			return nil
		case !utf8.ValidString(p):
			leftOut = append(leftOut, p)
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		case d.IsDir():
			// A command may have closed it, even to us.
			if info, err := d.Info(); err == nil && info.Mode().Perm()&0o700 != 0o700 {
				_ = root.Chmod(p, info.Mode().Perm()|0o700)
			}
			return nil
		case len(t) == l.Files:
			return fmt.Errorf("%w: it has more than %d files", ErrLimit, l.Files)
		case d.Type()&fs.ModeSymlink != 0:
			target, err := root.Readlink(p)
			if err != nil {
				return fmt.Errorf("the link %q of the workspace cannot be read: %w", p, err)
			}
			if !utf8.ValidString(target) {
				leftOut = append(leftOut, p)
				return nil
			}
			t[p] = entry{Link: target}
			return nil
		case !d.Type().IsRegular():
			leftOut = append(leftOut, p)
			return nil
		}
		e, err := digest(root, p, l.FileBytes)
		if err != nil {
			return err
		}
		if sum += e.Size; sum > l.Bytes {
			return fmt.Errorf("%w: its files have more than %d bytes together", ErrLimit, l.Bytes)
		}
		t[p] = e
		return nil
	})
	return t, leftOut, err
}

// reopen lets us into a folder that a command closed, even to us.
func reopen(dir string) {
	if info, err := os.Lstat(dir); err == nil && info.IsDir() && info.Mode().Perm()&0o700 != 0o700 {
		_ = os.Chmod(dir, info.Mode().Perm()|0o700) // what cannot be opened is told by its use
	}
}

// removeCopy removes a copy with all that is in it, also folders that a command closed.
func removeCopy(dir string) error {
	err := os.RemoveAll(dir)
	if err == nil {
		return nil
	}
	reopen(dir)
	root, rerr := os.OpenRoot(dir)
	if rerr != nil {
		return err
	}
	_ = fs.WalkDir(root.FS(), ".", func(p string, d fs.DirEntry, _ error) error {
		if d != nil && d.IsDir() {
			_ = root.Chmod(p, 0o700)
		}
		return nil
	})
	_ = root.Close()
	return os.RemoveAll(dir)
}

// digest reads one file.
func digest(root *os.Root, p string, limit int64) (entry, error) {
	f, info, err := open(root, p)
	if err != nil {
		return entry{}, err
	}
	defer f.Close()
	if info.Size() > limit {
		return entry{}, fmt.Errorf("%w: %q has %d bytes; want at most %d", ErrLimit, p, info.Size(), limit)
	}
	h := sha256.New()
	n, err := io.Copy(h, io.LimitReader(f, limit+1))
	if err != nil {
		return entry{}, fmt.Errorf("the file %q of the workspace cannot be read: %w", p, err)
	}
	return entry{SHA256: hex.EncodeToString(h.Sum(nil)), Size: n, Exec: info.Mode()&0o100 != 0}, nil
}

// open opens a regular file, also one that its maker may not read.
func open(root *os.Root, p string) (*os.File, fs.FileInfo, error) {
	const flags = os.O_RDONLY | syscall.O_NONBLOCK | syscall.O_NOFOLLOW
	f, err := root.OpenFile(p, flags, 0)
	if errors.Is(err, fs.ErrPermission) && root.Chmod(p, 0o600) == nil {
		f, err = root.OpenFile(p, flags, 0)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("the file %q of the workspace cannot be read: %w", p, err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is no regular file")
	}
	if err != nil {
		f.Close()
		return nil, nil, fmt.Errorf("the file %q of the workspace cannot be read: %w", p, err)
	}
	return f, info, nil
}

// remove takes files away, and the folders that are empty then.
func remove(root *os.Root, paths []string) error {
	slices.SortFunc(paths, func(a, b string) int { return strings.Compare(b, a) }) // the deepest first
	for _, p := range paths {
		if err := root.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove %q of the workspace: %w", p, err)
		}
		for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
			if root.Remove(dir) != nil {
				break // something is in it
			}
		}
	}
	return nil
}

// put writes an entry in place of what is there, at once.
func put(root *os.Root, p string, e entry, content func(io.Writer) error) error {
	dir := path.Dir(p)
	if err := root.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the folder of %q of the workspace: %w", p, err)
	}
	if info, err := root.Lstat(p); err == nil && info.IsDir() {
		// No snapshot has anything in it, so it holds what is not kept anyway.
		if err := root.RemoveAll(p); err != nil {
			return fmt.Errorf("replace the folder %q of the workspace: %w", p, err)
		}
	}
	var suffix [6]byte
	_, _ = rand.Read(suffix[:]) // never fails
	temp := path.Join(dir, ".write-"+hex.EncodeToString(suffix[:]))
	err := func() error {
		if e.Link != "" {
			return root.Symlink(e.Link, temp)
		}
		mode := fs.FileMode(0o644)
		if e.Exec {
			mode = 0o755
		}
		f, err := root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if err != nil {
			return err
		}
		err = content(f)
		return errors.Join(err, f.Close())
	}()
	if err == nil {
		err = root.Rename(temp, p)
	}
	if err != nil {
		_ = root.Remove(temp)
		return fmt.Errorf("write %q of the workspace: %w", p, err)
	}
	return nil
}
