package system

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// I1, I4: records that move while a new leader reads its view. The bucket keeps
// one message a key, so that a record which moves under a reader leaves its old
// place and gets a new one behind everything else. A leader that takes what it has
// read up to its own key for the whole would hold these tasks for never granted,
// and grant them once more over their ends.
func TestRecordsMoveDuringTakeOver(t *testing.T) {
	t.Parallel()
	const n = 300
	var log natstest.Output
	s := New(t, Options{MaxRunning: n, MaxQueued: n, LeaseTTL: 30 * time.Second, Log: zerolog.New(&log), Unrecorded: true})
	ctx := context.Background()
	type running struct {
		rec contract.TaskRecord
		rev uint64
	}
	tasks := make([]running, n)
	now := time.Now().UTC()
	for i := range tasks {
		req := Request(fmt.Sprint("task ", i))
		s.Submit(req)
		rec := contract.TaskRecord{
			TaskID: req.TaskID, RunID: req.RunID, ThreadID: req.ThreadID, Tenant: req.Tenant, State: contract.StateRunning, Attempt: 1, Slot: i + 1,
			Epoch: 1, Writer: "an executor", RequestSeq: uint64(i + 1), Executor: "ex-1", QueuedAt: now, GrantedAt: &now, StartedAt: &now,
		}
		ack, err := s.Bus.Publish(ctx, bus.Write{Subject: s.Bus.KV(contract.TaskKey(rec.TaskID)), Data: mustJSON(t, rec), Expect: bus.Seq(0)})
		if err != nil {
			t.Fatal(err)
		}
		tasks[i] = running{rec, ack.Seq}
	}
	// What comes after them, they get no slot before these have ended.
	next := Request("next")
	s.Submit(next)
	led := make(chan *nats.Msg, 16)
	if _, err := s.Bus.NC.ChanSubscribe(s.Bus.KV(contract.LeaderKey), led); err != nil {
		t.Fatal(err)
	}
	grants := make(chan *nats.Msg, 2*n)
	if _, err := s.Bus.NC.ChanSubscribe(s.Bus.Names.TaskGrant(contract.DefaultPool, "*"), grants); err != nil {
		t.Fatal(err)
	}
	// Eight writers end the tasks from the last one on, as soon as there is a leader.
	ends := make(chan running, n)
	for i := range tasks {
		ends <- tasks[n-1-i]
	}
	close(ends)
	s.Admission("adm-1")
	<-led
	var wg sync.WaitGroup
	for i := range 8 {
		conn := s.Server.Conn(fmt.Sprint("ex-", i))
		wg.Go(func() {
			for task := range ends {
				rec := task.rec
				at := time.Now().UTC()
				rec.State, rec.FinishedAt, rec.Result = contract.StateCompleted, &at, "done"
				if _, err := conn.Publish(ctx, bus.Write{Subject: conn.KV(contract.TaskKey(rec.TaskID)), Data: mustJSON(t, rec), Expect: bus.Seq(task.rev)}); err != nil {
					t.Errorf("the end of a task that nobody else has was refused: %v", err)
				}
			}
		})
	}
	wg.Wait()
	natstest.Eventually(t, Timeout, func() (bool, string) {
		rec, _ := s.Record(next.TaskID)
		return rec.State == contract.StateGranted, fmt.Sprintf("the next task: %+v", rec)
	})
	for _, task := range tasks {
		if rec, _ := s.Record(task.rec.TaskID); rec.State != contract.StateCompleted || rec.Writer != "an executor" {
			t.Errorf("record = %+v", rec)
		}
	}
	// Nothing was to be found out only at the last moment, either: until then these
	// tasks' slots would have counted as free.
	if strings.Contains(log.String(), "counted as never granted") {
		t.Errorf("the view was not whole when the gate opened:\n%s", log.String())
	}
	for len(grants) > 0 {
		if g := <-grants; g.Subject != s.Bus.Names.TaskGrant(contract.DefaultPool, next.TaskID) {
			t.Errorf("granted again: %s", g.Subject)
		}
	}
}
