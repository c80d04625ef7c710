package lead

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"github.com/oklog/ulid/v2"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client/wire"
	describe "github.com/herdgate/herdgate/internal/endpoint"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/dispatch"
	"github.com/herdgate/herdgate/services/lead/internal/httpapi"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

// Bounds of the endpoints.
const (
	// maxCalls is how many requests are answered at the same time.
	maxCalls = 64
	// callTimeout bounds one of them.
	callTimeout = 25 * time.Second
	// maxReplyResult bounds the result in an answer, so that it stays below the
	// payload limit of a NATS server even if JSON makes six bytes of one.
	maxReplyResult = 128 << 10
)

// TaskSubmit is the request of the endpoint task.submit: the body of
// POST /v1/tasks, and on whose behalf. Who may use the endpoint at all, and
// speak for a tenant, is a matter of NATS permissions.
type TaskSubmit struct {
	wire.TaskRequest
	// Tenant is the default one when left out.
	Tenant   contract.Tenant `json:"tenant,omitempty"`
	UserID   string          `json:"user_id,omitempty"`
	UserRole string          `json:"user_role,omitempty"`
	// Attributes are what rules of authorisation go by.
	Attributes map[string]string `json:"authz_attributes,omitempty"`
}

// TaskCall is the request of the endpoints task.get and task.cancel.
type TaskCall struct {
	Tenant contract.Tenant `json:"tenant,omitempty"`
	TaskID contract.TaskID `json:"task_id"`
	// Reason of a cancellation, for people.
	Reason string `json:"reason,omitempty"`
}

// endpoint serves task.submit, task.get and task.cancel over NATS, with the
// bodies of the HTTP API. Every lead answers; NATS picks one. A refusal is a
// wire.Problem in the body, its status in the header Nats-Service-Error-Code.
// Each is served on a second subject as well, which ends in the tenant.
type endpoint struct {
	conn      *bus.Conn
	version   string
	dispatch  *dispatch.Dispatcher
	subagents httpapi.Subagents
	models    []string
	model     string
	now       func() time.Time
	log       zerolog.Logger
	tracer    trace.Tracer
	places    chan struct{}
}

func newEndpoint(cfg Config, deps Deps, d *dispatch.Dispatcher, s httpapi.Subagents, model string) *endpoint {
	return &endpoint{
		conn: deps.Bus, version: semver(cfg.Version), dispatch: d, subagents: s, models: deps.Models.Names(), model: model, now: deps.Now,
		log: deps.Log, tracer: telemetry.Tracer(deps.TracerProvider, "lead"), places: make(chan struct{}, maxCalls),
	}
}

// semver is v if the library takes it as a version.
func semver(v string) string {
	parts := strings.SplitN(strings.SplitN(v, "-", 2)[0], ".", 3)
	if len(parts) != 3 {
		return "0.0.0"
	}
	for _, p := range parts {
		if _, err := strconv.ParseUint(p, 10, 32); err != nil {
			return "0.0.0"
		}
	}
	return v
}

// run serves until ctx is done, and then waits for what is being answered.
func (e *endpoint) run(ctx context.Context) error {
	svc, err := micro.AddService(e.conn.NC, micro.Config{
		Name: "herdgate-lead", Version: e.version, Description: "Submits, shows and cancels tasks.",
	})
	if err != nil {
		return fmt.Errorf("announce the NATS endpoints: %w", err)
	}
	var (
		mu      sync.Mutex
		stopped bool
		wg      sync.WaitGroup
	)
	calls, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	add := func(name, description string, handle handler) error {
		subject := e.conn.Names.Service("task", name)
		described, err := describe.Describe("task."+name, description)
		if err != nil {
			return err
		}
		serve := describe.Handler(e.log, func(r micro.Request) {
			// This is the subscription's goroutine: it must not wait.
			mu.Lock()
			defer mu.Unlock()
			select {
			case e.places <- struct{}{}:
			default:
				e.refuse(r, problem(http.StatusServiceUnavailable, wire.CodeUnavailable, fmt.Sprintf("%d requests are being answered already; try again", maxCalls)))
				return
			}
			if stopped {
				<-e.places
				e.refuse(r, problem(http.StatusServiceUnavailable, wire.CodeUnavailable, "this lead is stopping; try again"))
				return
			}
			wg.Go(func() {
				defer func() { <-e.places }()
				e.answer(calls, name, r, handle)
			})
		})
		return errors.Join(
			svc.AddEndpoint(name, serve, micro.WithEndpointSubject(subject), described),
			svc.AddEndpoint(name+"-tenant", serve, micro.WithEndpointSubject(describe.Bound(subject, describe.AnyTenant)), described),
		)
	}
	err = errors.Join(
		add("submit", "Submits a task, as POST /v1/tasks does; the answer has its id.", e.submit),
		add("get", "Shows a task: status, result or error, usage, times.", e.get),
		add("cancel", "Cancels a task that has not ended.", e.cancel),
	)
	if err == nil {
		// Without this the first request may find nobody.
		flush, done := context.WithTimeout(ctx, bus.WriteTimeout)
		if flushErr := e.conn.NC.FlushWithContext(flush); flushErr != nil && ctx.Err() == nil {
			e.log.Warn().Err(flushErr).Msg("the NATS endpoints may not be announced yet")
		}
		done()
		<-ctx.Done()
	}
	if stopErr := svc.Stop(); stopErr != nil {
		e.log.Debug().Err(stopErr).Msg("stop the NATS endpoints")
	}
	// Once the server knows, no request comes to us any more: others answer it.
	gone, done := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	if flushErr := e.conn.NC.FlushWithContext(gone); flushErr != nil {
		e.log.Debug().Err(flushErr).Msg("flush after stopping the NATS endpoints")
	}
	done()
	mu.Lock()
	stopped = true
	mu.Unlock()
	wg.Wait()
	if err != nil {
		return fmt.Errorf("announce the NATS endpoints: %w", err)
	}
	return nil
}

// handler answers a request; agree returns the tenant it is made for.
type handler func(ctx context.Context, body []byte, agree func(contract.Tenant) (contract.Tenant, error)) (any, error)

func (e *endpoint) answer(ctx context.Context, name string, r micro.Request, handle handler) {
	ctx, cancel := context.WithTimeout(telemetry.Extract(ctx, nats.Header(r.Headers())), callTimeout)
	defer cancel()
	ctx, span := e.tracer.Start(ctx, "task."+name, trace.WithSpanKind(trace.SpanKindServer))
	defer span.End()
	out, err := handle(ctx, r.Data(), func(asked contract.Tenant) (contract.Tenant, error) {
		tenant, err := describe.TenantOf(e.conn.Names.Service("task", name), r.Subject(), asked)
		if err != nil {
			return "", fmt.Errorf("%w: %w", leaderr.ErrInvalid, err)
		}
		return tenantOr(tenant), nil
	})
	if err != nil {
		telemetry.Fail(span, telemetry.ErrorClass(err), "refused")
		e.refuse(r, e.problemOf(err))
		return
	}
	body, err := json.Marshal(out)
	if err == nil {
		err = r.Respond(body)
	}
	if err != nil {
		e.log.Warn().Err(err).Str("endpoint", "task."+name).Msg("an answer could not be sent")
	}
}

// refuse answers with a problem. It does not use r.Error, whose bookkeeping is
// read by the library as soon as its handler has returned: answers come later.
func (e *endpoint) refuse(r micro.Request, p wire.Problem) {
	body, err := json.Marshal(p)
	if err == nil {
		err = r.Respond(body, micro.WithHeaders(micro.Headers{
			micro.ErrorCodeHeader: {strconv.Itoa(p.Status)},
			micro.ErrorHeader:     {strings.NewReplacer("\r", " ", "\n", " ").Replace(p.Detail)},
		}))
	}
	if err != nil {
		e.log.Warn().Err(err).Msg("a refusal could not be sent")
	}
}

func problem(status int, code, detail string) wire.Problem {
	return wire.Problem{Title: http.StatusText(status), Status: status, Code: code, Detail: detail}
}

// problemOf is the same as the HTTP API says.
func (e *endpoint) problemOf(err error) wire.Problem {
	var finished *leaderr.FinishedError
	switch {
	case errors.As(err, &finished):
		p := problem(http.StatusConflict, wire.CodeAlreadyFinished, finished.Error())
		p.FinishedStatus = finished.Status
		return p
	case errors.Is(err, leaderr.ErrNotFound):
		return problem(http.StatusNotFound, wire.CodeNotFound, err.Error())
	case errors.Is(err, leaderr.ErrQueueFull):
		return problem(http.StatusTooManyRequests, wire.CodeQueueFull, "the queue is full and nothing was stored; try again later")
	case errors.Is(err, contract.ErrTooLarge):
		return problem(http.StatusRequestEntityTooLarge, wire.CodePayloadTooLarge, err.Error())
	case errors.Is(err, leaderr.ErrInvalid), errors.Is(err, contract.ErrInvalidMessage), errors.Is(err, contract.ErrInvalidID):
		return problem(http.StatusBadRequest, wire.CodeInvalidRequest, err.Error())
	case errors.Is(err, leaderr.ErrUnavailable), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return problem(http.StatusServiceUnavailable, wire.CodeUnavailable, err.Error())
	}
	e.log.Error().Err(err).Msg("NATS endpoint: internal error")
	return problem(http.StatusInternalServerError, wire.CodeInternal, "an internal error; the log has the details")
}

// read decodes a request; what is wrong with it is told.
func read(body []byte, into any) error {
	if err := contract.CheckDepth(body, contract.MaxDepth); err != nil {
		return fmt.Errorf("%w: %w", leaderr.ErrInvalid, err)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%w: the request is not JSON as expected: %w", leaderr.ErrInvalid, err)
	}
	return nil
}

func tenantOr(t contract.Tenant) contract.Tenant {
	if t == "" {
		return contract.DefaultTenant
	}
	return t
}

func (e *endpoint) submit(ctx context.Context, body []byte, agree func(contract.Tenant) (contract.Tenant, error)) (any, error) {
	var in TaskSubmit
	if err := read(body, &in); err != nil {
		return nil, err
	}
	var err error
	if in.Tenant, err = agree(in.Tenant); err != nil {
		return nil, err
	}
	req, err := e.request(in)
	if err != nil {
		return nil, err
	}
	acc, err := e.dispatch.Submit(ctx, req)
	if err != nil {
		return nil, err
	}
	return wire.TaskAccepted{TaskID: req.TaskID, RunID: req.RunID, ThreadID: req.ThreadID, Status: contract.TaskQueued, QueuePosition: acc.QueuePosition}, nil
}

// request makes a task request of what came in; the limits that the HTTP API
// puts on it are the contract's, which Submit checks, and those here.
func (e *endpoint) request(in TaskSubmit) (contract.TaskRequest, error) {
	invalid := func(format string, args ...any) (contract.TaskRequest, error) {
		return contract.TaskRequest{}, fmt.Errorf("%w: "+format, append([]any{leaderr.ErrInvalid}, args...)...)
	}
	def, ok := e.subagents.Resolve(in.SubagentType)
	if !ok {
		var names []string
		for _, s := range e.subagents.Catalogue() {
			if s.Usable() {
				names = append(names, s.Name)
			}
		}
		return invalid("subagent_type %q is not known; known are %q", in.SubagentType, names)
	}
	if strings.TrimSpace(in.Prompt) == "" {
		return invalid("prompt is blank")
	}
	for i, c := range in.AcceptanceCriteria {
		if n := utf8.RuneCountInString(c); n > contract.MaxCriterionChars {
			return invalid("acceptance_criteria[%d] has %d characters; want at most %d", i, n, contract.MaxCriterionChars)
		}
	}
	if in.Model != "" {
		known := false
		for _, m := range e.models {
			known = known || m == in.Model
		}
		if !known {
			return invalid("model %q is not configured; configured are %q", in.Model, e.models)
		}
		def.Model = in.Model
	}
	if t := in.TimeoutSeconds; t != nil {
		if *t < 1 || *t > 86400 {
			return invalid("timeout_seconds is %d; want 1 to 86400", *t)
		}
		def.TimeoutSeconds = *t
	}
	description := strings.TrimSpace(in.Description)
	if description == "" {
		description, _, _ = strings.Cut(strings.TrimSpace(in.Prompt), "\n")
		if r := []rune(description); len(r) > 80 {
			description = string(r[:79]) + "…"
		}
	}
	id := func(prefix string) string { return prefix + strings.ToLower(ulid.Make().String()) }
	thread := contract.ThreadID(in.ThreadID)
	if thread == "" {
		thread = contract.ThreadID(id("th_"))
	}
	return contract.TaskRequest{
		ContractVersion: contract.Version,
		TaskID:          contract.TaskID(id("t_")), RunID: contract.RunID(id("r_")), ThreadID: thread, Tenant: in.Tenant,
		Subagent: def, Description: description, Prompt: in.Prompt, AcceptanceCriteria: in.AcceptanceCriteria, ParentModel: e.model,
		Identity:  contract.Identity{UserID: in.UserID, UserRole: in.UserRole, Attributes: in.Attributes, IsSubagent: true},
		CreatedAt: e.now().UTC(),
	}, nil
}

func (e *endpoint) get(ctx context.Context, body []byte, agree func(contract.Tenant) (contract.Tenant, error)) (any, error) {
	var in TaskCall
	if err := read(body, &in); err != nil {
		return nil, err
	}
	tenant, err := agree(in.Tenant)
	if err != nil {
		return nil, err
	}
	view, err := e.dispatch.Get(ctx, tenant, in.TaskID)
	if err != nil {
		return nil, err
	}
	if r := view.Result; r != nil && len(*r) > maxReplyResult {
		// The whole of it does not fit into a message; the HTTP API has it.
		cut := strings.ToValidUTF8((*r)[:maxReplyResult], "")
		view.Result, view.ResultTruncated = &cut, true
	}
	return view, nil
}

func (e *endpoint) cancel(ctx context.Context, body []byte, agree func(contract.Tenant) (contract.Tenant, error)) (any, error) {
	var in TaskCall
	if err := read(body, &in); err != nil {
		return nil, err
	}
	tenant, err := agree(in.Tenant)
	if err != nil {
		return nil, err
	}
	reason := in.Reason
	if reason == "" {
		reason = "cancelled over NATS"
	}
	if err := e.dispatch.Cancel(ctx, tenant, in.TaskID, reason); err != nil {
		return nil, err
	}
	return wire.Cancelling{TaskID: in.TaskID, Status: wire.StatusCancelling}, nil
}
