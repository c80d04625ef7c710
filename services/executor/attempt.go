package executor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/internal/fault"
	"github.com/herdgate/herdgate/internal/mutant"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// The causes for which an attempt stops before its end.
var (
	errCancelled = errors.New("the task was cancelled")
	errTimeout   = errors.New("the task's time limit is over")
	errStalled   = errors.New("nothing happens in the task")
	errHandBack  = errors.New("the executor drains and hands the task back")
	// errFenced: the record or the event history has moved on without us.
	errFenced = errors.New("fenced: the task is no longer ours")
	// errLeaseOver: by our own clock somebody else may have the task now.
	errLeaseOver = errors.New("fenced: the lease is over by our own clock")
)

// attempt is one try at one task.
type attempt struct {
	s      *Service
	grant  contract.Grant
	rec    contract.TaskRecord // as we wrote it last
	rev    uint64              // its revision
	last   uint64              // sequence of the task's newest event that we know of
	steps  event.Capture       // what was told of the conversation
	begun  atomic.Bool         // an effect may have happened
	today  time.Time           // when it was claimed, in the deployment's time zone
	ttl    time.Duration
	until  atomic.Int64  // lease deadline, as time since base
	lease  sandbox.Lease // the same for the commands of tools
	base   time.Time
	turn   *turn
	cancel context.CancelCauseFunc
	log    zerolog.Logger
	span   trace.Span // of the agent's work; until that begins, of the delivery

	progress    atomic.Int64 // when something happened last, as time since base
	stopKeeping func()       // ends the renewals of the lease
}

// take claims one grant and begins its task. It returns what is left to do, or
// nil when there is nothing. A panic costs this grant alone.
func (s *Service) take(work context.Context, msg jetstream.Msg) (run func()) {
	return s.takeInTurn(work, msg, nil)
}

// takeInTurn does so and tells of the beginning when it is the task's turn.
func (s *Service) takeInTurn(work context.Context, msg jetstream.Msg, turn *turn) (run func()) {
	o, ok := s.open(work, msg)
	if !ok {
		return nil
	}
	o.turn = turn
	defer func() {
		if f := fault.Of(recover()); f != nil {
			run = nil
			s.crashed(work, msg, o, f)
		}
	}()
	return s.takeOpened(work, msg, o)
}

func (s *Service) takeOpened(work context.Context, msg jetstream.Msg, o opening) func() {
	g, err := s.decode(msg.Data())
	if err == nil && o.id != "" && o.id != g.TaskID {
		err = fmt.Errorf("%w: grant: it is for task %q; its subject says %q", contract.ErrInvalidMessage, g.TaskID, o.id)
	}
	if err != nil {
		s.bury(work, msg, err)
		return nil
	}
	ctx, cancel := context.WithCancelCause(work)
	task := []attribute.KeyValue{
		telemetry.AttrTaskID.String(string(g.TaskID)), telemetry.AttrRunID.String(string(g.Request.RunID)), telemetry.AttrTenant.String(string(g.Request.Tenant)),
		telemetry.AttrAttempt.Int(g.Attempt), telemetry.AttrExecutor.String(s.cfg.Name),
	}
	ctx, process := telemetry.StartProcess(telemetry.Extract(ctx, msg.Headers()), s.tracer, telemetry.GrantTemplate(s.bus.Names.Prefix()), s.bus.Names.GrantConsumer(s.cfg.Pool), delivery(msg), task...)
	a := &attempt{
		s: s, grant: g, rec: g.Record, rev: g.Revision, last: g.LastEventSeq, ttl: time.Duration(g.LeaseTTLMS) * time.Millisecond, cancel: cancel, base: s.now(), turn: o.turn, span: process,
		log: s.log.With().Str("task_id", string(g.TaskID)).Str("run_id", string(g.Request.RunID)).Int("attempt", g.Attempt).
			Str("trace_id", process.SpanContext().TraceID().String()).Logger(),
	}
	// From here on a cancellation is heard.
	s.mu.Lock()
	s.attempts[a] = struct{}{}
	s.mu.Unlock()
	s.metrics.running.Inc()
	leave := func() {
		s.mu.Lock()
		delete(s.attempts, a)
		s.mu.Unlock()
		s.metrics.running.Dec()
		a.span.End()
		process.End()
		cancel(nil)
	}
	begun := false
	defer func() {
		if !begun {
			leave()
		}
	}()

	if mutant.AckEarly {
		_ = msg.Ack()
	}
	claimed, err := a.claim(ctx)
	switch {
	case err != nil:
		telemetry.Fail(process, telemetry.ErrorClass(err), "the grant could not be claimed")
		a.log.Warn().Err(err).Msg("a grant could not be claimed; giving it back")
		s.giveBack(msg, o)
		return nil
	case !claimed && a.stillGranted(ctx):
		s.bury(ctx, msg, fmt.Errorf("%w: grant: its revision %d is not the record's, although the record is granted at this attempt", contract.ErrInvalidMessage, g.Revision))
		return nil
	case !claimed:
		process.SetAttributes(telemetry.AttrVoid.Bool(true))
		a.log.Info().Msg("a grant is void: the task has moved on")
		_ = msg.Ack()
		return nil
	}
	if err := msg.Ack(); err != nil {
		a.log.Debug().Err(err).Msg("the grant was claimed but not acknowledged; its redelivery will be void")
	}
	s.metrics.claimed.Inc()
	a.log.Info().Msg("claimed")
	name := g.Request.Subagent.Name
	ctx, a.span = s.tracer.Start(telemetry.WithContent(ctx, s.deps.Content), "invoke_agent "+name, trace.WithAttributes(task...), trace.WithAttributes(
		telemetry.AttrGenAIOperation.String("invoke_agent"), telemetry.AttrGenAIAgentName.String(name), telemetry.AttrGenAIRequestModel.String(a.rec.ModelName),
		telemetry.AttrGenAIConversationID.String(string(g.Request.ThreadID)),
	))
	keeping, stopKeeping := context.WithCancel(context.WithoutCancel(ctx))
	a.stopKeeping = stopKeeping
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		if err := a.guarded("lease", func() error { a.keep(keeping); return nil }); err != nil {
			a.cancel(err)
		}
	}()
	var job *job
	var end outcome.End
	err = a.guarded("begin", func() (err error) { job, end, err = a.begin(ctx); return err })
	begun = true
	return func() {
		defer leave()
		if job != nil {
			err = a.guarded("work", func() (err error) { end, err = job.run(); return err })
		}
		if err == nil {
			// It may take a while, so the lease is kept meanwhile.
			err = a.guarded("result", func() error { end = a.storeLarge(ctx, end); return nil })
		}
		// All effects have stopped; renewals must not race with the last write.
		stopKeeping()
		<-kept
		a.guardedEnd(func(err error) { a.end(ctx, end, err) }, err)
	}
}

// claim takes the lease and then the record (protocol W8, W9). It is false when
// the grant is void.
func (a *attempt) claim(ctx context.Context) (bool, error) {
	giveUp, cancel := context.WithTimeout(ctx, a.ttl)
	defer cancel()
	if ok, err := a.heartbeat(giveUp, a.grant.Revision); !ok || err != nil {
		return false, err
	}
	rec := a.grant.Record
	now := a.s.now().UTC()
	a.today = now.In(a.s.zone)
	rec.State, rec.Executor, rec.StartedAt, rec.Writer = contract.StateRunning, a.s.cfg.Name, &now, a.s.writer.Next()
	rec.Receipts, rec.ReceiptVerdict = nil, nil                   // those are for this attempt to make (RECEIPT-16)
	rec.Date = a.today.Format(time.DateOnly)                      // DATE-07
	if m, err := a.s.deps.Models.Get(a.modelName()); err == nil { // else the task fails, and says why
		rec.ModelName = m.ModelName()
	}
	rev, ok, err := a.write(giveUp, rec, a.grant.Revision)
	if !ok || err != nil {
		return false, err
	}
	a.rec, a.rev = rec, rev
	return true, nil
}

// stillGranted reports whether the record of a grant that was refused is what the
// grant says. Then nobody else will ever claim it.
func (a *attempt) stillGranted(ctx context.Context) bool {
	last, err := a.read(ctx)
	if err != nil {
		return false
	}
	rec, err := contract.DecodeTaskRecord(last.Data)
	return err == nil && rec.State == contract.StateGranted && rec.Attempt == a.grant.Attempt
}

// heartbeat writes the lease, expecting the record's revision. False: the record
// has moved. It repeats what is in doubt until ctx is done.
func (a *attempt) heartbeat(ctx context.Context, rev uint64) (bool, error) {
	data, err := json.Marshal(contract.Lease{Executor: a.s.cfg.Name, Attempt: a.grant.Attempt})
	if err != nil {
		return false, err
	}
	w := bus.Write{
		Subject: a.s.bus.KV(contract.LeaseKey(a.grant.TaskID)), Data: data, TTL: a.ttl,
		Expect: bus.Seq(rev), ExpectSubject: a.s.bus.KV(contract.TaskKey(a.grant.TaskID)),
	}
	for {
		sent := a.s.now()
		_, err := a.s.bus.Publish(ctx, w)
		if err == nil {
			a.until.Store(int64(sent.Add(a.ttl - margin(a.ttl)).Sub(a.base)))
			a.lease.Extend(a.left())
			return true, nil
		}
		if errors.Is(err, bus.ErrConflict) {
			moved, rerr := a.moved(ctx, rev)
			if rerr == nil && moved {
				return false, nil
			}
			err = errors.Join(err, rerr)
		}
		if !a.pause(ctx, err) {
			return false, err
		}
	}
}

// moved reads whether the record has another revision than rev.
func (a *attempt) moved(ctx context.Context, rev uint64) (bool, error) {
	last, err := a.read(ctx)
	if errors.Is(err, bus.ErrNotFound) {
		return true, nil
	}
	return err == nil && last.Seq != rev, err
}

func (a *attempt) read(ctx context.Context) (bus.Message, error) {
	return a.s.bus.Last(ctx, a.s.bus.TaskStream(), a.s.bus.KV(contract.TaskKey(a.grant.TaskID)))
}

// write makes a write on the record that expects rev and settles it: true with
// the new revision when ours is stored, false when the record has moved.
func (a *attempt) write(ctx context.Context, rec contract.TaskRecord, rev uint64) (uint64, bool, error) {
	data, err := json.Marshal(rec)
	if err != nil {
		return 0, false, fmt.Errorf("encode the record: %w", err)
	}
	w := bus.Write{Subject: a.s.bus.KV(contract.TaskKey(rec.TaskID)), Data: data, Expect: bus.Seq(rev)}
	for {
		ack, err := a.s.bus.Publish(ctx, w)
		if err == nil {
			return ack.Seq, true, nil
		}
		if errors.Is(err, bus.ErrConflict) {
			last, rerr := a.read(ctx)
			switch {
			case errors.Is(rerr, bus.ErrNotFound):
				return 0, false, nil
			case rerr == nil && last.Seq != rev:
				got, derr := contract.DecodeTaskRecord(last.Data)
				if derr == nil && got.Writer == rec.Writer {
					return last.Seq, true, nil // ours had landed
				}
				return last.Seq, false, nil
			}
			err = errors.Join(err, rerr)
		}
		if errors.Is(err, bus.ErrTooLarge) || !a.pause(ctx, err) {
			return 0, false, err
		}
	}
}

// pause waits before a repeat; false when ctx is done.
func (a *attempt) pause(ctx context.Context, err error) bool {
	a.log.Debug().Err(err).Msg("a write has to be repeated")
	a.span.AddEvent(telemetry.EventWriteRetry)
	a.turn.giveWay()
	select {
	case <-ctx.Done():
		return false
	case <-time.After(50 * time.Millisecond):
		return true
	}
}

// margin is how much earlier than the server an attempt stops believing in its
// lease: for the clock's drift, a scheduler's pause, and the time a kill takes.
func margin(ttl time.Duration) time.Duration { return min(2*time.Second, ttl/4) }

func (a *attempt) left() time.Duration {
	return time.Duration(a.until.Load()) - a.s.now().Sub(a.base)
}

// gate is asked before every effect.
func (a *attempt) gate() error {
	if a.left() <= 0 {
		a.cancel(errLeaseOver)
		return errLeaseOver
	}
	return nil
}

// keep renews the lease until ctx is done (protocol W10). It ends the attempt
// when the lease is over by our clock or the record has moved.
func (a *attempt) keep(ctx context.Context) {
	tick := time.NewTicker(a.ttl / 3)
	defer tick.Stop()
	over := time.NewTimer(a.left())
	defer over.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-over.C:
			if left := a.left(); left > 0 {
				over.Reset(left)
				continue
			}
			a.cancel(errLeaseOver)
			return
		case <-tick.C:
		}
		if a.left() <= 0 {
			a.cancel(errLeaseOver)
			return
		}
		until, stop := context.WithTimeout(ctx, a.left())
		ok, err := a.heartbeat(until, a.rev)
		stop()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			a.cancel(errLeaseOver)
			return
		case !ok:
			a.cancel(a.whyRefused(ctx))
			return
		}
		a.span.AddEvent(telemetry.EventLeaseRenewed)
	}
}

// whyRefused reads what moved the record: a cancel mark on our own attempt is
// the one move that lets us write the end.
func (a *attempt) whyRefused(ctx context.Context) error {
	for {
		_, _, marked, err := a.marked(ctx)
		switch {
		case err == nil && marked:
			return errCancelled
		case err == nil:
			return errFenced
		case a.left() <= 0 || !a.pause(ctx, err):
			return errLeaseOver
		}
	}
}

// marked reads the record, and whether all that happened to it since our last
// write is the gate's mark of a cancellation.
func (a *attempt) marked(ctx context.Context) (contract.TaskRecord, uint64, bool, error) {
	last, err := a.read(ctx)
	if errors.Is(err, bus.ErrNotFound) {
		return contract.TaskRecord{}, 0, false, nil
	}
	if err != nil {
		return contract.TaskRecord{}, 0, false, err
	}
	rec, err := contract.DecodeTaskRecord(last.Data)
	ours := err == nil && rec.State == contract.StateRunning && rec.Attempt == a.grant.Attempt
	return rec, last.Seq, ours && rec.CancelRequested, nil
}

// cancelSet looks for the cancel key in the stream leader's own copy.
func (a *attempt) cancelSet(ctx context.Context) (bool, error) {
	for {
		last, err := a.s.bus.Last(ctx, a.s.bus.TaskStream(), a.s.bus.KV(contract.CancelKey(a.grant.TaskID)))
		if err == nil {
			return !last.Deleted(), nil
		}
		if errors.Is(err, bus.ErrNotFound) {
			return false, nil
		}
		if !a.pause(ctx, err) {
			return false, err
		}
	}
}

// end ends a task whose effects have stopped.
func (a *attempt) end(ctx context.Context, end outcome.End, err error) {
	// Writes of the end outlive the cause of the stop, within the lease.
	final, done := context.WithTimeout(context.WithoutCancel(ctx), max(a.left()+margin(a.ttl), bus.WriteTimeout))
	defer done()
	switch {
	case errors.Is(err, errFenced), errors.Is(err, errLeaseOver):
		a.s.metrics.fenced.Inc()
		if errors.Is(err, errLeaseOver) {
			a.span.AddEvent(telemetry.EventLeaseOver)
			telemetry.Fail(a.span, "lease_over", err.Error())
		} else {
			a.span.AddEvent(telemetry.EventFenced)
			telemetry.Fail(a.span, "fenced", err.Error())
		}
		a.log.Warn().Err(err).Msg("stopped; nothing is written any more")
		return
	case errors.Is(err, errHandBack):
		a.span.AddEvent(telemetry.EventHandedBack)
		a.handBack(final, end)
		return
	case errors.Is(err, errCancelled):
		a.span.AddEvent(telemetry.EventCancelled)
		end = outcome.Map(outcome.Outcome{Kind: outcome.CancelObserved}).With(end)
	case errors.Is(err, errStalled):
		a.s.metrics.stalled.Inc()
		end = outcome.Map(outcome.Outcome{Kind: outcome.Exception, Code: contract.ErrExecutorStalled, Message: a.stallText()}).With(end)
	case errors.Is(err, errTimeout):
		end = outcome.Map(outcome.Outcome{Kind: outcome.ExecutionTimeout, TimeoutSeconds: a.grant.Request.Subagent.TimeoutSeconds}).With(end)
	case err != nil:
		if fault.As(err) != nil {
			a.s.metrics.panics.Inc()
		}
		a.log.Error().Err(err).Msg("the attempt failed for a fault of ours")
		end = outcome.Map(outcome.Outcome{Kind: outcome.Exception, Message: err.Error()}).With(end)
	}
	a.traceEnd(end)
	a.finish(final, end)
}

// traceEnd tells the span how the task ends.
func (a *attempt) traceEnd(end outcome.End) {
	a.span.SetAttributes(telemetry.AttrStatus.String(string(end.State)))
	if u := end.Usage; u != nil {
		a.span.SetAttributes(telemetry.AttrGenAIInputTokens.Int64(u.InputTokens), telemetry.AttrGenAIOutputTokens.Int64(u.OutputTokens))
	}
	if end.StopReason != "" {
		a.span.SetAttributes(telemetry.AttrStopReason.String(string(end.StopReason)))
		a.span.AddEvent(telemetry.EventCapped, trace.WithAttributes(telemetry.AttrStopReason.String(string(end.StopReason))))
	}
	if end.State != contract.StateCompleted {
		class := string(end.ErrorCode)
		if class == "" {
			class = string(end.State)
		}
		telemetry.Fail(a.span, class, string(end.State))
	}
}

// delivery counts the deliveries of a message from 1; 0 when that is not known.
func delivery(msg jetstream.Msg) int {
	meta, err := msg.Metadata()
	if err != nil {
		return 0
	}
	return int(min(meta.NumDelivered, math.MaxInt32))
}

// finish writes the terminal record once and then its event (protocol W11).
func (a *attempt) finish(ctx context.Context, end outcome.End) {
	rec, ok, err := a.terminal(ctx, a.rec, end, a.rev)
	switch {
	case err != nil:
		return
	case !ok:
		a.finishMarked(ctx, end)
		return
	}
	a.told(ctx, rec)
}

// finishMarked is what is left to do when the last write of an attempt was
// refused: the mark of a cancellation lets us write once more, as cancelled.
func (a *attempt) finishMarked(ctx context.Context, used outcome.End) {
	now, rev, marked, err := a.marked(ctx)
	if err != nil {
		a.log.Warn().Err(err).Msg("the last write was refused, and the record cannot be read; the gate will end the task when the lease is over")
		return
	}
	if !marked {
		a.s.metrics.fenced.Inc()
		a.span.AddEvent(telemetry.EventFenced)
		a.log.Info().Str("state", string(now.State)).Msg("somebody else ended or moved the task; ours is dropped")
		return
	}
	rec, ok, err := a.terminal(ctx, now, outcome.Map(outcome.Outcome{Kind: outcome.CancelObserved}).With(used), rev)
	if err == nil && ok {
		a.told(ctx, rec)
	}
}

// told publishes the event of an end that is written (protocol W15).
func (a *attempt) told(ctx context.Context, rec contract.TaskRecord) {
	a.s.metrics.ended.WithLabelValues(string(rec.State)).Inc()
	a.log.Info().Str("state", string(rec.State)).Str("error_code", string(rec.ErrorCode)).Str("stop_reason", string(rec.StopReason)).
		Int64("duration_ms", rec.FinishedAt.Sub(*rec.StartedAt).Milliseconds()).Msg("ended")
	ev, err := event.Terminal(rec, a.s.source())
	if err != nil {
		a.log.Error().Err(err).Msg("a terminal event could not be made; the gate will try")
		return
	}
	w, err := eventwrite.Of(a.s.bus, ev)
	if err != nil {
		a.log.Error().Err(err).Msg("a terminal event cannot be encoded")
		return
	}
	w.Expect = bus.Seq(0)
	if _, err := a.s.bus.Publish(ctx, w); err != nil && !errors.Is(err, bus.ErrConflict) {
		a.log.Warn().Err(err).Msg("the terminal event is in doubt; the gate makes sure of it")
	}
}

// terminal writes an end over the revision rev; false when the record has moved.
// Errors are logged.
func (a *attempt) terminal(ctx context.Context, from contract.TaskRecord, end outcome.End, rev uint64) (contract.TaskRecord, bool, error) {
	rec, err := outcome.Terminate(from, end, a.s.now().UTC())
	if err != nil {
		a.log.Error().Err(err).Msg("an end could not be made")
		return rec, false, err
	}
	rec.Writer = a.s.writer.Next()
	_, ok, err := a.write(ctx, rec, rev)
	if errors.Is(err, bus.ErrTooLarge) {
		part := a.s.bus.PartOf(contract.MaxStepChars) / 6 // JSON may need six bytes for one
		cut := rec
		cut.Result, cut.Error = event.CutBytes(rec.Result, part), event.CutBytes(rec.Error, part)
		cut.ResultTruncated = rec.ResultTruncated || cut.Result != rec.Result
		rec = cut
		_, ok, err = a.write(ctx, rec, rev)
	}
	if err != nil {
		a.log.Warn().Err(err).Msg("the end could not be written; the gate will end the task when the lease is over")
	}
	return rec, ok, err
}

// storeLarge moves a result that would not fit into a record to the blob store.
// What stops the attempt from here on comes too late: there is a result.
func (a *attempt) storeLarge(ctx context.Context, end outcome.End) outcome.End {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), blobTimeout)
	defer cancel()
	if len(end.Result) > contract.MaxResultBytes {
		end.Result, end.ResultTruncated = event.CutBytes(end.Result, contract.MaxResultBytes), true
	}
	inline := a.s.bus.PartOf(contract.MaxInlineResultBytes)
	if encodedLen(end.Result) <= inline {
		return end
	}
	ref, err := a.s.bus.PutBlob(ctx, fmt.Sprintf("result.%s.%d", a.grant.TaskID, a.grant.Attempt), []byte(end.Result))
	if err != nil {
		a.log.Warn().Err(err).Msg("a large result could not be stored apart; it is cut")
		end.Result, end.ResultTruncated = event.CutBytes(end.Result, inline/6), true
		return end
	}
	end.ResultRef = &ref
	end.Result, _ = event.Truncate(end.Result, contract.MaxStepChars)
	end.Result = event.CutBytes(end.Result, inline/6)
	return end
}

// blobTimeout bounds the transfer of a large result.
const blobTimeout = 30 * time.Second

// encodedLen is the length of s inside a JSON document.
func encodedLen(s string) int {
	b, err := json.Marshal(s)
	if err != nil {
		return len(s) * 6
	}
	return len(b)
}

// handBack releases the record (protocol W12): the gate grants it again, in its
// old slot.
func (a *attempt) handBack(ctx context.Context, used outcome.End) {
	rec := a.rec
	rec.State, rec.Started, rec.Writer = contract.StateReleased, a.begun.Load(), a.s.writer.Next()
	_, ok, err := a.write(ctx, rec, a.rev)
	switch {
	case err != nil:
		a.log.Warn().Err(err).Msg("the task could not be handed back; its lease runs out")
	case !ok:
		a.finishMarked(ctx, used)
	default:
		a.s.metrics.ended.WithLabelValues(string(contract.StateReleased)).Inc()
		a.log.Info().Bool("started", rec.Started).Msg("handed back")
	}
}

// publish stores one event of this attempt, chained to the task's last one, so
// that a stale attempt's next event is refused by the server (protocol W18).
func (a *attempt) publish(ctx context.Context, ev envelope.Event) error {
	w, err := eventwrite.Of(a.s.bus, ev)
	if err != nil {
		return err
	}
	w.ExpectSubject = a.s.bus.Names.TaskEvents(a.rec.Tenant, a.rec.ThreadID, a.rec.RunID, a.rec.TaskID)
	for {
		if err := a.gate(); err != nil {
			return err
		}
		w.Expect = bus.Seq(a.last)
		var ack bus.Ack
		sent, err := a.s.bus.Send(w)
		if err == nil {
			a.turn.pass() // what is sent next is stored after it
			ack, err = sent.Wait(ctx)
		}
		if err == nil {
			a.last = ack.Seq
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, bus.ErrConflict) {
			stored, rerr := a.chainOn(ctx, ev.ID, w.ExpectSubject)
			if stored || errors.Is(rerr, errFenced) {
				return rerr
			}
			if rerr == nil {
				continue
			}
			err = errors.Join(err, rerr)
		}
		if errors.Is(err, bus.ErrTooLarge) {
			return err
		}
		if !a.pause(ctx, err) {
			return context.Cause(ctx)
		}
	}
}

// chainOn reads the task's last event after a refusal. It is true when that
// event is the one we were about to store.
func (a *attempt) chainOn(ctx context.Context, id, subject string) (bool, error) {
	last, err := a.s.bus.Last(ctx, a.s.bus.Names.EventStream(), subject)
	if errors.Is(err, bus.ErrNotFound) {
		a.last = 0 // what there was has aged out
		return false, nil
	}
	if err != nil {
		return false, err
	}
	ev, err := envelope.Decode(last.Data)
	if err != nil {
		// None of ours wrote that. Its subject tells what it means to be.
		at, perr := a.s.bus.Names.ParseEvent(last.Subject)
		if perr != nil {
			return false, err
		}
		ev = envelope.Event{Type: at.Type}
	}
	switch {
	case ev.ID == id:
		a.last = last.Seq
		return true, nil
	case ev.Attempt > a.grant.Attempt, ev.Type.TaskTerminal():
		a.cancel(errFenced)
		return false, errFenced
	}
	a.last = last.Seq
	return false, nil
}

// bury keeps a grant that cannot be used, with the reason, and ends its task: the
// record is granted, which never expires, so nobody else would free its slot.
func (s *Service) bury(ctx context.Context, msg jetstream.Msg, reason error) {
	s.log.Error().Err(reason).Str("subject", msg.Subject()).Msg("a grant cannot be used; it goes to the dead letters, and its task ends as failed")
	m := bus.Message{Subject: msg.Subject(), Data: msg.Data()}
	meta, err := msg.Metadata()
	if err == nil {
		m.Seq = meta.Sequence.Stream
		err = s.bus.Bury(ctx, "executor", s.bus.Names.GrantStream(), m, reason)
	}
	if err == nil {
		err = s.endUnused(ctx, msg, reason)
	}
	if err != nil {
		s.log.Warn().Err(err).Str("subject", msg.Subject()).Msg("an unusable grant could not be dealt with; it comes again")
		_ = msg.NakWithDelay(time.Second)
		return
	}
	s.metrics.dead.Inc()
	_ = msg.TermWithReason("unusable grant")
}

// endUnused ends the task of an unusable grant, if its record still is what the
// grant was made of. What that was is told by the message's subject and id.
func (s *Service) endUnused(ctx context.Context, msg jetstream.Msg, reason error) error {
	id, attempt, ok := s.grantOf(msg)
	if !ok {
		return nil // it belongs to no task
	}
	key := s.bus.KV(contract.TaskKey(id))
	last, err := s.bus.Last(ctx, s.bus.TaskStream(), key)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	rec, err := contract.DecodeTaskRecord(last.Data)
	if err != nil || rec.State != contract.StateGranted || rec.Attempt != attempt {
		return nil //nolint:nilerr // a marker, or a record that has moved on
	}
	text := "The executor could not read the task's grant: " + reason.Error()
	if errors.Is(reason, errCrashes) {
		text = "The task's grant could not be handled: " + reason.Error()
	}
	end := outcome.Map(outcome.Outcome{Kind: outcome.Exception, Message: text})
	if rec, err = outcome.Terminate(rec, end, s.now()); err != nil {
		return err
	}
	rec.Writer = s.writer.Next()
	data, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	// The gate stores the event. A conflict means that somebody was faster.
	if _, err = s.bus.Publish(ctx, bus.Write{Subject: key, Data: data, Expect: bus.Seq(last.Seq)}); errors.Is(err, bus.ErrConflict) && !bus.Racing(err) {
		return nil
	}
	return err
}
