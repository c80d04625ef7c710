// Package executor runs sub-agents: it takes grants for its free places, claims
// the task's record, keeps a lease alive while it works, publishes every step,
// and writes the end once.
//
// An attempt moves through: granted → lease → claimed → started → steps → end.
// It stops early for one of few causes: cancelled, out of time, stalled because
// nothing happens in it, handed back because the process drains, or fenced — its lease ran out by its own clock or
// the record moved under it. A fenced attempt writes nothing any more.
//
// What always holds: no effect (model call, tool start, event) begins before the
// claim, after a cancellation was seen, or after the lease is over by the
// attempt's own monotonic clock; the terminal record is written after all effects
// have stopped and all step events are stored. The protocol is docs/admission.md.
//
// When things fail: a killed executor's lease runs out and the gate moves the
// task on; a partitioned one stops by its own clock before that. Nothing of an
// attempt is resumed.
package executor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/deferral"
	"github.com/herdgate/herdgate/internal/mcp"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/rungroup"
	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/internal/workspace"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Config is what an executor is started with.
type Config struct {
	// Name of the process; it appears in records, leases and events.
	Name string
	// Pool whose grants it takes; empty is the default pool.
	Pool contract.Pool
	// MaxTasks is how many tasks run at once; 0 means 8.
	MaxTasks int
	// DrainTimeout is how long running tasks may go on after a stop was asked
	// for; 0 means 60 s. What is left then is handed back.
	DrainTimeout time.Duration
	// StallTimeout is how long nothing may happen in a task before it ends as
	// failed; 0 means 600 s.
	StallTimeout time.Duration
	// Settings are what executions take their snapshot from; the zero value is the
	// default configuration.
	Settings *config.Config
}

// Deps is what the service needs from outside. Bus, Models and Tools are required;
// with Workspaces it is ToolsIn in place of Tools.
type Deps struct {
	Bus    *bus.Conn
	Models *model.Registry
	// Tools opens the tools for a task: those that its workspace offers, before
	// any list of its definition is applied. done is called when the task ended.
	Tools func(req contract.TaskRequest) (tools []tool.Tool, done func(), err error)
	// Workspaces, when set, gives each task a copy of its thread's workspace, and
	// ToolsIn opens the tools over the folder of the copy.
	Workspaces *workspace.Store
	ToolsIn    func(req contract.TaskRequest, dir string) (tools []tool.Tool, done func(), err error)
	// Skills reads the skills of users.
	Skills skill.Loader
	// MCP, when set, has the external tools.
	MCP *mcp.Manager
	// Authorise says whether whoever a task works for may use a tool; nil allows all
	// that the lists leave (TOOL-03).
	Authorise func(who contract.Identity, tool string) bool

	Now            func() time.Time
	Log            zerolog.Logger
	TracerProvider trace.TracerProvider
	// Content, if not nil, puts prompts, answers and arguments into spans.
	Content    *telemetry.Content
	Registerer prometheus.Registerer
	// Ready is told of the service's readiness; nil ignores it.
	Ready func(check string, err error)
}

// Service is one executor process.
type Service struct {
	cfg     Config
	bus     *bus.Conn
	deps    Deps
	now     func() time.Time
	log     zerolog.Logger
	tracer  trace.Tracer
	ready   func(string, error)
	writer  *bus.Writer
	metrics *metrics
	decode  func([]byte) (contract.Grant, error)
	zone    *time.Location // of the date that agents are told

	mu       sync.Mutex
	attempts map[*attempt]struct{}
}

// New returns a service; [Service.Run] starts it.
func New(cfg Config, deps Deps) (*Service, error) {
	if cfg.Name == "" {
		return nil, errors.New("executor: name is empty")
	}
	if cfg.MaxTasks == 0 {
		cfg.MaxTasks = 8
	}
	if cfg.MaxTasks < 1 {
		return nil, fmt.Errorf("executor: executor.max_tasks must be at least 1, got %d", cfg.MaxTasks)
	}
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = 60 * time.Second
	}
	if cfg.StallTimeout == 0 {
		cfg.StallTimeout = 600 * time.Second
	}
	if cfg.StallTimeout < 0 {
		return nil, fmt.Errorf("executor: executor.stall_timeout_seconds must be at least 1, got %v", cfg.StallTimeout)
	}
	if cfg.Settings == nil {
		def := config.Default()
		cfg.Settings = &def
	}
	snapshot := *cfg.Settings // what the caller changes later is not for tasks under way (EXEC-08)
	cfg.Settings = &snapshot
	if cfg.Pool == "" {
		cfg.Pool = contract.DefaultPool
	}
	if err := cfg.Pool.Validate(); err != nil {
		return nil, fmt.Errorf("executor: %w", err)
	}
	if err := deferral.CheckOrder(agent.Order); err != nil { // DEFER-07
		return nil, fmt.Errorf("executor: %w", err)
	}
	zone, err := cfg.Settings.Executor.Location()
	if err != nil {
		return nil, fmt.Errorf("executor: executor.time_zone: %w", err)
	}
	s := &Service{
		zone: zone,
		cfg:  cfg, bus: deps.Bus, deps: deps, now: deps.Now, log: deps.Log, ready: deps.Ready,
		writer: bus.NewWriter(cfg.Name), metrics: newMetrics(deps.Registerer), decode: contract.DecodeGrant, attempts: map[*attempt]struct{}{},
	}
	if s.now == nil {
		s.now = time.Now
	}
	if s.ready == nil {
		s.ready = func(string, error) {}
	}
	tp := deps.TracerProvider
	if tp == nil {
		tp = noop.NewTracerProvider()
	}
	s.tracer = tp.Tracer("herdgate/executor")
	return s, nil
}

// Run takes and runs tasks until ctx is done, then drains: it takes nothing new,
// lets running tasks go on for the drain time, hands back what is left, and
// returns when nothing runs any more.
func (s *Service) Run(ctx context.Context) error {
	sub, err := s.bus.NC.Subscribe(s.bus.KV(contract.CancelKey("*")), s.heardCancel)
	if err != nil {
		return fmt.Errorf("executor: subscribe to cancellations: %w", err)
	}
	defer sub.Unsubscribe() //nolint:errcheck // the connection goes with it

	// Work outlives ctx, but not the hard end.
	work, stopWork := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stopWork(nil)
	var tasks sync.WaitGroup
	s.takeGrants(ctx, work, &tasks)
	s.ready("executor", errors.New("draining: takes no new task"))
	idle := make(chan struct{})
	go func() { tasks.Wait(); close(idle) }()

	hard := rungroup.Hard(ctx)
	var cut <-chan struct{}
	if hard != ctx {
		cut = hard.Done()
	}
	drain := time.NewTimer(s.cfg.DrainTimeout)
	defer drain.Stop()
	select {
	case <-idle:
	case <-drain.C:
	case <-cut:
	}
	if n := s.running(); n > 0 {
		s.log.Info().Int("tasks", n).Msg("handing back what is left")
	}
	stopWork(errHandBack)
	<-idle
	return nil
}

func (s *Service) running() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.attempts)
}

// heardCancel wakes the attempts of a task whose cancellation was written.
func (s *Service) heardCancel(msg *nats.Msg) {
	if (bus.Message{Header: msg.Header}).Deleted() {
		return
	}
	_, id, err := contract.ParseKey(strings.TrimPrefix(msg.Subject, s.bus.KV("")))
	if err != nil {
		return
	}
	var of []*attempt
	s.mu.Lock()
	for a := range s.attempts {
		if string(a.grant.TaskID) == id {
			of = append(of, a)
		}
	}
	s.mu.Unlock()
	// Whatever a cancellation sets off does not run under the lock (CANCEL-07).
	for _, a := range of {
		a.cancel(errCancelled)
	}
}

func (s *Service) source() string { return "/herdgate/executor/" + s.cfg.Name }
