package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

// teller publishes the messages of one run as events. Each expects the one
// before it as the last of its subject, so that none is stored twice, however
// late it is sent again.
type teller struct {
	count int    // events that are stored
	last  uint64 // sequence of the newest
}

// announce makes sure that run_started is stored, once, and learns which
// messages an earlier driver has told.
func (d *drive) announce(ctx context.Context) error {
	d.mu.Lock()
	rec := d.rec
	d.mu.Unlock()
	if d.started == 0 {
		seq, err := d.e.once(ctx, event.RunStarted(rec, d.e.source, rec.CreatedAt))
		if err != nil {
			return fmt.Errorf("event run_started: %w", err)
		}
		d.started = seq
	}
	if !d.resumed {
		return nil
	}
	return d.teller.sync(ctx, d.e, rec)
}

// refusedFor is how long a lead says that it is not ready after the event stream has
// refused an event for a reason that trying again does not cure.
const refusedFor = 30 * time.Second

// untilDrain is d.life, but ends when the run is to be handed over: an event is waited
// for past a cancellation, not past a drain. stop must be called.
func (d *drive) untilDrain() (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(d.life)
	undo := context.AfterFunc(d.ctx, func() {
		if cause := context.Cause(d.ctx); errors.Is(cause, errDraining) {
			cancel(cause)
		}
	})
	return ctx, func() { undo(); cancel(nil) }
}

// heard notes what the event stream said to an event.
func (e *Engine) heard(err error) {
	switch {
	case err == nil, errors.Is(err, bus.ErrConflict):
		e.refused.Store(nil)
	case !errors.Is(err, bus.ErrDoubt) && e.refused.Swap(&refusal{err, e.clock()}) == nil:
		e.deps.Log.Error().Err(err).Msg("the event stream refuses events; runs wait until it takes them")
	}
}

// refusal is an error of the event stream, and when.
type refusal struct {
	err error
	at  time.Duration
}

// Check reports that the event stream has refused events just now: a lead whose
// events cannot be stored does not begin runs.
func (e *Engine) Check(context.Context) error {
	if r := e.refused.Load(); r != nil && e.clock()-r.at < refusedFor {
		return e.refusalError(r.err)
	}
	return nil
}

func (e *Engine) refusalError(err error) error {
	return fmt.Errorf("%w: the event stream %s refuses events, without which no run begins: %w; `herdgate provision` brings the stream in line with the configuration, `herdgate doctor` looks at the server's storage", leaderr.ErrUnavailable, e.c.Names.EventStream(), err)
}

// begun makes the first event of a run whose record was just stored. A stream that
// refuses it refuses the run, while its caller can still be told; a doubt is for the
// drive, which says it once more.
func (d *drive) begun(ctx context.Context) error {
	ev := event.RunStarted(d.rec, d.e.source, d.rec.CreatedAt)
	w, err := eventwrite.Of(d.e.c, ev)
	if err != nil {
		return err
	}
	w.Expect = bus.Seq(0)
	ack, err := d.e.c.Publish(ctx, w)
	d.e.heard(err)
	switch {
	case err == nil:
		d.started = ack.Seq
	case !errors.Is(err, bus.ErrDoubt) && !errors.Is(err, bus.ErrConflict):
		return d.e.refusalError(err)
	}
	return nil
}

// forget removes the record of a run that was refused.
func (d *drive) forget(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), bus.WriteTimeout)
	defer cancel()
	_, err := d.e.c.Publish(ctx, bus.Write{
		Subject: d.e.c.RunKV(contract.RunKey(d.id)), Header: nats.Header{"KV-Operation": {"DEL"}}, Expect: bus.Seq(d.rev), TTL: d.e.cfg.Retention,
	})
	if err != nil {
		d.log.Warn().Err(err).Msg("the record of a run that was refused could not be removed; the run begins when there is room")
	}
}

// tell publishes the messages that are stored in the record and not told yet.
func (d *drive) tell(ctx context.Context) error {
	d.mu.Lock()
	rec, conv := d.rec, d.conv
	d.mu.Unlock()
	return d.teller.tell(ctx, d.e, rec, conv, d.gate)
}

// once publishes an event that is the only one of its subject, and returns its
// sequence, also if it was stored before.
func (e *Engine) once(ctx context.Context, ev envelope.Event) (uint64, error) {
	w, err := eventwrite.Of(e.c, ev)
	if err != nil {
		return 0, err
	}
	w.Expect = bus.Seq(0)
	return retryDoubt(ctx, func() (uint64, error) {
		ack, err := e.c.Publish(ctx, w)
		e.heard(err)
		if err == nil {
			return ack.Seq, nil
		}
		if !errors.Is(err, bus.ErrConflict) {
			return 0, err
		}
		m, err := e.c.Last(ctx, e.c.Names.EventStream(), w.Subject)
		if errors.Is(err, bus.ErrNotFound) {
			// A sibling in flight or an event that has just aged out.
			return 0, fmt.Errorf("%w: %w", bus.ErrDoubt, err)
		}
		return m.Seq, err
	})
}

func messageSubject(n contract.Names, rec contract.RunRecord) string {
	return n.Event(contract.EventSubject{Tenant: rec.Tenant, Thread: rec.ThreadID.Token(), Run: rec.RunID, Type: contract.EventRunMessage})
}

// sync learns from the stream how far the run was told.
func (t *teller) sync(ctx context.Context, e *Engine, rec contract.RunRecord) error {
	m, err := retryDoubt(ctx, func() (bus.Message, error) {
		return e.c.Last(ctx, e.c.Names.EventStream(), messageSubject(e.c.Names, rec))
	})
	if errors.Is(err, bus.ErrNotFound) {
		// None was told, or those that were have aged out.
		t.last = 0
		return nil
	}
	if err != nil {
		return fmt.Errorf("events of run %s: %w", rec.RunID, err)
	}
	ev, err := envelope.Decode(m.Data)
	if err != nil {
		return fmt.Errorf("events of run %s: sequence %d: %w", rec.RunID, m.Seq, err)
	}
	var data contract.RunMessageData
	if err := json.Unmarshal(ev.Data, &data); err != nil {
		return fmt.Errorf("events of run %s: sequence %d: %w", rec.RunID, m.Seq, err)
	}
	t.last, t.count = m.Seq, data.MessageIndex
	return nil
}

// tell publishes the messages of conv that are not stored yet. gate is asked
// before each.
func (t *teller) tell(ctx context.Context, e *Engine, rec contract.RunRecord, conv conversation, gate func() error) error {
	steps := conv.steps()
	// What is gone was told before it went, although its events may have aged out.
	t.count = max(t.count, conv.GoneSteps)
	for t.count < conv.GoneSteps+len(steps) {
		if err := gate(); err != nil {
			return err
		}
		msg := conv.Messages[steps[t.count-conv.GoneSteps]]
		name, usage := "", (*contract.Usage)(nil)
		if msg.Role == model.RoleAssistant {
			name, usage = conv.ModelName, rec.Usage
		}
		ev := event.RunMessage(rec, t.count+1, event.BuildStep(msg), name, usage, e.source, e.deps.Now())
		w, err := eventwrite.Of(e.c, ev)
		if err != nil {
			return fmt.Errorf("event run_message %d: %w", t.count+1, err)
		}
		w.Expect = bus.Seq(t.last)
		ack, err := retryDoubt(ctx, func() (bus.Ack, error) {
			ack, err := e.c.Publish(ctx, w)
			e.heard(err)
			return ack, err
		})
		switch {
		case errors.Is(err, bus.ErrConflict):
			// A try of ours that went unanswered has landed, or another driver told
			// it: either way the stream knows.
			before := t.count
			if err := t.sync(ctx, e, rec); err != nil {
				return err
			}
			t.count = max(t.count, conv.GoneSteps)
			if t.count == before && pause.For(ctx, newBackOff().InitialInterval) != nil {
				return context.Cause(ctx)
			}
		case err != nil:
			return fmt.Errorf("event run_message %d: %w", t.count+1, err)
		default:
			t.last = ack.Seq
			t.count++
		}
	}
	return nil
}

// conclude does for a run that has ended what its driver no longer could: it
// tells what was not told, and closes the run.
func (e *Engine) conclude(ctx context.Context, rec contract.RunRecord, rev uint64) error {
	conv, err := decodeConversation(rec.Messages)
	if err != nil {
		e.deps.Log.Warn().Err(err).Str("run", string(rec.RunID)).Msg("the messages of a run cannot be read; its last event is told without them")
		conv = conversation{}
	}
	if _, err := e.once(ctx, event.RunStarted(rec, e.source, rec.CreatedAt)); err != nil {
		return err
	}
	var t teller
	if err := t.sync(ctx, e, rec); err != nil {
		return err
	}
	if err := t.tell(ctx, e, rec, conv, func() error { return nil }); err != nil {
		return err
	}
	if err := e.point(ctx, rec); err != nil {
		return err
	}
	return e.close(ctx, rec, rev)
}

// close stores the last event of a run and then marks the run as done with.
func (e *Engine) close(ctx context.Context, rec contract.RunRecord, rev uint64) error {
	ev, err := event.RunEnd(rec, e.source)
	if err != nil {
		return err
	}
	if _, err := e.once(ctx, ev); err != nil {
		return fmt.Errorf("last event of run %s: %w", rec.RunID, err)
	}
	err = e.closeLease(ctx, rec.RunID, rev)
	if errors.Is(err, bus.ErrConflict) {
		return nil // the record is gone: its time was over
	}
	return err
}

// pointer is the value of a thread's key.
type pointer struct {
	RunID contract.RunID `json:"run_id"`
	// Previous counts as long as RunID has not ended.
	Previous contract.RunID `json:"previous,omitempty"`
}

// point makes rec the run whose messages the next run of the thread goes on
// from. It is written before the run's end is, so that whoever sees the end
// finds the pointer.
func (e *Engine) point(ctx context.Context, rec contract.RunRecord) error {
	subject := e.c.RunKV(contract.ThreadKey(rec.Tenant, rec.ThreadID))
	_, err := retryDoubt(ctx, func() (struct{}, error) {
		now, rev, err := e.pointer(ctx, subject)
		if err != nil || now.RunID == rec.RunID || now.Previous == rec.RunID {
			return struct{}{}, err
		}
		body, err := json.Marshal(pointer{RunID: rec.RunID, Previous: now.RunID})
		if err != nil {
			return struct{}{}, err
		}
		_, err = e.c.Publish(ctx, bus.Write{Subject: subject, Data: body, TTL: e.cfg.Retention, Expect: bus.Seq(rev)})
		if errors.Is(err, bus.ErrConflict) {
			err = fmt.Errorf("%w: %w", bus.ErrDoubt, err) // another run of the thread ends: look again
		}
		return struct{}{}, err
	})
	if err != nil {
		return fmt.Errorf("thread of run %s: %w", rec.RunID, err)
	}
	return nil
}

// pointer reads a thread's key and its revision; the zero pointer if there is none.
func (e *Engine) pointer(ctx context.Context, subject string) (pointer, uint64, error) {
	var p pointer
	m, err := e.c.Last(ctx, e.c.RunStream(), subject)
	if errors.Is(err, bus.ErrNotFound) {
		return p, 0, nil
	}
	if err != nil || m.Deleted() {
		return p, m.Seq, err
	}
	if len(m.Data) > 4096 || json.Unmarshal(m.Data, &p) != nil {
		e.deps.Log.Warn().Str("key", subject).Msg("the key of a thread cannot be read; it is written anew")
		return pointer{}, m.Seq, nil
	}
	return p, m.Seq, nil
}

// history returns the messages that a new run of the thread goes on from, and what
// is known of those before them.
func (e *Engine) history(ctx context.Context, tenant contract.Tenant, thread contract.ThreadID) (conversation, error) {
	p, _, err := e.pointer(ctx, e.c.RunKV(contract.ThreadKey(tenant, thread)))
	if err != nil {
		return conversation{}, outside(err)
	}
	for _, id := range []contract.RunID{p.RunID, p.Previous} {
		if id == "" {
			break
		}
		rec, _, err := e.read(ctx, id)
		if errors.Is(err, leaderr.ErrNotFound) || err == nil && (!rec.Status.Terminal() || rec.Tenant != tenant || rec.ThreadID != thread) {
			continue
		}
		if errors.Is(err, bus.ErrDoubt) {
			return conversation{}, outside(err)
		}
		var conv conversation
		if err == nil {
			conv, err = decodeConversation(rec.Messages)
		}
		if err != nil {
			e.deps.Log.Warn().Err(err).Str("run", string(id)).Msg("a thread's last run cannot be read; going on without it")
			continue
		}
		messages := conv.history(maxHistoryBytes)
		return conversation{Messages: messages, History: len(messages), Kept: conv.Kept, Earlier: conv.earlier(rec.Delegations)}, nil
	}
	return conversation{}, nil
}
