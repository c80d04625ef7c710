package feed

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/lead/internal/feed/feedtest"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var run1 = feedtest.Run{Tenant: "acme", Thread: "th 1/ü", ID: "r_1"}

// timeout only ends tests that hang; a loaded machine is slow.
const timeout = 60 * time.Second

// reader collects a stream.
type reader struct {
	mu     sync.Mutex
	seqs   []uint64
	types  []string
	cats   []string
	gaps   [][2]uint64
	stopAt uint64
}

func (r *reader) emit(rec contract.EventRecord) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seqs, r.types = append(r.seqs, rec.Seq), append(r.types, rec.EventType)
	r.cats = append(r.cats, rec.Category)
	if rec.Seq == r.stopAt {
		return ErrStop
	}
	return nil
}

func (r *reader) gap(from, to uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gaps = append(r.gaps, [2]uint64{from, to})
	return nil
}

func (r *reader) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.seqs)
}

func seqs(from, to uint64) []uint64 {
	var out []uint64
	for i := from; i <= to; i++ {
		out = append(out, i)
	}
	return out
}

func setup(t *testing.T) (*Feed, *bus.Conn, *natstest.Server, context.Context) {
	t.Helper()
	srv, c := natstest.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	t.Cleanup(cancel)
	return New(c, zerolog.Nop()), c, srv, ctx
}

// EVT-13: events are pushed, not polled for. While they are being published,
// readers open at every position; each sees everything after it once.
func TestStreamSeam(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	const n = 200
	for i := 1; i <= 50; i++ {
		feedtest.Publish(t, c, run1.Message(i, "before"))
	}
	var wg sync.WaitGroup
	for after := uint64(0); after <= 50; after += 5 {
		wg.Go(func() {
			r := &reader{stopAt: n}
			if err := f.Stream(ctx, Query{Tenant: "acme", ThreadID: run1.Thread}, after, r.emit, r.gap); err != nil {
				t.Errorf("stream after %d: %v", after, err)
			}
			if want := seqs(after+1, n); !slices.Equal(r.seqs, want) || len(r.gaps) > 0 {
				t.Errorf("stream after %d: %d events, gaps %v; want %d in order, without a gap", after, len(r.seqs), r.gaps, len(want))
			}
		})
	}
	for i := 51; i <= n; i++ {
		feedtest.Publish(t, c, run1.Message(i, "meanwhile"))
	}
	wg.Wait()
}

// History that the stream has dropped comes from the store, with the same
// numbers; what the store does not have either is told as a gap.
func TestStreamHistoryFromTheStore(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		stored uint64 // the store has the events up to here
		want   []uint64
		gaps   [][2]uint64
	}{
		{"store has all", 300, seqs(101, 310), nil},
		{"store is behind", 170, slices.Concat(seqs(101, 170), seqs(251, 310)), [][2]uint64{{171, 250}}},
		{"store has nothing", 0, seqs(251, 310), [][2]uint64{{101, 250}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			f, c, _, ctx := setup(t)
			store := feedtest.NewStore(t, c)
			var records []contract.EventRecord
			for i := 1; i <= 300; i++ {
				ev := run1.Message(i, "text")
				if seq := feedtest.Publish(t, c, ev); seq <= tc.stored {
					records = append(records, feedtest.Record(t, ev, seq))
				}
			}
			store.Load(tc.stored, records...)
			s, err := c.JS.Stream(ctx, c.Names.EventStream())
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Purge(ctx, jetstream.WithPurgeSequence(251)); err != nil {
				t.Fatal(err)
			}
			r := &reader{stopAt: 310}
			done := make(chan error, 1)
			go func() { done <- f.Stream(ctx, Query{Tenant: "acme", RunID: run1.ID}, 100, r.emit, r.gap) }()
			for i := 301; i <= 310; i++ {
				feedtest.Publish(t, c, run1.Message(i, "live"))
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(r.seqs, tc.want) || !slices.Equal(r.gaps, tc.gaps) {
				t.Errorf("got %d events, gaps %v; want %d, gaps %v", len(r.seqs), r.gaps, len(tc.want), tc.gaps)
			}
		})
	}
}

func TestStreamWithoutAStoreIsUnavailable(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	feedtest.Publish(t, c, run1.Message(1, "a"))
	feedtest.Publish(t, c, run1.Message(2, "b"))
	s, err := c.JS.Stream(ctx, c.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(ctx, jetstream.WithPurgeSequence(2)); err != nil {
		t.Fatal(err)
	}
	r := &reader{}
	if err := f.Stream(ctx, Query{Tenant: "acme"}, 0, r.emit, r.gap); !errors.Is(err, leaderr.ErrUnavailable) || len(r.gaps) > 0 {
		t.Errorf("Stream = %v, gaps %v; want ErrUnavailable: the events may still be stored", err, r.gaps)
	}
}

// F-144: the server knows ids of messages for a few minutes only. An event that
// is published again later is in the stream twice, and still one event: in what
// is there, in what comes, and after history from the store.
func TestStreamTellsAnEventOnce(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	again := func(ev envelope.Event) uint64 {
		t.Helper()
		b, err := envelope.Encode(ev)
		if err != nil {
			t.Fatal(err)
		}
		ack, err := c.JS.Publish(ctx, ev.NATSSubject(c.Names), b) // without an id for the server
		if err != nil {
			t.Fatal(err)
		}
		return ack.Sequence
	}
	first := run1.Message(1, "a")
	feedtest.Publish(t, c, first)
	if seq := again(first); seq != 2 {
		t.Fatalf("the event that was published again has sequence %d, want 2", seq)
	}
	r := &reader{stopAt: 6}
	done := make(chan error, 1)
	go func() { done <- f.Stream(ctx, Query{Tenant: run1.Tenant}, 0, r.emit, r.gap) }()
	natstest.Eventually(t, timeout, func() (bool, string) { return r.count() == 1, fmt.Sprint(r.count()) })
	second := run1.Message(2, "b")
	feedtest.Publish(t, c, second)
	again(first)
	again(second)
	if seq := feedtest.Publish(t, c, run1.Message(3, "c")); seq != 6 {
		t.Fatalf("the last event has sequence %d, want 6", seq)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if want := []uint64{1, 3, 6}; !slices.Equal(r.seqs, want) {
		t.Errorf("the stream told %v, want %v", r.seqs, want)
	}
}

// The memory of a stream is bounded, and exact as far as it goes.
func TestRecent(t *testing.T) {
	t.Parallel()
	var r recent
	for i := range 3 * recentIDs {
		id := fmt.Sprint("e-", i)
		if !r.add(id) || r.add(id) {
			t.Fatalf("event %d is not new, or new twice", i)
		}
		if old := i - recentIDs + 1; old >= 0 && r.add(fmt.Sprint("e-", old)) {
			t.Fatalf("event %d was forgotten after %d others", old, recentIDs-1)
		}
	}
	if len(r.known) != recentIDs || len(r.order) != recentIDs {
		t.Errorf("%d and %d ids are known, want %d", len(r.known), len(r.order), recentIDs)
	}
}

// F-018: a position that was never given out is told at once, and nothing is
// replayed as if it were new.
func TestStreamUnknownPosition(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	for i := 1; i <= 5; i++ {
		feedtest.Publish(t, c, run1.Message(i, "old"))
	}
	r := &reader{stopAt: 6}
	told := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- f.Stream(ctx, Query{Tenant: "acme"}, 999, r.emit, func(from, to uint64) error {
			defer close(told)
			return r.gap(from, to)
		})
	}()
	<-told
	feedtest.Publish(t, c, run1.Message(6, "new"))
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(r.seqs, []uint64{6}) || !slices.Equal(r.gaps, [][2]uint64{{6, 999}}) {
		t.Errorf("events %v, gaps %v; want 6 alone and the gap 6-999", r.seqs, r.gaps)
	}
}

// EVT-17: filters by thread, run, task and type; tenants see their own only.
// EVT-16: a feed has sub-agent events too; their category tells them from those
// of the run.
func TestStreamFilters(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	other := feedtest.Run{Tenant: "other", Thread: run1.Thread, ID: run1.ID}
	run2 := feedtest.Run{Tenant: "acme", Thread: run1.Thread, ID: "r_2"}
	thread2 := feedtest.Run{Tenant: "acme", Thread: "th2", ID: "r_3"}
	for _, ev := range []envelope.Event{
		run1.Message(1, "a"),               // 1
		run1.Step("t_1", 1, "b"),           // 2
		run1.Step("t_2", 1, "c"),           // 3
		run2.Message(1, "d"),               // 4
		thread2.Message(1, "e"),            // 5
		thread2.Step("t_3", 1, "f"),        // 6
		run1.End(contract.RunFailed),       // 7
		thread2.End(contract.RunCompleted), // 8
	} {
		feedtest.Publish(t, c, ev)
	}
	foreign := other.Message(1, "foreign") // 9
	foreign.ID += ".other"
	feedtest.Publish(t, c, foreign)
	// An event that claims another tenant than its subject's is nobody's. 10
	forged := other.Message(2, "forged")
	body, err := envelope.Encode(forged)
	if err != nil {
		t.Fatal(err)
	}
	mine := run1.Message(2, "")
	if _, err := c.Publish(ctx, bus.Write{Subject: mine.NATSSubject(c.Names), Data: body}); err != nil {
		t.Fatal(err)
	}
	// Not an event at all. 11
	if _, err := c.Publish(ctx, bus.Write{Subject: mine.NATSSubject(c.Names), Data: []byte("{")}); err != nil {
		t.Fatal(err)
	}
	last := thread2.Message(99, "last") // 12
	feedtest.Publish(t, c, last)

	for name, tc := range map[string]struct {
		q    Query
		want []uint64
	}{
		"tenant":   {Query{Tenant: "acme"}, []uint64{1, 2, 3, 4, 5, 6, 7, 8, 12}},
		"foreign":  {Query{Tenant: "other"}, []uint64{9}},
		"thread":   {Query{Tenant: "acme", ThreadID: run1.Thread}, []uint64{1, 2, 3, 4, 7}},
		"run":      {Query{Tenant: "acme", RunID: "r_1"}, []uint64{1, 2, 3, 7}},
		"task":     {Query{Tenant: "acme", RunID: "r_1", TaskID: "t_2"}, []uint64{3}},
		"types":    {Query{Tenant: "acme", Types: []string{contract.RecordStep, contract.RecordRunFailed}}, []uint64{2, 3, 6, 7}},
		"no types": {Query{Tenant: "acme", RunID: "r_2", Types: []string{}}, []uint64{4}},
	} {
		r := &reader{}
		sctx, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- f.Stream(sctx, tc.q, 0, r.emit, r.gap) }()
		natstest.Eventually(t, timeout, func() (bool, string) {
			return r.count() >= len(tc.want), fmt.Sprintf("%s: %d events", name, r.count())
		})
		stop()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: Stream = %v, want context.Canceled", name, err)
		}
		if !slices.Equal(r.seqs, tc.want) {
			t.Errorf("%s: got %v, want %v", name, r.seqs, tc.want)
		}
		for i, typ := range r.types {
			if want, _, _ := strings.Cut(typ, "."); r.cats[i] != want {
				t.Errorf("%s: %s has category %s, want %s", name, typ, r.cats[i], want)
			}
		}
	}
}

// EVT-12: a task's events keep their order; a run's feed ends after its end,
// whether it is watched live, read later, or filtered.
func TestStreamUntilRunEnd(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	q := Query{Tenant: "acme", RunID: "r_1", UntilRunEnd: true}
	var end uint64
	q.AtEnd = func(seq uint64) { end = seq }
	r := &reader{}
	done := make(chan error, 1)
	go func() { done <- f.Stream(ctx, q, 0, r.emit, r.gap) }()
	feedtest.Publish(t, c, run1.Message(1, "a"))
	feedtest.Publish(t, c, feedtest.Run{Tenant: "acme", Thread: "x", ID: "r_2"}.End(contract.RunCompleted))
	feedtest.Publish(t, c, run1.Step("t_1", 1, "b"))
	feedtest.Publish(t, c, run1.End(contract.RunCancelled))
	late := feedtest.Publish(t, c, run1.Step("t_1", 2, "late"))
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if want := []string{contract.RecordRunMessage, contract.RecordStep, contract.RecordRunCancelled}; !slices.Equal(r.types, want) || end != 4 {
		t.Errorf("live: %v, end %d; want %v, end 4", r.types, end, want)
	}

	for after, want := range map[uint64]int{0: 3, 3: 1, 4: 0, late: 0} {
		r := &reader{}
		if err := f.Stream(ctx, q, after, r.emit, r.gap); err != nil || r.count() != want {
			t.Errorf("later, after %d: %d events, %v; want %d", after, r.count(), err, want)
		}
		over, err := f.Over(ctx, q, after)
		if err != nil || over != (want == 0) {
			t.Errorf("Over after %d = %v, %v", after, over, err)
		}
	}
	q.Types = []string{contract.RecordStep}
	r = &reader{}
	if err := f.Stream(ctx, q, 0, r.emit, r.gap); err != nil || !slices.Equal(r.types, q.Types) {
		t.Errorf("filtered: %v, %v; want one step and the end", r.types, err)
	}
	if over, err := f.Over(ctx, q, 999); err != nil || over {
		t.Errorf("Over after an unknown position = %v, %v; want false: that has to be told", over, err)
	}

	// The end is known to the store alone.
	store := feedtest.NewStore(t, c)
	store.Load(late, feedtest.Record(t, run1.Message(1, "a"), 1), feedtest.Record(t, run1.End(contract.RunCancelled), 4))
	s, err := c.JS.Stream(ctx, c.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(ctx); err != nil {
		t.Fatal(err)
	}
	q.Types = nil
	r = &reader{}
	if err := f.Stream(ctx, q, 0, r.emit, r.gap); err != nil || !slices.Equal(r.seqs, []uint64{1, 4}) {
		t.Errorf("from the store: %v, %v; want 1 and 4", r.seqs, err)
	}
}

// A reader that takes nothing holds up nobody else, and what waits for it is
// bounded: the rest stays in the stream.
func TestStreamSlowReader(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	const n = 160
	blocked, release := make(chan struct{}), make(chan struct{})
	slow := &reader{stopAt: n}
	done := make(chan error, 1)
	go func() {
		var once sync.Once
		done <- f.Stream(ctx, Query{Tenant: "acme"}, 0, func(rec contract.EventRecord) error {
			once.Do(func() { close(blocked); <-release })
			return slow.emit(rec)
		}, slow.gap)
	}()
	// What is no event is skipped, but has to be fetched like one. All of it is
	// more than twice what may wait for a reader.
	ev := run1.Message(1, "first")
	feedtest.Publish(t, c, ev)
	filler := []byte("x" + strings.Repeat(" ", 32<<10))
	for range n - 2 {
		if _, err := c.Publish(ctx, bus.Write{Subject: ev.NATSSubject(c.Names), Data: filler}); err != nil {
			t.Fatal(err)
		}
	}
	feedtest.Publish(t, c, run1.Message(2, "last"))
	<-blocked
	fast := &reader{stopAt: n}
	if err := f.Stream(ctx, Query{Tenant: "acme"}, 0, fast.emit, fast.gap); err != nil || !slices.Equal(fast.seqs, []uint64{1, n}) {
		t.Fatalf("fast reader: events %v, %v", fast.seqs, err)
	}
	s, err := c.JS.Stream(ctx, c.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	pending := uint64(0)
	for info := range s.ListConsumers(ctx).Info() {
		if info.Config.Durable == "" {
			pending = max(pending, info.NumPending)
		}
	}
	if pending < n/2 {
		t.Errorf("only %d of %d events are left in the stream: the blocked reader has buffered the rest", pending, n)
	}
	close(release)
	if err := <-done; err != nil || !slices.Equal(slow.seqs, []uint64{1, n}) {
		t.Errorf("slow reader: events %v, %v; want the first and the last", slow.seqs, err)
	}
}

// An open stream costs little memory, also when its reader takes nothing. It is not
// parallel, so that nothing else fills the heap.
func TestStreamMemory(t *testing.T) {
	f, c, _, ctx := setup(t)
	const readers = 12
	for i := range 200 {
		feedtest.Publish(t, c, run1.Message(i+1, strings.Repeat("x", 8000)))
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	blocked, release := make(chan struct{}, readers), make(chan struct{})
	var wg sync.WaitGroup
	for range readers {
		wg.Go(func() {
			err := f.Stream(ctx, Query{Tenant: "acme"}, 0, func(contract.EventRecord) error {
				blocked <- struct{}{}
				<-release
				return ErrStop
			}, (&reader{}).gap)
			if err != nil {
				t.Error(err)
			}
		})
	}
	for range readers {
		<-blocked
	}
	after := heap()
	each := (int64(after) - int64(before)) / readers
	t.Logf("a reader that takes nothing costs %d KiB", each>>10)
	// The server's own buffers are in this as well.
	if each > 3<<20 {
		t.Errorf("a reader that takes nothing costs %d bytes, want at most 3 MiB", each)
	}
	close(release)
	wg.Wait()
}

func TestStreamSurvivesARestartOfNATS(t *testing.T) {
	t.Parallel()
	f, c, srv, ctx := setup(t)
	r := &reader{stopAt: 20}
	done := make(chan error, 1)
	go func() { done <- f.Stream(ctx, Query{Tenant: "acme"}, 0, r.emit, r.gap) }()
	for i := 1; i <= 10; i++ {
		feedtest.Publish(t, c, run1.Message(i, "a"))
	}
	natstest.Eventually(t, timeout, func() (bool, string) { return r.count() == 10, fmt.Sprint(r.count(), " events") })
	srv.Restart()
	for i := 11; i <= 20; i++ {
		natstest.Eventually(t, timeout, func() (bool, string) {
			_, err := feedtest.TryPublish(c, run1.Message(i, "b"))
			return err == nil, fmt.Sprint(err)
		})
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(r.seqs, seqs(1, 20)) || len(r.gaps) > 0 {
		t.Errorf("got %v, gaps %v; want 1 to 20", r.seqs, r.gaps)
	}
}

func TestStreamEndsWithTheReadersError(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	feedtest.Publish(t, c, run1.Message(1, "a"))
	broken := errors.New("broken pipe")
	r := &reader{}
	if err := f.Stream(ctx, Query{Tenant: "acme"}, 0, func(contract.EventRecord) error { return broken }, r.gap); !errors.Is(err, broken) {
		t.Errorf("Stream = %v, want the error of emit", err)
	}
}

// EVT-17: pages from the store, ascending, filters before the limit.
// EVT-14: batches delay what is stored, so a reader waits for what was published.
func TestList(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	if _, err := f.List(ctx, Query{Tenant: "acme"}); !errors.Is(err, leaderr.ErrUnavailable) {
		t.Errorf("List without a store = %v, want ErrUnavailable", err)
	}
	store := feedtest.NewStore(t, c)
	for i := 1; i <= 7; i++ {
		ev := run1.Message(i, "text")
		store.Load(uint64(i), feedtest.Record(t, ev, feedtest.Publish(t, c, ev)))
	}
	q := Query{Tenant: "acme", RunID: "r_1", Types: []string{}, Limit: 3}
	var got []uint64
	for {
		p, err := f.List(ctx, q)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range p.Events {
			got = append(got, e.Seq)
		}
		if q.AfterSeq = p.NextAfterSeq; !p.HasMore {
			break
		}
	}
	if !slices.Equal(got, seqs(1, 7)) {
		t.Errorf("paging gave %v, want 1 to 7", got)
	}
	if reqs := store.Requests(); len(reqs) != 3 || reqs[0].BarrierSeq != 7 || reqs[0].WaitMS == 0 || len(reqs[0].Types) != 0 {
		t.Errorf("the store was asked %+v; want three pages with barrier 7", reqs)
	}
	feedtest.Publish(t, c, run1.Message(8, "not stored yet"))
	p, err := f.List(ctx, Query{Tenant: "acme", AfterSeq: 7})
	if err != nil || len(p.Events) != 0 || p.Events == nil || !p.HasMore || p.NextAfterSeq != 7 {
		t.Errorf("page of a store that lags = %+v, %v; want empty, more to come after 7", p, err)
	}
	for _, limit := range []int{-1, 2001} {
		if _, err := f.List(ctx, Query{Tenant: "acme", Limit: limit}); !errors.Is(err, leaderr.ErrInvalid) {
			t.Errorf("List with limit %d = %v, want ErrInvalid", limit, err)
		}
	}
	if _, err := f.List(ctx, Query{Tenant: "acme", RunID: "r.*"}); !errors.Is(err, leaderr.ErrInvalid) {
		t.Errorf("List with a pattern = %v, want ErrInvalid", err)
	}
}

// A sink that is started again, or a little later than the lead, is waited for
// instead of refusing the reader.
func TestListWaitsForALateStore(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	type answer struct {
		page Page
		err  error
	}
	got := make(chan answer, 1)
	go func() {
		page, err := f.List(ctx, Query{Tenant: contract.DefaultTenant, Limit: 10})
		got <- answer{page, err}
	}()
	// There was nobody for the first question; the next one finds a store.
	select {
	case a := <-got:
		t.Fatalf("List = %+v, %v before there is a store", a.page, a.err)
	case <-time.After(2 * storePause):
	}
	feedtest.NewStore(t, c).Load(0)
	if a := <-got; a.err != nil {
		t.Errorf("List = %v with a store that came late", a.err)
	}
}
