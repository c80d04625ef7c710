package history

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/stored"
	"github.com/herdgate/herdgate/pkg/contract"
)

// taped is where the server sends what the task bucket and the grants store.
const taped = "recording."

// Recorder notes everything that the task bucket and the stream of grants ever
// store. The bucket holds the newest message of a key only, so that a reader which
// lags never sees those between; here the server itself sends each on when it has
// stored it, with its number. Nothing changes for the services.
//
// What is sent while the recorder has no connection is lost; the numbers tell.
type Recorder struct {
	conn *bus.Conn

	mu sync.Mutex
	// They are read when somebody asks: while things happen there are better uses
	// for a processor.
	revs, grants []*nats.Msg
	last         uint64 // of the bucket
	// changed is closed and replaced with each message.
	changed chan struct{}
}

// Record starts a recorder that ends with the connection.
func Record(ctx context.Context, conn *bus.Conn) (*Recorder, error) {
	r := &Recorder{conn: conn, changed: make(chan struct{})}
	sub, err := conn.NC.Subscribe(taped+">", r.note)
	if err != nil {
		return nil, err
	}
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		return nil, err
	}
	for _, name := range []string{conn.TaskStream(), conn.Names.GrantStream()} {
		s, err := conn.JS.Stream(ctx, name)
		if err != nil {
			return nil, err
		}
		cfg := s.CachedInfo().Config
		cfg.RePublish = &jetstream.RePublish{Source: ">", Destination: taped + name + ".>"}
		if _, err := conn.JS.UpdateStream(ctx, cfg); err != nil {
			return nil, fmt.Errorf("recording of %s: %w", name, err)
		}
	}
	return r, nil
}

func (r *Recorder) note(msg *nats.Msg) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if msg.Header.Get("Nats-Stream") == r.conn.Names.GrantStream() {
		r.grants = append(r.grants, msg)
		return
	}
	r.revs = append(r.revs, msg)
	r.last, _ = strconv.ParseUint(msg.Header.Get("Nats-Sequence"), 10, 64) // told again by original
	close(r.changed)
	r.changed = make(chan struct{})
}

// original is the message as it was stored.
func original(msg *nats.Msg) (bus.Message, error) {
	m := bus.Message{Subject: msg.Header.Get("Nats-Subject"), Header: msg.Header, Data: msg.Data}
	var err error
	if m.Seq, err = strconv.ParseUint(msg.Header.Get("Nats-Sequence"), 10, 64); err != nil {
		return m, err
	}
	m.Time, err = time.Parse(time.RFC3339Nano, msg.Header.Get("Nats-Time-Stamp"))
	return m, err
}

// Revisions returns what the bucket has stored up to now.
func (r *Recorder) Revisions(ctx context.Context) ([]invariant.Revision, error) {
	s, err := r.conn.JS.Stream(ctx, r.conn.TaskStream())
	if err != nil {
		return nil, err
	}
	for upTo := s.CachedInfo().State.LastSeq; ; {
		r.mu.Lock()
		all, last, changed := slices.Clone(r.revs), r.last, r.changed
		r.mu.Unlock()
		if last >= upTo {
			return r.read(all)
		}
		select {
		case <-changed:
		case <-time.After(lostAfter):
			return r.read(all) // the rest was sent while there was no connection
		case <-ctx.Done():
			return nil, fmt.Errorf("the recording has come to %d of %d: %w", last, upTo, ctx.Err())
		}
	}
}

// lostAfter is how long the recording waits for what the server has stored.
const lostAfter = 2 * time.Second

func (r *Recorder) read(all []*nats.Msg) ([]invariant.Revision, error) {
	out := make([]invariant.Revision, 0, len(all))
	for _, msg := range all {
		m, err := original(msg)
		if err != nil {
			return nil, fmt.Errorf("recording: %w", err)
		}
		rev, err := stored.Revision(r.conn, m)
		if err != nil {
			return nil, fmt.Errorf("recording: %w", err)
		}
		out = append(out, rev)
	}
	return out, nil
}

// Grants returns the grant messages that were stored up to now. One that nobody can
// read is none; the executor buries it.
func (r *Recorder) Grants() []invariant.Grant {
	r.mu.Lock()
	all := slices.Clone(r.grants)
	r.mu.Unlock()
	var out []invariant.Grant
	for _, msg := range all {
		m, err := original(msg)
		if err != nil {
			continue
		}
		g, err := contract.DecodeGrant(m.Data)
		if err != nil {
			continue
		}
		g.Request, g.Record = contract.TaskRequest{}, contract.TaskRecord{}
		out = append(out, invariant.Grant{Seq: m.Seq, At: m.Time, Grant: g})
	}
	return out
}
