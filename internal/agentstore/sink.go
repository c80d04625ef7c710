package agentstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agentapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/internal/subagent"
)

// askInterval is how often a watch asks whether anything has changed: a notice that is
// lost costs that much. The answer to it is a few bytes.
const askInterval = 3 * time.Second

// Sink keeps definitions in the database of the event sink, which alone has one.
type Sink struct {
	c   *bus.Conn
	log zerolog.Logger
}

var _ Store = (*Sink)(nil)

// NewSink returns the store of the event sinks of the connection's deployment.
func NewSink(c *bus.Conn, log zerolog.Logger) *Sink { return &Sink{c: c, log: log} }

// read returns what lies under a name, as [NATS.read] does; the revision of what is
// not there is that of the store.
func (s *Sink) read(ctx context.Context, name string) ([]byte, uint64, error) {
	page, err := agentapi.List(ctx, s.c, agentapi.AgentsRequest{Name: name})
	if err != nil {
		return nil, 0, ofSink(err)
	}
	for _, a := range page.Agents {
		if a.Name == name {
			return a.Definition, a.Revision, nil
		}
	}
	return nil, page.Revision, nil
}

// ofSink makes errors of the sink's those of a store.
func ofSink(err error) error {
	switch {
	case errors.Is(err, agentapi.ErrUnavailable):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	case errors.Is(err, agentapi.ErrInvalid):
		return fmt.Errorf("%w: %w", subagent.ErrDefinition, err)
	}
	return err
}

// ofChange is ofSink for a change, whose conflicts and doubts are looked into.
func ofChange(err error) error {
	switch {
	case errors.Is(err, agentapi.ErrConflict):
		return fmt.Errorf("%w: %w", bus.ErrConflict, err)
	case errors.Is(err, agentapi.ErrUnavailable) && !errors.Is(err, agentapi.ErrNobody):
		return fmt.Errorf("%w: %w", bus.ErrDoubt, err)
	}
	return ofSink(err)
}

// Get implements [Store].
func (s *Sink) Get(ctx context.Context, name string) (subagent.Stored, error) {
	return get(ctx, name, s.read)
}

// Create implements [Store].
func (s *Sink) Create(ctx context.Context, m subagent.Managed) (subagent.Stored, error) {
	return s.put(ctx, m, 0, func(there bool, last uint64) (uint64, error) {
		if there {
			return 0, fmt.Errorf("%s: %w", m.Name, ErrExists)
		}
		return last, nil
	}, true)
}

// Update implements [Store].
func (s *Sink) Update(ctx context.Context, m subagent.Managed, revision uint64) (subagent.Stored, error) {
	return s.put(ctx, m, revision, seen(m.Name, revision), false)
}

func (s *Sink) put(ctx context.Context, m subagent.Managed, revision uint64, next func(bool, uint64) (uint64, error), create bool) (subagent.Stored, error) {
	m, data, err := encode(m)
	if err != nil {
		return subagent.Stored{}, err
	}
	if !create {
		if err := possible(ctx, s, m.Name, revision); err != nil {
			return subagent.Stored{}, err
		}
	}
	rev, err := write(ctx, m.Name, data, revision, next, s.read, func(ctx context.Context, expect uint64) (uint64, error) {
		if create {
			expect = 0
		}
		rev, err := agentapi.Put(ctx, s.c, agentapi.AgentPut{Name: m.Name, Definition: data, Expect: expect})
		return rev, ofChange(err)
	})
	return subagent.Stored{Managed: m, Revision: rev}, err
}

// Delete implements [Store].
func (s *Sink) Delete(ctx context.Context, name string, revision uint64) (uint64, error) {
	key, err := subagent.ManagedName(name)
	if err != nil {
		return 0, fmt.Errorf("%.80q: %w", name, ErrNotFound)
	}
	if err := possible(ctx, s, key, revision); err != nil {
		return 0, err
	}
	return write(ctx, key, nil, revision, seen(key, revision), s.read, func(ctx context.Context, expect uint64) (uint64, error) {
		rev, err := agentapi.Delete(ctx, s.c, agentapi.AgentDelete{Name: key, Expect: expect})
		return rev, ofChange(err)
	})
}

// Watch implements [Store]. While no sink answers, what was read before stays, and
// before the first answer nothing is told.
func (s *Sink) Watch(ctx context.Context, fn func([]subagent.Stored, uint64)) error {
	told := make(chan struct{}, 1)
	notice, err := s.c.NC.Subscribe(agentapi.ChangedSubject(s.c.Names), func(*nats.Msg) {
		select {
		case told <- struct{}{}:
		default: // somebody is on the way already
		}
	})
	if err != nil {
		return fmt.Errorf("watch managed definitions: %w", err)
	}
	back := s.c.NC.StatusChanged(nats.CONNECTED)
	defer func() {
		s.c.NC.RemoveStatusListener(back)
		if err := notice.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			s.log.Debug().Err(err).Msg("stop watching managed definitions")
		}
	}()
	retry := pause.Growing(100*time.Millisecond, askInterval)
	for revision, complained := uint64(0), ""; ; {
		page, err := agentapi.All(ctx, s.c, revision)
		wait := askInterval
		switch {
		case ctx.Err() != nil:
			return nil
		case s.c.NC.IsClosed():
			return fmt.Errorf("watch managed definitions: %w", nats.ErrConnectionClosed)
		case err != nil:
			wait = retry.NextBackOff()
			if complained != err.Error() {
				complained = err.Error()
				s.log.Warn().Err(err).Bool("read_before", revision > 0).Msg("managed sub-agent definitions cannot be read; those that were read before stay")
			}
		default:
			if complained != "" {
				complained = ""
				s.log.Info().Uint64("revision", page.Revision).Msg("managed sub-agent definitions can be read again")
			}
			retry.Reset()
			if !page.Unchanged {
				fn(s.all(page), page.Revision)
				revision = page.Revision
			}
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-told:
		case <-back:
		case <-t.C:
		}
		t.Stop()
	}
}

func (s *Sink) all(page agentapi.AgentsPage) []subagent.Stored {
	all := map[string]subagent.Stored{}
	for _, a := range page.Agents {
		got, err := item{Revision: a.Revision, Definition: a.Definition}.decode(a.Name)
		if err != nil {
			s.log.Warn().Err(err).Str("name", a.Name).Uint64("revision", a.Revision).Msg("a managed sub-agent definition cannot be read; it is left out")
			continue
		}
		all[a.Name] = got
	}
	return sorted(maps.Values(all))
}
