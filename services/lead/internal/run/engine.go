package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/guard"
	"github.com/herdgate/herdgate/internal/mcp"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/internal/receipt"
	"github.com/herdgate/herdgate/internal/rungroup"
	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/dispatch"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

// Config is how runs are driven. Zero values take the defaults.
type Config struct {
	// Name is the process as others see it, without the random incarnation that
	// is added to it for the record's writer.
	Name string
	// Model is the configured name of the lead's model; empty is the first one.
	Model string
	// MaxTurns bounds the model calls of one run; default 100.
	MaxTurns int
	// RoleText replaces the first part of the lead's system prompt, who it is;
	// the rules for delegating stay.
	RoleText string
	// Settings are what compaction is made of, and say whether there are receipts;
	// nil: there is neither.
	Settings *config.Config
	// SubagentsEnabled lets runs delegate unless their request says otherwise.
	SubagentsEnabled bool
	// MaxConcurrent is the configured limit of delegations per answer, nil for
	// what the gate runs; MaxTotal that per run, nil for the default of 6.
	MaxConcurrent, MaxTotal *int
	// ShellAllowed says whether the shell sub-agent may be offered at all.
	ShellAllowed bool
	// Guards end a run that goes nowhere; what is not enabled in it is off.
	Guards guard.Config

	// LeaseTTL is how long a run stays with a lead that is not heard of; whole
	// seconds, default 15 s.
	LeaseTTL time.Duration
	// DrainTimeout is how long active runs may go on after the process was asked
	// to stop; then they are handed over. Default 30 s.
	DrainTimeout time.Duration
	// MaxActive bounds the runs that this process drives at once; default 64.
	MaxActive int
	// Retention is how long ended runs are kept; default 30 days.
	Retention time.Duration
	// WaitGrace is how much longer than its own limits a task is waited for;
	// default 60 s.
	WaitGrace time.Duration
	// CancelGrace bounds the wait for the tasks of a cancelled run; default 10 s.
	CancelGrace time.Duration
}

func (c Config) withDefaults() Config {
	def := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	if c.Name == "" {
		c.Name = "lead"
	}
	if c.MaxTurns <= 0 {
		c.MaxTurns = 100
	}
	if c.MaxActive <= 0 {
		c.MaxActive = 64
	}
	def(&c.LeaseTTL, 15*time.Second)
	def(&c.DrainTimeout, 30*time.Second)
	def(&c.Retention, 30*24*time.Hour)
	def(&c.WaitGrace, time.Minute)
	def(&c.CancelGrace, 10*time.Second)
	return c
}

func (c Config) validate() error {
	if c.LeaseTTL < time.Second || c.LeaseTTL%time.Second != 0 {
		return fmt.Errorf("run: lease ttl is %s; want whole seconds, at least 1 s", c.LeaseTTL)
	}
	if c.MaxTotal != nil {
		if err := delegation.CheckMaxTotal(*c.MaxTotal); err != nil {
			return fmt.Errorf("run: %w", err)
		}
	}
	return nil
}

// leaseMargin is how much earlier than the server a driver stops believing in
// its lease: clocks differ and what was begun must come to an end.
func (c Config) leaseMargin() time.Duration { return c.LeaseTTL / 5 }

// Catalogue is what the engine needs of the sub-agent definitions; a
// *subagent.Registry is one.
type Catalogue interface {
	// Visible returns the types that a run may use, in the order of the
	// catalogue: all for a nil list, none for an empty one.
	Visible(allowed []string, shellAllowed bool) []subagent.Definition
}

// Dispatcher hands tasks to the gate; see package dispatch.
type Dispatcher interface {
	Submit(ctx context.Context, req contract.TaskRequest) (dispatch.Accepted, error)
	Cancel(ctx context.Context, tenant contract.Tenant, id contract.TaskID, reason string) error
	Result(ctx context.Context, rec contract.TaskRecord) (string, error)
	Limits(ctx context.Context) (contract.AdmissionLimits, error)
}

// Deps is what the engine works with. Bus, Models, Catalogue and Dispatch must
// be set.
type Deps struct {
	Bus       *bus.Conn
	Models    *model.Registry
	Catalogue Catalogue
	Dispatch  Dispatcher
	// Tools returns the lead's own tools in a thread's workspace, and what ends
	// them. Nil gives it none.
	Tools func(tenant contract.Tenant, thread contract.ThreadID) ([]tool.Tool, func(), error)
	// Skills reads the skills of a run's user.
	Skills skill.Loader
	// MCP, when set, has the external tools.
	MCP *mcp.Manager
	Log zerolog.Logger
	// TracerProvider may be nil, for no traces.
	TracerProvider trace.TracerProvider
	Content        *telemetry.Content // nil: none is captured
	// Registerer may be nil, for no metrics.
	Registerer prometheus.Registerer
	// Now may be nil, for the system's clock.
	Now func() time.Time
}

// Engine drives runs. It is safe for concurrent use.
type Engine struct {
	cfg     Config
	deps    Deps
	c       *bus.Conn
	writer  *bus.Writer
	owner   string
	source  string
	tracer  trace.Tracer
	began   time.Time
	view    *view
	metrics metrics
	// refused is what the event stream has against our events, nil when it takes them.
	refused atomic.Pointer[refusal]

	// hard is the context of all work; kill ends it.
	hard context.Context //nolint:containedctx // the engine's own lifetime
	kill context.CancelCauseFunc

	mu      sync.Mutex
	active  map[contract.RunID]*drive
	pending int // places taken for runs that are being stored
	closing bool
	idle    chan struct{} // closed when closing and nothing is active
	wg      sync.WaitGroup
}

var _ runapi.Engine = (*Engine)(nil)

// New returns an engine. Runs can be started at once, but cancellations, waiting
// and take-overs work only while [Engine.Run] does.
func New(cfg Config, deps Deps) (*Engine, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if deps.Bus == nil || deps.Models == nil || deps.Catalogue == nil || deps.Dispatch == nil {
		return nil, errors.New("run: bus, models, catalogue and dispatch must be given")
	}
	if _, err := deps.Models.Get(cfg.Model); err != nil {
		return nil, fmt.Errorf("run: lead.model: %w", err)
	}
	if deps.TracerProvider == nil {
		deps.TracerProvider = noop.NewTracerProvider()
	}
	if deps.Now == nil {
		deps.Now = time.Now
	}
	m, err := newMetrics(deps.Registerer)
	if err != nil {
		return nil, err
	}
	e := &Engine{
		cfg: cfg, deps: deps, c: deps.Bus, writer: bus.NewWriter(cfg.Name), metrics: m,
		source: "/herdgate/lead/" + cfg.Name,
		tracer: telemetry.Tracer(deps.TracerProvider, "lead"),
		began:  time.Now(),
		active: map[contract.RunID]*drive{},
		idle:   make(chan struct{}),
	}
	e.owner = e.writer.ID()
	e.hard, e.kill = context.WithCancelCause(context.Background())
	e.view = newView()
	return e, nil
}

// clock is the monotonic time since the engine began.
func (e *Engine) clock() time.Duration { return time.Since(e.began) }

// Run watches the runs of all leads, takes over those whose lead is gone, and
// returns when ctx is done and the active runs have ended or were handed over:
// for that they have the drain time, or until rungroup's work context ends. It
// joins every goroutine of the engine, and must be called once.
func (e *Engine) Run(ctx context.Context) error {
	watchCtx, stopWatch := context.WithCancel(e.hard)
	defer stopWatch()
	var wg sync.WaitGroup
	failed := make(chan error, 1)
	wg.Go(func() {
		if err := e.watch(watchCtx); err != nil {
			failed <- err
		}
	})
	wg.Go(func() { e.sweep(watchCtx) })

	var err error
	select {
	case <-ctx.Done():
	case <-e.hard.Done():
	case err = <-failed:
	}
	e.drain(ctx)
	stopWatch()
	wg.Wait()
	e.kill(errDraining)
	return err
}

// drain takes no more runs, waits for the active ones, and hands over the rest.
func (e *Engine) drain(ctx context.Context) {
	e.mu.Lock()
	e.closing = true
	if len(e.active) == 0 && e.pending == 0 {
		e.closeIdle()
	}
	e.mu.Unlock()

	// Outside of a run group there is no work context and the drain time counts.
	cut := rungroup.Hard(ctx).Done()
	if rungroup.Hard(ctx) == ctx {
		cut = nil
	}
	timer := time.NewTimer(e.cfg.DrainTimeout)
	defer timer.Stop()
	select {
	case <-e.idle:
	case <-e.hard.Done():
	case <-timer.C:
	case <-cut:
	}
	e.mu.Lock()
	for _, d := range e.active {
		d.stop(errDraining)
	}
	e.mu.Unlock()
	e.wg.Wait()
}

// closeIdle tells that nothing is active. Caller must hold mu.
func (e *Engine) closeIdle() {
	select {
	case <-e.idle:
	default:
		close(e.idle)
	}
}

// place reserves room for one more run; release gives it back.
func (e *Engine) place() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closing:
		return fmt.Errorf("%w: this lead is stopping", leaderr.ErrUnavailable)
	case len(e.active)+e.pending >= e.cfg.MaxActive:
		return fmt.Errorf("%w: this lead drives %d runs, its limit; try again later", leaderr.ErrUnavailable, e.cfg.MaxActive)
	}
	e.pending++
	return nil
}

func (e *Engine) release() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pending--
	e.checkIdle()
}

// checkIdle closes idle when the last run is gone. Caller must hold mu.
func (e *Engine) checkIdle() {
	if e.closing && len(e.active) == 0 && e.pending == 0 {
		e.closeIdle()
	}
}

// launch turns a reserved place into an active run and drives it.
func (e *Engine) launch(d *drive, span trace.Span) {
	e.mu.Lock()
	e.pending--
	e.active[d.id] = d
	if e.closing {
		d.stop(errDraining)
	}
	e.wg.Add(1)
	e.mu.Unlock()
	e.metrics.active.Inc()
	go func() {
		defer e.wg.Done()
		defer span.End()
		d.drive(telemetry.WithContent(trace.ContextWithSpan(d.ctx, span), e.deps.Content))
		d.end()
		e.metrics.active.Dec()
		e.mu.Lock()
		delete(e.active, d.id)
		e.checkIdle()
		e.mu.Unlock()
		// What is left of the run, if anything, is for the sweep.
		e.view.poke()
	}()
}

func (e *Engine) drives(id contract.RunID) *drive {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.active[id]
}

// Start implements [runapi.Engine].
func (e *Engine) Start(ctx context.Context, in runapi.RunInput) (contract.RunRecord, error) {
	rec, err := e.newRecord(in)
	if err != nil {
		return contract.RunRecord{}, fmt.Errorf("start run: %w", err)
	}
	if err := e.place(); err != nil {
		return contract.RunRecord{}, fmt.Errorf("start run: %w", err)
	}
	limits, err := e.deps.Dispatch.Limits(ctx)
	if err != nil {
		e.release()
		return contract.RunRecord{}, fmt.Errorf("start run: %w", err)
	}
	rec.Options = e.options(in, limits)
	conv, err := e.history(ctx, rec.Tenant, rec.ThreadID)
	if err != nil {
		e.release()
		return contract.RunRecord{}, fmt.Errorf("start run: history of the thread: %w", err)
	}
	conv.UserID, conv.UserRole, conv.Attributes = in.UserID, in.UserRole, in.Attributes
	conv.Messages = append(conv.Messages, model.Message{Role: model.RoleUser, Text: in.Input})
	number(conv.Messages, 0)

	spanCtx, span := e.tracer.Start(ctx, "invoke_agent lead", trace.WithAttributes(
		telemetry.AttrRunID.String(string(rec.RunID)), telemetry.AttrTenant.String(string(rec.Tenant)),
		telemetry.AttrGenAIOperation.String("invoke_agent"), telemetry.AttrGenAIAgentName.String("lead"), telemetry.AttrGenAIConversationID.String(string(rec.ThreadID)),
	))
	rec.TraceParent, _ = telemetry.TraceParent(spanCtx)
	rec.TraceID = telemetry.TraceID(spanCtx)

	d := newDrive(e, rec, conv, 0)
	// The write is bound by the caller's patience; an answer that does not come
	// leaves a record without a lease, which somebody takes over.
	first, cancel := context.WithTimeout(ctx, 3*bus.WriteTimeout)
	defer cancel()
	err = d.write(first, func(*contract.RunRecord, *conversation) {})
	if err == nil {
		if err = d.begun(first); err != nil {
			d.forget(ctx)
		}
	}
	if err == nil {
		err = d.lease(first)
	}
	if err != nil {
		telemetry.Fail(span, telemetry.ErrorClass(err), "the run could not be started")
		span.End()
		d.end()
		e.release()
		return contract.RunRecord{}, fmt.Errorf("start run: %w", outside(err))
	}
	e.launch(d, span)
	return d.snapshot(), nil
}

// newRecord checks the input and makes a record of it.
func (e *Engine) newRecord(in runapi.RunInput) (contract.RunRecord, error) {
	thread := in.ThreadID
	if thread == "" {
		thread = contract.ThreadID(newID("th_"))
	}
	var faults []error
	if err := errors.Join(in.Tenant.Validate(), thread.Validate()); err != nil {
		faults = append(faults, err)
	}
	switch {
	case strings.TrimSpace(in.Input) == "":
		faults = append(faults, errors.New("input is empty"))
	case len(in.Input) > runapi.MaxInputBytes:
		faults = append(faults, fmt.Errorf("%w: input has %d bytes; want at most %d", contract.ErrTooLarge, len(in.Input), runapi.MaxInputBytes))
	case !utf8.ValidString(in.Input):
		faults = append(faults, errors.New("input is not valid UTF-8"))
	}
	if len(in.Metadata) > runapi.MaxMetadata {
		faults = append(faults, fmt.Errorf("metadata has %d entries; want at most %d", len(in.Metadata), runapi.MaxMetadata))
	}
	if len(in.Tags) > runapi.MaxTags {
		faults = append(faults, fmt.Errorf("tags has %d entries; want at most %d", len(in.Tags), runapi.MaxTags))
	}
	if n := extraBytes(in); n > maxExtraBytes {
		faults = append(faults, fmt.Errorf("metadata, tags and allowed_subagents have %d bytes together; want at most %d", n, maxExtraBytes))
	}
	name := in.Model
	if name == "" {
		name = e.cfg.Model
	}
	m, err := e.deps.Models.Get(name)
	if err != nil {
		faults = append(faults, err)
	}
	if err := errors.Join(faults...); err != nil {
		return contract.RunRecord{}, fmt.Errorf("%w: %w", leaderr.ErrInvalid, err)
	}
	return contract.RunRecord{
		RunID: contract.RunID(newID("r_")), ThreadID: thread, Tenant: in.Tenant, Status: contract.RunRunning,
		Input: in.Input, Model: m.Name(), Owner: e.owner, Metadata: receipt.Strip(in.Metadata), Tags: in.Tags, CreatedAt: e.deps.Now().UTC(),
	}, nil
}

// maxExtraBytes bounds what a caller may hang on a run beside its input.
const maxExtraBytes = 64 << 10

func extraBytes(in runapi.RunInput) int {
	n := 0
	for k, v := range in.Metadata {
		n += len(k) + len(v)
	}
	for _, s := range slices.Concat(in.Tags, in.AllowedSubagents, in.AvailableSkills) {
		n += len(s)
	}
	return n
}

// options resolves the limits of a run, once: the prompt, the trimming and the
// tool all go by these numbers.
func (e *Engine) options(in runapi.RunInput, limits contract.AdmissionLimits) contract.RunOptions {
	requested := in.MaxConcurrentSubagents
	if requested == nil {
		requested = e.cfg.MaxConcurrent
	}
	enabled := e.cfg.SubagentsEnabled
	if in.SubagentEnabled != nil {
		enabled = *in.SubagentEnabled
	}
	return contract.RunOptions{
		SubagentEnabled:        enabled,
		MaxConcurrentSubagents: delegation.Clamp(requested, &limits.MaxRunning),
		MaxTotalSubagents:      delegation.MaxTotal(e.cfg.MaxTotal, in.MaxTotalSubagents),
		AllowedSubagents:       in.AllowedSubagents,
		AvailableSkills:        in.AvailableSkills,
	}
}

// Get implements [runapi.Engine].
func (e *Engine) Get(ctx context.Context, tenant contract.Tenant, id contract.RunID) (contract.RunRecord, error) {
	rec, _, err := e.read(ctx, id)
	if err == nil && rec.Tenant != tenant {
		err = leaderr.ErrNotFound
	}
	if err != nil {
		return contract.RunRecord{}, fmt.Errorf("run %.80s: %w", id, outside(err))
	}
	return rec, nil
}

// read returns a run's record and its revision from the stream's leader.
func (e *Engine) read(ctx context.Context, id contract.RunID) (contract.RunRecord, uint64, error) {
	if id.Validate() != nil {
		return contract.RunRecord{}, 0, leaderr.ErrNotFound
	}
	m, err := e.c.Last(ctx, e.c.RunStream(), e.c.RunKV(contract.RunKey(id)))
	if errors.Is(err, bus.ErrNotFound) || err == nil && m.Deleted() {
		return contract.RunRecord{}, 0, leaderr.ErrNotFound
	}
	if err != nil {
		return contract.RunRecord{}, 0, err
	}
	rec, err := contract.DecodeRunRecord(m.Data)
	return rec, m.Seq, err
}

// Cancel implements [runapi.Engine].
func (e *Engine) Cancel(ctx context.Context, tenant contract.Tenant, id contract.RunID) error {
	rec, err := e.Get(ctx, tenant, id)
	if err != nil {
		return fmt.Errorf("cancel: %w", err)
	}
	if rec.Status.Terminal() {
		return leaderr.RunFinished(id, rec.Status)
	}
	body, err := json.Marshal(contract.Cancel{RequestedAt: e.deps.Now().UTC()})
	if err != nil {
		return err
	}
	retry := newBackOff()
	for deadline := e.clock() + 2*bus.WriteTimeout; ; {
		_, err = e.c.Publish(ctx, bus.Write{Subject: e.c.RunKV(contract.RunCancelKey(id)), Data: body, TTL: cancelTTL})
		if err == nil {
			// An end that came before the wish is not touched by it.
			if rec, err := e.Get(ctx, tenant, id); err == nil && rec.Status.Terminal() && rec.Status != contract.RunCancelled {
				return leaderr.RunFinished(id, rec.Status)
			}
			return nil
		}
		if !errors.Is(err, bus.ErrDoubt) || e.clock() > deadline || pause.For(ctx, retry.NextBackOff()) != nil {
			return fmt.Errorf("cancel run %s: %w", id, outside(err))
		}
	}
}

// cancelTTL keeps a cancellation as long as anybody may still have to hear it.
const cancelTTL = 24 * time.Hour

// Wait implements [runapi.Engine].
func (e *Engine) Wait(ctx context.Context, tenant contract.Tenant, id contract.RunID) (contract.RunRecord, error) {
	if rec, err := e.Get(ctx, tenant, id); err != nil || rec.Status.Terminal() {
		return rec, err
	}
	ended, stop := e.view.await(id)
	defer stop()
	for {
		// Read after the wait was registered: the end may have come before.
		rec, err := e.Get(ctx, tenant, id)
		if err != nil || rec.Status.Terminal() {
			return rec, err
		}
		select {
		case <-ended:
			ended = nil // the next read sees the end
		case <-ctx.Done():
			return rec, fmt.Errorf("wait for run %s: %w", id, context.Cause(ctx))
		case <-e.hard.Done():
			return rec, fmt.Errorf("wait for run %s: %w: this lead is stopping", id, leaderr.ErrUnavailable)
		}
	}
}

// outside turns an error of ours into one that the caller knows.
func outside(err error) error {
	switch {
	case errors.Is(err, errTooLarge):
		return fmt.Errorf("%w: %w", leaderr.ErrInvalid, err)
	case errors.Is(err, bus.ErrDoubt), errors.Is(err, bus.ErrFull), errors.Is(err, errLost), errors.Is(err, errDraining):
		return fmt.Errorf("%w: %w", leaderr.ErrUnavailable, err)
	}
	return err
}

// newID returns a fresh id that sorts by the time it was made.
func newID(prefix string) string { return prefix + strings.ToLower(ulid.Make().String()) }
