// Package gate is the admission decision: who gets a slot, when, and what is to
// be written about it. It is a pure state machine, (state, event, now) → actions,
// without I/O, goroutines or clocks of its own, so that it can be tested with
// tables, properties and models and without a broker.
//
// A Gate lives for one reign of one leader. It begins empty, is told what the
// streams hold, and decides nothing before that view is complete; when the reign
// ends it is thrown away. Nothing in it has to survive: the queue is the request
// stream, the state of a task is its record.
//
// What always holds:
//
//   - at most MaxRunning tasks hold a slot, counting a grant that is in flight or
//     in doubt; a slot is freed by a terminal record and by nothing else (I1);
//   - first grants follow the order of the request stream (I2);
//   - at most one fenced write is in flight at all, and at most one write for
//     each task;
//   - a request is removed last, after its terminal event is known to be stored (I4).
package gate

import (
	"cmp"
	"container/heap"
	"container/list"
	"maps"
	"slices"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// RetryLost says what becomes of attempts that did not end by themselves.
type RetryLost string

// The policies of executor.retry_lost.
const (
	// RetryNotStarted re-grants attempts that were handed back in order, and ends
	// attempts that were lost: they may have had effects.
	RetryNotStarted RetryLost = "not_started"
	// RetryNever re-grants only what was handed back before any effect.
	RetryNever RetryLost = "never"
	// RetryAlways re-grants lost attempts as well.
	RetryAlways RetryLost = "always"
)

// Config is what a gate is built with. All durations are positive.
type Config struct {
	MaxRunning int
	LeaseTTL   time.Duration
	RetryLost  RetryLost
	// MaxAttempts bounds the attempts of one task under RetryAlways.
	MaxAttempts int
	// CancelGrace is how long a running attempt may take to stop by itself
	// before its record is marked.
	CancelGrace time.Duration
	// OverrunGrace is how far past its time limit a running attempt may go
	// before it is ended from here.
	OverrunGrace time.Duration
	// Retention is how long terminal records are kept, MarkerTTL how long the
	// marker of a purged one lives.
	Retention, MarkerTTL time.Duration
}

// Request is what the gate knows of a stored request. Everything else stays in
// the stream.
type Request struct {
	Seq    uint64
	TaskID contract.TaskID
	Tenant contract.Tenant
	// Deadline is when the wait is over, on the gate's clock.
	Deadline time.Time
	// Invalid says why the request can never be granted; empty when it can.
	Invalid string
}

// Gate decides. Make one with [New]; it is not safe for concurrent use.
type Gate struct {
	cfg      Config
	tasks    map[contract.TaskID]*task
	done     map[contract.TaskID]*ended
	waiting  *list.List // of *task, in stream order
	ends     *list.List // of *task: waiters to be ended, in the order they were found
	slots    map[contract.TaskID]int
	used     map[int]contract.TaskID
	timers   timerHeap
	fenced   *task // whose first write is in flight
	viewDone bool
	workDone bool
	out      []Action
}

// task is a task that is not finished with.
type task struct {
	id  contract.TaskID
	req *Request
	// rec is nil while the record is absent.
	rec *contract.TaskRecord
	rev uint64
	// purged: the record's marker was seen, so the task ended long ago.
	purged bool

	cancel   bool
	cancelAt time.Time
	// leaseAt is when the newest lease was seen; leaseGone that it ran out.
	leaseAt   time.Time
	leaseSeen bool
	leaseGone bool
	runningAt time.Time

	busy        bool // a write of ours is in flight
	sent        int  // the attempt whose grant message is known to be published
	eventStored bool
	orphan      bool          // live without a request: its event is still owed
	place       *list.Element // in waiting
	endPlace    *list.Element // in ends
	end         ending        // why it is in ends
	wake        time.Time     // earliest pending timer
}

type ending struct {
	state contract.State
	code  contract.ErrorCode
	text  string
}

// ended is a terminal task whose request is gone: only its record is left.
type ended struct {
	rev    uint64
	purged bool
	busy   bool
	at     time.Time // when to purge, or to forget
}

// New returns an empty gate.
func New(cfg Config) *Gate {
	return &Gate{
		cfg: cfg, tasks: map[contract.TaskID]*task{}, done: map[contract.TaskID]*ended{},
		waiting: list.New(), ends: list.New(), slots: map[contract.TaskID]int{}, used: map[int]contract.TaskID{},
	}
}

// Apply takes an event and returns what is to be done about it, in order.
func (g *Gate) Apply(ev Event, now time.Time) []Action {
	g.out = nil
	wasOpen := g.Open()
	ev.apply(g, now)
	if !wasOpen && g.Open() {
		for _, t := range g.inOrder() {
			g.consider(t, now)
		}
	}
	g.pump(now)
	return g.out
}

// inOrder returns all tasks, those with a request in the order of the requests:
// what an earlier leader granted and did not tell is told in that order.
func (g *Gate) inOrder() []*task {
	place := func(t *task) uint64 {
		if t.req == nil {
			return 0
		}
		return t.req.Seq
	}
	return slices.SortedFunc(maps.Values(g.tasks), func(a, b *task) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), cmp.Compare(a.id, b.id))
	})
}

// Open reports whether the view is complete, so that the gate decides.
func (g *Gate) Open() bool { return g.viewDone && g.workDone }

// Next is when Apply wants a [Tick], or zero.
func (g *Gate) Next() time.Time {
	if len(g.timers) == 0 {
		return time.Time{}
	}
	return g.timers[0].at
}

// Stats describes the gate. It may count a waiter that has just ended.
type Stats struct {
	Running, Queued int
	// Oldest is the head of the queue, or nil.
	Oldest *Request
	Slots  map[contract.TaskID]SlotInfo
}

// SlotInfo is one slot in use.
type SlotInfo struct {
	Slot      int
	Executor  string
	ExpiresAt time.Time // zero while nobody holds a lease
}

// Stats returns a snapshot (ADM-18).
func (g *Gate) Stats() Stats {
	s := Stats{Running: len(g.slots), Queued: g.waiting.Len(), Slots: make(map[contract.TaskID]SlotInfo, len(g.slots))}
	if e := g.waiting.Front(); e != nil {
		s.Oldest = e.Value.(*task).req
	}
	for id, slot := range g.slots {
		info := SlotInfo{Slot: slot}
		if t := g.tasks[id]; t != nil && t.rec != nil {
			info.Executor = t.rec.Executor
			if t.rec.State == contract.StateRunning && t.leaseSeen && !t.leaseGone {
				info.ExpiresAt = t.leaseAt.Add(g.cfg.LeaseTTL)
			}
		}
		s.Slots[id] = info
	}
	return s
}

// Position is the place of a waiting task, from 1, or 0 when it does not wait.
func (g *Gate) Position(id contract.TaskID) int {
	t := g.tasks[id]
	if t == nil || t.place == nil {
		return 0
	}
	n := 0
	for e := t.place; e != nil; e = e.Prev() {
		n++
	}
	return n
}

// task returns the entry of id, making one when there is none.
func (g *Gate) task(id contract.TaskID) *task {
	t := g.tasks[id]
	if t == nil {
		t = &task{id: id}
		if d := g.done[id]; d != nil {
			// Only a request that is stored again brings an ended task back.
			t.rev, t.purged = d.rev, d.purged
			if !d.purged {
				t.rec = &contract.TaskRecord{TaskID: id, State: contract.StateCompleted}
			}
			t.busy = d.busy
		}
		g.tasks[id] = t
	}
	return t
}

// consider looks at one task and begins at most one write for it.
func (g *Gate) consider(t *task, now time.Time) {
	if t.busy || t == g.fenced || !g.Open() {
		return
	}
	switch {
	case t.rec == nil && t.purged:
		g.finish(t, now)
	case t.rec == nil:
		g.considerWaiter(t, now)
	case t.rec.State.Terminal():
		g.finish(t, now)
	case t.req == nil:
		// Somebody emptied the request stream under a live task.
		t.orphan = true
		g.move(t, g.terminal(t, ending{contract.StateFailed, contract.ErrInternal, "the request of this task is gone from the request stream"}, now))
	case t.rec.State == contract.StateGranted:
		g.considerGranted(t, now)
	case t.rec.State == contract.StateRunning:
		g.considerRunning(t, now)
	case t.rec.State == contract.StateReleased:
		g.considerReleased(t, now)
	}
}

func (g *Gate) considerWaiter(t *task, now time.Time) {
	if t.req == nil {
		// A cancellation may be seen before its request, which comes through
		// another stream; it is remembered for a while. Everything else about a
		// task that is not there is dropped: the keys expire by themselves.
		if until := t.cancelAt.Add(cancelMemory); t.cancel && now.Before(until) {
			g.schedule(t, until)
			return
		}
		g.forget(t)
		return
	}
	if t.endPlace != nil {
		return
	}
	switch {
	case t.req.Invalid != "":
		t.end = ending{contract.StateFailed, contract.ErrInvalidRequest, t.req.Invalid}
	case t.cancel:
		t.end = ending{contract.StateCancelled, "", "cancelled while waiting for a slot"}
	case !now.Before(t.req.Deadline):
		t.end = ending{contract.StateFailed, contract.ErrQueueTimeout, "no slot came free within the queue timeout"}
	default:
		g.schedule(t, t.req.Deadline)
		return
	}
	t.endPlace = g.ends.PushBack(t)
}

// cancelMemory is how long a cancellation waits for its request.
const cancelMemory = time.Minute

func (g *Gate) considerGranted(t *task, now time.Time) {
	switch {
	case t.cancel:
		g.move(t, g.terminal(t, ending{contract.StateCancelled, "", "cancelled before an executor began"}, now))
	case t.sent != t.rec.Attempt:
		t.busy = true
		g.do(SendGrant{TaskID: t.id, RequestSeq: t.req.Seq, Revision: t.rev, Record: *t.rec})
	}
}

func (g *Gate) considerRunning(t *task, now time.Time) {
	if t.runningAt.IsZero() {
		t.runningAt = now
	}
	cancelled := t.cancel || t.rec.CancelRequested
	switch {
	case t.leaseGone && cancelled:
		g.move(t, g.terminal(t, ending{contract.StateCancelled, "", "cancelled; the executor had been lost"}, now))
		return
	case t.leaseGone && g.cfg.RetryLost == RetryAlways && t.rec.Attempt < g.cfg.MaxAttempts:
		next := g.again(t, now)
		next.Lost++
		g.move(t, next)
		return
	case t.leaseGone:
		end := g.terminal(t, ending{contract.StateFailed, contract.ErrExecutorLost, "the executor was lost: its lease ran out before the task ended"}, now)
		end.Lost++
		g.move(t, end)
		return
	}
	if limit := t.rec.TimeoutSeconds; limit > 0 {
		overrun := t.runningAt.Add(time.Duration(limit)*time.Second + g.cfg.OverrunGrace)
		if !now.Before(overrun) {
			g.move(t, g.terminal(t, ending{contract.StateTimedOut, "", "the task ran past its time limit and its executor did not end it"}, now))
			return
		}
		g.schedule(t, overrun)
	}
	if t.cancel && !t.rec.CancelRequested {
		mark := t.cancelAt.Add(g.cfg.CancelGrace)
		if !now.Before(mark) {
			next := *t.rec
			next.CancelRequested = true
			g.move(t, next)
			return
		}
		g.schedule(t, mark)
	}
	// The marker of an expired lease is what normally tells. Where none comes —
	// the lease was gone before this reign, or the server makes no markers — the
	// gate's own clock asks for a look after a whole TTL without a heartbeat.
	overdue := t.leaseAt.Add(g.cfg.LeaseTTL + leaseSlack)
	if !now.Before(overdue) {
		t.busy = true
		g.do(CheckLease{TaskID: t.id})
		return
	}
	g.schedule(t, overdue)
}

// leaseSlack is how late a server removes an expired key at most (measured: 0.4 s).
const leaseSlack = 500 * time.Millisecond

func (g *Gate) considerReleased(t *task, now time.Time) {
	switch {
	case t.cancel:
		g.move(t, g.terminal(t, ending{contract.StateCancelled, "", "cancelled after it had been handed back"}, now))
	case g.cfg.RetryLost == RetryNever && t.rec.Started:
		g.move(t, g.terminal(t, ending{contract.StateFailed, contract.ErrExecutorLost, "the executor stopped before the task ended, and executor.retry_lost is never"}, now))
	default:
		g.move(t, g.again(t, now))
	}
}

// finish brings a terminal task to its end: event, request, record.
func (g *Gate) finish(t *task, now time.Time) {
	switch {
	// A terminal record without a request is finished with: the event comes
	// before the removal.
	case !t.eventStored && !t.purged && (t.req != nil || t.orphan):
		t.busy = true
		g.do(StoreTerminalEvent{TaskID: t.id, Revision: t.rev})
	case t.req != nil:
		t.busy = true
		g.do(RemoveRequest{TaskID: t.id, Seq: t.req.Seq})
	default:
		g.retire(t, now)
	}
}

// retire turns a task that is finished with into the small entry that remembers it.
func (g *Gate) retire(t *task, now time.Time) {
	if g.done[t.id] == nil {
		d := &ended{rev: t.rev, purged: t.purged}
		d.at = now.Add(g.cfg.MarkerTTL)
		if !t.purged {
			// Retention counts from the end, which may lie before this reign.
			d.at = now.Add(g.cfg.Retention)
			if t.rec.FinishedAt != nil {
				d.at = earliest(d.at, t.rec.FinishedAt.Add(g.cfg.Retention))
			}
		}
		g.done[t.id] = d
		g.push(t.id, d.at)
	}
	g.forget(t)
}

func earliest(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func (g *Gate) forget(t *task) {
	g.leaveQueue(t)
	delete(g.tasks, t.id)
}

func (g *Gate) leaveQueue(t *task) {
	if t.place != nil {
		g.waiting.Remove(t.place)
		t.place = nil
	}
	if t.endPlace != nil {
		g.ends.Remove(t.endPlace)
		t.endPlace = nil
	}
}

// pump begins the next fenced write when none is in flight: ends of waiters
// first, they cost nobody anything, then the head of the queue.
func (g *Gate) pump(now time.Time) {
	if !g.Open() || g.fenced != nil {
		return
	}
	if e := g.ends.Front(); e != nil {
		t := e.Value.(*task)
		g.fence(t, g.terminal(t, t.end, now))
		return
	}
	if len(g.slots) >= g.cfg.MaxRunning {
		return
	}
	e := g.waiting.Front()
	if e == nil {
		return
	}
	t := e.Value.(*task)
	slot := 1
	for g.used[slot] != "" {
		slot++
	}
	g.hold(t.id, slot)
	g.fence(t, contract.TaskRecord{TaskID: t.id, Tenant: t.req.Tenant, State: contract.StateGranted, Attempt: 1, Slot: slot, RequestSeq: t.req.Seq, GrantedAt: &now})
}

func (g *Gate) fence(t *task, rec contract.TaskRecord) {
	g.fenced = t
	g.do(FirstWrite{TaskID: t.id, RequestSeq: t.req.Seq, Record: rec})
}

func (g *Gate) move(t *task, rec contract.TaskRecord) {
	t.busy = true
	g.do(MoveRecord{TaskID: t.id, Revision: t.rev, Record: rec, Lost: rec.Lost > t.rec.Lost})
}

// terminal is the task's record with an end. For a waiter it holds the end alone;
// whoever writes it fills in what the request says.
func (g *Gate) terminal(t *task, end ending, now time.Time) contract.TaskRecord {
	rec := contract.TaskRecord{TaskID: t.id}
	if t.rec != nil {
		rec = *t.rec
	} else {
		rec.Tenant, rec.RequestSeq = t.req.Tenant, t.req.Seq
		rec.AdmissionFailure = end.code.AdmissionFailure()
	}
	rec.State, rec.Error, rec.ErrorCode, rec.FinishedAt = end.state, end.text, end.code, &now
	rec.CancelRequested = false
	return rec
}

// again is the record of the next attempt, in the same slot.
func (g *Gate) again(t *task, now time.Time) contract.TaskRecord {
	rec := *t.rec
	rec.State, rec.Attempt, rec.Executor, rec.Started, rec.StartedAt = contract.StateGranted, t.rec.Attempt+1, "", false, nil
	rec.GrantedAt = &now
	return rec
}

func (g *Gate) hold(id contract.TaskID, slot int) {
	g.release(id)
	g.slots[id], g.used[slot] = slot, id
}

func (g *Gate) release(id contract.TaskID) {
	if slot, ok := g.slots[id]; ok {
		delete(g.slots, id)
		if g.used[slot] == id {
			delete(g.used, slot)
		}
	}
}

func (g *Gate) do(a Action) { g.out = append(g.out, a) }

// Timers. An entry whose task has meanwhile settled is looked at and dropped.

func (g *Gate) schedule(t *task, at time.Time) {
	if !t.wake.IsZero() && !at.Before(t.wake) {
		return
	}
	t.wake = at
	g.push(t.id, at)
}

func (g *Gate) push(id contract.TaskID, at time.Time) { heap.Push(&g.timers, timer{at, id}) }

type timer struct {
	at time.Time
	id contract.TaskID
}

type timerHeap []timer

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h timerHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *timerHeap) Push(x any)        { *h = append(*h, x.(timer)) }
func (h *timerHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// Counts returns the slots in use and the tasks that wait.
func (g *Gate) Counts() (running, queued int) { return len(g.slots), g.waiting.Len() }

// Waiting returns the tasks that wait, in the order in which they will be
// granted.
func (g *Gate) Waiting() []contract.TaskID {
	ids := make([]contract.TaskID, 0, g.waiting.Len())
	for e := g.waiting.Front(); e != nil; e = e.Next() {
		ids = append(ids, e.Value.(*task).id)
	}
	return ids
}
