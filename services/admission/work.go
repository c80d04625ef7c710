package admission

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/outcome"
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
		if err = r.grant(ctx, a, b); errors.Is(err, bus.ErrTooLarge) || errors.Is(err, errEncode) {
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
		r.tell(ctx, r.fail(ctx, a, impossible))
	default:
		r.s.metrics.grants.Inc()
		r.s.metrics.grantSeconds.Observe(time.Since(start).Seconds())
		r.tell(ctx, gate.GrantSent{TaskID: a.TaskID, Attempt: a.Record.Attempt})
	}
}

// fail ends a task whose grant cannot be sent.
func (r *reign) fail(ctx context.Context, a gate.SendGrant, reason error) gate.Event {
	end := outcome.Map(outcome.Outcome{Kind: outcome.Exception, Message: "The task could not be handed to an executor: " + reason.Error()})
	rec, err := outcome.Terminate(a.Record, end, r.s.now())
	if err != nil {
		r.s.log.Error().Err(err).Str("task_id", string(a.TaskID)).Msg("an end could not be made")
		return gate.Moved{TaskID: a.TaskID, Outcome: gate.Refused}
	}
	return r.move(ctx, gate.MoveRecord{TaskID: a.TaskID, Revision: a.Revision, Record: rec})
}

// errEncode: a message of ours cannot be written, now or later.
var errEncode = errors.New("cannot be encoded")

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
		return fmt.Errorf("grant: %w: %w", errEncode, err)
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
	// As the task's first event or not at all: told late it would contradict what
	// was told since.
	w.Expect, w.ExpectSubject = bus.Seq(0), r.s.bus.Names.TaskEvents(b.req.Tenant, b.req.ThreadID, b.req.RunID, b.req.TaskID)
	_, err = r.s.bus.Publish(ctx, w)
	if !errors.Is(err, bus.ErrConflict) {
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
	ev, err := event.Terminal(rec, r.sourceOf(rec))
	if err != nil {
		return r.bury(ctx, last, err)
	}
	if rec.Attempt == 0 {
		// It ended while it waited. That it did may not have been told yet: by an
		// earlier leader, or by a worker that is behind.
		if err := r.tellQueued(ctx, rec.RequestSeq, 1); err != nil {
			return err
		}
	}
	w, err := eventWrite(r.s.bus.Names, ev)
	if err != nil {
		return r.bury(ctx, last, err)
	}
	if stored, err := r.awaitEvent(ctx, w.Subject, ev.Source != r.s.source()); err != nil || stored {
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

// How long the gate leaves the terminal event to the executor that wrote the
// record, and how long a message that was seen takes to be stored at most.
const (
	executorsTurn = 250 * time.Millisecond
	settling      = 10 * time.Millisecond
)

// awaitEvent reports whether the event of subject is stored. One that an executor
// is about to publish is waited for: a second one would be refused by the
// stream, but reach all those who subscribe without one.
func (r *reign) awaitEvent(ctx context.Context, subject string, coming bool) (bool, error) {
	stored := func() (bool, error) {
		_, err := r.s.bus.Last(ctx, r.s.bus.Names.EventStream(), subject)
		if errors.Is(err, bus.ErrNotFound) {
			return false, nil
		}
		return err == nil, err
	}
	if ok, err := stored(); ok || err != nil || !coming {
		return ok, err
	}
	sub, err := r.s.bus.NC.SubscribeSync(subject)
	if err != nil {
		return false, fmt.Errorf("subscribe to %s: %w", subject, err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	turn, cancel := context.WithTimeout(ctx, executorsTurn)
	defer cancel()
	next := func(within time.Duration) error {
		ctx, cancel := context.WithTimeout(turn, within)
		defer cancel()
		_, err := sub.NextMsgWithContext(ctx)
		return err
	}
	for seen := false; ; {
		// The subscription reaches the server before this question does: whatever
		// is not stored yet will be seen.
		if ok, err := stored(); ok || err != nil {
			return ok, err
		}
		within := executorsTurn
		if seen {
			within = settling
		}
		if err := next(within); turn.Err() != nil || err != nil && !seen {
			return stored()
		}
		seen = true
	}
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

// eventWrite is the write of an event.
func eventWrite(names contract.Names, ev envelope.Event) (bus.Write, error) {
	data, err := envelope.Encode(ev)
	if err != nil {
		return bus.Write{}, fmt.Errorf("event %s: %w: %w", ev.ID, errEncode, err)
	}
	w := bus.Write{Subject: ev.NATSSubject(names), Data: data, Header: nats.Header(ev.Headers())}
	w.MsgID = ev.ID
	return w, nil
}
