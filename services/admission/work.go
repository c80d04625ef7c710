package admission

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// publishLimits is the one write that no gate asks for: what this leader enforces.
type publishLimits struct{ gate.Action }

// work makes writes until ctx is done. What fails is repeated: every one of
// these writes is either idempotent or expects a revision.
func (r *reign) work(ctx context.Context, actions <-chan gate.Action) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case a := <-actions:
			if err := r.perform(ctx, a); err != nil {
				return err
			}
		}
	}
}

func (r *reign) act(ctx context.Context, a gate.Action) {
	switch a := a.(type) {
	case gate.MoveRecord:
		r.tell(ctx, r.move(ctx, a))
	case gate.SendGrant:
		r.sendGrant(ctx, a)
	case gate.TellQueued:
		r.repeat(ctx, "queued event", a.TaskID, func() error { return r.tellQueued(ctx, a.RequestSeq, a.Position) })
	case gate.StoreTerminalEvent:
		var owed string
		switch ok := r.repeat(ctx, "terminal event", a.TaskID, func() (err error) { owed, err = r.storeTerminalEvent(ctx, a); return err }); {
		case !ok:
		case owed != "":
			r.tell(ctx, endOwed{subject: owed, of: a})
		default:
			r.tell(ctx, gate.TerminalEventStored{TaskID: a.TaskID})
		}
	case gate.RemoveRequest:
		if a.Bury != "" {
			r.buryRequest(ctx, a.TaskID, a.Seq, errors.New(a.Bury))
		}
		if r.repeat(ctx, "remove request", a.TaskID, func() error { return r.s.bus.DeleteMsg(ctx, r.s.bus.Names.WorkStream(), a.Seq) }) {
			r.bodies.forget(a.Seq)
			r.tell(ctx, gate.RequestRemoved{TaskID: a.TaskID})
		}
	case gate.CheckLease:
		r.checkLease(ctx, a)
	case gate.PurgeRecord:
		r.purge(ctx, a)
	case publishLimits:
		r.repeat(ctx, "limits", "", func() error { return r.publishLimits(ctx) })
	}
}

// repeat runs f until it succeeds; false when ctx was done first.
func (r *reign) repeat(ctx context.Context, what string, id contract.TaskID, f func() error) bool {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 20*time.Millisecond, 2*time.Second
	for {
		err := f()
		if ctx.Err() != nil {
			return false
		}
		if err == nil {
			return true
		}
		r.s.log.Warn().Err(err).Str("task_id", string(id)).Msg(what + ": trying again")
		select {
		case <-ctx.Done():
			return false
		case <-time.After(wait.NextBackOff()):
		}
	}
}

// move writes on an existing record, expecting the revision it was judged by
// (protocol W13, W14). A write in doubt is as good as refused: whatever became
// of it, the record is read before anything else is decided.
func (r *reign) move(ctx context.Context, a gate.MoveRecord) gate.Event {
	rec := a.Record
	rec.Writer = r.s.writer.Next()
	rec.FinishedAt, rec.GrantedAt = utc(rec.FinishedAt), utc(rec.GrantedAt)
	out := gate.Moved{TaskID: a.TaskID, Outcome: gate.Refused}
	data, err := json.Marshal(rec)
	if err != nil {
		r.s.log.Error().Err(err).Str("task_id", string(a.TaskID)).Msg("a record cannot be encoded")
		return out
	}
	key := r.s.bus.KV(contract.TaskKey(a.TaskID))
	ack, err := r.s.bus.Publish(ctx, bus.Write{Subject: key, Data: data, Expect: bus.Seq(a.Revision)})
	if err == nil {
		r.moved(a, rec)
		out.Outcome, out.Revision, out.Record = gate.Stored, ack.Seq, rec
		return out
	}
	if ctx.Err() != nil {
		return out
	}
	r.s.log.Debug().Err(err).Str("task_id", string(a.TaskID)).Msg("a record could not be moved on; reading it")
	r.repeat(ctx, "read record", a.TaskID, func() error {
		last, err := r.s.bus.Last(ctx, r.s.bus.TaskStream(), key)
		if errors.Is(err, bus.ErrNotFound) || err == nil && last.Deleted() {
			return nil
		}
		if err != nil {
			return err
		}
		if got, derr := contract.DecodeTaskRecord(last.Data); derr == nil && got.Writer == rec.Writer {
			r.moved(a, rec)
			out.Outcome, out.Revision, out.Record = gate.Stored, last.Seq, rec
		}
		return nil
	})
	return out
}

func (r *reign) moved(a gate.MoveRecord, rec contract.TaskRecord) {
	if a.Lost {
		r.s.metrics.lost.Inc()
	}
	ev := r.s.log.Info().Str("task_id", string(rec.TaskID)).Str("run_id", string(rec.RunID)).Int("attempt", rec.Attempt).Str("state", string(rec.State))
	ev.Msg("moved a task on")
}

// sendGrant publishes what tells of a grant, in this order: queued (if nobody
// has told yet), admitted, and the grant itself. Protocol W7.
func (r *reign) sendGrant(ctx context.Context, a gate.SendGrant) {
	start := time.Now()
	var impossible error
	gone := false
	ok := r.repeat(ctx, "grant", a.TaskID, func() error {
		b, err := r.bodies.get(ctx, a.RequestSeq)
		if gone = errors.Is(err, bus.ErrNotFound); gone {
			return nil
		}
		if err != nil {
			return err
		}
		if err = r.grant(ctx, a, b); errors.Is(err, bus.ErrTooLarge) || errors.Is(err, eventwrite.ErrImpossible) {
			impossible, err = err, nil
		}
		return err
	})
	switch {
	case !ok:
	case gone:
		r.tell(ctx, gate.RequestRemoved{TaskID: a.TaskID})
	case impossible != nil:
		// To try again is of no use, and would hold up all grants behind it.
		r.s.log.Error().Err(impossible).Str("task_id", string(a.TaskID)).Msg("a grant cannot be sent; its task ends as failed")
		r.tell(ctx, r.fail(ctx, a.Record, a.Revision, impossible))
	default:
		r.granted(ctx, a, start)
	}
}

func (r *reign) grant(ctx context.Context, a gate.SendGrant, b body) error {
	g := &granting{a: a, body: b, span: noSpan, publish: noSpan}
	defer func() { g.endSpans() }()
	if err := r.sendAdmitted(ctx, g); err != nil {
		return err
	}
	if err := r.sendGrantMessage(ctx, g); err != nil {
		return err
	}
	return r.confirmGrant(ctx, g)
}

func (r *reign) tellQueued(ctx context.Context, seq uint64, position int) error {
	b, err := r.bodies.get(ctx, seq)
	if errors.Is(err, bus.ErrNotFound) || err == nil && b.invalid != nil {
		return nil
	}
	if err != nil {
		return err
	}
	end, ok := r.bodies.beginTelling(seq)
	if !ok {
		return nil
	}
	stored := false
	defer func() { end(stored) }()
	w, err := eventwrite.Of(r.s.bus, event.Queued(b.req, b.parent, b.state, position, r.s.source(), b.queued))
	if err != nil {
		return err
	}
	// As the task's first event or not at all: told late it would contradict what
	// was told since.
	w.Expect, w.ExpectSubject = bus.Seq(0), r.s.bus.Names.TaskEvents(b.req.Tenant, b.req.ThreadID, b.req.RunID, b.req.TaskID)
	_, err = r.s.bus.Publish(ctx, w)
	stored = err == nil
	if !bus.Racing(err) {
		if errors.Is(err, bus.ErrConflict) {
			return nil // something is stored
		}
		return err
	}
	// On a cluster a write can be refused although nothing is stored (yet).
	if _, rerr := r.s.bus.Last(ctx, r.s.bus.Names.EventStream(), w.ExpectSubject); rerr != nil {
		return errors.Join(err, rerr)
	}
	return nil
}

// storeTerminalEvent makes sure that a terminal record's event is stored, once:
// the event is made from the record alone and expects that there is none
// (protocol W15). One that its executor may be about to store is not stored here
// before the executor's turn is over: its subject is returned then.
func (r *reign) storeTerminalEvent(ctx context.Context, a gate.StoreTerminalEvent) (owed string, err error) {
	_, late := r.late.LoadAndDelete(a.TaskID)
	last, err := r.s.bus.Last(ctx, r.s.bus.TaskStream(), r.s.bus.KV(contract.TaskKey(a.TaskID)))
	if errors.Is(err, bus.ErrNotFound) || err == nil && last.Deleted() {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	rec, err := contract.DecodeTaskRecord(last.Data)
	if err != nil {
		return "", r.bury(ctx, last, err)
	}
	ev, err := event.Terminal(rec, r.sourceOf(rec))
	if err != nil {
		return "", r.bury(ctx, last, err)
	}
	if rec.Attempt == 0 {
		// It ended while it waited. That it did may not have been told yet: by an
		// earlier leader, or by a worker that is behind.
		if err := r.tellQueued(ctx, rec.RequestSeq, 1); err != nil {
			return "", err
		}
	}
	w, err := eventwrite.Of(r.s.bus, ev)
	if err != nil {
		return "", r.bury(ctx, last, err)
	}
	// It may be stored, or come from the executor. Who publishes a second one all the
	// same is refused by the stream, but heard by all those who subscribe without it.
	_, err = r.s.bus.Last(ctx, r.s.bus.Names.EventStream(), w.Subject)
	switch {
	case err == nil:
		return "", nil
	case !errors.Is(err, bus.ErrNotFound):
		return "", err
	case ev.Source != r.s.source() && !late:
		return w.Subject, nil
	}
	w.Expect = bus.Seq(0)
	// The id would let the server drop a repeat within its window; the
	// expectation does so for ever.
	if _, err = r.s.bus.Publish(ctx, w); err != nil && !errors.Is(err, bus.ErrConflict) {
		return "", err
	}
	return "", nil
}

// sourceOf is the source of a terminal record's event. It is the writer of the
// record, whoever publishes the event: source and id together name it.
func (r *reign) sourceOf(rec contract.TaskRecord) string {
	ours := strings.HasPrefix(rec.Writer, r.s.writer.ID()+"/")
	if !ours && rec.Executor != "" && strings.HasPrefix(rec.Writer, rec.Executor+"-") {
		return "/herdgate/executor/" + rec.Executor
	}
	return r.s.source()
}

func (r *reign) checkLease(ctx context.Context, a gate.CheckLease) {
	alive := false
	if r.repeat(ctx, "look for lease", a.TaskID, func() error {
		last, err := r.s.bus.Last(ctx, r.s.bus.TaskStream(), r.s.bus.KV(contract.LeaseKey(a.TaskID)))
		if errors.Is(err, bus.ErrNotFound) {
			return nil
		}
		alive = err == nil && !last.Deleted()
		return err
	}) {
		r.tell(ctx, gate.LeaseChecked{TaskID: a.TaskID, Alive: alive})
	}
}

// purge removes a record whose retention is over (protocol W17).
func (r *reign) purge(ctx context.Context, a gate.PurgeRecord) {
	_, err := r.s.bus.Publish(ctx, bus.Write{
		Subject: r.s.bus.KV(contract.TaskKey(a.TaskID)), Expect: bus.Seq(a.Revision), TTL: purgedMarkerTTL,
		Header: nats.Header{"KV-Operation": {"PURGE"}, "Nats-Rollup": {"sub"}},
	})
	if err != nil && ctx.Err() == nil {
		r.s.log.Warn().Err(err).Str("task_id", string(a.TaskID)).Msg("a record could not be purged; looking again later")
	}
	r.tell(ctx, gate.Purged{TaskID: a.TaskID})
}

func (r *reign) publishLimits(ctx context.Context) error {
	var more map[contract.Pool]int
	for name, p := range r.s.cfg.Pools {
		if more == nil {
			more = map[contract.Pool]int{}
		}
		more[name] = p.MaxRunning
	}
	data, err := json.Marshal(contract.AdmissionLimits{
		MaxRunning: r.s.cfg.MaxRunning, Pools: more, MaxQueued: r.s.cfg.MaxQueued, AdmissionPolicy: r.s.cfg.Policy,
		QueueTimeoutSeconds: int(r.s.cfg.QueueTimeout / time.Second),
	})
	if err != nil {
		return err
	}
	key := r.s.bus.KV(contract.LimitsKey)
	last, err := r.s.bus.Last(ctx, r.s.bus.TaskStream(), key)
	if err == nil && bytes.Equal(last.Data, data) {
		return nil
	}
	_, err = r.s.bus.Publish(ctx, bus.Write{Subject: key, Data: data})
	return err
}

// bury keeps a message that nobody can use, with the reason, and takes it out of
// the request stream if it lies there.
func (r *reign) bury(ctx context.Context, m bus.Message, reason error) error {
	stream, record := r.s.bus.Names.WorkStream(), isKV(m.Subject)
	if record {
		stream = r.s.bus.TaskStream()
	}
	if err := r.s.bus.Bury(ctx, "admission", stream, m, reason); err != nil {
		return err
	}
	r.s.metrics.dead.Inc()
	if _, _, err := r.s.bus.Names.ParseTaskRequest(m.Subject); err != nil && !record {
		return r.s.bus.DeleteMsg(ctx, stream, m.Seq)
	}
	return nil
}
