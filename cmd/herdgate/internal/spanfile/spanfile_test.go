package spanfile

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

func TestSpansAreLines(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	e, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	tp := sdktrace.NewTracerProvider(sdktrace.WithSyncer(e), sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", "lead"))))
	ctx, parent := tp.Tracer("x").Start(context.Background(), "parent")
	_, child := tp.Tracer("x").Start(ctx, "child", trace.WithAttributes(attribute.Int("n", 3)))
	child.End()
	parent.End()
	// One of several providers has ended; the file is still open for the others.
	if err := tp.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := e.ExportSpans(context.Background(), nil); err != nil {
		t.Error(err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	if len(lines) != 2 {
		t.Fatalf("%d lines, want 2:\n%s", len(lines), b)
	}
	var got [2]span
	for i, line := range lines {
		if err := json.Unmarshal([]byte(line), &got[i]); err != nil {
			t.Fatal(err)
		}
	}
	if c, p := got[0], got[1]; c.ParentID != p.SpanID || c.TraceID != p.TraceID || p.ParentID != "" || c.Service != "lead" || c.Attributes["n"] != 3.0 || c.Name != "child" {
		t.Errorf("spans = %+v", got)
	}
}
