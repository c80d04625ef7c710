package eventsink_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// EVT-14, EVT-18, F-158: 5,000 events from four connections at the same time are
// stored once each, under the sequence of the stream, and committed in its order.
func TestOrder(t *testing.T) {
	t.Parallel()
	srv, conn := natstest.New(t)
	o := &ordered{t: t}
	s := start(t, conn, options{log: zerolog.New(zerolog.NewTestWriter(t)), open: wrap(t.TempDir(), o.append)})
	const publishers, each = 4, 1250
	var mu sync.Mutex
	want := map[uint64]string{}
	var wg sync.WaitGroup
	for p := range publishers {
		c := srv.Conn(fmt.Sprintf("publisher-%d", p))
		wg.Go(func() {
			k := newTask(p)
			futures := make([]jetstream.PubAckFuture, 0, each)
			for i := range each {
				ev := k.step(i + 1)
				b, err := envelope.Encode(ev)
				if err != nil {
					t.Error(err)
					return
				}
				f, err := c.PublishAsync(bus.Write{Subject: ev.NATSSubject(c.Names), Data: b})
				if err != nil {
					t.Error(err)
					return
				}
				futures = append(futures, f)
			}
			for i, f := range futures {
				select {
				case ack := <-f.Ok():
					mu.Lock()
					want[ack.Sequence] = k.step(i + 1).ID
					mu.Unlock()
				case err := <-f.Err():
					t.Error(err)
					return
				case <-time.After(within):
					t.Error("no answer to a publish")
					return
				}
			}
		})
	}
	wg.Wait()
	got := stored(t, conn, publishers*each)
	if len(got) != publishers*each {
		t.Fatalf("%d events are stored, want %d", len(got), publishers*each)
	}
	for i, r := range got {
		if r.Seq != uint64(i+1) || r.EventID != want[r.Seq] {
			t.Fatalf("record %d is %d %q, want %d %q", i, r.Seq, r.EventID, i+1, want[uint64(i+1)])
		}
	}
	if n := s.metric("events_stored_total"); n != publishers*each {
		t.Errorf("events_stored_total = %v, want %d", n, publishers*each)
	}
	natstest.Eventually(t, within, func() (bool, string) {
		n := s.metric("pending")
		return n == 0, fmt.Sprintf("pending = %v, want 0", n)
	})
}

// EVT-14: the last event of a task or run is stored at once, with what came
// before it, although the batch is not full and its time is not over.
func TestTerminalAtOnce(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	start(t, conn, options{cfg: eventsink.Config{FlushInterval: time.Hour}, open: sqlite.Opener(t.TempDir())})
	k := newTask(1)
	publish(t, conn, k.started())
	publish(t, conn, k.step(1))
	if got := stored(t, conn, publish(t, conn, k.completed())); len(got) != 3 {
		t.Errorf("%d events are stored after the end of the task, want 3", len(got))
	}
	run := task{tenant: "default", thread: "t", run: "run-9"}
	end := run.event("run-9/end", contract.EventRunFailed, contract.RunEndData{RunID: "run-9", Status: contract.RunFailed, Error: "no"})
	if got := stored(t, conn, publish(t, conn, end)); len(got) != 4 || got[3].EventType != contract.RecordRunFailed || got[3].TaskID != "" {
		t.Errorf("stored after the end of the run: %+v", got)
	}
}

// EVT-14: a last event that is found behind others, all of which came during a
// write, does not wait either.
func TestTerminalAmongOthers(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	inside, goOn := make(chan struct{}, 1), make(chan struct{})
	start(t, conn, options{cfg: eventsink.Config{FlushInterval: time.Hour}, open: wrap(t.TempDir(), func(ctx context.Context, next eventsink.Store, records []contract.EventRecord, upTo uint64) (int, error) {
		if upTo == 1 {
			inside <- struct{}{}
			<-goOn
		}
		return next.Append(ctx, records, upTo)
	})})
	publish(t, conn, newTask(1).completed())
	<-inside
	for i := range 100 {
		publish(t, conn, newTask(2).step(i+1))
	}
	last := publish(t, conn, newTask(2).completed())
	waitConsumer(t, conn, func(i *jetstream.ConsumerInfo) bool { return i.NumPending == 0 })
	close(goOn)
	if got := stored(t, conn, last); len(got) != 102 {
		t.Errorf("%d events are stored, want 102", len(got))
	}
}

// EVT-14: without a last event, a batch is stored when its time is over, and when
// it is full.
func TestBatchTimeAndSize(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	dir := t.TempDir()
	k := newTask(1)
	s := start(t, conn, options{cfg: eventsink.Config{FlushInterval: 20 * time.Millisecond}, open: sqlite.Opener(dir)})
	stored(t, conn, publish(t, conn, k.step(1)))
	s.stop()
	start(t, conn, options{cfg: eventsink.Config{FlushInterval: time.Hour, BatchSize: 3}, open: sqlite.Opener(dir)})
	for i := 2; i <= 7; i++ {
		publish(t, conn, k.step(i))
	}
	if got := stored(t, conn, 7); len(got) != 7 {
		t.Errorf("%d events are stored, want 7", len(got))
	}
}

// F-144, I6: the same event again, past the server's window and past a purge and
// a restart of both, is one row and counted once.
func TestDuplicates(t *testing.T) {
	t.Parallel()
	srv, conn := natstest.New(t)
	dir := t.TempDir()
	k := newTask(1)
	s := start(t, conn, options{open: sqlite.Opener(dir)})
	publish(t, conn, k.started())
	publish(t, conn, k.started())
	stored(t, conn, publish(t, conn, k.completed()))
	if n, d := s.metric("events_stored_total"), s.metric("events_duplicate_total"); n != 2 || d != 1 {
		t.Errorf("stored %v, duplicates %v, want 2 and 1", n, d)
	}
	s.stop()

	stream, err := conn.JS.Stream(t.Context(), conn.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	srv.Restart()
	conn = srv.Conn("after")
	s = start(t, conn, options{open: sqlite.Opener(dir)})
	publish(t, conn, k.started())
	publish(t, conn, k.completed())
	last := publish(t, conn, k.step(1))
	got := stored(t, conn, last)
	if want := []string{"task-1/started", "task-1/end", "task-1/step/1"}; !slices.Equal(ids(got), want) {
		t.Errorf("stored %q, want %q", ids(got), want)
	}
	if n := s.metric("events_stored_total"); n != 1 {
		t.Errorf("events_stored_total = %v, want 1", n)
	}
}

// EVT-15, I6, I8: a sink that dies between commit and acknowledgement, or before the
// commit, loses nothing and stores nothing twice; and what was in its hands is
// stored before what came later.
func TestCrash(t *testing.T) {
	t.Parallel()
	for name, commits := range map[string]bool{"after commit": true, "before commit": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, conn := natstest.New(t)
			dir := t.TempDir()
			hit := make(chan struct{})
			var once sync.Once
			first := start(t, conn, options{
				cfg: eventsink.Config{DrainTimeout: time.Millisecond},
				open: wrap(dir, func(ctx context.Context, next eventsink.Store, records []contract.EventRecord, upTo uint64) (int, error) {
					if commits {
						if _, err := next.Append(ctx, records, upTo); err != nil {
							t.Errorf("Append = %v", err)
						}
					}
					once.Do(func() { close(hit) })
					<-ctx.Done() // the process stops here
					return 0, ctx.Err()
				}),
			})
			k := newTask(1)
			for i := range 100 {
				publish(t, conn, k.step(i+1))
			}
			<-hit
			first.stop()
			for i := range 100 {
				publish(t, conn, k.step(i+101))
			}
			o := &ordered{t: t}
			second := start(t, conn, options{open: wrap(dir, o.append)})
			got := stored(t, conn, 200)
			if len(got) != 200 {
				t.Fatalf("%d events are stored, want 200", len(got))
			}
			for i, r := range got {
				if want := k.step(i + 1).ID; r.EventID != want || r.Seq != uint64(i+1) {
					t.Fatalf("record %d is %d %q, want %q", i, r.Seq, r.EventID, want)
				}
			}
			if n := second.metric("events_duplicate_total"); n != 0 {
				t.Errorf("events_duplicate_total = %v, want 0: the database knew where to go on", n)
			}
		})
	}
}

// F-156, EVT-15: while another program holds the database the events wait, in
// order, and the sink says that it is not ready; then all are there.
func TestLockedDatabase(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	dir := t.TempDir()
	o := &ordered{t: t}
	s := start(t, conn, options{open: wrap(dir, o.append)})
	k := newTask(1)
	stored(t, conn, publish(t, conn, k.started()))

	db, err := sql.Open("sqlite", filepath.Join(dir, sqlite.File))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	reader, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	writer, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	var n int
	for _, q := range []string{"BEGIN", "SELECT count(*) FROM events"} { // a long read
		if err := reader.QueryRowContext(t.Context(), q).Scan(&n); err != nil && !errors.Is(err, sql.ErrNoRows) {
			t.Fatal(err)
		}
	}
	if _, err := writer.ExecContext(t.Context(), "BEGIN IMMEDIATE"); err != nil {
		t.Fatal(err)
	}
	for i := range 500 {
		publish(t, conn, k.step(i+1))
	}
	s.waitReady("another program holds the database")
	if got := s.metric("events_stored_total"); got != 1 {
		t.Errorf("events_stored_total = %v while the database is locked, want 1", got)
	}
	if _, err := writer.ExecContext(t.Context(), "ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	got := stored(t, conn, 501)
	if len(got) != 501 {
		t.Errorf("%d events are stored, want 501", len(got))
	}
	s.waitReady("")
	if n := s.metric("store_retries_total"); n < 1 {
		t.Errorf("store_retries_total = %v, want some", n)
	}
}

// A sink that is told to stop while the database is locked stops nevertheless.
func TestStopWhileLocked(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	fail := func(context.Context, eventsink.Store, []contract.EventRecord, uint64) (int, error) {
		return 0, errors.New("out of order today")
	}
	dir := t.TempDir()
	s := start(t, conn, options{cfg: eventsink.Config{DrainTimeout: 50 * time.Millisecond}, open: wrap(dir, fail)})
	seq := publish(t, conn, newTask(1).completed())
	s.waitReady("out of order today")
	s.stop()
	start(t, conn, options{open: sqlite.Opener(dir)})
	if got := stored(t, conn, seq); len(got) != 1 {
		t.Errorf("%d events are stored, want 1", len(got))
	}
}

// What is told to stop finishes the batch that it has open and acknowledges it.
func TestStopFinishesBatch(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	shortAckWait(t, conn)
	dir := t.TempDir()
	s := start(t, conn, options{cfg: eventsink.Config{FlushInterval: time.Hour}, open: sqlite.Opener(dir)})
	k := newTask(1)
	for i := range 3 {
		publish(t, conn, k.step(i+1))
	}
	// When the first one comes again, the sink has all three in its hands.
	natstest.Eventually(t, within, func() (bool, string) {
		n := s.metric("redeliveries_total")
		return n > 0, fmt.Sprintf("redeliveries_total = %v", n)
	})
	s.stop()
	db, err := sqlite.Open(t.Context(), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	got, _, err := db.List(t.Context(), eventsink.Query{Limit: 10})
	if err != nil || len(got) != 3 {
		t.Errorf("stored %d events, %v, want the 3 of the open batch", len(got), err)
	}
	waitConsumer(t, conn, func(i *jetstream.ConsumerInfo) bool { return i.AckFloor.Stream == 3 && i.NumAckPending == 0 })
}

// shortAckWait lets the server wait for acknowledgements no longer than a second.
func shortAckWait(t *testing.T, conn *bus.Conn) {
	t.Helper()
	stream, err := conn.JS.Stream(t.Context(), conn.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	c, err := stream.Consumer(t.Context(), conn.Names.SinkConsumer())
	if err != nil {
		t.Fatal(err)
	}
	cfg := c.CachedInfo().Config
	cfg.AckWait = time.Second
	if _, err := stream.UpdateConsumer(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
}

func waitConsumer(t *testing.T, conn *bus.Conn, cond func(*jetstream.ConsumerInfo) bool) {
	t.Helper()
	c, err := conn.JS.Consumer(t.Context(), conn.Names.EventStream(), conn.Names.SinkConsumer())
	if err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, within, func() (bool, string) {
		info, err := c.Info(t.Context())
		if err != nil {
			return false, err.Error()
		}
		return cond(info), fmt.Sprintf("consumer: %+v", *info)
	})
}

// EVT-01, EVT-03, EVT-07, I6: what can never be stored goes to the dead letters with the
// reason, unknown types are passed over, and neither holds up the rest.
func TestDeadLetters(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	s := start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	k := newTask(1)
	good := k.step(1)
	encoded, err := envelope.Encode(good)
	if err != nil {
		t.Fatal(err)
	}
	subject := good.NATSSubject(conn.Names)
	foreign := func(change func(*envelope.Event)) []byte {
		ev := k.step(2)
		change(&ev)
		b, err := envelope.Encode(ev)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	type letter struct {
		subject string
		data    []byte
		reason  string
	}
	p := conn.Names.Prefix()
	bad := []letter{
		{subject, []byte("not json\x00\xff"), "invalid character"},
		{subject, nil, "unexpected end"},
		{subject, bytes.Repeat([]byte("["), 200), "nested too deeply"},
		{subject, []byte(`{"specversion":"2.0","id":"x","source":"s","type":"task_running"}`), "specversion"},
		{subject, bytes.Replace(encoded, []byte(`"message_index":1`), []byte(`"message_index":true`), 1), "shape of task_running"},
		{subject, bytes.Replace(encoded, []byte(`"id":"task-1/step/1"`), []byte(`"id":"a\r\nb"`), 1), "shape of task_running"},
		{subject, foreign(func(e *envelope.Event) { e.Tenant = "other" }), `tenant is "default" on the subject and "other"`},
		{subject, foreign(func(e *envelope.Event) { e.ThreadID = "other" }), "thread is"},
		{subject, foreign(func(e *envelope.Event) { e.RunID = "other" }), "run is"},
		{subject, foreign(func(e *envelope.Event) { e.TaskID = "other" }), "task is"},
		{subject, foreign(func(e *envelope.Event) { e.Type = contract.EventTaskStarted }), "type is"},
		{p + ".event.too.short", encoded, "tokens"},
		{p + ".event.default.t.r._._.x", encoded, "tokens"},
	}
	publish(t, conn, k.started())
	wantSeq := map[uint64]letter{}
	for _, l := range bad {
		wantSeq[publishRaw(t, conn, l.subject, l.data)] = l
	}
	unknown := k.event("u", "task_danced", map[string]any{"task_id": "task-1"})
	publish(t, conn, unknown)
	last := publish(t, conn, good)
	if got := stored(t, conn, last); !slices.Equal(ids(got), []string{"task-1/started", "task-1/step/1"}) {
		t.Errorf("stored %q, want the two good events", ids(got))
	}
	if d, u := s.metric("events_dead_total"), s.metric("events_skipped_total"); int(d) != len(bad) || u != 1 {
		t.Errorf("dead %v, skipped %v, want %d and 1", d, u, len(bad))
	}
	letters := deadLetters(t, conn, len(bad))
	for _, m := range letters {
		seq, err := strconv.ParseUint(m.Header.Get(bus.HeaderOriginSeq), 10, 64)
		l, ok := wantSeq[seq]
		if err != nil || !ok {
			t.Errorf("dead letter for %q, %v", m.Header.Get(bus.HeaderOriginSeq), err)
			continue
		}
		delete(wantSeq, seq)
		h := m.Header
		if !strings.Contains(h.Get(bus.HeaderReason), l.reason) || h.Get(bus.HeaderOriginSubject) != l.subject ||
			h.Get(bus.HeaderOriginStream) != conn.Names.EventStream() || h.Get(bus.HeaderDeliveries) != "1" || !bytes.Equal(m.Data, l.data) {
			t.Errorf("dead letter %v with %d bytes, want reason %q, subject %q, %d bytes", h, len(m.Data), l.reason, l.subject, len(l.data))
		}
	}
	waitConsumer(t, conn, func(i *jetstream.ConsumerInfo) bool { return i.NumAckPending == 0 && i.AckFloor.Stream == last })
}

func deadLetters(t *testing.T, conn *bus.Conn, want int) []bus.Message {
	t.Helper()
	stream, err := conn.JS.Stream(t.Context(), conn.Names.DeadStream())
	if err != nil {
		t.Fatal(err)
	}
	n := stream.CachedInfo().State.LastSeq
	if int(n) != want {
		t.Fatalf("%d dead letters, want %d", n, want)
	}
	var out []bus.Message
	for seq := uint64(1); seq <= n; seq++ {
		m, err := conn.Get(t.Context(), conn.Names.DeadStream(), seq)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

// A dead letter that has no room beside its headers goes without its body, and
// one that cannot be sent at all does not hold up the events behind it.
func TestDeadLetterTooLarge(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	k := newTask(1)
	size := int(conn.NC.MaxPayload()) - 64 // with our headers it is too large
	publishRaw(t, conn, k.step(1).NATSSubject(conn.Names), bytes.Repeat([]byte("x"), size))
	if got := stored(t, conn, publish(t, conn, k.completed())); len(got) != 1 {
		t.Errorf("%d events are stored, want 1", len(got))
	}
	m := deadLetters(t, conn, 1)[0]
	if len(m.Data) != 0 || m.Header.Get(bus.HeaderOmitted) != strconv.Itoa(size) {
		t.Errorf("dead letter with %d bytes and %v, want none and the size %d", len(m.Data), m.Header, size)
	}
}

// EVT-15: a row that the store refuses for good is found among hundreds, goes to
// the dead letters, and the others are stored in order.
func TestBadRows(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	o := &ordered{t: t}
	bad := map[string]bool{"task-1/step/1": true, "task-1/step/77": true, "task-1/step/78": true, "task-1/step/300": true}
	s := start(t, conn, options{cfg: eventsink.Config{FlushInterval: 200 * time.Millisecond}, open: wrap(t.TempDir(), func(ctx context.Context, next eventsink.Store, records []contract.EventRecord, upTo uint64) (int, error) {
		// The real store refuses a type that is too long.
		records = slices.Clone(records)
		for i := range records {
			if bad[records[i].EventID] {
				records[i].EventType = strings.Repeat("x", 40)
			}
		}
		return o.append(ctx, next, records, upTo)
	})})
	k := newTask(1)
	for i := range 300 {
		publish(t, conn, k.step(i+1))
	}
	got := stored(t, conn, 300)
	if len(got) != 296 {
		t.Errorf("%d events are stored, want 296", len(got))
	}
	for _, r := range got {
		if bad[r.EventID] {
			t.Errorf("%q was stored", r.EventID)
		}
	}
	var seqs []string
	for _, m := range deadLetters(t, conn, 4) {
		seqs = append(seqs, m.Header.Get(bus.HeaderOriginSeq))
		if !strings.Contains(m.Header.Get(bus.HeaderReason), "refused by the store") {
			t.Errorf("reason = %q", m.Header.Get(bus.HeaderReason))
		}
	}
	if want := []string{"1", "77", "78", "300"}; !slices.Equal(seqs, want) {
		t.Errorf("dead letters of %q, want %q", seqs, want)
	}
	s.waitReady("")
}

// I6, I8: a sink that dies while it looks for a bad row has not passed over the
// rows that it had still to store.
func TestCrashAmongBadRows(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	dir := t.TempDir()
	k := newTask(1)
	for i := range 100 {
		publish(t, conn, k.step(i+1))
	}
	hit := make(chan struct{})
	var once sync.Once
	first := start(t, conn, options{
		cfg: eventsink.Config{BatchSize: 100, FlushInterval: time.Hour, DrainTimeout: time.Millisecond},
		open: wrap(dir, func(ctx context.Context, next eventsink.Store, records []contract.EventRecord, upTo uint64) (int, error) {
			if len(records) > 50 {
				return 0, eventsink.ErrRejected
			}
			if records[0].Seq == 1 {
				return next.Append(ctx, records, upTo)
			}
			once.Do(func() { close(hit) })
			<-ctx.Done() // the process stops here
			return 0, ctx.Err()
		}),
	})
	<-hit
	first.stop()
	start(t, conn, options{open: sqlite.Opener(dir)})
	if got := stored(t, conn, 100); len(got) != 100 {
		t.Errorf("%d events are stored, want 100", len(got))
	}
}

// EVT-20, F-152, F-154: a NUL in a value, a key or deep in a list is replaced by a
// character that shows, with a mark; an honest backslash stays what it is; and
// the rest comes back as structured as it was.
func TestNUL(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	run := task{tenant: "default", thread: "t", run: "run-1"}
	data := `{"run_id":"run-1","message_index":1,"message":{"kind":"ai","text":"x","truncated":false,"tool_calls":[{"name":"bash","args":{"out":"a\u0000b","ke\u0000y":1,"list":[["x",{"deep":"\u0000"}]],"visible":"\\u0000 stays","mixed":"\\u0000|\u0000|\\\\u0000","lone":"\ud800"}}]}}`
	ev := run.event("n1", contract.EventRunMessage, json.RawMessage(data))
	ev.Data = json.RawMessage(data)
	got := stored(t, conn, publish(t, conn, ev))
	if len(got) != 1 {
		t.Fatalf("%d events are stored, want 1", len(got))
	}
	var content struct {
		Message struct {
			ToolCalls []struct {
				Args map[string]any `json:"args"`
			} `json:"tool_calls"`
		} `json:"message"`
	}
	if err := json.Unmarshal(got[0].Content, &content); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"out": "a\uFFFDb", "ke\uFFFDy": 1.0, "list": []any{[]any{"x", map[string]any{"deep": "\uFFFD"}}},
		"visible": `\u0000 stays`, "mixed": `\u0000|` + "\uFFFD" + `|\\u0000`, "lone": "\uFFFD",
	}
	if args := content.Message.ToolCalls[0].Args; !reflect.DeepEqual(args, want) {
		t.Errorf("args = %q, want %q", args, want)
	}
	var meta map[string]any
	if err := json.Unmarshal(got[0].Metadata, &meta); err != nil || meta["sanitized"] != true {
		t.Errorf("metadata = %s, %v, want the mark sanitized", got[0].Metadata, err)
	}
}

// F-160, EVT-04: the last event of a task whose start was never seen is stored, and
// the start that comes after a restart does not change it.
func TestEndWithoutStart(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	dir := t.TempDir()
	k := newTask(9)
	s := start(t, conn, options{open: sqlite.Opener(dir)})
	before := stored(t, conn, publish(t, conn, k.completed()))
	if len(before) != 1 || before[0].EventType != contract.RecordEnd {
		t.Fatalf("stored %+v, want the end", before)
	}
	s.stop()
	start(t, conn, options{open: sqlite.Opener(dir)})
	after := stored(t, conn, publish(t, conn, k.started()))
	if len(after) != 2 || !reflect.DeepEqual(after[0], before[0]) || after[1].EventType != contract.RecordStart {
		t.Errorf("stored %+v, want the end as it was and the start", after)
	}
}

// I6, I8: the broker goes away and comes back; the sink says so, and goes on.
func TestBrokerRestart(t *testing.T) {
	t.Parallel()
	srv, conn := natstest.New(t)
	o := &ordered{t: t}
	s := start(t, conn, options{open: wrap(t.TempDir(), o.append)})
	k := newTask(1)
	stored(t, conn, publish(t, conn, k.started()))
	for round := range 3 {
		srv.Kill()
		s.waitReady("NATS was lost")
		srv.Restart()
		c := srv.Conn("publisher")
		for i := range 50 {
			publish(t, c, k.step(round*50+i+1))
		}
		if got := stored(t, c, uint64(1+(round+1)*50)); len(got) != 1+(round+1)*50 {
			t.Fatalf("%d events are stored after restart %d, want %d", len(got), round+1, 1+(round+1)*50)
		}
		s.waitReady("")
	}
}

// A stream that was made anew counts from 1 again: its events must not be taken
// for duplicates. The sink stores nothing and says what to do.
func TestStreamRecreated(t *testing.T) {
	t.Parallel()
	srv, conn := natstest.New(t)
	dir := t.TempDir()
	s := start(t, conn, options{open: sqlite.Opener(dir)})
	k := newTask(1)
	publish(t, conn, k.started())
	stored(t, conn, publish(t, conn, k.completed()))
	if err := conn.JS.DeleteStream(t.Context(), conn.Names.EventStream()); err != nil {
		t.Fatal(err)
	}
	s.waitReady("herdgate provision")
	srv.Provision(provision.Config{MaxRunning: 3, MaxQueued: 64})
	s.waitReady("move that database away")
	publish(t, conn, newTask(2).completed())
	publish(t, conn, newTask(3).completed())
	publish(t, conn, newTask(4).completed())
	s.stop()

	// Restarting does not help, another data directory does.
	s = start(t, conn, options{open: sqlite.Opener(dir)})
	s.waitReady("move that database away")
	s.stop()
	start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	if got := stored(t, conn, 3); len(got) != 3 {
		t.Errorf("%d events are stored in a new database, want 3", len(got))
	}
}

// The same trouble without a new stream: the database is ahead of its end.
func TestStreamLostItsEnd(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	dir := t.TempDir()
	db, err := sqlite.Open(t.Context(), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := conn.JS.Stream(t.Context(), conn.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Bind(t.Context(), eventsink.Origin{Stream: conn.Names.EventStream(), Created: stream.CachedInfo().Created}); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Append(t.Context(), nil, 10); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	publish(t, conn, newTask(1).completed())
	s := start(t, conn, options{open: sqlite.Opener(dir)})
	s.waitReady("up to 10, but stream HG_EVENTS ends at 1")
}

// The same, after the stream was filled again beyond what is stored: the events that
// took the numbers of stored ones would never be.
func TestStreamLostItsEndAndGrew(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	dir := t.TempDir()
	k := newTask(1)
	s := start(t, conn, options{open: sqlite.Opener(dir)})
	publish(t, conn, k.started())
	stored(t, conn, publish(t, conn, k.step(1)))
	s.stop()
	// As if the stream had held another event there.
	db, err := sql.Open("sqlite", filepath.Join(dir, sqlite.File))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), "UPDATE events SET event_id = 'lost' WHERE seq = 2"); err != nil {
		t.Fatal(err)
	}
	publish(t, conn, k.completed())
	s = start(t, conn, options{open: sqlite.Opener(dir)})
	s.waitReady(`its newest event is "lost" at 2, but stream HG_EVENTS has "task-1/step/1" there`)
	// What the stream no longer has proves nothing.
	stream, err := conn.JS.Stream(t.Context(), conn.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.DeleteMsg(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	s.waitReady("")
	if got := ids(stored(t, conn, 3)); !slices.Equal(got, []string{"task-1/started", "lost", "task-1/end"}) {
		t.Errorf("stored are %q", got)
	}
}

// An older copy of the database catches up from the stream.
func TestDatabaseRestored(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	s := start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	k := newTask(1)
	publish(t, conn, k.started())
	stored(t, conn, publish(t, conn, k.completed()))
	waitConsumer(t, conn, func(i *jetstream.ConsumerInfo) bool { return i.AckFloor.Stream == 2 })
	s.stop()
	start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	if got := stored(t, conn, 2); len(got) != 2 {
		t.Errorf("%d events are stored in an empty database, want 2", len(got))
	}
}

// Of two sinks on one database one works; the other stands by, is ready, and
// takes over.
func TestStandby(t *testing.T) {
	t.Parallel()
	srv, conn := natstest.New(t)
	dir := t.TempDir()
	first := start(t, conn, options{open: sqlite.Opener(dir)})
	k := newTask(1)
	stored(t, conn, publish(t, conn, k.started()))
	second := start(t, srv.Conn("second"), options{open: sqlite.Opener(dir)})
	second.waitReady("")
	stored(t, conn, publish(t, conn, k.step(1)))
	if n := second.metric("events_stored_total"); n != 0 {
		t.Errorf("the second sink stored %v events beside the first", n)
	}
	first.stop()
	if got := stored(t, conn, publish(t, conn, k.completed())); len(got) != 3 {
		t.Errorf("%d events are stored, want 3", len(got))
	}
	if n := second.metric("events_stored_total"); n != 1 {
		t.Errorf("the second sink stored %v events, want 1", n)
	}
}

// Deliveries that go astray, here to another reader of the same consumer, are
// noticed and asked for again, and the order is kept.
func TestLostDeliveries(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	o := &ordered{t: t}
	s := start(t, conn, options{open: wrap(t.TempDir(), o.append)})
	k := newTask(1)
	stored(t, conn, publish(t, conn, k.started()))
	c, err := conn.JS.Consumer(t.Context(), conn.Names.EventStream(), conn.Names.SinkConsumer())
	if err != nil {
		t.Fatal(err)
	}
	thief, err := c.Fetch(20, jetstream.FetchMaxWait(5*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	// The other reader's request must be with the server before the events are.
	waitConsumer(t, conn, func(i *jetstream.ConsumerInfo) bool { return i.NumWaiting >= 2 })
	for i := range 100 {
		publish(t, conn, k.step(i+1))
	}
	if got := stored(t, conn, 101); len(got) != 101 {
		t.Errorf("%d events are stored, want 101", len(got))
	}
	stolen := 0
	for range thief.Messages() {
		stolen++
	}
	if stolen == 0 {
		t.Fatal("the other reader got nothing: this test tested nothing")
	}
	if n := s.metric("restarts_total"); n < 1 {
		t.Errorf("restarts_total = %v, want some", n)
	}
}

// EVT-15: a write that takes longer than the server waits for its acknowledgement
// is stored once, without starting again.
func TestSlowStore(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	shortAckWait(t, conn)
	o := &ordered{t: t}
	goOn := make(chan struct{})
	s := start(t, conn, options{open: wrap(t.TempDir(), func(ctx context.Context, next eventsink.Store, records []contract.EventRecord, upTo uint64) (int, error) {
		<-goOn
		return o.append(ctx, next, records, upTo)
	})})
	k := newTask(1)
	for i := range 20 {
		publish(t, conn, k.step(i+1))
	}
	waitConsumer(t, conn, func(i *jetstream.ConsumerInfo) bool { return i.NumRedelivered > 0 })
	close(goOn)
	if got := stored(t, conn, 20); len(got) != 20 {
		t.Errorf("%d events are stored, want 20", len(got))
	}
	natstest.Eventually(t, within, func() (bool, string) {
		n := s.metric("redeliveries_total")
		return n > 0, fmt.Sprintf("redeliveries_total = %v", n)
	})
	if r, d := s.metric("restarts_total"), s.metric("events_duplicate_total"); r != 0 || d != 0 {
		t.Errorf("restarts %v, duplicates %v, want none", r, d)
	}
	waitConsumer(t, conn, func(i *jetstream.ConsumerInfo) bool { return i.NumAckPending == 0 })
}

// I10: a batch has one span, in a trace of its own, with a link to the newest event of
// each trace in it that is recorded. Where none is, there is no span.
func TestTrace(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	spans := tracetest.NewSpanRecorder()
	tp := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans), sdktrace.WithSampler(telemetry.Sampler(0)))
	traceOf := func(id, span int, flags string) string {
		return fmt.Sprintf("00-%032x-%016x-%s", id, span, flags)
	}
	var last uint64
	for i, parent := range []string{
		traceOf(1, 11, "01"), traceOf(2, 21, "01"), traceOf(1, 12, "01"), "", traceOf(3, 31, "00"), traceOf(1, 13, "01"),
	} {
		ev := newTask(1).step(i + 1)
		ev.TraceParent = parent
		last = publish(t, conn, ev)
	}
	// Started last, so that all are in one batch.
	s := start(t, conn, options{cfg: eventsink.Config{BatchSize: 6, FlushInterval: time.Hour}, open: sqlite.Opener(t.TempDir()), tracer: tp})
	stored(t, conn, last)
	s.stop()
	ended := spans.Ended()
	if len(ended) != 1 {
		t.Fatalf("%d spans, want 1", len(ended))
	}
	sp := ended[0]
	if sp.Parent().IsValid() || sp.SpanKind() != trace.SpanKindConsumer || sp.Name() != "process "+telemetry.EventTemplate(conn.Names.Prefix()) {
		t.Errorf("span %q %s with parent %v; want a consumer without a parent", sp.Name(), sp.SpanKind(), sp.Parent())
	}
	if !slices.Contains(sp.Attributes(), telemetry.AttrMessagingBatchCount.Int(6)) {
		t.Errorf("attributes %v; want 6 events", sp.Attributes())
	}
	var got []string
	for _, l := range sp.Links() {
		got = append(got, fmt.Sprintf("%s %s", l.SpanContext.TraceID().String()[30:], l.SpanContext.SpanID()))
	}
	want := []string{fmt.Sprintf("01 %016x", 13), fmt.Sprintf("02 %016x", 21)} // the third trace is not sampled
	if !slices.Equal(got, want) {
		t.Errorf("links = %v, want %v", got, want)
	}
}

// A sink whose database cannot be opened says why, keeps trying, and begins when
// it can.
func TestOpenLater(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	dir := t.TempDir()
	allowed := make(chan struct{})
	open := sqlite.Opener(dir)
	s := start(t, conn, options{open: func(ctx context.Context, waiting func()) (eventsink.Store, error) {
		select {
		case <-allowed:
			return open(ctx, waiting)
		default:
			return nil, errors.New("the disk sleeps")
		}
	}})
	s.waitReady("the disk sleeps")
	seq := publish(t, conn, newTask(1).completed())
	close(allowed)
	if got := stored(t, conn, seq); len(got) != 1 {
		t.Errorf("%d events are stored, want 1", len(got))
	}
	s.waitReady("")
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	good := eventsink.Deps{Bus: conn, Open: sqlite.Opener(t.TempDir())}
	for want, c := range map[string]eventsink.Config{
		"eventsink.batch_size: must be 1 to 10000, got -1":    {BatchSize: -1},
		"eventsink.batch_size: must be 1 to 10000, got 10001": {BatchSize: 10001},
		"eventsink.flush_interval_ms":                         {FlushInterval: -1},
	} {
		if _, err := eventsink.New(c, good); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New(%+v) = %v, want %q", c, err, want)
		}
	}
	if _, err := eventsink.New(eventsink.Config{}, eventsink.Deps{}); err == nil {
		t.Error("New without dependencies succeeded")
	}
}
