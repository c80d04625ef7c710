package telemetry

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/pkg/envelope"
)

// The headers of W3C Trace Context as they stand in NATS messages, where case
// matters.
const (
	HeaderTraceParent = "traceparent"
	HeaderTraceState  = "tracestate"
)

// Bounds on a tracestate that we carry on. W3C asks to carry at least 512
// characters; longer members are the first to go.
const (
	maxTraceState      = 512
	maxTraceStateEntry = 128
)

// Propagator returns the propagator of all hops: W3C Trace Context alone.
// Baggage is not carried: it holds whatever a caller put there, has no bound
// that fits a message header, and would reach the model provider.
func Propagator() propagation.TextMapPropagator { return propagation.TraceContext{} }

// Inject writes the trace context of ctx into h, which must not be nil. Without
// a span in ctx it writes nothing.
func Inject(ctx context.Context, h nats.Header) {
	if h != nil {
		Propagator().Inject(ctx, envelope.Carrier(h))
	}
}

// Extract returns ctx with the trace context of h as remote parent. What is
// missing or invalid is ignored.
func Extract(ctx context.Context, h nats.Header) context.Context {
	return ContextWith(ctx, headerValue(h, HeaderTraceParent), headerValue(h, HeaderTraceState))
}

// headerValue looks key up as it is and in the form that HTTP libraries give
// it, because other services publish as well.
func headerValue(h nats.Header, key string) string {
	if v := h.Get(key); v != "" {
		return v
	}
	return h.Get(http.CanonicalHeaderKey(key))
}

// ExtractHTTP returns ctx with the trace context of a request's headers as
// remote parent. An invalid one, or more than one traceparent, leaves ctx as it
// is, so that the request starts a trace of its own and is served like any
// other. The members of several tracestate headers are joined.
func ExtractHTTP(ctx context.Context, h http.Header) context.Context {
	parents := h.Values(HeaderTraceParent)
	if len(parents) != 1 {
		return ctx
	}
	return ContextWith(ctx, strings.Trim(parents[0], " \t"), strings.Join(h.Values(HeaderTraceState), ","))
}

// TraceParent returns the trace context of ctx in the form of its two headers;
// both are empty without a span.
func TraceParent(ctx context.Context) (parent, state string) {
	c := envelope.Carrier{}
	Propagator().Inject(ctx, c)
	return c.Get(HeaderTraceParent), c.Get(HeaderTraceState)
}

// ContextWith returns ctx with the remote parent that traceparent and
// tracestate describe. An invalid traceparent leaves ctx as it is. An invalid
// tracestate is dropped, one that is too long is shortened.
func ContextWith(ctx context.Context, traceparent, tracestate string) context.Context {
	sc, ok := parse(traceparent, tracestate)
	if !ok {
		return ctx
	}
	return trace.ContextWithRemoteSpanContext(ctx, sc)
}

// TraceID returns the trace id of ctx in hexadecimal, or "".
func TraceID(ctx context.Context) string {
	if sc := trace.SpanContextFromContext(ctx); sc.HasTraceID() {
		return sc.TraceID().String()
	}
	return ""
}

// LinkTo returns a link to the span that traceparent and tracestate describe,
// and whether they are valid. A batch that mixes traces links to each.
func LinkTo(traceparent, tracestate string) (trace.Link, bool) {
	sc, ok := parse(traceparent, tracestate)
	return trace.Link{SpanContext: sc}, ok
}

// parse is the one reader of trace context. The flags that we do not know are
// cleared rather than refused, as W3C asks.
func parse(traceparent, tracestate string) (trace.SpanContext, bool) {
	if !envelope.ValidTraceParent(traceparent) {
		return trace.SpanContext{}, false
	}
	var (
		cfg trace.SpanContextConfig
		err error
	)
	if cfg.TraceID, err = trace.TraceIDFromHex(traceparent[3:35]); err != nil {
		return trace.SpanContext{}, false
	}
	if cfg.SpanID, err = trace.SpanIDFromHex(traceparent[36:52]); err != nil {
		return trace.SpanContext{}, false
	}
	flags, err := strconv.ParseUint(traceparent[53:55], 16, 8)
	if err != nil {
		return trace.SpanContext{}, false
	}
	cfg.TraceFlags = trace.TraceFlags(flags) & (trace.FlagsSampled | trace.FlagsRandom)
	// The state is extra: when it is broken, the parent still counts.
	if state, err := trace.ParseTraceState(boundTraceState(tracestate)); err == nil {
		cfg.TraceState = state
	}
	cfg.Remote = true
	return trace.NewSpanContext(cfg), true
}

// boundTraceState shortens s as W3C section 3.3.1.5 describes: first the long
// members go, then the last ones, which are the oldest.
func boundTraceState(s string) string {
	if len(s) <= maxTraceState {
		return s
	}
	var (
		kept []string
		size int
	)
	for member := range strings.SplitSeq(s, ",") {
		member = strings.Trim(member, " \t")
		if member == "" || len(member) > maxTraceStateEntry {
			continue
		}
		if size+len(member) > maxTraceState {
			break
		}
		kept = append(kept, member)
		size += len(member) + 1
	}
	return strings.Join(kept, ",")
}
