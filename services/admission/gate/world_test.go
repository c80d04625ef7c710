package gate

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/herdgate/herdgate/pkg/contract"
)

// world is a model of everything around a gate: the streams, the executors, the
// leaders. Its steps interleave in any order; what the server would refuse is
// refused here.
type world struct {
	t       *rapid.T
	cfg     Config
	now     time.Time
	seq     uint64 // of the task bucket
	workSeq uint64
	leader  uint64 // revision of the leader key
	reigns  []*rule
	queue   map[contract.TaskID]*Request // stored requests
	tasks   map[contract.TaskID]*truth
	order   []contract.TaskID // of submission
	log     []change          // of the task bucket, for watches
}

// truth is what the server holds about a task.
type truth struct {
	rec      *contract.TaskRecord
	rev      uint64
	purged   bool
	lease    bool
	leaseTo  time.Time
	cancel   bool
	events   int // terminal events stored
	granted  int // newest attempt whose grant message is stored
	first    bool
	claims   map[int]bool
	terminal string // fingerprint of the end, once there is one
}

type change struct {
	seq uint64
	ev  Event
}

// rule is one reign: a gate with what it has in flight and what it has read.
type rule struct {
	gate    *Gate
	rev     uint64
	read    int // position in log
	work    uint64
	viewed  bool
	started bool
	pending []Action
	results []Event
}

// limits draws what bounds a world's pools.
func limits(t *rapid.T, label string) Limits {
	l := Limits{PerTenant: rapid.IntRange(0, 2).Draw(t, label+" per tenant"), PerThread: rapid.IntRange(0, 2).Draw(t, label+" per thread")}
	if n := rapid.IntRange(0, 2).Draw(t, label+" per type"); n > 0 {
		l.PerType = map[string]int{"x": n}
	}
	return l
}

func newWorld(t *rapid.T) *world {
	w := &world{
		t: t, now: time.Unix(1_000_000, 0), queue: map[contract.TaskID]*Request{}, tasks: map[contract.TaskID]*truth{},
		cfg: Config{
			MaxRunning: rapid.IntRange(1, 3).Draw(t, "max_running"), LeaseTTL: 15 * time.Second,
			RetryLost: rapid.SampledFrom([]RetryLost{RetryNotStarted, RetryNever, RetryAlways}).Draw(t, "retry_lost"),
			MaxLost:   2, CancelGrace: 2 * time.Second, OverrunGrace: 30 * time.Second, Retention: time.Hour, MarkerTTL: 10 * time.Minute,
		},
	}
	if rapid.Bool().Draw(t, "limits") {
		w.cfg.Limits = limits(t, "default")
	}
	if rapid.Bool().Draw(t, "pools") {
		w.cfg.Pools = map[contract.Pool]Pool{"big": {MaxRunning: rapid.IntRange(1, 3).Draw(t, "max_running of big"), Limits: limits(t, "big")}}
	}
	w.cfg.Reject = rapid.IntRange(0, 9).Draw(t, "reject") == 0
	w.crown()
	return w
}

// crown begins a new reign: the leader key gets a new revision.
func (w *world) crown() {
	w.seq++
	w.leader = w.seq
	w.reigns = append(w.reigns, &rule{gate: New(w.cfg), rev: w.leader})
}

func (w *world) current() *rule { return w.reigns[len(w.reigns)-1] }

func (w *world) truth(id contract.TaskID) *truth {
	tr := w.tasks[id]
	if tr == nil {
		tr = &truth{claims: map[int]bool{}}
		w.tasks[id] = tr
	}
	return tr
}

func (w *world) change(ev Event) {
	w.seq++
	w.log = append(w.log, change{w.seq, ev})
}

// put stores a record and checks what must hold for every write.
func (w *world) put(id contract.TaskID, rec contract.TaskRecord) uint64 {
	tr := w.truth(id)
	if tr.terminal != "" && !tr.purged {
		w.t.Fatalf("I4: %s was written over: %s became %s", id, tr.terminal, rec.State)
	}
	w.seq++
	tr.rec, tr.rev, tr.purged = &rec, w.seq, false
	if rec.State.Terminal() {
		tr.terminal = string(rec.State)
	}
	w.log = append(w.log, change{w.seq, RecordSeen{Revision: w.seq, Record: rec}})
	use := newUse(w.cfg)
	for _, t := range w.tasks {
		if t.rec != nil && t.rec.State.Live() {
			use.add(t.rec.Pool, traits{t.rec.Tenant, t.rec.ThreadID, t.rec.SubagentType})
		}
	}
	if why := use.over(); why != "" {
		w.t.Fatalf("I1: %s", why)
	}
	return w.seq
}

// use is the reference for caps and limits: it counts, and knows nothing of
// groups, heaps and ranks.
type use struct {
	cfg    Config
	counts map[string]int
	max    map[string]int
}

func newUse(cfg Config) *use { return &use{cfg: cfg, counts: map[string]int{}, max: map[string]int{}} }

func (u *use) bounds(pool contract.Pool, t traits) map[string]int {
	p := Pool{u.cfg.MaxRunning, u.cfg.Limits}
	if pool != "" && pool != contract.DefaultPool {
		p = u.cfg.Pools[pool]
	}
	all := map[string]int{fmt.Sprintf("pool %q", pool): p.MaxRunning}
	if n := p.Limits.PerTenant; n > 0 {
		all[fmt.Sprintf("pool %q tenant %q", pool, t.tenant)] = n
	}
	if n := p.Limits.PerThread; n > 0 {
		all[fmt.Sprintf("pool %q thread %q of %q", pool, t.thread, t.tenant)] = n
	}
	if n := p.Limits.PerType[t.kind]; n > 0 {
		all[fmt.Sprintf("pool %q type %q", pool, t.kind)] = n
	}
	return all
}

func (u *use) add(pool contract.Pool, t traits) {
	for k, n := range u.bounds(pool, t) {
		u.counts[k]++
		u.max[k] = n
	}
}

func (u *use) over() string {
	for k, n := range u.counts {
		if n > u.max[k] {
			return fmt.Sprintf("%s has %d live slots, its limit is %d", k, n, u.max[k])
		}
	}
	return ""
}

func (u *use) room(pool contract.Pool, t traits) bool {
	for k, n := range u.bounds(pool, t) {
		if u.counts[k] >= n {
			return false
		}
	}
	return true
}

func holds(g *Gate, t *task) bool {
	_, ok := g.poolOf(t.rec.Pool).slots.of[t.id]
	return ok
}

// next is the reference for the choice: of all that the gate knows to wait, the
// oldest that fits.
func next(g *Gate) *task {
	u := newUse(g.cfg)
	var waiting []*task
	for _, t := range g.tasks {
		switch {
		case t.rec != nil && (t.rec.State.Live() || t.rec.State.Terminal() && !t.eventStored && holds(g, t)):
			// Of those that have ended, who had a slot keeps it until that is told.
			u.add(t.rec.Pool, traits{t.rec.Tenant, t.rec.ThreadID, t.rec.SubagentType})
		case t.rec == nil && t.req != nil && t.endPlace == nil && !t.purged:
			waiting = append(waiting, t)
		}
	}
	slices.SortFunc(waiting, func(a, b *task) int { return cmp.Compare(a.req.Seq, b.req.Seq) })
	ahead := map[contract.Pool]int{}
	for _, t := range waiting {
		ahead[t.req.Pool]++
		if got := g.Position(t.id); got != ahead[t.req.Pool] && t.place != nil {
			panic(fmt.Sprintf("ADM-18: %s is told to be at place %d, it is at %d", t.id, got, ahead[t.req.Pool]))
		}
	}
	for _, t := range waiting {
		if t.place != nil && u.room(t.req.Pool, t.req.traits()) {
			return t
		}
	}
	return nil
}

// do performs one action of a reign as the server would.
func (w *world) do(r *rule, a Action) {
	switch a := a.(type) {
	case FirstWrite:
		out := FirstWritten{TaskID: a.TaskID, Outcome: Absent}
		if r.rev != w.leader {
			return // refused: the reign is over
		}
		if tr := w.truth(a.TaskID); tr.rec != nil {
			w.t.Fatalf("a first write on %s, which is %s", a.TaskID, tr.rec.State)
		}
		if a.Record.State == contract.StateGranted {
			for _, id := range w.order {
				q, stored := w.queue[id]
				// Of the same keys: no limit tells them apart.
				own := w.queue[a.TaskID]
				if stored && own != nil && q.Seq < a.RequestSeq && q.Pool == own.Pool && q.traits() == own.traits() && w.truth(id).rec == nil {
					w.t.Fatalf("I2: %s was granted before %s", a.TaskID, id)
				}
			}
			w.truth(a.TaskID).first = true
		}
		// As the shell does: the record is completed from the request.
		rec := a.Record
		if q := w.queue[a.TaskID]; q != nil {
			rec.Pool, rec.ThreadID, rec.SubagentType = q.Pool, q.ThreadID, q.Type
		}
		rec.Epoch = r.rev
		out.Outcome, out.Record = Stored, rec
		if rapid.IntRange(0, 15).Draw(w.t, "lost write") == 0 {
			out = FirstWritten{TaskID: a.TaskID, Outcome: Absent}
			r.results = append(r.results, out)
			return
		}
		out.Revision = w.put(a.TaskID, rec)
		r.results = append(r.results, out)
	case MoveRecord:
		tr := w.truth(a.TaskID)
		out := Moved{TaskID: a.TaskID, Outcome: Refused}
		if tr.rec != nil && tr.rev == a.Revision {
			out.Outcome, out.Record = Stored, a.Record
			out.Revision = w.put(a.TaskID, a.Record)
		}
		r.results = append(r.results, out)
	case SendGrant:
		tr := w.truth(a.TaskID)
		tr.granted = max(tr.granted, a.Record.Attempt)
		r.results = append(r.results, GrantSent{TaskID: a.TaskID, Attempt: a.Record.Attempt})
	case StoreTerminalEvent:
		tr := w.truth(a.TaskID)
		if tr.rec == nil || !tr.rec.State.Terminal() {
			w.t.Fatalf("a terminal event of %s, which has not ended", a.TaskID)
		}
		if tr.events == 0 {
			tr.events++
		}
		r.results = append(r.results, TerminalEventStored{TaskID: a.TaskID})
	case RemoveRequest:
		tr := w.truth(a.TaskID)
		if q := w.queue[a.TaskID]; q != nil && q.Seq == a.Seq {
			if tr.events == 0 && !tr.purged {
				w.t.Fatalf("I4: the request of %s was removed before its event", a.TaskID)
			}
			delete(w.queue, a.TaskID)
		}
		r.results = append(r.results, RequestRemoved{TaskID: a.TaskID})
	case CheckLease:
		r.results = append(r.results, LeaseChecked{TaskID: a.TaskID, Alive: w.truth(a.TaskID).lease})
	case PurgeRecord:
		tr := w.truth(a.TaskID)
		if tr.rec != nil && tr.rev == a.Revision {
			if w.queue[a.TaskID] != nil {
				w.t.Fatalf("%s was purged while its request is stored", a.TaskID)
			}
			w.seq++
			tr.rec, tr.rev, tr.purged = nil, w.seq, true
			w.log = append(w.log, change{w.seq, RecordPurged{TaskID: a.TaskID, Revision: w.seq}})
		}
		r.results = append(r.results, Purged{TaskID: a.TaskID})
	case TellQueued:
	default:
		w.t.Fatalf("unknown action %T", a)
	}
}

func (r *rule) apply(w *world, ev Event) {
	actions := r.gate.Apply(ev, w.now)
	if r.gate.Open() {
		// ADM-05: the choice is the reference's, and none is left undone.
		grant := false
		for _, a := range actions {
			if a, ok := a.(FirstWrite); ok && a.Record.State == contract.StateGranted {
				grant = true
				if want := next(r.gate); want == nil || want.id != a.TaskID {
					w.t.Fatalf("I2: %s is granted; the reference chooses %+v", a.TaskID, want)
				}
			}
		}
		if want := next(r.gate); !grant && r.gate.fenced == nil && want != nil {
			w.t.Fatalf("ADM-03: %s could be granted, and nothing is done", want.id)
		}
	}
	r.pending = append(r.pending, actions...)
	first := 0
	for _, a := range r.pending {
		if _, ok := a.(FirstWrite); ok {
			first++
		}
	}
	if first > 1 {
		w.t.Fatalf("%d first writes in flight", first)
	}
}

// feed gives a reign one piece of what it has not read yet; false when there is
// nothing.
func (w *world) feed(r *rule, kind int) bool {
	switch kind {
	case 0: // the bucket
		if r.read < len(w.log) {
			c := w.log[r.read]
			r.read++
			r.apply(w, c.ev)
			return true
		}
		if !r.viewed && w.seq >= r.rev {
			r.viewed = true
			r.apply(w, ViewRead{})
			return true
		}
	case 1: // the request stream
		var next *Request
		for _, q := range w.queue {
			if q.Seq > r.work && (next == nil || q.Seq < next.Seq) {
				next = q
			}
		}
		if next != nil {
			r.work = next.Seq
			r.apply(w, RequestStored{*next})
			return true
		}
		if !r.started {
			r.started = true
			r.apply(w, WorkRead{})
			return true
		}
	case 2: // answers
		if len(r.results) > 0 {
			ev := r.results[0]
			r.results = r.results[1:]
			r.apply(w, ev)
			return true
		}
	case 3: // writes
		if len(r.pending) > 0 {
			i := 0
			if len(r.pending) > 1 {
				i = rapid.IntRange(0, len(r.pending)-1).Draw(w.t, "which write")
			}
			a := r.pending[i]
			r.pending = append(r.pending[:i:i], r.pending[i+1:]...)
			w.do(r, a)
			return true
		}
	case 4: // time
		if at := r.gate.Next(); !at.IsZero() && !w.now.Before(at) {
			r.apply(w, Tick{})
			return true
		}
	}
	return false
}

func (w *world) pick(what string, ok func(*truth) bool) (contract.TaskID, bool) {
	var ids []contract.TaskID
	for _, id := range w.order {
		if ok(w.tasks[id]) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return "", false
	}
	return rapid.SampledFrom(ids).Draw(w.t, what), true
}

func (w *world) run(r *rule, moves int) {
	for range moves {
		w.feed(r, rapid.IntRange(0, 4).Draw(w.t, "kind"))
	}
}

// steps are everything that can happen.
func (w *world) steps() map[string]func(*rapid.T) {
	skip := func(ok bool) {
		if !ok {
			w.t.Skip()
		}
	}
	return map[string]func(*rapid.T){
		"submit": func(t *rapid.T) {
			skip(len(w.order) < 12)
			id := contract.TaskID(fmt.Sprintf("t%d", len(w.order)))
			w.workSeq++
			w.order = append(w.order, id)
			w.truth(id)
			w.queue[id] = &Request{Seq: w.workSeq, TaskID: id, Deadline: w.now.Add(time.Duration(rapid.IntRange(1, 600).Draw(t, "wait")) * time.Second)}
			q := w.queue[id]
			q.Tenant, q.ThreadID, q.Type = rapid.SampledFrom([]contract.Tenant{"a", "b"}).Draw(t, "tenant"), rapid.SampledFrom([]contract.ThreadID{"1", "2"}).Draw(t, "thread"), rapid.SampledFrom([]string{"x", "y"}).Draw(t, "type")
			if w.cfg.Pools != nil {
				q.Pool = rapid.SampledFrom([]contract.Pool{"", "big"}).Draw(t, "pool")
			}
		},
		"gate moves": func(t *rapid.T) {
			w.run(w.current(), rapid.IntRange(1, 12).Draw(t, "moves"))
		},
		"gate settles": func(*rapid.T) {
			r := w.current()
			for moved := true; moved; {
				moved = false
				for kind := range 5 {
					moved = w.feed(r, kind) || moved
				}
			}
		},
		"deposed gate moves": func(t *rapid.T) {
			skip(len(w.reigns) > 1)
			// It has not noticed yet: it reads, decides and writes as before.
			w.run(w.reigns[len(w.reigns)-2], rapid.IntRange(1, 6).Draw(t, "moves"))
		},
		"new leader": func(*rapid.T) {
			skip(len(w.reigns) < 4)
			w.crown()
		},
		"claim": func(*rapid.T) {
			id, ok := w.pick("claim", func(tr *truth) bool {
				return tr.rec != nil && tr.rec.State == contract.StateGranted && tr.granted >= tr.rec.Attempt
			})
			skip(ok)
			tr := w.tasks[id]
			tr.lease, tr.leaseTo = true, w.now.Add(w.cfg.LeaseTTL)
			w.change(LeaseSeen{TaskID: id})
			if tr.claims[tr.rec.Attempt] {
				w.t.Fatalf("I5: attempt %d of %s was claimed twice", tr.rec.Attempt, id)
			}
			tr.claims[tr.rec.Attempt] = true
			rec := *tr.rec
			rec.State, rec.TimeoutSeconds = contract.StateRunning, 3600
			w.put(id, rec)
		},
		"renew": func(*rapid.T) {
			id, ok := w.pick("renew", func(tr *truth) bool { return tr.rec != nil && tr.rec.State == contract.StateRunning && tr.lease })
			skip(ok)
			w.tasks[id].leaseTo = w.now.Add(w.cfg.LeaseTTL)
			w.change(LeaseSeen{TaskID: id})
		},
		"expire": func(*rapid.T) {
			id, ok := w.pick("expire", func(tr *truth) bool { return tr.lease })
			skip(ok)
			w.tasks[id].lease = false
			w.change(LeaseExpired{TaskID: id})
		},
		"finish": func(*rapid.T) {
			id, ok := w.pick("finish", func(tr *truth) bool { return tr.rec != nil && tr.rec.State == contract.StateRunning })
			skip(ok)
			w.end(id)
		},
		"hand back": func(t *rapid.T) {
			id, ok := w.pick("hand back", func(tr *truth) bool { return tr.rec != nil && tr.rec.State == contract.StateRunning })
			skip(ok)
			rec := *w.tasks[id].rec
			rec.State, rec.Started = contract.StateReleased, rapid.Bool().Draw(t, "started")
			w.put(id, rec)
		},
		"cancel": func(*rapid.T) {
			id, ok := w.pick("cancel", func(tr *truth) bool { return !tr.cancel })
			skip(ok)
			w.tasks[id].cancel = true
			w.change(CancelSeen{TaskID: id})
		},
		"time passes": func(t *rapid.T) {
			w.now = w.now.Add(time.Duration(rapid.IntRange(1, 20).Draw(t, "seconds")) * time.Second)
		},
	}
}

func (w *world) end(id contract.TaskID) {
	rec := *w.tasks[id].rec
	rec.State = contract.StateCompleted
	if rec.CancelRequested || w.tasks[id].cancel {
		rec.State = contract.StateCancelled
	}
	at := w.now
	rec.FinishedAt = &at
	w.put(id, rec)
	if rapid.Bool().Draw(w.t, "event too") {
		w.tasks[id].events++
	}
}

// settle lets everything that can still happen happen, without further faults:
// executors claim and finish what is granted to them.
func (w *world) settle() {
	for range 10_000 {
		moved := false
		r := w.current()
		for kind := range 5 {
			for w.feed(r, kind) {
				moved = true
			}
		}
		for _, id := range w.order {
			tr := w.tasks[id]
			if tr.rec == nil {
				continue
			}
			if tr.rec.State == contract.StateGranted && tr.granted >= tr.rec.Attempt && !tr.claims[tr.rec.Attempt] {
				tr.claims[tr.rec.Attempt] = true
				tr.lease = true
				w.change(LeaseSeen{TaskID: id})
				rec := *tr.rec
				rec.State = contract.StateRunning
				w.put(id, rec)
				moved = true
			} else if tr.rec.State == contract.StateRunning && tr.lease {
				w.end(id)
				moved = true
			}
		}
		if moved {
			continue
		}
		// A deposed gate may have removed the last request while the new one still
		// gives the executor its time to tell the end.
		if running, _ := r.gate.Counts(); len(w.queue) == 0 && running == 0 {
			break
		}
		at := r.gate.Next()
		if at.IsZero() {
			break
		}
		w.now = at
	}
	for _, id := range w.order {
		tr := w.tasks[id]
		switch {
		case tr.terminal == "":
			w.t.Fatalf("I4: %s never ended: record %+v", id, tr.rec)
		case tr.events != 1:
			w.t.Fatalf("I4: %s has %d terminal events", id, tr.events)
		case w.queue[id] != nil:
			w.t.Fatalf("the request of %s was never removed", id)
		}
	}
	if running, queued := w.current().gate.Counts(); running != 0 || queued != 0 {
		w.t.Fatalf("at the end %d slots are in use and %d tasks wait", running, queued)
	}
}

// I1, I2, I4, I5, ADM-05, ADM-07, ADM-09, ADM-16: whatever interleaves.
func TestGateHolds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		t.Repeat(w.steps())
		w.judged()
		w.settle()
		w.judged()
	})
}
