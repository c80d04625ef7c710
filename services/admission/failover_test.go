package admission

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// series reads a counter or gauge without labels.
func series(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "herdgate_admission_"+name {
			m := f.GetMetric()[0]
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	t.Fatalf("there is no series %s", name)
	return 0
}

// I1, I4, protocol W5, W6: a leader that was frozen and replaced does try, because
// its clock stood still with it. Nothing but the server stops it: every first write
// is refused, stores nothing, is counted, and ends the reign.
func TestFrozenLeaderIsRefusedByTheServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	reg := prometheus.NewRegistry()
	stopped := time.Now()
	old, err := New(Config{Name: "adm-1", MaxRunning: 1, LeaderTTL: time.Second}, Deps{
		Bus: w.srv.Conn("adm-1"), Registerer: reg, Now: func() time.Time { return stopped },
	})
	if err != nil {
		t.Fatal(err)
	}
	f := w.leader(old) // and renews nothing
	f.tell = func(_ context.Context, ev gate.Event) { t.Errorf("the gate was told %+v", ev) }
	w.run(w.service(w.srv.Conn("adm-2"), "adm-2", nil))
	w.status("adm-2")
	seqs := map[string]uint64{"t_1": w.submit("t_1"), "t_2": w.submit("t_2")}
	w.reaches("t_1", contract.StateGranted) // t_2 waits, there is one slot
	for i, c := range []struct {
		task  string
		state contract.State
	}{
		{"t_2", contract.StateGranted},
		{"t_2", contract.StateCancelled},
		{"t_1", contract.StateGranted},
	} {
		before, rev := w.record(c.task)
		rec := contract.TaskRecord{TaskID: contract.TaskID(c.task), Tenant: contract.DefaultTenant, State: c.state, RequestSeq: seqs[c.task]}
		if c.state == contract.StateGranted {
			rec.Attempt, rec.Slot, rec.GrantedAt = 1, 1, &stopped
		}
		err := f.write(w.ctx, gate.FirstWrite{TaskID: rec.TaskID, RequestSeq: rec.RequestSeq, Record: rec})
		var refusal *jetstream.APIError
		if !errors.Is(err, errDeposed) || !errors.As(err, &refusal) || refusal.ErrorCode != 10071 {
			t.Errorf("%s of %s: %v; want deposed by the server's 10071", c.state, c.task, err)
		}
		if after, now := w.record(c.task); now != rev || after.Writer != before.Writer {
			t.Errorf("%s of %s was stored: %+v", c.state, c.task, after)
		}
		if n := series(t, reg, "fence_rejections_total"); n != float64(i+1) {
			t.Errorf("%v rejections are counted, want %d", n, i+1)
		}
	}
}

// Protocol W4: a leader that hears nothing any more is none when its key has run
// out, whatever it still waits for.
func TestCutLeaderStepsDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1, natstest.Listen())
	proxy := w.srv.Proxy()
	reg := prometheus.NewRegistry()
	s, err := New(Config{Name: "adm-1", MaxRunning: 1, LeaderTTL: time.Second}, Deps{Bus: w.srv.Connect(bus.Config{Name: "adm-1", URL: proxy.URL()}), Registerer: reg})
	if err != nil {
		t.Fatal(err)
	}
	w.run(s)
	w.status("adm-1")
	proxy.Freeze(natstest.Both)
	began := time.Now()
	natstest.Eventually(t, patience, func() (bool, string) {
		n := series(t, reg, "leader")
		return n == 0, fmt.Sprint("leader = ", n)
	})
	// A write waits up to bus.WriteTimeout for its answer.
	if d := time.Since(began); d >= bus.WriteTimeout {
		t.Errorf("it took itself for the leader for %v; its key lives for 1 s", d)
	}
	proxy.Thaw()
	w.status("adm-1")
}

// I8, section 4: a take-over reads the tasks that have ended, which are kept for a
// day, in about the time that reading takes: not each of them as often as there are
// others.
func TestTakeOverOverEndedTasks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	const n = 2000
	now := time.Now().UTC()
	for i := range n {
		id := contract.TaskID(fmt.Sprint("t_", i))
		rec := contract.TaskRecord{
			TaskID: id, RunID: "r_1", ThreadID: "th_1", Tenant: contract.DefaultTenant, Attempt: 1, Slot: 1, Writer: "ex-1-0/1", RequestSeq: uint64(i + 1), FinishedAt: &now,
		}
		// Where a record has moved it leaves a gap, and that is what costs.
		for _, rec.State = range []contract.State{contract.StateGranted, contract.StateRunning, contract.StateCompleted} {
			if _, err := w.bus.PublishAsync(bus.Write{Subject: w.bus.KV(contract.TaskKey(id)), Data: encode(t, rec)}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := w.bus.PublishAsync(bus.Write{Subject: w.bus.KV(contract.LeaseKey(id)), Data: []byte("{}"), TTL: time.Hour}); err != nil {
			t.Fatal(err)
		}
	}
	<-w.bus.JS.PublishAsyncComplete()
	began := time.Now()
	read := errors.New("read")
	if err := w.bus.Watch(w.ctx, bus.Watch{Stream: w.bus.TaskStream(), LastPerSubject: true, Subjects: []string{w.bus.KV(">")}}, func(_ bus.Message, pending uint64) error {
		if pending == 0 {
			return read
		}
		return nil
	}); !errors.Is(err, read) {
		t.Fatal(err)
	}
	plain := time.Since(began)
	opened := make(chan struct{})
	s := w.service(w.srv.Conn("adm-1"), "adm-1", nil)
	s.log = zerolog.New(io.Discard).Hook(zerolog.HookFunc(func(_ *zerolog.Event, _ zerolog.Level, message string) {
		if strings.HasPrefix(message, "gate open") {
			close(opened)
		}
	}))
	began = time.Now()
	w.run(s)
	select {
	case <-opened:
	case <-w.ctx.Done():
		t.Fatal("the gate does not open")
	}
	took := time.Since(began)
	t.Logf("%d ended tasks: read in %v, gate open after %v", n, plain, took)
	if took > 200*time.Millisecond+8*plain {
		t.Errorf("the gate opened after %v; reading its view takes %v", took, plain)
	}
}
