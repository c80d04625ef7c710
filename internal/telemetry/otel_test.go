package telemetry

import (
	"context"
	"net"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
)

type grpcCollector struct {
	collectorpb.UnimplementedTraceServiceServer

	names chan string
}

func (c *grpcCollector) Export(_ context.Context, req *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	c.names <- req.ResourceSpans[0].ScopeSpans[0].Spans[0].Name
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

// Spans go over gRPC where the endpoint or OTEL_EXPORTER_OTLP_PROTOCOL says so, and
// over HTTP else; the configuration wins over the standard variables.
func TestProtocols(t *testing.T) {
	c := &grpcCollector{names: make(chan string, 8)}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	collectorpb.RegisterTraceServiceServer(srv, c)
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(ln) }()
	defer func() { srv.Stop(); <-served }()
	over := &collector{}
	web := httptest.NewServer(over)
	defer web.Close()
	send := func(endpoint string) {
		t.Helper()
		tel, err := Start(t.Context(), Config{SampleRatio: 1, OTLPEndpoint: endpoint})
		if err != nil {
			t.Fatal(err)
		}
		_, span := tel.Tracer("test").Start(t.Context(), "one")
		span.End()
		if err := tel.Shutdown(); err != nil {
			t.Error(err)
		}
	}
	arrived := func(want int) {
		t.Helper()
		for range want {
			select {
			case <-c.names:
			case <-time.After(10 * time.Second):
				t.Fatal("no span came over gRPC")
			}
		}
	}
	send("grpc://" + ln.Addr().String())
	arrived(1)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", web.URL)
	send("")
	send("grpc://" + ln.Addr().String())
	arrived(1)
	if got := strings.Join(over.paths, " "); got != "/v1/traces" {
		t.Errorf("requests over HTTP to %q, want one to /v1/traces", got)
	}
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+ln.Addr().String())
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
	send("")
	arrived(1)
	t.Setenv("OTEL_SDK_DISABLED", "true")
	send("grpc://" + ln.Addr().String())
	if len(c.names) > 0 || len(over.paths) != 1 {
		t.Error("spans are exported although OTEL_SDK_DISABLED is set")
	}
}

// F-172: a collector that takes connections and never answers holds up nobody, and
// what waits for it is bounded.
func TestSilentCollectorCostsNoMemory(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // accepted by the system, never read
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, endpoint := range []string{"grpc://" + ln.Addr().String(), ln.Addr().String()} {
		tel, err := Start(t.Context(), Config{SampleRatio: 1, OTLPEndpoint: endpoint})
		if err != nil {
			t.Fatal(err)
		}
		tracer := tel.Tracer("test")
		spans := func(n int) {
			for range n {
				_, span := tracer.Start(t.Context(), "x")
				span.SetAttributes(AttrGenAIToolName.String(strings.Repeat("y", 1000)))
				span.End()
			}
		}
		heap := func() uint64 {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		spans(2 * maxQueue) // full
		before := heap()
		spans(5 * maxQueue) // 40 MB of text, were it kept
		if after := heap(); after > before+20<<20 {
			t.Errorf("%s: the heap grew from %d to %d bytes", endpoint, before, after)
		}
		_ = tel.shutdown(300 * time.Millisecond) // whether it counts as an error is not the point
	}
}
