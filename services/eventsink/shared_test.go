package eventsink_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/postgres"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// follow pages by sequence until it has seen everything up to last, and fails the
// test if a sequence is left out or comes twice.
func follow(ctx context.Context, t *testing.T, list func(eventapi.ListRequest) (eventapi.ListResponse, error), last uint64) {
	t.Helper()
	var seen uint64
	for seen < last {
		resp, err := list(eventapi.ListRequest{AfterSeq: seen, Limit: 37, BarrierSeq: seen + 1, WaitMS: 500})
		if ctx.Err() != nil {
			t.Errorf("the reader has seen events up to %d of %d: %v", seen, last, err)
			return
		}
		if err != nil {
			continue // the database is down for a while
		}
		for _, e := range resp.Events {
			if e.Seq != seen+1 {
				t.Errorf("event %d came after %d: a reader who pages by sequence has lost what is between", e.Seq, seen)
				return
			}
			seen = e.Seq
		}
	}
}

// EVT-18: several sinks store at the same time, and a reader who pages by sequence
// beside them sees every event once and in order: while one of them stops, another
// is cut off with events in its hands, and the database crashes.
func TestShared(t *testing.T) {
	t.Parallel()
	srv, conn := natstest.New(t)
	shortAckWait(t, conn)
	db := pgtest.Start(t)
	open := postgres.Opener(db.Database(), true)
	// Small, so that the events are spread and nothing waits for long.
	o := options{cfg: eventsink.Config{Shared: true, BatchSize: 20, FlushInterval: 5 * time.Millisecond}, open: open}
	cut := srv.Conn("second")
	sinks := []*sink{start(t, srv.Conn("first"), o), start(t, cut, o), start(t, srv.Conn("third"), o)}
	for _, s := range sinks {
		s.waitReady("")
	}
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	const phase, phases = 400, 4
	read := make(chan struct{})
	go func() {
		defer close(read)
		follow(ctx, t, func(r eventapi.ListRequest) (eventapi.ListResponse, error) { return eventapi.List(ctx, conn, r) }, phase*phases)
	}()
	n := 0
	publishAll := func() {
		for range phase {
			n++
			publish(t, conn, newTask(n%20).step(n))
		}
	}
	publishAll()
	natstest.Eventually(t, within, func() (bool, string) {
		total := 0.0
		for _, s := range sinks {
			total += s.metric("events_stored_total")
		}
		return total >= phase, "the first events are not stored"
	})
	for i, s := range sinks {
		if s.metric("events_stored_total") == 0 {
			t.Errorf("sink %d has stored nothing: the work is not shared", i+1)
		}
	}
	cut.NC.Close()
	publishAll()
	sinks[0].stop()
	publishAll()
	db.Stop("immediate")
	sinks[2].waitReady("event store")
	publishAll()
	db.Up()
	<-read
	sinks[2].waitReady("")
	all := stored(t, conn, phase*phases)
	seen := map[string]bool{}
	for _, e := range all {
		if seen[e.EventID] {
			t.Errorf("event %s is stored twice", e.EventID)
		}
		seen[e.EventID] = true
	}
	if len(seen) != phase*phases {
		t.Errorf("%d events are stored, want %d", len(seen), phase*phases)
	}
}

// A database that lacks what the consumer takes for stored, because it is new or
// was restored from a backup, gets it from the stream again, also while a sink
// that saw the younger one goes on.
func TestSharedRestoredDatabase(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	db := pgtest.Start(t)
	dsn := db.Database()
	o := options{cfg: eventsink.Config{Shared: true, FlushInterval: time.Millisecond}, open: postgres.Opener(dsn, true)}
	s := start(t, conn, o)
	k := newTask(1)
	for i := range 30 {
		publish(t, conn, k.step(i+1))
	}
	stored(t, conn, 30)
	db.SQL("db1", "DELETE FROM events WHERE seq > 10; UPDATE sink SET cursor = 10")
	publish(t, conn, k.step(31))
	natstest.Eventually(t, within, func() (bool, string) {
		got := db.SQL("db1", "SELECT count(*), max(cursor) FROM events, sink")
		return got == "31|31", "count and cursor are " + got + ", want 31|31"
	})
	s.stop()
	db.SQL("db1", "DELETE FROM events; UPDATE sink SET cursor = 0")
	start(t, conn, o)
	if got := stored(t, conn, 31); len(got) != 31 {
		t.Errorf("%d events are stored, want 31", len(got))
	}
}

// A stream that has lost its end: rows beyond the cursor, which a sink had stored
// and nobody had acknowledged yet, would keep out new events with their numbers.
func TestSharedStreamLostItsEnd(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	dsn := pgtest.Start(t).Database()
	db, err := postgres.Opener(dsn, true)(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	stream, err := conn.JS.Stream(t.Context(), conn.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Bind(t.Context(), eventsink.Origin{Stream: conn.Names.EventStream(), Created: stream.CachedInfo().Created}); err != nil {
		t.Fatal(err)
	}
	publish(t, conn, newTask(1).started())
	rec := eventsink.RecordOf(t, newTask(1).step(9), 10)
	if _, err := db.Append(t.Context(), []contract.EventRecord{rec}, 0); err != nil {
		t.Fatal(err)
	}
	s := start(t, conn, options{cfg: eventsink.Config{Shared: true}, open: postgres.Opener(dsn, true)})
	s.waitReady("up to 10, but stream HG_EVENTS ends at 1")
	if n := s.metric("events_stored_total"); n != 0 {
		t.Errorf("events_stored_total = %v, want 0: nothing may be stored beside foreign events", n)
	}
}

// A sink that begins while others store: what they have stored since it looked at the
// stream is not beyond its end.
func TestSharedBeginsWhileOthersStore(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	dir := t.TempDir()
	others := func(ctx context.Context, db eventsink.Store) {
		rec := eventsink.RecordOf(t, newTask(1).completed(), publish(t, conn, newTask(1).completed()))
		if _, err := db.Append(ctx, []contract.EventRecord{rec}, rec.Seq); err != nil {
			t.Error(err)
		}
	}
	s := start(t, conn, options{cfg: eventsink.Config{Shared: true}, open: func(ctx context.Context, waiting func()) (eventsink.Store, error) {
		db, err := sqlite.Open(ctx, dir, waiting)
		if err != nil {
			return nil, err
		}
		return &busy{Store: db, others: others}, nil
	}})
	s.waitReady("")
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, reason := range s.reasons {
		if strings.Contains(reason, "another stream") {
			t.Errorf("the sink took its own stream for a foreign one: %s", reason)
		}
	}
}

// busy is a store in which others store whenever a sink binds itself to the stream,
// which it does once it has looked at it.
type busy struct {
	eventsink.Store
	once   sync.Once
	others func(context.Context, eventsink.Store)
}

func (b *busy) Bind(ctx context.Context, o eventsink.Origin) error {
	err := b.Store.Bind(ctx, o)
	b.once.Do(func() { b.others(ctx, b.Store) })
	return err
}

// A batch of 500 with one event that the database refuses: the others are stored,
// that one is with the dead letters with its reason, and the cursor goes past it.
func TestBadRow(t *testing.T) {
	t.Parallel()
	for name, shared := range map[string]bool{"alone": false, "shared": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			badRow(t, shared)
		})
	}
}

func badRow(t *testing.T, shared bool) {
	const size = 500
	_, conn := natstest.New(t)
	db := pgtest.Start(t)
	s := start(t, conn, options{cfg: eventsink.Config{Shared: shared, FlushInterval: time.Hour, BatchSize: size}, open: postgres.Opener(db.Database(), shared)})
	s.waitReady("")
	db.SQL("db1", "ALTER TABLE events ADD CHECK (event_id NOT LIKE '%/step/377')")
	k := newTask(1)
	for i := range size {
		publish(t, conn, k.step(i+1))
	}
	if got := stored(t, conn, size); len(got) != size-1 {
		t.Errorf("%d events are stored, want %d", len(got), size-1)
	}
	if n := s.metric("events_dead_total"); n != 1 {
		t.Errorf("events_dead_total = %v, want 1", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	dead, err := conn.JS.Stream(ctx, conn.Names.DeadStream())
	if err != nil {
		t.Fatal(err)
	}
	m, err := dead.GetLastMsgForSubject(ctx, ">")
	if err != nil {
		t.Fatalf("dead letter: %v", err)
	}
	if reason := m.Header.Get(bus.HeaderReason); !strings.Contains(string(m.Data), "/step/377") || !strings.Contains(reason, "check constraint") {
		t.Errorf("the dead letter holds %s, because %q; want the refused event and the database's reason", m.Data, reason)
	}
}
