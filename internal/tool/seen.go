package tool

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"sync"
)

// Seen is what one agent knows of the files of its workspace: those that it has
// read or written itself, as they were then. With it a file that somebody else
// made or changed is not replaced unread. It is safe for concurrent use.
type Seen struct {
	mu    sync.Mutex
	files map[string]fs.FileInfo
}

// maxSeen bounds what is remembered; beyond it a file has to be read again.
const maxSeen = 10_000

type seenKey struct{}

// WithSeen returns a context under which write_file replaces only what s knows.
func WithSeen(ctx context.Context, s *Seen) context.Context {
	return context.WithValue(ctx, seenKey{}, s)
}

// note remembers a file as info says it is.
func (w *Workspace) note(ctx context.Context, name string, info fs.FileInfo) {
	s, ok := ctx.Value(seenKey{}).(*Seen)
	if !ok || info == nil {
		return
	}
	rel, err := w.locate(name)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files == nil || len(s.files) >= maxSeen {
		s.files = map[string]fs.FileInfo{}
	}
	s.files[rel] = info
}

// noteNow does so for a file that was just written.
func (w *Workspace) noteNow(ctx context.Context, name string) {
	if info := w.stat(name); info != nil {
		w.note(ctx, name, info)
	}
}

// mayReplace refuses to replace a file that is not known as it is now. An empty
// one holds nothing that could be lost.
func (w *Workspace) mayReplace(ctx context.Context, name string) error {
	s, ok := ctx.Value(seenKey{}).(*Seen)
	if !ok {
		return nil
	}
	now := w.stat(name)
	rel, err := w.locate(name)
	if err != nil || now == nil || !now.Mode().IsRegular() || now.Size() == 0 {
		return nil // new, or the write itself tells what is wrong
	}
	s.mu.Lock()
	was := s.files[rel]
	s.mu.Unlock()
	switch {
	case was == nil:
		return fmt.Errorf("%s exists already and you have not read it: read it with read_file first, then write it again if you still want to replace it, or change parts of it with str_replace", quote(name))
	case !os.SameFile(was, now) || was.Size() != now.Size() || !was.ModTime().Equal(now.ModTime()):
		return fmt.Errorf("%s was changed since you read it: read it with read_file again, then write it again if you still want to replace it", quote(name))
	}
	return nil
}

// stat is the file behind a name, or nil.
func (w *Workspace) stat(name string) fs.FileInfo {
	rel, err := w.locate(name)
	if err != nil {
		return nil
	}
	info, err := w.root.Lstat(rel)
	if err != nil {
		return nil
	}
	return info
}
