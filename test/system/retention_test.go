package system

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/postgres"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// account is what a reader was told: each sequence once, in order, or within a gap.
type account struct {
	name   string
	thread contract.ThreadID // "" reads everything
	seen   []uint64
	gaps   []wire.Gap
}

// missing is the first sequence of mine that was neither told nor said to be gone.
func (a *account) missing(mine []uint64) uint64 {
	told := map[uint64]bool{}
	for _, seq := range a.seen {
		told[seq] = true
	}
next:
	for _, seq := range mine {
		if told[seq] {
			continue
		}
		for _, g := range a.gaps {
			if g.FromSeq <= seq && seq <= g.ToSeq {
				continue next
			}
		}
		return seq
	}
	return 0
}

// I6, EVT-17, EVT-18: while retention deletes in steps, the stream forgets as well and
// events go on coming, readers by cursor and by stream get each surviving event once, in
// order, and are told of all others that they are gone.
func TestReadersDuringRetention(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		readDuringRetention(t, sqlite.Opener(t.TempDir()))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		readDuringRetention(t, postgres.Opener(pgtest.Start(t).Database(), false))
	})
}

func readDuringRetention(t *testing.T, open eventsink.OpenFunc) {
	s := New(t, Options{Unrecorded: true}) // the history is deleted
	s.SinkOf("sink-1", eventsink.Config{Retention: 100 * time.Millisecond, HouseInterval: 5 * time.Millisecond, BatchSize: 100, FlushInterval: 5 * time.Millisecond}, open)
	_, c := s.Lead("lead-1", t.TempDir())
	natstest.Eventually(t, Timeout, func() (bool, string) {
		_, err := c.ListEvents(timeout(t), client.EventQuery{Limit: 1}, 0)
		return err == nil, fmt.Sprint("the event store does not answer: ", err)
	})
	ctx, cancel := context.WithTimeout(context.Background(), 2*Timeout)
	defer cancel()

	// Events of two threads take turns, so that a reader of one of them sees jumps.
	const events = 500
	threads := []contract.ThreadID{"th-a", "th-b"}
	mine := map[contract.ThreadID][]uint64{}
	for i := range uint64(events) {
		mine[""] = append(mine[""], i+1)
		mine[threads[i%2]] = append(mine[threads[i%2]], i+1)
	}
	publish := func(i int) error {
		th := threads[i%2]
		rec := contract.TaskRecord{TaskID: contract.TaskID("t_" + th), RunID: contract.RunID("r_" + th), ThreadID: th, Tenant: contract.DefaultTenant, State: contract.StateRunning, Attempt: 1, SubagentType: "general-purpose"}
		ev := event.Running(rec, i+1, contract.Step{Kind: contract.StepAI, Text: fmt.Sprint("step ", i)}, "model", nil, "/herdgate/executor/test", time.Now())
		body, err := envelope.Encode(ev)
		if err != nil {
			return err
		}
		_, err = s.Bus.JS.PublishMsg(ctx, &nats.Msg{Subject: ev.NATSSubject(s.Bus.Names), Data: body, Header: nats.Header(ev.Headers())}, jetstream.WithMsgID(ev.ID))
		return err
	}

	var wg sync.WaitGroup
	fail := func(format string, args ...any) { t.Errorf(format, args...); cancel() }
	wg.Go(func() {
		for i := range events {
			if err := publish(i); err != nil {
				fail("publish %d: %v", i, err)
				return
			}
		}
	})
	// The stream lets go of what the store has had.
	purging, stopPurging := context.WithCancel(ctx)
	defer stopPurging()
	var purger sync.WaitGroup
	purger.Go(func() {
		stream, err := s.Bus.JS.Stream(ctx, s.Bus.Names.EventStream())
		if err != nil {
			fail("stream: %v", err)
			return
		}
		for pause.For(purging, 20*time.Millisecond) == nil {
			resp, err := eventapi.List(purging, s.Bus, eventapi.ListRequest{Limit: 1})
			if err == nil && resp.LastSeq > 50 {
				err = stream.Purge(purging, jetstream.WithPurgeSequence(resp.LastSeq-49))
			}
			if err != nil && purging.Err() == nil && !errors.Is(err, eventapi.ErrUnavailable) {
				fail("purge: %v", err)
				return
			}
		}
	})
	accounts := []*account{
		{name: "pages"}, {name: "pages of a thread", thread: "th-a"}, {name: "pages, slowly", thread: "th-b"},
		{name: "stream"}, {name: "stream of a thread", thread: "th-b"}, {name: "stream, slowly", thread: "th-a"}, {name: "stream, cut off"},
	}
	pages := func(a *account, rest time.Duration) {
		for after, err := uint64(0), error(nil); after < events; {
			var page wire.EventPage
			if page, err = c.ListEvents(ctx, client.EventQuery{ThreadID: a.thread, Limit: 50}, after); err != nil {
				fail("%s: %v", a.name, err)
				return
			}
			if page.PrunedSeq > after {
				a.gaps = append(a.gaps, wire.Gap{FromSeq: after + 1, ToSeq: page.PrunedSeq})
				after = page.PrunedSeq
			}
			for _, r := range page.Events {
				a.seen = append(a.seen, r.Seq)
			}
			after = max(after, page.NextAfterSeq)
			if len(page.Events) == 0 || rest > 0 {
				_ = pause.For(ctx, max(rest, 5*time.Millisecond))
			}
			if last := mine[a.thread][len(mine[a.thread])-1]; after >= last {
				return
			}
		}
	}
	streamed := func(a *account, c *client.Client, rest time.Duration) {
		last := mine[a.thread][len(mine[a.thread])-1]
		ctx, done := context.WithCancel(ctx)
		defer done()
		err := c.WithPauses(time.Millisecond, 5*time.Millisecond).Stream(ctx, client.EventQuery{ThreadID: a.thread, OnGap: func(g wire.Gap) {
			if a.gaps = append(a.gaps, g); g.ToSeq >= last {
				done()
			}
		}}, 0, func(r contract.EventRecord) error {
			if a.seen = append(a.seen, r.Seq); r.Seq >= last {
				return client.ErrStop
			}
			if rest > 0 && len(a.seen)%16 == 0 {
				_ = pause.For(ctx, rest)
			}
			return nil
		})
		if err != nil && ctx.Err() == nil {
			fail("%s: %v", a.name, err)
		}
	}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	cut, err := client.New(c.BaseURL(), "", &http.Client{Transport: &unsteady{next: transport, hosts: []string{hostOf(c)}, most: 10}})
	if err != nil {
		t.Fatal(err)
	}
	wg.Go(func() { pages(accounts[0], 0) })
	wg.Go(func() { pages(accounts[1], 0) })
	wg.Go(func() { pages(accounts[2], 50*time.Millisecond) })
	wg.Go(func() { streamed(accounts[3], c, 0) })
	wg.Go(func() { streamed(accounts[4], c, 0) })
	wg.Go(func() { streamed(accounts[5], c, 20*time.Millisecond) })
	wg.Go(func() { streamed(accounts[6], cut, 0) })
	wg.Wait()
	if ctx.Err() != nil {
		t.Error("not all readers came to the end in time")
	}
	stopPurging()
	purger.Wait()

	var pruned uint64
	natstest.Eventually(t, Timeout, func() (bool, string) {
		resp, err := eventapi.List(timeout(t), s.Bus, eventapi.ListRequest{Limit: 1})
		pruned = resp.PrunedSeq
		return err == nil && pruned == events, fmt.Sprint("deleted up to ", pruned, " ", err)
	})
	for _, a := range accounts {
		for i, seq := range a.seen {
			if i > 0 && seq <= a.seen[i-1] {
				t.Fatalf("%s: %d came after %d", a.name, seq, a.seen[i-1])
			}
			if a.thread != "" && mine[a.thread][0]%2 != seq%2 {
				t.Fatalf("%s: %d is of the other thread", a.name, seq)
			}
		}
		for _, g := range a.gaps {
			if g.FromSeq == 0 || g.ToSeq < g.FromSeq || g.ToSeq > events {
				t.Errorf("%s: gap %+v", a.name, g)
			}
		}
		if seq := a.missing(mine[a.thread]); seq > 0 {
			t.Errorf("%s: %d was neither told nor said to be gone; %d events, gaps %v", a.name, seq, len(a.seen), a.gaps)
		}
		t.Logf("%s: %d of %d events, %d gaps", a.name, len(a.seen), len(mine[a.thread]), len(a.gaps))
	}
	// Who comes with an old position after all that is told so, in whatever way it asks.
	stream, err := s.Bus.JS.Stream(timeout(t), s.Bus.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(timeout(t), jetstream.WithPurgeSequence(events+1)); err != nil {
		t.Fatal(err)
	}
	st := openStream(t, hostOf(c), "/v1/events?thread_id=th-a", "Last-Event-ID", "7")
	for {
		b, more := st.next()
		if !more {
			t.Fatal("the stream ended without a gap")
		}
		if b.event == "" {
			continue
		}
		if want := fmt.Sprintf(`{"from_seq":8,"to_seq":%d}`, events); b.event != wire.EventGap || b.data != want || b.id != fmt.Sprint(events) {
			t.Errorf("an old position: %+v, want a gap %s", b, want)
		}
		break
	}
	page, err := c.ListEvents(timeout(t), client.EventQuery{}, 7)
	if err != nil || len(page.Events) != 0 || page.PrunedSeq != events || page.HasMore {
		t.Errorf("a page from an old position: %+v, %v; want none, and all deleted", page, err)
	}
}
