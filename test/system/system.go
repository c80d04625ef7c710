// Package system runs Herdgate's services together in one process against a real
// NATS server, for tests that look at the whole.
package system

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/oklog/ulid/v2"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/admission"
	"github.com/herdgate/herdgate/services/executor"
	"github.com/herdgate/herdgate/test/history"
)

// Timeout bounds every wait.
const Timeout = 20 * time.Second

// Options say what a system consists of.
type Options struct {
	MaxRunning, MaxQueued int
	Policy                string
	QueueTimeout          time.Duration
	LeaseTTL, LeaderTTL   time.Duration
	Model                 model.Model
	Tools                 func(contract.TaskRequest) ([]tool.Tool, func(), error)
	TracerProvider        trace.TracerProvider
	Content               *telemetry.Content
	Listen                bool
	Log                   zerolog.Logger
	// Settings are the executors'; nil takes the defaults.
	Settings *config.Config
	// Subagents are the types that leads know beside the built-in ones.
	Subagents subagent.Config
	// Unrecorded: the test writes what no service would, or measures, so that its
	// history is neither recorded nor judged.
	Unrecorded bool
	// Server adds to the server's options. As says as whom a service connects, whose
	// connection then logs to Log.
	Server []natstest.Option
	As     func(name string) []nats.Option
	// Tap notes what the clients send and are answered; nil does not.
	Tap *history.Tap
}

// System is a NATS server with what runs on it.
type System struct {
	t      testing.TB
	Opts   Options
	Server *natstest.Server
	Bus    *bus.Conn

	recorder *history.Recorder
	gate     *Process // that of Whole
}

// New starts a server with all assets and no service.
func New(t testing.TB, o Options) *System {
	t.Helper()
	if o.MaxRunning == 0 {
		o.MaxRunning = 3
	}
	if o.MaxQueued == 0 {
		o.MaxQueued = 64
	}
	if o.LeaseTTL == 0 {
		o.LeaseTTL = 3 * time.Second
	}
	if o.LeaderTTL == 0 {
		o.LeaderTTL = 3 * time.Second
	}
	if o.Tools == nil {
		o.Tools = func(contract.TaskRequest) ([]tool.Tool, func(), error) { return nil, func() {}, nil }
	}
	if o.Model == nil {
		o.Model = Echo{}
	}
	opts := o.Server
	if o.Listen {
		opts = append(opts, natstest.Listen())
	}
	srv := natstest.Start(t, opts...)
	srv.Provision(provision.Config{MaxRunning: o.MaxRunning, MaxQueued: o.MaxQueued, AdmissionPolicy: o.Policy})
	s := &System{t: t, Opts: o, Server: srv}
	s.Bus = s.connect("test")
	// A benchmark measures the services alone.
	if _, test := t.(*testing.T); test && !o.Unrecorded {
		s.record()
	}
	return s
}

// record notes everything from here on, to be judged when the test is over.
func (s *System) record() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	r, err := history.Record(ctx, s.Server.Conn("recorder")) // a connection of its own, that no tap is on
	if err != nil {
		s.t.Fatal(err)
	}
	s.recorder = r
	s.t.Cleanup(func() { s.mustHold(invariant.Options{}) })
}

// mustHold judges what was recorded, whatever is still under way.
func (s *System) mustHold(o invariant.Options) {
	s.t.Helper()
	if s.recorder == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	o.MaxRunning, o.MaxStored = s.Opts.MaxRunning, s.Opts.MaxRunning+s.Opts.MaxQueued
	found, err := s.recorder.Check(ctx, o)
	if err != nil {
		s.t.Errorf("the history cannot be judged: %v", err)
	}
	for _, v := range found {
		s.t.Error(v)
	}
}

// connect is a connection as a service called name has it.
func (s *System) connect(name string) *bus.Conn {
	s.t.Helper()
	if s.Opts.As != nil {
		conn, err := bus.Connect(timeout(s.t), s.Server.BusConfig(bus.Config{Name: name, Extra: s.Opts.As(name)}), s.Opts.Log)
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(conn.Close)
		return conn
	}
	if s.Opts.Tap == nil {
		return s.Server.Conn(name)
	}
	return s.Server.Connect(bus.Config{Name: name, InProcess: s.Opts.Tap.Client(name, s.Server)})
}

// Process is a running service.
type Process struct {
	name string
	stop context.CancelFunc
	done chan struct{}
	t    testing.TB
	// Conn is its connection; closing it cuts the process off.
	Conn *bus.Conn
}

// Stop ends the process in order.
func (p *Process) Stop() {
	p.t.Helper()
	p.stop()
	select {
	case <-p.done:
	case <-time.After(Timeout):
		p.t.Errorf("%s did not stop", p.name)
	}
}

func (s *System) run(name string, conn *bus.Conn, run func(context.Context) error) *Process {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Process{name: name, stop: cancel, done: make(chan struct{}), t: s.t, Conn: conn}
	go func() {
		defer close(p.done)
		if err := run(ctx); err != nil {
			s.t.Errorf("%s: %v", name, err)
		}
	}()
	s.t.Cleanup(p.Stop)
	return p
}

// Admission starts an admission process; change adapts its configuration.
func (s *System) Admission(name string, change ...func(*admission.Config)) *Process {
	s.t.Helper()
	conn := s.connect(name)
	cfg := admission.Config{
		Name: name, MaxRunning: s.Opts.MaxRunning, MaxQueued: s.Opts.MaxQueued, Policy: s.Opts.Policy,
		QueueTimeout: s.Opts.QueueTimeout, LeaseTTL: s.Opts.LeaseTTL, LeaderTTL: s.Opts.LeaderTTL,
	}
	for _, f := range change {
		f(&cfg)
	}
	svc, err := admission.New(cfg, admission.Deps{Bus: conn, Log: s.Opts.Log, TracerProvider: s.Opts.TracerProvider})
	if err != nil {
		s.t.Fatal(err)
	}
	return s.run(name, conn, svc.Run)
}

// Executor starts an executor process with room for tasks.
func (s *System) Executor(name string, tasks int, drain time.Duration) *Process {
	s.t.Helper()
	conn := s.connect(name)
	models, err := model.NewRegistry(s.Opts.Model)
	if err != nil {
		s.t.Fatal(err)
	}
	svc, err := executor.New(executor.Config{Name: name, MaxTasks: tasks, DrainTimeout: drain, Settings: s.Opts.Settings},
		executor.Deps{Bus: conn, Models: models, Tools: s.Opts.Tools, Log: s.Opts.Log, TracerProvider: s.Opts.TracerProvider, Content: s.Opts.Content})
	if err != nil {
		s.t.Fatal(err)
	}
	return s.run(name, conn, svc.Run)
}

// Request is a valid request for prompt.
func Request(prompt string) contract.TaskRequest {
	id := strings.ToLower(ulid.Make().String())
	return contract.TaskRequest{
		ContractVersion: contract.Version, TaskID: contract.TaskID("t_" + id), RunID: contract.RunID("r_" + id), ThreadID: contract.ThreadID("th_" + id),
		Tenant: contract.DefaultTenant, Prompt: prompt, Description: prompt, CreatedAt: time.Now().UTC(),
		Subagent: contract.Subagent{Name: "general-purpose", MaxTurns: 10, TimeoutSeconds: 60},
		Identity: contract.Identity{UserID: contract.DefaultUser, IsSubagent: true},
	}
}

// Submit publishes a request.
func (s *System) Submit(req contract.TaskRequest) {
	s.t.Helper()
	if err := s.TrySubmit(req); err != nil {
		s.t.Fatal(err)
	}
}

// TrySubmit publishes a request.
func (s *System) TrySubmit(req contract.TaskRequest) error {
	data, err := req.Encode()
	if err != nil {
		return err
	}
	_, err = s.Bus.Publish(context.Background(), bus.Write{Subject: s.Bus.Names.TaskRequest(req.Tenant, req.TaskID), Data: data, MsgID: string(req.TaskID)})
	return err
}

// Cancel writes a cancellation.
func (s *System) Cancel(id contract.TaskID) {
	s.t.Helper()
	_, err := s.Bus.Publish(context.Background(), bus.Write{Subject: s.Bus.KV(contract.CancelKey(id)), Data: []byte(`{}`), TTL: time.Hour})
	if err != nil {
		s.t.Fatal(err)
	}
}

// Record reads a task's record, or nothing.
func (s *System) Record(id contract.TaskID) (contract.TaskRecord, bool) {
	s.t.Helper()
	m, err := s.Bus.Last(context.Background(), s.Bus.TaskStream(), s.Bus.KV(contract.TaskKey(id)))
	if err != nil || m.Deleted() {
		return contract.TaskRecord{}, false
	}
	rec, err := contract.DecodeTaskRecord(m.Data)
	if err != nil {
		s.t.Fatal(err)
	}
	return rec, true
}

// Feed follows all events from the first one on.
type Feed struct {
	t  testing.TB
	mu sync.Mutex
	ev []envelope.Event
	// changed is closed and replaced with each event.
	changed chan struct{}
}

// Follow starts a feed of every event.
func (s *System) Follow() *Feed {
	s.t.Helper()
	f := &Feed{t: s.t, changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := s.Bus.Watch(ctx, bus.Watch{Stream: s.Bus.Names.EventStream(), StartSeq: 1, Subjects: []string{s.Bus.Names.AllEvents()}},
			func(m bus.Message, _ uint64) error {
				ev, err := envelope.Decode(m.Data)
				if err != nil {
					return err
				}
				f.mu.Lock()
				defer f.mu.Unlock()
				f.ev = append(f.ev, ev)
				close(f.changed)
				f.changed = make(chan struct{})
				return nil
			})
		if err != nil {
			s.t.Errorf("feed: %v", err)
		}
	}()
	s.t.Cleanup(func() { cancel(); <-done })
	return f
}

// Events returns what has come so far.
func (f *Feed) Events() []envelope.Event {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]envelope.Event(nil), f.ev...)
}

// Until waits until ok is true for what has come.
func (f *Feed) Until(what string, ok func([]envelope.Event) bool) []envelope.Event {
	f.t.Helper()
	limit := time.After(Timeout)
	for {
		f.mu.Lock()
		ev, changed := append([]envelope.Event(nil), f.ev...), f.changed
		f.mu.Unlock()
		if ok(ev) {
			return ev
		}
		select {
		case <-changed:
		case <-limit:
			var b strings.Builder
			for _, e := range ev {
				fmt.Fprintf(&b, "\n  %s %s attempt %d", e.TaskID, e.Type, e.Attempt)
			}
			f.t.Fatalf("waited %v for: %s; there were %d events:%s", Timeout, what, len(ev), b.String())
		}
	}
}

// Ended waits until n tasks have ended.
func (f *Feed) Ended(n int) []envelope.Event {
	f.t.Helper()
	return f.Until(fmt.Sprintf("%d ends", n), func(ev []envelope.Event) bool { return Count(ev, contract.EventType.TaskTerminal) >= n })
}

// Count counts the events whose type fits.
func Count(ev []envelope.Event, fits func(contract.EventType) bool) int {
	n := 0
	for _, e := range ev {
		if fits(e.Type) {
			n++
		}
	}
	return n
}

// Is fits one type.
func Is(t contract.EventType) func(contract.EventType) bool {
	return func(x contract.EventType) bool { return x == t }
}

func mustJSON(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
