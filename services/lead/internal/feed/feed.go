// Package feed reads events for the outside: pages from the event store, and
// streams that begin with history and go on live without a gap or a duplicate
// at the seam.
//
// The seam holds because there is one numbering: an event's sequence in the
// event stream is its seq in the store as well. What the stream still has comes
// from the stream, older events from the store, and one position says which is
// the next.
package feed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

const (
	// prefetch bounds the events that are buffered for one reader, and prefetchBytes
	// one request for them, which must hold the largest event. A bound in bytes alone
	// costs each reader 8 MB: the library then has room for a million messages.
	prefetch      = 128
	prefetchBytes = 2 << 20
	// pullHeartbeat is how often the server shows life on an idle stream.
	pullHeartbeat = 2 * time.Second
	pullExpiry    = 10 * time.Second
	// outage is how long a stream survives without NATS before it ends with
	// ErrUnavailable; the reader then comes back with its position.
	outage = 60 * time.Second
	// storePage is the size of a page of history.
	storePage = 500
	// infoTimeout bounds one question about the event stream.
	infoTimeout = 5 * time.Second
)

// ErrStop may be returned by emit to end a stream in order.
var ErrStop = errors.New("stop the stream")

// Query selects events of one tenant. Empty fields match anything.
type Query struct {
	Tenant   contract.Tenant
	ThreadID contract.ThreadID
	RunID    contract.RunID
	TaskID   contract.TaskID
	// Types are stored types such as subagent.end; an empty list is no filter.
	Types []string
	// AllAttempts shows of a task (TaskID) what attempts told that were followed by
	// another one. Without it the task's history is that of its newest attempt; a
	// stream leaves out what was superseded when it was opened.
	AllAttempts bool
	// AfterSeq is exclusive. [Feed.List] uses it; [Feed.Stream] has its own.
	AfterSeq uint64
	// Limit is the size of a page, 1 to wire.MaxEvents; 0 takes wire.DefaultEvents.
	Limit int
	// UntilRunEnd ends a stream after the last event of RunID, also when Types
	// keeps that one back.
	UntilRunEnd bool
	// AtEnd, when set, is told the sequence of the run's last event when
	// UntilRunEnd ends the stream.
	AtEnd func(seq uint64)
}

// Page is a page of events in ascending seq.
type Page = wire.EventPage

// Feed reads events. It is safe for concurrent use.
type Feed struct {
	c   *bus.Conn
	log zerolog.Logger

	// Where the event stream began and ended a moment ago, for all readers together.
	mu          sync.Mutex
	looking     bool
	looked      time.Time // zero: not yet
	first, last uint64
}

// New returns a feed on c.
func New(c *bus.Conn, log zerolog.Logger) *Feed { return &Feed{c: c, log: log} }

// bounds asks the event stream for its first and last sequence. An empty
// stream has first = last + 1.
func (f *Feed) bounds(ctx context.Context) (first, last uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	s, err := f.c.JS.Stream(ctx, f.c.Names.EventStream())
	if err != nil {
		return 0, 0, fmt.Errorf("%w: event stream: %w", leaderr.ErrUnavailable, err)
	}
	st := s.CachedInfo().State
	return max(st.FirstSeq, 1), st.LastSeq, nil
}

// lately is bounds as they were a second ago, or as long as one look takes on top. One
// reader looks at a time; the others go by what was seen last.
func (f *Feed) lately(ctx context.Context) (first, last uint64, err error) {
	f.mu.Lock()
	if !f.looked.IsZero() && (f.looking || time.Since(f.looked) < lookAgain) {
		defer f.mu.Unlock()
		return f.first, f.last, nil
	}
	f.looking = true
	f.mu.Unlock()
	first, last, err = f.bounds(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.looking = false
	if err == nil {
		f.first, f.last, f.looked = first, last, time.Now()
	}
	return first, last, err
}

// LastSeq is the sequence of the newest event of all.
func (f *Feed) LastSeq(ctx context.Context) (uint64, error) {
	_, last, err := f.bounds(ctx)
	return last, err
}

// Over reports whether a stream of q after the sequence after would end without
// an event, because the run of q.UntilRunEnd ended at or before it.
func (f *Feed) Over(ctx context.Context, q Query, after uint64) (bool, error) {
	if !q.UntilRunEnd || q.RunID == "" || after == 0 {
		return false, nil
	}
	s := stream{Feed: f, q: q}
	end, err := s.runEnd(ctx)
	if err != nil || end == 0 || after < end {
		return false, err
	}
	// A position beyond the stream's end was never given out; the stream has to say so.
	_, last, err := f.bounds(ctx)
	return after <= last, err
}

// List returns a page of stored events after q.AfterSeq. It includes whatever
// was published before the call: the store is given two seconds to catch up,
// and when it does not, HasMore says that the page is not the end. ErrInvalid
// for a query that cannot be, ErrUnavailable when no store answers.
func (f *Feed) List(ctx context.Context, q Query) (Page, error) {
	if q.Limit == 0 {
		q.Limit = wire.DefaultEvents
	}
	if q.Limit < 1 || q.Limit > wire.MaxEvents {
		return Page{}, fmt.Errorf("%w: limit is %d; want 1 to %d", leaderr.ErrInvalid, q.Limit, wire.MaxEvents)
	}
	last, err := f.LastSeq(ctx)
	if err != nil {
		return Page{}, err
	}
	newest := f.newestAttempt(ctx, q)
	page := Page{Events: []contract.EventRecord{}, NextAfterSeq: q.AfterSeq}
	for {
		resp, err := f.store(ctx, q, page.NextAfterSeq, q.Limit-len(page.Events), last)
		if err != nil {
			return Page{}, err
		}
		for _, rec := range resp.Events {
			if !superseded(rec, newest) {
				page.Events = append(page.Events, rec)
			}
		}
		on := resp.NextAfterSeq > page.NextAfterSeq
		page.NextAfterSeq = max(resp.NextAfterSeq, page.NextAfterSeq)
		page.HasMore, page.PrunedSeq = resp.HasMore || resp.LastSeq < last, resp.PrunedSeq
		if !resp.HasMore || !on || newest == 0 || len(page.Events) >= q.Limit {
			return page, nil
		}
	}
}

// newestAttempt is the newest attempt that was told of the task that q asks for, or
// 0 when nothing is to be left out, or it cannot be found out.
func (f *Feed) newestAttempt(ctx context.Context, q Query) int {
	if q.TaskID == "" || q.AllAttempts {
		return 0
	}
	subject := contract.EventSubject{Tenant: q.Tenant, Run: q.RunID, Task: q.TaskID, Type: contract.EventTaskAdmitted}
	if q.ThreadID != "" {
		subject.Thread = q.ThreadID.Token()
	}
	m, err := f.c.Last(ctx, f.c.Names.EventStream(), f.c.Names.Events(subject))
	if err == nil {
		if ev, err := envelope.Decode(m.Data); err == nil {
			return ev.Attempt
		}
	}
	// It has left the stream.
	q.Types = []string{contract.RecordAdmitted, contract.RecordEnd}
	resp, err := f.store(ctx, q, 0, storePage, 0)
	if err != nil {
		f.log.Debug().Err(err).Str("task", string(q.TaskID)).Msg("event feed: which attempt is the newest is not known")
		return 0
	}
	newest := 0
	for _, rec := range resp.Events {
		newest = max(newest, attemptOf(rec))
	}
	return newest
}

// superseded reports whether an event is of an attempt before the newest.
func superseded(rec contract.EventRecord, newest int) bool {
	if newest == 0 {
		return false
	}
	n := attemptOf(rec)
	return n > 0 && n < newest
}

// attemptOf is the attempt that an event is of, or 0 when it is of none.
func attemptOf(rec contract.EventRecord) int {
	var m struct {
		Attempt int `json:"attempt"`
	}
	if json.Unmarshal(rec.Metadata, &m) != nil {
		return 0
	}
	return m.Attempt
}

// How long a store that does not answer is waited for, and how often it is asked
// meanwhile: a sink that is started again is back by then.
const (
	storePatience = 2 * time.Second
	storePause    = 100 * time.Millisecond
)

func (f *Feed) store(ctx context.Context, q Query, after uint64, limit int, barrier uint64) (eventapi.ListResponse, error) {
	req := eventapi.ListRequest{
		Tenant: q.Tenant, ThreadID: q.ThreadID, RunID: q.RunID, TaskID: q.TaskID, Types: q.Types,
		AfterSeq: after, Limit: limit, BarrierSeq: barrier, WaitMS: eventapi.MaxWait.Milliseconds(),
	}
	resp, err := eventapi.List(ctx, f.c, req)
	patience := time.NewTimer(storePatience)
	defer patience.Stop()
	for waiting := true; waiting && errors.Is(err, eventapi.ErrUnavailable); {
		select {
		case <-ctx.Done():
			waiting = false
		case <-patience.C:
			waiting = false
		case <-time.After(storePause):
			resp, err = eventapi.List(ctx, f.c, req)
		}
	}
	var refused *eventapi.Error
	switch {
	case errors.As(err, &refused) && refused.Code == eventapi.CodeInvalid:
		return resp, fmt.Errorf("%w: %w", leaderr.ErrInvalid, err)
	case err != nil:
		return resp, fmt.Errorf("%w: %w", leaderr.ErrUnavailable, err)
	}
	return resp, nil
}

// Stream calls emit for every matching event after the sequence after, in order
// and each once: first what is there, then what comes. Of events with one id,
// which a publisher that was in doubt has published again, only the first is
// told, unless more than recentIDs others were in between or the reader came
// back in between. It calls gap for what
// is not kept any more; a gap that begins at or below after says that the
// position is not of this stream, and the reader goes on from before it.
//
// It returns nil after ErrStop from emit or gap and at the end of the run with
// q.UntilRunEnd, ctx's error when ctx is done, any other error of emit or gap as
// it is, and ErrUnavailable when NATS or, for history, the store cannot be
// reached. A blocked emit holds up this stream alone, and at most prefetch events
// wait for it.
func (f *Feed) Stream(ctx context.Context, q Query, after uint64, emit func(contract.EventRecord) error, gap func(from, to uint64) error) error {
	s := stream{Feed: f, q: q, pos: after, emit: emit, gap: gap}
	err := s.run(ctx)
	if errors.Is(err, ErrStop) {
		return nil
	}
	return err
}

// stream is one reader's state. Everything up to and with pos has been told.
type stream struct {
	*Feed
	q   Query
	pos uint64
	end uint64 // seq of the run's last event, 0 while not known
	// opened: the last live read got as far as waiting for events.
	opened bool
	newest int // attempt of the task when the stream was opened
	// told are the ids of the newest events that went by.
	told recent
	emit func(contract.EventRecord) error
	gap  func(from, to uint64) error
}

func (s *stream) run(ctx context.Context) error {
	first, last, err := s.bounds(ctx)
	if err != nil {
		return err
	}
	if s.pos > last {
		// A position that was never given out: the stream was made anew, or the
		// reader made it up. Neither silence nor a replay would be right.
		if err := s.gap(last+1, s.pos); err != nil {
			return err
		}
		s.pos = last
	}
	s.newest = s.newestAttempt(ctx, s.q)
	if s.q.UntilRunEnd && s.q.RunID != "" {
		if s.end, err = s.runEnd(ctx); err != nil {
			return err
		}
	}
	var downSince time.Time
	for {
		if s.ended() {
			return s.atEnd(s.end)
		}
		if s.pos+1 < first {
			if err := s.history(ctx, first); err != nil {
				return err
			}
			if s.ended() {
				return s.atEnd(s.end)
			}
		}
		s.opened = false
		err := s.live(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errTruncated):
		case errors.Is(err, errBroken):
			if s.opened || downSince.IsZero() {
				downSince = time.Now()
			}
			if time.Since(downSince) > outage {
				return fmt.Errorf("%w: %w", leaderr.ErrUnavailable, err)
			}
			s.log.Debug().Err(err).Uint64("pos", s.pos).Msg("event feed: reading again")
			if err := pause.For(ctx, 200*time.Millisecond); err != nil {
				return err
			}
		default:
			return err
		}
		if f, _, err := s.bounds(ctx); err == nil {
			first = f
		}
	}
}

func (s *stream) atEnd(seq uint64) error {
	if s.q.AtEnd != nil {
		s.q.AtEnd(seq)
	}
	return nil
}

func (s *stream) ended() bool { return s.end > 0 && s.pos >= s.end }

// history tells the events from pos up to first, exclusive, from the store.
func (s *stream) history(ctx context.Context, first uint64) error {
	for {
		resp, err := s.store(ctx, s.q, s.pos, storePage, first-1)
		if err != nil {
			return err
		}
		if gone := min(resp.PrunedSeq, first-1); gone > s.pos {
			if err := s.gap(s.pos+1, gone); err != nil {
				return err
			}
			s.pos = gone
		}
		for _, rec := range resp.Events {
			if rec.Seq >= first {
				s.pos = first - 1
				return nil
			}
			if rec.Seq <= s.pos {
				continue
			}
			s.told.add(rec.EventID)
			if !superseded(rec, s.newest) {
				if err := s.emit(rec); err != nil {
					return err
				}
			}
			s.pos = rec.Seq
			if s.ended() {
				return nil
			}
		}
		if resp.HasMore && resp.NextAfterSeq > s.pos {
			s.pos = min(resp.NextAfterSeq, first-1)
		}
		if resp.HasMore && s.pos < first-1 && len(resp.Events) > 0 {
			continue
		}
		if have := max(resp.LastSeq, s.pos); have < first-1 {
			if err := s.gap(have+1, first-1); err != nil {
				return err
			}
		}
		s.pos = first - 1
		return nil
	}
}

var (
	// errTruncated: the stream lost its beginning before the reader had it.
	errTruncated = errors.New("event stream was cut in front of its reader")
	// errBroken: the consumer has to be made anew.
	errBroken = errors.New("event consumer broke off")
)

// live tells events after pos from the event stream until something ends it.
func (s *stream) live(ctx context.Context) error {
	name := s.c.Names.EventStream()
	subject := contract.EventSubject{Tenant: s.q.Tenant, Run: s.q.RunID, Task: s.q.TaskID}
	if s.q.ThreadID != "" {
		subject.Thread = s.q.ThreadID.Token()
	}
	filter := s.c.Names.Events(subject)
	cons, err := s.c.JS.OrderedConsumer(ctx, name, jetstream.OrderedConsumerConfig{
		FilterSubjects:    []string{filter},
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       s.pos + 1,
		InactiveThreshold: 30 * time.Second,
		// More attempts would wait inside the library, deaf to ctx.
		MaxResetAttempts: 1,
	})
	if err != nil {
		return fmt.Errorf("%w: %w", errBroken, err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = s.c.JS.DeleteConsumer(ctx, name, cons.CachedInfo().Name)
	}()
	// The consumer begins where the stream does. Only a look after its creation
	// tells whether it could begin where it should.
	first, _, err := s.bounds(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", errBroken, err)
	}
	if s.pos+1 < first {
		return errTruncated
	}
	it, err := cons.Messages(
		jetstream.PullMaxMessagesWithBytesLimit(prefetch, prefetchBytes),
		jetstream.PullExpiry(pullExpiry), jetstream.PullHeartbeat(pullHeartbeat))
	if err != nil {
		return fmt.Errorf("%w: %w", errBroken, err)
	}
	defer it.Stop()
	s.opened = true
	var e edge
	patient := s.c.NewPatient(it, name, []string{filter})
	for {
		msg, err := patient.Next(ctx, s.pos)
		if err != nil {
			return fmt.Errorf("%w: %w", errBroken, err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("%w: %w", errBroken, err)
		}
		seq := meta.Sequence.Stream
		if seq <= s.pos {
			continue
		}
		if seq > s.pos+1 {
			if err := s.whole(ctx, cons, &e, meta); err != nil {
				return err
			}
		}
		rec, kind, ok := s.record(msg, seq)
		// The server forgets the ids of messages after a while, and then stores an
		// event that is published again once more. The store keeps the first.
		ok = ok && s.told.add(rec.EventID)
		if ok && !superseded(rec, s.newest) && (len(s.q.Types) == 0 || slices.Contains(s.q.Types, rec.EventType)) {
			if err := s.emit(rec); err != nil {
				return err
			}
		}
		s.pos = seq
		if ok && s.q.UntilRunEnd && rec.TaskID == "" && rec.RunID == s.q.RunID && kind.RunTerminal() {
			return s.atEnd(seq)
		}
	}
}

// edge is what a stream knows of where the event stream begins.
type edge struct {
	// Nothing between the reader and upTo was cut before consumer delivered it. The
	// library may make a new one, which delivers once more what was not read yet.
	upTo     uint64
	consumer string
	far      bool // the reader was far from the beginning
}

// lookAgain is how often it is looked for readers that are far from the beginning of
// the event stream where that is.
const lookAgain = time.Second

func (s *stream) far(first, last uint64) bool {
	return s.pos+1 >= first && s.pos+1-first > (last-first)/2
}

// whole returns errTruncated if the event stream may have lost its beginning up to
// after pos before the next message, which meta describes, was chosen for delivery: a
// consumer goes on behind what is gone and says nothing. A reader in the newer half of
// the stream has time: for it one look a second counts, which all readers share.
func (s *stream) whole(ctx context.Context, cons jetstream.Consumer, e *edge, meta *jetstream.MsgMetadata) error {
	seq := meta.Sequence.Stream
	if meta.Consumer == e.consumer && seq <= e.upTo {
		return nil
	}
	if meta.Consumer == e.consumer && e.far {
		first, last, err := s.lately(ctx)
		if err != nil {
			return fmt.Errorf("%w: %w", errBroken, err)
		}
		if s.far(first, last) {
			return nil
		}
	}
	// In this order: what had been delivered before the look was chosen before it.
	ask, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	info, err := cons.Info(ask)
	if err != nil {
		return fmt.Errorf("%w: %w", errBroken, err)
	}
	first, last, err := s.bounds(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", errBroken, err)
	}
	if s.pos+1 < first {
		return errTruncated
	}
	*e = edge{upTo: seq, consumer: meta.Consumer, far: s.far(first, last)}
	if info.Name == meta.Consumer {
		e.upTo = max(seq, info.Delivered.Stream)
	}
	return nil
}

// record shapes a message as the store would. What the store does not keep is
// not shown live either.
func (s *stream) record(msg jetstream.Msg, seq uint64) (contract.EventRecord, contract.EventType, bool) {
	ev, err := envelope.Decode(msg.Data())
	if err != nil {
		s.log.Debug().Err(err).Uint64("seq", seq).Msg("event feed: an event cannot be read")
		return contract.EventRecord{}, "", false
	}
	at, err := s.c.Names.ParseEvent(msg.Subject())
	if err == nil {
		err = event.Complete(&ev, at)
	}
	if err != nil {
		s.log.Warn().Err(err).Uint64("seq", seq).Str("subject", msg.Subject()).Msg("event feed: an event is not shown")
		return contract.EventRecord{}, "", false
	}
	rec, ok := event.Live(ev, seq)
	return rec, ev.Type, ok && (s.q.ThreadID == "" || rec.ThreadID == s.q.ThreadID)
}

// runEnd returns the sequence of the run's last event, or 0 if it has none yet.
func (s *stream) runEnd(ctx context.Context) (uint64, error) {
	// Of a run's own events, which carry no task, the terminal one is the last.
	filter := s.c.Names.Events(contract.EventSubject{Tenant: s.q.Tenant, Run: s.q.RunID, Task: contract.NoTask})
	m, err := s.c.Last(ctx, s.c.Names.EventStream(), filter)
	if err == nil {
		if sub, err := s.c.Names.ParseEvent(m.Subject); err == nil && sub.Type.RunTerminal() {
			return m.Seq, nil
		}
		return 0, nil
	}
	if !errors.Is(err, bus.ErrNotFound) {
		return 0, fmt.Errorf("%w: end of run: %w", leaderr.ErrUnavailable, err)
	}
	q := Query{Tenant: s.q.Tenant, RunID: s.q.RunID, Types: []string{contract.RecordRunCompleted, contract.RecordRunFailed, contract.RecordRunCancelled}}
	resp, err := s.store(ctx, q, 0, 1, 0)
	if err != nil || len(resp.Events) == 0 {
		// Without a store the stream still serves what comes.
		return 0, nil
	}
	return resp.Events[0].Seq, nil
}

// recent remembers the ids of the last recentIDs events, as hashes: many streams
// are open at the same time.
type recent struct {
	seed  maphash.Seed
	known map[uint64]struct{}
	order []uint64 // a ring once it is full
	next  int
}

const recentIDs = 2048

// add reports whether id is new.
func (r *recent) add(id string) bool {
	if r.known == nil {
		r.seed, r.known = maphash.MakeSeed(), map[uint64]struct{}{}
	}
	h := maphash.String(r.seed, id)
	if _, ok := r.known[h]; ok {
		return false
	}
	r.known[h] = struct{}{}
	if len(r.order) < recentIDs {
		r.order = append(r.order, h)
		return true
	}
	delete(r.known, r.order[r.next])
	r.order[r.next] = h
	r.next = (r.next + 1) % recentIDs
	return true
}
