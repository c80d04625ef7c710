// Package natsd runs a nats-server with JetStream inside the process.
//
// It is for one machine: the single-binary mode, trials and tests. The store
// directory belongs to one server at a time, which a lock guards, because
// nats-server itself would let two of them write into it.
package natsd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gofrs/flock"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
)

// MaxPayload is the largest message, headers included, in bytes.
const MaxPayload = 1 << 20

// LockName is the lock file in the store directory. It holds the process id.
const LockName = "herdgate.lock"

// startTimeout bounds Start when its context has no deadline. Reading back a
// large store takes seconds, not minutes.
const startTimeout = 60 * time.Second

// Errors of [Start].
var (
	// ErrInUse: another server holds the store directory.
	ErrInUse = errors.New("store directory is in use")
	// ErrRemote: the listen address can be reached from other machines.
	ErrRemote = errors.New("listen address is not on the loopback interface")
)

// Config says how to run the server.
type Config struct {
	// StoreDir keeps the streams. It is made if it is missing.
	StoreDir string
	// Listen is a TCP address, host:port, for other processes; port 0 takes a
	// free one. Empty: no TCP, connections come through InProcess only.
	Listen string
	// AllowRemote permits a Listen address that other machines can reach. The
	// server asks nobody for a password, so whoever reaches it owns it.
	AllowRemote bool
	// Name of the server; default "herdgate".
	Name string
	// MaxStore and MaxMemory bound JetStream, in bytes. 0 leaves it to
	// nats-server: three quarters of the free disk and of the memory.
	MaxStore, MaxMemory int64
	// Log gets the server's messages.
	Log zerolog.Logger
	// Tune, if not nil, changes the server's options last, for tests.
	Tune func(*server.Options)
}

// Server is a running server.
type Server struct {
	srv  *server.Server
	lock *flock.Flock
	tcp  bool
	once sync.Once
}

// Start runs a server and returns when it takes connections and JetStream is
// up, or with the reason why not.
func Start(ctx context.Context, cfg Config) (_ *Server, err error) {
	opts, err := options(cfg)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.StoreDir, 0o700); err != nil {
		return nil, fmt.Errorf("nats store directory: %w", err)
	}
	lock, err := acquire(cfg.StoreDir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			release(lock)
		}
	}()

	srv, err := server.NewServer(opts)
	if err != nil {
		return nil, fmt.Errorf("nats-server: %w", err)
	}
	log := newLogger(cfg.Log)
	srv.SetLoggerV2(log, cfg.Log.GetLevel() <= zerolog.TraceLevel, false, false)
	srv.Start()
	if err := ready(ctx, srv, log); err != nil {
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, err
	}
	return &Server{srv: srv, lock: lock, tcp: !opts.DontListen}, nil
}

func options(cfg Config) (*server.Options, error) {
	if cfg.StoreDir == "" {
		return nil, errors.New("nats store directory: the path is empty")
	}
	opts := &server.Options{
		ServerName:             cfg.Name,
		DontListen:             true,
		JetStream:              true,
		StoreDir:               cfg.StoreDir,
		JetStreamMaxStore:      cfg.MaxStore,
		JetStreamMaxMemory:     cfg.MaxMemory,
		DisableJetStreamBanner: true,
		MaxPayload:             MaxPayload,
		// Signals are the program's own affair.
		NoSigs: true,
	}
	if opts.ServerName == "" {
		opts.ServerName = "herdgate"
	}
	if cfg.Listen != "" {
		host, port, err := splitListen(cfg.Listen)
		if err != nil {
			return nil, err
		}
		if !cfg.AllowRemote && !loopback(host) {
			return nil, fmt.Errorf("nats listen address %q: %w, and the embedded server has no passwords; use 127.0.0.1, or run a nats-server of your own with authentication", cfg.Listen, ErrRemote)
		}
		opts.DontListen = false
		opts.Host = host
		opts.Port = port
		if port == 0 {
			opts.Port = server.RANDOM_PORT
		}
	}
	if cfg.Tune != nil {
		cfg.Tune(opts)
	}
	return opts, nil
}

func splitListen(addr string) (string, int, error) {
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, fmt.Errorf("nats listen address %q: want host:port: %w", addr, err)
	}
	port, err := strconv.Atoi(p)
	if err != nil || port < 0 || port > 65535 {
		return "", 0, fmt.Errorf("nats listen address %q: port is %q; want a number from 0 to 65535", addr, p)
	}
	return host, port, nil
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// ready waits until srv takes connections. A fatal message of the server ends
// the wait, because the server only writes it down and stays half started.
func ready(ctx context.Context, srv *server.Server, log *logger) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for !srv.ReadyForConnections(20 * time.Millisecond) {
		select {
		case msg := <-log.fatal:
			return fmt.Errorf("nats-server: %s", msg)
		case <-ctx.Done():
			return fmt.Errorf("nats-server: not ready: %w", ctx.Err())
		default:
		}
	}
	// NewServer and Start report nothing when the store cannot be used.
	if !srv.JetStreamEnabled() {
		select {
		case msg := <-log.fatal:
			return fmt.Errorf("nats-server: JetStream did not start: %s", msg)
		default:
			return errors.New("nats-server: JetStream did not start; see its log, and check that the store directory can be written")
		}
	}
	return nil
}

// ClientURL is where other processes connect; empty without Listen.
func (s *Server) ClientURL() string {
	if !s.tcp {
		return ""
	}
	return s.srv.ClientURL()
}

// InProcess connects clients of this process.
func (s *Server) InProcess() nats.InProcessConnProvider { return s.srv }

// StoreLimit is how many bytes JetStream may keep on disk. Streams reserve
// their max_bytes out of it, so limits must be chosen to fit.
func (s *Server) StoreLimit() int64 {
	if c := s.srv.JetStreamConfig(); c != nil {
		return c.MaxStore
	}
	return 0
}

// Stop ends the server and returns when it is gone and the store directory is
// free. It may be called more than once.
func (s *Server) Stop() {
	s.once.Do(func() {
		s.srv.Shutdown()
		s.srv.WaitForShutdown()
		release(s.lock)
	})
}

func acquire(dir string) (*flock.Flock, error) {
	path := filepath.Join(dir, LockName)
	lock := flock.New(path, flock.SetFlag(os.O_CREATE|os.O_RDWR), flock.SetPermissions(0o600))
	ok, err := lock.TryLock()
	if err != nil {
		return nil, fmt.Errorf("nats store directory: lock %s: %w", path, err)
	}
	if !ok {
		holder := "another process"
		if b, err := os.ReadFile(path); err == nil {
			if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
				holder = fmt.Sprintf("process %d", pid)
			}
		}
		return nil, fmt.Errorf("%w: %s is held by %s (lock file %s); stop it, connect to it, or use another data directory", ErrInUse, dir, holder, path)
	}
	if err := os.WriteFile(path, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600); err != nil {
		release(lock)
		return nil, fmt.Errorf("nats store directory: write %s: %w", path, err)
	}
	return lock, nil
}

// release frees the lock. The file stays: removing it would let two processes
// hold locks on two files of the same name.
func release(lock *flock.Flock) {
	_ = os.Truncate(lock.Path(), 0)
	_ = lock.Close()
}
