package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/internal/fault"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// A grant is told in three messages: queued (if nobody has told yet), admitted, and
// the grant itself, which names the sequence of admitted. Their records are stored
// by then (protocol W5, W13 before W7). The messages of several grants may be on
// their way at once, in the order of the records: they all go over one connection,
// and the server handles that in order. Where an answer fails or takes long, nothing
// more is sent before that grant is settled, so that those behind it do not overtake.

const (
	// maxGrantsSent is how many grants may be on their way.
	maxGrantsSent = 64
	// answersIn is how soon an answer is to be expected. A stream without a leader
	// drops what comes; what is sent once it has one must not be ahead of that.
	answersIn = 20 * time.Millisecond
)

// granting is a grant that is being told.
type granting struct {
	a        gate.SendGrant
	body     body
	began    time.Time
	sent     time.Time       // when the newest message was sent
	ctx      context.Context //nolint:containedctx // carries the span
	span     trace.Span
	publish  trace.Span // of the grant's message
	at       time.Time  // when it was let in
	queued   *bus.Sent
	admitted bus.Sent
	grant    bus.Sent
}

// sendGrants sends grants until ctx is done.
func (r *reign) sendGrants(ctx context.Context, actions <-chan gate.Action) error {
	var admitted, granted []*granting // that wait for an answer, the oldest first
	defer func() {
		for _, g := range append(admitted, granted...) {
			g.endSpans()
		}
	}()
	admit := func() error {
		g := admitted[0]
		admitted = admitted[1:]
		if err := fault.Catch(func() error { return r.sendGrantMessage(ctx, g) }); err != nil {
			return r.again(ctx, g, err)
		}
		granted = append(granted, g)
		return nil
	}
	confirm := func() error {
		g := granted[0]
		granted = granted[1:]
		if err := fault.Catch(func() error { return r.confirmGrant(ctx, g) }); err != nil {
			return r.again(ctx, g, err)
		}
		g.endSpans()
		r.granted(ctx, g.a, g.began)
		return nil
	}
	// oldest waits for the answer that has been awaited for the longest time.
	oldest := func() error {
		if len(granted) > 0 {
			return confirm()
		}
		return admit()
	}
	late := time.NewTimer(time.Hour)
	defer late.Stop()
	for {
		take := actions
		if len(admitted)+len(granted) >= maxGrantsSent {
			take = nil
		}
		var admittedDone, grantedDone <-chan struct{}
		var isLate <-chan time.Time
		if len(admitted) > 0 {
			admittedDone, isLate = admitted[0].admitted.Done(), late.C
			late.Reset(max(0, answersIn-time.Since(admitted[0].sent)))
		}
		if len(granted) > 0 {
			grantedDone, isLate = granted[0].grant.Done(), late.C
			late.Reset(max(0, answersIn-time.Since(granted[0].sent)))
		}
		var err error
		select {
		case <-ctx.Done():
			return nil
		case <-admittedDone:
			err = admit()
		case <-grantedDone:
			err = confirm()
		case <-isLate:
			err = oldest()
		case action := <-take:
			a, ok := action.(gate.SendGrant)
			if !ok {
				err = r.perform(ctx, action)
				break
			}
			g := &granting{a: a, began: time.Now(), span: noSpan, publish: noSpan}
			why := fault.Catch(func() error { return r.admit(ctx, g) })
			if why == nil {
				admitted = append(admitted, g)
				break
			}
			// What is ahead of it goes first.
			for err == nil && len(admitted)+len(granted) > 0 {
				err = oldest()
			}
			if err == nil {
				err = r.again(ctx, g, why)
			}
		}
		if err != nil {
			return err
		}
	}
}

// endSpans ends what is open; to do it again does nothing.
func (g *granting) endSpans() {
	g.publish.End()
	g.span.End()
}

// task are the attributes of the task that is granted.
func (g *granting) task() []attribute.KeyValue {
	return []attribute.KeyValue{
		telemetry.AttrTaskID.String(string(g.a.TaskID)), telemetry.AttrRunID.String(string(g.body.req.RunID)), telemetry.AttrTenant.String(string(g.body.tenant)),
		telemetry.AttrPool.String(string(pool(g.a.Record))), telemetry.AttrAttempt.Int(g.a.Record.Attempt),
	}
}

// traceWait makes the span of the wait, once that is over. It begins at the server's
// time stamp, brought to our clock. Who is granted again has kept its slot and did
// not wait.
func (r *reign) traceWait(g *granting) {
	if g.a.Record.Attempt != 1 {
		return
	}
	began := g.body.queued.Add(-r.offset)
	if began.After(g.at) {
		began = g.at
	}
	_, wait := r.s.tracer.Start(telemetry.ContextWith(context.Background(), g.body.parent, g.body.state), "wait for admission",
		trace.WithTimestamp(began), trace.WithAttributes(g.task()...), trace.WithAttributes(
			telemetry.AttrQueuePosition.Int(g.a.EntryPosition), telemetry.AttrQueueDepth.Int(g.a.EntryDepth), telemetry.AttrQueueMS.Int64(g.at.Sub(began).Milliseconds()),
		))
	wait.End(trace.WithTimestamp(g.at))
}

// pool is where a record's task waits and runs.
func pool(rec contract.TaskRecord) contract.Pool {
	if rec.Pool == "" {
		return contract.DefaultPool
	}
	return rec.Pool
}

var noSpan = trace.SpanFromContext(context.Background())

// again tells a grant from the beginning, and does not give up.
func (r *reign) again(ctx context.Context, g *granting, why error) error {
	if ctx.Err() == nil {
		telemetry.Fail(g.span, telemetry.ErrorClass(why), "told again from the beginning")
	}
	g.endSpans()
	if ctx.Err() != nil {
		return nil
	}
	panics := 0
	if f := fault.As(why); f != nil {
		r.s.panicked(f, fmt.Sprintf("%T", g.a), "")
		panics = 1
	}
	return r.performAfter(ctx, g.a, panics)
}

// granted tells the gate that a grant has been told.
func (r *reign) granted(ctx context.Context, a gate.SendGrant, began time.Time) {
	r.s.metrics.grants.Inc()
	r.s.metrics.grantSeconds.Observe(time.Since(began).Seconds())
	r.tell(ctx, gate.GrantSent{TaskID: a.TaskID, Attempt: a.Record.Attempt})
}

// admit begins to tell a grant.
func (r *reign) admit(ctx context.Context, g *granting) (err error) {
	if r.s.probe != nil {
		r.s.probe(fmt.Sprintf("%T", g.a), g.a.TaskID)
	}
	if g.body, err = r.bodies.get(ctx, g.a.RequestSeq); err != nil {
		return err
	}
	return r.sendAdmitted(ctx, g)
}

// sendAdmitted sends the events of a grant. Neither is waited for: what one
// goroutine sends is stored in that order.
func (r *reign) sendAdmitted(ctx context.Context, g *granting) error {
	a, b := g.a, g.body
	names := r.s.bus.Names
	parent := telemetry.ContextWith(context.Background(), b.parent, b.state)
	g.at = r.s.now()
	// The stream is read again by each leader, so there are no deliveries to count.
	g.ctx, g.span = telemetry.StartProcess(parent, r.s.tracer, telemetry.RequestTemplate(names.Prefix()), "admission", 0, append(g.task(),
		telemetry.AttrSlot.Int(a.Record.Slot), telemetry.AttrEpoch.Int64(int64(a.Record.Epoch)), telemetry.AttrRequestSeq.Int64(int64(a.RequestSeq)))...)
	tells := false
	if a.Record.Attempt == 1 {
		var err error
		if tells, err = r.bodies.grantTells(ctx, a.RequestSeq); err != nil {
			return err
		}
	}
	if tells {
		w, err := eventwrite.Of(r.s.bus, event.Queued(b.req, b.parent, b.state, 0, r.s.source(), b.queued))
		if err != nil {
			return err
		}
		w.Expect = bus.Seq(0) // told before is fine
		queued, err := r.s.bus.Send(w)
		if err != nil {
			return err
		}
		g.queued = &queued
	}
	w, err := eventwrite.Of(r.s.bus, event.Admitted(a.Record, r.s.source(), r.s.now()))
	if err != nil {
		return err
	}
	g.sent = time.Now()
	g.admitted, err = r.s.bus.Send(w)
	return err
}

// sendGrantMessage sends the grant, once it is known where its events stand.
func (r *reign) sendGrantMessage(ctx context.Context, g *granting) error {
	admitted, err := g.admitted.Wait(ctx)
	if err != nil {
		return err
	}
	a := g.a
	data, err := json.Marshal(contract.Grant{
		TaskID: a.TaskID, Attempt: a.Record.Attempt, Slot: a.Record.Slot, Epoch: a.Record.Epoch, Revision: a.Revision,
		LastEventSeq: admitted.Seq, LeaseTTLMS: r.s.cfg.LeaseTTL.Milliseconds(), Record: a.Record, Request: g.body.req,
	})
	if err != nil {
		return fmt.Errorf("grant: %w: %w", eventwrite.ErrImpossible, err)
	}
	h := nats.Header{}
	publish, span := telemetry.StartPublish(g.ctx, r.s.tracer, telemetry.GrantTemplate(r.s.bus.Names.Prefix()), telemetry.AttrTaskID.String(string(a.TaskID)), telemetry.AttrAttempt.Int(a.Record.Attempt))
	g.publish = span
	telemetry.Inject(publish, h)
	g.sent = time.Now()
	g.grant, err = r.s.bus.Send(bus.Write{
		Subject: r.s.bus.Names.TaskGrant(pool(a.Record), a.TaskID), Data: data, Header: h, MsgID: string(a.TaskID) + "/" + strconv.Itoa(a.Record.Attempt),
	})
	return err
}

// confirmGrant waits until all messages of a grant are stored.
func (r *reign) confirmGrant(ctx context.Context, g *granting) error {
	if g.queued != nil {
		if _, err := g.queued.Wait(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, bus.ErrConflict) {
			r.s.log.Warn().Err(err).Str("task_id", string(g.a.TaskID)).Msg("the queued event may be missing")
		}
	}
	if _, err := g.grant.Wait(ctx); err != nil {
		return err
	}
	r.traceWait(g)
	r.s.log.Info().Str("task_id", string(g.a.TaskID)).Str("run_id", string(g.body.req.RunID)).Int("attempt", g.a.Record.Attempt).Int("slot", g.a.Record.Slot).
		Str("trace_id", g.span.SpanContext().TraceID().String()).Msg("granted")
	return nil
}
