package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// Limits of the export.
const (
	// ShutdownTimeout is how long [Telemetry.Shutdown] waits for the last spans.
	ShutdownTimeout = 5 * time.Second
	// batchDelay is how long a finished span waits for others.
	batchDelay = time.Second
	// exportTimeout bounds one export with all its retries.
	exportTimeout = 10 * time.Second
	// reportEvery is the pause between two log lines about a failing export.
	reportEvery = time.Minute
	// maxAttributeChars bounds each attribute's text, so that a prompt or a tool
	// result cannot make a span too large to export.
	maxAttributeChars = 16 << 10
)

// Config says who is traced and where the spans go.
type Config struct {
	// Service, Version and Instance become service.name, service.version and
	// service.instance.id. Empty ones are left out.
	Service, Version, Instance string
	// OTLPEndpoint is a collector that takes OTLP over HTTP: host:4318,
	// http://host:4318, or a URL with a path, which is then used as it is.
	// Empty: no export, but spans have ids all the same.
	OTLPEndpoint string
	// SampleRatio is the share of new traces that are recorded, 0 to 1. A trace
	// that comes from outside keeps the decision it came with.
	SampleRatio float64
	// Exporter, when set, gets every span at once as it ends, in place of
	// OTLPEndpoint. It is for tests.
	Exporter sdktrace.SpanExporter
	// Log gets the failures of exports, at most one a minute. The zero value
	// logs nothing.
	Log zerolog.Logger
}

// Telemetry owns the tracer provider of a process or of a service.
type Telemetry struct {
	provider *sdktrace.TracerProvider
	// abort ends exports that are under way.
	abort func()
	idle  func()
	once  sync.Once
	err   error
}

// Start makes the tracer provider. It connects to nothing: a dead collector is
// found out by the first export and does not keep a service from starting. The
// caller must call [Telemetry.Shutdown].
func Start(ctx context.Context, cfg Config) (*Telemetry, error) {
	if !(cfg.SampleRatio >= 0 && cfg.SampleRatio <= 1) { // also false for NaN
		return nil, fmt.Errorf("telemetry: sample ratio must be 0 to 1, got %v", cfg.SampleRatio)
	}
	opts := []sdktrace.TracerProviderOption{
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(cfg.SampleRatio))),
		sdktrace.WithResource(describe(cfg)),
		sdktrace.WithRawSpanLimits(spanLimits()),
	}
	t := &Telemetry{abort: func() {}, idle: func() {}}
	switch {
	case cfg.Exporter != nil:
		opts = append(opts, sdktrace.WithSyncer(cfg.Exporter))
	case cfg.OTLPEndpoint != "":
		endpoint, err := ParseEndpoint(cfg.OTLPEndpoint)
		if err != nil {
			return nil, fmt.Errorf("telemetry: otlp endpoint: %w", err)
		}
		// A transport of our own, because ours alone can be emptied at the end.
		transport := &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: 3 * time.Second}).DialContext,
			TLSHandshakeTimeout:   5 * time.Second,
			ResponseHeaderTimeout: 8 * time.Second,
			MaxIdleConns:          2,
			IdleConnTimeout:       30 * time.Second,
			ForceAttemptHTTP2:     true,
		}
		// The exporter keeps nothing of ctx, it only refuses one that has ended.
		otlp, err := otlptracehttp.New(ctx,
			otlptracehttp.WithEndpointURL(endpoint),
			otlptracehttp.WithHTTPClient(&http.Client{Transport: transport, Timeout: exportTimeout}),
			otlptracehttp.WithRetry(otlptracehttp.RetryConfig{
				Enabled: true, InitialInterval: 500 * time.Millisecond, MaxInterval: 2 * time.Second, MaxElapsedTime: exportTimeout,
			}),
		)
		if err != nil {
			return nil, fmt.Errorf("telemetry: otlp exporter for %s: %w", endpoint, err)
		}
		work, abort := context.WithCancel(context.Background())
		t.abort, t.idle = abort, transport.CloseIdleConnections
		opts = append(opts, sdktrace.WithBatcher(
			&quietExporter{next: otlp, work: work, log: cfg.Log, endpoint: endpoint, now: time.Now},
			sdktrace.WithBatchTimeout(batchDelay),
			sdktrace.WithExportTimeout(exportTimeout),
			sdktrace.WithMaxQueueSize(8192),
		))
	}
	t.provider = sdktrace.NewTracerProvider(opts...)
	return t, nil
}

// TracerProvider returns where tracers come from.
func (t *Telemetry) TracerProvider() trace.TracerProvider { return t.provider }

// Tracer returns the tracer called name of the provider.
func (t *Telemetry) Tracer(name string) trace.Tracer { return Tracer(t.provider, name) }

// Flush sends what has ended so far and waits for it, at most until ctx is done.
func (t *Telemetry) Flush(ctx context.Context) error {
	if err := t.provider.ForceFlush(ctx); err != nil {
		return fmt.Errorf("telemetry: flush spans: %w", err)
	}
	return nil
}

// Shutdown sends the last spans and ends the export. It takes no context: at
// the time it is called the caller's has usually ended, and with that the last
// spans, which are the parents of all others, would be lost. It returns after
// [ShutdownTimeout] at the latest, whatever the collector does. Calling it
// again does nothing and returns the same error.
func (t *Telemetry) Shutdown() error {
	t.once.Do(func() { t.err = t.shutdown(ShutdownTimeout) })
	return t.err
}

func (t *Telemetry) shutdown(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	// The processor goes on exporting after its context has ended; abort stops
	// that a little before, so that nothing is left behind.
	timer := time.AfterFunc(limit-limit/10, t.abort)
	defer timer.Stop()
	err := t.provider.Shutdown(ctx)
	t.abort()
	t.idle()
	if err != nil {
		return fmt.Errorf("telemetry: send the last spans: %w", err)
	}
	return nil
}

// Tracer returns the tracer called name of tp. With a nil tp it records
// nothing but still passes on the trace that it is in.
func Tracer(tp trace.TracerProvider, name string) trace.Tracer {
	if tp == nil {
		tp = noop.NewTracerProvider()
	}
	return tp.Tracer(scope + name)
}

const scope = "github.com/herdgate/herdgate/"

// ParseEndpoint turns the forms of Config.OTLPEndpoint into the URL that spans
// are sent to. User names and passwords are refused: URLs are logged.
func ParseEndpoint(s string) (string, error) {
	full := s
	if !strings.Contains(s, "://") {
		full = "http://" + s
	}
	u, err := url.Parse(full)
	if err != nil {
		// The parser's own error quotes the text, which may hold a password.
		return "", errors.New("not a URL; want host:port, or http:// or https:// with a host")
	}
	switch {
	case u.User != nil:
		return "", errors.New("has a user name or password; put them into OTEL_EXPORTER_OTLP_HEADERS")
	case u.Scheme != "http" && u.Scheme != "https":
		return "", fmt.Errorf("has scheme %q; want http or https", u.Scheme)
	case u.Hostname() == "":
		return "", errors.New("has no host; want host:port, or http:// or https:// with a host")
	case u.RawQuery != "" || u.Fragment != "":
		return "", errors.New("has a query or fragment; want neither")
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/v1/traces"
	}
	return u.String(), nil
}

// describe makes the resource. It does not look around (process, host,
// command line): a command line may hold secrets.
func describe(cfg Config) *resource.Resource {
	var attrs []attribute.KeyValue
	for _, kv := range []struct{ key, value string }{
		{"service.name", cfg.Service},
		{"service.version", cfg.Version},
		{"service.instance.id", cfg.Instance},
	} {
		if kv.value != "" {
			attrs = append(attrs, attribute.String(kv.key, kv.value))
		}
	}
	return resource.NewSchemaless(append(attrs, attribute.String("service.namespace", "herdgate"))...)
}

func spanLimits() sdktrace.SpanLimits {
	limits := sdktrace.NewSpanLimits()
	limits.AttributeValueLengthLimit = maxAttributeChars
	return limits
}

// quietExporter keeps a failing collector out of the way: it logs the failure
// now and then and swallows it, since nobody above could do better than drop
// the batch, and cuts exports off when work ends.
type quietExporter struct {
	next     sdktrace.SpanExporter
	work     context.Context
	log      zerolog.Logger
	endpoint string
	now      func() time.Time

	mu       sync.Mutex
	reported time.Time
	silent   int // spans lost since the last line
}

// ExportSpans implements sdktrace.SpanExporter.
func (e *quietExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(e.work, cancel)
	defer stop()
	if err := e.next.ExportSpans(ctx, spans); err != nil {
		e.report(err, len(spans))
	}
	return nil
}

func (e *quietExporter) report(err error, spans int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.silent += spans
	if now := e.now(); e.reported.IsZero() || now.Sub(e.reported) >= reportEvery {
		e.log.Warn().Err(err).Str("endpoint", e.endpoint).Int("spans_lost", e.silent).Msg("telemetry: export of spans failed; work goes on")
		e.reported, e.silent = now, 0
	}
}

// Shutdown implements sdktrace.SpanExporter.
func (e *quietExporter) Shutdown(ctx context.Context) error { return e.next.Shutdown(ctx) }
