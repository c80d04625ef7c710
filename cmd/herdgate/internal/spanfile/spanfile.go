// Package spanfile writes the spans of a trace to a file, one JSON object a
// line, for a look at a trace without a collector.
package spanfile

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// maxBytes bounds the file; what comes later is left out.
const maxBytes = 256 << 20

// Exporter is a span exporter for a file. It is safe for concurrent use.
type Exporter struct {
	mu      sync.Mutex
	file    *os.File
	written int64
}

// Create makes the file, or goes on with one that is there.
func Create(path string) (*Exporter, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("trace file: %w", err)
	}
	return &Exporter{file: f}, nil
}

// span is one line.
type span struct {
	TraceID    string         `json:"trace_id"`
	SpanID     string         `json:"span_id"`
	ParentID   string         `json:"parent_span_id,omitempty"`
	Service    string         `json:"service,omitempty"`
	Name       string         `json:"name"`
	Start      time.Time      `json:"start"`
	DurationMS float64        `json:"duration_ms"`
	Error      string         `json:"error,omitempty"`
	Links      []string       `json:"links,omitempty"` // trace ids
	Attributes map[string]any `json:"attributes,omitempty"`
}

// ExportSpans implements sdktrace.SpanExporter.
func (e *Exporter) ExportSpans(_ context.Context, spans []sdktrace.ReadOnlySpan) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range spans {
		out := span{
			TraceID: s.SpanContext().TraceID().String(), SpanID: s.SpanContext().SpanID().String(), Name: s.Name(),
			Start: s.StartTime().UTC(), DurationMS: float64(s.EndTime().Sub(s.StartTime()).Microseconds()) / 1000,
			Error: s.Status().Description, Attributes: map[string]any{},
		}
		if s.Parent().HasSpanID() {
			out.ParentID = s.Parent().SpanID().String()
		}
		for _, l := range s.Links() {
			out.Links = append(out.Links, l.SpanContext.TraceID().String())
		}
		for _, a := range s.Attributes() {
			out.Attributes[string(a.Key)] = a.Value.AsInterface()
		}
		if r := s.Resource(); r != nil {
			for _, a := range r.Attributes() {
				if a.Key == "service.name" {
					out.Service = a.Value.AsString()
				}
			}
		}
		b, err := json.Marshal(out)
		if err != nil {
			return fmt.Errorf("trace file: span %s: %w", out.Name, err)
		}
		if e.written += int64(len(b)) + 1; e.written > maxBytes {
			return nil
		}
		if _, err := e.file.Write(append(b, '\n')); err != nil {
			return fmt.Errorf("trace file: %w", err)
		}
	}
	return nil
}

// Shutdown implements sdktrace.SpanExporter. Several tracer providers share the
// exporter, so the file is closed by [Exporter.Close] alone.
func (e *Exporter) Shutdown(context.Context) error { return nil }

// Close closes the file, after all that export have been shut down.
func (e *Exporter) Close() error { return e.file.Close() }
