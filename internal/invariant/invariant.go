// Package invariant judges recorded histories: given the stored events of some
// tasks and runs, the records, leases and cancellations of the task bucket, the
// grants and the queue, it lists what should never have happened, with what
// proves it.
//
// [History.Check] is pure. Everything may come in any order and more than once,
// as it does from feeds that were resumed; what counts is the place in its
// stream, and for capacity among events the time. Every part may be missing: what
// is not there is not judged. The rules are those of docs/architecture.md.
package invariant

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// The rules.
const (
	Capacity = "I1 capacity"
	Order    = "I2 order"
	Bound    = "I3 bound"
	OneEnd   = "I4 one end"
	Fence    = "I5 fence"
	Events   = "I6 events"
	Stop     = "I7 stop"
	Crash    = "I8 crash"
	Contract = "I11 contract"
)

// Options say what is known of a history beside what is in it.
type Options struct {
	// MaxRunning is how many tasks may hold a slot of the default pool at once; 0
	// does not look.
	MaxRunning int
	// Limits are those of the default pool.
	Limits Limits
	// Pools are the other pools.
	Pools map[contract.Pool]Pool
	// LimitsSince is when these numbers began to hold: what was admitted before is
	// not counted. Zero means that they always held.
	LimitsSince time.Time
	// MaxStored is how many requests the queue may hold, those whose tasks run
	// included; 0 does not look.
	MaxStored int
	// ClockSkew is how far the clocks of the processes may have been apart. Slots
	// are compared by the times that the processes gave, so that an overlap that is
	// no longer than this proves nothing. The bucket has an order of its own and
	// needs no clock.
	ClockSkew time.Duration
	// Settled says that nothing is under way any more: every task and run that the
	// history has a beginning of must have its end in it.
	Settled bool
	// Since is where the events begin, when that is not at the beginning of all.
	// Tasks and runs that are older are not judged.
	Since time.Time
	// StopWithin is how long a task may go on after its cancellation was stored; 0
	// does not look.
	StopWithin time.Duration
	// MovedWithin is how long a task may stand as running after its lease has run
	// out; 0 does not look.
	MovedWithin time.Duration
}

// Pool is what a pool of executors may run at once; 0 does not look.
type Pool struct {
	MaxRunning int
	Limits     Limits
}

// Limits bound how many tasks of one key may hold a slot of a pool at once. A task
// may be overtaken by those that do not share all of its limited keys. Zero and an
// absent name are no limit.
type Limits struct {
	PerTenant, PerThread int
	PerType              map[string]int
}

// The sources of evidence.
const (
	FromEvents = "event"
	FromBucket = "bucket"
	FromGrants = "grant"
	FromStore  = "store"
)

// Evidence is one stored message that proves something.
type Evidence struct {
	// Source is where it is stored, Seq its number there.
	Source string `json:"source"`
	Seq    uint64 `json:"seq"`
	// What is the type of an event, or what a key was made to say.
	What string `json:"what"`
	// ID is that of an event, or the key of a record.
	ID string    `json:"id"`
	At time.Time `json:"at"`
}

func (e Evidence) String() string {
	where := ""
	if e.Source != FromEvents {
		where = e.Source + " "
	}
	return fmt.Sprintf("%s#%d %s %s", where, e.Seq, e.What, e.ID)
}

// Violation is something that should never have happened.
type Violation struct {
	Rule string `json:"rule"`
	// Subject is the task or run it happened to.
	Subject string `json:"subject"`
	Text    string `json:"text"`
	// Proof is what shows it: of each source in the order of its stream.
	Proof []Evidence `json:"proof"`
}

// String is the violation on one line, with its proof.
func (v Violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s: %s", v.Rule, v.Subject, v.Text)
	for i, e := range v.Proof {
		sep := ", "
		if i == 0 {
			sep = "; see "
		}
		b.WriteString(sep + e.String())
	}
	return b.String()
}

// Check returns the violations in a history of events alone; see [History.Check].
func Check(records []contract.EventRecord, o Options) []Violation {
	var h History
	for _, e := range records {
		h.Event(e)
	}
	return h.Check(o)
}

// Check returns the violations in a history, those of one rule together, in the
// order of the rules. It changes nothing: more may be added, and be judged again.
func (h *History) Check(o Options) []Violation {
	j := &judge{o: o, h: h, tasks: map[string]*life{}, runs: map[string]*life{}}
	events := j.distinct()
	j.stored(events)
	for _, e := range events {
		switch {
		case e.task != "":
			j.file(j.tasks, e.task, e)
		case e.category == contract.CategoryRun:
			j.file(j.runs, e.run, e)
		}
	}
	j.readBucket()
	for _, id := range sortedKeys(j.tasks) {
		j.task(id, j.tasks[id])
	}
	for _, id := range sortedKeys(j.runs) {
		j.run(id, j.runs[id])
	}
	j.capacity()
	j.order()
	j.bound()
	j.records()
	j.grants()
	slices.SortStableFunc(j.found, func(a, b Violation) int { return cmp.Compare(number(a.Rule), number(b.Rule)) })
	return j.found
}

// number is a rule's own.
func number(rule string) int {
	n := 0
	_, _ = fmt.Sscanf(rule, "I%d", &n)
	return n
}

// judge is one look at a history.
type judge struct {
	o     Options
	h     *History
	tasks map[string]*life
	runs  map[string]*life
	// The bucket, in order.
	bucket []Revision
	known  spans
	stays  map[string][]*stay // of each task's record, one for each life of the key
	cancel map[string][]Revision
	lease  map[string][]Revision
	leader []Revision
	queued map[contract.TaskID]bool
	found  []Violation
}

func (j *judge) bad(rule, subject, text string, proof ...Evidence) {
	slices.SortStableFunc(proof, func(a, b Evidence) int {
		return cmp.Or(strings.Compare(a.Source, b.Source), cmp.Compare(a.Seq, b.Seq))
	})
	j.found = append(j.found, Violation{Rule: rule, Subject: subject, Text: text, Proof: proof})
}

// pool returns what is known of a pool.
func (j *judge) pool(name contract.Pool) Pool {
	if name == "" || name == contract.DefaultPool {
		return Pool{j.o.MaxRunning, j.o.Limits}
	}
	return j.o.Pools[name]
}

// traits are what decides where a task waits and which limits apply to it.
type traits struct {
	pool   contract.Pool
	tenant contract.Tenant
	thread contract.ThreadID
	kind   string // type of the sub-agent
}

// keys are the limited ones of a task, with their limits.
func (l Limits) keys(t traits) []limit {
	var out []limit
	add := func(n int, key string) {
		if n > 0 {
			out = append(out, limit{key, n})
		}
	}
	add(l.PerTenant, "tenant "+string(t.tenant))
	add(l.PerThread, fmt.Sprintf("thread %s of tenant %s", t.thread, t.tenant))
	add(l.PerType[t.kind], "type "+t.kind)
	return out
}

type limit struct {
	key string
	max int
}

// use is who holds slots at one moment, found by going through a history once.
type use struct {
	j     *judge
	held  map[string]holding
	slots map[slot]string
}

type slot struct {
	pool   contract.Pool
	number int
}

type holding struct {
	id     string
	traits traits
	slot   slot
	proof  Evidence
}

func (j *judge) newUse() *use { return &use{j, map[string]holding{}, map[slot]string{}} }

func (u *use) leave(id string) {
	if h, ok := u.held[id]; ok {
		delete(u.held, id)
		if u.slots[h.slot] == id {
			delete(u.slots, h.slot)
		}
	}
}

// take gives a task its slot and says whether that was one too many; with quiet it
// says nothing.
func (u *use) take(h holding, quiet bool) {
	defer func() { u.held[h.id], u.slots[h.slot] = h, h.id }()
	if quiet {
		return
	}
	if other, ok := u.slots[h.slot]; ok && other != h.id && h.slot.number > 0 {
		u.j.bad(Capacity, h.id, fmt.Sprintf("it got slot %d, which %s had", h.slot.number, other), u.held[other].proof, h.proof)
	}
	pool := u.j.pool(h.traits.pool)
	u.count(h, pool.MaxRunning, "", func(holding) bool { return true })
	for _, l := range pool.Limits.keys(h.traits) {
		u.count(h, l.max, " of "+l.key, func(o holding) bool { return slices.Contains(pool.Limits.keys(o.traits), l) })
	}
}

func (u *use) count(h holding, max int, whose string, counts func(holding) bool) {
	if max < 1 || len(u.held) < max {
		return
	}
	proof := []Evidence{h.proof}
	for id, o := range u.held {
		if id != h.id && o.slot.pool == h.slot.pool && counts(o) {
			proof = append(proof, o.proof)
		}
	}
	if len(proof) > max {
		u.j.bad(Capacity, h.id, fmt.Sprintf("%d tasks%s had a slot at once, allowed are %d", len(proof), whose, max), proof...)
	}
}

// first is a first grant: when a task got its slot, and when it was stored.
type first struct {
	id     string
	traits traits
	proof  []Evidence
	// before orders the requests.
	before func(first) bool
	at     time.Time
	seq    uint64
}

// overtaken goes through first grants in their order and looks for tasks that were
// granted after others which had been stored later.
func (j *judge) overtaken(grants []first) {
	// Of those granted so far that have these keys, the one that was stored last.
	latest := map[string]first{}
	for _, g := range grants {
		keys := j.pool(g.traits.pool).Limits.keys(g.traits)
		if b, ok := latest[name(g.traits.pool, keys)]; ok && g.before(b) {
			j.bad(Order, g.id, b.id+" was stored later and admitted earlier", append(slices.Clone(b.proof), g.proof...)...)
			continue
		}
		for some := range 1 << len(keys) {
			var subset []limit
			for i, k := range keys {
				if some&(1<<i) != 0 {
					subset = append(subset, k)
				}
			}
			if key := name(g.traits.pool, subset); latest[key].id == "" || latest[key].before(g) {
				latest[key] = g
			}
		}
	}
}

func name(pool contract.Pool, keys []limit) string {
	var b strings.Builder
	b.WriteString(string(pool))
	for _, k := range keys {
		b.WriteString("\x00" + k.key)
	}
	return b.String()
}
