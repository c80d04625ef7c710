package admission

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// panics makes a service panic as often as n says when it comes to a step of a
// task. It counts how often it did.
func (s *Service) panics(step string, id contract.TaskID, n int32) *atomic.Int32 {
	var done atomic.Int32
	s.probe = func(at string, task contract.TaskID) {
		if at == step && task == id && done.Load() < n {
			done.Add(1)
			panic("no way; token=hunter2")
		}
	}
	return &done
}

// ends waits until a task has failed as one that our own code cannot handle, its
// request is kept with the reason and has left the queue, and the next task has
// got its turn.
func (w *world) endsAsCrash(id, next string) contract.TaskRecord {
	w.Helper()
	rec := w.reaches(id, contract.StateFailed)
	if rec.ErrorCode != contract.ErrInternal || !strings.Contains(rec.Error, "panicked 2 times") || strings.Contains(rec.Error, "hunter2") {
		w.Errorf("record = %+v", rec)
	}
	w.reaches(next, contract.StateGranted)
	natstest.Eventually(w, patience, func() (bool, string) {
		l := w.letters()
		return len(l) == 1 && strings.Contains(l[0], "."+id+": ") && strings.Contains(l[0], "panicked 2 times") && !strings.Contains(l[0], "hunter2") && w.queue() == 1,
			fmt.Sprintf("%d left, letters %q", w.queue(), l)
	})
	return rec
}

// F-058, STATUS-08, ADM-05: a request that makes the gate panic is tried once
// more. After the second time its task ends as an internal failure, the request is
// kept with the reason, and those behind it are granted.
func TestRequestThatPanics(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		step    string
		attempt int // of the record at its end
	}{
		{"read", 0}, {"judge", 0}, {"write", 0}, {"gate.SendGrant", 1},
	} {
		t.Run(c.step+" once", func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			s := w.service(w.srv.Conn("adm-1"), "adm-1", nil)
			n := s.panics(c.step, "t_bad", 1)
			w.submit("t_bad")
			w.run(s)
			w.reaches("t_bad", contract.StateGranted)
			w.granted("t_bad")
			if l := w.letters(); len(l) != 0 || n.Load() != 1 {
				t.Errorf("letters %q after %d panics", l, n.Load())
			}
		})
		t.Run(c.step+" twice", func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			s := w.service(w.srv.Conn("adm-1"), "adm-1", nil)
			n := s.panics(c.step, "t_bad", 2)
			w.submit("t_bad")
			w.submit("t_good")
			w.run(s)
			if rec := w.endsAsCrash("t_bad", "t_good"); rec.Attempt != c.attempt || n.Load() != 2 {
				t.Errorf("record = %+v after %d panics", rec, n.Load())
			}
			w.granted("t_good")
		})
	}
}

// granted waits for the message of a grant.
func (w *world) granted(id contract.TaskID) {
	w.Helper()
	natstest.Eventually(w, patience, func() (bool, string) {
		_, err := w.bus.Last(w.ctx, w.bus.Names.GrantStream(), w.bus.Names.TaskGrant(contract.DefaultPool, id))
		return err == nil, fmt.Sprint("no grant: ", err)
	})
}

// A task that holds a slot when the gate panics over it is ended before the gate
// sees it again; the slot goes on.
func TestLiveTaskThatPanics(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	s := w.service(w.srv.Conn("adm-1"), "adm-1", nil)
	s.panics("judge", "t_bad", 2)
	seq := w.submit("t_bad")
	now := time.Now().UTC()
	w.put(bus.Write{Subject: w.bus.KV(contract.TaskKey("t_bad")), Data: encode(t, contract.TaskRecord{
		TaskID: "t_bad", RunID: "r_1", ThreadID: "th_1", Tenant: contract.DefaultTenant, State: contract.StateGranted, Attempt: 1, Slot: 1, RequestSeq: seq, QueuedAt: now, GrantedAt: &now,
	})})
	w.submit("t_good")
	w.run(s)
	if rec := w.endsAsCrash("t_bad", "t_good"); rec.Attempt != 1 || rec.RunID != "r_1" {
		t.Errorf("record = %+v", rec)
	}
}

// Where not even the end of a task can be written, its request is put aside all the
// same.
func TestEndThatPanics(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	s := w.service(w.srv.Conn("adm-1"), "adm-1", nil)
	s.panics("write", "t_bad", 1000)
	w.submit("t_bad")
	w.submit("t_good")
	w.run(s)
	w.reaches("t_good", contract.StateGranted)
	natstest.Eventually(t, patience, func() (bool, string) {
		l := w.letters()
		return len(l) == 1 && strings.Contains(l[0], ".t_bad: ") && w.queue() == 1, fmt.Sprintf("%d left, letters %q", w.queue(), l)
	})
	if rec, rev := w.record("t_bad"); rev != 0 {
		t.Errorf("record = %+v", rec)
	}
}

// An event that cannot be made holds up neither its task nor others.
func TestEventsThatPanic(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"gate.TellQueued", "gate.StoreTerminalEvent"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			s := w.service(w.srv.Conn("adm-1"), "adm-1", nil)
			n := s.panics(step, "t_bad", 1000)
			w.submit("t_first")
			w.run(s)
			w.reaches("t_first", contract.StateGranted)
			w.submit("t_bad")
			natstest.Eventually(t, patience, func() (bool, string) {
				return step != "gate.TellQueued" || n.Load() == 2, fmt.Sprint(n.Load(), " panics")
			})
			epoch := w.status("adm-1").Epoch
			for _, id := range []contract.TaskID{"t_bad", "t_first"} {
				w.put(bus.Write{Subject: w.bus.KV(contract.CancelKey(id)), Data: []byte("{}")})
				w.reaches(string(id), contract.StateCancelled)
			}
			natstest.Eventually(t, patience, func() (bool, string) { return w.queue() == 0, fmt.Sprint(w.queue(), " requests are left") })
			if n.Load() != 2 || w.status("adm-1").Epoch < epoch {
				t.Errorf("%d panics, want 2", n.Load())
			}
			if l := w.letters(); step == "gate.StoreTerminalEvent" && (len(l) != 1 || !strings.Contains(l[0], "task.t_bad: ")) {
				t.Errorf("letters %q, want the record", l)
			}
		})
	}
}

// F-058: the request of a task that has ended two executors is kept with the
// reason before it leaves the queue, by whatever leader comes to it.
func TestPoisonousRequestIsKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	for id, code := range map[contract.TaskID]contract.ErrorCode{"t_bad": contract.ErrInternal, "t_lost": contract.ErrExecutorLost} {
		seq := w.submit(string(id))
		now := time.Now().UTC()
		w.put(bus.Write{Subject: w.bus.KV(contract.TaskKey(id)), Data: encode(t, contract.TaskRecord{
			TaskID: id, RunID: "r_1", ThreadID: "th_1", Tenant: contract.DefaultTenant, State: contract.StateFailed, Attempt: 2, Lost: 2, Slot: 1, RequestSeq: seq,
			QueuedAt: now, GrantedAt: &now, StartedAt: &now, FinishedAt: &now, ErrorCode: code, Executor: "ex-1", Writer: "adm-0-x/1",
		})})
	}
	w.run(w.service(w.srv.Conn("adm-1"), "adm-1", nil))
	natstest.Eventually(t, patience, func() (bool, string) { return w.queue() == 0, fmt.Sprint(w.queue(), " requests are left") })
	m, err := w.bus.Last(w.ctx, w.bus.Names.DeadStream(), w.bus.Names.Dead("admission"))
	if l := w.letters(); err != nil || len(l) != 1 || !strings.Contains(l[0], ".t_bad: the task may have crashed executors: 2 of its attempts") {
		t.Fatalf("letters %q, %v", l, err)
	}
	if req, err := contract.DecodeTaskRequest(m.Data); err != nil || req.TaskID != "t_bad" {
		t.Errorf("kept: %+v, %v", req, err)
	}
}
