package run

import (
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/rs/zerolog"

	"time"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/lead/internal/dispatch"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

// I10: the caller's trace goes through the run into the requests and events;
// no span of it hangs in the air.
func TestTrace(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord { return completed(req.Description) })
	exporter := tracetest.NewInMemoryExporter()
	tp := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter))
	l := w.lead("lead-a", &scripted{answer: twoTasks}, func(_ *Config, d *Deps) {
		d.TracerProvider = tp
		d.Dispatch = dispatch.New(d.Bus, time.Now, zerolog.Nop(), tp)
	})
	ctx, root := tp.Tracer("test").Start(t.Context(), "caller")
	rec, err := l.Start(ctx, runapi.RunInput{Tenant: "default", Input: "go"})
	root.End()
	if err != nil {
		t.Fatal(err)
	}
	if rec.TraceID != root.SpanContext().TraceID().String() || !envelope.ValidTraceParent(rec.TraceParent) {
		t.Errorf("trace id %q, traceparent %q", rec.TraceID, rec.TraceParent)
	}
	l.wait(rec.RunID)
	l.drain()
	<-l.done // every span has ended
	spans := exporter.GetSpans()
	ids := map[trace.SpanID]tracetest.SpanStub{}
	count := map[string]int{}
	for _, s := range spans {
		ids[s.SpanContext.SpanID()] = s
		count[s.Name]++
	}
	for _, s := range spans {
		if s.SpanContext.TraceID() != root.SpanContext().TraceID() {
			t.Errorf("span %s is in another trace", s.Name)
		}
		if _, ok := ids[s.Parent.SpanID()]; !ok && s.Name != "caller" {
			t.Errorf("span %s is an orphan", s.Name)
		}
		switch s.Name {
		case "invoke_agent lead":
			if s.Parent.SpanID() != root.SpanContext().SpanID() || s.SpanKind != trace.SpanKindInternal {
				t.Errorf("span of the run: parent %s, kind %s", s.Parent.SpanID(), s.SpanKind)
			}
		case "task":
			if s.SpanKind != trace.SpanKindInternal || ids[s.Parent.SpanID()].Name != "execute_tool task" {
				t.Errorf("span task: kind %s, parent %s", s.SpanKind, ids[s.Parent.SpanID()].Name)
			}
		}
	}
	if count["invoke_agent lead"] != 1 || count["task"] != 2 || count["chat fake-1"] != 2 {
		t.Errorf("spans = %v", count)
	}
	w.gate.mu.Lock()
	defer w.gate.mu.Unlock()
	for i, h := range w.gate.headers {
		if got := h.Get("traceparent"); len(got) < 35 || got[3:35] != rec.TraceID {
			t.Errorf("request %d carries traceparent %q", i, got)
		}
	}
	for _, ev := range w.events(rec.RunID) {
		if ev.TaskID == "" && (len(ev.TraceParent) < 35 || ev.TraceParent[3:35] != rec.TraceID) {
			t.Errorf("event %s carries traceparent %q", ev.Type, ev.TraceParent)
		}
	}
}
