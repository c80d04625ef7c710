// Package natstest gives each test a nats-server of its own: in the process,
// with a store in a temporary directory, gone when the test ends. A start takes
// a few milliseconds.
package natstest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natsd"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Timeout bounds every wait of this package.
const Timeout = 20 * time.Second

const (
	maxStore      = 4 << 30
	maxMemory     = 1 << 30
	eventMaxBytes = 256 << 20
)

// Server is the server of one test.
type Server struct {
	t   testing.TB
	cfg natsd.Config

	mu  sync.Mutex
	srv *natsd.Server // nil while it is down
}

// Option changes how a server starts.
type Option func(*natsd.Config)

// Listen makes the server take TCP connections, for tests with several
// processes or with a proxy between. The port stays the same over [Server.Restart].
func Listen() Option { return func(c *natsd.Config) { c.Listen = "127.0.0.1:0" } }

// Log sends the server's messages to log.
func Log(log zerolog.Logger) Option { return func(c *natsd.Config) { c.Log = log } }

// Tune changes options of nats-server, such as users with permissions.
func Tune(f func(*server.Options)) Option { return func(c *natsd.Config) { c.Tune = f } }

// MaxPayload bounds messages to n bytes.
func MaxPayload(n int32) Option { return Tune(func(o *server.Options) { o.MaxPayload = n }) }

// Start runs an empty server until the test ends.
func Start(t testing.TB, opts ...Option) *Server {
	t.Helper()
	s := &Server{t: t, cfg: natsd.Config{
		StoreDir:  t.TempDir(),
		Name:      "natstest",
		MaxStore:  maxStore,
		MaxMemory: maxMemory,
		Log:       zerolog.Nop(),
	}}
	for _, o := range opts {
		o(&s.cfg)
	}
	s.start()
	t.Cleanup(s.Kill)
	return s
}

// New runs a server with all assets of the default names (max_running 3,
// max_queued 64) and a connection to it.
func New(t testing.TB, opts ...Option) (*Server, *bus.Conn) {
	t.Helper()
	s := Start(t, opts...)
	s.Provision(provision.Config{MaxRunning: 3, MaxQueued: 64})
	return s, s.Conn("test")
}

// Cluster runs size servers that replicate among each other, until the test
// ends. It returns when they have a leader, well under a second later.
func Cluster(t testing.TB, size int) []*Server {
	t.Helper()
	// Routes must be known before the first server starts, so the ports are
	// looked for first. Another process may take one in between, hence the tries.
	for try := 1; ; try++ {
		servers, err := cluster(t, size)
		if err == nil {
			return servers
		}
		if try == 3 {
			t.Fatalf("natstest: cluster: %v", err)
		}
	}
}

func cluster(t testing.TB, size int) (_ []*Server, err error) {
	ports, err := freePorts(size)
	if err != nil {
		return nil, err
	}
	var routes []*url.URL
	for _, p := range ports {
		routes = append(routes, &url.URL{Scheme: "nats", Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(p))})
	}
	var servers []*Server
	defer func() {
		if err != nil {
			for _, s := range servers {
				s.Kill()
			}
		}
	}()
	for i, port := range ports {
		s := &Server{t: t, cfg: natsd.Config{
			StoreDir: t.TempDir(), Name: fmt.Sprintf("natstest-%d", i+1), Listen: "127.0.0.1:0", MaxStore: maxStore, MaxMemory: maxMemory, Log: zerolog.Nop(),
			Tune: func(o *server.Options) {
				o.Cluster = server.ClusterOpts{Name: "natstest", Host: "127.0.0.1", Port: port}
				o.Routes = routes
			},
		}}
		if err := s.run(); err != nil {
			return nil, err
		}
		servers = append(servers, s)
	}
	nc, err := nats.Connect("", nats.InProcessServer(servers[0]))
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	// Without a leader nobody answers.
	deadline := time.Now().Add(Timeout)
	for {
		_, err := nc.Request("$JS.API.INFO", nil, 500*time.Millisecond)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("no leader: %w", err)
		}
	}
	for _, s := range servers {
		t.Cleanup(s.Kill)
	}
	return servers, nil
}

func freePorts(n int) ([]int, error) {
	var ports []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer func() { _ = l.Close() }()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

func (s *Server) start() {
	s.t.Helper()
	if err := s.run(); err != nil {
		s.t.Fatalf("natstest: start: %v", err)
	}
}

func (s *Server) run() error {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	srv, err := natsd.Start(ctx, s.cfg)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.srv = srv
	if u := srv.ClientURL(); u != "" {
		s.cfg.Listen = u[len("nats://"):]
	}
	return nil
}

// Kill stops the server without a word to its clients, which keep trying to
// connect. What was stored stays for [Server.Restart].
func (s *Server) Kill() {
	s.mu.Lock()
	srv := s.srv
	s.srv = nil
	s.mu.Unlock()
	if srv != nil {
		srv.Stop()
	}
}

// Restart runs the server again on the same store, after a [Server.Kill] or
// instead of one. Connections come back by themselves.
func (s *Server) Restart() {
	s.t.Helper()
	s.Kill()
	s.start()
}

// URL is the address of a server with [Listen].
func (s *Server) URL() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.srv == nil {
		return "nats://" + s.cfg.Listen
	}
	return s.srv.ClientURL()
}

// InProcessConn connects to whatever server runs now, so that clients find the
// new one after a restart.
func (s *Server) InProcessConn() (net.Conn, error) {
	s.mu.Lock()
	srv := s.srv
	s.mu.Unlock()
	if srv == nil {
		return nil, errors.New("natstest: the server is down")
	}
	return srv.InProcess().InProcessConn()
}

// Conn connects under the default prefix as a service called name. The
// connection is closed when the test ends.
func (s *Server) Conn(name string) *bus.Conn {
	s.t.Helper()
	return s.Connect(bus.Config{Name: name})
}

// Connect connects as cfg says, in the process unless cfg has a URL. An empty
// prefix takes the default one. The connection is closed when the test ends.
func (s *Server) Connect(cfg bus.Config) *bus.Conn {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	c, err := bus.Connect(ctx, s.BusConfig(cfg), zerolog.Nop())
	if err != nil {
		s.t.Fatalf("natstest: connect: %v", err)
	}
	s.t.Cleanup(c.Close)
	return c
}

// BusConfig fills in how to reach this server, unless cfg says it.
func (s *Server) BusConfig(cfg bus.Config) bus.Config {
	if cfg.Prefix == "" {
		cfg.Prefix = contract.DefaultPrefix
	}
	if cfg.URL == "" && cfg.InProcess == nil {
		cfg.InProcess = s
	}
	return cfg
}

// Provision creates the assets; limits on stored bytes are those of a test.
func (s *Server) Provision(cfg provision.Config) provision.Assets {
	s.t.Helper()
	if cfg.EventMaxBytes == 0 {
		cfg.EventMaxBytes = eventMaxBytes
	}
	c := s.Conn("provision")
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	a := provision.Desired(cfg)
	if _, err := provision.Apply(ctx, c.NC, a); err != nil {
		s.t.Fatalf("natstest: %v", err)
	}
	return a
}

// Eventually asks cond again and again until it is true. When timeout has
// passed the test fails with what cond said last. It is the one place where a
// test may poll; a signal from the code is better where there is one.
func Eventually(t testing.TB, timeout time.Duration, cond func() (bool, string)) {
	t.Helper()
	deadline := time.Now().Add(timeout)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, state := cond()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", timeout, state)
		}
		<-tick.C
	}
}

var _ nats.InProcessConnProvider = (*Server)(nil)
