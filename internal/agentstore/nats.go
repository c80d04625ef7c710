package agentstore

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
)

// markerTTL is how long the marker of a deleted definition stays: long enough for
// every reader that was cut off to hear of it on its way back.
const markerTTL = time.Hour

// attempts bounds the tries of a write beside others that are in flight.
const attempts = 8

// NATS keeps definitions in the agent bucket.
type NATS struct {
	c   *bus.Conn
	log zerolog.Logger
}

var _ Store = (*NATS)(nil)

// NewNATS returns the store in the bucket of the connection's deployment.
func NewNATS(c *bus.Conn, log zerolog.Logger) *NATS { return &NATS{c: c, log: log} }

func (s *NATS) stream() string { return contract.KVStream(s.c.Names.AgentBucket()) }

func (s *NATS) subject(name string) string {
	return contract.KVSubject(s.c.Names.AgentBucket(), contract.AgentKey(name))
}

// read returns what lies under a name: its data, nil when nothing does, and the
// revision that a write has to expect.
func (s *NATS) read(ctx context.Context, name string) ([]byte, uint64, error) {
	m, err := s.c.Last(ctx, s.stream(), s.subject(name))
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return nil, 0, nil
	case err != nil:
		return nil, 0, outside(err)
	case m.Deleted():
		return nil, m.Seq, nil
	}
	return m.Data, m.Seq, nil
}

func outside(err error) error {
	switch {
	case errors.Is(err, bus.ErrDoubt):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	case errors.Is(err, bus.ErrTooLarge):
		return fmt.Errorf("%w: %w", subagent.ErrDefinition, err)
	}
	return err
}

// Get implements [Store].
func (s *NATS) Get(ctx context.Context, name string) (subagent.Stored, error) {
	return get(ctx, name, s.read)
}

// Create implements [Store].
func (s *NATS) Create(ctx context.Context, m subagent.Managed) (subagent.Stored, error) {
	m, data, err := encode(m)
	if err != nil {
		return subagent.Stored{}, err
	}
	rev, err := s.write(ctx, m.Name, bus.Write{Data: data}, 0, func(there bool, last uint64) (uint64, error) {
		if there {
			return 0, fmt.Errorf("%s: %w", m.Name, ErrExists)
		}
		return last, nil
	})
	return subagent.Stored{Managed: m, Revision: rev}, err
}

// Update implements [Store].
func (s *NATS) Update(ctx context.Context, m subagent.Managed, revision uint64) (subagent.Stored, error) {
	m, data, err := encode(m)
	if err != nil {
		return subagent.Stored{}, err
	}
	if err := possible(ctx, s, m.Name, revision); err != nil {
		return subagent.Stored{}, err
	}
	rev, err := s.write(ctx, m.Name, bus.Write{Data: data}, revision, seen(m.Name, revision))
	return subagent.Stored{Managed: m, Revision: rev}, err
}

// Delete implements [Store].
func (s *NATS) Delete(ctx context.Context, name string, revision uint64) (uint64, error) {
	key, err := subagent.ManagedName(name)
	if err != nil {
		return 0, fmt.Errorf("%.80q: %w", name, ErrNotFound)
	}
	if err := possible(ctx, s, key, revision); err != nil {
		return 0, err
	}
	w := bus.Write{Header: nats.Header{"KV-Operation": {"DEL"}}, TTL: markerTTL}
	return s.write(ctx, key, w, revision, seen(key, revision))
}

// seen decides for a write on a revision that the caller saw.
func seen(name string, revision uint64) func(there bool, last uint64) (uint64, error) {
	return func(there bool, last uint64) (uint64, error) {
		switch {
		case !there:
			return 0, fmt.Errorf("%s: %w", name, ErrNotFound)
		case last != revision:
			return 0, fmt.Errorf("%s: %w: it has revision %d, not %d", name, ErrStale, last, revision)
		}
		return last, nil
	}
}

func (s *NATS) write(ctx context.Context, name string, w bus.Write, expect uint64, next func(there bool, last uint64) (uint64, error)) (uint64, error) {
	w.Subject = s.subject(name)
	return write(ctx, name, w.Data, expect, next, s.read, func(ctx context.Context, expect uint64) (uint64, error) {
		w.Expect = bus.Seq(expect)
		ack, err := s.c.Publish(ctx, w)
		return ack.Seq, err
	})
}

// write writes data, nil for a deletion, by compare-and-set. After a refusal
// ([bus.ErrConflict]), and when nothing is known of what became of a write
// ([bus.ErrDoubt]), it looks and decides: next gets what lies there.
func write(ctx context.Context, name string, data []byte, expect uint64, next func(there bool, last uint64) (uint64, error),
	read func(ctx context.Context, name string) ([]byte, uint64, error), put func(ctx context.Context, expect uint64) (uint64, error),
) (uint64, error) {
	doubt := false
	var err error
	for try := range attempts {
		if try > 0 {
			if pause.For(ctx, time.Duration(try)*20*time.Millisecond) != nil {
				break
			}
			lies, last, readErr := read(ctx, name)
			if readErr != nil {
				return 0, fmt.Errorf("managed definition %s: %w", name, readErr)
			}
			// A write in doubt has landed when what lies there is what it holds.
			if doubt && last > expect && bytes.Equal(lies, data) {
				return last, nil
			}
			if expect, err = next(lies != nil, last); err != nil {
				return 0, err
			}
		}
		var rev uint64
		if rev, err = put(ctx, expect); err == nil {
			return rev, nil
		}
		switch {
		case errors.Is(err, bus.ErrDoubt):
			doubt = true
		case errors.Is(err, bus.ErrConflict):
		default:
			return 0, fmt.Errorf("managed definition %s: %w", name, outside(err))
		}
	}
	return 0, fmt.Errorf("managed definition %s: %w: %w", name, ErrUnavailable, errors.Join(err, ctx.Err()))
}

func encode(m subagent.Managed) (subagent.Managed, []byte, error) {
	m, err := m.Normalize()
	if err != nil {
		return m, nil, err
	}
	data, err := json.Marshal(m)
	return m, data, err
}

// Watch implements [Store]. A value that cannot be read is told in the log and
// left out: one of them must not take the others away.
func (s *NATS) Watch(ctx context.Context, fn func([]subagent.Stored, uint64)) error {
	prefix := s.subject("")
	all := map[string]subagent.Stored{}
	revision := uint64(0)
	tell := func() { fn(sorted(maps.Values(all)), revision) }
	err := s.c.Watch(ctx, bus.Watch{
		Stream: s.stream(), Subjects: []string{prefix + ">"}, LastPerSubject: true,
		OnStart: func(pending uint64) {
			if pending == 0 {
				tell()
			}
		},
	}, func(m bus.Message, pending uint64) error {
		name := strings.TrimPrefix(m.Subject, prefix)
		revision = max(revision, m.Seq)
		if delete(all, name); !m.Deleted() {
			def, err := subagent.DecodeManaged(m.Data)
			if err == nil && def.Name != name {
				err = fmt.Errorf("it calls itself %q", def.Name)
			}
			if err != nil {
				s.log.Warn().Err(err).Str("name", name).Uint64("revision", m.Seq).Msg("a managed sub-agent definition cannot be read; it is left out")
			} else {
				all[name] = subagent.Stored{Managed: def, Revision: m.Seq}
			}
		}
		if pending == 0 {
			tell()
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("watch managed definitions: %w", err)
	}
	return nil
}

func sorted(seq func(func(subagent.Stored) bool)) []subagent.Stored {
	return slices.SortedFunc(seq, func(a, b subagent.Stored) int { return strings.Compare(a.Name, b.Name) })
}
