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
//   - at most MaxRunning tasks of a pool hold a slot, counting a grant that is in
//     flight or in doubt; a slot is freed by a terminal record and by nothing else
//     (I1);
//   - first grants follow the order of the request stream (I2), in each pool by
//     itself; a task at one of its limits is passed over and keeps its place;
//   - at most one fenced write is in flight at all, and at most one write for
//     each task;
//   - a request is removed last, after its terminal event is known to be stored (I4).
package gate

import (
	"cmp"
	"container/heap"
	"container/list"
	"fmt"
	"iter"
	"maps"
	"math"
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
	// MaxRunning and Limits are those of the default pool.
	MaxRunning int
	Limits     Limits
	// Pools are the other pools by name. Requests for a pool that is not there
	// wait until they time out; it is for the caller to refuse them.
	Pools map[contract.Pool]Pool
	// Reject ends a request that would have to wait.
	Reject    bool
	LeaseTTL  time.Duration
	RetryLost RetryLost
	// MaxLost is how many attempts of one task may be lost under RetryAlways
	// before it counts as what ends its executors; 0 means 2.
	MaxLost int
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
	// Pool, ThreadID and Type decide where it waits and which limits apply to
	// it. An empty pool is the default pool.
	Pool     contract.Pool
	ThreadID contract.ThreadID
	Type     string
	// QueuedAt is when it was stored, on the server's clock. The gate only tells it.
	QueuedAt time.Time
	// Deadline is when the wait is over, on the gate's clock.
	Deadline time.Time
	// Untold: no leader may have told that it waits.
	Untold bool
	// Invalid says why the request can never be granted; empty when it can.
	Invalid string
	// Code is the error code that belongs to it; empty is invalid_request.
	Code contract.ErrorCode
}

func (r Request) traits() traits { return traits{r.Tenant, r.ThreadID, r.Type} }

// Gate decides. Make one with [New]; it is not safe for concurrent use.
type Gate struct {
	cfg      Config
	tasks    map[contract.TaskID]*task
	done     map[contract.TaskID]*ended
	pools    map[contract.Pool]*pool
	ends     *list.List // of *task: waiters to be ended, in the order they were found
	arrived  *task      // whose request was just stored
	timers   timerHeap
	fenced   *task // whose first write is in flight
	viewDone bool
	workDone bool
	out      []Action
	at       contract.TaskID // that is being looked at
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
	pool        *pool         // where it waits or holds a slot
	place       *list.Element // among those that wait in its pool
	group       *group        // with those of the same keys
	inGroup     *list.Element
	rank        int
	endPlace    *list.Element // in ends
	end         ending        // why it is in ends
	wake        time.Time     // earliest pending timer

	entryPosition, entryDepth int // in the queue of its pool when it began to wait
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

// poisonous says why a task is not run again.
func poisonous(lost int) string {
	return fmt.Sprintf("the task may have crashed executors: %d of its attempts were lost with them; it is not run again", lost)
}

// New returns an empty gate.
func New(cfg Config) *Gate {
	if cfg.MaxLost == 0 {
		cfg.MaxLost = 2
	}
	g := &Gate{
		cfg: cfg, tasks: map[contract.TaskID]*task{}, done: map[contract.TaskID]*ended{}, ends: list.New(),
		pools: map[contract.Pool]*pool{contract.DefaultPool: newPool(contract.DefaultPool, Pool{cfg.MaxRunning, cfg.Limits})},
	}
	for name, p := range cfg.Pools {
		g.pools[name] = newPool(name, p)
	}
	return g
}

// poolOf returns a pool; one that is not configured has no slots to give.
func (g *Gate) poolOf(name contract.Pool) *pool {
	if name == "" {
		name = contract.DefaultPool
	}
	p := g.pools[name]
	if p == nil {
		p = newPool(name, Pool{})
		g.pools[name] = p
	}
	return p
}

// Apply takes an event and returns what is to be done about it, in order.
func (g *Gate) Apply(ev Event, now time.Time) []Action {
	g.out, g.arrived, g.at = nil, nil, ""
	wasOpen := g.Open()
	ev.apply(g, now)
	if !wasOpen && g.Open() {
		g.opened(now)
	}
	g.pump(now)
	if t := g.arrived; t != nil && t.place != nil && t != g.fenced && g.Open() {
		g.tellQueued(t)
	}
	return g.out
}

// opened looks at everything that was read before the gate could decide.
func (g *Gate) opened(now time.Time) {
	all := g.inOrder()
	for _, t := range all {
		g.consider(t, now)
	}
	let, of := map[*pool]int{}, map[*keyUse]int{} // in so far
	for _, t := range all {
		if t.place == nil {
			continue
		}
		if g.cfg.Reject {
			if !t.pool.fits(t, let[t.pool], func(k *keyUse) int { return of[k] }) {
				g.turnAway(t)
				continue
			}
			let[t.pool]++
			for _, k := range t.group.keys {
				of[k]++
			}
		}
		if t.req.Untold {
			g.tellQueued(t)
		}
	}
}

func (g *Gate) tellQueued(t *task) {
	position := t.pool.ranks.rank(t.rank)
	if t.entryPosition == 0 {
		t.entryPosition, t.entryDepth = position, t.pool.order.Len()
	}
	g.do(TellQueued{TaskID: t.id, RequestSeq: t.req.Seq, Position: position})
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

// Considering is the task that was looked at last in this Apply: where Apply
// panics, most likely because of it.
func (g *Gate) Considering() contract.TaskID { return g.at }

// Next is when Apply wants a [Tick], or zero.
func (g *Gate) Next() time.Time {
	if len(g.timers) == 0 {
		return time.Time{}
	}
	return g.timers[0].at
}

// Stats describes the gate. It may count a waiter that has just ended.
type Stats struct {
	// Pools are all pools, the default pool first, then by name.
	Pools []PoolStats
	// Running and Queued count all pools.
	Running, Queued int
	// Oldest is the request that waits longest in any pool, or nil.
	Oldest *Request
	Slots  map[contract.TaskID]SlotInfo
}

// PoolStats is the use of one pool.
type PoolStats struct {
	Name                        contract.Pool
	MaxRunning, Running, Queued int
	// Oldest is the head of the queue, or nil.
	Oldest *Request
}

// SlotInfo is one slot in use.
type SlotInfo struct {
	Pool      contract.Pool
	Slot      int
	Executor  string
	ExpiresAt time.Time // zero while nobody holds a lease
}

// Stats returns a snapshot (ADM-18).
func (g *Gate) Stats() Stats {
	s := Stats{Pools: g.Pools(), Slots: map[contract.TaskID]SlotInfo{}}
	for _, p := range s.Pools {
		s.Running += p.Running
		s.Queued += p.Queued
		if p.Oldest != nil && (s.Oldest == nil || p.Oldest.Seq < s.Oldest.Seq) {
			s.Oldest = p.Oldest
		}
	}
	for _, p := range g.pools {
		for id, held := range p.slots.of {
			info := SlotInfo{Pool: p.name, Slot: held.number}
			if t := g.tasks[id]; t != nil && t.rec != nil {
				info.Executor = t.rec.Executor
				if t.rec.State == contract.StateRunning && t.leaseSeen && !t.leaseGone {
					info.ExpiresAt = t.leaseAt.Add(g.cfg.LeaseTTL)
				}
			}
			s.Slots[id] = info
		}
	}
	return s
}

// Pools returns the use of every pool, the default pool first.
func (g *Gate) Pools() []PoolStats {
	return slices.SortedFunc(g.Use(), func(a, b PoolStats) int {
		return cmp.Or(cmp.Compare(rank(a.Name), rank(b.Name)), cmp.Compare(a.Name, b.Name))
	})
}

func rank(p contract.Pool) int {
	if p == contract.DefaultPool {
		return 0
	}
	return 1
}

// Use goes through the pools, in no order.
func (g *Gate) Use() iter.Seq[PoolStats] {
	return func(yield func(PoolStats) bool) {
		for _, p := range g.pools {
			st := PoolStats{Name: p.name, MaxRunning: p.MaxRunning, Running: p.slots.used(), Queued: p.order.Len()}
			if e := p.order.Front(); e != nil {
				st.Oldest = e.Value.(*task).req
			}
			if !yield(st) {
				return
			}
		}
	}
}

// Position is the place of a waiting task in the queue of its pool, from 1, or 0
// when it does not wait. A task ahead that is held back by a limit counts.
func (g *Gate) Position(id contract.TaskID) int {
	t := g.tasks[id]
	if t == nil || t.place == nil {
		return 0
	}
	return t.pool.ranks.rank(t.rank)
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
	g.at = t.id
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
		t.end = ending{contract.StateFailed, cmp.Or(t.req.Code, contract.ErrInvalidRequest), t.req.Invalid}
	case t.cancel:
		t.end = ending{contract.StateCancelled, "", "cancelled while waiting for a slot"}
	case !now.Before(t.req.Deadline):
		t.end = ending{contract.StateFailed, contract.ErrQueueTimeout, "no slot came free within the queue timeout"}
	default:
		g.schedule(t, t.req.Deadline)
		return
	}
	g.endWaiter(t)
}

// endWaiter puts a task among those to be ended. It does not count as waiting any
// more (ADM-04).
func (g *Gate) endWaiter(t *task) {
	g.leaveQueue(t)
	t.endPlace = g.ends.PushBack(t)
}

// turnAway ends a task that would have to wait where nobody may (ADM-04). That is
// asked once, when the task is first seen: who was let in stays.
func (g *Gate) turnAway(t *task) {
	t.end = ending{contract.StateFailed, contract.ErrQueueFull, "no slot is free, and subagent_runtime.admission_policy is reject"}
	g.endWaiter(t)
}

// cancelMemory is how long a cancellation waits for its request.
const cancelMemory = time.Minute

func (g *Gate) considerGranted(t *task, now time.Time) {
	switch {
	case t.cancel:
		g.move(t, g.terminal(t, ending{contract.StateCancelled, "", "cancelled before an executor began"}, now))
	case t.sent != t.rec.Attempt:
		t.busy = true
		g.do(SendGrant{TaskID: t.id, RequestSeq: t.req.Seq, Revision: t.rev, Record: *t.rec, EntryPosition: t.entryPosition, EntryDepth: t.entryDepth})
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
	case t.leaseGone && g.cfg.RetryLost == RetryAlways && t.rec.Lost+1 < g.cfg.MaxLost:
		next := g.again(t, now)
		next.Lost++
		g.move(t, next)
		return
	case t.leaseGone && g.cfg.RetryLost == RetryAlways:
		// Whatever runs it next might be lost as well.
		end := g.terminal(t, ending{contract.StateFailed, contract.ErrInternal, poisonous(t.rec.Lost + 1)}, now)
		end.Lost++
		g.move(t, end)
		return
	case t.leaseGone:
		end := g.terminal(t, ending{contract.StateFailed, contract.ErrExecutorLost, "the executor was lost: its lease ran out before the task ended; its work may have had effects"}, now)
		end.Lost++
		g.move(t, end)
		return
	}
	if limit := t.rec.TimeoutSeconds; limit > 0 {
		overrun := t.runningAt.Add(time.Duration(limit)*time.Second + g.cfg.OverrunGrace)
		if !now.Before(overrun) {
			g.move(t, g.terminal(t, ending{contract.StateTimedOut, "", fmt.Sprintf("the task did not finish within its limit of %d seconds, and its executor did not end it", limit)}, now))
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
		g.move(t, g.terminal(t, ending{contract.StateFailed, contract.ErrExecutorLost, "the executor stopped before the task ended, and executor.retry_lost is never; its work may have had effects"}, now))
	default:
		g.move(t, g.again(t, now))
	}
}

// finish brings a terminal task to its end: event, request, record. Its slot goes to
// the next one when the event is stored, so that whoever counts starts and ends in
// the stream never finds more tasks at once than there are slots.
func (g *Gate) finish(t *task, now time.Time) {
	switch {
	// A terminal record without a request is finished with: the event comes
	// before the removal.
	case !t.eventStored && !t.purged && (t.req != nil || t.orphan):
		t.busy = true
		g.do(StoreTerminalEvent{TaskID: t.id, Revision: t.rev})
	case t.req != nil:
		g.release(t)
		t.busy = true
		rm := RemoveRequest{TaskID: t.id, Seq: t.req.Seq}
		if t.rec != nil && t.rec.State == contract.StateFailed && t.rec.ErrorCode == contract.ErrInternal && t.rec.Lost >= g.cfg.MaxLost {
			rm.Bury = poisonous(t.rec.Lost)
		}
		g.do(rm)
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
	g.release(t)
	delete(g.tasks, t.id)
}

func (g *Gate) leaveQueue(t *task) {
	if t.place != nil {
		t.pool.remove(t)
	}
	if t.endPlace != nil {
		g.ends.Remove(t.endPlace)
		t.endPlace = nil
	}
}

// pump begins the next fenced write when none is in flight: ends of waiters
// first, they cost nobody anything, then the first of those that may be granted.
func (g *Gate) pump(now time.Time) {
	if !g.Open() || g.fenced != nil {
		return
	}
	if e := g.ends.Front(); e != nil {
		t := e.Value.(*task)
		g.fence(t, g.terminal(t, t.end, now))
		return
	}
	var first *task
	seq := uint64(math.MaxUint64)
	for _, p := range g.pools {
		if t := p.pick(); t != nil && t.req.Seq < seq {
			first, seq = t, t.req.Seq
		}
	}
	if first == nil {
		return
	}
	t := first
	slot := t.pool.take(t.id, 0, t.req.traits())
	g.fence(t, contract.TaskRecord{TaskID: t.id, Tenant: t.req.Tenant, State: contract.StateGranted, Attempt: 1, Slot: slot, RequestSeq: t.req.Seq, GrantedAt: &now})
}

func (g *Gate) fence(t *task, rec contract.TaskRecord) {
	g.at = t.id
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

// hold gives a task the slot that its record names.
func (g *Gate) hold(t *task, rec contract.TaskRecord) {
	p := g.poolOf(rec.Pool)
	if h, ok := p.slots.of[t.id]; ok && t.pool == p && h.number == rec.Slot {
		return
	}
	g.release(t)
	t.pool = p
	p.take(t.id, rec.Slot, traits{rec.Tenant, rec.ThreadID, rec.SubagentType})
}

func (g *Gate) release(t *task) {
	if t.pool != nil {
		t.pool.leave(t.id)
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

// Counts returns the slots in use and the tasks that wait, over all pools.
func (g *Gate) Counts() (running, queued int) {
	for _, p := range g.pools {
		running += p.slots.used()
		queued += p.order.Len()
	}
	return running, queued
}

// Waiting returns the tasks that wait, in the order of the request stream.
func (g *Gate) Waiting() []contract.TaskID {
	var all []*task
	for _, p := range g.pools {
		for e := p.order.Front(); e != nil; e = e.Next() {
			all = append(all, e.Value.(*task))
		}
	}
	slices.SortFunc(all, func(a, b *task) int { return cmp.Compare(a.req.Seq, b.req.Seq) })
	ids := make([]contract.TaskID, len(all))
	for i, t := range all {
		ids[i] = t.id
	}
	return ids
}
