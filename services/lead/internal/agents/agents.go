// Package agents keeps a lead's catalogue of sub-agent types up to date: it
// follows the store of managed definitions and the folders of Markdown files, and
// writes what administrators change.
package agents

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/subagent"
)

const (
	// applyTimeout bounds the wait until this lead goes by what it has written.
	applyTimeout = 5 * time.Second
	// blindTries bounds the tries of a change that names no revision.
	blindTries = 5
)

// Files reads the definitions of Markdown files, and tells in the log what is
// wrong with them. Changed is false when nothing has changed since the last time.
type Files func() (files []subagent.File, changed bool)

// Config says what a [Manager] follows.
type Config struct {
	Catalogue *subagent.Catalogue
	// Store may be nil: there are no managed definitions then.
	Store agentstore.Store
	// Files may be nil; they are read again after each FilesInterval.
	Files         Files
	FilesInterval time.Duration
	Log           zerolog.Logger
}

// Manager is safe for concurrent use.
type Manager struct {
	cfg    Config
	loaded chan struct{} // closed once everything was read for the first time

	mu       sync.Mutex
	revision uint64        // of the store, as the catalogue has it
	moved    chan struct{} // closed when revision grows
	once     sync.Once
}

// New returns a manager. The files are read at once, the store by [Manager.Run].
func New(cfg Config) *Manager {
	m := &Manager{cfg: cfg, loaded: make(chan struct{}), moved: make(chan struct{})}
	if cfg.Files != nil {
		m.reload()
	}
	if cfg.Store == nil {
		m.once.Do(func() { close(m.loaded) })
	}
	return m
}

// Loaded is closed once the catalogue holds all that was there at the start.
func (m *Manager) Loaded() <-chan struct{} { return m.loaded }

// Run follows store and files until ctx is done.
func (m *Manager) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	if m.cfg.Files != nil && m.cfg.FilesInterval > 0 {
		wg.Go(func() { m.follow(ctx) })
	}
	if m.cfg.Store == nil {
		<-ctx.Done()
		return nil
	}
	return m.cfg.Store.Watch(ctx, m.apply)
}

func (m *Manager) follow(ctx context.Context) {
	tick := time.NewTicker(m.cfg.FilesInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			m.reload()
		}
	}
}

func (m *Manager) reload() {
	files, changed := m.cfg.Files()
	if !changed {
		return
	}
	m.cfg.Catalogue.SetFiles(files)
	m.cfg.Log.Info().Int("files", len(files)).Msg("sub-agent definitions of files are in force")
}

// apply takes what the store has now. REG-07: what another layer owns is no news
// at each look, hence the level.
func (m *Manager) apply(all []subagent.Stored, revision uint64) {
	m.cfg.Catalogue.SetManaged(all)
	for _, e := range m.cfg.Catalogue.Current().Entries() {
		if e.ShadowedBy != "" && e.Definition.Origin == subagent.OriginManaged {
			m.cfg.Log.Debug().Str("name", e.Definition.Name).Str("owner", string(e.ShadowedBy)).Msg("a managed sub-agent definition has no effect: its name is taken")
		}
	}
	m.mu.Lock()
	m.revision = max(m.revision, revision)
	close(m.moved)
	m.moved = make(chan struct{})
	m.mu.Unlock()
	m.once.Do(func() { close(m.loaded) })
}

// applied waits until the catalogue of this lead has a revision, so that whoever
// wrote it finds it. Other leads follow within moments.
func (m *Manager) applied(ctx context.Context, revision uint64) {
	ctx, cancel := context.WithTimeout(ctx, applyTimeout)
	defer cancel()
	for {
		m.mu.Lock()
		have, moved := m.revision, m.moved
		m.mu.Unlock()
		if have >= revision {
			return
		}
		select {
		case <-moved:
		case <-ctx.Done():
			// It is stored all the same.
			m.cfg.Log.Warn().Uint64("revision", revision).Msg("a change of the managed sub-agent definitions is stored, but not in force here yet")
			return
		}
	}
}

// Condition says which state a change expects.
type Condition struct {
	// New: there must be none of that name.
	New bool
	// Revision, when not nil, is the one that the caller saw; with Any one that
	// exists will do.
	Revision *uint64
	Any      bool
}

// Get returns a managed definition as the store has it.
func (m *Manager) Get(ctx context.Context, name string) (subagent.Stored, error) {
	if m.cfg.Store == nil {
		return subagent.Stored{}, fmt.Errorf("%.80q: %w", name, agentstore.ErrNotFound)
	}
	return m.cfg.Store.Get(ctx, name)
}

var errNoStore = fmt.Errorf("%w: this lead has none", agentstore.ErrUnavailable)

// Put stores a definition and tells whether it is a new one. Without a condition
// it takes the place of whatever is there.
func (m *Manager) Put(ctx context.Context, def subagent.Managed, cond Condition) (stored subagent.Stored, created bool, err error) {
	if m.cfg.Store == nil {
		return stored, false, errNoStore
	}
	for range blindTries {
		stored, created, err = m.put(ctx, def, cond)
		if cond != (Condition{}) && !cond.Any || !errors.Is(err, agentstore.ErrStale) && !errors.Is(err, agentstore.ErrExists) && !(errors.Is(err, agentstore.ErrNotFound) && !cond.Any) {
			break
		}
	}
	if err != nil {
		return subagent.Stored{}, false, err
	}
	m.applied(ctx, stored.Revision)
	return stored, created, nil
}

func (m *Manager) put(ctx context.Context, def subagent.Managed, cond Condition) (subagent.Stored, bool, error) {
	if cond.New {
		stored, err := m.cfg.Store.Create(ctx, def)
		return stored, true, err
	}
	if cond.Revision != nil {
		stored, err := m.cfg.Store.Update(ctx, def, *cond.Revision)
		return stored, false, err
	}
	now, err := m.revisionOf(ctx, def.Name)
	if errors.Is(err, agentstore.ErrNotFound) && !cond.Any {
		stored, err := m.cfg.Store.Create(ctx, def)
		return stored, true, err
	}
	if err != nil {
		return subagent.Stored{}, false, err
	}
	stored, err := m.cfg.Store.Update(ctx, def, now)
	return stored, false, err
}

// revisionOf is the revision of what a change replaces, whether it can be read or not.
func (m *Manager) revisionOf(ctx context.Context, name string) (uint64, error) {
	now, err := m.cfg.Store.Get(ctx, name)
	if errors.Is(err, agentstore.ErrUnreadable) {
		err = nil
	}
	return now.Revision, err
}

// Delete removes a definition.
func (m *Manager) Delete(ctx context.Context, name string, cond Condition) error {
	if m.cfg.Store == nil {
		return fmt.Errorf("%.80q: %w", name, agentstore.ErrNotFound)
	}
	var (
		gone uint64
		err  error
	)
	for range blindTries {
		var rev uint64
		if cond.Revision != nil {
			rev = *cond.Revision
		} else if rev, err = m.revisionOf(ctx, name); err != nil {
			return err
		}
		gone, err = m.cfg.Store.Delete(ctx, name, rev)
		if cond.Revision != nil || !errors.Is(err, agentstore.ErrStale) {
			break
		}
	}
	if err != nil {
		return err
	}
	m.applied(ctx, gone)
	return nil
}
