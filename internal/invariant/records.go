package invariant

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// stay is the record of a task from its first revision until it was purged.
type stay struct {
	revs []Revision
	// gone is the marker that ended it, if it is known.
	gone *Revision
}

// spans tells where the numbers of the bucket are known without a gap.
type spans []span

type span struct{ first, last uint64 }

// end is the last number that is known without a gap after seq.
func (s spans) end(seq uint64) uint64 {
	i, ok := slices.BinarySearchFunc(s, seq, func(x span, seq uint64) int {
		switch {
		case x.last < seq:
			return -1
		case x.first > seq:
			return 1
		}
		return 0
	})
	if !ok {
		return seq
	}
	return s[i].last
}

// whole reports whether everything between two known numbers is known.
func (s spans) whole(a, b uint64) bool { return s.end(a) >= b }

// fromStart reports whether everything before seq is known.
func (s spans) fromStart(seq uint64) bool { return len(s) > 0 && s[0].first == 1 && s[0].last >= seq }

func (r Revision) proof() Evidence {
	what := "deleted"
	switch kind, _, _ := contract.ParseKey(r.Key); {
	case r.Deleted:
	case kind == contract.KeyTask:
		what = fmt.Sprintf("%s, attempt %d, slot %d, epoch %d, by %s", r.Record.State, r.Record.Attempt, r.Record.Slot, r.Record.Epoch, r.Record.Writer)
	case kind == contract.KeyLeader:
		what = "held by " + r.Holder
	default:
		what = "written"
	}
	return Evidence{Source: FromBucket, Seq: r.Seq, What: what, ID: r.Key, At: r.At}
}

// readBucket sorts what is known of the bucket.
func (j *judge) readBucket() {
	j.queued = map[contract.TaskID]bool{}
	for _, id := range j.h.Queue {
		j.queued[id] = true
	}
	j.stays, j.cancel, j.lease = map[string][]*stay{}, map[string][]Revision{}, map[string][]Revision{}
	j.bucket = slices.Clone(j.h.Bucket)
	slices.SortStableFunc(j.bucket, func(a, b Revision) int { return cmp.Compare(a.Seq, b.Seq) })
	j.bucket = slices.CompactFunc(j.bucket, func(a, b Revision) bool { return a.Seq == b.Seq })
	for _, r := range j.bucket {
		if n := len(j.known); n > 0 && j.known[n-1].last+1 == r.Seq {
			j.known[n-1].last = r.Seq
		} else {
			j.known = append(j.known, span{r.Seq, r.Seq})
		}
	}
	for _, r := range j.bucket {
		kind, id, err := contract.ParseKey(r.Key)
		if err != nil {
			continue
		}
		switch kind {
		case contract.KeyTask:
			j.stay(id, r)
		case contract.KeyCancel:
			j.cancel[id] = append(j.cancel[id], r)
		case contract.KeyLease:
			j.lease[id] = append(j.lease[id], r)
		case contract.KeyLeader:
			j.leader = append(j.leader, r)
		}
	}
}

// stay files a revision of a record.
func (j *judge) stay(id string, r Revision) {
	all := j.stays[id]
	var now *stay
	if n := len(all); n > 0 && all[n-1].gone == nil {
		now = all[n-1]
	}
	if r.Deleted {
		if now != nil {
			now.gone = &r
		}
		return
	}
	if now != nil {
		// What was purged and came again behind a gap is another one.
		last := now.revs[len(now.revs)-1]
		if last.Record.RequestSeq != r.Record.RequestSeq && !j.known.whole(last.Seq, r.Seq) {
			now = nil
		}
	}
	if now == nil {
		now = &stay{}
		j.stays[id] = append(all, now)
	}
	now.revs = append(now.revs, r)
}

// newest is the newest known revision of a record that is not purged.
func (j *judge) newest(id string) (Revision, bool) {
	all := j.stays[id]
	if len(all) == 0 || all[len(all)-1].gone != nil {
		return Revision{}, false
	}
	revs := all[len(all)-1].revs
	return revs[len(revs)-1], true
}

// records judges the bucket by itself and beside the events.
func (j *judge) records() {
	for _, id := range sortedKeys(j.stays) {
		for _, s := range j.stays[id] {
			for i, r := range s.revs {
				if i > 0 {
					j.moved(id, s.revs[i-1], r)
				} else {
					j.began(id, r)
				}
			}
			j.stopped(id, s)
			j.movedOn(id, s)
		}
		if rec, ok := j.newest(id); ok {
			j.told(id, rec)
		}
		if l := j.tasks[id]; l != nil && !l.old {
			j.attempts(id, l)
		}
	}
	j.lost()
	j.slotsInBucket()
	j.orderInBucket()
}

// began judges the first revision of a record that is known.
func (j *judge) began(id string, r Revision) {
	rec := r.Record
	fenced := rec.State == contract.StateGranted && rec.Attempt == 1 || rec.State.Terminal() && rec.Attempt == 0
	if !fenced {
		if j.known.fromStart(r.Seq) {
			j.bad(Fence, id, fmt.Sprintf("its first record says %s, attempt %d", rec.State, rec.Attempt), r.proof())
		}
		return
	}
	// First writes carry the leader key's revision. A later one was there already?
	i, _ := slices.BinarySearchFunc(j.leader, r.Seq, func(l Revision, seq uint64) int { return cmp.Compare(l.Seq, seq) })
	if i == 0 {
		return
	}
	key := j.leader[i-1]
	if !j.known.whole(key.Seq, r.Seq) || !key.Deleted && key.Seq == rec.Epoch {
		return
	}
	rule, what := Fence, "ended"
	if rec.State.Live() {
		rule, what = Capacity, "granted"
	}
	j.bad(rule, id, fmt.Sprintf("it was %s under epoch %d, and the leader key was at %d", what, rec.Epoch, key.Seq), key.proof(), r.proof())
}

// moved judges two revisions of a record that follow each other, as far as is
// known.
func (j *judge) moved(id string, a, b Revision) {
	from, to := a.Record, b.Record
	bad := func(rule, format string, args ...any) {
		j.bad(rule, id, fmt.Sprintf(format, args...), a.proof(), b.proof())
	}
	switch {
	case from.State.Terminal():
		bad(OneEnd, "its end was written over")
	case from.Tenant != to.Tenant || from.RunID != to.RunID || from.ThreadID != to.ThreadID || from.RequestSeq != to.RequestSeq:
		bad(Fence, "its record went from one request to another")
	case from.Slot != to.Slot:
		bad(Capacity, "its record moved from slot %d to slot %d", from.Slot, to.Slot)
	case to.Attempt < from.Attempt:
		bad(Fence, "its record went back from attempt %d to attempt %d", from.Attempt, to.Attempt)
	case j.known.whole(a.Seq, b.Seq) && !legal(from, to):
		bad(Fence, "its record went from %s, attempt %d, to %s, attempt %d", from.State, from.Attempt, to.State, to.Attempt)
	}
}

// legal reports whether a record may go from one revision to the next.
func legal(from, to contract.TaskRecord) bool {
	same := to.Attempt == from.Attempt
	again := to.State == contract.StateGranted && to.Attempt == from.Attempt+1
	switch from.State {
	case contract.StateGranted:
		return same && (to.State == contract.StateRunning || to.State == contract.StateCancelled || to.State == contract.StateFailed)
	case contract.StateRunning:
		marked := to.State == contract.StateRunning && to.CancelRequested && to.Executor == from.Executor
		return again || same && (to.State.Terminal() || to.State == contract.StateReleased || marked)
	case contract.StateReleased:
		return again || same && (to.State == contract.StateCancelled || to.State == contract.StateFailed)
	}
	return false
}

// told compares the newest record of a task with its events.
func (j *judge) told(id string, r Revision) {
	l := j.tasks[id]
	rec := r.Record
	ended := rec.State.Terminal()
	var end *event
	if l != nil && len(l.ends) > 0 {
		end = l.ends[0]
	}
	switch {
	case end != nil && ended && end.status != string(rec.State.Status()):
		j.bad(OneEnd, id, fmt.Sprintf("its record says %s, and its last event %s", rec.State, end.status), r.proof(), end.proof())
	case end != nil && ended && end.attempt != rec.Attempt:
		j.bad(OneEnd, id, fmt.Sprintf("its record ended with attempt %d, and its last event is of attempt %d", rec.Attempt, end.attempt), r.proof(), end.proof())
	case end != nil && !ended && end.seq <= j.h.Mark:
		j.bad(OneEnd, id, fmt.Sprintf("its end was told, and its record says %s", rec.State), r.proof(), end.proof())
	case end == nil && ended && j.owed(id, rec):
		j.bad(OneEnd, id, "its record has an end, its request is gone, and no event tells of it", r.proof())
	}
	if l == nil || l.old {
		return
	}
	for _, e := range l.events {
		if e.seq <= j.h.Mark && e.attempt > rec.Attempt {
			j.bad(Fence, id, fmt.Sprintf("%s is of attempt %d, and the record knows %d", e.typ, e.attempt, rec.Attempt), r.proof(), e.proof())
			break
		}
	}
	if first := l.events[0]; string(rec.Tenant) != first.tenant || string(rec.RunID) != first.run || string(rec.ThreadID) != first.thread {
		j.bad(Events, id, "its events and its record name different tenants, threads or runs", r.proof(), first.proof())
	}
}

// slack is how much older than the beginning of the events an end must be told to
// be, so that it is not looked for there: clocks differ.
const slack = time.Minute

// owed reports whether the event of an end must be among the events: it is stored
// before the request leaves the queue.
func (j *judge) owed(id string, rec contract.TaskRecord) bool {
	if !j.h.QueueRead || j.queued[contract.TaskID(id)] {
		return false
	}
	return j.o.Since.IsZero() || rec.FinishedAt != nil && rec.FinishedAt.After(j.o.Since.Add(slack))
}

// lost looks for tasks that were accepted and are nowhere any more.
func (j *judge) lost() {
	if !j.h.QueueRead {
		return
	}
	for _, id := range sortedKeys(j.tasks) {
		l := j.tasks[id]
		if l.old || len(l.ends) > 0 || l.events[0].seq > j.h.Mark || j.queued[contract.TaskID(id)] || j.o.Settled {
			continue
		}
		r, ok := j.newest(id)
		last := l.events[len(l.events)-1]
		switch {
		case !ok:
			j.bad(OneEnd, id, "its request is gone, and it has no end", last.proof())
		case r.Record.State.Live():
			j.bad(OneEnd, id, fmt.Sprintf("its request is gone, and its record says %s", r.Record.State), r.proof(), last.proof())
		}
	}
}

// attempts compares what the events say of each attempt with what the record said
// of it.
func (j *judge) attempts(id string, l *life) {
	claimed := map[int]Revision{}
	for _, s := range j.stays[id] {
		for _, r := range s.revs {
			rec := r.Record
			for _, e := range l.events {
				if e.attempt != rec.Attempt || e.attempt == 0 {
					continue
				}
				if e.typ == contract.RecordAdmitted && rec.Slot != e.slot {
					j.bad(Capacity, id, fmt.Sprintf("attempt %d was told to have slot %d, and its record says %d", e.attempt, e.slot, rec.Slot), r.proof(), e.proof())
				}
				if e.typ == contract.RecordStart && rec.Executor != "" && rec.Executor != e.executor {
					j.bad(Fence, id, fmt.Sprintf("attempt %d was begun by %s, and its record is %s's", e.attempt, e.executor, rec.Executor), r.proof(), e.proof())
				}
			}
			if _, ok := claimed[rec.Attempt]; !ok && rec.State == contract.StateRunning && !rec.CancelRequested {
				claimed[rec.Attempt] = r
			}
		}
	}
	// The look at the cancel key comes after the claim and before the first effect.
	for _, c := range j.cancel[id] {
		for _, e := range l.events {
			r, ok := claimed[e.attempt]
			if ok && !c.Deleted && c.Seq < r.Seq && (e.typ == contract.RecordStart || e.typ == contract.RecordStep) {
				j.bad(Stop, id, fmt.Sprintf("attempt %d began although the task had been cancelled before it was claimed", e.attempt), c.proof(), r.proof(), e.proof())
				return
			}
		}
	}
}

// stopped judges how long a task went on after its cancellation, by the clock of
// the server alone.
func (j *judge) stopped(id string, s *stay) {
	all := j.cancel[id]
	if j.o.StopWithin <= 0 || len(all) == 0 || all[0].Deleted {
		return
	}
	c, last := all[0], s.revs[len(s.revs)-1]
	if last.Seq < c.Seq && last.Record.State.Terminal() {
		return
	}
	for _, r := range s.revs {
		if r.Record.State.Terminal() && r.Seq > c.Seq {
			if d := r.At.Sub(c.At); d > j.o.StopWithin {
				j.bad(Stop, id, fmt.Sprintf("it ended %s after its cancellation, allowed are %s", d, j.o.StopWithin), c.proof(), r.proof())
			}
			return
		}
	}
	if now := j.now(); now.Sub(c.At) > j.o.StopWithin {
		j.bad(Stop, id, fmt.Sprintf("it was cancelled and has not ended %s later", now.Sub(c.At)), c.proof(), last.proof())
	}
}

// now is the newest time that the server has told of the bucket.
func (j *judge) now() time.Time { return j.bucket[len(j.bucket)-1].At }

// movedOn judges how long a running record stood after its lease had run out.
func (j *judge) movedOn(id string, s *stay) {
	if j.o.MovedWithin <= 0 {
		return
	}
	for i, r := range s.revs {
		if r.Record.State != contract.StateRunning {
			continue
		}
		until, at := uint64(math.MaxUint64), j.now()
		if i+1 < len(s.revs) {
			until, at = s.revs[i+1].Seq, s.revs[i+1].At
		}
		for k, out := range j.lease[id] {
			if !out.Deleted || out.Seq < r.Seq || out.Seq > until {
				continue
			}
			over := at
			if k+1 < len(j.lease[id]) && j.lease[id][k+1].Seq < until {
				over = j.lease[id][k+1].At // revived
			}
			if d := over.Sub(out.At); d > j.o.MovedWithin {
				j.bad(Crash, id, fmt.Sprintf("its lease ran out, and its slot was not moved on for %s", d), r.proof(), out.proof())
			}
		}
	}
}

// slotsInBucket counts the slots by the records alone: no clock is asked.
func (j *judge) slotsInBucket() {
	type edge struct {
		seq  uint64
		take bool
		h    holding
		at   time.Time
	}
	var edges []edge
	for id, all := range j.stays {
		for _, s := range all {
			from := slices.IndexFunc(s.revs, func(r Revision) bool { return r.Record.State.Live() })
			if from < 0 {
				continue
			}
			r := s.revs[from]
			t := traits{r.Record.Pool, r.Record.Tenant, r.Record.ThreadID, r.Record.SubagentType}
			if t.pool == contract.DefaultPool {
				t.pool = ""
			}
			h := holding{id, t, slot{t.pool, r.Record.Slot}, r.proof()}
			edges = append(edges, edge{r.Seq, true, h, r.At}, edge{j.held(s, from), false, h, r.At})
		}
	}
	slices.SortFunc(edges, func(a, b edge) int {
		if c := cmp.Compare(a.seq, b.seq); c != 0 || a.take == b.take {
			return c
		}
		if b.take {
			return -1
		}
		return 1
	})
	u := j.newUse()
	for _, x := range edges {
		if x.take {
			u.take(x.h, x.at.Before(j.o.LimitsSince))
		} else {
			u.leave(x.h.id)
		}
	}
}

// held is the number from which on it is not known that a record still holds its
// slot. Between two revisions that hold it, it is held, whatever is not known: a
// slot never changes hands between two attempts.
func (j *judge) held(s *stay, from int) uint64 {
	last := s.revs[from]
	for _, r := range s.revs[from+1:] {
		if !r.Record.State.Live() {
			return min(r.Seq, j.known.end(last.Seq)+1)
		}
		last = r
	}
	end := j.known.end(last.Seq) + 1
	if s.gone != nil {
		end = min(end, s.gone.Seq)
	}
	return end
}

// orderInBucket compares the first grants with the order of the requests.
func (j *judge) orderInBucket() {
	var grants []first
	for id, all := range j.stays {
		r := all[0].revs[0]
		if rec := r.Record; rec.State == contract.StateGranted && rec.Attempt == 1 && rec.RequestSeq > 0 {
			t := traits{rec.Pool, rec.Tenant, rec.ThreadID, rec.SubagentType}
			if t.pool == contract.DefaultPool {
				t.pool = ""
			}
			at := time.Unix(0, int64(rec.RequestSeq)) //nolint:gosec // a sequence, used as a rank
			grants = append(grants, first{
				id: id, traits: t, proof: []Evidence{r.proof()}, seq: r.Seq, at: at,
				before: func(o first) bool { return at.Before(o.at) },
			})
		}
	}
	slices.SortFunc(grants, func(a, b first) int { return cmp.Compare(a.seq, b.seq) })
	j.overtaken(grants)
}

// grants compares grant messages with each other and with the records that they
// were made of.
func (j *judge) grants() {
	revs := map[uint64]Revision{}
	for _, r := range j.bucket {
		revs[r.Seq] = r
	}
	proof := func(g Grant) Evidence {
		return Evidence{
			Source: FromGrants, Seq: g.Seq, ID: contract.TaskKey(g.Grant.TaskID), At: g.At,
			What: fmt.Sprintf("attempt %d, slot %d, epoch %d, revision %d", g.Grant.Attempt, g.Grant.Slot, g.Grant.Epoch, g.Grant.Revision),
		}
	}
	seen := map[string]Grant{}
	for _, g := range j.h.Grants {
		id := string(g.Grant.TaskID)
		key := fmt.Sprintf("%s/%d", id, g.Grant.Attempt)
		before, again := seen[key]
		seen[key] = g
		switch {
		case !again:
		case before.Grant.Slot != g.Grant.Slot || before.Grant.Revision != g.Grant.Revision:
			j.bad(Capacity, id, fmt.Sprintf("attempt %d was granted twice", g.Grant.Attempt), proof(before), proof(g))
			continue
		default:
			continue // sent again, which is harmless
		}
		r, ok := revs[g.Grant.Revision]
		rec := r.Record
		switch {
		case ok && (r.Key != contract.TaskKey(g.Grant.TaskID) || r.Deleted || rec.State != contract.StateGranted || rec.Attempt != g.Grant.Attempt || rec.Slot != g.Grant.Slot):
			j.bad(Fence, id, "a grant names a revision that is not its record's grant", r.proof(), proof(g))
		case ok:
		default:
			if now, known := j.newest(id); known && (now.Record.Attempt < g.Grant.Attempt || now.Seq < g.Grant.Revision) {
				j.bad(Fence, id, fmt.Sprintf("a grant of attempt %d, and the record knows %d", g.Grant.Attempt, now.Record.Attempt), now.proof(), proof(g))
			}
		}
	}
}

// Slim leaves out of a record what no rule needs, so that many fit into memory.
func Slim(rec contract.TaskRecord) contract.TaskRecord {
	rec.Result, rec.ResultRef, rec.Error, rec.Description, rec.Usage, rec.Receipts, rec.ReceiptVerdict = "", nil, "", "", nil, nil, nil
	rec.TraceParent, rec.TraceState = "", ""
	for _, s := range []*string{&rec.Writer, &rec.Executor, &rec.SubagentType} {
		*s = strings.Clone(*s)
	}
	return rec
}
