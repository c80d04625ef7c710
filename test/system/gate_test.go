package system

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

func TestMain(m *testing.M) {
	sandbox.Main() // commands of tools run through this binary
	soakMain()
	agentsMain()
	goleak.VerifyTestMain(m)
}

// ADM-03, EVT-12: a task with a free slot runs at once; its events come in order.
func TestOneTask(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 2, time.Second)
	req := Request("hello")
	s.Submit(req)
	ev := feed.Ended(1)
	var got []contract.EventType
	for _, e := range ev {
		got = append(got, e.Type)
	}
	want := []contract.EventType{contract.EventTaskQueued, contract.EventTaskAdmitted, contract.EventTaskStarted, contract.EventTaskRunning, contract.EventTaskCompleted}
	if !slices.Equal(got, want) {
		t.Fatalf("events = %v, want %v", got, want)
	}
	rec, _ := s.Record(req.TaskID)
	if rec.State != contract.StateCompleted || rec.Result != "done: hello" || rec.ModelName != "echo-1" || rec.Usage.TotalTokens != 5 || rec.Attempt != 1 {
		t.Errorf("record = %+v", rec)
	}
}

// ADM-02, ADM-05, I1, I2: never more than max_running at once, in the order of
// submission.
func TestOrderAndCapacity(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	s.Executor("ex-2", 4, time.Second)
	const n = 60
	var ids []contract.TaskID
	for i := range n {
		req := Request(fmt.Sprint("task ", i))
		ids = append(ids, req.TaskID)
		s.Submit(req)
	}
	ev := feed.Ended(n)
	var admitted []contract.TaskID
	running := map[contract.TaskID]bool{}
	for _, e := range ev {
		switch {
		case e.Type == contract.EventTaskAdmitted:
			admitted = append(admitted, e.TaskID)
		case e.Type == contract.EventTaskStarted:
			running[e.TaskID] = true
			if len(running) > 3 {
				t.Fatalf("%d tasks run at once", len(running))
			}
		case e.Type.TaskTerminal():
			delete(running, e.TaskID)
		}
	}
	if !slices.Equal(admitted, ids) {
		t.Errorf("admitted in another order than submitted")
	}
}

// CANCEL-02, ADM-07, I7: a waiting task ends at once when cancelled, and leaves
// the queue; the next one is not disturbed.
func TestCancelWaiting(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 1, Model: held})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	a, b, c := Request("hold a"), Request("b"), Request("c")
	s.Submit(a)
	feed.Until("a starts", func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskStarted)) == 1 })
	s.Submit(b)
	s.Submit(c)
	s.Cancel(b.TaskID)
	feed.Until("b cancelled", func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskCancelled)) == 1 })
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	st, err := admissionapi.Ask(ctx, s.Bus, admissionapi.StatusRequest{TaskID: c.TaskID})
	if err != nil {
		t.Fatal(err)
	}
	if st.Queued != 1 || st.QueuePosition == nil || *st.QueuePosition != 1 || st.Running != 1 || len(st.Slots) != 1 || st.Slots[0].TaskID != a.TaskID || st.Slots[0].Executor != "ex-1" {
		t.Errorf("status = %+v", st)
	}
	held.LetAllGo()
	ev := feed.Ended(3)
	for _, e := range ev {
		if e.TaskID == b.TaskID && e.Type == contract.EventTaskStarted {
			t.Error("the cancelled task was started")
		}
	}
}

// CANCEL-01, F-078: a running task ends as cancelled, soon.
func TestCancelRunning(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Model: NewHeld()})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	a := Request("hold a")
	s.Submit(a)
	feed.Until("a starts", func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskStarted)) == 1 })
	began := time.Now()
	s.Cancel(a.TaskID)
	feed.Until("a cancelled", func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskCancelled)) == 1 })
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("took %v", d)
	}
}

// ADM-06, ADM-10: a waiter that gets no slot in time fails admission, once.
func TestQueueTimeout(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 1, Model: held, QueueTimeout: time.Second})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	s.Submit(Request("hold a"))
	b := Request("b")
	s.Submit(b)
	feed.Ended(1)
	rec, _ := s.Record(b.TaskID)
	if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrQueueTimeout || !rec.AdmissionFailure || rec.Attempt != 0 || rec.StopReason != "" {
		t.Errorf("record = %+v", rec)
	}
	held.LetAllGo()
	feed.Ended(2)
}

// ADM-08, I8: the queue survives its leader; a standby takes over, in order.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 1, Model: held})
	feed := s.Follow()
	first := s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	var ids []contract.TaskID
	for i := range 20 {
		req := Request(fmt.Sprint("hold ", i))
		ids = append(ids, req.TaskID)
		s.Submit(req)
	}
	feed.Until("the first starts", func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskStarted)) == 1 })
	s.Admission("adm-2")
	first.Conn.NC.Close() // cut off without a word
	held.LetAllGo()
	ev := feed.Ended(20)
	var admitted []contract.TaskID
	for _, e := range ev {
		if e.Type == contract.EventTaskAdmitted {
			admitted = append(admitted, e.TaskID)
		}
	}
	if !slices.Equal(admitted, ids) {
		t.Errorf("admitted in another order than submitted")
	}
	if n := Count(ev, contract.EventType.TaskTerminal); n != 20 {
		t.Errorf("%d ends, want 20", n)
	}
}

// CANCEL, EXEC: an executor that is cut off loses its task, which ends as
// executor_lost, and its slot is used again.
func TestExecutorLost(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 1, Model: held})
	feed := s.Follow()
	s.Admission("adm-1")
	ex := s.Executor("ex-1", 1, 100*time.Millisecond)
	a, b := Request("hold a"), Request("b")
	s.Submit(a)
	feed.Until("a starts", func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskStarted)) == 1 })
	s.Submit(b)
	began := time.Now()
	ex.Conn.NC.Close()
	s.Executor("ex-2", 1, time.Second)
	feed.Ended(2)
	if d := time.Since(began); d > s.Opts.LeaseTTL+time.Second {
		t.Errorf("the slot came back after %v", d)
	}
	rec, _ := s.Record(a.TaskID)
	if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrExecutorLost || rec.Lost != 1 {
		t.Errorf("record = %+v", rec)
	}
}

// F-178: a draining executor hands its task back; it is run again in its old
// slot, with another attempt, and nothing is failed.
func TestHandBack(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 1, Model: held})
	feed := s.Follow()
	s.Admission("adm-1")
	ex := s.Executor("ex-1", 1, 100*time.Millisecond)
	a, b := Request("hold a"), Request("b")
	s.Submit(a)
	feed.Until("a starts", func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskStarted)) == 1 })
	s.Submit(b)
	ex.Stop()
	held.LetAllGo()
	s.Executor("ex-2", 1, time.Second)
	ev := feed.Ended(2)
	rec, _ := s.Record(a.TaskID)
	if rec.State != contract.StateCompleted || rec.Attempt != 2 || rec.Lost != 0 {
		t.Errorf("record = %+v", rec)
	}
	for _, e := range ev {
		if e.Type.TaskTerminal() {
			if e.TaskID != a.TaskID {
				t.Error("the task that was handed back was overtaken")
			}
			break
		}
	}
}
