package compact

import (
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/herdgate/herdgate/internal/model"
)

// The request for a summary is a model call like any other: it has a chat span, below
// the one it was made in.
func TestSummaryHasASpan(t *testing.T) {
	t.Parallel()
	m := worker(8)
	exporter := tracetest.NewInMemoryExporter()
	ctx, parent := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter)).Tracer("test").Start(t.Context(), "agent")
	c := New(Options{Settings: settings(8, 2), Model: m})
	text, _, err := c.summarise(ctx, []model.Message{{Role: model.RoleUser, Text: "hello"}})
	if err != nil || text == "" {
		t.Fatalf("summary %q, %v", text, err)
	}
	spans := exporter.GetSpans()
	if len(spans) != 1 || spans[0].Name != "chat "+m.ModelName() || spans[0].Parent.SpanID() != parent.SpanContext().SpanID() {
		t.Errorf("spans = %v", spans)
	}
}
