package admission

import (
	"context"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// An executor tells of the end that it has written; the gate makes sure of it before
// it removes the request (protocol W15, W16). So the leader reads along which
// terminal events are stored, and an end whose event comes costs it no question.
// Only where none comes in time does it look by itself, and tells in the executor's
// place.

// executorsTurn is how long the gate leaves the terminal event to the executor that
// wrote the record. A second one would be refused by the stream, but reach all those
// who subscribe without it.
const executorsTurn = 250 * time.Millisecond

// maxEndsSeen is how many events are remembered that nobody has asked for yet.
const maxEndsSeen = 4096

// endSeen tells the loop that a terminal event is stored.
type endSeen struct {
	gate.Event
	subject string
}

// endOwed tells the loop that the event of an executor's end is not stored yet.
type endOwed struct {
	gate.Event
	subject string
	of      gate.StoreTerminalEvent
}

// ends knows by subject which terminal events are stored and which are waited for.
// The loop owns it.
type ends struct {
	turn    time.Duration // of an executor
	seen    map[string]struct{}
	order   []string // of seen, oldest first
	waiting map[string]gate.StoreTerminalEvent
	turns   []turn // of waiting, the one that is over first at the front
}

type turn struct {
	subject string
	until   time.Time
}

// saw notes an event. If it was waited for, it returns what for.
func (e *ends) saw(subject string) (gate.StoreTerminalEvent, bool) {
	if a, ok := e.waiting[subject]; ok {
		delete(e.waiting, subject)
		return a, true
	}
	if e.seen == nil {
		e.seen = map[string]struct{}{}
	}
	if _, there := e.seen[subject]; !there {
		e.seen[subject] = struct{}{}
		e.order = append(e.order, subject)
	}
	for len(e.order) > maxEndsSeen {
		delete(e.seen, e.order[0])
		e.order = e.order[1:]
	}
	return gate.StoreTerminalEvent{}, false
}

// expect reports whether an event was seen. If not, it is waited for.
func (e *ends) expect(subject string, a gate.StoreTerminalEvent, now time.Time) bool {
	if _, there := e.seen[subject]; there {
		return true // forgotten with those that nobody asks for
	}
	if e.waiting == nil {
		e.waiting = map[string]gate.StoreTerminalEvent{}
	}
	e.waiting[subject] = a
	e.turns = append(e.turns, turn{subject, now.Add(e.turn)})
	return false
}

// next is when the first turn is over, or zero.
func (e *ends) next() time.Time {
	for len(e.turns) > 0 {
		if _, there := e.waiting[e.turns[0].subject]; there {
			return e.turns[0].until
		}
		e.turns = e.turns[1:]
	}
	return time.Time{}
}

// overdue returns what was waited for in vain.
func (e *ends) overdue(now time.Time) []gate.StoreTerminalEvent {
	var out []gate.StoreTerminalEvent
	for at := e.next(); !at.IsZero() && !now.Before(at); at = e.next() {
		subject := e.turns[0].subject
		out = append(out, e.waiting[subject])
		delete(e.waiting, subject)
	}
	return out
}

// owed is the subject of the event that an executor is about to store for the end
// that ev has just told of; empty when it is ours to store.
func (r *reign) owed(ev gate.Event, a gate.StoreTerminalEvent) string {
	seen, ok := ev.(gate.RecordSeen)
	if !ok || seen.Record.TaskID != a.TaskID || seen.Revision != a.Revision || seen.Record.FinishedAt == nil || r.sourceOf(seen.Record) == r.s.source() {
		return ""
	}
	return r.s.bus.Names.Event(contract.EventSubject{
		Tenant: seen.Record.Tenant, Thread: seen.Record.ThreadID.Token(), Run: seen.Record.RunID, Task: seen.Record.TaskID,
		Type: contract.TerminalEvent(seen.Record.State),
	})
}

// watchEnds reads which terminal events are stored from now on. Without it the gate
// works as well: then each is looked for.
func (r *reign) watchEnds(ctx context.Context) error {
	w := bus.Watch{Stream: r.s.bus.Names.EventStream(), HeadersOnly: true}
	for _, s := range []contract.State{contract.StateCompleted, contract.StateFailed, contract.StateTimedOut, contract.StateCancelled} {
		w.Subjects = append(w.Subjects, r.s.bus.Names.Events(contract.EventSubject{Type: contract.TerminalEvent(s)}))
	}
	if !r.repeat(ctx, "look for the newest event", "", func() error {
		look, cancel := context.WithTimeout(ctx, bus.WriteTimeout)
		defer cancel()
		stream, err := r.s.bus.JS.Stream(look, w.Stream)
		if err == nil {
			w.StartSeq = stream.CachedInfo().State.LastSeq + 1
		}
		return err
	}) {
		return nil
	}
	err := r.s.bus.Watch(ctx, w, func(m bus.Message, _ uint64) error {
		r.tell(ctx, endSeen{subject: m.Subject})
		return nil
	})
	if err != nil && ctx.Err() == nil {
		r.s.log.Warn().Err(err).Msg("terminal events cannot be followed; each is looked for")
	}
	return nil
}
