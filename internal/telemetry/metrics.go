package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// ErrNotLoopback is returned when an unprotected endpoint would be reachable
// from other machines and nobody has allowed that.
var ErrNotLoopback = errors.New("address is not a loopback address")

// Metrics is a registry of metrics with the readiness checks beside it, and the
// small server for both.
type Metrics struct {
	// Probes decide /readyz.
	Probes *Probes
	// AllowRemote lets Serve listen on addresses other machines can reach. What
	// it serves has no authentication.
	AllowRemote bool

	registry *prometheus.Registry
}

// NewMetrics returns a registry of its own that holds the Go and process
// collectors and herdgate_build_info. The named checks are those of
// [NewProbes].
func NewMetrics(service, version string, checks ...string) *Metrics {
	reg := prometheus.NewRegistry()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "herdgate_build_info",
		Help:        "1; the labels tell which service in which version this is.",
		ConstLabels: prometheus.Labels{"service": service, "version": version},
	})
	info.Set(1)
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), info)
	return &Metrics{Probes: NewProbes(checks...), registry: reg}
}

// Registerer is where metrics are added.
func (m *Metrics) Registerer() prometheus.Registerer { return m.registry }

// Gatherer is where metrics are read.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// Handler serves /healthz, /readyz and /metrics.
func (m *Metrics) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", m.Probes.ServeHealth)
	mux.HandleFunc("GET /readyz", m.Probes.ServeReady)
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		MaxRequestsInFlight: 4,
		Timeout:             10 * time.Second,
	}))
	return mux
}

// Serve listens on addr and serves [Metrics.Handler] until ctx is done; it then
// returns nil. Without AllowRemote an addr that is not a loopback address is
// refused with [ErrNotLoopback].
func (m *Metrics) Serve(ctx context.Context, addr string) error {
	if !m.AllowRemote {
		if err := RequireLoopback(addr); err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	return m.ServeListener(ctx, l)
}

// ServeListener serves on l, which it closes, until ctx is done.
func (m *Metrics) ServeListener(ctx context.Context, l net.Listener) error {
	srv := &http.Server{
		Handler:           m.Handler(),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      15 * time.Second,
		IdleTimeout:       60 * time.Second,
		MaxHeaderBytes:    16 << 10,
	}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	select {
	case err := <-done:
		return fmt.Errorf("metrics: %w", err)
	case <-ctx.Done():
	}
	// A scrape under way may end, but not hold up the process.
	fresh, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := srv.Shutdown(fresh); err != nil {
		_ = srv.Close()
	}
	<-done //nolint:errcheck // it says that the server was closed
	return nil
}

// RequireLoopback checks that only this machine can reach addr, a host and a
// port. An empty host means all addresses and is refused, as are host names
// other than localhost: what they stand for can change.
func RequireLoopback(addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("address %q: want host:port, such as 127.0.0.1:9090", addr)
	}
	if host == "localhost" {
		return nil
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsLoopback() {
		return nil
	}
	return fmt.Errorf("%w: %q; want 127.0.0.1, [::1] or localhost", ErrNotLoopback, addr)
}
