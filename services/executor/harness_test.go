package executor

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

func TestMain(m *testing.M) {
	sandbox.Main() // commands of tools run through this binary
	goleak.VerifyTestMain(m)
}

const patience = 20 * time.Second

// leaseTTL is the shortest that a server knows.
const leaseTTL = time.Second

// world is a server with assets, an executor that is not running, and a test
// that plays the gate.
type world struct {
	*testing.T
	srv   *natstest.Server
	bus   *bus.Conn // the gate's
	svc   *Service
	clock *clock
	ctx   context.Context //nolint:containedctx // bounds every call of a test
	model *fakeModel
	tools []tool.Tool
	noWS  error
}

func newWorld(t *testing.T, opts ...natstest.Option) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	t.Cleanup(cancel)
	srv, c := natstest.New(t, opts...)
	w := &world{T: t, srv: srv, bus: c, clock: &clock{}, ctx: ctx}
	w.model = &fakeModel{answer: func(context.Context, int) (model.Response, error) {
		return model.Response{Message: model.Message{Text: "done"}, Usage: &contract.Usage{InputTokens: 3, OutputTokens: 2, TotalTokens: 5}}, nil
	}}
	w.svc = w.service(srv.Conn("ex-1"))
	return w
}

func (w *world) service(c *bus.Conn, change ...func(*Config)) *Service {
	w.Helper()
	models, err := model.NewRegistry(w.model)
	if err != nil {
		w.Fatal(err)
	}
	cfg := Config{Name: "ex-1", MaxTasks: 2, DrainTimeout: time.Millisecond}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(cfg, Deps{
		Bus: c, Models: models, Now: w.clock.now, Log: zerolog.New(zerolog.NewTestWriter(w)),
		Tools: func(contract.TaskRequest) ([]tool.Tool, func(), error) { return w.tools, func() {}, w.noWS },
	})
	if err != nil {
		w.Fatal(err)
	}
	return s
}

// clock is the real one, moved on by hand.
type clock struct {
	mu   sync.Mutex
	plus time.Duration
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.plus)
}

func (c *clock) jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.plus += d
}

// fakeModel answers as its function says.
type fakeModel struct {
	mu     sync.Mutex
	calls  int
	answer func(ctx context.Context, n int) (model.Response, error)
	tell   func(model.Delta) // of the call that is answered
}

func (*fakeModel) Name() string      { return "fake" }
func (*fakeModel) ModelName() string { return "fake-1" }
func (f *fakeModel) Generate(ctx context.Context, _ model.Request, onDelta func(model.Delta)) (model.Response, error) {
	f.mu.Lock()
	f.tell = onDelta
	f.calls++
	n, answer := f.calls, f.answer
	f.mu.Unlock()
	return answer(ctx, n)
}

// answers changes what the next calls are answered.
func (f *fakeModel) answers(with func(ctx context.Context, n int) (model.Response, error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer = with
}

func (f *fakeModel) asked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls
}

// holds makes the model wait until its work is over; started is closed when it
// has been asked.
func (f *fakeModel) holds() (started <-chan struct{}) {
	ch := make(chan struct{})
	var once sync.Once
	f.answer = func(ctx context.Context, _ int) (model.Response, error) {
		once.Do(func() { close(ch) })
		<-ctx.Done()
		return model.Response{Usage: &contract.Usage{InputTokens: 7, TotalTokens: 7}}, context.Cause(ctx)
	}
	return ch
}

func request(id string) contract.TaskRequest {
	return contract.TaskRequest{
		ContractVersion: contract.Version, TaskID: contract.TaskID(id), RunID: "r_1", ThreadID: "th_1", Tenant: contract.DefaultTenant,
		Identity: contract.Identity{UserID: "u", IsSubagent: true},
		Prompt:   "look", CreatedAt: time.Now().UTC(), Subagent: contract.Subagent{Name: "general-purpose", MaxTurns: 5, TimeoutSeconds: 60},
	}
}

func (w *world) json(v any) []byte {
	w.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		w.Fatal(err)
	}
	return b
}

// granted writes a granted record and returns it as a grant.
func (w *world) granted(id string, attempt int) contract.Grant {
	w.Helper()
	now := time.Now().UTC()
	rec := contract.TaskRecord{
		TaskID: contract.TaskID(id), RunID: "r_1", ThreadID: "th_1", Tenant: contract.DefaultTenant, State: contract.StateGranted, Attempt: attempt,
		Slot: 1, Epoch: 1, Writer: "gate/1", QueuedAt: now, GrantedAt: &now, SubagentType: "general-purpose", TimeoutSeconds: 60,
	}
	_, rev := w.record(id)
	rev = w.put(rec, rev)
	return contract.Grant{TaskID: rec.TaskID, Attempt: attempt, Slot: 1, Epoch: 1, Revision: rev, LeaseTTLMS: leaseTTL.Milliseconds(), Record: rec, Request: request(id)}
}

// put writes a record as the gate does, by its revision.
func (w *world) put(rec contract.TaskRecord, expect uint64) uint64 {
	w.Helper()
	ack, err := w.bus.Publish(w.ctx, bus.Write{Subject: w.bus.KV(contract.TaskKey(rec.TaskID)), Data: w.json(rec), Expect: bus.Seq(expect)})
	if err != nil {
		w.Fatal(err)
	}
	return ack.Seq
}

// send publishes a grant's message; data replaces what is in it.
func (w *world) send(g contract.Grant, data ...byte) {
	w.Helper()
	if data == nil {
		data = w.json(g)
	}
	_, err := w.bus.Publish(w.ctx, bus.Write{Subject: w.bus.Names.TaskGrant(contract.DefaultPool, g.TaskID), Data: data, MsgID: fmt.Sprintf("%s/%d", g.TaskID, g.Attempt)})
	if err != nil {
		w.Fatal(err)
	}
}

// next pulls the next grant as the executor does.
func (w *world) next() jetstream.Msg {
	w.Helper()
	var msg jetstream.Msg
	err := w.svc.pull(w.ctx, func(grants *bus.Puller) (err error) {
		p := places{room: 1}
		msg, err = p.next(w.ctx, grants)
		return err
	})
	if err != nil || msg == nil {
		w.Fatalf("no grant: %v", err)
	}
	return msg
}

// begin takes a grant up to its first model call; the work is left to run.
func (w *world) begin(g contract.Grant) (run func()) {
	w.Helper()
	w.send(g)
	return w.svc.take(w.ctx, w.next())
}

// background runs the work of a task; wait waits for its end.
func (w *world) background(run func()) (wait func()) {
	w.Helper()
	if run == nil {
		w.Fatal("the grant was not taken")
	}
	done := make(chan struct{})
	go func() { defer close(done); run() }()
	wait = func() {
		w.Helper()
		select {
		case <-done:
		case <-time.After(patience):
			w.Fatal("the work does not end")
		}
	}
	w.Cleanup(wait)
	return wait
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

// events returns the types of a task's events, in order.
func (w *world) events(id string) string {
	w.Helper()
	var types []string
	stream, err := w.bus.JS.Stream(w.ctx, w.bus.Names.EventStream())
	if err != nil {
		w.Fatal(err)
	}
	for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
		m, err := w.bus.Get(w.ctx, w.bus.Names.EventStream(), seq)
		if err != nil {
			w.Fatal(err)
		}
		if s, err := w.bus.Names.ParseEvent(m.Subject); err == nil && string(s.Task) == id {
			types = append(types, strings.TrimPrefix(string(s.Type), "task_"))
		}
	}
	return strings.Join(types, " ")
}

// told stores an event of a task and returns its sequence.
func (w *world) told(ev envelope.Event) uint64 {
	w.Helper()
	data, err := envelope.Encode(ev)
	if err != nil {
		w.Fatal(err)
	}
	ack, err := w.bus.Publish(w.ctx, bus.Write{Subject: ev.NATSSubject(w.bus.Names), Data: data})
	if err != nil {
		w.Fatal(err)
	}
	return ack.Seq
}

func (w *world) admitted(rec contract.TaskRecord) envelope.Event {
	return event.Admitted(rec, "/herdgate/admission/test", time.Now())
}

// unacked returns how many grants are not dealt with.
func (w *world) unacked() uint64 {
	w.Helper()
	cons, err := w.bus.JS.Consumer(w.ctx, w.bus.Names.GrantStream(), w.bus.Names.GrantConsumer(contract.DefaultPool))
	if err != nil {
		w.Fatal(err)
	}
	return cons.CachedInfo().NumPending + uint64(cons.CachedInfo().NumAckPending)
}

func (w *world) dealtWith() {
	w.Helper()
	natstest.Eventually(w, patience, func() (bool, string) { n := w.unacked(); return n == 0, fmt.Sprint(n, " grants are not acknowledged") })
}

// fenced returns how many attempts were given up as no longer ours.
func (w *world) fenced() float64 {
	w.Helper()
	return w.count(w.svc.metrics.fenced)
}

func (w *world) count(c prometheus.Collector) float64 {
	w.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(c)
	families, err := reg.Gather()
	if err != nil {
		w.Fatal(err)
	}
	return families[0].GetMetric()[0].GetCounter().GetValue()
}

// attempt is one that has claimed its task, without keeper.
func (w *world) attempt(g contract.Grant) (*attempt, context.Context) {
	w.Helper()
	ctx, cancel := context.WithCancelCause(w.ctx)
	w.Cleanup(func() { cancel(nil) })
	a := &attempt{s: w.svc, grant: g, rec: g.Record, rev: g.Revision, last: g.LastEventSeq, ttl: leaseTTL, cancel: cancel, base: w.svc.now(), log: w.svc.log, span: noop.Span{}}
	a.ttl = time.Minute // nobody renews it
	if ok, err := a.claim(ctx); !ok || err != nil {
		w.Fatalf("claim = %v, %v", ok, err)
	}
	return a, ctx
}
