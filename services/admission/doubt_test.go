package admission

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// crossing is a leader behind a proxy, about to make a first write.
type crossing struct {
	*world
	proxy *natstest.Proxy
	fence *fence
	told  chan gate.Event
	first gate.FirstWrite
}

func newCrossing(t *testing.T) *crossing {
	w := newWorld(t, 1, natstest.Listen())
	c := &crossing{world: w, proxy: w.srv.Proxy(), told: make(chan gate.Event, 8)}
	svc, err := New(Config{Name: "adm-1", MaxRunning: 1, LeaderTTL: 30 * time.Second}, Deps{Bus: w.srv.Connect(bus.Config{Name: "adm-1", URL: c.proxy.URL()})})
	if err != nil {
		t.Fatal(err)
	}
	c.fence = w.leader(svc)
	c.fence.tell = func(_ context.Context, ev gate.Event) { c.told <- ev }
	seq := w.submit("t_1")
	b, err := c.fence.get(w.ctx, seq) // while the line is whole
	if err != nil {
		t.Fatal(err)
	}
	c.fence.requests.(*bodies).put(b)
	now := time.Now()
	c.first = gate.FirstWrite{TaskID: "t_1", RequestSeq: seq, Record: contract.TaskRecord{TaskID: "t_1", Tenant: contract.DefaultTenant, State: contract.StateGranted, Attempt: 1, Slot: 1, RequestSeq: seq, GrantedAt: &now}}
	return c
}

// write makes the first write; the result comes when it is settled.
func (c *crossing) write() <-chan error {
	done := make(chan error, 1)
	go func() { done <- c.fence.write(c.ctx, c.first) }()
	return done
}

func (c *crossing) settled(done <-chan error) gate.FirstWritten {
	c.Helper()
	if err := <-done; err != nil {
		c.Fatal(err)
	}
	ev, ok := (<-c.told).(gate.FirstWritten)
	if !ok {
		c.Fatalf("told %+v", ev)
	}
	return ev
}

// ADM-16, protocol W5: the write landed and its acknowledgement was lost; it is
// read back as ours.
func TestFirstWriteLosesItsAnswer(t *testing.T) {
	t.Parallel()
	c := newCrossing(t)
	before := c.fence.rev
	c.proxy.LoseAnswers()
	done := c.write()
	rec := c.reaches("t_1", contract.StateGranted)
	c.proxy.Cut()
	ev := c.settled(done)
	_, rev := c.record("t_1")
	if ev.Outcome != gate.Stored || ev.Revision != rev || ev.Record.Writer != rec.Writer || ev.Record.Epoch != before {
		t.Errorf("told %+v, stored at %d by %s", ev, rev, rec.Writer)
	}
	if c.fence.rev <= before {
		t.Error("the leader key was not moved on")
	}
}

// ADM-16, protocol W5: ours landed and an executor has moved it since.
func TestFirstWriteHasMovedOn(t *testing.T) {
	t.Parallel()
	c := newCrossing(t)
	c.proxy.LoseAnswers()
	done := c.write()
	rec := c.reaches("t_1", contract.StateGranted)
	_, rev := c.record("t_1")
	rec.State, rec.Writer = contract.StateRunning, "ex-1/1"
	rev = c.put(bus.Write{Subject: c.bus.KV(contract.TaskKey("t_1")), Data: encode(t, rec), Expect: bus.Seq(rev)})
	c.proxy.Cut()
	if ev := c.settled(done); ev.Outcome != gate.Stored || ev.Revision != rev || ev.Record.State != contract.StateRunning {
		t.Errorf("told %+v", ev)
	}
}

// ADM-16, protocol W5, section 9: the write is delayed on its way. It is given up
// only after the leader key has moved, so that it is refused when it arrives.
func TestFirstWriteIsDelayed(t *testing.T) {
	t.Parallel()
	c := newCrossing(t)
	c.proxy.Hold()
	done := c.write()
	c.proxy.AwaitHeld(contract.TaskKey("t_1"))
	c.proxy.Cut()
	if ev := c.settled(done); ev.Outcome != gate.Absent {
		t.Fatalf("told %+v", ev)
	}
	// The gate ends the waiter, say. Only then the old write arrives.
	c.first.Record.State = contract.StateCancelled
	if ev := c.settled(c.write()); ev.Outcome != gate.Stored {
		t.Fatalf("told %+v", ev)
	}
	c.proxy.Release("10071") // wrong last sequence
	if rec, _ := c.record("t_1"); rec.State != contract.StateCancelled {
		t.Errorf("the end was written over: %+v", rec)
	}
}

// Protocol W4: a renewal whose answer is lost is read back as ours; the clock
// counts from a send that was answered.
func TestRenewalLosesItsAnswer(t *testing.T) {
	t.Parallel()
	c := newCrossing(t)
	before, key := c.fence.rev, c.bus.KV(contract.LeaderKey)
	c.proxy.LoseAnswers()
	done := make(chan error, 1)
	go func() { done <- c.fence.renew(c.ctx) }()
	natstest.Eventually(t, patience, func() (bool, string) {
		m, err := c.bus.Last(c.ctx, c.bus.TaskStream(), key)
		return err == nil && m.Seq > before, "the renewal has not landed"
	})
	c.proxy.Cut()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if m, err := c.bus.Last(c.ctx, c.bus.TaskStream(), key); err != nil || m.Seq != c.fence.rev {
		t.Errorf("the key is at %d, we think at %d: %v", m.Seq, c.fence.rev, err)
	}
}

// Protocol W4, section 6: somebody else's key deposes, and so does the own clock.
func TestDeposed(t *testing.T) {
	t.Parallel()
	c := newCrossing(t)
	other := c.fence.s.leaderWrite("adm-2/1", c.fence.rev)
	other.Data = encode(t, contract.Leader{Holder: "adm-2", Writer: "adm-2/1"})
	c.put(other)
	if err := c.fence.renew(c.ctx); !errors.Is(err, errDeposed) {
		t.Errorf("renew = %v", err)
	}
	if err := c.fence.write(c.ctx, c.first); !errors.Is(err, errDeposed) {
		t.Errorf("write = %v", err)
	}
	if rec, _ := c.record("t_1"); rec.State != "" {
		t.Errorf("record = %+v", rec)
	}
	c.fence.trusted = time.Now()
	conn := c.fence.s.bus.NC
	sent := conn.Stats().OutMsgs
	if err := c.fence.write(c.ctx, c.first); !errors.Is(err, errDeposed) || conn.Stats().OutMsgs != sent {
		t.Errorf("write after the time = %v, %d messages sent", err, conn.Stats().OutMsgs-sent)
	}
}

// Section 4, step 8: a leader that leaves hands back its own key, also when it
// does not know its newest revision, and nobody else's.
func TestAbdicate(t *testing.T) {
	t.Parallel()
	c := newCrossing(t)
	key := c.bus.KV(contract.LeaderKey)
	stale := c.fence.rev
	if err := c.fence.renew(c.ctx); err != nil {
		t.Fatal(err)
	}
	c.fence.rev = stale // as if the renewal's answer had come too late
	c.fence.abdicate()
	m, err := c.bus.Last(c.ctx, c.bus.TaskStream(), key)
	if err != nil || !m.Deleted() {
		t.Fatalf("the key is still there: %s, %v", m.Data, err)
	}
	c.put(bus.Write{Subject: key, Data: encode(t, contract.Leader{Holder: "adm-2", Writer: "adm-2/1"}), Expect: bus.Seq(m.Seq)})
	c.fence.abdicate()
	if m, err := c.bus.Last(c.ctx, c.bus.TaskStream(), key); err != nil || m.Deleted() {
		t.Errorf("somebody else's key was taken away: %v", err)
	}
}

// Protocol W13: a move whose answer is lost is read back as ours; one that is
// refused is none.
func TestMoveInDoubt(t *testing.T) {
	t.Parallel()
	c := newCrossing(t)
	c.fence.s.metrics = newMetrics(nil, time.Now())
	if ev := c.settled(c.write()); ev.Outcome != gate.Stored {
		t.Fatalf("told %+v", ev)
	}
	rec, rev := c.record("t_1")
	r := &reign{s: c.fence.s}
	next := rec
	next.State, next.Attempt = contract.StateReleased, 1
	c.proxy.LoseAnswers()
	done := make(chan gate.Event, 1)
	go func() { done <- r.move(c.ctx, gate.MoveRecord{TaskID: "t_1", Revision: rev, Record: next}) }()
	c.reaches("t_1", contract.StateReleased)
	c.proxy.Cut()
	_, now := c.record("t_1")
	if ev := (<-done).(gate.Moved); ev.Outcome != gate.Stored || ev.Revision != now {
		t.Errorf("told %+v, stored at %d", ev, now)
	}
	// Judged by what was true before.
	if ev := r.move(c.ctx, gate.MoveRecord{TaskID: "t_1", Revision: rev, Record: next}).(gate.Moved); ev.Outcome != gate.Refused {
		t.Errorf("told %+v", ev)
	}
	if _, after := c.record("t_1"); after != now {
		t.Error("a refused move was stored")
	}
}
