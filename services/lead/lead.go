// Package lead is the lead service: the HTTP API, the engine that drives runs
// of the lead agent, and the endpoints by which programs on NATS submit tasks.
//
// It owns the runs (see package internal/run) and nothing else: tasks belong to
// the gate and the executors, which it reaches through NATS alone. Any number
// of leads may run; each answers for every run, and takes over the runs of one
// that is gone.
//
// When it is asked to stop it takes no more requests, gives active runs the
// drain time to end, hands over the rest to other leads, and leaves.
package lead

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/deferral"
	"github.com/herdgate/herdgate/internal/guard"
	"github.com/herdgate/herdgate/internal/mcp"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/rungroup"
	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/internal/workspace"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/agents"
	"github.com/herdgate/herdgate/services/lead/internal/dispatch"
	"github.com/herdgate/herdgate/services/lead/internal/feed"
	"github.com/herdgate/herdgate/services/lead/internal/httpapi"
	"github.com/herdgate/herdgate/services/lead/internal/run"
)

type (
	// HTTPConfig says how the HTTP API is served.
	HTTPConfig = httpapi.Config
	// Token is one bearer token of the HTTP API.
	Token = httpapi.Token
)

// Config is what a lead is started with. Zero values take the defaults.
type Config struct {
	// Name of the process, unique in the deployment; it appears in records,
	// leases and events.
	Name string
	// Version appears in the OpenAPI document and in the NATS service.
	Version string
	HTTP    HTTPConfig
	// Model is the configured name of the lead's model; empty is the first one.
	Model string
	// MaxTurns bounds the model calls of a run; default 100.
	MaxTurns int
	// RoleText replaces the first part of the lead's system prompt; the rules for
	// delegating stay.
	RoleText string
	// SubagentsEnabled lets runs delegate unless their request says otherwise.
	SubagentsEnabled bool
	// MaxConcurrent and MaxTotal are the configured limits of delegations per
	// answer and per run; nil takes what the gate runs, and 6.
	MaxConcurrent, MaxTotal *int
	// ShellAllowed offers the shell sub-agent.
	ShellAllowed bool
	// Guards end runs that go nowhere; what is not enabled in it is off.
	Guards guard.Config
	// Settings are what compaction is made of; nil: there is none.
	Settings *config.Config
	// WorkspaceRoot is the folder of all workspaces; empty gives the lead no
	// file tools. ToolOutputMaxChars bounds what one of them returns.
	WorkspaceRoot      string
	ToolOutputMaxChars int
	// RunLeaseTTL is how long a run stays with a lead that is not heard of; whole
	// seconds, default 15 s.
	RunLeaseTTL time.Duration
	// DrainTimeout is how long active runs may go on after a stop was asked for;
	// default 30 s. What is left then is handed over.
	DrainTimeout time.Duration
	// MaxActiveRuns bounds the runs that this process drives; default 64.
	MaxActiveRuns int
	// RunRetention is how long ended runs are kept; default 30 days.
	RunRetention time.Duration
}

// Deps is what the service needs from outside. Bus, Models and Subagents are
// required.
type Deps struct {
	Bus       *bus.Conn
	Models    *model.Registry
	Subagents *subagent.Registry
	// Catalogue, when set, takes the place of Subagents: its types change with
	// AgentStore, which may be nil, and with AgentFiles, read again after each
	// FilesInterval, which may be nil as well.
	Catalogue     *subagent.Catalogue
	AgentStore    agentstore.Store
	AgentFiles    func() (files []subagent.File, changed bool)
	FilesInterval time.Duration

	// Workspaces, when set, are what the lead's file tools work on, in place of a
	// folder beneath WorkspaceRoot.
	Workspaces *workspace.Store
	// Skills reads the skills of users.
	Skills skill.Loader
	// MCP, when set, has the external tools.
	MCP *mcp.Manager

	Log            zerolog.Logger
	TracerProvider trace.TracerProvider
	// Content, if not nil, puts prompts, answers and arguments into spans.
	Content    *telemetry.Content
	Registerer prometheus.Registerer
	// Probes serves /healthz, /readyz and /metrics of the API; nil leaves them out.
	Probes http.Handler
	// Door, when set, is where the HTTP API is served; it is open already.
	Door *httpapi.Door
	// Ready is told of the service's readiness; nil ignores it.
	Ready func(check string, err error)
	// Ask gets what is to be asked when somebody wants to know whether the lead is
	// ready, and nil when that is over; nil ignores it.
	Ask func(check string, f func(context.Context) error)
	Now func() time.Time
}

// CheckName is the name under which the lead reports its readiness.
const CheckName = "lead"

// Service is one lead process.
type Service struct {
	cfg      Config
	deps     Deps
	engine   *run.Engine
	http     *httpapi.Server
	endpoint *endpoint
	agents   *agents.Manager // nil when the types are fixed
}

// New returns a service; [Service.Run] starts it.
func New(cfg Config, deps Deps) (*Service, error) {
	if cfg.Name == "" {
		return nil, errors.New("lead: name is empty")
	}
	if deps.Bus == nil || deps.Models == nil || deps.Subagents == nil && deps.Catalogue == nil {
		return nil, errors.New("lead: bus, models and subagents must be given")
	}
	if err := deferral.CheckOrder(agent.Order); err != nil { // DEFER-07
		return nil, fmt.Errorf("lead: %w", err)
	}
	if deps.Now == nil {
		deps.Now = time.Now
	}
	if deps.Ready == nil {
		deps.Ready = func(string, error) {}
	}
	if deps.TracerProvider == nil {
		deps.TracerProvider = noop.NewTracerProvider()
	}
	if cfg.DrainTimeout <= 0 {
		cfg.DrainTimeout = 30 * time.Second
	}
	if cfg.HTTP.Version == "" {
		cfg.HTTP.Version = cfg.Version
	}
	var (
		types   httpapi.Types = deps.Subagents
		manager *agents.Manager
	)
	if deps.Catalogue != nil {
		types = deps.Catalogue
		manager = agents.New(agents.Config{
			Catalogue: deps.Catalogue, Store: deps.AgentStore, Files: deps.AgentFiles, FilesInterval: deps.FilesInterval, Log: deps.Log,
		})
	}
	lead, err := deps.Models.Get(cfg.Model)
	if err != nil {
		return nil, fmt.Errorf("lead.model: %w", err)
	}
	d := dispatch.New(deps.Bus, deps.Now, deps.Log, deps.TracerProvider)
	if cfg.Settings != nil && !cfg.Settings.Verification.ReceiptsEnabled {
		d.HideReceipts()
	}
	engine, err := run.New(run.Config{
		Name: cfg.Name, Model: cfg.Model, MaxTurns: cfg.MaxTurns, RoleText: cfg.RoleText,
		SubagentsEnabled: cfg.SubagentsEnabled, MaxConcurrent: cfg.MaxConcurrent, MaxTotal: cfg.MaxTotal, ShellAllowed: cfg.ShellAllowed, Guards: cfg.Guards, Settings: cfg.Settings,
		LeaseTTL: cfg.RunLeaseTTL, DrainTimeout: cfg.DrainTimeout, MaxActive: cfg.MaxActiveRuns, Retention: cfg.RunRetention,
	}, run.Deps{
		Bus: deps.Bus, Models: deps.Models, Catalogue: types, Dispatch: d, Tools: tools(cfg, deps.Workspaces), Skills: deps.Skills, MCP: deps.MCP,
		Log: deps.Log, TracerProvider: deps.TracerProvider, Content: deps.Content, Registerer: deps.Registerer, Now: deps.Now,
	})
	if err != nil {
		return nil, fmt.Errorf("lead: %w", err)
	}
	subagents := httpapi.FromRegistry(types, cfg.ShellAllowed)
	api, err := httpapi.New(cfg.HTTP, httpapi.Deps{
		Engine: engine, Dispatch: d, Feed: feed.New(deps.Bus, deps.Log), Registry: subagents, Agents: manager, Probes: deps.Probes, Door: deps.Door,
		DefaultModel: lead.Name(), Models: deps.Models.Names(), Log: deps.Log, TracerProvider: deps.TracerProvider, Now: deps.Now,
	})
	if err != nil {
		return nil, fmt.Errorf("lead: %w", err)
	}
	if deps.Registerer != nil {
		for _, c := range slices.Concat(d.Collectors(), api.Collectors()) {
			if err := deps.Registerer.Register(c); err != nil {
				return nil, fmt.Errorf("lead: metrics: %w", err)
			}
		}
	}
	return &Service{
		cfg: cfg, deps: deps, engine: engine, http: api, agents: manager,
		endpoint: newEndpoint(cfg, deps, d, subagents, lead.Name()),
	}, nil
}

// tools returns what opens the lead's own tools in the workspace of a thread:
// those for files. It has no shell; that is a sub-agent's.
func tools(cfg Config, workspaces *workspace.Store) func(contract.Tenant, contract.ThreadID) ([]tool.Tool, func(), error) {
	if workspaces != nil {
		return func(tenant contract.Tenant, thread contract.ThreadID) ([]tool.Tool, func(), error) {
			return workspaces.Tools(tenant, thread, "lead", tool.Options{OutputMaxChars: cfg.ToolOutputMaxChars})
		}
	}
	if cfg.WorkspaceRoot == "" {
		return nil
	}
	return func(tenant contract.Tenant, thread contract.ThreadID) ([]tool.Tool, func(), error) {
		ws, err := tool.NewWorkspace(tool.ThreadDir(cfg.WorkspaceRoot, tenant, thread))
		if err != nil {
			return nil, nil, err
		}
		return tool.Tools(ws, tool.Options{OutputMaxChars: cfg.ToolOutputMaxChars}), func() { _ = ws.Close() }, nil
	}
}

// errNotLoaded is the state of a lead until it knows the types that are stored.
var errNotLoaded = errors.New("starting: the stored sub-agent definitions have not been read yet")

// typesLoaded waits until the types that are stored are known.
func (s *Service) typesLoaded(ctx context.Context) {
	if s.agents == nil {
		return
	}
	select {
	case <-s.agents.Loaded():
	case <-ctx.Done():
	}
}

// Handler serves the HTTP API without a listener of its own; for tests and for
// programs that have one.
func (s *Service) Handler() http.Handler { return s.http.Handler() }

// OpenAPI returns the OpenAPI document of the HTTP API as JSON.
func (s *Service) OpenAPI() ([]byte, error) { return s.http.OpenAPI() }

// Listening is closed once the HTTP API can be reached; [Service.Addr] then
// tells where.
func (s *Service) Listening() <-chan struct{} { return s.http.Ready() }

// Addr is where the HTTP API listens; nil before [Service.Listening].
func (s *Service) Addr() net.Addr { return s.http.Addr() }

// Run serves until ctx is done and all that it started has ended. It must be
// called once.
func (s *Service) Run(ctx context.Context) error {
	s.deps.Ready(CheckName, errors.New("starting"))
	if s.deps.Ask != nil {
		s.deps.Ask(CheckName, s.engine.Check)
		defer s.deps.Ask(CheckName, nil)
	}
	loaded := make(chan struct{})
	follow := func(ctx context.Context) error { <-ctx.Done(); return nil }
	if s.agents != nil {
		follow = s.agents.Run
	}
	// What the engine may take to end is told to it by its own drain time; the
	// group's is for what hangs.
	err := rungroup.Run(ctx, s.deps.Log, s.cfg.DrainTimeout+20*time.Second,
		rungroup.Component{Name: "http", Run: s.http.Run},
		rungroup.Component{Name: "sub-agent definitions", Run: follow},
		rungroup.Component{Name: "runs", Run: func(ctx context.Context) error {
			// A run that is taken over needs the types that it began with.
			s.typesLoaded(ctx)
			close(loaded)
			return s.engine.Run(ctx)
		}},
		rungroup.Component{Name: "nats endpoints", Run: s.endpoint.run},
		rungroup.Component{Name: "readiness", Run: func(ctx context.Context) error {
			select {
			case <-s.http.Ready():
			case <-ctx.Done():
			}
			select {
			case <-loaded:
			default:
				s.deps.Ready(CheckName, errNotLoaded)
			}
			select {
			case <-loaded:
			case <-ctx.Done():
			}
			if ctx.Err() == nil {
				s.deps.Ready(CheckName, nil)
			}
			<-ctx.Done()
			s.deps.Ready(CheckName, errors.New("stopping"))
			return nil
		}},
	)
	if err != nil {
		return fmt.Errorf("lead: %w", err)
	}
	return nil
}
