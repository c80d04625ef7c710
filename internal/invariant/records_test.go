package invariant

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// bucket records what the task bucket would store, every message with the next
// number.
type bucket struct {
	*tape
	h       History
	seq     uint64
	epoch   uint64
	request map[string]uint64
}

func newBucket() *bucket {
	b := &bucket{tape: newTape(), request: map[string]uint64{}}
	b.h.Mark, b.h.QueueRead = math.MaxUint64, true
	return b
}

func (b *bucket) put(r Revision) *bucket {
	b.seq++
	b.now = b.now.Add(time.Millisecond)
	r.Seq, r.At = b.seq, b.now
	b.h.Bucket = append(b.h.Bucket, r)
	return b
}

// lead lets somebody win the leader key, or renew it.
func (b *bucket) lead(holder string) *bucket {
	b.put(Revision{Key: contract.LeaderKey, Holder: holder})
	b.epoch = b.seq
	return b
}

// skip leaves out a number: something was stored that nobody saw.
func (b *bucket) skip() *bucket { b.seq++; return b }

func (b *bucket) mark(key string) *bucket    { return b.put(Revision{Key: key}) }
func (b *bucket) deleted(key string) *bucket { return b.put(Revision{Key: key, Deleted: true}) }

// rec stores a record; change adapts it.
func (b *bucket) rec(task string, state contract.State, attempt, slot int, change ...func(*contract.TaskRecord)) *bucket {
	if b.request[task] == 0 {
		b.request[task] = uint64(len(b.request) + 1)
	}
	r := contract.TaskRecord{TaskID: contract.TaskID(task), RunID: "r_1", State: state, Attempt: attempt, Slot: slot, Epoch: b.epoch, RequestSeq: b.request[task]}
	if attempt > 0 && (state == contract.StateRunning || state == contract.StateCompleted) {
		r.Executor = "ex-1"
	}
	for _, f := range change {
		f(&r)
	}
	return b.put(Revision{Key: contract.TaskKey(r.TaskID), Record: r})
}

func (b *bucket) life(task string, slot int) *bucket {
	return b.rec(task, contract.StateGranted, 1, slot).rec(task, contract.StateRunning, 1, slot).rec(task, contract.StateCompleted, 1, slot)
}

// told adds the events of a task that completed.
func (b *bucket) told(task string, slot int) *bucket {
	b.tape.queued(task).admit(task, slot).start(task).step(task, 1)
	return b.end(task, "completed")
}

func (b *bucket) end(task, status string) *bucket {
	b.tape.end(task)
	e := &b.records[len(b.records)-1]
	e.Content = []byte(strings.Replace(string(e.Content), `"status":"failed"`, `"status":"`+status+`"`, 1))
	return b
}

func (b *bucket) check(o Options) []Violation {
	h := b.h
	for _, e := range b.records {
		h.Event(e)
	}
	o.MaxRunning = 2
	return h.Check(o)
}

func (b *bucket) grant(task string, attempt, slot int, revision uint64) *bucket {
	b.h.Grants = append(b.h.Grants, Grant{Seq: uint64(len(b.h.Grants) + 1), Grant: contract.Grant{TaskID: contract.TaskID(task), Attempt: attempt, Slot: slot, Revision: revision}})
	return b
}

// goodBucket has a bit of everything that may happen to records.
func goodBucket() *bucket {
	b := newBucket().lead("adm-1")
	b.rec("a", contract.StateGranted, 1, 1).mark("lease.a").rec("a", contract.StateRunning, 1, 1)
	b.rec("b", contract.StateGranted, 1, 2).rec("b", contract.StateRunning, 1, 2)
	// d is cancelled while it waits, b handed back, e lost and run again.
	b.mark("cancel.d").lead("adm-1").rec("d", contract.StateCancelled, 0, 0)
	b.rec("b", contract.StateReleased, 1, 2).rec("b", contract.StateGranted, 2, 2)
	regrant := b.seq
	b.rec("a", contract.StateCompleted, 1, 1)
	b.rec("e", contract.StateGranted, 1, 1).rec("e", contract.StateRunning, 1, 1).deleted("lease.e")
	b.deleted(contract.LeaderKey).lead("adm-2").rec("e", contract.StateGranted, 2, 1).rec("e", contract.StateRunning, 2, 1)
	b.mark("cancel.e").rec("e", contract.StateRunning, 2, 1, func(r *contract.TaskRecord) { r.CancelRequested = true }).rec("e", contract.StateCancelled, 2, 1)
	b.rec("b", contract.StateCancelled, 2, 2).deleted("task.a").grant("b", 2, 2, regrant).grant("b", 2, 2, regrant)
	b.queued("a").queued("b").queued("d").queued("e").admit("a", 1).admit("b", 2).start("a").step("a", 1)
	b.end("a", "completed")
	b.add("d", contract.RecordEnd, 0, 0).add("b", contract.RecordAdmitted, 2, 2)
	b.admit("e", 1).start("e").add("e", contract.RecordAdmitted, 2, 1).add("e", contract.RecordEnd, 2, 0).add("b", contract.RecordEnd, 2, 0)
	for i := range b.records {
		if id := b.records[i].TaskID; id == "b" || id == "d" || id == "e" {
			b.records[i].Content = []byte(strings.Replace(string(b.records[i].Content), `"status":"failed"`, `"status":"cancelled"`, 1))
		}
	}
	return b
}

// I1 to I8: what may happen is not complained of, in whatever order it is told,
// however often, and whatever is missing of the bucket.
func TestGoodBucket(t *testing.T) {
	t.Parallel()
	o := Options{Settled: true, StopWithin: time.Second, MovedWithin: time.Second, MaxStored: 4}
	for round := range 60 {
		b := goodBucket()
		if round > 0 {
			for range rand.IntN(5) {
				b.h.Bucket = append(b.h.Bucket, b.h.Bucket[rand.IntN(len(b.h.Bucket))])
			}
			rand.Shuffle(len(b.h.Bucket), func(i, k int) { b.h.Bucket[i], b.h.Bucket[k] = b.h.Bucket[k], b.h.Bucket[i] })
			// The newest of each key is there, as it is in a bucket; of the rest anything
			// may be missing.
			newest := map[string]uint64{}
			for _, r := range b.h.Bucket {
				newest[r.Key] = max(newest[r.Key], r.Seq)
			}
			var left []Revision
			for _, r := range b.h.Bucket {
				if newest[r.Key] == r.Seq || rand.IntN(round) < 10 {
					left = append(left, r)
				}
			}
			b.h.Bucket = left
		}
		if found := b.check(o); len(found) > 0 {
			t.Fatalf("round %d: %v", round, found)
		}
	}
}

// Each rule about records, grants, cancellations and the queue finds what breaks
// it, and nothing else.
func TestBucketViolations(t *testing.T) {
	t.Parallel()
	cancelled := func(r *contract.TaskRecord) { r.State = contract.StateCancelled }
	cases := []struct {
		name, rule, text string
		proof            int
		b                *bucket
		o                Options
	}{
		{"three in two slots", Capacity, "3 tasks had a slot", 3,
			newBucket().rec("a", contract.StateGranted, 1, 1).rec("b", contract.StateGranted, 1, 2).rec("c", contract.StateGranted, 1, 3), Options{}},
		{"one slot twice", Capacity, "slot 1, which a had", 2, newBucket().rec("a", contract.StateGranted, 1, 1).rec("b", contract.StateGranted, 1, 1), Options{}},
		{"another slot", Capacity, "from slot 1 to slot 2", 2, newBucket().rec("a", contract.StateGranted, 1, 1).rec("a", contract.StateRunning, 1, 2), Options{}},
		{"granted by a deposed leader", Capacity, "granted under epoch 1, and the leader key was at 2", 2,
			newBucket().lead("adm-1").lead("adm-2").rec("a", contract.StateGranted, 1, 1, func(r *contract.TaskRecord) { r.Epoch = 1 }), Options{}},
		{"granted without a leader", Capacity, "the leader key was at 2", 2,
			newBucket().lead("adm-1").deleted(contract.LeaderKey).rec("a", contract.StateGranted, 1, 1), Options{}},
		{"a waiter ended by a deposed leader", Fence, "ended under epoch 1", 2,
			newBucket().lead("adm-1").lead("adm-2").rec("a", contract.StateFailed, 0, 0, func(r *contract.TaskRecord) { r.Epoch = 1 }).tell("a", "failed"), Options{}},
		{"overtaken", Order, "b was stored later", 2, func() *bucket {
			b := newBucket()
			b.request["a"], b.request["b"] = 1, 2
			return b.rec("b", contract.StateGranted, 1, 1).rec("a", contract.StateGranted, 1, 2)
		}(), Options{}},
		{"an end written over", OneEnd, "written over", 2,
			newBucket().life("a", 1).rec("a", contract.StateCancelled, 1, 1).told("a", 1).endAs("cancelled"), Options{}},
		{"an end that comes again behind a gap", OneEnd, "written over", 2, newBucket().life("a", 1).skip().rec("a", contract.StateGranted, 1, 1), Options{}},
		{"never claimed", Fence, "from granted, attempt 1, to completed", 2,
			newBucket().rec("a", contract.StateGranted, 1, 1).rec("a", contract.StateCompleted, 1, 1).told("a", 1), Options{}},
		{"claimed twice", Fence, "from running, attempt 1, to running", 2, newBucket().rec("a", contract.StateGranted, 1, 1).rec("a", contract.StateRunning, 1, 1).rec("a", contract.StateRunning, 1, 1), Options{}},
		{"an older attempt", Fence, "back from attempt 2", 2,
			newBucket().rec("a", contract.StateGranted, 1, 1).rec("a", contract.StateRunning, 1, 1).rec("a", contract.StateGranted, 2, 1).skip().rec("a", contract.StateRunning, 1, 1), Options{}},
		{"a first record that is no first one", Fence, "its first record says running", 1, newBucket().rec("a", contract.StateRunning, 1, 1), Options{}},
		{"another request's record", Fence, "one request to another", 2,
			newBucket().rec("a", contract.StateGranted, 1, 1).rec("a", contract.StateRunning, 1, 1, func(r *contract.TaskRecord) { r.RunID = "r_2" }), Options{}},
		{"two stories of one end", OneEnd, "its record says completed, and its last event failed", 2, newBucket().life("a", 1).told("a", 1).endAs("failed"), Options{}},
		{"an end of another attempt", OneEnd, "ended with attempt 2, and its last event is of attempt 1", 2,
			newBucket().skip().rec("a", contract.StateFailed, 2, 1).queuedAnd("a", 1).end("a", "failed"), Options{}},
		{"told before it was so", OneEnd, "its end was told, and its record says running", 2,
			newBucket().rec("a", contract.StateGranted, 1, 1).rec("a", contract.StateRunning, 1, 1).told("a", 1), Options{}},
		{"an end that nobody tells", OneEnd, "no event tells of it", 1, newBucket().life("a", 1), Options{}},
		{"lost", OneEnd, "its request is gone, and it has no end", 1, newBucket().queuedAnd("a", 1), Options{}},
		{"lost while it ran", OneEnd, "its request is gone, and its record says granted", 2, newBucket().queuedAnd("a", 1).rec("a", contract.StateGranted, 1, 1), Options{}},
		{"an attempt that no record knows", Fence, "is of attempt 2, and the record knows 1", 2, func() *bucket {
			b := newBucket().queuedAnd("a", 1)
			b.add("a", contract.RecordAdmitted, 2, 1)
			b.h.Queue = []contract.TaskID{"a"}
			return b.rec("a", contract.StateGranted, 1, 1)
		}(), Options{}},
		{"told another slot", Capacity, "was told to have slot 2, and its record says 1", 2, newBucket().skip().rec("a", contract.StateCompleted, 1, 1).told("a", 2), Options{}},
		{"begun by another", Fence, "begun by ex-1, and its record is ex-2's", 2,
			newBucket().skip().rec("a", contract.StateCompleted, 1, 1, func(r *contract.TaskRecord) { r.Executor = "ex-2" }).told("a", 1), Options{}},
		{"begun after a cancellation", Stop, "cancelled before it was claimed", 3,
			newBucket().rec("a", contract.StateGranted, 1, 1).mark("cancel.a").rec("a", contract.StateRunning, 1, 1).rec("a", contract.StateCompleted, 1, 1).told("a", 1), Options{}},
		{"stopped too late", Stop, "allowed are 1s", 2,
			newBucket().rec("a", contract.StateGranted, 1, 1).rec("a", contract.StateRunning, 1, 1).mark("cancel.a").wait(2*time.Second).
				rec("a", contract.StateCancelled, 1, 1, cancelled).told("a", 1).endAs("cancelled"), Options{StopWithin: time.Second}},
		{"never stopped", Stop, "has not ended", 2,
			newBucket().rec("a", contract.StateGranted, 1, 1).rec("a", contract.StateRunning, 1, 1).mark("cancel.a").wait(2 * time.Second).lead("adm-1"), Options{StopWithin: time.Second}},
		{"a slot that does not come back", Crash, "not moved on for", 2,
			newBucket().rec("a", contract.StateGranted, 1, 1).rec("a", contract.StateRunning, 1, 1).deleted("lease.a").wait(2 * time.Second).lead("adm-1"), Options{MovedWithin: time.Second}},
		{"granted twice", Capacity, "attempt 1 was granted twice", 2, newBucket().grant("a", 1, 1, 5).grant("a", 1, 2, 6), Options{}},
		{"a grant of nothing", Fence, "not its record's grant", 2, newBucket().rec("a", contract.StateGranted, 1, 1).grant("b", 1, 1, 1), Options{}},
		{"a grant of the future", Fence, "a grant of attempt 2, and the record knows 1", 2, newBucket().rec("a", contract.StateGranted, 1, 1).grant("a", 2, 1, 9), Options{}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			found := c.b.check(c.o)
			if len(found) != 1 || found[0].Rule != c.rule || !strings.Contains(found[0].Text, c.text) || len(found[0].Proof) != c.proof {
				t.Fatalf("found %v; want one of %s with %q and %d proofs", found, c.rule, c.text, c.proof)
			}
		})
	}
}

func (b *bucket) wait(d time.Duration) *bucket { b.now = b.now.Add(d); return b }

// endAs changes what the last event says of the end.
func (b *bucket) endAs(status string) *bucket {
	e := &b.records[len(b.records)-1]
	e.Content = []byte(strings.NewReplacer(`"status":"completed"`, `"status":"`+status+`"`).Replace(string(e.Content)))
	return b
}

func (b *bucket) queuedAnd(task string, slot int) *bucket { b.queued(task).admit(task, slot); return b }

// tell adds the events of a task that ended while it waited.
func (b *bucket) tell(task, status string) *bucket {
	b.queued(task).add(task, contract.RecordEnd, 0, 0)
	return b
}

// I4: of a system that is moving, only what had come before is compared, and what
// is in the queue is under way.
func TestMovingSystem(t *testing.T) {
	t.Parallel()
	b := newBucket().rec("a", contract.StateGranted, 1, 1).rec("a", contract.StateRunning, 1, 1).told("a", 1)
	b.h.Mark, b.h.Queue = uint64(len(b.records)-1), []contract.TaskID{"a"}
	if found := b.check(Options{}); len(found) > 0 {
		t.Errorf("the end came after the bucket was read: %v", found)
	}
	b = newBucket().life("a", 1)
	b.h.Queue = []contract.TaskID{"a"}
	if found := b.check(Options{}); len(found) > 0 {
		t.Errorf("the event is still owed: %v", found)
	}
	b.h.Queue = nil
	if found := b.check(Options{Since: b.now.Add(time.Hour)}); len(found) > 0 {
		t.Errorf("the event is older than the history: %v", found)
	}
}

// A history that begins in the middle says nothing of what began before it.
func TestOldTasks(t *testing.T) {
	t.Parallel()
	p := newTape().step("a", 7).end("a").queued("b").admit("b", 1).start("b").step("b", 2).end("b")
	found := Check(p.records, Options{Since: p.records[0].CreatedAt})
	if len(found) != 1 || found[0].Subject != "b" {
		t.Errorf("found %v; want the gap of b alone", found)
	}
}

// I1, I2: a task whose key is at its limit may be overtaken by those that do not
// share it; within a key the order holds; no key goes over its limit; each pool
// counts by itself.
func TestLimitsAndPools(t *testing.T) {
	t.Parallel()
	at := func(tenant contract.Tenant, thread contract.ThreadID) func(*contract.TaskRecord) {
		return func(r *contract.TaskRecord) { r.Tenant, r.ThreadID = tenant, thread }
	}
	limits := Limits{PerTenant: 1, PerThread: 1}
	pool := func(name contract.Pool) func(*contract.TaskRecord) {
		return func(r *contract.TaskRecord) { r.Pool = name }
	}
	granted := contract.StateGranted
	overtaken := func(first, second func(*contract.TaskRecord)) *bucket {
		b := newBucket()
		b.request["a"], b.request["b"] = 1, 2
		return b.rec("b", granted, 1, 1, second).rec("b", contract.StateCancelled, 1, 1, second).rec("a", granted, 1, 1, first).tellCancelled("b")
	}
	cases := []struct {
		name string
		b    *bucket
		o    Options
		want string
	}{
		{"another tenant may go first", overtaken(at("x", "1"), at("y", "1")), Options{Limits: limits}, ""},
		{"the same tenant may not", overtaken(at("x", "1"), at("x", "1")), Options{Limits: limits}, Order},
		{"another thread may, when threads are limited", overtaken(at("x", "1"), at("x", "2")), Options{Limits: limits}, ""},
		{"another thread may not, when they are not", overtaken(at("x", "1"), at("x", "2")), Options{Limits: Limits{PerTenant: 1}}, Order},
		{"another pool may", overtaken(pool("gpu"), pool("")), Options{}, ""},
		{"the same pool by its other name may not", overtaken(pool("default"), pool("")), Options{}, Order},
		{"over a tenant's limit", newBucket().rec("a", granted, 1, 1, at("x", "1")).rec("b", granted, 1, 2, at("x", "2")), Options{Limits: limits}, Capacity},
		{"one slot number in two pools", newBucket().rec("a", granted, 1, 1, pool("gpu")).rec("b", granted, 1, 1), Options{}, ""},
		{"over a pool's limit", newBucket().rec("a", granted, 1, 1, pool("gpu")).rec("b", granted, 1, 2, pool("gpu")), Options{Pools: map[contract.Pool]Pool{"gpu": {MaxRunning: 1}}}, Capacity},
	}
	for _, c := range cases {
		found := c.b.check(c.o)
		if c.want == "" && len(found) > 0 || c.want != "" && (len(found) != 1 || found[0].Rule != c.want) {
			t.Errorf("%s: found %v, want %q", c.name, found, c.want)
		}
	}
}

func (b *bucket) tellCancelled(task string) *bucket {
	b.h.Queue = append(b.h.Queue, contract.TaskID(task))
	return b
}

// I3: more requests than the queue has room for.
func TestBound(t *testing.T) {
	t.Parallel()
	p := newTape().queued("a").queued("b").queued("c").admit("a", 1).end("a").end("b").end("c")
	if found := Check(p.records, Options{MaxStored: 3}); len(found) != 0 {
		t.Error(found)
	}
	found := Check(p.records, Options{MaxStored: 2})
	if len(found) != 1 || found[0].Rule != Bound || len(found[0].Proof) != 3 {
		t.Errorf("found %v, want three requests in a queue for two", found)
	}
}

// I11: what readers of the first version rely on is in every event; more does not
// disturb.
func TestContract(t *testing.T) {
	t.Parallel()
	fields := map[string][]string{
		contract.RecordQueued: {"subagent_type", "queue_position"}, contract.RecordAdmitted: {"slot", "waited_ms"}, contract.RecordStart: {"executor"},
		contract.RecordStep: {"message_index", "kind", "text", "truncated"}, contract.RecordEnd: {"status", "duration_ms"},
	}
	for i, e := range newBucket().told("a", 1).records {
		for _, name := range fields[e.EventType] {
			b := newBucket().told("a", 1)
			x := &b.records[i]
			x.Content = []byte(strings.Replace(string(x.Content), `"`+name+`"`, `"renamed"`, 1))
			found := false
			for _, v := range b.check(Options{}) {
				found = found || v.Rule == Contract && v.Proof[0].Seq == x.Seq
			}
			if !found {
				t.Errorf("%s without %s is not found", e.EventType, name)
			}
		}
	}
	b := newBucket().life("a", 1).told("a", 1)
	b.add("a", "subagent.future", 1, 0)
	b.records[len(b.records)-1].Seq, b.records[len(b.records)-2].Seq = b.records[len(b.records)-2].Seq, b.records[len(b.records)-1].Seq
	if found := b.check(Options{}); len(found) > 0 {
		t.Errorf("a type that is not known: %v", found)
	}
}

// I6: what the store has passed by it holds as the stream does, and nothing else. What
// retention has deleted it may have let go, what it has not come to is under way.
func TestStored(t *testing.T) {
	t.Parallel()
	b := newBucket().told("a", 1)
	if len(b.records) != 5 {
		t.Fatalf("%d events, want 5", len(b.records))
	}
	for name, c := range map[string]struct {
		stored   []uint64
		from, to uint64
		change   func(*contract.EventRecord) // of the third
		found    int
	}{
		"all of it":            {stored: []uint64{5, 1, 2, 3, 4}, from: 1, to: 5},
		"the old ones let go":  {stored: []uint64{3, 4, 5}, from: 3, to: 5},
		"not there yet":        {stored: []uint64{1, 2, 3}, from: 1, to: 3},
		"not compared":         {},
		"one is missing":       {stored: []uint64{1, 2, 4, 5}, from: 1, to: 5, found: 1},
		"the first is missing": {stored: []uint64{2, 3, 4, 5}, from: 1, to: 5, found: 1},
		"the last is missing":  {stored: []uint64{1, 2, 3, 4}, from: 1, to: 5, found: 1},
		"all are missing":      {from: 1, to: 5, found: 5},
		"one too many":         {stored: []uint64{1, 2, 3, 4, 5, 6}, from: 1, to: 6, found: 1},
		"written otherwise":    {change: func(e *contract.EventRecord) { e.Content = append(json.RawMessage("\n "), e.Content...) }},
		"finer than kept":      {change: func(e *contract.EventRecord) { e.CreatedAt = e.CreatedAt.Add(7).In(time.FixedZone("", 3600)) }},
		"other content":        {change: func(e *contract.EventRecord) { e.Content = json.RawMessage(`{}`) }, found: 1},
		"other metadata":       {change: func(e *contract.EventRecord) { e.Metadata = json.RawMessage(`{"x":1}`) }, found: 1},
		"another id":           {change: func(e *contract.EventRecord) { e.EventID += "x" }, found: 1},
		"another type":         {change: func(e *contract.EventRecord) { e.EventType += "x" }, found: 1},
		"another category":     {change: func(e *contract.EventRecord) { e.Category += "x" }, found: 1},
		"another tenant":       {change: func(e *contract.EventRecord) { e.Tenant += "x" }, found: 1},
		"another thread":       {change: func(e *contract.EventRecord) { e.ThreadID += "x" }, found: 1},
		"another run":          {change: func(e *contract.EventRecord) { e.RunID += "x" }, found: 1},
		"another task":         {change: func(e *contract.EventRecord) { e.TaskID += "x" }, found: 1},
		"another time":         {change: func(e *contract.EventRecord) { e.CreatedAt = e.CreatedAt.Add(time.Millisecond) }, found: 1},
		"a letter moved fields": {change: func(e *contract.EventRecord) {
			e.ThreadID, e.RunID = e.ThreadID+contract.ThreadID(e.RunID[:1]), e.RunID[1:]
		}, found: 1},
	} {
		if c.change != nil {
			c.stored, c.from, c.to = []uint64{1, 2, 3, 4, 5}, 1, 5
		}
		b.h.Stored, b.h.StoredFrom, b.h.StoredTo = nil, c.from, c.to
		for _, seq := range c.stored {
			rec := contract.EventRecord{Seq: seq}
			if seq <= 5 {
				rec = b.records[seq-1]
			}
			if seq == 3 && c.change != nil {
				c.change(&rec)
			}
			b.h.Stored = append(b.h.Stored, HeldOf(rec))
		}
		b.h.QueueRead = false
		if found := b.check(Options{}); len(found) != c.found || len(found) > 0 && found[0].Rule != Events {
			t.Errorf("%s: found %v, want %d", name, found, c.found)
		}
	}
}

// The size of what is kept of an event, which bounds how long a history may be.
func BenchmarkHistory(b *testing.B) {
	p := newTape()
	for i := range 1000 {
		p.queued(fmt.Sprint("t", i)).admit(fmt.Sprint("t", i), 1)
	}
	b.ReportAllocs()
	for b.Loop() {
		var h History
		for _, e := range p.records {
			h.Event(e)
		}
	}
	b.ReportMetric(float64(len(p.records)), "events/op")
}
