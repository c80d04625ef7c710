package gate

import (
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
		g := New(Config{MaxRunning: 1, LeaseTTL: 15 * time.Second, RetryLost: c.retry, MaxAttempts: 3, CancelGrace: time.Second, OverrunGrace: time.Second, Retention: time.Hour, MarkerTTL: time.Hour})
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
	g := New(Config{MaxRunning: 1, LeaseTTL: 15 * time.Second, RetryLost: RetryNever, MaxAttempts: 3, CancelGrace: time.Second, OverrunGrace: time.Second, Retention: time.Hour, MarkerTTL: time.Hour})
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
