package telemetry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	traceHex = "7c1d5e90a2b84f36b8e7410f9d2c6a53"
	spanHex  = "3e9f0a7b51c2d846"
	parent   = "00-" + traceHex + "-" + spanHex + "-01"
)

func start(t *testing.T, cfg Config) *Telemetry {
	t.Helper()
	tel, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tel.Shutdown() })
	return tel
}

func TestLoggerJSON(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log, err := NewLogger(&out, "lead", "info", "json")
	if err != nil {
		t.Fatal(err)
	}
	log.Debug().Msg("not this")
	log.Info().Int("n", 1).Msg("this")
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("%q is not one JSON object: %v", out.String(), err)
	}
	if line["service"] != "lead" || line["message"] != "this" || line["level"] != "info" || line["n"] != 1.0 {
		t.Errorf("line %v", line)
	}
	stamp, _ := line["time"].(string)
	if !regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$`).MatchString(stamp) {
		t.Errorf("time %q, want RFC 3339 in UTC with microseconds", stamp)
	}
}

func TestLoggerConsole(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log, err := NewLogger(&out, "lead", "debug", "console")
	if err != nil {
		t.Fatal(err)
	}
	log.Debug().Str("task", "t1").Msg("hello")
	if !regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d{3} DBG hello service=lead task=t1\n$`).MatchString(out.String()) {
		t.Errorf("console line %q", out.String())
	}
}

func TestLoggerRefuses(t *testing.T) {
	t.Parallel()
	if _, err := NewLogger(io.Discard, "x", "loud", "json"); err == nil || !strings.Contains(err.Error(), `"loud"`) || !strings.Contains(err.Error(), "warn") {
		t.Errorf("level loud: %v", err)
	}
	if _, err := NewLogger(io.Discard, "x", "info", "xml"); err == nil || !strings.Contains(err.Error(), `"xml"`) {
		t.Errorf("format xml: %v", err)
	}
	if _, err := NewLogger(io.Discard, "x", "", ""); err != nil {
		t.Errorf("defaults: %v", err)
	}
}

func TestLoggerWithTrace(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log := Logger(ContextWith(t.Context(), parent, ""), zerolog.New(&out), "task", "t1", "attempt", 2)
	log.Info().Msg("x")
	for _, want := range []string{`"trace_id":"` + traceHex + `"`, `"span_id":"` + spanHex + `"`, `"task":"t1"`, `"attempt":2`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("line %s lacks %s", out.String(), want)
		}
	}
	out.Reset()
	log = Logger(t.Context(), zerolog.New(&out))
	log.Info().Msg("x")
	if strings.Contains(out.String(), "trace_id") {
		t.Errorf("line %s has a trace without a span", out.String())
	}
}

// F-168: what is invalid starts a new trace, a later version is read, flags 00
// keep the ids without being sampled.
func TestTraceParentVariants(t *testing.T) {
	t.Parallel()
	const other = "6c1d5e90a2b84f36b8e7410f9d2c6a53"
	valid := map[string]trace.TraceFlags{
		"01-" + traceHex + "-" + spanHex + "-01-extra": trace.FlagsSampled,
		"00-" + traceHex + "-" + spanHex + "-00":       0,
		"00-" + traceHex + "-" + spanHex + "-02":       trace.FlagsRandom,
		"  " + parent + "  ":                           trace.FlagsSampled, // blanks around a header's value do not count
		parent:                                         trace.FlagsSampled,
		"00-" + traceHex + "-" + spanHex + "-09":       trace.FlagsSampled, // unknown flags are cleared
		"cc-" + traceHex + "-" + spanHex + "-01":       trace.FlagsSampled,
	}
	file, err := os.ReadFile("testdata/traceparent.txt")
	if err != nil {
		t.Fatal(err)
	}
	cases := strings.Split(string(file), "\n")[1:] // the first line says what this is
	if len(cases) < 15 {
		t.Fatalf("%d cases in testdata, want all of them", len(cases))
	}
	for v := range valid {
		cases = append(cases, v)
	}
	tel := start(t, Config{SampleRatio: 1})
	for _, value := range cases {
		h := http.Header{}
		h["Traceparent"] = []string{value}
		ctx := ExtractHTTP(t.Context(), h)
		sc := trace.SpanContextFromContext(ctx)
		flags, ok := valid[value]
		if sc.IsValid() != ok {
			t.Errorf("%.80q: taken over %v, want %v", value, sc.IsValid(), ok)
			continue
		}
		_, span := tel.Tracer("test").Start(ctx, "request")
		span.End()
		got := span.SpanContext()
		if !got.IsValid() {
			t.Errorf("%.80q: the request has no trace", value)
		}
		if !ok {
			if got.TraceID().String() == traceHex || got.TraceID().String() == other || !got.IsSampled() {
				t.Errorf("%.80q: span %v, want a trace of its own", value, got.TraceID())
			}
			continue
		}
		if sc.TraceID().String() != traceHex || sc.SpanID().String() != spanHex || sc.TraceFlags() != flags || !sc.IsRemote() {
			t.Errorf("%.80q: %v %v flags %v remote %v, want flags %v", value, sc.TraceID(), sc.SpanID(), sc.TraceFlags(), sc.IsRemote(), flags)
		}
		// The sampling decision of outside is kept, and so are the ids.
		if got.TraceID() != sc.TraceID() || got.IsSampled() != sc.IsSampled() {
			t.Errorf("%.80q: span in trace %v sampled %v, want %v %v", value, got.TraceID(), got.IsSampled(), sc.TraceID(), sc.IsSampled())
		}
	}
	two := http.Header{}
	two.Add("traceparent", parent)
	two.Add("traceparent", strings.Replace(parent, "7c", "6c", 1))
	if sc := trace.SpanContextFromContext(ExtractHTTP(t.Context(), two)); sc.IsValid() {
		t.Errorf("two headers: taken over %v, want a new trace", sc.TraceID())
	}
	if sc := trace.SpanContextFromContext(ExtractHTTP(t.Context(), http.Header{})); sc.IsValid() {
		t.Errorf("no header: %v", sc)
	}
}

// F-170: baggage stays at the edge, a tracestate is bounded, and the headers of
// a message cannot grow.
func TestHeadersAreBounded(t *testing.T) {
	t.Parallel()
	members := func(n int, value string) string {
		list := make([]string, n)
		for i := range list {
			list[i] = fmt.Sprintf("v%d=%s", i, value)
		}
		return strings.Join(list, ",")
	}
	for name, c := range map[string]struct {
		header http.Header
		state  string
	}{
		"baggage 8192":        {http.Header{"Baggage": {"k=" + strings.Repeat("v", 8190)}}, ""},
		"baggage 200000":      {http.Header{"Baggage": {"k=" + strings.Repeat("v", 199_998)}}, ""},
		"baggage private":     {http.Header{"Baggage": {"secret=token-qa-private"}}, ""},
		"baggage broken":      {http.Header{"Baggage": {"k=%zz,=x,novalue,;p", "more=1"}}, ""},
		"tracestate":          {http.Header{"Tracestate": {"a=1,b=2"}}, "a=1,b=2"},
		"tracestate twice":    {http.Header{"Tracestate": {"a=1", "b=2"}}, "a=1,b=2"},
		"tracestate 40":       {http.Header{"Tracestate": {members(40, "x")}}, ""},
		"tracestate broken":   {http.Header{"Tracestate": {"a=1,=,\x01"}}, ""},
		"tracestate long":     {http.Header{"Tracestate": {"big=" + strings.Repeat("x", 200) + "," + members(20, strings.Repeat("y", 20))}}, members(20, strings.Repeat("y", 20))},
		"tracestate too long": {http.Header{"Tracestate": {members(30, strings.Repeat("y", 30))}}, members(14, strings.Repeat("y", 30))},
		"tracestate 200000":   {http.Header{"Tracestate": {"big=" + strings.Repeat("x", 200_000)}}, ""},
	} {
		c.header.Set("traceparent", parent)
		out := nats.Header{}
		Inject(ExtractHTTP(t.Context(), c.header), out)
		if out.Get("traceparent") != parent {
			t.Errorf("%s: traceparent %q, want it untouched", name, out.Get("traceparent"))
		}
		if got := out.Get("tracestate"); got != c.state || len(got) > maxTraceState {
			t.Errorf("%s: tracestate %.200q (%d bytes), want %.200q", name, got, len(got), c.state)
		}
		want := 1
		if c.state != "" {
			want = 2
		}
		if len(out) != want {
			t.Errorf("%s: message headers %v, want %d", name, out, want)
		}
	}
}

func TestInjectExtract(t *testing.T) {
	t.Parallel()
	h := nats.Header{}
	ctx := ContextWith(t.Context(), parent, "a=1")
	Inject(ctx, h)
	if h["traceparent"] == nil {
		t.Errorf("headers %v, want traceparent in small letters", h)
	}
	got := trace.SpanContextFromContext(Extract(t.Context(), h))
	if got.TraceID().String() != traceHex || got.TraceState().String() != "a=1" || TraceID(Extract(t.Context(), h)) != traceHex {
		t.Errorf("Extract() = %v %v", got.TraceID(), got.TraceState())
	}
	if p, s := TraceParent(ctx); p != parent || s != "a=1" {
		t.Errorf("TraceParent() = %q, %q", p, s)
	}
	if p, s := TraceParent(t.Context()); p != "" || s != "" {
		t.Errorf("TraceParent() without a span = %q, %q, want nothing", p, s)
	}
	if canonical := (nats.Header{"Traceparent": {parent}}); TraceID(Extract(t.Context(), canonical)) != traceHex {
		t.Error("a header written by an HTTP library is not found")
	}
	Inject(ctx, nil) // must not panic
	if TraceID(Extract(t.Context(), nil)) != "" {
		t.Error("Extract of nothing gives a trace")
	}
	if link, ok := LinkTo(parent, ""); !ok || link.SpanContext.TraceID().String() != traceHex {
		t.Errorf("LinkTo() = %v, %v", link, ok)
	}
	if _, ok := LinkTo("x", ""); ok {
		t.Error("LinkTo(x) is valid")
	}
}

func FuzzContextWith(f *testing.F) {
	f.Add(parent, "a=1")
	f.Add("01-"+traceHex+"-"+spanHex+"-ff-x", strings.Repeat("a=b,", 200))
	f.Add("", "")
	f.Fuzz(func(t *testing.T, p, s string) {
		h := nats.Header{}
		Inject(ContextWith(t.Context(), p, s), h)
		if len(h) == 0 {
			return
		}
		// What was taken over is passed on in a form that others take over.
		got, state := h.Get("traceparent"), h.Get("tracestate")
		if len(got) != 55 || got[3:52] != p[3:52] || len(state) > maxTraceState || strings.ContainsAny(got+state, "\r\n\x00") {
			t.Errorf("%q %q became %q %q", p, s, got, state)
		}
		if TraceID(Extract(t.Context(), h)) != p[3:35] {
			t.Errorf("%q cannot be read back", got)
		}
	})
}

func TestSpansWithoutExporterHaveIDs(t *testing.T) {
	t.Parallel()
	for _, ratio := range []float64{0, 1} {
		tel := start(t, Config{Service: "lead", SampleRatio: ratio})
		ctx, span := tel.Tracer("test").Start(t.Context(), "x")
		span.End()
		if sc := span.SpanContext(); !sc.IsValid() || sc.IsSampled() != (ratio == 1) || TraceID(ctx) == "" {
			t.Errorf("ratio %v: span %v, want ids, sampled %v", ratio, sc, ratio == 1)
		}
	}
}

func TestExporterForTests(t *testing.T) {
	t.Parallel()
	exp := tracetest.NewInMemoryExporter()
	tel := start(t, Config{Service: "lead", Version: "1.2", Instance: "lead-1", SampleRatio: 1, Exporter: exp})
	_, span := Tracer(tel.TracerProvider(), "agent").Start(t.Context(), "run")
	span.SetAttributes(AttrTaskID.String("t1"), AttrGenAIToolName.String(strings.Repeat("x", maxAttributeChars+1)))
	span.End()
	spans := exp.GetSpans() // there at once, without a flush
	if len(spans) != 1 || spans[0].Name != "run" || spans[0].InstrumentationScope.Name != "github.com/herdgate/herdgate/agent" {
		t.Fatalf("spans %+v", spans)
	}
	res := spans[0].Resource.String()
	for _, want := range []string{"service.name=lead", "service.version=1.2", "service.instance.id=lead-1"} {
		if !strings.Contains(res, want) {
			t.Errorf("resource %s lacks %s", res, want)
		}
	}
	if n := len(spans[0].Attributes[1].Value.AsString()); n != maxAttributeChars {
		t.Errorf("a long attribute has %d characters, want it cut at %d", n, maxAttributeChars)
	}
}

func TestTracerWithoutProvider(t *testing.T) {
	t.Parallel()
	ctx, span := Tracer(nil, "x").Start(ContextWith(t.Context(), parent, ""), "x")
	defer span.End()
	if TraceID(ctx) != traceHex {
		t.Errorf("trace %q, want that of the parent", TraceID(ctx))
	}
}

func TestStartRefuses(t *testing.T) {
	t.Parallel()
	for _, cfg := range []Config{
		{SampleRatio: -0.1}, {SampleRatio: 1.1}, {SampleRatio: math.NaN()},
		{OTLPEndpoint: "grpc://h:4317/path"}, {OTLPEndpoint: "http://"}, {OTLPEndpoint: "http://u:hush@h:4318"}, {OTLPEndpoint: "http://h:4318?x=1"}, {OTLPEndpoint: "http://a b%zzhush"},
	} {
		_, err := Start(t.Context(), cfg)
		if err == nil || strings.Contains(err.Error(), "hush") {
			t.Errorf("Start(%+v) = %v, want an error without secrets", cfg, err)
		}
	}
}

func TestParseEndpoint(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"collector:4318":                "http://collector:4318/v1/traces",
		"http://collector:4318":         "http://collector:4318/v1/traces",
		"http://collector:4318/":        "http://collector:4318/v1/traces",
		"https://collector/otlp/traces": "https://collector/otlp/traces",
		"[::1]:4318":                    "http://[::1]:4318/v1/traces",
	} {
		if got, err := ParseEndpoint(in); err != nil || got != want {
			t.Errorf("ParseEndpoint(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
}

// collector is an OTLP receiver that counts what it gets.
type collector struct {
	mu    sync.Mutex
	paths []string
	bytes int
}

func (c *collector) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paths = append(c.paths, r.URL.Path)
	c.bytes += len(body)
}

// F-172: the last spans are sent although the caller's context has ended.
func TestLastSpansAreSent(t *testing.T) {
	t.Parallel()
	c := &collector{}
	srv := httptest.NewServer(c)
	defer srv.Close()
	for _, endpoint := range []string{srv.URL, strings.TrimPrefix(srv.URL, "http://"), srv.URL + "/custom"} {
		ctx, cancel := context.WithCancel(t.Context())
		tel, err := Start(ctx, Config{Service: "lead", SampleRatio: 1, OTLPEndpoint: endpoint})
		if err != nil {
			t.Fatal(err)
		}
		_, span := tel.Tracer("test").Start(ctx, "root")
		cancel()
		span.End()
		if err := tel.Shutdown(); err != nil {
			t.Errorf("Shutdown() = %v", err)
		}
		if err := tel.Shutdown(); err != nil {
			t.Errorf("second Shutdown() = %v", err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if got := strings.Join(c.paths, " "); got != "/v1/traces /v1/traces /custom" || c.bytes == 0 {
		t.Errorf("requests to %s with %d bytes, want three", got, c.bytes)
	}
}

func TestFlush(t *testing.T) {
	t.Parallel()
	c := &collector{}
	srv := httptest.NewServer(c)
	defer srv.Close()
	tel := start(t, Config{SampleRatio: 1, OTLPEndpoint: srv.URL})
	_, span := tel.Tracer("test").Start(t.Context(), "x")
	span.End()
	if err := tel.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.paths) != 1 {
		t.Errorf("%d requests after a flush, want 1", len(c.paths))
	}
}

// F-172: a collector that never answers, or is not there, does not hold up the
// end of the process, and leaves no goroutine behind (goleak).
func TestShutdownWithDeadCollector(t *testing.T) {
	t.Parallel()
	hang := make(chan struct{})
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-hang:
		case <-r.Context().Done():
		}
	}))
	defer silent.Close()
	defer close(hang)
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	for name, endpoint := range map[string]string{"silent": silent.URL, "gone": gone.Addr().String()} {
		tel, err := Start(t.Context(), Config{SampleRatio: 1, OTLPEndpoint: endpoint})
		if err != nil {
			t.Fatal(err)
		}
		for range 2000 { // several batches
			_, span := tel.Tracer("test").Start(t.Context(), "x")
			span.End()
		}
		began := time.Now()
		_ = tel.shutdown(300 * time.Millisecond) // whether it counts as an error is not the point
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("%s: shutdown took %s, want at most the limit of 0.3 s and a little", name, took)
		}
	}
}

// A failing export is logged once a minute, with the number of lost spans.
func TestExportFailuresAreLoggedRarely(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	now := time.Unix(1000, 0)
	e := &quietExporter{next: &failing{}, work: t.Context(), log: zerolog.New(&out), endpoint: "http://c", now: func() time.Time { return now }}
	spans := tracetest.SpanStubs{{Name: "a"}, {Name: "b"}}.Snapshots()
	export := func() {
		t.Helper()
		if err := e.ExportSpans(t.Context(), spans); err != nil {
			t.Errorf("ExportSpans() = %v, want nil: nobody can do anything about it", err)
		}
	}
	for range 5 {
		export()
	}
	if n := strings.Count(out.String(), "\n"); n != 1 || !strings.Contains(out.String(), "collector is down") {
		t.Errorf("%d lines for 5 failures at once, want 1: %s", n, out.String())
	}
	now = now.Add(reportEvery)
	export()
	if lines := strings.Split(strings.TrimSpace(out.String()), "\n"); len(lines) != 2 || !strings.Contains(lines[1], `"spans_lost":10`) {
		t.Errorf("lines %q, want a second one that counts the 10 spans lost since", lines)
	}
}

type failing struct{ tracetest.NoopExporter }

func (*failing) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error {
	return errors.New("collector is down")
}

func get(t *testing.T, h http.Handler, method, path string) (int, string, http.Header) {
	t.Helper()
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), method, path, nil))
	return rec.Code, rec.Body.String(), rec.Header()
}

func TestReadiness(t *testing.T) {
	t.Parallel()
	m := NewMetrics("lead", "1.2", "nats", "store")
	h := m.Handler()
	code, body, header := get(t, h, "GET", "/readyz")
	if code != 503 || header.Get("Content-Type") != "application/json" ||
		body != `{"status":"unavailable","checks":{"nats":"not checked yet","store":"not checked yet"}}`+"\n" {
		t.Errorf("before any check: %d %s", code, body)
	}
	m.Probes.Set("nats", nil)
	m.Probes.Set("store", errors.New("disk is full"))
	code, body, _ = get(t, h, "GET", "/readyz")
	if code != 503 || body != `{"status":"unavailable","checks":{"nats":"ok","store":"disk is full"}}`+"\n" {
		t.Errorf("one failing: %d %s", code, body)
	}
	if err := m.Probes.Ready(); err == nil || err.Error() != "store: disk is full" {
		t.Errorf("Ready() = %v", err)
	}
	if code, body, _ = get(t, h, "GET", "/healthz"); code != 200 || !strings.Contains(body, "alive") {
		t.Errorf("healthz while not ready: %d %s, want 200", code, body)
	}
	m.Probes.Set("store", nil)
	if code, body, _ = get(t, h, "GET", "/readyz"); code != 200 || !strings.Contains(body, `"status":"ready"`) || m.Probes.Ready() != nil {
		t.Errorf("all good: %d %s", code, body)
	}
	if code, body, _ = get(t, h, "HEAD", "/readyz"); code != 200 || body != "" {
		t.Errorf("HEAD: %d %q", code, body)
	}
	if code, _, _ = get(t, h, "POST", "/readyz"); code != 405 {
		t.Errorf("POST: %d, want 405", code)
	}
	m.Probes.Set("store", errors.New(strings.Repeat("ä", 1000)))
	if _, body, _ = get(t, h, "GET", "/readyz"); len(body) > 2*maxReason || !strings.Contains(body, "ä…") {
		t.Errorf("a long reason gives %d bytes: %s", len(body), body)
	}
	m.Probes.Remove("store")
	if code, _, _ = get(t, h, "GET", "/readyz"); code != 200 {
		t.Errorf("after Remove: %d, want 200", code)
	}
}

// F-184: what is idle finds its faults only when somebody looks. A known fault
// needs no look, and many who ask at once make one.
func TestReadinessLooksWhenAsked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := NewMetrics("lead", "1.2", "nats")
		h := m.Handler()
		var looks int
		var fault error
		m.Probes.Ask("nats", func(ctx context.Context) error {
			if _, bounded := ctx.Deadline(); !bounded {
				t.Error("a look has no time limit")
			}
			looks++
			return fault
		})
		ready := func(want int, text string) {
			t.Helper()
			if code, body, _ := get(t, h, "GET", "/readyz"); code != want || !strings.Contains(body, text) {
				t.Errorf("/readyz = %d %s, want %d and %q", code, body, want, text)
			}
		}
		ready(503, "not checked yet")
		if looks != 0 {
			t.Errorf("%d looks at what is known to be bad, want none", looks)
		}
		m.Probes.Set("nats", nil)
		fault = errors.New("frozen")
		ready(503, `"nats":"frozen"`)
		ready(503, `"nats":"frozen"`)
		if looks != 1 {
			t.Errorf("%d looks at one moment, want 1", looks)
		}
		time.Sleep(checkFresh) //nolint:forbidigo // in a bubble: its clock moves on at once
		fault = nil
		ready(200, `"nats":"ok"`)
		time.Sleep(checkFresh) //nolint:forbidigo // in a bubble: its clock moves on at once
		fault = errors.New("frozen")
		m.Probes.Ask("nats", nil)
		ready(200, `"nats":"ok"`)
	})
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	m := NewMetrics("lead", "1.2")
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "herdgate_things_total", Help: "Things."})
	m.Registerer().MustRegister(c)
	c.Inc()
	code, body, _ := get(t, m.Handler(), "GET", "/metrics")
	for _, want := range []string{"herdgate_things_total 1", `herdgate_build_info{service="lead",version="1.2"} 1`, "go_goroutines", "process_"} {
		if code != 200 || !strings.Contains(body, want) {
			t.Errorf("/metrics: %d, lacks %s", code, want)
		}
	}
	// A second service in the same process has a registry of its own.
	if _, body, _ := get(t, NewMetrics("sink", "1.2").Handler(), "GET", "/metrics"); strings.Contains(body, "things") {
		t.Error("registries are shared")
	}
}

func TestServe(t *testing.T) {
	t.Parallel()
	m := NewMetrics("lead", "1.2")
	for _, addr := range []string{":0", "0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.com:0", "localhost.example.com:0"} {
		if err := m.Serve(t.Context(), addr); !errors.Is(err, ErrNotLoopback) {
			t.Errorf("Serve(%q) = %v, want ErrNotLoopback", addr, err)
		}
	}
	if err := m.Serve(t.Context(), "nonsense"); err == nil || errors.Is(err, ErrNotLoopback) {
		t.Errorf("Serve(nonsense) = %v", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Serve(t.Context(), l.Addr().String()); err == nil {
		t.Error("Serve on a port in use = nil")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.ServeListener(ctx, l) }()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	res, err := client.Get("http://" + l.Addr().String() + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != 200 {
		t.Errorf("healthz: %d", res.StatusCode)
	}
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("Serve() = %v after a clean stop", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Serve did not stop")
	}
	// With leave, other addresses are fine.
	m.AllowRemote = true
	ended, stop := context.WithCancel(t.Context())
	time.AfterFunc(0, stop)
	if err := m.Serve(ended, ":0"); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("Serve(:0) with AllowRemote = %v", err)
	}
}

// Checks that are made side by side, while others are known to be good or bad: every
// service of a process has one.
func TestReadinessLooksAtManyThings(t *testing.T) {
	t.Parallel()
	p := NewProbes()
	for i := range 50 {
		name := fmt.Sprint("check ", i)
		p.Set(name, nil)
		if i%3 == 0 {
			p.Set(name, errors.New("known"))
		}
		p.Ask(name, func(context.Context) error { return errors.New("looked") })
	}
	for range 20 {
		got := p.results()
		for i := range 50 {
			want := "looked"
			if i%3 == 0 {
				want = "known"
			}
			if err := got[fmt.Sprint("check ", i)]; err == nil || err.Error() != want {
				t.Fatalf("check %d = %v, want %s", i, err, want)
			}
		}
	}
}
