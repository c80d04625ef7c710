package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
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
	// maxSpanEvents and maxLinks bound what a long task or a large batch hangs on a
	// span; the newest stay.
	maxSpanEvents = 64
	maxLinks      = 128
)

// Config says who is traced and where the spans go.
type Config struct {
	// Service, Version and Instance become service.name, service.version and
	// service.instance.id. Empty ones are left out.
	Service, Version, Instance string
	// OTLPEndpoint is a collector that takes OTLP, over HTTP: host:4318,
	// http://host:4318, or a URL with a path, which is then used as it is; or over
	// gRPC: grpc://host:4317, or grpcs with TLS. Empty: the one of the standard
	// variables OTEL_EXPORTER_OTLP_*. Without any there is no export, but spans have
	// ids all the same.
	OTLPEndpoint string
	// SampleRatio is the share of new traces that are recorded, 0 to 1. A trace
	// that comes from outside keeps the decision it came with.
	SampleRatio float64
	// CaptureContent puts prompts, answers and arguments into spans, see [Content].
	CaptureContent bool
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
	content  *Content
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
		sdktrace.WithSampler(Sampler(cfg.SampleRatio)),
		sdktrace.WithResource(describe(cfg)),
		sdktrace.WithRawSpanLimits(spanLimits()),
	}
	t := &Telemetry{abort: func() {}, idle: func() {}}
	switch {
	case cfg.Exporter != nil:
		opts = append(opts, sdktrace.WithSyncer(cfg.Exporter))
	case endpointOf(cfg) != "":
		endpoint, err := ParseEndpoint(endpointOf(cfg))
		if err != nil {
			return nil, fmt.Errorf("telemetry: otlp endpoint: %w", err)
		}
		otlp, idle, err := newExporter(ctx, endpoint)
		if err != nil {
			return nil, fmt.Errorf("telemetry: otlp exporter for %s: %w", endpoint, err)
		}
		work, abort := context.WithCancel(context.Background())
		t.abort, t.idle = abort, idle
		opts = append(opts, sdktrace.WithBatcher(
			&quietExporter{next: otlp, work: work, log: cfg.Log, endpoint: endpoint, now: time.Now},
			batching(os.Getenv)...,
		))
	}
	if cfg.CaptureContent {
		t.content = NewContent(nil)
	}
	t.provider = sdktrace.NewTracerProvider(opts...)
	return t, nil
}

// endpointOf is the collector of the configuration, or else of the standard variables
// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT; "" for none.
func endpointOf(cfg Config) string {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") || strings.EqualFold(os.Getenv("OTEL_TRACES_EXPORTER"), "none") {
		return ""
	}
	if cfg.OTLPEndpoint != "" {
		return withProtocol(cfg.OTLPEndpoint)
	}
	if e := os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"); e != "" {
		return withProtocol(e)
	}
	e := os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT")
	if e == "" {
		return ""
	}
	if e = withProtocol(e); strings.HasPrefix(e, "http") {
		e = strings.TrimSuffix(e, "/") + "/v1/traces" // this one is a base
	}
	return e
}

// withProtocol adds the scheme that OTEL_EXPORTER_OTLP_PROTOCOL asks for.
func withProtocol(endpoint string) string {
	protocol := os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
	if protocol == "" {
		protocol = os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL")
	}
	scheme, rest, ok := strings.Cut(endpoint, "://")
	if !ok {
		scheme, rest = "http", endpoint
	}
	if protocol == "grpc" {
		switch scheme {
		case "http":
			scheme = "grpc"
		case "https":
			scheme = "grpcs"
		}
	}
	return scheme + "://" + rest
}

// newExporter makes the exporter of an endpoint that ParseEndpoint has seen. idle lets
// go of connections after its shutdown. Headers and certificates are those of the
// standard variables OTEL_EXPORTER_OTLP_*.
func newExporter(ctx context.Context, endpoint string) (otlp sdktrace.SpanExporter, idle func(), err error) {
	if scheme, rest, _ := strings.Cut(endpoint, "://"); scheme == "grpc" || scheme == "grpcs" {
		opts := []otlptracegrpc.Option{
			otlptracegrpc.WithEndpoint(rest), otlptracegrpc.WithTimeout(exportTimeout),
			otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{
				Enabled: true, InitialInterval: 500 * time.Millisecond, MaxInterval: 2 * time.Second, MaxElapsedTime: exportTimeout,
			}),
		}
		if scheme == "grpc" {
			opts = append(opts, otlptracegrpc.WithInsecure())
		}
		otlp, err = otlptracegrpc.New(ctx, opts...)
		return otlp, func() {}, err
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
	otlp, err = otlptracehttp.New(ctx,
		otlptracehttp.WithEndpointURL(endpoint),
		otlptracehttp.WithHTTPClient(&http.Client{Transport: transport, Timeout: exportTimeout}),
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{
			Enabled: true, InitialInterval: 500 * time.Millisecond, MaxInterval: 2 * time.Second, MaxElapsedTime: exportTimeout,
		}),
	)
	return otlp, transport.CloseIdleConnections, err
}

// maxQueue is how many ended spans wait for export; more are dropped.
const maxQueue = 8192

// batching are the options of the batch processor: what the variables OTEL_BSP_* set,
// which the processor reads by itself, is left to them.
func batching(env func(string) string) []sdktrace.BatchSpanProcessorOption {
	var opts []sdktrace.BatchSpanProcessorOption
	for name, o := range map[string]sdktrace.BatchSpanProcessorOption{
		"OTEL_BSP_SCHEDULE_DELAY": sdktrace.WithBatchTimeout(batchDelay), "OTEL_BSP_EXPORT_TIMEOUT": sdktrace.WithExportTimeout(exportTimeout),
		"OTEL_BSP_MAX_QUEUE_SIZE": sdktrace.WithMaxQueueSize(maxQueue),
	} {
		if env(name) == "" {
			opts = append(opts, o)
		}
	}
	return opts
}

// TracerProvider returns where tracers come from.
func (t *Telemetry) TracerProvider() trace.TracerProvider { return t.provider }

// Content returns what captures content, or nil where that is off.
func (t *Telemetry) Content() *Content { return t.content }

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
	case u.Scheme != "http" && u.Scheme != "https" && u.Scheme != "grpc" && u.Scheme != "grpcs":
		return "", fmt.Errorf("has scheme %q; want http, https, grpc or grpcs", u.Scheme)
	case u.Hostname() == "":
		return "", errors.New("has no host; want host:port, or http:// or https:// with a host")
	case u.RawQuery != "" || u.Fragment != "":
		return "", errors.New("has a query or fragment; want neither")
	}
	if strings.HasPrefix(u.Scheme, "grpc") {
		if u.Path != "" && u.Path != "/" {
			return "", errors.New("has a path; OTLP over gRPC has none")
		}
		if u.Port() == "" {
			u.Host += ":4317"
		}
		u.Path = ""
		return u.String(), nil
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
	own := resource.NewSchemaless(append(attrs, attribute.String("service.namespace", "herdgate"))...)
	// OTEL_RESOURCE_ATTRIBUTES adds to it. OTEL_SERVICE_NAME is left alone: one
	// process may hold several services.
	for pair := range strings.SplitSeq(os.Getenv("OTEL_RESOURCE_ATTRIBUTES"), ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if value, err := url.PathUnescape(value); ok && err == nil && key != "" {
			if merged, err := resource.Merge(resource.NewSchemaless(attribute.String(strings.TrimSpace(key), strings.TrimSpace(value))), own); err == nil {
				own = merged
			}
		}
	}
	return own
}

// Sampler records what the trace that it belongs to decided at its root; of new
// traces the share ratio. What begins a trace only to link to others, such as a batch,
// is recorded if one of those is.
func Sampler(ratio float64) sdktrace.Sampler {
	return sdktrace.ParentBased(linked{sdktrace.TraceIDRatioBased(ratio)})
}

type linked struct{ sdktrace.Sampler }

// ShouldSample implements sdktrace.Sampler.
func (l linked) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	if len(p.Links) == 0 {
		return l.Sampler.ShouldSample(p)
	}
	for _, link := range p.Links {
		if link.SpanContext.IsSampled() {
			return sdktrace.AlwaysSample().ShouldSample(p)
		}
	}
	return sdktrace.NeverSample().ShouldSample(p)
}

func spanLimits() sdktrace.SpanLimits {
	limits := sdktrace.NewSpanLimits()
	limits.AttributeValueLengthLimit = bounded(limits.AttributeValueLengthLimit, maxAttributeChars)
	limits.EventCountLimit = bounded(limits.EventCountLimit, maxSpanEvents)
	limits.LinkCountLimit = bounded(limits.LinkCountLimit, maxLinks)
	return limits
}

// bounded is the limit that the environment sets, where it is a tighter one.
func bounded(limit, most int) int {
	if limit < 0 || limit > most {
		return most
	}
	return limit
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
