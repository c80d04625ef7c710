package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 20 * time.Second

// world is a server with the assets of a gate, and no gate.
type world struct {
	*testing.T
	srv *natstest.Server
	bus *bus.Conn
	ctx context.Context //nolint:containedctx // bounds every call of a test
}

func newWorld(t *testing.T, maxRunning int, opts ...natstest.Option) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	t.Cleanup(cancel)
	srv := natstest.Start(t, opts...)
	srv.Provision(provision.Config{MaxRunning: maxRunning, MaxQueued: 64})
	return &world{T: t, srv: srv, bus: srv.Conn("test"), ctx: ctx}
}

func (w *world) service(c *bus.Conn, name string, reg prometheus.Registerer) *Service {
	w.Helper()
	s, err := New(Config{Name: name, MaxRunning: 1, MaxQueued: 64, LeaseTTL: 3 * time.Second, LeaderTTL: 3 * time.Second}, Deps{Bus: c, Registerer: reg, Log: zerolog.New(zerolog.NewTestWriter(w))})
	if err != nil {
		w.Fatal(err)
	}
	return s
}

// run runs a service until stop is called or the test ends.
func (w *world) run(s *Service) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Run(ctx); err != nil {
			w.Error(err)
		}
	}()
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); <-done }) }
	w.Cleanup(stop)
	return stop
}

// leader makes a service the leader without running it.
func (w *world) leader(s *Service) *fence {
	w.Helper()
	won, ok, err := s.try(w.ctx)
	if err != nil || !ok {
		w.Fatalf("the key was not won: %v", err)
	}
	f := &fence{s: s, writes: make(chan gate.FirstWrite), requests: newBodies(s.bus, s.pools())}
	f.won(won.rev, won.sent)
	return f
}

func request(id string) contract.TaskRequest {
	return contract.TaskRequest{
		ContractVersion: contract.Version, TaskID: contract.TaskID(id), RunID: "r_1", ThreadID: "th_1", Tenant: contract.DefaultTenant,
		Prompt: "look", CreatedAt: time.Now().UTC(), Subagent: contract.Subagent{Name: "general-purpose", MaxTurns: 5, TimeoutSeconds: 60},
	}
}

func encode(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// store puts data under a request's subject.
func (w *world) store(id string, data []byte) uint64 {
	w.Helper()
	return w.put(bus.Write{Subject: w.bus.Names.TaskRequest(contract.DefaultTenant, contract.TaskID(id)), Data: data})
}

func (w *world) submit(id string) uint64 {
	w.Helper()
	return w.store(id, encode(w, request(id)))
}

func (w *world) put(m bus.Write) uint64 {
	w.Helper()
	ack, err := w.bus.Publish(w.ctx, m)
	if err != nil {
		w.Fatal(err)
	}
	return ack.Seq
}

func (w *world) record(id string) (contract.TaskRecord, uint64) {
	w.Helper()
	m, err := w.bus.Last(w.ctx, w.bus.TaskStream(), w.bus.KV(contract.TaskKey(contract.TaskID(id))))
	if err != nil {
		return contract.TaskRecord{}, 0
	}
	rec, err := contract.DecodeTaskRecord(m.Data)
	if err != nil {
		w.Fatal(err)
	}
	return rec, m.Seq
}

// reaches waits until a task's record is in a state.
func (w *world) reaches(id string, state contract.State) contract.TaskRecord {
	w.Helper()
	var rec contract.TaskRecord
	natstest.Eventually(w, patience, func() (bool, string) {
		rec, _ = w.record(id)
		return rec.State == state, fmt.Sprintf("%s is %q: %s", id, rec.State, rec.Error)
	})
	return rec
}

// status asks until a leader called name answers.
func (w *world) status(name string) admissionapi.Status {
	w.Helper()
	var st admissionapi.Status
	natstest.Eventually(w, patience, func() (bool, string) {
		var err error
		st, err = admissionapi.Ask(w.ctx, w.bus, admissionapi.StatusRequest{})
		return err == nil && strings.HasPrefix(st.Leader, name+"-"), fmt.Sprintf("leader %q, %v", st.Leader, err)
	})
	return st
}

// letters returns the reasons of the dead letters, in order.
func (w *world) letters() (reasons []string) {
	w.Helper()
	info, err := w.bus.JS.Stream(w.ctx, w.bus.Names.DeadStream())
	if err != nil {
		w.Fatal(err)
	}
	last := info.CachedInfo().State.LastSeq
	for seq := uint64(1); seq <= last; seq++ {
		m, err := w.bus.Get(w.ctx, w.bus.Names.DeadStream(), seq)
		if err != nil {
			w.Fatal(err)
		}
		reasons = append(reasons, m.Header.Get(bus.HeaderOriginSubject)+": "+m.Header.Get(bus.HeaderReason))
	}
	slices.Sort(reasons)
	return reasons
}

// queue returns how many requests there are.
func (w *world) queue() uint64 {
	w.Helper()
	info, err := w.bus.JS.Stream(w.ctx, w.bus.Names.WorkStream())
	if err != nil {
		w.Fatal(err)
	}
	return info.CachedInfo().State.Msgs
}
