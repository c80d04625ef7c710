package admission

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/fault"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// workers is how many writes other than fenced ones may be in flight.
const workers = 8

// purgedMarkerTTL is how long the marker of a purged record lives: as long as a
// request that is stored again by a late lead is recognised.
const purgedMarkerTTL = time.Hour

// reign leads until ctx is done or the key is lost. All its goroutines have
// ended when it returns.
type reign struct {
	s      *Service
	epoch  uint64
	offset time.Duration
	began  time.Time
	gate   *gate.Gate
	bodies *bodies
	dead   chan letter
	events chan gate.Event
	status chan statusCall
	// What the gate has asked for and nobody has taken yet. Grants have a queue and
	// a worker of their own, so that they are sent in the order of their records.
	fenceQ []gate.FirstWrite
	grantQ []gate.Action
	workQ  []gate.Action
	// tellQ has who is to be told to wait. There may be many of them after a
	// take-over, and nothing waits for it: it comes after all other work.
	tellQ []gate.Action
	// ends are the terminal events that executors store; late has the tasks whose
	// executor has had its turn.
	ends ends
	late sync.Map
	past past
}

// letter is a message of the request stream that nobody can use.
type letter struct {
	m      bus.Message
	reason error
}

type statusCall struct {
	req   admissionapi.StatusRequest
	reply chan<- admissionapi.Status
}

func (s *Service) reign(ctx context.Context, won crown) error {
	r := &reign{
		s: s, epoch: won.rev, offset: won.offset, bodies: newBodies(s.bus, s.pools()), began: s.now(),
		ends: ends{turn: s.turn}, events: make(chan gate.Event, 1024), dead: make(chan letter, 64), status: make(chan statusCall),
		gate: gate.New(gate.Config{
			MaxRunning: s.cfg.MaxRunning, Limits: s.cfg.Limits, Pools: s.cfg.Pools, Reject: s.cfg.Policy == "reject", LeaseTTL: s.cfg.LeaseTTL, RetryLost: s.cfg.RetryLost, MaxLost: s.cfg.MaxLost,
			CancelGrace: s.cfg.CancelGrace, OverrunGrace: 30 * time.Second, Retention: s.cfg.Retention, MarkerTTL: purgedMarkerTTL,
		}),
	}
	r.bodies.probe, r.past.read = s.probe, make(chan struct{})
	f := &fence{s: s, writes: make(chan gate.FirstWrite), tell: r.tell, requests: r.bodies, look: r.bucketEvent, bury: r.buryRequest, inherited: math.MaxUint64}
	// Unless this is known, every request counts as an earlier leader's.
	look, done := context.WithTimeout(ctx, s.cfg.LeaderTTL/4)
	if work, err := s.bus.JS.Stream(look, s.bus.Names.WorkStream()); err == nil {
		f.inherited = work.CachedInfo().State.LastSeq
	}
	done()
	f.won(won.rev, won.sent)

	rctx, end := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	part := func(name string, run func(context.Context) error) {
		wg.Go(func() {
			if err := r.guard(name, func() error { return run(rctx) }); err != nil {
				end(fmt.Errorf("%s: %w", name, err))
			}
		})
	}
	work := make(chan gate.Action)
	part("leader key", f.run)
	part("task bucket", r.watchBucket)
	part("terminal events", r.watchEnds)
	part("request stream", r.watchRequests)
	part("past requests", r.awaitPast)
	part("dead letters", r.buryAll)
	part("advisories", r.watchAdvisories)
	for range workers {
		part("worker", func(ctx context.Context) error { return r.work(ctx, work) })
	}
	grants := make(chan gate.Action)
	part("grants", func(ctx context.Context) error { return r.sendGrants(ctx, grants) })
	part("status", r.serveStatus)
	end(r.guard("gate", func() error { r.loop(rctx, f.writes, grants, work); return nil }))
	s.metrics.observe(nil) // the rest may have to wait on a line that carries nothing
	wg.Wait()

	err := context.Cause(rctx)
	if !errors.Is(err, errDeposed) {
		// The key is still ours: whoever can do better may have it at once.
		f.abdicate()
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// loop owns the gate. It never blocks on anything but its select, so that
// neither readers nor writers can wait for each other in a circle.
func (r *reign) loop(ctx context.Context, fenced chan<- gate.FirstWrite, grants, work chan<- gate.Action) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	opened := false
	for {
		if !opened && r.gate.Open() {
			opened = true
			r.s.ready("admission", nil)
			st := r.gate.Stats()
			r.s.log.Info().Uint64("epoch", r.epoch).Int("running", st.Running).Int("queued", st.Queued).Msg("gate open")
			r.workQ = append(r.workQ, publishLimits{})
		}
		r.s.metrics.observe(r.gate)
		if at := sooner(r.gate.Next(), r.ends.next()); at.IsZero() {
			timer.Reset(time.Hour)
		} else {
			timer.Reset(max(0, at.Sub(r.s.now())))
		}
		var fenceOut chan<- gate.FirstWrite
		var nextFenced gate.FirstWrite
		if len(r.fenceQ) > 0 {
			fenceOut, nextFenced = fenced, r.fenceQ[0]
		}
		grantOut, nextGrant := head(grants, r.grantQ)
		from := &r.workQ
		if len(r.workQ) == 0 {
			from = &r.tellQ
		}
		workOut, nextWork := head(work, *from)
		select {
		case <-ctx.Done():
			return
		case ev := <-r.events:
			r.apply(ev)
			// Take what else is there: a burst costs one round of timers, not many. The
			// next first write does not wait for its end: they go one after the other.
			for range 255 {
				if len(r.fenceQ) > 0 {
					select {
					case fenced <- r.fenceQ[0]:
						r.fenceQ = r.fenceQ[1:]
					default:
					}
				}
				select {
				case ev := <-r.events:
					r.apply(ev)
					continue
				default:
				}
				break
			}
		case <-timer.C:
			r.apply(gate.Tick{})
			for _, a := range r.ends.overdue(r.s.now()) {
				r.late.Store(a.TaskID, true)
				r.workQ = append(r.workQ, a)
			}
		case fenceOut <- nextFenced:
			r.fenceQ = r.fenceQ[1:]
		case grantOut <- nextGrant:
			r.grantQ = r.grantQ[1:]
		case workOut <- nextWork:
			*from = (*from)[1:]
		case call := <-r.status:
			call.reply <- r.snapshot(call.req)
		}
	}
}

func (r *reign) apply(ev gate.Event) {
	switch e := ev.(type) {
	case endSeen:
		a, awaited := r.ends.saw(e.subject)
		if !awaited {
			return
		}
		ev = gate.TerminalEventStored{TaskID: a.TaskID}
	case endOwed:
		if !r.ends.expect(e.subject, e.of, r.s.now()) {
			return
		}
		ev = gate.TerminalEventStored{TaskID: e.of.TaskID}
	}
	if w, ok := ev.(gate.FirstWritten); ok && w.Outcome == gate.Stored && w.Record.State == contract.StateFailed {
		r.s.metrics.refusals.WithLabelValues(string(w.Record.ErrorCode)).Inc()
	}
	for _, a := range r.judge(ev) {
		switch a := a.(type) {
		case gate.FirstWrite:
			r.fenceQ = append(r.fenceQ, a)
		case gate.SendGrant:
			r.grantQ = append(r.grantQ, a)
		case gate.TellQueued:
			r.tellQ = append(r.tellQ, a)
		case gate.StoreTerminalEvent:
			switch owed := r.owed(ev, a); {
			case owed == "":
				r.workQ = append(r.workQ, a)
			case r.ends.expect(owed, a, r.s.now()):
				r.apply(gate.TerminalEventStored{TaskID: a.TaskID})
			}
		default:
			r.workQ = append(r.workQ, a)
		}
	}
}

// sooner is the earlier of two times, where zero is never.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// head offers the first of a queue to ch; an empty queue offers nothing.
func head(ch chan<- gate.Action, queue []gate.Action) (chan<- gate.Action, gate.Action) {
	if len(queue) == 0 {
		return nil, nil
	}
	return ch, queue[0]
}

// tell hands an event to the loop.
func (r *reign) tell(ctx context.Context, ev gate.Event) {
	select {
	case r.events <- ev:
	case <-ctx.Done():
	}
}

// watchBucket reads records, leases, cancellations and the leader key.
func (r *reign) watchBucket(ctx context.Context) error {
	prefix := r.s.bus.KV("")
	complete := false
	return r.s.bus.Watch(ctx, bus.Watch{
		// All keys by one pattern, and what is not ours is dropped here. With several
		// patterns the server searches all keys again for each message, as soon as
		// records have moved: thousands of ended tasks would take seconds to read.
		Stream: r.s.bus.TaskStream(), LastPerSubject: true, Subjects: []string{r.s.bus.KV(">")},
	}, func(m bus.Message, pending uint64) error {
		// Everything that earlier leaders wrote on absent records has a lower
		// sequence than our key, or was refused. But a record that moves while it is
		// read leaves its old place and comes again behind our key. So the view is
		// whole only when nothing is behind a message either: then it is what the
		// bucket held at that moment. Our own renewals see to it that there is such
		// a message.
		defer func() {
			if !complete && pending == 0 && m.Seq >= r.epoch {
				complete = true
				r.tell(ctx, gate.ViewRead{})
			}
		}()
		kind, id, err := contract.ParseKey(strings.TrimPrefix(m.Subject, prefix))
		if err != nil {
			r.s.log.Warn().Err(err).Uint64("seq", m.Seq).Msg("the task bucket holds a key that is none of ours; ignored")
			return nil
		}
		if kind == contract.KeyLeader && m.Seq > r.epoch {
			v, err := contract.Decode[contract.Leader](m.Data)
			if m.Deleted() || err != nil || v.Holder != r.s.writer.ID() {
				return errDeposed
			}
		}
		if ev := r.bucketEvent(kind, contract.TaskID(id), m); ev != nil {
			r.tell(ctx, r.quarantine(ctx, ev))
		}
		return nil
	})
}

func (r *reign) bucketEvent(kind contract.KeyKind, id contract.TaskID, m bus.Message) gate.Event {
	switch kind {
	case contract.KeyTask:
		if m.Deleted() {
			return gate.RecordPurged{TaskID: id, Revision: m.Seq}
		}
		rec, err := contract.DecodeTaskRecord(m.Data)
		if err != nil || rec.TaskID != id {
			// Whatever this is, the task must not be granted over it.
			r.s.log.Error().Err(err).Str("task_id", string(id)).Uint64("seq", m.Seq).Msg("a task record cannot be read; the task counts as ended")
			rec = contract.TaskRecord{TaskID: id, State: contract.StateFailed}
		}
		return gate.RecordSeen{Revision: m.Seq, Record: rec}
	case contract.KeyLease:
		if m.Deleted() {
			return gate.LeaseExpired{TaskID: id}
		}
		return gate.LeaseSeen{TaskID: id}
	case contract.KeyCancel:
		if !m.Deleted() {
			return gate.CancelSeen{TaskID: id}
		}
	}
	return nil
}

// watchRequests reads the request stream: one cursor, in stream order.
func (r *reign) watchRequests(ctx context.Context) error {
	return r.s.bus.Watch(ctx, bus.Watch{
		Stream: r.s.bus.Names.WorkStream(), StartSeq: 1, Subjects: []string{r.s.bus.Names.TaskRequests()},
		OnStart: func(pending uint64) {
			if pending == 0 {
				r.pastIsRead(ctx)
			}
		},
	}, func(m bus.Message, pending uint64) error {
		b, err := r.bodies.read(m)
		switch {
		case err != nil:
			// Without a task id there is no record and no event: out with it.
			r.s.log.Error().Err(err).Uint64("seq", m.Seq).Msg("the request stream holds a message that is no request")
			r.giveUp(ctx, m, err)
		default:
			if f := fault.As(b.invalid); f != nil {
				r.s.panicked(f, "request stream", b.id)
			}
			if b.invalid == nil && r.s.crashes.tooMany(b.id) {
				r.giveUp(ctx, m, errCrashes)
			}
			if b.invalid != nil {
				r.s.log.Warn().Err(b.invalid).Str("task_id", string(b.id)).Uint64("seq", m.Seq).Msg("a request cannot be used; it ends as failed")
				r.giveUp(ctx, m, b.invalid)
			}
			r.bodies.put(b)
			r.tell(ctx, gate.RequestStored{Request: r.request(b)})
		}
		r.past.seen.Store(m.Seq)
		if pending == 0 {
			r.pastIsRead(ctx)
		}
		return nil
	})
}

// past is how far the request stream has been read that was there when the reign
// began.
type past struct {
	seen atomic.Uint64 // sequence of the newest message that was told
	once sync.Once
	read chan struct{} // closed when all of it was told
}

// pastIsRead tells that the past of the request stream is complete.
func (r *reign) pastIsRead(ctx context.Context) {
	r.past.once.Do(func() {
		r.tell(ctx, gate.WorkRead{})
		close(r.past.read)
	})
}

// awaitPast looks whether there is still something to read while the gate waits for
// it: the newest requests may be removed just before they are sent, by an earlier
// leader or by hand, and then no message tells that it is the last one.
func (r *reign) awaitPast(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.past.read:
			return nil
		case <-time.After(time.Second):
		}
		seen := r.past.seen.Load()
		last, err := r.s.bus.Last(ctx, r.s.bus.Names.WorkStream(), r.s.bus.Names.TaskRequests())
		if errors.Is(err, bus.ErrNotFound) || err == nil && last.Seq <= seen {
			r.pastIsRead(ctx)
		}
	}
}

// giveUp leaves a message to the dead letters. It does not wait until it lies
// there: one bad message must not hold up those behind it.
func (r *reign) giveUp(ctx context.Context, m bus.Message, reason error) {
	select {
	case r.dead <- letter{m, reason}:
	case <-ctx.Done():
	}
}

func (r *reign) buryAll(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case l := <-r.dead:
			r.repeat(ctx, "dead letter", "", func() error { return r.bury(ctx, l.m, l.reason) })
		}
	}
}

func (r *reign) request(b body) gate.Request {
	wait := r.s.cfg.QueueTimeout
	if own := time.Duration(b.req.QueueTimeoutSeconds) * time.Second; own > 0 && own < wait {
		wait = own
	}
	req := gate.Request{
		Seq: b.seq, TaskID: b.id, Tenant: b.tenant, Pool: b.req.Pool, ThreadID: b.req.ThreadID, Type: b.req.Subagent.Name,
		QueuedAt: b.queued, Deadline: b.queued.Add(wait - r.offset),
		// While nobody led, nobody told that it waits.
		Untold: b.queued.Add(2*r.s.cfg.LeaderTTL - r.offset).After(r.began),
	}
	if req.Pool == contract.DefaultPool {
		req.Pool = ""
	}
	if b.invalid == nil && r.s.crashes.tooMany(b.id) {
		req.Invalid, req.Code = errCrashes.Error(), contract.ErrInternal
	}
	if errors.Is(b.invalid, errCrashes) {
		req.Code = contract.ErrInternal
	}
	if errors.Is(b.invalid, contract.ErrNotPermitted) {
		req.Code = contract.ErrPolicyDenied
	}
	if b.invalid != nil {
		req.Invalid = b.invalid.Error()
		req.Pool = "" // whatever it says
	}
	return req
}

func (r *reign) snapshot(req admissionapi.StatusRequest) admissionapi.Status {
	st := r.gate.Stats()
	out := admissionapi.Status{
		Leader: r.s.writer.ID(), Epoch: r.epoch, Running: st.Running, Queued: st.Queued, MaxQueued: r.s.cfg.MaxQueued,
		Slots: []admissionapi.Slot{}, Totals: r.s.metrics.totals(),
	}
	if r.s.cfg.Policy == "reject" {
		out.MaxQueued = 0
	}
	out.OldestQueuedAt = queuedAt(st.Oldest)
	for _, p := range st.Pools {
		out.MaxRunning += p.MaxRunning
		out.Pools = append(out.Pools, admissionapi.Pool{
			Pool: p.Name, MaxRunning: p.MaxRunning, Running: p.Running, Queued: p.Queued, OldestQueuedAt: queuedAt(p.Oldest),
		})
	}
	for id, s := range st.Slots {
		slot := admissionapi.Slot{Pool: s.Pool, Slot: s.Slot, TaskID: id, Executor: s.Executor}
		if !s.ExpiresAt.IsZero() {
			slot.ExpiresAt = ptr(s.ExpiresAt.UTC())
		}
		out.Slots = append(out.Slots, slot)
	}
	sortSlots(out.Slots)
	out.Slots = out.Slots[:min(len(out.Slots), admissionapi.MaxSlots)]
	if req.TaskID != "" {
		if p := r.gate.Position(req.TaskID); p > 0 {
			out.QueuePosition = &p
		}
	}
	return out
}

func queuedAt(r *gate.Request) *time.Time {
	if r == nil {
		return nil
	}
	return ptr(r.QueuedAt.UTC())
}
