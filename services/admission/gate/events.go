package gate

import (
	"container/heap"
	"time"

	"github.com/herdgate/herdgate/internal/mutant"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Event is something that a gate is told.
type Event interface{ apply(g *Gate, now time.Time) }

// RequestStored tells of a request, in the order of the stream.
type RequestStored struct{ Request Request }

// WorkRead tells that the past of the request stream is complete.
type WorkRead struct{}

// RecordSeen tells of a record's newest revision.
type RecordSeen struct {
	Revision uint64
	Record   contract.TaskRecord
}

// RecordPurged tells that a record is gone, leaving a marker.
type RecordPurged struct {
	TaskID   contract.TaskID
	Revision uint64
}

// LeaseSeen tells of a heartbeat.
type LeaseSeen struct{ TaskID contract.TaskID }

// LeaseExpired tells that a heartbeat ran out.
type LeaseExpired struct{ TaskID contract.TaskID }

// CancelSeen tells that somebody wants the task to stop.
type CancelSeen struct{ TaskID contract.TaskID }

// ViewRead tells that every write of earlier leaders is in the view or refused
// for good.
type ViewRead struct{}

// Tick tells that time has passed.
type Tick struct{}

// Outcome is what became of a write.
type Outcome int

// The outcomes of writes. A write in doubt is settled before it is told.
const (
	// Stored: it is the record's newest or was at least once.
	Stored Outcome = iota
	// Absent: it did not land and never will.
	Absent
	// Refused: the record had moved.
	Refused
)

// FirstWritten tells what became of a [FirstWrite].
type FirstWritten struct {
	TaskID   contract.TaskID
	Outcome  Outcome
	Revision uint64
	Record   contract.TaskRecord
}

// Moved tells what became of a [MoveRecord].
type Moved struct {
	TaskID   contract.TaskID
	Outcome  Outcome
	Revision uint64
	Record   contract.TaskRecord
}

// GrantSent tells that a grant message is stored.
type GrantSent struct {
	TaskID  contract.TaskID
	Attempt int
}

// RequestSpoiled tells that a request can never be granted, because whatever
// handles it fails through a fault of ours.
type RequestSpoiled struct {
	TaskID contract.TaskID
	Reason string
}

// TerminalEventStored tells that a task's terminal event is stored.
type TerminalEventStored struct{ TaskID contract.TaskID }

// RequestRemoved tells that a request has left the stream.
type RequestRemoved struct{ TaskID contract.TaskID }

// LeaseChecked tells whether a lease was there when it was looked for.
type LeaseChecked struct {
	TaskID contract.TaskID
	Alive  bool
}

// Purged tells that a [PurgeRecord] is done, or refused because the record moved.
type Purged struct{ TaskID contract.TaskID }

// Action is something that a gate wants done.
type Action interface{ action() }

// FirstWrite asks for the first write of a record, fenced by the leader key. At
// most one is in flight.
type FirstWrite struct {
	TaskID     contract.TaskID
	RequestSeq uint64
	Record     contract.TaskRecord
}

// MoveRecord asks for a write that expects the record's own revision.
type MoveRecord struct {
	TaskID   contract.TaskID
	Revision uint64
	Record   contract.TaskRecord
	// Lost: it is moved because its attempt was lost.
	Lost bool
}

// SendGrant asks for the events and the message of a grant.
type SendGrant struct {
	TaskID     contract.TaskID
	RequestSeq uint64
	Revision   uint64
	Record     contract.TaskRecord
	// EntryPosition and EntryDepth tell the queue of its pool when the task began to
	// wait; 0 for one that did not have to, or began before this gate.
	EntryPosition, EntryDepth int
}

// TellQueued asks for the event that a task has begun to wait.
type TellQueued struct {
	TaskID     contract.TaskID
	RequestSeq uint64
	Position   int
}

// StoreTerminalEvent asks that the event of a terminal record is stored.
type StoreTerminalEvent struct {
	TaskID   contract.TaskID
	Revision uint64
}

// RemoveRequest asks that a request leaves the stream.
type RemoveRequest struct {
	TaskID contract.TaskID
	Seq    uint64
	// Bury, when not empty, is why it is to be kept among the dead letters first.
	Bury string
}

// CheckLease asks to look for a lease in the stream leader's own copy.
type CheckLease struct{ TaskID contract.TaskID }

// PurgeRecord asks that a record whose retention is over goes. A cancellation goes
// by itself, it was written with a time to live.
type PurgeRecord struct {
	TaskID   contract.TaskID
	Revision uint64
}

func (FirstWrite) action()         {}
func (MoveRecord) action()         {}
func (SendGrant) action()          {}
func (TellQueued) action()         {}
func (StoreTerminalEvent) action() {}
func (RemoveRequest) action()      {}
func (CheckLease) action()         {}
func (PurgeRecord) action()        {}

func (e RequestStored) apply(g *Gate, now time.Time) {
	t := g.task(e.Request.TaskID)
	if t.req != nil && t.req.Seq == e.Request.Seq {
		return
	}
	if t.req != nil || t.rec != nil && t.rec.Tenant != "" && t.rec.Tenant != e.Request.Tenant {
		// Another tenant's request under an id that is taken: it gets no place,
		// and nobody learns anything from it.
		g.do(RemoveRequest{TaskID: "", Seq: e.Request.Seq})
		return
	}
	req := e.Request
	t.req = &req
	if t.rec == nil && !t.purged {
		t.pool = g.poolOf(req.Pool)
		t.pool.add(t)
		g.arrived = t
	}
	g.consider(t, now)
	if g.cfg.Reject && g.Open() && t.place != nil && t.pool.overfull(t, g.fenced) {
		g.turnAway(t)
	}
}

func (WorkRead) apply(g *Gate, _ time.Time) { g.workDone = true }

func (ViewRead) apply(g *Gate, now time.Time) {
	g.viewDone = true
	for _, t := range g.tasks {
		if !t.leaseSeen {
			t.leaseAt = now // a lease that is missing proves nothing yet
		}
	}
}

func (e RecordSeen) apply(g *Gate, now time.Time) {
	if d := g.done[e.Record.TaskID]; d != nil {
		if e.Revision > d.rev {
			d.rev = e.Revision
		}
		return
	}
	g.record(g.task(e.Record.TaskID), e.Record, e.Revision, now)
}

// record takes over a newer revision of a task's record.
func (g *Gate) record(t *task, rec contract.TaskRecord, rev uint64, now time.Time) {
	if rev > t.rev {
		fresh := t.rec == nil || t.rec.Attempt != rec.Attempt || t.rec.State != rec.State
		// Of a terminal record only the frame is kept: results may be large.
		rec.Result, rec.ResultRef = "", nil
		if rec.State.Terminal() {
			rec.Error, rec.Description = "", ""
		}
		if t.rec != nil && t.rec.Attempt != rec.Attempt {
			// The heartbeat that was seen belongs to an earlier attempt.
			t.leaseSeen, t.leaseGone, t.leaseAt = false, false, now
		}
		t.rec, t.rev = &rec, rev
		g.leaveQueue(t)
		// With an end the slot is free, but not yet given to the next: see finish.
		if rec.State.Live() {
			g.hold(t, rec)
		}
		if fresh && rec.State == contract.StateRunning {
			t.runningAt = now
			if !t.leaseSeen {
				t.leaseAt = now
			}
		}
	}
	g.consider(t, now)
}

func (e RecordPurged) apply(g *Gate, now time.Time) {
	if t := g.tasks[e.TaskID]; t != nil && e.Revision > t.rev {
		t.rec, t.rev, t.purged = nil, e.Revision, true
		g.leaveQueue(t)
		g.release(t)
		g.consider(t, now)
		return
	}
	d := g.done[e.TaskID]
	if d == nil {
		d = &ended{}
		g.done[e.TaskID] = d
	}
	d.rev, d.purged, d.at = e.Revision, true, now.Add(g.cfg.MarkerTTL)
	g.push(e.TaskID, d.at)
}

func (e LeaseSeen) apply(g *Gate, now time.Time) {
	if g.done[e.TaskID] != nil {
		return
	}
	t := g.task(e.TaskID)
	t.leaseSeen, t.leaseGone, t.leaseAt = true, false, now
	g.consider(t, now)
}

func (e LeaseExpired) apply(g *Gate, now time.Time) {
	if g.done[e.TaskID] != nil {
		return
	}
	t := g.task(e.TaskID)
	t.leaseSeen, t.leaseGone = true, true
	g.consider(t, now)
}

func (e LeaseChecked) apply(g *Gate, now time.Time) {
	t := g.tasks[e.TaskID]
	if t == nil {
		return
	}
	t.busy = false
	if e.Alive {
		t.leaseSeen, t.leaseAt = true, now
	} else {
		t.leaseGone = true
	}
	g.consider(t, now)
}

func (e CancelSeen) apply(g *Gate, now time.Time) {
	if g.done[e.TaskID] != nil {
		return
	}
	t := g.task(e.TaskID)
	if !t.cancel {
		t.cancel, t.cancelAt = true, now
	}
	g.consider(t, now)
}

func (e FirstWritten) apply(g *Gate, now time.Time) {
	t := g.fenced
	if t == nil || t.id != e.TaskID {
		return
	}
	g.fenced = nil
	switch e.Outcome {
	case Stored:
		g.record(t, e.Record, e.Revision, now)
		return
	case Absent:
		if t.rec == nil {
			g.release(t)
			if mutant.Requeue && t.place != nil {
				t.pool.remove(t)
				t.pool.add(t)
			}
		}
	case Refused:
		// Somebody else's record: the watch brings it. Until then the slot, if
		// one was meant, counts as used.
		g.leaveQueue(t)
		if t.rec == nil {
			return
		}
	}
	g.consider(t, now)
}

func (e Moved) apply(g *Gate, now time.Time) {
	t := g.tasks[e.TaskID]
	if t == nil {
		return
	}
	t.busy = false
	if e.Outcome == Stored {
		g.record(t, e.Record, e.Revision, now)
		return
	}
	// Refused: the judgement is dropped. What it was based on is outdated, and
	// the watch brings what is new; until then the task is left alone.
	if e.Outcome == Absent || e.Revision > t.rev {
		g.consider(t, now)
		return
	}
	g.schedule(t, now.Add(refusedPause))
}

// refusedPause is how long a task is left alone after a refused move, in case the
// watch brings nothing: on a cluster a write can be refused although nothing moved.
const refusedPause = 100 * time.Millisecond

func (e GrantSent) apply(g *Gate, now time.Time) {
	t := g.tasks[e.TaskID]
	if t == nil {
		return
	}
	t.busy, t.sent = false, e.Attempt
	g.consider(t, now)
}

func (e RequestSpoiled) apply(g *Gate, now time.Time) {
	t := g.tasks[e.TaskID]
	if t == nil || t.req == nil {
		return
	}
	t.req.Invalid, t.req.Code = e.Reason, contract.ErrInternal
	g.consider(t, now)
}

func (e TerminalEventStored) apply(g *Gate, now time.Time) {
	t := g.tasks[e.TaskID]
	if t == nil {
		return
	}
	t.busy, t.eventStored = false, true
	g.consider(t, now)
}

func (e RequestRemoved) apply(g *Gate, now time.Time) {
	t := g.tasks[e.TaskID]
	if t == nil {
		return
	}
	t.busy, t.req = false, nil
	g.consider(t, now)
}

func (e Purged) apply(g *Gate, now time.Time) {
	if d := g.done[e.TaskID]; d != nil {
		d.busy = false
		if !d.purged {
			d.at = now.Add(time.Minute)
			g.push(e.TaskID, d.at)
		}
	}
	if t := g.tasks[e.TaskID]; t != nil { // its request was stored again meanwhile
		t.busy = false
		g.consider(t, now)
	}
}

func (Tick) apply(g *Gate, now time.Time) {
	for len(g.timers) > 0 && !now.Before(g.timers[0].at) {
		id := heap.Pop(&g.timers).(timer).id
		if t := g.tasks[id]; t != nil {
			t.wake = time.Time{}
			g.consider(t, now)
		}
		d := g.done[id]
		switch {
		case d == nil || d.busy || now.Before(d.at):
		case !g.Open():
			d.at = now.Add(time.Second)
			g.push(id, d.at)
		case d.purged:
			delete(g.done, id)
		case g.tasks[id] == nil:
			d.busy = true
			g.do(PurgeRecord{TaskID: id, Revision: d.rev})
		}
	}
}
