package eventsink_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// within bounds every wait of these tests.
const within = time.Minute

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sink is a sink that runs.
type sink struct {
	t      testing.TB
	svc    *eventsink.Service
	reg    *prometheus.Registry
	cancel context.CancelFunc
	done   chan error

	mu      sync.Mutex
	reasons []string // every readiness that was told, "" for good
}

type options struct {
	cfg    eventsink.Config
	open   eventsink.OpenFunc
	tracer trace.TracerProvider
	log    zerolog.Logger
}

// start runs a sink until the test ends.
func start(t testing.TB, conn *bus.Conn, o options) *sink {
	t.Helper()
	s := &sink{t: t, reg: prometheus.NewRegistry(), done: make(chan error, 1)}
	svc, err := eventsink.New(o.cfg, eventsink.Deps{
		Bus: conn, Open: o.open, Log: o.log, Registerer: s.reg, TracerProvider: o.tracer,
		Ready: func(name string, err error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			reason := ""
			if err != nil {
				reason = err.Error()
			}
			s.reasons = append(s.reasons, reason)
		},
	})
	if err != nil {
		t.Fatalf("New = %v", err)
	}
	s.svc = svc
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go func() { s.done <- svc.Run(ctx) }()
	t.Cleanup(func() { s.stop() })
	return s
}

// stop ends the sink as SIGTERM does and waits for it.
func (s *sink) stop() {
	s.t.Helper()
	s.cancel()
	select {
	case err, ok := <-s.done:
		if ok && err != nil {
			s.t.Errorf("Run = %v, want nil", err)
		}
		if ok {
			close(s.done)
		}
	case <-time.After(within):
		s.t.Fatal("Run did not return")
	}
}

// waitReady waits until the newest readiness holds text; "" waits for good.
func (s *sink) waitReady(text string) {
	s.t.Helper()
	natstest.Eventually(s.t, within, func() (bool, string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.reasons) == 0 {
			return false, "readiness was never told"
		}
		last := s.reasons[len(s.reasons)-1]
		ok := last == "" && text == "" || text != "" && strings.Contains(last, text)
		return ok, fmt.Sprintf("readiness is %q, want %q", last, text)
	})
}

// metric reads a counter or gauge.
func (s *sink) metric(name string) float64 {
	s.t.Helper()
	families, err := s.reg.Gather()
	if err != nil {
		s.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "herdgate_eventsink_"+name {
			m := f.GetMetric()[0]
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return -1
}

// task names the events of one task.
type task struct {
	tenant contract.Tenant
	thread contract.ThreadID
	run    contract.RunID
	id     contract.TaskID
}

func newTask(n int) task {
	return task{"default", contract.ThreadID(fmt.Sprintf("thread %d", n/10)), contract.RunID(fmt.Sprintf("run-%d", n/10)), contract.TaskID(fmt.Sprintf("task-%d", n))}
}

func (k task) event(id string, typ contract.EventType, data any) envelope.Event {
	ev, err := envelope.New(typ, data)
	if err != nil {
		panic(err)
	}
	ev.ID, ev.Source, ev.Subject, ev.Time = id, "/herdgate/test/1", string(k.id), time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ev.Tenant, ev.ThreadID, ev.RunID, ev.TaskID = k.tenant, k.thread, k.run, k.id
	return ev
}

func (k task) started() envelope.Event {
	return k.event(string(k.id)+"/started", contract.EventTaskStarted, contract.TaskStartedData{TaskID: k.id, Description: "look", SubagentType: "general-purpose", ModelName: "m"})
}

func (k task) step(n int) envelope.Event {
	return k.event(fmt.Sprintf("%s/step/%d", k.id, n), contract.EventTaskRunning, contract.TaskRunningData{TaskID: k.id, MessageIndex: n, Message: contract.Step{Kind: contract.StepAI, Text: fmt.Sprintf("step %d", n)}})
}

func (k task) completed() envelope.Event {
	return k.event(string(k.id)+"/end", contract.EventTaskCompleted, contract.TaskEndData{TaskID: k.id, Status: contract.TaskCompleted, Result: "done"})
}

// publish puts an event into the stream, past the server's memory of ids.
func publish(t testing.TB, conn *bus.Conn, ev envelope.Event) uint64 {
	t.Helper()
	b, err := envelope.Encode(ev)
	if err != nil {
		t.Fatal(err)
	}
	return publishRaw(t, conn, ev.NATSSubject(conn.Names), b)
}

func publishRaw(t testing.TB, conn *bus.Conn, subject string, data []byte) uint64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	ack, err := conn.Publish(ctx, bus.Write{Subject: subject, Data: data, Header: nats.Header{}})
	if err != nil {
		t.Fatalf("publish: %v", err)
	}
	return ack.Seq
}

// stored waits until everything up to seq was processed and returns all that is
// stored of it.
func stored(t testing.TB, conn *bus.Conn, seq uint64) []contract.EventRecord {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	var all []contract.EventRecord
	req := eventapi.ListRequest{BarrierSeq: seq, Limit: eventapi.MaxLimit}
	for {
		resp, err := eventapi.List(ctx, conn, req)
		switch {
		case ctx.Err() != nil:
			t.Fatalf("events up to %d are not stored: last_seq %d, %v", seq, resp.LastSeq, err)
		case errors.Is(err, eventapi.ErrUnavailable):
			select { // nobody answers yet
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		case err != nil:
			t.Fatalf("List = %v", err)
		}
		if resp.LastSeq < seq {
			continue
		}
		all = append(all, resp.Events...)
		if !resp.HasMore {
			return all
		}
		req.AfterSeq = resp.NextAfterSeq
	}
}

// ids are the event ids of records.
func ids(records []contract.EventRecord) []string {
	out := []string{}
	for _, r := range records {
		out = append(out, r.EventID)
	}
	return out
}

// wrap opens the store in dir with Append replaced.
func wrap(dir string, f func(ctx context.Context, next eventsink.Store, records []contract.EventRecord, upTo uint64) (int, error)) eventsink.OpenFunc {
	return func(ctx context.Context, waiting func()) (eventsink.Store, error) {
		s, err := sqlite.Open(ctx, dir, waiting)
		if err != nil {
			return nil, err
		}
		return &wrapped{s, f}, nil
	}
}

type wrapped struct {
	eventsink.Store
	f func(ctx context.Context, next eventsink.Store, records []contract.EventRecord, upTo uint64) (int, error)
}

func (w *wrapped) Append(ctx context.Context, records []contract.EventRecord, upTo uint64) (int, error) {
	return w.f(ctx, w.Store, records, upTo)
}

// ordered fails the test when sequences are committed out of order.
type ordered struct {
	t    testing.TB
	mu   sync.Mutex
	last uint64
}

func (o *ordered) append(ctx context.Context, next eventsink.Store, records []contract.EventRecord, upTo uint64) (int, error) {
	n, err := next.Append(ctx, records, upTo)
	if err != nil {
		return n, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, r := range records {
		if r.Seq <= o.last {
			o.t.Errorf("event %d was committed after %d", r.Seq, o.last)
		}
		o.last = r.Seq
	}
	return n, err
}

func mustJSON(t testing.TB, v any) json.RawMessage {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
