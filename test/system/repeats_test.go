package system

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// publish stores a request without an id by which the server would know it again.
func (s *System) publish(req contract.TaskRequest) error {
	data, err := req.Encode()
	if err != nil {
		return err
	}
	_, err = s.Bus.Publish(context.Background(), bus.Write{Subject: s.Bus.Names.TaskRequest(req.Tenant, req.TaskID), Data: data})
	return err
}

func count(past []contract.EventRecord, id contract.TaskID, typ string) int {
	n := 0
	for _, e := range past {
		if e.TaskID == id && e.EventType == typ {
			n++
		}
	}
	return n
}

// I4, I6, F-144: a request that comes again — at once, while it runs, after its
// end, with the server knowing its id or not — is one task that runs once.
func TestRequestRepeated(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 1, Model: held})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 2, time.Second)
	req, next := Request("hold a"), Request("b")
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if i%2 == 0 {
				_ = s.TrySubmit(req)
			} else {
				_ = s.publish(req) // refused, or the one that is stored
			}
		})
	}
	wg.Wait()
	feed.started(1)
	if err := s.publish(req); err == nil {
		t.Error("a second request of a running task was stored")
	}
	held.LetAllGo()
	feed.Ended(1)
	s.judge(t)
	before, _ := s.Record(req.TaskID)
	// Its request is gone now, so the stream takes it again.
	for range 3 {
		if err := s.publish(req); err != nil {
			t.Fatal(err)
		}
		s.Submit(next)
		s.judge(t)
		next = Request("c")
	}
	past := s.judge(t)
	for typ, want := range map[string]int{contract.RecordQueued: 1, contract.RecordAdmitted: 1, contract.RecordStart: 1, contract.RecordEnd: 1} {
		if n := count(past, req.TaskID, typ); n != want {
			t.Errorf("%d %s, want %d", n, typ, want)
		}
	}
	if after, _ := s.Record(req.TaskID); after.Writer != before.Writer || after.Attempt != 1 {
		t.Errorf("the record was written again: %+v", after)
	}
}

// I4, ADM-05: another tenant's request under an id that is taken gets no place,
// no slot and no event, and changes nothing of the owner's task, whatever that is
// doing: waiting, running or ended.
func TestForeignTaskID(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 1, Model: held})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 2, time.Second)
	running, waiting := Request("hold a"), Request("hold b")
	s.Submit(running)
	feed.started(1)
	s.Submit(waiting)
	foreign := func(req contract.TaskRequest) {
		t.Helper()
		req.Tenant, req.Prompt = "thief", "steal"
		if err := s.publish(req); err != nil {
			t.Fatal(err)
		}
		natstest.Eventually(t, Timeout, func() (bool, string) {
			_, err := s.Bus.Last(context.Background(), s.Bus.Names.WorkStream(), s.Bus.Names.TaskRequest(req.Tenant, req.TaskID))
			return err != nil, "the foreign request is still there"
		})
	}
	foreign(running)
	foreign(waiting)
	held.LetAllGo()
	feed.Ended(2)
	s.judge(t)
	foreign(running)
	foreign(waiting)
	s.Submit(Request("c"))
	for _, e := range s.judge(t) {
		if e.Tenant == "thief" {
			t.Errorf("an event of the foreign request: %s %s", e.EventType, e.Content)
		}
	}
	for _, req := range []contract.TaskRequest{running, waiting} {
		if rec, _ := s.Record(req.TaskID); rec.Tenant != contract.DefaultTenant || rec.State != contract.StateCompleted || rec.Attempt != 1 {
			t.Errorf("record = %+v", rec)
		}
	}
}

// I1, I5: a grant that is delivered again, while its task runs and after its end,
// is void.
func TestGrantRepeated(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 2, Model: held})
	feed := s.Follow()
	grants := make(chan *nats.Msg, 64)
	if _, err := s.Bus.NC.ChanSubscribe(s.Bus.Names.TaskGrant(contract.DefaultPool, "*"), grants); err != nil {
		t.Fatal(err)
	}
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	req := Request("hold a")
	s.Submit(req)
	feed.started(1)
	grant := <-grants
	again := func() {
		for range 3 {
			if _, err := s.Bus.Publish(context.Background(), bus.Write{Subject: grant.Subject, Data: grant.Data}); err != nil {
				t.Fatal(err)
			}
		}
	}
	again()
	held.LetAllGo()
	feed.Ended(1)
	again()
	s.Submit(Request("b"))
	feed.Ended(2)
	if n := count(s.judge(t), req.TaskID, contract.RecordStart); n != 1 {
		t.Errorf("the task was started %d times", n)
	}
}

// EVT-12, I6: a task that was cancelled before any gate was there tells that it
// was queued before it tells its end.
func TestEndedBeforeAnybodyLooked(t *testing.T) {
	t.Parallel()
	s := New(t, Options{MaxRunning: 1})
	feed := s.Follow()
	req := Request("a")
	s.Submit(req)
	s.Cancel(req.TaskID)
	s.Admission("adm-1")
	feed.Ended(1)
	var types []string
	for _, e := range s.judge(t) {
		types = append(types, e.EventType)
	}
	if got := fmt.Sprint(types); got != "[subagent.queued subagent.end]" {
		t.Errorf("events = %s", got)
	}
}
