package admission

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/fault"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// A request on which our own code panics must not stand in the way of all others.
// It is tried once more; after the second panic its task ends as an internal
// failure and the request goes to the dead letters. A panic inside the gate may
// leave it half changed, so it ends the reign: the next one reads everything anew.

// maxCrashes is how many panics one request may cause.
const maxCrashes = 2

// errCrashes is why a request is given up that makes its handling panic.
var errCrashes = fmt.Errorf("its handling panicked %d times", maxCrashes)

// crashes counts the panics that requests have caused in this process, over
// reigns.
type crashes struct {
	mu sync.Mutex
	of map[contract.TaskID]int
}

// maxBlamed bounds the memory of panics; after it the count begins anew.
const maxBlamed = 1000

func (c *crashes) add(id contract.TaskID) int {
	if id == "" {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of == nil || len(c.of) >= maxBlamed {
		c.of = map[contract.TaskID]int{}
	}
	c.of[id]++
	return c.of[id]
}

func (c *crashes) tooMany(id contract.TaskID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.of[id] >= maxCrashes
}

// panicked logs and counts a panic and returns how many the task has caused.
func (s *Service) panicked(f *fault.Error, what string, id contract.TaskID) int {
	n := s.crashes.add(id)
	s.metrics.panics.Inc()
	f.Log(s.log.Error()).Str("part", what).Str("task_id", string(id)).Int("times", n).Msg("a part of the gate panicked")
	return n
}

// guard runs a part of a reign; a panic of it comes back as an error, which ends
// the reign and leaves the process alone.
func (r *reign) guard(part string, run func() error) (err error) {
	defer func() {
		if f := fault.Of(recover()); f != nil {
			r.s.panicked(f, part, "")
			err = f
		}
	}()
	return run()
}

// judge asks the gate. A panic of it is put on the account of the task that it was
// about, and raised again.
func (r *reign) judge(ev gate.Event) []gate.Action {
	defer func() {
		if f := fault.Of(recover()); f != nil {
			id := r.gate.Considering()
			if id == "" {
				id = subject(ev)
			}
			n := r.s.crashes.add(id)
			r.s.log.Error().Str("task_id", string(id)).Int("times", n).Str("event", fmt.Sprintf("%T", ev)).Msg("the gate panicked over a task")
			panic(f)
		}
	}()
	if r.s.probe != nil {
		r.s.probe("judge", subject(ev))
	}
	return r.gate.Apply(ev, r.s.now())
}

// subject is the task that an event brings data of, if it does.
func subject(ev gate.Event) contract.TaskID {
	switch ev := ev.(type) {
	case gate.RequestStored:
		return ev.Request.TaskID
	case gate.RecordSeen:
		return ev.Record.TaskID
	}
	return ""
}

// read decodes a message of the request stream; see [readBody]. What makes the
// decoder panic, twice, is a request that cannot be used.
func (b *bodies) read(m bus.Message) (body, error) {
	var v body
	for try := 1; ; try++ {
		err := fault.Catch(func() (err error) {
			v, err = readBody(b.bus.Names, b.pools, m)
			if err == nil && b.probe != nil {
				b.probe("read", v.id)
			}
			return err
		})
		f := fault.As(err)
		if f == nil || try < maxCrashes {
			if f == nil {
				return v, err
			}
			continue
		}
		err = fmt.Errorf("%w: %w", errCrashes, f)
		tenant, id, perr := b.bus.Names.ParseTaskRequest(m.Subject)
		if perr != nil {
			return body{}, err
		}
		return body{seq: m.Seq, tenant: tenant, id: id, queued: m.Time, size: len(m.Data), invalid: err}, nil
	}
}

// quarantine ends a live task whose handling has panicked too often, before the
// gate gets to see it once more.
func (r *reign) quarantine(ctx context.Context, ev gate.Event) gate.Event {
	seen, ok := ev.(gate.RecordSeen)
	if !ok || !seen.Record.State.Live() || !r.s.crashes.tooMany(seen.Record.TaskID) {
		return ev
	}
	moved, ok := r.fail(ctx, seen.Record, seen.Revision, errCrashes).(gate.Moved)
	if !ok || moved.Outcome != gate.Stored {
		return ev
	}
	return gate.RecordSeen{Revision: moved.Revision, Record: moved.Record}
}

// fail ends a granted or running task that we cannot go on with, and keeps its
// request among the dead letters.
func (r *reign) fail(ctx context.Context, rec contract.TaskRecord, rev uint64, reason error) gate.Event {
	end := outcome.Map(outcome.Outcome{Kind: outcome.Exception, Message: "The task could not be handed to an executor: " + reason.Error()})
	next, err := outcome.Terminate(rec, end, r.s.now())
	if err != nil {
		r.s.log.Error().Err(err).Str("task_id", string(rec.TaskID)).Msg("an end could not be made")
		return gate.Moved{TaskID: rec.TaskID, Outcome: gate.Refused}
	}
	r.buryRequest(ctx, rec.TaskID, rec.RequestSeq, reason)
	return r.move(ctx, gate.MoveRecord{TaskID: rec.TaskID, Revision: rev, Record: next})
}

// buryRequest keeps a request among the dead letters. Where that does not work at
// once, it is left to those who bury the others, so that nobody has to wait.
func (r *reign) buryRequest(ctx context.Context, id contract.TaskID, seq uint64, reason error) {
	m, err := r.s.bus.Get(ctx, r.s.bus.Names.WorkStream(), seq)
	r.keep(ctx, id, m, err, reason)
}

// keep puts a message that was read, if it was, among the dead letters.
func (r *reign) keep(ctx context.Context, id contract.TaskID, m bus.Message, err, reason error) {
	if errors.Is(err, bus.ErrNotFound) {
		return
	}
	if err == nil {
		if err = r.bury(ctx, m, reason); err == nil {
			return
		}
		select {
		case r.dead <- letter{m, reason}:
			return
		default:
		}
	}
	r.s.log.Error().Err(err).AnErr("reason", reason).Str("task_id", string(id)).Uint64("seq", m.Seq).Msg("a message could not be kept among the dead letters")
}

// perform makes a write that the gate has asked for. One that panics is made once
// more; they are all idempotent or expect a revision. An error ends the reign.
func (r *reign) perform(ctx context.Context, a gate.Action) error {
	return r.performAfter(ctx, a, 0)
}

// performAfter does so when the action has panicked that often.
func (r *reign) performAfter(ctx context.Context, a gate.Action, panics int) error {
	for try := panics + 1; ; try++ {
		err := fault.Catch(func() error {
			if r.s.probe != nil {
				r.s.probe(fmt.Sprintf("%T", a), taskOf(a))
			}
			r.act(ctx, a)
			return nil
		})
		f := fault.As(err)
		if f == nil {
			return err
		}
		r.s.panicked(f, fmt.Sprintf("%T", a), "")
		if try < maxCrashes {
			continue
		}
		err = fmt.Errorf("%w: %w", errCrashes, f)
		switch a := a.(type) {
		case gate.SendGrant:
			r.tell(ctx, r.fail(ctx, a.Record, a.Revision, err))
			return nil
		case gate.StoreTerminalEvent:
			// The record says it all; only who follows events is not told.
			last, lerr := r.s.bus.Last(ctx, r.s.bus.TaskStream(), r.s.bus.KV(contract.TaskKey(a.TaskID)))
			r.keep(ctx, a.TaskID, last, lerr, err)
			r.tell(ctx, gate.TerminalEventStored{TaskID: a.TaskID})
			return nil
		case gate.TellQueued:
			return nil // nothing waits for it
		}
		return err
	}
}

// taskOf is the task of an action that has data of one.
func taskOf(a gate.Action) contract.TaskID {
	switch a := a.(type) {
	case gate.SendGrant:
		return a.TaskID
	case gate.StoreTerminalEvent:
		return a.TaskID
	case gate.TellQueued:
		return a.TaskID
	}
	return ""
}

// tryWrite makes a first write. One that panics is made once more; then the
// request is what is wrong, and its task is ended without a grant.
func (f *fence) tryWrite(ctx context.Context, w gate.FirstWrite) error {
	err := fault.Catch(func() error {
		if f.s.probe != nil {
			f.s.probe("write", w.TaskID)
		}
		return f.write(ctx, w)
	})
	p := fault.As(err)
	if p == nil {
		return err
	}
	n := f.s.panicked(p, "first write", w.TaskID)
	// It may have landed: the key is moved on, and the record looked at before the
	// next first write of this task.
	if err := f.renew(ctx); err != nil {
		return err
	}
	f.inherited = max(f.inherited, w.RequestSeq)
	reason := fmt.Errorf("%w: %w", errCrashes, p)
	switch {
	case n < maxCrashes:
	case n == maxCrashes:
		f.bury(ctx, w.TaskID, w.RequestSeq, reason)
		f.tell(ctx, gate.RequestSpoiled{TaskID: w.TaskID, Reason: reason.Error()})
	default:
		// Not even its end can be written. It must not hold up the others.
		f.s.log.Error().Str("task_id", string(w.TaskID)).Uint64("seq", w.RequestSeq).Msg("the end of a task cannot be written; its request is taken out of the queue")
		if err := f.s.bus.DeleteMsg(ctx, f.s.bus.Names.WorkStream(), w.RequestSeq); err != nil {
			return errors.Join(err, reason)
		}
		f.tell(ctx, gate.RequestRemoved{TaskID: w.TaskID})
	}
	f.tell(ctx, gate.FirstWritten{TaskID: w.TaskID, Outcome: gate.Absent})
	return nil
}
