// Package httpapi is the lead's HTTP interface: runs, tasks, events as pages
// and as server-sent events, the gate's state, health. The OpenAPI document is
// made from the Go types of package wire.
//
// Whatever belongs to another tenant answers like what does not exist. Errors
// are RFC 9457 problems with a stable code.
package httpapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/oklog/ulid/v2"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/fault"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/agents"
	"github.com/herdgate/herdgate/services/lead/internal/dispatch"
	"github.com/herdgate/herdgate/services/lead/internal/feed"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

// Config says how to serve.
type Config struct {
	// Addr is where to listen. With AuthNone it must be a loopback address.
	Addr string
	// AuthMode is AuthNone (default) or AuthTokens.
	AuthMode string
	Tokens   []Token
	// MaxBodyBytes bounds a request's body; default 1 MiB.
	MaxBodyBytes int64
	// BodyTimeout is how long a client may take to send its body; default 30 s.
	BodyTimeout time.Duration
	// MaxStreams bounds the open event streams; default 1000.
	MaxStreams int
	// MaxCalls bounds the calls of MCP clients that wait for a task; default 256.
	MaxCalls int
	// KeepAlive is the time between two comment lines on a stream; default 15 s.
	KeepAlive time.Duration
	// WriteTimeout cuts off a reader of a stream that takes nothing for so long;
	// default 10 s.
	WriteTimeout time.Duration
	// Grace bounds the wait for open requests at the end; default 10 s.
	Grace time.Duration
	// Getenv reads the tokens; default os.Getenv.
	Getenv func(string) string
	// Version appears in the OpenAPI document.
	Version string
}

func (c Config) withDefaults() Config {
	if c.MaxBodyBytes == 0 {
		c.MaxBodyBytes = 1 << 20
	}
	if c.BodyTimeout == 0 {
		c.BodyTimeout = 30 * time.Second
	}
	if c.MaxStreams == 0 {
		c.MaxStreams = 1000
	}
	if c.MaxCalls == 0 {
		c.MaxCalls = 256
	}
	if c.KeepAlive == 0 {
		c.KeepAlive = 15 * time.Second
	}
	if c.WriteTimeout == 0 {
		c.WriteTimeout = 10 * time.Second
	}
	if c.Grace == 0 {
		c.Grace = 10 * time.Second
	}
	if c.Getenv == nil {
		c.Getenv = os.Getenv
	}
	if c.Version == "" {
		c.Version = contract.Version
	}
	return c
}

// Subagents is the registry of sub-agent types as this server needs it.
type Subagents interface {
	// Resolve returns the definition that a task gets; false for types that do
	// not exist or must not be used from outside.
	Resolve(name string) (contract.Subagent, bool)
	// Catalogue lists every definition, built-in types first; what Resolve knows
	// is usable.
	Catalogue() []wire.Subagent
}

// Engine drives runs; see runapi.
type Engine = runapi.Engine

// Deps are the parts behind the interface.
type Deps struct {
	Engine   Engine
	Dispatch *dispatch.Dispatcher
	Feed     *feed.Feed
	Registry Subagents
	// Agents are the definitions that administrators make; nil: there are none.
	Agents *agents.Manager
	// Probes serves /healthz, /readyz and /metrics.
	Probes http.Handler
	// Door, when set, is open already, and Run serves behind it.
	Door *Door
	// DefaultModel is what "inherit" stands for in tasks that come without a
	// lead; empty leaves it to the executor.
	DefaultModel string
	// Models, when not nil, are the names that a request may use.
	Models         []string
	Log            zerolog.Logger
	TracerProvider trace.TracerProvider
	// Now and NewID default to the clock and to lower-case ULIDs.
	Now   func() time.Time
	NewID func() string
}

// Server serves the interface.
type Server struct {
	cfg     Config
	deps    Deps
	log     zerolog.Logger
	tracer  trace.Tracer
	auth    *authenticator
	handler http.Handler
	api     huma.API

	ready   chan struct{}
	addr    net.Addr
	started atomic.Bool

	// stopping is done when Run ends: streams and waits then end.
	stopping context.Context
	stop     context.CancelCauseFunc
	streams  atomic.Int64
	metrics  metrics
}

// errStopping is the cause of stopping.
var errStopping = errors.New("the server is shutting down")

// New checks the configuration and builds the server; it does not listen yet.
// It refuses to serve without authentication beyond loopback.
func New(cfg Config, deps Deps) (*Server, error) {
	cfg = cfg.withDefaults()
	auth, err := newAuthenticator(cfg)
	if err != nil {
		return nil, err
	}
	if deps.Engine == nil || deps.Dispatch == nil || deps.Feed == nil || deps.Registry == nil {
		return nil, errors.New("httpapi: engine, dispatch, feed and registry are needed")
	}
	if deps.Now == nil {
		deps.Now = time.Now
	}
	if deps.NewID == nil {
		deps.NewID = func() string { return strings.ToLower(ulid.Make().String()) }
	}
	s := &Server{
		cfg: cfg, deps: deps, log: deps.Log, auth: auth,
		tracer: telemetry.Tracer(deps.TracerProvider, "httpapi"), ready: make(chan struct{}), metrics: newMetrics(),
	}
	s.stopping, s.stop = context.WithCancelCause(context.Background())
	useProblems()

	hc := huma.DefaultConfig("Herdgate", cfg.Version)
	hc.Info.Description = "Delegation of sub-agent work: runs of a lead agent, single tasks, and the events of both."
	hc.CreateHooks = nil // no $schema in answers
	hc.DocsPath, hc.SchemasPath = "", ""
	if !auth.open {
		hc.Components.SecuritySchemes = map[string]*huma.SecurityScheme{"bearer": {Type: "http", Scheme: "bearer"}}
		hc.Security = []map[string][]string{{"bearer": {}}}
	}
	mux := http.NewServeMux()
	s.api = humago.New(mux, hc)
	s.registerRuns()
	s.registerTasks()
	s.registerEvents()
	s.registerAdmission()
	s.registerSubagents()
	s.registerMCP(mux)
	openAnswers(hc.Components.Schemas)
	if deps.Probes != nil {
		for _, p := range []string{"/healthz", "/readyz", "/metrics"} {
			mux.Handle("GET "+p, deps.Probes)
		}
	}
	s.handler = s.observe(s.guardOrigin(s.authenticate(s.bufferBody(routed(mux)))))
	return s, nil
}

// openAnswers makes the schemas say of answers what the interface promises:
// later versions may add fields, and figures that are not known are null.
// Requests stay closed, so that a misspelt field is refused.
func openAnswers(reg huma.Registry) {
	for name, schema := range reg.Map() {
		if schema.Type != huma.TypeObject || strings.HasSuffix(name, "Request") {
			continue
		}
		schema.AdditionalProperties = true
		if usage := schema.Properties["usage"]; usage != nil && usage.Ref != "" {
			schema.Properties["usage"] = &huma.Schema{Description: usage.Description, AnyOf: []*huma.Schema{{Ref: usage.Ref}, {Type: "null"}}}
		}
		if name == "EventRecord" {
			task := *schema.Properties["task_id"]
			task.Nullable, task.Description = true, "null in events of a run"
			schema.Properties["task_id"] = &task
		}
	}
}

// Handler serves the whole interface.
func (s *Server) Handler() http.Handler { return s.handler }

// OpenAPI returns the OpenAPI document as JSON.
func (s *Server) OpenAPI() ([]byte, error) { return s.api.OpenAPI().MarshalJSON() }

// Ready is closed once the server listens.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Addr is where the server listens; nil before [Server.Ready].
func (s *Server) Addr() net.Addr {
	select {
	case <-s.ready:
		return s.addr
	default:
		return nil
	}
}

// Run listens, unless there is a door already, and serves until ctx is done. It then stops accepting, ends the
// event streams with a comment that says why, waits for open requests, at most
// the grace time, and returns nil. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	if s.started.Swap(true) {
		return errors.New("httpapi: Run was called twice")
	}
	door := s.deps.Door
	if door == nil {
		var err error
		if door, err = openDoor(ctx, s.cfg.Addr, s.handler, s.log); err != nil {
			return err
		}
	}
	defer door.Close()
	door.handler.Store(&s.handler)
	s.addr = door.addr
	close(s.ready)
	s.log.Info().Str("addr", s.addr.String()).Msg("http: serving")
	select {
	case err := <-door.served:
		s.stop(errStopping)
		return fmt.Errorf("http: %w", err)
	case <-ctx.Done():
	}
	s.stop(errStopping)
	fresh, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Grace)
	defer cancel()
	if err := door.srv.Shutdown(fresh); err != nil {
		s.log.Warn().Err(err).Msg("http: some requests were cut off")
	}
	return nil
}

// logWriter sends the messages of net/http to the log.
type logWriter struct{ log zerolog.Logger }

func (w logWriter) Write(p []byte) (int, error) {
	w.log.Debug().Str("source", "net/http").Msg(strings.TrimSpace(string(p)))
	return len(p), nil
}

// untilStop returns a context that ends with the request or with the server.
func (s *Server) untilStop(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	undo := context.AfterFunc(s.stopping, func() { cancel(errStopping) })
	return ctx, func() { undo(); cancel(context.Canceled) }
}

// observe is the outermost layer: a span whose parent is the caller's, a log
// line, and a problem instead of a panic.
func (s *Server) observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begin := s.deps.Now()
		ctx := r.Context()
		span := trace.SpanFromContext(ctx) // none: probes would bury everything else
		if !probePath(r.URL.Path) {
			ctx, span = s.tracer.Start(telemetry.ExtractHTTP(ctx, r.Header), r.Method,
				trace.WithSpanKind(trace.SpanKindServer),
				trace.WithAttributes(attribute.String("http.request.method", r.Method), attribute.String("url.path", r.URL.Path)))
		}
		defer span.End()
		route := new(string)
		r = r.WithContext(context.WithValue(ctx, routeKey{}, route))
		rec := &recorder{ResponseWriter: w}
		w.Header().Set("X-Content-Type-Options", "nosniff")
		defer func() {
			v := recover()
			if err, _ := v.(error); v != nil && !errors.Is(err, http.ErrAbortHandler) {
				l := s.logFor(ctx)
				fault.Of(v).Log(l.Error()).Str("path", r.URL.Path).Msg("http: panic")
				if rec.status == 0 {
					writeProblem(rec, r, newProblem(http.StatusInternalServerError, wire.CodeInternal, "an internal error; the log has the details"))
					v = nil
				} else {
					v = http.ErrAbortHandler // too late for an answer: cut the connection
				}
			}
			span.SetAttributes(attribute.Int("http.response.status_code", rec.status))
			if *route != "" {
				span.SetName(*route)
				span.SetAttributes(attribute.String("http.route", *route))
			}
			if rec.status >= 500 {
				telemetry.Fail(span, strconv.Itoa(rec.status), http.StatusText(rec.status))
			}
			l := s.logFor(ctx)
			l.Debug().Str("method", r.Method).Str("path", r.URL.Path).Int("status", rec.status).Dur("took", s.deps.Now().Sub(begin)).Msg("http: request")
			if v != nil {
				panic(v)
			}
		}()
		next.ServeHTTP(rec, r)
	})
}

func (s *Server) logFor(ctx context.Context) zerolog.Logger { return telemetry.Logger(ctx, s.log) }

type routeKey struct{}

// recorder remembers the status that was sent.
type recorder struct {
	http.ResponseWriter
	status int
}

func (r *recorder) WriteHeader(status int) {
	r.begin(status)
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	r.begin(http.StatusOK)
	return r.ResponseWriter.Write(p)
}

// answerTimeout is how long a client may take to read an answer; streams have
// their own, shorter time for each write.
const answerTimeout = 60 * time.Second

// begin runs once, before the first byte. A timeout of the whole server would
// count the time before it as well, which is long where a run is waited for.
func (r *recorder) begin(status int) {
	if r.status == 0 {
		r.status = status
		_ = http.NewResponseController(r.ResponseWriter).SetWriteDeadline(time.Now().Add(answerTimeout))
	}
}

// Unwrap gives http.ResponseController its way to the connection.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// bufferBody reads the body before anything else happens: bounded in size and
// time. The deadline is for the body alone and is lifted once that is here; if
// it never comes, the deadline stays, because net/http reads on after a
// refusal and would wait for the rest.
func (s *Server) bufferBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body == nil || r.Body == http.NoBody {
			next.ServeHTTP(w, r)
			return
		}
		rc := http.NewResponseController(w)
		_ = rc.SetReadDeadline(time.Now().Add(s.cfg.BodyTimeout))
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.cfg.MaxBodyBytes))
		if err == nil {
			_ = rc.SetReadDeadline(time.Time{})
		}
		var large *http.MaxBytesError
		switch {
		case errors.As(err, &large):
			writeProblem(w, r, newProblem(http.StatusRequestEntityTooLarge, wire.CodePayloadTooLarge, fmt.Sprintf("the body is larger than %d bytes", s.cfg.MaxBodyBytes)))
			return
		case err != nil:
			writeProblem(w, r, newProblem(http.StatusBadRequest, wire.CodeInvalidRequest, "the body did not arrive in whole"))
			return
		}
		if err := contract.CheckDepth(body, contract.MaxDepth); err != nil {
			writeProblem(w, r, newProblem(http.StatusBadRequest, wire.CodeInvalidRequest, "the body: "+err.Error()))
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		next.ServeHTTP(w, r)
	})
}

// routed serves mux, answers what it does not know with a problem, and tells
// the outer layers which route it took.
func routed(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, pattern := mux.Handler(r)
		if route, ok := r.Context().Value(routeKey{}).(*string); ok {
			*route = pattern
		}
		if pattern != "" {
			mux.ServeHTTP(w, r)
			return
		}
		// The multiplexer's own answer tells 404 from 405.
		probe := &refusal{header: http.Header{}}
		h.ServeHTTP(probe, r)
		p := newProblem(http.StatusNotFound, wire.CodeNotFound, "there is no such path; /openapi.json lists them")
		if probe.status == http.StatusMethodNotAllowed {
			w.Header().Set("Allow", probe.header.Get("Allow"))
			p = newProblem(http.StatusMethodNotAllowed, wire.CodeMethodNotAllowed, r.Method+" is not allowed here; allowed are "+probe.header.Get("Allow"))
		}
		writeProblem(w, r, p)
	})
}

// refusal takes an answer that is not sent.
type refusal struct {
	header http.Header
	status int
}

func (p *refusal) Header() http.Header         { return p.header }
func (p *refusal) WriteHeader(status int)      { p.status = status }
func (p *refusal) Write(b []byte) (int, error) { return len(b), nil }
