// Package dispatch is the lead's side of the admission protocol: it hands
// requests to the gate's queue, writes cancellations, and reads where tasks
// stand. It talks to NATS alone; executors and the gate never hear from it
// directly.
//
// Nothing here assumes. A write without an answer is sent again with the same
// id, and "full" counts only when nothing of the task is stored.
package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cenkalti/backoff/v5"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

// Errors of this package, which are those of package leaderr. Use errors.Is,
// and errors.As with a *FinishedError.
var (
	ErrQueueFull   = leaderr.ErrQueueFull
	ErrUnavailable = leaderr.ErrUnavailable
	ErrNotFound    = leaderr.ErrNotFound
	ErrInvalid     = leaderr.ErrInvalid
)

type (
	// FinishedError is returned when a task that has ended should be cancelled.
	FinishedError = leaderr.FinishedError
	// TaskView is a task as the outside sees it.
	TaskView = wire.Task
	// AdmissionStatus is the gate's state.
	AdmissionStatus = admissionapi.Status
)

const (
	// submitBudget is how long a submission in doubt is tried again: longer
	// than a fail-over of the gate's stream or a reconnect takes.
	submitBudget = 20 * time.Second
	// cancelTTL keeps a cancellation as long as records are kept.
	cancelTTL = 24 * time.Hour
	// maxReasonChars bounds the reason in a cancellation.
	maxReasonChars = 500
	// admissionBudget bounds the wait for the gate's status, positionBudget that
	// for a task's place in the queue, which is left out rather than waited for.
	admissionBudget = 2 * time.Second
	positionBudget  = 500 * time.Millisecond
	// listPreviewChars bounds the result of a task in a list.
	listPreviewChars = 2000
)

// Dispatcher hands work to the gate. It is safe for concurrent use and owns no
// goroutine.
type Dispatcher struct {
	c      *bus.Conn
	now    func() time.Time
	log    zerolog.Logger
	tracer trace.Tracer
	// full counts what found the queue full: the gate never sees it.
	full prometheus.Counter
	// noReceipts: none is shown.
	noReceipts bool
}

// New returns a dispatcher on c.
func New(c *bus.Conn, now func() time.Time, log zerolog.Logger, tp trace.TracerProvider) *Dispatcher {
	return &Dispatcher{
		c: c, now: now, log: log, tracer: telemetry.Tracer(tp, "dispatch"),
		full: prometheus.NewCounter(prometheus.CounterOpts{Name: "herdgate_lead_queue_full_total", Help: "Tasks that were refused because the queue was full."}),
	}
}

// HideReceipts keeps receipts and verdicts out of what is shown of tasks, also those of
// executors that are told otherwise, and of a time when there were any (RECEIPT-15). It
// is for the start, before anybody asks.
func (d *Dispatcher) HideReceipts() { d.noReceipts = true }

// Collectors are its metrics.
func (d *Dispatcher) Collectors() []prometheus.Collector { return []prometheus.Collector{d.full} }

// Accepted says that the gate's queue holds a request.
type Accepted struct {
	// Seq is the request's sequence in the queue's stream; 0 when the task was
	// accepted before and its request has left the queue.
	Seq uint64
	// QueuePosition is the place among those that wait: 1 is next, 0 means that
	// a slot seems to be free. It is an estimate: others come and go.
	QueuePosition int
	// Duplicate: the task had been accepted before; nothing was stored now.
	Duplicate bool
}

// Submit stores the request in the gate's queue; when it returns without an
// error, the task will be run or ended with a reason, whatever happens to this
// process. The same task id again is accepted without a second effect.
//
// Errors: ErrQueueFull, [contract.ErrInvalidMessage], and ErrUnavailable when
// no answer could be had within about 20 seconds or before ctx was done: the
// request may or may not be stored then, and should be submitted again under
// the same id.
func (d *Dispatcher) Submit(ctx context.Context, req contract.TaskRequest) (Accepted, error) {
	if req.Pool == "" {
		req.Pool = req.Subagent.Pool
	}
	if req.Identity.UserID == "" {
		req.Identity.UserID = contract.DefaultUser
	}
	body, err := req.Encode()
	if err != nil {
		return Accepted{}, fmt.Errorf("submit task: %w", err)
	}
	sending, span := telemetry.StartPublish(ctx, d.tracer, telemetry.RequestTemplate(d.c.Names.Prefix()),
		telemetry.AttrTaskID.String(string(req.TaskID)), telemetry.AttrRunID.String(string(req.RunID)), telemetry.AttrTenant.String(string(req.Tenant)),
		telemetry.AttrMessagingMessageID.String(string(req.TaskID)), telemetry.AttrMessagingBodySize.Int(len(body)),
		telemetry.AttrSubagentType.String(req.Subagent.Name),
	)
	acc, err := d.submit(sending, req, body)
	if err != nil {
		class := telemetry.ErrorClass(err)
		switch {
		case errors.Is(err, ErrQueueFull):
			class = string(contract.ErrQueueFull)
		case errors.Is(err, ErrUnavailable):
			class = "unavailable"
		}
		telemetry.Fail(span, class, "not accepted")
	}
	span.End()
	if err != nil {
		return acc, err
	}
	posCtx, cancel := context.WithTimeout(ctx, positionBudget)
	defer cancel()
	if pos, err := d.position(posCtx, acc.Seq); err == nil {
		acc.QueuePosition = pos
	} else {
		d.log.Debug().Err(err).Str("task", string(req.TaskID)).Msg("queue position is not known")
	}
	return acc, nil
}

func (d *Dispatcher) submit(ctx context.Context, req contract.TaskRequest, body []byte) (Accepted, error) {
	header := nats.Header{envelope.HeaderContentType: {"application/json"}}
	telemetry.Inject(ctx, header)
	w := bus.Write{
		Subject: d.c.Names.TaskRequest(req.Tenant, req.TaskID),
		Data:    body,
		Header:  header,
		MsgID:   string(req.TaskID),
	}
	acc, err := retryDoubt(ctx, func() (Accepted, error) {
		ack, err := d.c.Publish(ctx, w)
		switch {
		case err == nil:
			return Accepted{Seq: ack.Seq, Duplicate: ack.Duplicate}, nil
		case errors.Is(err, bus.ErrExists), errors.Is(err, bus.ErrFull):
			// A cluster gives both faults the same text, and a publish of ours
			// that went unanswered may have taken the last place: look.
			before, seq, lookErr := d.acceptedBefore(ctx, req.Tenant, req.TaskID)
			switch {
			case lookErr != nil:
				return Accepted{}, fmt.Errorf("%w: %w", bus.ErrDoubt, lookErr)
			case before:
				return Accepted{Seq: seq, Duplicate: true}, nil
			case errors.Is(err, bus.ErrExists):
				// It was there a moment ago and is gone: ended and removed, or
				// about to be. Publishing again tells.
				return Accepted{}, fmt.Errorf("%w: %w", bus.ErrDoubt, err)
			}
			d.full.Inc()
			return Accepted{}, fmt.Errorf("%w: %w", ErrQueueFull, err)
		case errors.Is(err, bus.ErrTooLarge):
			return Accepted{}, fmt.Errorf("%w: %w: task request: %w", contract.ErrInvalidMessage, contract.ErrTooLarge, err)
		}
		return Accepted{}, err
	})
	if err != nil {
		return Accepted{}, fmt.Errorf("submit task %s: %w", req.TaskID, err)
	}
	return acc, nil
}

// retryDoubt repeats op while its outcome is in doubt, for at most submitBudget
// and while ctx allows.
func retryDoubt[T any](ctx context.Context, op func() (T, error)) (T, error) {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval = 50 * time.Millisecond
	b.MaxInterval = time.Second
	v, err := backoff.Retry(ctx, func() (T, error) {
		v, err := op()
		if err != nil && (!errors.Is(err, bus.ErrDoubt) || ctx.Err() != nil) {
			err = backoff.Permanent(err)
		}
		return v, err
	}, backoff.WithBackOff(b), backoff.WithMaxElapsedTime(submitBudget))
	if permanent := new(backoff.PermanentError); errors.As(err, &permanent) {
		err = permanent.Unwrap()
	}
	if err != nil && (errors.Is(err, bus.ErrDoubt) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return v, err
}

// acceptedBefore reports whether anything of the task is stored, and the
// sequence of its request if that still is.
func (d *Dispatcher) acceptedBefore(ctx context.Context, tenant contract.Tenant, id contract.TaskID) (bool, uint64, error) {
	m, err := d.c.Last(ctx, d.c.Names.WorkStream(), d.c.Names.TaskRequest(tenant, id))
	if err == nil {
		return true, m.Seq, nil
	}
	if !errors.Is(err, bus.ErrNotFound) {
		return false, 0, err
	}
	rec, err := d.record(ctx, id)
	switch {
	case errors.Is(err, ErrNotFound):
		return false, 0, nil
	case err != nil:
		return false, 0, err
	}
	return rec.Tenant == tenant, 0, nil
}

// position estimates how many wait up to and with the request at seq: those
// stored after it do not count, and as many of the rest have slots as there are.
func (d *Dispatcher) position(ctx context.Context, seq uint64) (int, error) {
	if seq == 0 {
		return 0, nil
	}
	limits, err := d.Limits(ctx)
	if err != nil {
		return 0, err
	}
	s, err := d.c.JS.Stream(ctx, d.c.Names.WorkStream())
	if err != nil {
		return 0, fmt.Errorf("state of the queue: %w", err)
	}
	state := s.CachedInfo().State
	behind := uint64(0)
	if state.LastSeq > seq {
		behind = state.LastSeq - seq
	}
	return max(0, int(state.Msgs)-int(behind)-limits.Capacity()), nil
}

// DefaultLimits is what holds until a gate has published its limits.
func DefaultLimits() contract.AdmissionLimits {
	return contract.AdmissionLimits{MaxRunning: 3, MaxQueued: 64, AdmissionPolicy: "queue", QueueTimeoutSeconds: 300}
}

// Limits returns what the gate enforces at the moment, or [DefaultLimits] when
// none has said so yet.
func (d *Dispatcher) Limits(ctx context.Context) (contract.AdmissionLimits, error) {
	m, err := d.c.Last(ctx, d.c.TaskStream(), d.c.KV(contract.LimitsKey))
	if errors.Is(err, bus.ErrNotFound) || err == nil && m.Deleted() {
		return DefaultLimits(), nil
	}
	if err != nil {
		return contract.AdmissionLimits{}, unavailable(fmt.Errorf("limits of the gate: %w", err))
	}
	l, err := contract.Decode[contract.AdmissionLimits](m.Data)
	if err != nil {
		return contract.AdmissionLimits{}, fmt.Errorf("limits of the gate: %w", err)
	}
	return l, nil
}

// Cancel asks for the end of a task, whatever its state, and returns once the
// wish is durable: the gate ends a waiting task at once, an executor a running
// one within two seconds. Repeating it is harmless. ErrNotFound for what this
// tenant does not have, a *FinishedError for a task that has ended, also if it did
// so while the wish was on its way. Without an error, an end other than cancelled
// can only be one that was stored after the wish and has won against it.
func (d *Dispatcher) Cancel(ctx context.Context, tenant contract.Tenant, id contract.TaskID, reason string) error {
	f, err := d.find(ctx, tenant, id)
	if err != nil {
		return fmt.Errorf("cancel task %.80s: %w", id, err)
	}
	if f.record != nil && f.record.State.Terminal() {
		return leaderr.TaskFinished(id, f.record.State.Status())
	}
	body, err := json.Marshal(contract.Cancel{Reason: cut(strings.ToValidUTF8(reason, "\uFFFD"), maxReasonChars), RequestedAt: d.now().UTC()})
	if err != nil {
		return fmt.Errorf("cancel task %s: %w", id, err)
	}
	header := nats.Header{}
	telemetry.Inject(ctx, header)
	_, err = retryDoubt(ctx, func() (bus.Ack, error) {
		return d.c.Publish(ctx, bus.Write{Subject: d.c.KV(contract.CancelKey(id)), Data: body, Header: header, TTL: cancelTTL})
	})
	if err != nil {
		return fmt.Errorf("cancel task %s: %w", id, err)
	}
	// The task may have ended between the look and the write. An end that was
	// stored before the wish is not touched by it, and the caller is told of it,
	// like of one that has beaten the wish since. What cannot be read is left at that
	// the wish is durable.
	rec, err := d.record(ctx, id)
	switch {
	case err == nil && rec.State.Terminal() && rec.State != contract.StateCancelled:
		return leaderr.TaskFinished(id, rec.State.Status())
	case err != nil && !errors.Is(err, ErrNotFound):
		d.log.Debug().Err(err).Str("task", string(id)).Msg("whether a cancelled task had ended is not known")
	}
	return nil
}

// Get returns a task of the tenant with its whole result. ErrNotFound for
// everything that the tenant does not have.
func (d *Dispatcher) Get(ctx context.Context, tenant contract.Tenant, id contract.TaskID) (TaskView, error) {
	f, err := d.find(ctx, tenant, id)
	if err != nil {
		return TaskView{}, fmt.Errorf("task %.80s: %w", id, err)
	}
	view := d.view(f)
	if f.record != nil && f.record.ResultRef != nil {
		whole, err := d.Result(ctx, *f.record)
		if err == nil {
			view.Result, view.ResultTruncated = &whole, f.record.ResultTruncated
		} else {
			d.log.Warn().Err(err).Str("task", string(id)).Msg("the whole result cannot be read; showing its beginning")
			view.ResultTruncated = true
		}
	}
	if view.Status == contract.TaskQueued && f.record == nil {
		view.QueuePosition = d.askPosition(ctx, id)
	}
	return view, nil
}

func (d *Dispatcher) askPosition(ctx context.Context, id contract.TaskID) *int {
	ctx, cancel := context.WithTimeout(ctx, positionBudget)
	defer cancel()
	s, err := admissionapi.Ask(ctx, d.c, admissionapi.StatusRequest{TaskID: id})
	if err != nil {
		d.log.Debug().Err(err).Str("task", string(id)).Msg("queue position is not known")
		return nil
	}
	return s.QueuePosition
}

// Admission asks the gate's leader for its state, for at most two seconds.
// ErrUnavailable when nobody answers.
func (d *Dispatcher) Admission(ctx context.Context) (AdmissionStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, admissionBudget)
	defer cancel()
	s, err := admissionapi.Ask(ctx, d.c, admissionapi.StatusRequest{})
	if err != nil {
		return AdmissionStatus{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if s.Slots == nil {
		s.Slots = []admissionapi.Slot{}
	}
	return s, nil
}

// found is what is stored of a task: its record, or its request while it waits.
type found struct {
	record  *contract.TaskRecord
	request contract.TaskRequest
	parent  string // traceparent of the request
	seq     uint64 // of the request
}

func (d *Dispatcher) view(f found) TaskView {
	if f.record != nil {
		return d.taskOf(*f.record)
	}
	return wire.TaskWaiting(f.request, f.parent)
}

// taskOf shows a task's record.
func (d *Dispatcher) taskOf(rec contract.TaskRecord) TaskView {
	if d.noReceipts {
		rec.Receipts, rec.ReceiptVerdict = nil, nil
	}
	return wire.TaskOf(rec)
}

// find reads a task of the tenant from the streams' leaders.
func (d *Dispatcher) find(ctx context.Context, tenant contract.Tenant, id contract.TaskID) (found, error) {
	if errors.Join(tenant.Validate(), id.Validate()) != nil {
		return found{}, ErrNotFound
	}
	// A task moves from its request to its record and never back. Between the
	// two reads its request may leave, so that the record has to be read again.
	for range 2 {
		rec, err := d.record(ctx, id)
		if err == nil {
			if rec.Tenant != tenant {
				return found{}, ErrNotFound
			}
			return found{record: &rec}, nil
		}
		if !errors.Is(err, ErrNotFound) {
			return found{}, unavailable(err)
		}
		m, err := d.c.Last(ctx, d.c.Names.WorkStream(), d.c.Names.TaskRequest(tenant, id))
		if errors.Is(err, bus.ErrNotFound) {
			continue
		}
		if err != nil {
			return found{}, unavailable(err)
		}
		req, err := contract.DecodeTaskRequest(m.Data)
		if err != nil {
			return found{}, err
		}
		return found{request: req, parent: m.Header.Get(envelope.HeaderTraceParent), seq: m.Seq}, nil
	}
	return found{}, ErrNotFound
}

// record reads a task's record; ErrNotFound when there is none, or none any more.
func (d *Dispatcher) record(ctx context.Context, id contract.TaskID) (contract.TaskRecord, error) {
	m, err := d.c.Last(ctx, d.c.TaskStream(), d.c.KV(contract.TaskKey(id)))
	if errors.Is(err, bus.ErrNotFound) || err == nil && m.Deleted() {
		return contract.TaskRecord{}, ErrNotFound
	}
	if err != nil {
		return contract.TaskRecord{}, err
	}
	return contract.DecodeTaskRecord(m.Data)
}

// unavailable marks faults of the way to NATS, which pass, as ErrUnavailable.
func unavailable(err error) error {
	if errors.Is(bus.Classify(err), bus.ErrDoubt) {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return err
}

// cut shortens s to n code points.
func cut(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	for i := range s {
		if n == 0 {
			return s[:i]
		}
		n--
	}
	return s
}
