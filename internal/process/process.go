// Package process is what every Herdgate process does around its services: read
// the configuration, open the log, connect to NATS, wait until the assets are
// there, serve health and metrics, and end in order. The order is always the
// same: configuration, telemetry, bus, service; teardown runs backwards.
package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Version is the program's version; the build sets it.
var Version = "0.1.0-dev"

// Env is what all services of one process share.
type Env struct {
	Config config.Config
	// DataDir holds the event store, the workspaces and the embedded server's files.
	DataDir string
	// Name of the process, unique in the deployment.
	Name    string
	Log     zerolog.Logger
	Metrics *telemetry.Metrics
	// InProcess connects to an embedded server; nil goes over the network.
	InProcess nats.InProcessConnProvider
	// Script, when set, is the text of the offline model "offline", which is then
	// the only one.
	Script []byte
	// Exporter gets every span; for tests.
	Exporter sdktrace.SpanExporter
	// Contexts finds a context of the nats command-line tool. The library that
	// reads them brings a whole server along, so that only herdgate has it.
	Contexts ContextFinder
	// EventMaxBytes bounds the stored events; 0 takes the default. An embedded
	// server may have room for less.
	EventMaxBytes int64
	// OnHTTP, when set, is told where the HTTP API listens, once it does.
	OnHTTP func(addr string)

	lines *zerolog.Logger // Log before it got the name of a service
}

// LogOf is the log of one service of the process. It names the service once:
// a line with two fields of one name is read differently by every reader.
func (e *Env) LogOf(service string) zerolog.Logger {
	log := e.Log
	if e.lines != nil {
		log = *e.lines
	}
	return log.With().Str("service", service).Logger()
}

// ContextFinder returns the servers and options of a named context.
type ContextFinder func(name string) (url string, opts []nats.Option, err error)

// Options are what the command line says.
type Options struct {
	ConfigFile  string
	DataDir     string
	NATSURL     string
	NATSContext string
	HTTPAddr    string
	MetricsAddr string
	LogLevel    string
	LogFormat   string
	Name        string
	// Stderr gets the log; nil is os.Stderr.
	Stderr   io.Writer
	Contexts ContextFinder
	// NoDataDir leaves the data directory alone, for what needs none.
	NoDataDir bool
}

// NewEnv reads the configuration: defaults, file, environment, command line.
func NewEnv(service string, o Options) (*Env, error) {
	cfg, err := config.Load(config.Options{File: o.ConfigFile, FileExplicit: o.ConfigFile != "", Env: os.Environ()})
	if err != nil {
		return nil, err
	}
	if o.NATSURL != "" {
		cfg.NATS.URL = config.Address(o.NATSURL)
	}
	if o.NATSContext != "" {
		cfg.NATS.Context = o.NATSContext
	}
	if o.HTTPAddr != "" {
		cfg.HTTP.Addr = o.HTTPAddr
	}
	if o.MetricsAddr != "" {
		cfg.Telemetry.MetricsAddr = o.MetricsAddr
	}
	w := o.Stderr
	if w == nil {
		w = os.Stderr
	}
	lines, err := telemetry.NewLogger(w, "", o.LogLevel, LogFormat(o.LogFormat, w))
	if err != nil {
		return nil, err
	}
	log := lines.With().Str("service", service).Logger()
	dir := ""
	if !o.NoDataDir {
		if dir, err = DataDir(o.DataDir); err != nil {
			return nil, err
		}
	}
	name := o.Name
	if name == "" {
		name = defaultName(service)
	}
	if err := contract.ValidateToken("name", name); err != nil {
		return nil, fmt.Errorf("--name: %w", err)
	}
	for _, note := range cfg.Notes() {
		log.Warn().Msg("config: " + note)
	}
	return &Env{Config: cfg, DataDir: dir, Name: name, Log: log, Metrics: telemetry.NewMetrics(service, Version), Contexts: o.Contexts, lines: &lines}, nil
}

// LogFormat is the format of log lines on w: the one that was asked for, or
// what suits w.
func LogFormat(asked string, w io.Writer) string {
	if asked != "" {
		return asked
	}
	if f, ok := w.(*os.File); ok {
		if info, err := f.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			return telemetry.FormatConsole
		}
	}
	return telemetry.FormatJSON
}

// DataDir makes the data directory and returns its absolute path.
func DataDir(dir string) (string, error) {
	if dir == "" {
		dir = "./.herdgate"
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("--data-dir: %w", err)
	}
	if err := os.MkdirAll(abs, 0o755); err != nil {
		return "", fmt.Errorf("--data-dir: %w", err)
	}
	return abs, nil
}

// defaultName is service, host and a random part: several processes of one
// service on one host need different names.
func defaultName(service string) string {
	host, err := os.Hostname()
	if err != nil {
		host = "host"
	}
	var b strings.Builder
	for _, r := range host {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' {
			b.WriteRune(r)
		}
	}
	h := b.String()
	return service + "-" + h[:min(len(h), 30)] + "-" + bus.RandomToken(2)
}

// Service is one service's own connection, tracer and log.
type Service struct {
	*Env
	Bus *bus.Conn
	Log zerolog.Logger
	Tel *telemetry.Telemetry

	check string // the name of the readiness check of the connection
}

// Open connects a service to NATS and waits until the assets that it needs are
// there and safe to use, as long as ctx goes on; readiness says what is missing.
// Without names of streams it waits for none.
func (e *Env) Open(ctx context.Context, service string, streams func(contract.Names) []string) (*Service, error) {
	log := e.LogOf(service).With().Str("instance", e.Name).Logger()
	tel, err := telemetry.Start(ctx, telemetry.Config{
		Service: "herdgate-" + service, Version: Version, Instance: e.Name, OTLPEndpoint: string(e.Config.Telemetry.OTLPEndpoint),
		SampleRatio: e.Config.Telemetry.SampleRatio, CaptureContent: e.Config.Telemetry.CaptureContent, Exporter: e.Exporter, Log: log,
	})
	if err != nil {
		return nil, err
	}
	check := service + ": nats"
	s := &Service{Env: e, Log: log, Tel: tel, check: check}
	e.Metrics.Probes.Set(check, errors.New("connecting to NATS"))
	if s.Bus, err = e.connect(ctx, service, log); err != nil {
		return nil, errors.Join(err, tel.Shutdown())
	}
	if streams != nil {
		assets, err := e.Assets()
		if err == nil {
			assets = assets.Only(streams(s.Bus.Names)...)
			err = s.waitForAssets(ctx, check, assets)
		}
		if err != nil {
			s.Close()
			return nil, err
		}
		// A connection that stands proves little: the server may be frozen, have
		// switched JetStream off after a disk fault, or have lost its streams.
		e.Metrics.Probes.Ask(check, func(ctx context.Context) error {
			if _, err := provision.Verify(ctx, s.Bus.NC, assets); err != nil {
				return fmt.Errorf("JetStream cannot be used: %w", err)
			}
			return nil
		})
	}
	e.Metrics.Probes.Set(check, nil)
	s.watchConnection(check)
	return s, nil
}

// Ready is told of the service's readiness.
func (s *Service) Ready(check string, err error) { s.Metrics.Probes.Set(check, err) }

// Close flushes traces and closes the connection.
func (s *Service) Close() {
	s.Metrics.Probes.Ask(s.check, nil)
	if s.Bus != nil {
		s.Bus.Close()
	}
	if err := s.Tel.Shutdown(); err != nil {
		s.Log.Warn().Err(err).Msg("the last spans could not be exported")
	}
}

// watchConnection keeps the readiness check in step with the connection, until
// the connection is closed for good.
func (s *Service) watchConnection(check string) {
	nc, probes := s.Bus.NC, s.Metrics.Probes
	// The bus has handlers of its own, which log, and let go of whoever waits for
	// an answer on the lost connection. There is room for one, so they are called
	// from here.
	lost, back := nc.DisconnectErrHandler(), nc.ReconnectHandler()
	nc.SetDisconnectErrHandler(func(nc *nats.Conn, err error) {
		lost(nc, err)
		if err == nil {
			err = errors.New("disconnected")
		}
		probes.Set(check, fmt.Errorf("not connected to NATS: %w", err))
	})
	nc.SetReconnectHandler(func(nc *nats.Conn) {
		back(nc)
		probes.Set(check, nil)
	})
}

// DefaultURL is where a service looks for NATS when nothing is configured.
const DefaultURL = nats.DefaultURL

// BusConfig is how service connects.
func (e *Env) BusConfig(service string) (bus.Config, error) {
	n := e.Config.NATS
	cfg := bus.Config{
		URL: string(n.URL), Name: service + "-" + e.Name, Prefix: n.Prefix, CredsFile: n.CredsFile, NKeySeed: n.NKeySeed,
		TLS: bus.TLS{CA: n.TLS.CA, Cert: n.TLS.Cert, Key: n.TLS.Key}, InProcess: e.InProcess,
	}
	switch {
	case e.InProcess != nil:
		cfg.URL = ""
	case n.Context != "":
		if e.Contexts == nil {
			return cfg, errors.New("nats.context: the stand-alone service binaries know no contexts; set nats.url, or use `herdgate` itself")
		}
		url, opts, err := e.Contexts(n.Context)
		if err != nil {
			return cfg, fmt.Errorf("nats.context %q: %w; `nats context ls` lists them", n.Context, err)
		}
		cfg.URL, cfg.Extra = url, opts
	case cfg.URL == "":
		cfg.URL = DefaultURL
	}
	return cfg, nil
}

func (e *Env) connect(ctx context.Context, service string, log zerolog.Logger) (*bus.Conn, error) {
	cfg, err := e.BusConfig(service)
	if err != nil {
		return nil, err
	}
	for {
		try, cancel := context.WithTimeout(ctx, 10*time.Second)
		c, err := bus.Connect(try, cfg, log)
		cancel()
		if err == nil {
			return c, nil
		}
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return nil, err
		}
		e.Metrics.Probes.Set(service+": nats", err)
		log.Warn().Err(err).Msg("waiting for NATS")
	}
}

// Assets are those that the configuration asks for.
func (e *Env) Assets() (provision.Assets, error) {
	names, err := contract.NewNames(e.Config.NATS.Prefix)
	if err != nil {
		return provision.Assets{}, err
	}
	pools := map[contract.Pool]int{}
	for name, p := range e.Config.SubagentRuntime.Pools {
		pools[contract.Pool(name)] = p.MaxRunning
	}
	return provision.Desired(provision.Config{
		Names: names, Replicas: e.Config.NATS.Replicas, MaxRunning: e.Config.SubagentRuntime.MaxRunning, Pools: pools,
		MaxQueued: e.Config.SubagentRuntime.MaxQueued, AdmissionPolicy: e.Config.SubagentRuntime.AdmissionPolicy,
		EventMaxBytes: e.EventMaxBytes,
	}), nil
}

func (s *Service) waitForAssets(ctx context.Context, check string, assets provision.Assets) error {
	told, pause := "", 50*time.Millisecond
	for {
		try, cancel := context.WithTimeout(ctx, 10*time.Second)
		warnings, err := provision.Verify(try, s.Bus.NC, assets)
		cancel()
		if err == nil {
			for _, w := range warnings {
				s.Log.Warn().Str("asset", w.String()).Msg("an asset differs from the configuration; `herdgate provision` brings it in line")
			}
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.Metrics.Probes.Set(check, err)
		if err.Error() != told {
			told = err.Error()
			s.Log.Warn().Err(err).Msg("waiting for the NATS assets")
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		}
	}
}

// Subagents is what the configuration says about types of sub-agents.
func (e *Env) Subagents() subagent.Config {
	s := e.Config.Subagents
	cfg := subagent.Config{TimeoutSeconds: &s.TimeoutSeconds, MaxTurns: s.MaxTurns, Agents: map[string]subagent.Override{}}
	for name, o := range s.Agents {
		cfg.Agents[name] = subagent.Override{TimeoutSeconds: o.TimeoutSeconds, MaxTurns: o.MaxTurns, Model: o.Model, Pool: (*contract.Pool)(o.Pool), Skills: o.Skills, Network: o.Network}
	}
	for _, a := range s.CustomAgentList() {
		denied := []string(a.DisallowedTools)
		cfg.Custom = append(cfg.Custom, subagent.Custom{
			Name: a.Name, Description: a.Description, SystemPrompt: a.SystemPrompt, Tools: a.Tools, DisallowedTools: &denied,
			Skills: a.Skills, Model: a.Model, Pool: contract.Pool(a.Pool), MaxTurns: &a.MaxTurns, TimeoutSeconds: &a.TimeoutSeconds, Network: a.Network,
		})
	}
	return cfg
}

// Skills reads the skills of the configuration's folders and users' own. What is wrong
// with those for everybody is told once, here; what can be read later need not be now.
func (e *Env) Skills(log zerolog.Logger) skill.Loader {
	l := skill.Loader{Public: e.Config.Skills.Paths, DataDir: e.DataDir}
	_, warnings, err := skill.Loader{Public: l.Public}.Load(contract.DefaultTenant, "")
	for _, w := range warnings {
		log.Warn().Str("file", w.File).Int("line", w.Line).Bool("left_out", w.Broken).Msg("skill: " + w.Text)
	}
	if err != nil {
		log.Error().Err(err).Msg("the skills cannot be read: what may use skills will fail")
	}
	return l
}

// WorkspaceRoot is the folder of all workspaces.
func (e *Env) WorkspaceRoot() string {
	if r := e.Config.Workspace.Root; r != "" {
		return r
	}
	return filepath.Join(e.DataDir, "workspaces")
}

// ShellAllowed reports whether commands may be run for a model (REG-16): inside
// a sandbox, or on the bare host when the user said so.
func (e *Env) ShellAllowed() bool {
	return e.Config.Workspace.Sandbox != config.SandboxNone || e.Config.Workspace.AllowHostBash
}
