package e2e

import (
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

// Collector takes spans over OTLP/HTTP, as a real one would.
type Collector struct {
	URL string

	mu    sync.Mutex
	spans map[string]span // by span id
}

type span struct {
	trace, parent, name, service string
	links                        []string // the traces that it links to
}

// NewCollector starts a collector.
func NewCollector(t *testing.T) *Collector {
	c := &Collector{spans: map[string]span{}}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(io.LimitReader(r.Body, 32<<20))
		var req collector.ExportTraceServiceRequest
		if err != nil || proto.Unmarshal(body, &req) != nil {
			http.Error(w, "not OTLP", http.StatusBadRequest)
			return
		}
		c.take(&req)
	}))
	t.Cleanup(srv.Close)
	c.URL = srv.URL
	return c
}

func (c *Collector) take(req *collector.ExportTraceServiceRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range req.ResourceSpans {
		service := ""
		for _, kv := range rs.Resource.Attributes {
			if kv.Key == "service.name" {
				service = kv.Value.GetStringValue()
			}
		}
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				var links []string
				for _, l := range s.Links {
					links = append(links, hex.EncodeToString(l.TraceId))
				}
				c.spans[hex.EncodeToString(s.SpanId)] = span{hex.EncodeToString(s.TraceId), hex.EncodeToString(s.ParentSpanId), s.Name, service, links}
			}
		}
	}
}

// Check says what is wrong with a trace that should span all services, the sink by
// links, or nothing.
func (c *Collector) Check(trace string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	services := map[string]bool{}
	roots := 0
	for _, s := range c.spans {
		if s.trace != trace {
			if slices.Contains(s.links, trace) {
				services[s.service] = true // a batch, which is in a trace of its own
			}
			continue
		}
		services[s.service] = true
		if s.parent == "" {
			roots++
		} else if p, ok := c.spans[s.parent]; !ok || p.trace != trace {
			return fmt.Sprintf("span %q of %s has no parent in the trace", s.name, s.service)
		}
	}
	if roots != 1 {
		return fmt.Sprintf("%d root spans, want 1", roots)
	}
	for _, want := range []string{"herdgate-lead", "herdgate-admission", "herdgate-executor", "herdgate-eventsink"} {
		if !services[want] {
			return fmt.Sprintf("no span of %s among %v", want, services)
		}
	}
	return ""
}
