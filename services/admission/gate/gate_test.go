package gate

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// ADM-09: a move tells whether it is made because an attempt was lost; what
// happened to earlier attempts does not count.
func TestMoveTellsOfALostAttempt(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	for _, c := range []struct {
		name   string
		retry  RetryLost
		state  contract.State
		after  Event
		lost   bool
		become contract.State
	}{
		{"lost for good", RetryNotStarted, contract.StateRunning, LeaseExpired{TaskID: "t"}, true, contract.StateFailed},
		{"lost and granted again", RetryAlways, contract.StateRunning, LeaseExpired{TaskID: "t"}, true, contract.StateGranted},
		{"handed back", RetryAlways, contract.StateReleased, WorkRead{}, false, contract.StateGranted},
		{"cancelled", RetryAlways, contract.StateReleased, CancelSeen{TaskID: "t"}, false, contract.StateCancelled},
	} {
		g := New(Config{MaxRunning: 1, LeaseTTL: 15 * time.Second, RetryLost: c.retry, MaxLost: 3, CancelGrace: time.Second, OverrunGrace: time.Second, Retention: time.Hour, MarkerTTL: time.Hour})
		var moves []MoveRecord
		for _, ev := range []Event{
			RequestStored{Request{Seq: 1, TaskID: "t", Tenant: "default", Deadline: now.Add(time.Hour)}},
			RecordSeen{Revision: 5, Record: contract.TaskRecord{TaskID: "t", Tenant: "default", State: c.state, Attempt: 2, Lost: 1, Slot: 1}},
			LeaseSeen{TaskID: "t"}, c.after, ViewRead{}, WorkRead{},
		} {
			for _, a := range g.Apply(ev, now) {
				if m, ok := a.(MoveRecord); ok {
					moves = append(moves, m)
				}
			}
		}
		if len(moves) != 1 || moves[0].Lost != c.lost || moves[0].Record.State != c.become || moves[0].Revision != 5 {
			t.Errorf("%s: moves %+v", c.name, moves)
		}
	}
}

// Another tenant's request under an id that is taken gets no place and ends
// nothing; it leaves the queue.
func TestIDOfAnotherTenant(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	g := New(Config{MaxRunning: 1, LeaseTTL: 15 * time.Second, RetryLost: RetryNever, MaxLost: 2, CancelGrace: time.Second, OverrunGrace: time.Second, Retention: time.Hour, MarkerTTL: time.Hour})
	for _, ev := range []Event{
		ViewRead{}, WorkRead{},
		RecordSeen{Revision: 5, Record: contract.TaskRecord{TaskID: "t", Tenant: "a", State: contract.StateCompleted}},
		RequestStored{Request{Seq: 1, TaskID: "u", Tenant: "a", Deadline: now.Add(time.Hour)}},
	} {
		g.Apply(ev, now)
	}
	actions := g.Apply(RequestStored{Request{Seq: 2, TaskID: "u", Tenant: "b", Deadline: now.Add(time.Hour)}}, now)
	if len(actions) != 1 || actions[0] != (RemoveRequest{Seq: 2}) {
		t.Errorf("actions = %+v", actions)
	}
}

// F-058, ADM-09: under "always" an attempt that is lost runs again, hand-backs cost
// nothing, but a task of which two attempts were lost ends, and its request is kept.
func TestLostAgain(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	for _, c := range []struct {
		name          string
		attempt, lost int
		become        contract.State
		code          contract.ErrorCode
	}{
		{"the first time", 1, 0, contract.StateGranted, ""},
		{"the first time, after hand-backs", 7, 0, contract.StateGranted, ""},
		{"the second time", 2, 1, contract.StateFailed, contract.ErrInternal},
	} {
		g := New(Config{MaxRunning: 1, LeaseTTL: 15 * time.Second, RetryLost: RetryAlways, CancelGrace: time.Second, OverrunGrace: time.Second, Retention: time.Hour, MarkerTTL: time.Hour})
		var moved MoveRecord
		var removed *RemoveRequest
		rev := uint64(5)
		events := []Event{
			RequestStored{Request{Seq: 1, TaskID: "t", Tenant: "default", Deadline: now.Add(time.Hour)}},
			RecordSeen{Revision: rev, Record: contract.TaskRecord{TaskID: "t", Tenant: "default", State: contract.StateRunning, Attempt: c.attempt, Lost: c.lost, Slot: 1}},
			LeaseSeen{TaskID: "t"}, LeaseExpired{TaskID: "t"}, ViewRead{}, WorkRead{},
		}
		for len(events) > 0 {
			actions := g.Apply(events[0], now)
			events = events[1:]
			for _, a := range actions {
				switch a := a.(type) {
				case MoveRecord:
					moved = a
					rev++
					events = append(events, Moved{TaskID: "t", Outcome: Stored, Revision: rev, Record: a.Record})
				case StoreTerminalEvent:
					events = append(events, TerminalEventStored{TaskID: "t"})
				case RemoveRequest:
					removed = &a
				}
			}
		}
		if moved.Record.State != c.become || moved.Record.ErrorCode != c.code || moved.Record.Lost != c.lost+1 || !moved.Lost {
			t.Errorf("%s: moved to %+v", c.name, moved)
		}
		if ended := c.become == contract.StateFailed; ended != (removed != nil) || ended && removed.Bury == "" {
			t.Errorf("%s: request removed: %+v", c.name, removed)
		}
	}
}

// STATUS-09: whoever reads an end that the gate has written — mostly a lead's
// model, which may do the work again — is told that it may have had effects, and which
// limit was passed.
func TestEndsSayWhatMatters(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		retry RetryLost
		state contract.State
		after Event
		late  time.Duration
		want  string
	}{
		"lost":        {RetryNotStarted, contract.StateRunning, LeaseExpired{TaskID: "t"}, 0, "its work may have had effects"},
		"handed back": {RetryNever, contract.StateReleased, LeaseSeen{TaskID: "t"}, 0, "its work may have had effects"},
		"overrun":     {RetryNever, contract.StateRunning, LeaseSeen{TaskID: "t"}, 62 * time.Second, "limit of 60 seconds"},
	} {
		g := New(Config{MaxRunning: 1, LeaseTTL: 15 * time.Second, RetryLost: c.retry, MaxLost: 3, CancelGrace: time.Second, OverrunGrace: time.Second, Retention: time.Hour, MarkerTTL: time.Hour})
		told := ""
		apply := func(ev Event, now time.Time) {
			for _, a := range g.Apply(ev, now) {
				if m, ok := a.(MoveRecord); ok && m.Record.State.Terminal() {
					told = m.Record.Error
				}
			}
		}
		for _, ev := range []Event{
			RequestStored{Request{Seq: 1, TaskID: "t", Tenant: "default", Deadline: at.Add(time.Hour)}},
			RecordSeen{Revision: 5, Record: contract.TaskRecord{TaskID: "t", Tenant: "default", State: c.state, Started: true, Attempt: 1, Slot: 1, TimeoutSeconds: 60}},
			LeaseSeen{TaskID: "t"}, ViewRead{}, WorkRead{},
		} {
			apply(ev, at)
		}
		apply(c.after, at.Add(c.late))
		if !strings.Contains(told, c.want) {
			t.Errorf("%s: told %q, want %q in it", name, told, c.want)
		}
	}
}

// ADM-08: at its opening a gate tells those to wait whom nobody may have told.
func TestOpeningTellsTheUntold(t *testing.T) {
	t.Parallel()
	g := New(Config{MaxRunning: 1, LeaseTTL: 15 * time.Second, Retention: time.Hour, MarkerTTL: time.Hour})
	for i, untold := range []bool{false, false, true, true} {
		g.Apply(RequestStored{Request{Seq: uint64(i + 1), TaskID: contract.TaskID(rune('a' + i)), Deadline: at.Add(time.Hour), Untold: untold}}, at)
	}
	g.Apply(ViewRead{}, at)
	var told []Action
	for _, a := range g.Apply(WorkRead{}, at) {
		if _, ok := a.(TellQueued); ok {
			told = append(told, a)
		}
	}
	if len(told) != 2 || told[0] != (TellQueued{TaskID: "c", RequestSeq: 3, Position: 3}) || told[1] != (TellQueued{TaskID: "d", RequestSeq: 4, Position: 4}) {
		t.Errorf("told %+v", told)
	}
}

// ADM-05, I1: a slot goes to the next task when the end of the one before is told,
// so that nobody who counts events sees more at once than there are slots.
func TestSlotIsPassedOnWithTheEvent(t *testing.T) {
	t.Parallel()
	g := New(Config{MaxRunning: 1, LeaseTTL: 15 * time.Second, Retention: time.Hour, MarkerTTL: time.Hour})
	grants := func(ev Event) (n int) {
		for _, a := range g.Apply(ev, at) {
			if _, ok := a.(FirstWrite); ok {
				n++
			}
		}
		return n
	}
	for _, ev := range []Event{
		RequestStored{Request{Seq: 1, TaskID: "a", Deadline: at.Add(time.Hour)}}, RequestStored{Request{Seq: 2, TaskID: "b", Deadline: at.Add(time.Hour)}},
		RecordSeen{Revision: 5, Record: contract.TaskRecord{TaskID: "a", State: contract.StateRunning, Attempt: 1, Slot: 1, RequestSeq: 1}}, LeaseSeen{TaskID: "a"}, ViewRead{}, WorkRead{},
		RecordSeen{Revision: 6, Record: contract.TaskRecord{TaskID: "a", State: contract.StateCompleted, Attempt: 1, Slot: 1, RequestSeq: 1}},
	} {
		if n := grants(ev); n != 0 {
			t.Fatalf("a grant after %+v", ev)
		}
	}
	if n := grants(TerminalEventStored{TaskID: "a"}); n != 1 {
		t.Error("no grant after the event")
	}
}

// I1, I4: somebody else's record that is seen before its first write is known to have
// been refused is dealt with all the same, and its slot comes free.
func TestForeignRecordIsSeenBeforeTheRefusal(t *testing.T) {
	t.Parallel()
	g := New(Config{MaxRunning: 1, LeaseTTL: 15 * time.Second, Retention: time.Hour, MarkerTTL: time.Hour})
	var got []Action
	for _, ev := range []Event{
		ViewRead{}, WorkRead{}, RequestStored{Request{Seq: 2, TaskID: "a", Deadline: at.Add(time.Hour)}}, RequestStored{Request{Seq: 3, TaskID: "b", Deadline: at.Add(time.Hour)}},
		RecordSeen{Revision: 6, Record: contract.TaskRecord{TaskID: "a", State: contract.StateFailed, RequestSeq: 1}},
		FirstWritten{TaskID: "a", Outcome: Refused},
	} {
		got = g.Apply(ev, at)
	}
	if len(got) != 1 || got[0] != Action(StoreTerminalEvent{TaskID: "a", Revision: 6}) {
		t.Fatalf("after the refusal: %+v", got)
	}
	got = g.Apply(TerminalEventStored{TaskID: "a"}, at)
	if !slices.ContainsFunc(got, func(a Action) bool { w, ok := a.(FirstWrite); return ok && w.TaskID == "b" }) {
		t.Errorf("the slot was not passed on: %+v", got)
	}
}
