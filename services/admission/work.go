package admission

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
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
			r.perform(ctx, a)
		}
	}
}

func (r *reign) perform(ctx context.Context, a gate.Action) {
	switch a := a.(type) {
	case gate.MoveRecord:
		r.tell(ctx, r.move(ctx, a))
	case gate.SendGrant:
		r.sendGrant(ctx, a)
	case gate.TellQueued:
		r.repeat(ctx, "queued event", a.TaskID, func() error { return r.tellQueued(ctx, a.RequestSeq, a.Position) })
	case gate.StoreTerminalEvent:
		if r.repeat(ctx, "terminal event", a.TaskID, func() error { return r.storeTerminalEvent(ctx, a) }) {
			r.tell(ctx, gate.TerminalEventStored{TaskID: a.TaskID})
		}
	case gate.RemoveRequest:
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
		r.moved(rec)
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
			r.moved(rec)
			out.Outcome, out.Revision, out.Record = gate.Stored, last.Seq, rec
		}
		return nil
	})
	return out
}

func (r *reign) moved(rec contract.TaskRecord) {
	ev := r.s.log.Info().Str("task_id", string(rec.TaskID)).Str("run_id", string(rec.RunID)).Int("attempt", rec.Attempt).Str("state", string(rec.State))
	if rec.ErrorCode == contract.ErrExecutorLost || rec.Lost > 0 {
		r.s.metrics.lost.Inc()
	}
	ev.Msg("moved a task on")
}

// sendGrant publishes what tells of a grant, in this order: queued (if nobody
// has told yet), admitted, and the grant itself. Protocol W7.
func (r *reign) sendGrant(ctx context.Context, a gate.SendGrant) {
	start := time.Now()
	ok := r.repeat(ctx, "grant", a.TaskID, func() error {
		b, err := r.bodies.get(ctx, a.RequestSeq)
		if errors.Is(err, bus.ErrNotFound) {
			r.tell(ctx, gate.RequestRemoved{TaskID: a.TaskID})
			return nil
		}
		if err != nil {
			return err
		}
		return r.grant(ctx, a, b)
	})
	if ok {
		r.s.metrics.grants.Inc()
		r.s.metrics.grantSeconds.Observe(time.Since(start).Seconds())
		r.tell(ctx, gate.GrantSent{TaskID: a.TaskID, Attempt: a.Record.Attempt})
	}
}

func (r *reign) grant(ctx context.Context, a gate.SendGrant, b body) error {
	// The span covers the wait, so that queue time can be seen. Its start is the
	// server's time stamp, brought to our clock.
	began := b.queued.Add(-r.offset)
	if a.Record.Attempt > 1 {
		began = r.s.now()
	}
	sctx, span := r.s.tracer.Start(telemetry.ContextWith(ctx, b.parent, b.state), "admit", trace.WithSpanKind(trace.SpanKindConsumer), trace.WithTimestamp(began), trace.WithAttributes(
		attribute.String("herdgate.task_id", string(a.TaskID)), attribute.String("herdgate.run_id", string(b.req.RunID)),
		attribute.Int("herdgate.attempt", a.Record.Attempt), attribute.Int("herdgate.slot", a.Record.Slot),
	))
	defer span.End()
	if a.Record.Attempt == 1 {
		// Sent without waiting: the server handles one connection in order, so it
		// is stored before the next. Told before is fine.
		q := event.Queued(b.req, b.parent, b.state, 0, r.s.source(), b.queued)
		w, err := eventWrite(r.s.bus.Names, q)
		if err != nil {
			return err
		}
		w.Expect = bus.Seq(0)
		future, err := r.s.bus.PublishAsync(w)
		if err != nil {
			return err
		}
		defer func() {
			select {
			case <-future.Ok():
			case err := <-future.Err():
				if err := bus.Classify(err); !errors.Is(err, bus.ErrConflict) {
					r.s.log.Warn().Err(err).Str("task_id", string(a.TaskID)).Msg("the queued event may be missing")
				}
			case <-ctx.Done():
			}
		}()
	}
	w, err := eventWrite(r.s.bus.Names, event.Admitted(a.Record, r.s.source(), r.s.now()))
	if err != nil {
		return err
	}
	admitted, err := r.s.bus.Publish(ctx, w)
	if err != nil {
		return err
	}
	pool := a.Record.Pool
	if pool == "" {
		pool = contract.DefaultPool
	}
	data, err := json.Marshal(contract.Grant{
		TaskID: a.TaskID, Attempt: a.Record.Attempt, Slot: a.Record.Slot, Epoch: a.Record.Epoch, Revision: a.Revision,
		LastEventSeq: admitted.Seq, LeaseTTLMS: r.s.cfg.LeaseTTL.Milliseconds(), Record: a.Record, Request: b.req,
	})
	if err != nil {
		return fmt.Errorf("encode grant: %w", err)
	}
	h := nats.Header{}
	telemetry.Inject(sctx, h)
	_, err = r.s.bus.Publish(ctx, bus.Write{
		Subject: r.s.bus.Names.TaskGrant(pool, a.TaskID), Data: data, Header: h, MsgID: string(a.TaskID) + "/" + strconv.Itoa(a.Record.Attempt),
	})
	if err == nil {
		r.s.log.Info().Str("task_id", string(a.TaskID)).Str("run_id", string(b.req.RunID)).Int("attempt", a.Record.Attempt).Int("slot", a.Record.Slot).
			Str("trace_id", span.SpanContext().TraceID().String()).Msg("granted")
	}
	return err
}

func (r *reign) tellQueued(ctx context.Context, seq uint64, position int) error {
	b, err := r.bodies.get(ctx, seq)
	if errors.Is(err, bus.ErrNotFound) || err == nil && b.invalid != nil {
		return nil
	}
	if err != nil {
		return err
	}
	w, err := eventWrite(r.s.bus.Names, event.Queued(b.req, b.parent, b.state, position, r.s.source(), b.queued))
	if err != nil {
		return err
	}
	w.Expect = bus.Seq(0)
	if _, err = r.s.bus.Publish(ctx, w); errors.Is(err, bus.ErrConflict) {
		return nil
	}
	return err
}

// storeTerminalEvent makes sure that a terminal record's event is stored, once:
// the event is made from the record alone and expects that there is none
// (protocol W15).
func (r *reign) storeTerminalEvent(ctx context.Context, a gate.StoreTerminalEvent) error {
	last, err := r.s.bus.Last(ctx, r.s.bus.TaskStream(), r.s.bus.KV(contract.TaskKey(a.TaskID)))
	if errors.Is(err, bus.ErrNotFound) || err == nil && last.Deleted() {
		return nil
	}
	if err != nil {
		return err
	}
	rec, err := contract.DecodeTaskRecord(last.Data)
	if err != nil {
		return r.bury(ctx, last, err)
	}
	ev, err := event.Terminal(rec, r.s.source())
	if err != nil {
		return r.bury(ctx, last, err)
	}
	w, err := eventWrite(r.s.bus.Names, ev)
	if err != nil {
		return err
	}
	w.Expect = bus.Seq(0)
	// The id would let the server drop a repeat within its window; the
	// expectation does so for ever.
	if _, err = r.s.bus.Publish(ctx, w); err != nil && !errors.Is(err, bus.ErrConflict) {
		return err
	}
	return nil
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
	data, err := json.Marshal(contract.AdmissionLimits{
		MaxRunning: r.s.cfg.MaxRunning, MaxQueued: r.s.cfg.MaxQueued, AdmissionPolicy: r.s.cfg.Policy,
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
	_, err := r.s.bus.Publish(ctx, bus.Write{
		Subject: r.s.bus.Names.Dead("admission"), Data: m.Data, MsgID: "admission/" + m.Subject + "/" + strconv.FormatUint(m.Seq, 10),
		Header: nats.Header{
			"Herdgate-Reason": {oneLine(reason.Error())}, "Herdgate-Subject": {m.Subject}, "Herdgate-Sequence": {strconv.FormatUint(m.Seq, 10)},
		},
	})
	if err != nil {
		return fmt.Errorf("dead letter: %w", err)
	}
	r.s.metrics.dead.Inc()
	if _, _, err := r.s.bus.Names.ParseTaskRequest(m.Subject); err != nil && !isKV(m.Subject) {
		return r.s.bus.DeleteMsg(ctx, r.s.bus.Names.WorkStream(), m.Seq)
	}
	return nil
}

// eventWrite is the write of an event.
func eventWrite(names contract.Names, ev envelope.Event) (bus.Write, error) {
	data, err := envelope.Encode(ev)
	if err != nil {
		return bus.Write{}, err
	}
	w := bus.Write{Subject: ev.NATSSubject(names), Data: data, Header: nats.Header(ev.Headers())}
	w.MsgID = ev.ID
	return w, nil
}
