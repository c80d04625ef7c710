package gate

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// I2: what an earlier leader granted and did not tell is told in the order of
// the requests, whatever the order of the view.
func TestTakeOverTellsInOrder(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	const n = 8
	g := New(Config{MaxRunning: n, LeaseTTL: 15 * time.Second, RetryLost: RetryNotStarted, MaxLost: 2, CancelGrace: 2 * time.Second, OverrunGrace: time.Second, Retention: time.Hour, MarkerTTL: time.Minute})
	var want []contract.TaskID
	for i := range n {
		// Neither by id nor by revision: by request.
		id := contract.TaskID(fmt.Sprint("t_", (i*5)%n))
		want = append(want, id)
		g.Apply(RecordSeen{Revision: uint64(100 - i), Record: contract.TaskRecord{TaskID: id, State: contract.StateGranted, Attempt: 1, Slot: i + 1, RequestSeq: uint64(i + 1)}}, now)
		g.Apply(RequestStored{Request{Seq: uint64(i + 1), TaskID: id, Deadline: now.Add(time.Hour)}}, now)
	}
	g.Apply(ViewRead{}, now)
	var got []contract.TaskID
	for _, a := range g.Apply(WorkRead{}, now) {
		if a, ok := a.(SendGrant); ok {
			got = append(got, a.TaskID)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("told %v, want %v", got, want)
	}
}
