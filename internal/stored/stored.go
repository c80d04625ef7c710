// Package stored reads what a deployment has stored, so that package invariant can
// judge it: events, grants, records with leases and cancellations, and the queue,
// each from the stream itself and past every service.
//
// The system may move while it is read. So the parts are read in an order in which
// what was true when one of them was read shows in the next; see [Reader.Read].
package stored

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// Limits of a view, unless [Config] says otherwise. An event takes about 400 bytes
// of memory, a record about 700.
const (
	DefaultEvents  = 200_000
	DefaultRecords = 50_000
)

// maxUnreadable bounds the list of what could not be read.
const maxUnreadable = 20

// Config says what to read.
type Config struct {
	Bus *bus.Conn
	// MaxEvents and MaxRecords bound the view; the newest events are read. 0 takes
	// the default.
	MaxEvents, MaxRecords int
	// Store reads the event store as well: for events that have left the stream, and
	// to compare. A store that does not answer is told in [View.StoreError].
	Store bool
}

// View is what was read. It grows with each [Reader.Read].
type View struct {
	History invariant.History
	// Events, Records and Grants are how many there are, Waiting and Live how many
	// tasks wait and hold a slot.
	Events, Records, Grants, Waiting, Live int
	// FromStore are the events that only the store still had.
	FromStore int
	// StoredTo is the last number of the event stream that the store has dealt with.
	StoredTo uint64
	// StoreError is why the event store could not be read.
	StoreError error
	// Whole: the events are there from the first one on. Otherwise Since is the time
	// of the first one that was read.
	Whole bool
	Since time.Time
	// CutRecords: there were more records than the view may hold.
	CutRecords bool
	// Unreadable are messages that no event could be made of, the first ones; their
	// number is UnreadableCount. Unknown counts events of types that are not known here.
	Unreadable      []string
	UnreadableCount int
	Unknown         int
	// Limits are what the gate enforces, and since when; nil when no gate has said.
	Limits      *contract.AdmissionLimits
	LimitsSince time.Time
	// Led: somebody holds the leader key.
	Led bool
}

// Reader reads a deployment, again and again.
type Reader struct {
	cfg  Config
	view View
	next uint64 // number of the next event
	// compared is the last event that was read from the store to compare, gone the
	// last one that it need not have: older than the view, or let go by retention.
	compared, gone uint64
}

// NewReader returns a reader that has read nothing.
func NewReader(cfg Config) *Reader {
	if cfg.MaxEvents < 1 {
		cfg.MaxEvents = DefaultEvents
	}
	if cfg.MaxRecords < 1 {
		cfg.MaxRecords = DefaultRecords
	}
	return &Reader{cfg: cfg}
}

// Read reads what has come since the last time, and the bucket and the queue anew.
//
// First the events so far, then grants, bucket and queue, then the events since: an
// end that was told before the bucket was read must stand in its record, and an
// end that stands there without a request must be told after.
func (r *Reader) Read(ctx context.Context) (*View, error) {
	v := &r.view
	if err := r.events(ctx); err != nil {
		return nil, err
	}
	v.History.Mark = r.next - 1
	for _, part := range []func(context.Context) error{r.grants, r.bucket, r.queue, r.events, r.store} {
		if err := part(ctx); err != nil {
			return nil, err
		}
	}
	v.Events = v.History.Len()
	return v, nil
}

// events reads the event stream from where the last look ended.
func (r *Reader) events(ctx context.Context) error {
	conn, name := r.cfg.Bus, r.cfg.Bus.Names.EventStream()
	s, err := conn.JS.Stream(ctx, name)
	if err != nil {
		return fmt.Errorf("event stream: %w", err)
	}
	state := s.CachedInfo().State
	if r.next == 0 {
		if err := r.begin(ctx, state); err != nil {
			return err
		}
	}
	if r.next > state.LastSeq {
		return nil
	}
	return Each(ctx, conn, bus.Watch{Stream: name, StartSeq: r.next, Subjects: []string{conn.Names.AllEvents()}}, func(m bus.Message) error {
		r.next = m.Seq + 1
		rec, ok := r.read(m)
		if ok {
			r.view.History.Event(rec)
			if r.view.Since.IsZero() {
				r.view.Since = rec.CreatedAt
			}
		}
		return nil
	})
}

// begin finds the first event that is read: the newest MaxEvents, as far as the
// stream has them, and before them what the store still has.
func (r *Reader) begin(ctx context.Context, state jetstream.StreamState) error {
	v := &r.view
	first := uint64(1)
	if n := uint64(r.cfg.MaxEvents); state.LastSeq > n { //nolint:gosec // positive
		first = state.LastSeq - n + 1
	}
	r.next = max(first, state.FirstSeq, 1)
	v.Whole = r.next == 1
	if v.Whole || first >= state.FirstSeq || !r.cfg.Store {
		return nil
	}
	// What has left the stream by age is in the store, if that keeps it.
	from := uint64(0)
	v.StoreError = r.pages(ctx, first-1, state.FirstSeq-1, func(rec contract.EventRecord) {
		if from == 0 {
			from, v.Since = rec.Seq, rec.CreatedAt
		}
		v.FromStore++
		v.History.Event(rec)
	})
	v.Whole = v.StoreError == nil && from == 1
	return nil
}

// store compares: what the stream had when it was read, the store has, once it has
// got so far.
func (r *Reader) store(ctx context.Context) error {
	v := &r.view
	if !r.cfg.Store || v.StoreError != nil {
		return nil
	}
	if n := uint64(r.cfg.MaxEvents); r.next > n { //nolint:gosec // positive
		r.compared = max(r.compared, r.next-n-1)
	}
	if len(v.History.Stored) == 0 {
		r.gone = max(r.gone, r.compared)
	}
	v.StoreError = r.pages(ctx, r.compared, r.next-1, func(rec contract.EventRecord) {
		v.History.Stored = append(v.History.Stored, invariant.HeldOf(rec))
		r.compared = rec.Seq
	})
	v.History.StoredFrom, v.History.StoredTo = r.gone+1, min(v.StoredTo, r.next-1)
	if v.StoreError != nil {
		v.History.Stored, v.History.StoredTo = nil, 0
	}
	return nil
}

// pages reads the event store, from after to upTo.
func (r *Reader) pages(ctx context.Context, after, upTo uint64, each func(contract.EventRecord)) error {
	for after < upTo {
		page, err := eventapi.List(ctx, r.cfg.Bus, eventapi.ListRequest{AfterSeq: after, Limit: eventapi.MaxLimit, BarrierSeq: upTo})
		if err != nil {
			return err
		}
		r.view.StoredTo, r.gone = page.LastSeq, max(r.gone, page.PrunedSeq)
		for _, rec := range page.Events {
			if rec.Seq > upTo {
				return nil
			}
			each(rec)
		}
		if !page.HasMore || page.NextAfterSeq <= after || len(page.Events) == 0 {
			return nil
		}
		after = page.NextAfterSeq
	}
	return nil
}

// read makes a record of an event; false for what no record can be made of.
func (r *Reader) read(m bus.Message) (contract.EventRecord, bool) {
	rec, known, err := Event(r.cfg.Bus.Names, m)
	switch {
	case err != nil:
		r.view.unreadable(err)
	case !known:
		r.view.Unknown++
	default:
		return rec, true
	}
	return rec, false
}

// unreadable notes what cannot be read; told again it counts once.
func (v *View) unreadable(err error) {
	if slices.Contains(v.Unreadable, err.Error()) {
		return
	}
	v.UnreadableCount++
	if len(v.Unreadable) < maxUnreadable {
		v.Unreadable = append(v.Unreadable, err.Error())
	}
}

// Event makes a record of a message of the event stream. It is not known when its
// type is newer than this program.
func Event(names contract.Names, m bus.Message) (rec contract.EventRecord, known bool, err error) {
	ev, err := envelope.Decode(m.Data)
	if err != nil {
		return rec, false, fmt.Errorf("event %d: %w", m.Seq, err)
	}
	if !slices.Contains(contract.EventTypes(), ev.Type) {
		return rec, false, nil
	}
	rec, ok := event.Record(ev, m.Seq)
	switch {
	case !ok:
		return rec, false, fmt.Errorf("event %d, %.80s, does not have the shape of %s", m.Seq, ev.ID, ev.Type)
	case ev.NATSSubject(names) != m.Subject:
		return rec, false, fmt.Errorf("event %d, %.80s, lies on the subject of another: %.200s", m.Seq, ev.ID, m.Subject)
	}
	return rec, true, nil
}

// grants reads the grants that nobody has claimed yet. Theirs is a work queue, in
// which a reader of its own is not allowed, so that they are asked for one by one.
func (r *Reader) grants(ctx context.Context) error {
	v, conn := &r.view, r.cfg.Bus
	v.History.Grants = nil
	s, err := conn.JS.Stream(ctx, conn.Names.GrantStream())
	if err != nil {
		return fmt.Errorf("grants: %w", err)
	}
	state := s.CachedInfo().State
	for seq := max(state.FirstSeq, 1); seq <= state.LastSeq && len(v.History.Grants) < r.cfg.MaxRecords; seq++ {
		m, err := s.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(conn.Names.TaskGrants("")))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			break
		}
		if err != nil {
			return fmt.Errorf("grants: %w", err)
		}
		seq = m.Sequence
		g, err := contract.DecodeGrant(m.Data)
		if err != nil {
			continue // the executor buries it
		}
		g.Request, g.Record = contract.TaskRequest{}, contract.TaskRecord{}
		v.History.Grants = append(v.History.Grants, invariant.Grant{Seq: m.Sequence, At: m.Time, Grant: g})
	}
	v.Grants = len(v.History.Grants)
	return nil
}

// bucket reads the newest message of each key.
func (r *Reader) bucket(ctx context.Context) error {
	v, conn := &r.view, r.cfg.Bus
	v.History.Bucket, v.Records, v.Live, v.CutRecords, v.Led, v.Limits = nil, 0, 0, false, false, nil
	err := Each(ctx, conn, bus.Watch{Stream: conn.TaskStream(), LastPerSubject: true, Subjects: []string{conn.KV(">")}}, func(m bus.Message) error {
		if len(v.History.Bucket) == 4*r.cfg.MaxRecords {
			v.CutRecords = true
			return nil
		}
		rev, err := Revision(conn, m)
		if err != nil {
			v.unreadable(err)
			return nil
		}
		switch kind, _, _ := contract.ParseKey(rev.Key); {
		case rev.Deleted:
		case kind == contract.KeyTask:
			if v.Records == r.cfg.MaxRecords {
				v.CutRecords = true
				return nil
			}
			v.Records++
			if rev.Record.State.Live() {
				v.Live++
			}
		case kind == contract.KeyLeader:
			v.Led = true
		case kind == contract.KeyLimits:
			l, err := contract.Decode[contract.AdmissionLimits](m.Data)
			if err != nil {
				v.unreadable(fmt.Errorf("limits: %w", err))
				return nil
			}
			v.Limits, v.LimitsSince = &l, m.Time
		}
		v.History.Bucket = append(v.History.Bucket, rev)
		return nil
	})
	if err != nil {
		return fmt.Errorf("task bucket: %w", err)
	}
	return nil
}

// Revision reads a message of the task bucket.
func Revision(conn *bus.Conn, m bus.Message) (invariant.Revision, error) {
	r := invariant.Revision{Seq: m.Seq, At: m.Time, Key: strings.TrimPrefix(m.Subject, conn.KV("")), Deleted: m.Deleted()}
	kind, id, err := contract.ParseKey(r.Key)
	if err != nil || r.Deleted {
		return r, nil //nolint:nilerr // a key that is none of ours proves nothing
	}
	switch kind {
	case contract.KeyTask:
		rec, err := contract.DecodeTaskRecord(m.Data)
		if err != nil {
			return r, fmt.Errorf("record of %s, revision %d: %w", id, m.Seq, err)
		}
		r.Record = invariant.Slim(rec)
	case contract.KeyLeader:
		l, err := contract.Decode[contract.Leader](m.Data)
		if err != nil {
			return r, fmt.Errorf("leader key, revision %d: %w", m.Seq, err)
		}
		r.Holder = l.Holder
	}
	return r, nil
}

// queue reads which tasks have a request in the queue. The bodies stay there.
func (r *Reader) queue(ctx context.Context) error {
	v, conn := &r.view, r.cfg.Bus
	s, err := conn.JS.Stream(ctx, conn.Names.WorkStream())
	if err != nil {
		return fmt.Errorf("queue: %w", err)
	}
	info, err := s.Info(ctx, jetstream.WithSubjectFilter(conn.Names.TaskRequests()))
	if err != nil {
		return fmt.Errorf("queue: %w", err)
	}
	v.History.Queue, v.History.QueueRead = nil, true
	for subject := range info.State.Subjects {
		if _, id, err := conn.Names.ParseTaskRequest(subject); err == nil {
			v.History.Queue = append(v.History.Queue, id)
		}
	}
	v.Waiting = max(0, len(v.History.Queue)-v.Live)
	return nil
}

// errRead ends a look at what there is.
var errRead = errors.New("everything was read")

// idle is how long a look waits for the next message before it takes what it was
// promised for gone: others may remove messages while they are read.
const idle = 2 * time.Second

// Each hands every message that w selects and that is there now to fn. What comes
// meanwhile may be left out, so that it ends on a system that never rests.
func Each(ctx context.Context, conn *bus.Conn, w bus.Watch, fn func(bus.Message) error) error {
	look, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var promised, got uint64
	started := false
	w.OnStart = func(pending uint64) {
		started = true
		if promised = pending; pending == 0 {
			cancel(errRead)
		}
	}
	late := time.AfterFunc(bus.WriteTimeout+idle, func() { cancel(errRead) })
	defer late.Stop()
	err := conn.Watch(look, w, func(m bus.Message, pending uint64) error {
		late.Reset(idle)
		if err := fn(m); err != nil {
			return err
		}
		if got++; pending == 0 || got >= promised {
			return errRead
		}
		return nil
	})
	switch {
	case errors.Is(err, errRead):
		return nil
	case err != nil:
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case !started:
		return fmt.Errorf("stream %s: %w: no answer within %s", w.Stream, bus.ErrDoubt, bus.WriteTimeout+idle)
	}
	return nil // there is nothing, or nothing more
}
