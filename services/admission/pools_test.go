package admission

import (
	"fmt"
	"maps"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// ask stores a request that differs from the ordinary one.
func (w *world) ask(id string, change func(*contract.TaskRequest)) {
	w.Helper()
	r := request(id)
	change(&r)
	w.store(id, encode(w, r))
}

// ADM-05, ADM-14, ADM-18: a limit holds back the tasks of its key and nobody else;
// a pool has a capacity and a queue of its own; the gate shows both, with the
// exact place of everybody who waits.
func TestLimitsAndPools(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	w.srv.Provision(provision.Config{MaxRunning: 3, MaxQueued: 64, Pools: map[contract.Pool]int{"big": 1}})
	reg := prometheus.NewRegistry()
	s, err := New(Config{
		Name: "gate", MaxRunning: 3, MaxQueued: 64, LeaseTTL: 30 * time.Second, LeaderTTL: 3 * time.Second,
		Limits: gate.Limits{PerThread: 1, PerType: map[string]int{"slow": 1}}, Pools: map[contract.Pool]gate.Pool{"big": {MaxRunning: 1}},
	}, Deps{Bus: w.srv.Conn("gate"), Registerer: reg, Log: zerolog.New(zerolog.NewTestWriter(t))})
	if err != nil {
		t.Fatal(err)
	}
	w.run(s)
	w.status("gate")

	thread := func(name string) func(*contract.TaskRequest) {
		return func(r *contract.TaskRequest) { r.ThreadID = contract.ThreadID(name) }
	}
	w.ask("a1", thread("a"))
	w.ask("a2", thread("a")) // held back by its thread
	w.ask("b1", func(r *contract.TaskRequest) { r.ThreadID, r.Subagent.Name = "b", "slow" })
	w.ask("c1", func(r *contract.TaskRequest) { r.ThreadID, r.Subagent.Name = "c", "slow" }) // held back by its type
	w.ask("d1", thread("d"))
	w.ask("e1", thread("e")) // no slot
	w.ask("x1", func(r *contract.TaskRequest) { r.Pool = "big" })
	w.ask("x2", func(r *contract.TaskRequest) { r.Pool = "big" })
	for _, id := range []string{"a1", "b1", "d1", "x1"} {
		w.reaches(id, contract.StateGranted)
	}
	var st admissionapi.Status
	natstest.Eventually(t, patience, func() (bool, string) {
		st = w.status("gate")
		return st.Running == 4 && st.Queued == 4, fmt.Sprintf("%+v", st)
	})
	if st.MaxRunning != 4 || len(st.Pools) != 2 || st.Pools[0].Pool != contract.DefaultPool || st.Pools[0].Queued != 3 || st.Pools[1].Running != 1 || st.Pools[1].Queued != 1 {
		t.Errorf("status %+v", st)
	}
	if st.OldestQueuedAt == nil || st.Pools[1].OldestQueuedAt == nil || !st.OldestQueuedAt.Before(*st.Pools[1].OldestQueuedAt) {
		t.Errorf("oldest waiter %v, of big %v", st.OldestQueuedAt, st.Pools[1].OldestQueuedAt)
	}
	for id, want := range map[contract.TaskID]int{"a2": 1, "c1": 2, "e1": 3, "x2": 1} {
		got, err := admissionapi.Ask(w.ctx, w.bus, admissionapi.StatusRequest{TaskID: id})
		if err != nil || got.QueuePosition == nil || *got.QueuePosition != want {
			t.Errorf("place of %s: %v, %v; want %d", id, got.QueuePosition, err, want)
		}
	}

	// The slot of a1 comes free: a2 was first in the queue all the time.
	w.cancel("a1")
	w.reaches("a2", contract.StateGranted)
	// That of d1 goes to e1: c1, which is before it, is still held back.
	w.cancel("d1")
	w.reaches("e1", contract.StateGranted)
	if rec, _ := w.record("c1"); rec.State != "" {
		t.Errorf("c1 is %s; its type is at its limit", rec.State)
	}
	w.cancel("b1")
	w.reaches("c1", contract.StateGranted)
	w.cancel("x1")
	if rec := w.reaches("x2", contract.StateGranted); rec.Pool != "big" || rec.Slot != 1 {
		t.Errorf("x2: %+v", rec)
	}
	// Its grant went to the executors of its pool.
	natstest.Eventually(t, patience, func() (bool, string) {
		_, err := w.bus.Last(w.ctx, w.bus.Names.GrantStream(), w.bus.Names.TaskGrant("big", "x2"))
		return err == nil, fmt.Sprint(err)
	})

	page := httptest.NewRecorder()
	promhttp.HandlerFor(reg, promhttp.HandlerOpts{}).ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
	for _, line := range []string{
		`herdgate_admission_slots{pool="big"} 1`, `herdgate_admission_slots{pool="default"} 3`,
		`herdgate_admission_slots_in_use{pool="default"} 3`, `herdgate_admission_queue_length{pool="big"} 0`, `herdgate_admission_takeovers_total 1`,
	} {
		if !strings.Contains(page.Body.String(), line+"\n") {
			t.Errorf("metrics lack %q", line)
		}
	}
}

// cancel asks for the end of a task.
func (w *world) cancel(id string) {
	w.Helper()
	w.put(bus.Write{Subject: w.bus.KV(contract.CancelKey(contract.TaskID(id))), Data: []byte("{}")})
}

func (w *world) limits() contract.AdmissionLimits {
	w.Helper()
	m, err := w.bus.Last(w.ctx, w.bus.TaskStream(), w.bus.KV(contract.LimitsKey))
	if err != nil {
		w.Fatal(err)
	}
	l, err := contract.Decode[contract.AdmissionLimits](m.Data)
	if err != nil {
		w.Fatal(err)
	}
	return l
}

// ADM-04, ADM-06: what is refused is counted by its reason.
func TestRefusalsAreCounted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.srv.Provision(provision.Config{MaxRunning: 1, MaxQueued: 64, AdmissionPolicy: provision.PolicyReject, Pools: map[contract.Pool]int{"big": 2}})
	s, err := New(Config{
		Name: "gate", MaxRunning: 1, MaxQueued: 64, Policy: "reject", LeaseTTL: 30 * time.Second, LeaderTTL: 3 * time.Second, Pools: map[contract.Pool]gate.Pool{"big": {MaxRunning: 2}},
	}, Deps{Bus: w.srv.Conn("gate"), Log: zerolog.New(zerolog.NewTestWriter(t))})
	if err != nil {
		t.Fatal(err)
	}
	w.run(s)
	w.status("gate")
	w.submit("a")
	w.reaches("a", contract.StateGranted)
	// The request stream has room for the other pool; this one is full.
	w.submit("b")
	if rec := w.reaches("b", contract.StateFailed); rec.ErrorCode != contract.ErrQueueFull || !rec.AdmissionFailure {
		t.Errorf("b: %+v", rec)
	}
	w.ask("c", func(r *contract.TaskRequest) { r.Pool = "nowhere" })
	w.reaches("c", contract.StateFailed)
	// What has ended leaves the queue; until then it takes the place of others.
	natstest.Eventually(t, patience, func() (bool, string) { return w.queue() == 1, fmt.Sprint(w.queue(), " requests are stored") })
	w.ask("d", func(r *contract.TaskRequest) { r.Pool = "big" })
	w.reaches("d", contract.StateGranted)
	natstest.Eventually(t, patience, func() (bool, string) {
		st := w.status("gate")
		return st.Totals.Grants == 2 && maps.Equal(st.Totals.Refusals, map[contract.ErrorCode]int{contract.ErrQueueFull: 1, contract.ErrInvalidRequest: 1}) &&
			st.Totals.Takeovers == 1 && !st.Totals.Since.IsZero(), fmt.Sprintf("%+v", st.Totals)
	})
	if keys := slices.Sorted(maps.Keys(w.limits().Pools)); !slices.Equal(keys, []contract.Pool{"big"}) {
		t.Errorf("published pools: %v", keys)
	}
}

// EVT-01, ADM-08: who came while nobody led is told to wait when the gate opens,
// not only when it ends.
func TestToldToWaitAfterTheGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.submit("a")
	w.submit("b")
	w.submit("c")
	w.run(w.service(w.srv.Conn("gate"), "gate", nil))
	w.reaches("a", contract.StateGranted)
	subject := func(id string) string {
		return w.bus.Names.TaskEvents(contract.DefaultTenant, "th_1", "r_1", contract.TaskID(id))
	}
	natstest.Eventually(t, patience, func() (bool, string) {
		m, err := w.bus.Last(w.ctx, w.bus.Names.EventStream(), subject("c"))
		if err != nil {
			return false, err.Error()
		}
		return strings.HasSuffix(m.Subject, ".task_queued") && strings.Contains(string(m.Data), `"queue_position":3`), m.Subject + " " + string(m.Data)
	})
}
