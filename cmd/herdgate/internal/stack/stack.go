// Package stack runs several services in one process, on an embedded NATS
// server unless another one is configured.
package stack

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natsd"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/rungroup"
)

// The names of the services, in the order in which they stop: who takes work in
// stops first, who keeps what happened last.
const (
	Lead      = "lead"
	Executor  = "executor"
	Admission = "admission"
	Eventsink = "eventsink"
)

// stages are the services that stop together.
var stages = [][]string{{Lead, Executor}, {Admission}, {Eventsink}}

// Services lists the names of all services.
func Services() []string { return []string{Lead, Admission, Executor, Eventsink} }

// ParseServices reads a list of services as the command line has it: names
// joined by commas, "" or "all" for all of them, "none" for none.
func ParseServices(list string) ([]string, error) {
	switch list {
	case "", "all":
		return Services(), nil
	case "none":
		return nil, nil
	}
	var out []string
	for _, name := range strings.Split(list, ",") {
		name = strings.TrimSpace(name)
		if !slices.Contains(Services(), name) {
			return nil, fmt.Errorf("--services: %q is no service; want some of %s, joined by commas, or none", name, strings.Join(Services(), ","))
		}
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out, nil
}

// connectTimeout bounds one try to reach NATS.
const connectTimeout = 10 * time.Second

// Config says what to run.
type Config struct {
	Env *process.Env
	// Services to run, out of those in Serve.
	Services []string
	Serve    map[string]process.Serve
	// Listen lets other processes join the embedded server; it wins over the
	// configuration.
	Listen string
}

// Stack is what was started; Run must follow.
type Stack struct {
	cfg    Config
	server *natsd.Server
}

// Embedded reports whether env has no NATS server configured, so that one is
// embedded.
func Embedded(env *process.Env) bool {
	return env.Config.NATS.URL == "" && env.Config.NATS.Context == ""
}

// StoreDir is where the embedded server keeps its files.
func StoreDir(env *process.Env) string {
	if dir := env.Config.NATS.Embedded.StoreDir; dir != "" {
		return dir
	}
	return filepath.Join(env.DataDir, "nats")
}

// Start starts the embedded server, if one is needed, and brings its streams and
// buckets in line. After an error nothing is left running.
//
// An outside server may not be there yet. [Stack.Run] brings its streams and
// buckets in line as soon as it is, beside the services, which meanwhile tell
// whoever asks what they wait for.
func Start(ctx context.Context, cfg Config) (*Stack, error) {
	s := &Stack{cfg: cfg}
	env := cfg.Env
	listen := cfg.Listen
	if Embedded(env) {
		if listen == "" {
			listen = env.Config.NATS.Embedded.Listen
		}
		server, err := natsd.Start(ctx, natsd.Config{StoreDir: StoreDir(env), Listen: listen, Log: env.LogOf("nats")})
		if errors.Is(err, natsd.ErrInUse) {
			return nil, fmt.Errorf("another herdgate process runs on this data directory: %w", err)
		}
		if err != nil {
			return nil, err
		}
		s.server = server
		env.InProcess = server.InProcess()
		env.EventMaxBytes = eventMaxBytes(server.StoreLimit())
	} else if listen != "" {
		return nil, errors.New("--nats-listen is for the embedded server, but an outside one is configured (nats.url, nats.context, --nats-url or --context); leave one of them out")
	}
	if s.server != nil {
		if err := s.provision(ctx); err != nil {
			s.stop()
			return nil, err
		}
	}
	for _, name := range cfg.Services {
		// As the services will call it: before they have started, nothing is ready.
		env.Metrics.Probes.Set(name+": nats", errors.New("starting"))
	}
	return s, nil
}

// eventMaxBytes is how much of the store the events may take. It is one of few
// sizes, so that it does not change with every start as the disk fills.
func eventMaxBytes(limit int64) int64 {
	size := int64(provision.DefaultEventMaxBytes)
	for size > 64<<20 && size > limit/2 {
		size /= 2
	}
	return size
}

func (s *Stack) provision(ctx context.Context) error {
	env := s.cfg.Env
	assets, err := env.Assets()
	if err != nil {
		return err
	}
	cfg, err := env.BusConfig("provision")
	if err != nil {
		return err
	}
	conn, err := s.connect(ctx, cfg)
	if err != nil {
		return err
	}
	defer conn.Close()
	changes, err := provision.Apply(ctx, conn.NC, assets)
	switch {
	case err == nil:
		for _, c := range changes {
			env.Log.Debug().Str("asset", c.Name).Bool("created", c.Missing).Msg("provisioned")
		}
		return nil
	case s.server == nil && ctx.Err() == nil:
		// On somebody else's server it may not be ours to change anything; the
		// services themselves look whether they can work with what there is.
		env.Log.Warn().Err(err).Msg("streams and buckets could not be brought in line")
		return nil
	}
	return fmt.Errorf("provision: %w", err)
}

func (s *Stack) connect(ctx context.Context, cfg bus.Config) (*bus.Conn, error) {
	for {
		try, cancel := context.WithTimeout(ctx, connectTimeout)
		conn, err := bus.Connect(try, cfg, s.cfg.Env.Log)
		cancel()
		if err == nil {
			return conn, nil
		}
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return nil, err
		}
		s.cfg.Env.Log.Warn().Err(err).Msg("waiting for NATS")
	}
}

// Outside is where other processes reach the embedded server; empty when there
// is none or it does not listen.
func (s *Stack) Outside() string {
	if s.server == nil {
		return ""
	}
	return s.server.ClientURL()
}

// Run runs the services until ctx is done or one of them ends, then stops them
// one stage after the other and the embedded server last.
func (s *Stack) Run(ctx context.Context) error {
	env := s.cfg.Env
	var all rungroup.Stages
	for _, names := range stages {
		var stage []rungroup.Component
		for _, name := range names {
			if slices.Contains(s.cfg.Services, name) {
				serve := s.cfg.Serve[name]
				stage = append(stage, rungroup.Component{Name: name, Run: func(ctx context.Context) error { return serve(ctx, env) }})
			}
		}
		all = append(all, stage)
	}
	var last []rungroup.Component
	if addr := env.Config.Telemetry.MetricsAddr; addr != "" {
		last = append(last, rungroup.Component{Name: "metrics", Run: func(ctx context.Context) error { return env.Metrics.Serve(ctx, addr) }})
	}
	if s.server == nil {
		last = append(last, rungroup.Component{Name: "provision", Run: func(ctx context.Context) error {
			err := s.provision(ctx)
			if err != nil && ctx.Err() == nil {
				return err
			}
			<-ctx.Done()
			return nil
		}})
	} else {
		last = append(last, rungroup.Component{Name: "nats", Run: func(ctx context.Context) error {
			<-ctx.Done()
			s.stop()
			return nil
		}})
	}
	err := append(all, last).Run(ctx, env.Log, env.Grace())
	s.stop()
	return err
}

func (s *Stack) stop() {
	if s.server != nil {
		s.server.Stop()
	}
}
