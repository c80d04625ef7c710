package agentstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gofrs/flock"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/subagent"
)

const (
	// lockRetry is the pause between two tries for the lock.
	lockRetry = 20 * time.Millisecond
	// lookInterval is how often the file is looked at: notices of the file system
	// do not come through every kind of mount that containers have.
	lookInterval = time.Second
	maxStoreFile = 256 << 20
)

// File keeps definitions in one file, which leads on one machine share. It is
// replaced whole, under a lock beside it.
type File struct {
	path string
	log  zerolog.Logger

	mu      sync.Mutex
	changed chan struct{} // closed when this process changes the file
}

var _ Store = (*File)(nil)

// NewFile returns the store in agents.json in dir, which it makes.
func NewFile(dir string, log zerolog.Logger) (*File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("folder of managed definitions: %w", err)
	}
	s := &File{path: filepath.Join(dir, "agents.json"), log: log, changed: make(chan struct{})}
	if _, err := s.load(); err != nil {
		return nil, err
	}
	return s, nil
}

// content is the file.
type content struct {
	Revision uint64          `json:"revision"`
	Agents   map[string]item `json:"agents"`
}

type item struct {
	Revision   uint64          `json:"revision"`
	Definition json.RawMessage `json:"definition"`
}

func (s *File) load() (content, error) {
	c := content{Agents: map[string]item{}}
	f, err := os.Open(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, fmt.Errorf("managed definitions: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxStoreFile+1))
	if err == nil && len(data) > maxStoreFile {
		err = fmt.Errorf("it has more than %d bytes", maxStoreFile)
	}
	if err == nil {
		err = json.Unmarshal(data, &c)
	}
	if err != nil {
		return c, fmt.Errorf("managed definitions: %s cannot be read: %w; put a copy of it in place, or remove it to begin without any", s.path, err)
	}
	if c.Agents == nil {
		c.Agents = map[string]item{}
	}
	return c, nil
}

func (i item) decode(name string) (subagent.Stored, error) {
	m, err := subagent.DecodeManaged(i.Definition)
	if err == nil && m.Name != name {
		err = fmt.Errorf("it calls itself %q", m.Name)
	}
	return subagent.Stored{Managed: m, Revision: i.Revision}, err
}

// Get implements [Store].
func (s *File) Get(_ context.Context, name string) (subagent.Stored, error) {
	key, err := subagent.ManagedName(name)
	if err != nil {
		return subagent.Stored{}, fmt.Errorf("%.80q: %w", name, ErrNotFound)
	}
	c, err := s.load()
	if err != nil {
		return subagent.Stored{}, err
	}
	i, there := c.Agents[key]
	if !there {
		return subagent.Stored{}, fmt.Errorf("%s: %w", key, ErrNotFound)
	}
	got, err := i.decode(key)
	if err != nil {
		return unreadable(key, i.Revision, err)
	}
	return got, nil
}

// Create implements [Store].
func (s *File) Create(ctx context.Context, m subagent.Managed) (subagent.Stored, error) {
	return s.put(ctx, m, func(c content, name string) error {
		if _, there := c.Agents[name]; there {
			return fmt.Errorf("%s: %w", name, ErrExists)
		}
		return nil
	})
}

// Update implements [Store].
func (s *File) Update(ctx context.Context, m subagent.Managed, revision uint64) (subagent.Stored, error) {
	return s.put(ctx, m, func(c content, name string) error { return c.seen(name, revision) })
}

func (c content) seen(name string, revision uint64) error {
	i, there := c.Agents[name]
	_, err := seen(name, revision)(there, i.Revision)
	return err
}

func (s *File) put(ctx context.Context, m subagent.Managed, check func(content, string) error) (subagent.Stored, error) {
	m, data, err := encode(m)
	if err != nil {
		return subagent.Stored{}, err
	}
	rev, err := s.change(ctx, func(c *content) error {
		if err := check(*c, m.Name); err != nil {
			return err
		}
		c.Revision++
		c.Agents[m.Name] = item{Revision: c.Revision, Definition: data}
		return nil
	})
	return subagent.Stored{Managed: m, Revision: rev}, err
}

// Delete implements [Store].
func (s *File) Delete(ctx context.Context, name string, revision uint64) (uint64, error) {
	key, err := subagent.ManagedName(name)
	if err != nil {
		return 0, fmt.Errorf("%.80q: %w", name, ErrNotFound)
	}
	return s.change(ctx, func(c *content) error {
		if err := c.seen(key, revision); err != nil {
			return err
		}
		c.Revision++
		delete(c.Agents, key)
		return nil
	})
}

// change reads, changes and replaces the file while nobody else does.
func (s *File) change(ctx context.Context, f func(*content) error) (uint64, error) {
	lock := flock.New(s.path + ".lock")
	defer lock.Close()
	if ok, err := lock.TryLockContext(ctx, lockRetry); err != nil || !ok {
		return 0, fmt.Errorf("%w: lock %s.lock: %w", ErrUnavailable, s.path, err)
	}
	c, err := s.load()
	if err != nil {
		return 0, err
	}
	if err := f(&c); err != nil {
		return 0, err
	}
	data, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return 0, err
	}
	if err := replace(s.path, data); err != nil {
		return 0, fmt.Errorf("managed definitions: %w", err)
	}
	s.mu.Lock()
	close(s.changed)
	s.changed = make(chan struct{})
	s.mu.Unlock()
	return c.Revision, nil
}

// replace puts data in the place of a file so that a reader, also one after a loss
// of power, finds the old or the new content.
func replace(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".agents-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone already when all went well
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// Watch implements [Store]. It looks once a second whether another process has
// changed the file. While the file cannot be read, what was read before stays.
func (s *File) Watch(ctx context.Context, fn func([]subagent.Stored, uint64)) error {
	tick := time.NewTicker(lookInterval)
	defer tick.Stop()
	var before os.FileInfo
	for first, complained := true, ""; ; {
		s.mu.Lock()
		changed := s.changed // before the look, so that no change is missed
		s.mu.Unlock()
		now, err := os.Stat(s.path)
		if err != nil {
			now = nil
		}
		if first || (now == nil) != (before == nil) || now != nil && (!os.SameFile(now, before) || !now.ModTime().Equal(before.ModTime()) || now.Size() != before.Size()) {
			c, err := s.load()
			if err == nil {
				fn(s.all(c), c.Revision)
				before, first, complained = now, false, ""
			} else if complained != err.Error() {
				complained = err.Error()
				s.log.Error().Err(err).Msg("the definitions that were read before stay")
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-tick.C:
		}
	}
}

func (s *File) all(c content) []subagent.Stored {
	all := map[string]subagent.Stored{}
	for name, i := range c.Agents {
		got, err := i.decode(name)
		if err != nil {
			s.log.Warn().Err(err).Str("name", name).Uint64("revision", i.Revision).Msg("a managed sub-agent definition cannot be read; it is left out")
			continue
		}
		all[name] = got
	}
	return sorted(maps.Values(all))
}
