//go:build unix

package system

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission"
	"github.com/herdgate/herdgate/services/executor"
)

const (
	benchProducers = 8
	benchWorkers   = 100
	// benchInFlight bounds what is submitted and has not ended, in every variant
	// alike: it keeps 100 workers busy and never reaches benchWide.
	benchInFlight = 150
	benchWide     = 200
	benchTight    = 16
	benchRounds   = 3
	benchWork     = 50 * time.Millisecond
	benchLimit    = time.Minute // for one round of one variant
)

// BenchmarkGate measures what the gate costs. In each of three rounds, one after
// the other on the same server: bare messages through a work queue; tasks tracked
// by hand, with a key that is moved on by compare-and-set; tasks through gate and
// executor whose model takes no time, with more slots than are ever used; the same
// with 16 slots, all of them in use. Then work of 50 ms a task, 16 at a time, once
// because the gate has 16 slots and once because the executor has 16 places and the
// gate more slots than are ever used.
//
// A rate counts until nothing of a task is left to do: its end is told and its
// request removed. Beside it stand what a machine's other work disturbs little and
// not at all: CPU time a task, server included, and messages a task, sent and
// received by all clients. Everything is the median of the rounds. Before them, one
// task at a time shows the latency of an idle gate.
func BenchmarkGate(b *testing.B) {
	srv := natstest.Start(b)
	raw, tracked := newRawQueue(b, srv), newTrackedQueue(b, srv)
	wide, tight := newGated(b, srv, "wide.v1", benchWide, benchWorkers), newGated(b, srv, "tight.v1", benchTight, benchWorkers)
	few := newGated(b, srv, "few.v1", benchWide, benchTight)
	all := []interface {
		run(n int, work time.Duration)
	}{raw, tracked, wide, tight, few}
	for _, q := range all {
		q.run(benchInFlight, 0)
	}
	idleStart, idleEnd := wide.idle(200)

	got := map[string][]float64{}
	add := func(unit string, v float64) { got[unit] = append(got[unit], v) }
	for b.Loop() {
		for range benchRounds {
			r := measure(8000, func(n int) { raw.run(n, 0) })
			t := measure(3000, func(n int) { tracked.run(n, 0) }, tracked.conns...)
			w := measure(1000, func(n int) { wide.run(n, 0) }, wide.conns...)
			c := measure(1000, func(n int) { tight.run(n, 0) })
			f50 := measure(320, func(n int) { few.run(n, benchWork) })
			c50 := measure(320, func(n int) { tight.run(n, benchWork) })
			add("raw/s", r.rate)
			add("tracked/s", t.rate)
			add("gate/s", w.rate)
			add("capped/s", c.rate)
			add("uncapped50ms/s", f50.rate)
			add("capped50ms/s", c50.rate)
			add("gate/tracked", w.rate/t.rate)
			add("capped/gate", c.rate/w.rate)
			add("capped50ms/uncapped50ms", c50.rate/f50.rate)
			add("raw-cpu-us", r.cpu)
			add("tracked-cpu-us", t.cpu)
			add("gate-cpu-us", w.cpu)
			add("tracked-msgs", t.msgs)
			add("gate-msgs", w.msgs)
		}
	}
	for unit, v := range got {
		b.ReportMetric(quantile(v, 0.5), unit)
	}
	for name, d := range map[string][]time.Duration{"started": idleStart, "ended": idleEnd} {
		b.ReportMetric(millis(quantile(d, 0.5)), "idle-"+name+"-p50-ms")
		b.ReportMetric(millis(quantile(d, 0.99)), "idle-"+name+"-p99-ms")
	}
	b.ReportMetric(0, "ns/op") // a round is no operation
}

// cost is what one of many units costs.
type cost struct {
	rate float64 // a second
	cpu  float64 // microseconds of the whole process
	msgs float64 // sent and received by clients
}

func measure(n int, run func(n int), conns ...*bus.Conn) cost {
	msgs := func() (sum uint64) {
		for _, c := range conns {
			st := c.NC.Stats()
			sum += st.InMsgs + st.OutMsgs
		}
		return sum
	}
	began, cpu, before := time.Now(), cpuTime(), msgs()
	run(n)
	return cost{
		rate: float64(n) / time.Since(began).Seconds(),
		cpu:  float64((cpuTime() - cpu).Microseconds()) / float64(n),
		msgs: float64(msgs()-before) / float64(n),
	}
}

// cpuTime is what this process has used, in user and system mode.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func quantile[T float64 | time.Duration](v []T, p float64) T {
	v = slices.Clone(v)
	slices.Sort(v)
	return v[int(p*float64(len(v)-1))]
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// flow is n units of work on their way: producers add them, whatever ends them
// says so.
type flow struct {
	b      testing.TB
	places chan struct{}
	mu     sync.Mutex
	left   int
	ended  chan struct{}
}

func newFlow(b testing.TB, n int) *flow {
	return &flow{b: b, places: make(chan struct{}, benchInFlight), left: n, ended: make(chan struct{})}
}

func (f *flow) end() {
	<-f.places
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.left--; f.left == 0 {
		close(f.ended)
	}
}

// run submits n units from all producers and waits until all have ended.
func (f *flow) run(n int, submit func() error) {
	f.b.Helper()
	var wg sync.WaitGroup
	todo := make(chan struct{}, n)
	for range n {
		todo <- struct{}{}
	}
	close(todo)
	limit, cancel := context.WithTimeout(context.Background(), benchLimit)
	defer cancel()
	failed := make(chan error, benchProducers)
	for range benchProducers {
		wg.Go(func() {
			for range todo {
				select {
				case f.places <- struct{}{}:
				case <-limit.Done():
					failed <- fmt.Errorf("no place came free within %v", benchLimit)
					return
				}
				if err := submit(); err != nil {
					failed <- err
					cancel()
					return
				}
			}
		})
	}
	wg.Wait()
	close(failed)
	if err := <-failed; err != nil {
		f.b.Fatal(err)
	}
	select {
	case <-f.ended:
	case <-limit.Done():
		f.b.Fatalf("not all of %d ended within %v", n, benchLimit)
	}
}

// rawQueue is a JetStream work queue with messages like our requests.
type rawQueue struct {
	b        testing.TB
	producer *bus.Conn
	subject  string
	flow     *flow
}

// newQueue makes a work queue and returns the connection to put something in and the
// one on which handle takes it out.
func newQueue(b testing.TB, srv *natstest.Server, name string, handle func(jetstream.Msg)) (producer, consumer *bus.Conn) {
	b.Helper()
	ctx := timeout(b)
	consumer = srv.Conn(name + "-workers")
	stream, err := consumer.JS.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{name}, Retention: jetstream.WorkQueuePolicy})
	if err != nil {
		b.Fatal(err)
	}
	cons, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: name, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: -1})
	if err != nil {
		b.Fatal(err)
	}
	run, err := cons.Consume(handle, jetstream.PullMaxMessages(benchWorkers))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { run.Stop(); <-run.Closed() })
	return srv.Conn(name + "-producers"), consumer
}

func newRawQueue(b testing.TB, srv *natstest.Server) *rawQueue {
	q := &rawQueue{b: b, subject: "RAW"}
	q.producer, _ = newQueue(b, srv, q.subject, func(m jetstream.Msg) {
		if err := m.Ack(); err != nil {
			b.Errorf("ack: %v", err)
		}
		q.flow.end()
	})
	return q
}

func (q *rawQueue) run(n int, _ time.Duration) {
	q.flow = newFlow(q.b, n)
	data := mustJSON(q.b, Request("0s"))
	q.flow.run(n, func() error {
		_, err := q.producer.JS.Publish(context.Background(), q.subject, data)
		return err
	})
}

// trackedQueue is what one would write by hand without a gate: a key for each
// task, moved on by compare-and-set, and a work queue. It has no order, no cap, no
// lease and no events.
type trackedQueue struct {
	b        testing.TB
	producer *bus.Conn
	keys     jetstream.KeyValue
	flow     *flow
	conns    []*bus.Conn
}

func newTrackedQueue(b testing.TB, srv *natstest.Server) *trackedQueue {
	q := &trackedQueue{b: b}
	workers := srv.Conn("tracked-keys")
	done, err := workers.JS.CreateKeyValue(timeout(b), jetstream.KeyValueConfig{Bucket: "TRACKED_KEYS"})
	if err != nil {
		b.Fatal(err)
	}
	jobs := make(chan jetstream.Msg)
	var wg sync.WaitGroup
	for range benchWorkers {
		wg.Go(func() {
			for m := range jobs {
				if err := q.work(done, m); err != nil {
					b.Errorf("a tracked task: %v", err)
				}
				q.flow.end()
			}
		})
	}
	b.Cleanup(func() { close(jobs); wg.Wait() }) // after the queue has stopped
	producer, consumer := newQueue(b, srv, "TRACKED", func(m jetstream.Msg) { jobs <- m })
	q.producer, q.conns = producer, []*bus.Conn{producer, consumer, workers}
	if q.keys, err = q.producer.JS.KeyValue(timeout(b), "TRACKED_KEYS"); err != nil {
		b.Fatal(err)
	}
	return q
}

func (q *trackedQueue) work(keys jetstream.KeyValue, m jetstream.Msg) error {
	ctx := context.Background()
	id := m.Headers().Get(nats.MsgIdHdr)
	rev, err := strconv.ParseUint(m.Headers().Get("Revision"), 10, 64)
	if err != nil {
		return err
	}
	req, err := contract.DecodeTaskRequest(m.Data())
	if err != nil {
		return err
	}
	rec := record(req, contract.StateRunning)
	if rev, err = keys.Update(ctx, id, mustJSON(q.b, rec), rev); err != nil {
		return err
	}
	rec.State, rec.Result = contract.StateCompleted, "done: "+req.Prompt
	if _, err = keys.Update(ctx, id, mustJSON(q.b, rec), rev); err != nil {
		return err
	}
	return m.Ack()
}

func record(req contract.TaskRequest, state contract.State) contract.TaskRecord {
	return contract.TaskRecord{
		TaskID: req.TaskID, RunID: req.RunID, ThreadID: req.ThreadID, Tenant: req.Tenant, State: state, Attempt: 1,
		SubagentType: req.Subagent.Name, Description: req.Description, TimeoutSeconds: req.Subagent.TimeoutSeconds, QueuedAt: req.CreatedAt,
	}
}

func (q *trackedQueue) run(n int, _ time.Duration) {
	q.flow = newFlow(q.b, n)
	q.flow.run(n, func() error {
		req := Request("0s")
		data, err := req.Encode()
		if err != nil {
			return err
		}
		rev, err := q.keys.Create(context.Background(), string(req.TaskID), mustJSON(q.b, record(req, "queued")))
		if err != nil {
			return err
		}
		_, err = q.producer.Publish(context.Background(), bus.Write{
			Subject: "TRACKED", Data: data, MsgID: string(req.TaskID), Header: nats.Header{"Revision": {strconv.FormatUint(rev, 10)}},
		})
		return err
	})
}

// gated is a gate and an executor under names of their own.
type gated struct {
	*System
	b     testing.TB
	conns []*bus.Conn
}

func newGated(b testing.TB, srv *natstest.Server, prefix string, slots, workers int) *gated {
	b.Helper()
	limits := Options{MaxRunning: slots, MaxQueued: 1000, LeaseTTL: 15 * time.Second, LeaderTTL: 10 * time.Second}
	srv.Provision(provision.Config{Names: contract.MustNames(prefix), MaxRunning: limits.MaxRunning, MaxQueued: limits.MaxQueued})
	conn := func(name string) *bus.Conn { return srv.Connect(bus.Config{Name: name, Prefix: prefix}) }
	producers, adm, ex := conn("producers"), conn("adm-1"), conn("ex-1")
	g := &gated{System: &System{t: b, Opts: limits, Server: srv, Bus: producers}, b: b, conns: []*bus.Conn{producers, adm, ex}}

	gate, err := admission.New(admission.Config{
		Name: "adm-1", MaxRunning: limits.MaxRunning, MaxQueued: limits.MaxQueued, LeaseTTL: limits.LeaseTTL, LeaderTTL: limits.LeaderTTL,
	}, admission.Deps{Bus: adm, Log: zerolog.Nop()})
	if err != nil {
		b.Fatal(err)
	}
	g.System.run("adm-1", adm, gate.Run)

	models, err := model.NewRegistry(paced{})
	if err != nil {
		b.Fatal(err)
	}
	exec, err := executor.New(executor.Config{Name: "ex-1", MaxTasks: workers, DrainTimeout: time.Second}, executor.Deps{
		Bus: ex, Models: models, Log: zerolog.Nop(),
		Tools: func(contract.TaskRequest) ([]tool.Tool, func(), error) { return nil, func() {}, nil },
	})
	if err != nil {
		b.Fatal(err)
	}
	g.System.run("ex-1", ex, exec.Run)
	return g
}

// paced answers after the time that the prompt names.
type paced struct{ Echo }

// Generate implements model.Model.
func (p paced) Generate(ctx context.Context, req model.Request, d func(model.Delta)) (model.Response, error) {
	work, err := time.ParseDuration(taskOf(req))
	if err != nil {
		return model.Response{}, err
	}
	if work > 0 {
		t := time.NewTimer(work)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return model.Response{}, context.Cause(ctx)
		}
	}
	return p.Echo.Generate(ctx, req, d)
}

// listen tells of events of some types that are stored from now on, until stop is
// called.
func listen(b testing.TB, s *System, types []contract.EventType, fn func(contract.EventSubject, time.Time)) (stop func()) {
	b.Helper()
	stream, err := s.Bus.JS.Stream(timeout(b), s.Bus.Names.EventStream())
	if err != nil {
		b.Fatal(err)
	}
	w := bus.Watch{Stream: s.Bus.Names.EventStream(), StartSeq: stream.CachedInfo().State.LastSeq + 1, HeadersOnly: true}
	for _, t := range types {
		w.Subjects = append(w.Subjects, s.Bus.Names.Events(contract.EventSubject{Type: t}))
	}
	begun := make(chan struct{})
	w.OnStart = func(uint64) { close(begun) }
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- s.Bus.Watch(ctx, w, func(m bus.Message, _ uint64) error {
			at := time.Now()
			e, err := s.Bus.Names.ParseEvent(m.Subject)
			if err == nil {
				fn(e, at)
			}
			return err
		})
	}()
	select {
	case <-begun:
	case err := <-done:
		b.Fatalf("watch of events: %v", err)
	case <-time.After(Timeout):
		b.Fatal("the watch of events does not begin")
	}
	return func() {
		cancel()
		if err := <-done; err != nil {
			b.Errorf("watch of events: %v", err)
		}
	}
}

var terminalTypes = []contract.EventType{contract.EventTaskCompleted, contract.EventTaskFailed, contract.EventTaskTimedOut, contract.EventTaskCancelled}

func (g *gated) run(n int, work time.Duration) {
	g.b.Helper()
	f := newFlow(g.b, n)
	stop := listen(g.b, g.System, terminalTypes, func(e contract.EventSubject, _ time.Time) {
		if e.Type != contract.EventTaskCompleted {
			g.b.Errorf("task %s ended with %s", e.Task, e.Type)
		}
		f.end()
	})
	defer stop()
	prompt := work.String()
	f.run(n, func() error { return g.TrySubmit(Request(prompt)) })
	natstest.Eventually(g.b, Timeout, func() (bool, string) {
		st, err := g.Bus.JS.Stream(context.Background(), g.Bus.Names.WorkStream())
		if err != nil {
			return false, err.Error()
		}
		left := st.CachedInfo().State.Msgs
		return left == 0, fmt.Sprint("requests left: ", left)
	})
}

// idle measures n tasks, one at a time: from the publish of the request to the
// arrival of its started and of its terminal event.
func (g *gated) idle(n int) (toStart, toEnd []time.Duration) {
	g.b.Helper()
	started, ended := make(chan arrival, 16), make(chan arrival, 16)
	stop := listen(g.b, g.System, append(slices.Clone(terminalTypes), contract.EventTaskStarted), func(e contract.EventSubject, at time.Time) {
		if e.Type == contract.EventTaskStarted {
			started <- arrival{e.Task, at}
		} else {
			ended <- arrival{e.Task, at}
		}
	})
	defer stop()
	for range n {
		req := Request("0s")
		began := time.Now()
		if err := g.TrySubmit(req); err != nil {
			g.b.Fatal(err)
		}
		toStart = append(toStart, await(g.b, started, req.TaskID).Sub(began))
		toEnd = append(toEnd, await(g.b, ended, req.TaskID).Sub(began))
	}
	return toStart, toEnd
}
