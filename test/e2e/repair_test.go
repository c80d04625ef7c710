package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// hits waits until the write that a proxy was told to wait for is held up.
func hits(t *testing.T, hit <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-hit:
	case <-time.After(Timeout):
		t.Fatal(what)
	}
}

// I4, I6, I8, EVT-12, EVT-22: the executor is killed between the record that ends a
// task and its event while no admission process is left, and the record is old when
// one comes back. The event comes nevertheless, once, with the id and the time that
// the executor would have given it; then the request is removed and the slot is free.
func TestProducerKilledWithoutAGate(t *testing.T) {
	t.Parallel()
	gate := make(chan struct{})
	brain := NewBrain(t, func(q Question, w http.ResponseWriter, r *http.Request) {
		if q.Task == "held up" {
			select {
			case <-gate:
			case <-r.Context().Done():
			}
		}
		Say(w, "fine")
	})
	f := NewFleet(t, script, models(brain), quick)
	gates := []*Proc{f.service("admission", "--name", "adm-1"), f.service("admission", "--name", "adm-2")}
	f.service("eventsink")
	f.service("lead")
	proxy := natstest.NewProxy(t, f.natsURL)
	ex := f.service("executor", "--name", "ex-1", "--nats-url", proxy.URL())
	f.ready()
	conn := f.connect(t)
	id := f.submit(t, "held up").TaskID
	eventually(t, func() (bool, string) { return brain.Asked("held up", 0) == 1, "the task has not begun" })
	for _, g := range gates {
		g.Kill()
	}
	hit := proxy.FreezeAt("." + string(contract.EventTaskCompleted) + " ")
	close(gate)
	hits(t, hit, "the executor sent no end")
	ex.Kill()
	proxy.Refuse()

	record := func() (contract.TaskRecord, error) {
		m, err := conn.Last(deadline(t), conn.TaskStream(), conn.KV(contract.TaskKey(id)))
		if err != nil {
			return contract.TaskRecord{}, err
		}
		return contract.DecodeTaskRecord(m.Data)
	}
	rec, err := record()
	if err != nil || rec.State != contract.StateCompleted || rec.FinishedAt == nil {
		t.Fatalf("the record says %+v, %v; want that the task is completed", rec, err)
	}
	// Older than the leader key and the executor's turn: nothing that runs knows of it.
	eventually(t, func() (bool, string) {
		return time.Since(*rec.FinishedAt) > leaderTTL+time.Second, "the record is young"
	})
	for _, e := range of(f.streamed(t, conn), id) {
		if e.EventType == contract.RecordEnd {
			t.Fatal("the end was told while there was nobody to tell it")
		}
	}
	f.service("admission", "--name", "adm-3")
	f.service("admission", "--name", "adm-4")
	f.service("executor", "--name", "ex-2")
	if task := f.outcome(t, f.submit(t, "after").TaskID); task.Status != contract.TaskCompleted {
		t.Errorf("the task behind it: %s", task.Status)
	}
	all := of(f.judge(t, invariant.Options{MaxRunning: 3}), id)
	if len(all) == 0 {
		t.Fatal("the history knows nothing of the task")
	}
	if end := all[len(all)-1]; end.EventType != contract.RecordEnd || end.EventID != string(id)+".end" || !end.CreatedAt.Equal(rec.FinishedAt.Truncate(time.Microsecond)) {
		t.Errorf("the last event is %s %s of %v; want the end of %v", end.EventType, end.EventID, end.CreatedAt, rec.FinishedAt)
	}
	eventually(t, func() (bool, string) {
		st, err := f.API.Admission(deadline(t))
		return err == nil && st.Running == 0 && st.Queued == 0, fmt.Sprintf("what the gate holds: %+v, %v", st, err)
	})
	if n := brain.Asked("held up", 0); n != 1 {
		t.Errorf("the model was asked %d times", n)
	}
}

// I4, I6, I8, EVT-12: a lead is killed between the record that ends a run and
// its run event. Another lead, or the next one that starts, tells the end: once, with
// the id that the dead one would have given it.
func TestLeadKilledBeforeItsEvent(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"beside another one", "and started again"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			brain := NewBrain(t, func(_ Question, w http.ResponseWriter, _ *http.Request) { Say(w, "fine") })
			f := NewFleet(t, script, models(brain), quick)
			f.service("admission")
			f.service("eventsink")
			proxy := natstest.NewProxy(t, f.natsURL)
			lead := f.service("lead", "--nats-url", proxy.URL())
			f.ready()
			conn := f.connect(t)
			hit := proxy.FreezeAt("." + string(contract.EventRunCompleted) + " ")
			acc, err := f.API.StartRun(deadline(t), wire.RunRequest{Input: "question"})
			if err != nil {
				t.Fatal(err)
			}
			hits(t, hit, "the lead sent no end")
			lead.Kill()
			proxy.Refuse()
			m, err := conn.Last(deadline(t), conn.RunStream(), conn.RunKV(contract.RunKey(acc.RunID)))
			if err != nil {
				t.Fatal(err)
			}
			rec, err := contract.DecodeRunRecord(m.Data)
			if err != nil || rec.Status != contract.RunCompleted || rec.FinishedAt == nil {
				t.Fatalf("the record says %s, %v; want that the run is completed", rec.Status, err)
			}
			if how == "beside another one" {
				f.API = f.secondLead(t)
			} else {
				// The lease has run out: nothing is left to hear of but the record.
				eventually(t, func() (bool, string) {
					lease, err := conn.Last(deadline(t), conn.RunStream(), conn.RunKV(contract.RunLeaseKey(acc.RunID)))
					return errors.Is(err, bus.ErrNotFound) || err == nil && lease.Deleted(), fmt.Sprint("the lease is held, ", err)
				})
				f.service("lead")
				f.ready()
			}
			ends := func() (out []contract.EventRecord) {
				for _, e := range f.streamed(t, conn) {
					if e.RunID == acc.RunID && e.EventType == contract.RecordRunCompleted {
						out = append(out, e)
					}
				}
				return out
			}
			eventually(t, func() (bool, string) { return len(ends()) > 0, "nobody told the end" })
			past := f.judge(t, invariant.Options{MaxRunning: 3})
			if got := ends(); len(got) != 1 || got[0].EventID != string(acc.RunID)+".end" || !got[0].CreatedAt.Equal(rec.FinishedAt.Truncate(time.Microsecond)) || past[len(past)-1].EventID != got[0].EventID {
				t.Errorf("the ends are %+v, want one of %v", got, rec.FinishedAt)
			}
			if n := brain.Asked("question", 0); n != 1 {
				t.Errorf("the model was asked %d times", n)
			}
		})
	}
}
