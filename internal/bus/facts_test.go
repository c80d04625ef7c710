package bus_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// The tests of this file run again what the admission protocol takes for
// granted about the server. When one fails, the protocol has to be thought
// through again, not the test.

// ADM-04: the bound is exact however many publish at once, and a request that
// is removed by its sequence makes room for one more.
func TestFactBoundIsExact(t *testing.T) {
	t.Parallel()
	s, c := natstest.New(t)
	ctx := testContext(t)
	var accepted, full atomic.Int64
	var wg sync.WaitGroup
	for i := range 4 {
		conn := s.Conn(fmt.Sprint("lead-", i))
		for j := range 20 {
			wg.Go(func() {
				_, err := conn.Publish(ctx, bus.Write{Subject: conn.Names.TaskRequest("default", contract.TaskID(fmt.Sprintf("t%d-%d", i, j)))})
				switch {
				case err == nil:
					accepted.Add(1)
				case errors.Is(err, bus.ErrFull):
					full.Add(1)
				default:
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	if accepted.Load() != 67 || full.Load() != 13 {
		t.Fatalf("of 80 requests %d were accepted and %d refused; want 67 and 13", accepted.Load(), full.Load())
	}

	stream := c.Names.WorkStream()
	if err := c.DeleteMsg(ctx, stream, 30); err != nil {
		t.Fatal(err)
	}
	put(t, c, bus.Write{Subject: c.Names.TaskRequest("default", "late")})
	refused(t, c, "one place was free", bus.Write{Subject: c.Names.TaskRequest("default", "later")}, bus.ErrFull)
	// What was refused left nothing behind: the sequences have no holes.
	str, err := c.JS.Stream(ctx, stream)
	if err != nil {
		t.Fatal(err)
	}
	if st := str.CachedInfo().State; st.Msgs != 67 || st.LastSeq != 68 {
		t.Errorf("%d requests up to sequence %d; want 67 up to 68", st.Msgs, st.LastSeq)
	}
}

// A subject that was removed may be stored again: a finished task's id is not
// refused by the queue, only by its record.
func TestFactRemovedSubjectIsFree(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	subject := c.Names.TaskRequest("default", "t1")
	seq := put(t, c, bus.Write{Subject: subject})
	if err := c.DeleteMsg(testContext(t), c.Names.WorkStream(), seq); err != nil {
		t.Fatal(err)
	}
	if again := put(t, c, bus.Write{Subject: subject}); again <= seq {
		t.Errorf("sequence %d after %d; want a later one", again, seq)
	}
}

// W5, W6: writes on absent records carry the leader's revision.
func TestFactLeaderFence(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	leader := c.KV(contract.LeaderKey)
	grant := func(task string, rev uint64) bus.Write {
		return bus.Write{Subject: c.KV("task." + task), Data: []byte("granted"), Expect: bus.Seq(rev), ExpectSubject: leader}
	}
	first := put(t, c, bus.Write{Subject: leader, TTL: time.Minute, Expect: bus.Seq(0)})
	put(t, c, grant("t1", first))
	put(t, c, grant("t2", first)) // other keys do not move the fence

	second := put(t, c, bus.Write{Subject: leader, TTL: time.Minute, Expect: bus.Seq(first)})
	refused(t, c, "revision before the renewal", grant("t3", first), bus.ErrConflict)
	put(t, c, grant("t3", second))

	// D1: the fence alone does not protect an existing record.
	put(t, c, bus.Write{Subject: c.KV("task.t1"), Data: []byte("completed")})
	put(t, c, grant("t1", second))
	if m, err := c.Last(testContext(t), c.TaskStream(), c.KV("task.t1")); err != nil || string(m.Data) != "granted" {
		t.Errorf("record = %q, %v; the fence was expected to let the overwrite through", m.Data, err)
	}

	// D2: once the leader key was moved on, a grant that is still under way is refused.
	third := put(t, c, bus.Write{Subject: leader, TTL: time.Minute, Expect: bus.Seq(second)})
	refused(t, c, "grant in doubt, key moved on", grant("t4", second), bus.ErrConflict)
	put(t, c, grant("t4", third))
}

// A leader whose key has expired is refused by the marker, before anybody else
// has won the key; whoever wins it expects the marker's revision.
func TestFactExpiredLeaderIsRefused(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	leader := c.KV(contract.LeaderKey)
	old := put(t, c, bus.Write{Subject: leader, TTL: time.Second, Expect: bus.Seq(0)})
	marker := expired(t, c, contract.LeaderKey)
	refused(t, c, "expired leader grants", bus.Write{Subject: c.KV("task.t1"), Expect: bus.Seq(old), ExpectSubject: leader}, bus.ErrConflict)
	refused(t, c, "expired leader renews", bus.Write{Subject: leader, TTL: time.Minute, Expect: bus.Seq(old)}, bus.ErrConflict)
	refused(t, c, "the key is not absent yet", bus.Write{Subject: leader, TTL: time.Minute, Expect: bus.Seq(0)}, bus.ErrConflict)
	put(t, c, bus.Write{Subject: leader, TTL: time.Minute, Expect: bus.Seq(marker.Seq)})
}

// W8, W10: the lease expects the record's revision, so that a renewal is
// refused as soon as the record has moved.
func TestFactLeaseFencedOnRecord(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	record := c.KV("task.t1")
	lease := func(rev uint64) bus.Write {
		return bus.Write{Subject: c.KV("lease.t1"), TTL: time.Second, Expect: bus.Seq(rev), ExpectSubject: record}
	}
	granted := put(t, c, bus.Write{Subject: record, Data: []byte("granted")})
	put(t, c, lease(granted))
	running := put(t, c, bus.Write{Subject: record, Data: []byte("running"), Expect: bus.Seq(granted)})
	refused(t, c, "first lease after the claim", lease(granted), bus.ErrConflict)
	put(t, c, lease(running))
	put(t, c, lease(running)) // renewals do not move the record

	first := expired(t, c, "lease.t1")
	revived := put(t, c, lease(running))
	if revived <= first.Seq {
		t.Errorf("revived lease has sequence %d, marker %d", revived, first.Seq)
	}
	if again := expired(t, c, "lease.t1"); again.Seq <= revived {
		t.Errorf("second marker %d is not after the revived lease %d", again.Seq, revived)
	}

	put(t, c, bus.Write{Subject: record, Data: []byte("granted again"), Expect: bus.Seq(running)})
	refused(t, c, "renewal after the record moved", lease(running), bus.ErrConflict)
	refused(t, c, "end after the record moved", bus.Write{Subject: record, Expect: bus.Seq(running)}, bus.ErrConflict)
}

// W17: while the marker of a purged record lives, nothing of old gets in; then
// the record is absent.
func TestFactPurgeMarker(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	ctx := testContext(t)
	record := c.KV("task.t1")
	old := put(t, c, bus.Write{Subject: record, Data: []byte("completed")})
	marker := put(t, c, bus.Write{
		Subject: record, TTL: time.Second, Expect: bus.Seq(old),
		Header: nats.Header{"KV-Operation": {"PURGE"}, jetstream.MsgRollup: {jetstream.MsgRollupSubject}},
	})
	refused(t, c, "absent, while the marker lives", bus.Write{Subject: record, Expect: bus.Seq(0)}, bus.ErrConflict)
	refused(t, c, "old revision, while the marker lives", bus.Write{Subject: record, Expect: bus.Seq(old)}, bus.ErrConflict)
	m, err := c.Last(ctx, c.TaskStream(), record)
	if err != nil || m.Seq != marker || !m.Deleted() {
		t.Errorf("purged record = %+v, %v; want the marker", m, err)
	}
	if _, err := c.Get(ctx, c.TaskStream(), old); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("the purged value is still there: %v", err)
	}
	natstest.Eventually(t, 10*time.Second, func() (bool, string) {
		_, err := c.Last(ctx, c.TaskStream(), record)
		return errors.Is(err, bus.ErrNotFound), "the marker is still there"
	})
	refused(t, c, "old revision, marker gone", bus.Write{Subject: record, Expect: bus.Seq(old)}, bus.ErrConflict)
	refused(t, c, "marker's revision, marker gone", bus.Write{Subject: record, Expect: bus.Seq(marker)}, bus.ErrConflict)
	put(t, c, bus.Write{Subject: record, Expect: bus.Seq(0)})
}

// W15: the terminal event expects an empty subject. The id alone is forgotten
// after the dedupe window.
func TestFactTerminalEventOnce(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	ctx := testContext(t)
	// The window is shortened while nothing is stored: the server may arm its
	// timer with the old window when ids are there already.
	str, err := c.JS.Stream(ctx, c.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	cfg := str.CachedInfo().Config
	cfg.Duplicates = time.Second
	if _, err := c.JS.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	terminal := bus.Write{Subject: event(c, "t1", "task_completed"), MsgID: "end", Expect: bus.Seq(0)}
	seq := put(t, c, terminal)
	again := func(w bus.Write, when string) {
		t.Helper()
		ack, err := c.Publish(ctx, w)
		if !errors.Is(err, bus.ErrConflict) && (err != nil || !ack.Duplicate) {
			t.Errorf("terminal event again, %s: %+v, %v; want a conflict or a duplicate", when, ack, err)
		}
	}
	again(terminal, "inside the window")

	// By its id alone an event is stored again when the window has passed.
	idOnly := bus.Write{Subject: event(c, "t2", "task_running"), MsgID: "id"}
	put(t, c, idOnly)
	natstest.Eventually(t, 10*time.Second, func() (bool, string) {
		ack, err := c.Publish(ctx, idOnly)
		if err != nil {
			t.Fatal(err)
		}
		return !ack.Duplicate, "the id is still known"
	})
	again(terminal, "after the window")
	if m, err := c.Last(ctx, c.Names.EventStream(), terminal.Subject); err != nil || m.Seq != seq {
		t.Errorf("terminal event has sequence %d, %v; want the first, %d", m.Seq, err, seq)
	}
}

// W18: events of a task are chained over a wildcard, so that the next step of a
// stale attempt is refused, whatever its type. Other tasks do not disturb.
func TestFactEventChain(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	scope := func(task contract.TaskID) string { return c.Names.TaskEvents("default", "th", "r1", task) }
	step := func(task contract.TaskID, typ string, last uint64) bus.Write {
		return bus.Write{Subject: event(c, task, typ), Expect: bus.Seq(last), ExpectSubject: scope(task)}
	}
	started := put(t, c, step("t1", "task_started", 0))
	put(t, c, step("t10", "task_started", 0)) // not in the scope of t1
	stale := put(t, c, step("t1", "task_running", started))

	second := put(t, c, step("t1", "task_started", stale))
	refused(t, c, "next step of the stale attempt", step("t1", "task_running", stale), bus.ErrConflict)
	put(t, c, step("t1", "task_running", second))
	refused(t, c, "chain from the beginning", step("t1", "task_running", 0), bus.ErrConflict)
}

func event(c *bus.Conn, task contract.TaskID, typ string) string {
	return c.Names.Event(contract.EventSubject{Tenant: "default", Thread: contract.ThreadID("th").Token(), Run: "r1", Task: task, Type: contract.EventType(typ)})
}

// D3: each reader of the queue sees every request in stream order; none takes
// work away from another.
func TestFactReadersDoNotSteal(t *testing.T) {
	t.Parallel()
	s, c := natstest.New(t)
	ctx := testContext(t)
	var want []string
	for i := range 20 {
		subject := c.Names.TaskRequest("default", contract.TaskID(fmt.Sprint("t", i)))
		put(t, c, bus.Write{Subject: subject})
		want = append(want, subject)
	}
	done := errors.New("seen all")
	for i := range 2 {
		var got []string
		err := s.Conn(fmt.Sprint("admission-", i)).Watch(ctx, bus.Watch{Stream: c.Names.WorkStream(), Subjects: []string{c.Names.TaskRequests()}}, func(m bus.Message, pending uint64) error {
			got = append(got, m.Subject)
			if pending == 0 {
				return done
			}
			return nil
		})
		if !errors.Is(err, done) || strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("reader %d saw %v (%v); want all in stream order", i, got, err)
		}
	}
}

// TTLs under a second are refused by the server.
func TestFactShortestTTL(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	_, err := c.Publish(testContext(t), bus.Write{Subject: c.KV("lease.t1"), TTL: 500 * time.Millisecond})
	var api *jetstream.APIError
	if !errors.As(err, &api) || api.ErrorCode != 10165 {
		t.Errorf("TTL of half a second = %v, want refusal 10165", err)
	}
}
