package tool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// MetaFolderFile is the metadata key of a read_file's result under which the file
// stands, as an absolute path with links followed, if it lies in one of the folders
// of [WithFolders].
const MetaFolderFile = "folder_file"

type foldersKey struct{}

// WithFolders returns a context under which the tools that read, and confined
// commands, may also read the folders dirs beside the workspace, by their absolute
// paths. Nothing in them can be written. No part of a folder's path may be a link.
func WithFolders(ctx context.Context, dirs []string) context.Context {
	if len(dirs) == 0 {
		return ctx
	}
	return context.WithValue(ctx, foldersKey{}, dirs)
}

func foldersOf(ctx context.Context) []string {
	dirs, _ := ctx.Value(foldersKey{}).([]string)
	return dirs
}

// reading gives what holds a name that is to be read: the workspace, or a folder
// that lies beside it. The caller calls done when it has read.
func (w *Workspace) reading(ctx context.Context, name string) (at *Workspace, done func(), err error) {
	done = func() {}
	dir := w.folder(ctx, name)
	if dir == "" {
		return w, done, nil
	}
	r, err := os.OpenRoot(dir)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, done, fmt.Errorf("%s does not exist any more", quote(dir))
		}
		return nil, done, w.explain(dir, err)
	}
	return &Workspace{dir: dir, real: dir, root: r, mu: w.mu, aside: true}, func() { _ = r.Close() }, nil
}

// folder is the folder beside the workspace that name lies in, or "".
func (w *Workspace) folder(ctx context.Context, name string) string {
	p := filepath.Clean(filepath.FromSlash(name))
	if !filepath.IsAbs(p) {
		return ""
	}
	for _, dir := range foldersOf(ctx) {
		if _, ok := inside(dir, p); ok {
			return dir
		}
	}
	return ""
}

// mayWrite refuses a path that can only be read.
func (w *Workspace) mayWrite(ctx context.Context, name string) error {
	p := filepath.FromSlash(name)
	if !filepath.IsAbs(p) {
		p = filepath.Join(w.real, p) // a folder may lie in the workspace
	}
	if dir := w.folder(ctx, p); dir != "" {
		return fmt.Errorf("%s can only be read: it lies in %s, outside of the workspace; write to a path inside the workspace, such as notes/a.txt", quote(name), quote(dir))
	}
	return nil
}

// shown is how a path of this folder is told to the model: from the workspace's
// root, or whole where it lies beside it.
func (w *Workspace) shown(rel string) string {
	if !w.aside {
		return rel
	}
	return path.Join(filepath.ToSlash(w.dir), rel)
}

// found is what read_file tells the program of a file that lies beside the workspace.
func (w *Workspace) found(name string) map[string]any {
	if !w.aside {
		return nil
	}
	rel, err := w.locate(name)
	if err != nil {
		return nil
	}
	return map[string]any{MetaFolderFile: filepath.Join(w.real, filepath.FromSlash(rel))}
}

// patternFolder takes the folder out of an absolute pattern of a folder beside the
// workspace, where no path says where to search.
func patternFolder(ctx context.Context, pattern, base string) (string, string) {
	if base != "" || !path.IsAbs(pattern) {
		return pattern, base
	}
	for _, dir := range foldersOf(ctx) {
		if rest, ok := strings.CutPrefix(pattern, strings.TrimSuffix(filepath.ToSlash(dir), "/")+"/"); ok {
			return rest, dir
		}
	}
	return pattern, base
}

// readable are the paths outside of the workspace that a command may read.
func readable(ctx context.Context, o Options) []string {
	return append(slices.Clone(o.ReadOnly), foldersOf(ctx)...)
}
