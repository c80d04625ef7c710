package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/stack"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/rungroup"
	"github.com/herdgate/herdgate/internal/telemetry"
)

// offline is the script of the model that answers when none is configured.
//
//go:embed offline.yaml
var offline []byte

func (a *app) upCommand() *cobra.Command {
	var services, listen string
	cmd := &cobra.Command{
		Use: "up", Short: "run everything in one process", Args: cobra.NoArgs,
		Long: `Runs the services in one process until SIGINT or SIGTERM, then lets running
tasks finish; a second signal cuts them short. NATS is embedded unless a server is
configured (nats.url, nats.context) or named by --nats-url or --context.`,
		Example: `  herdgate up
  herdgate up --nats-listen 127.0.0.1:4222
  herdgate up --services none --nats-listen 127.0.0.1:4222
  herdgate up --services lead,executor --nats-url nats://127.0.0.1:4222`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names, err := stack.ParseServices(services)
			if err != nil {
				return err
			}
			return a.up(cmd, names, listen)
		},
	}
	a.ServiceFlags(cmd.Flags())
	cmd.Flags().StringVar(&services, "services", "", "services to run, joined by commas; none runs the embedded server alone (default all)")
	cmd.Flags().StringVar(&listen, "nats-listen", "", "host:port at which other processes may join the embedded server (nats.embedded.listen)")
	return cmd
}

func (a *app) up(cmd *cobra.Command, services []string, listen string) error {
	stderr := cmd.ErrOrStderr()
	a.Stderr = stderr
	env, err := process.NewEnv("herdgate", a.Options)
	if err != nil {
		return err
	}
	if len(services) == 0 && !stack.Embedded(env) {
		return errors.New("--services none leaves nothing to run, because an outside NATS server is configured")
	}
	if len(env.Config.Models) == 0 && (slices.Contains(services, stack.Lead) || slices.Contains(services, stack.Executor)) {
		env.Script = offline
		env.Log.Warn().Msg("no model is configured: a built-in offline model answers; add one under models in herdgate.yaml")
	}
	soft, _, stop := rungroup.Signals(cmd.Context())
	defer stop()
	s, err := stack.Start(soft, stack.Config{Env: env, Services: services, Serve: serves(), Listen: listen})
	if err != nil {
		if soft.Err() != nil {
			return nil // asked to stop before there was anything
		}
		return err
	}
	told := startReport{env: env, services: services, nats: natsPlace(env, s), plain: process.LogFormat(a.LogFormat, stderr) == telemetry.FormatConsole, w: stderr}
	if slices.Contains(services, stack.Lead) {
		env.OnHTTP = told.print
	} else {
		told.print("")
	}
	return explainListen(s.Run(soft))
}

// natsPlace says where NATS is.
func natsPlace(env *process.Env, s *stack.Stack) string {
	switch {
	case !stack.Embedded(env) && env.Config.NATS.Context != "":
		return "context " + env.Config.NATS.Context
	case !stack.Embedded(env):
		return bus.Redact(string(env.Config.NATS.URL))
	case s.Outside() != "":
		return s.Outside()
	}
	return "embedded"
}

// startReport tells what runs where.
type startReport struct {
	env      *process.Env
	services []string
	nats     string
	plain    bool
	w        io.Writer
}

func (r startReport) print(addr string) {
	services := strings.Join(r.services, ", ")
	if services == "" {
		services = "none"
	}
	if !r.plain {
		ev := r.env.Log.Info().Strs("services", r.services).Str("nats", r.nats).Str("data_dir", r.env.DataDir)
		if addr != "" {
			ev = ev.Str("http", "http://"+addr)
		}
		ev.Msg("herdgate is up")
		return
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\nherdgate %s is up; Ctrl-C stops it\n", process.Version)
	fmt.Fprintf(&b, "  services  %s\n", services)
	if addr != "" {
		fmt.Fprintf(&b, "  HTTP API  http://%s (OpenAPI at /openapi.json)\n", addr)
	}
	fmt.Fprintf(&b, "  NATS      %s\n", r.nats)
	fmt.Fprintf(&b, "  data      %s\n\n", r.env.DataDir)
	// A terminal that is gone is no reason to stop.
	_, _ = io.WriteString(r.w, b.String())
}

// explainListen adds what can be done about an address in use.
func explainListen(err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%w; does another process listen there? --http-addr and --metrics-addr name other addresses", err)
	}
	return err
}

// open reads the configuration for verbs that only look; it makes no folder.
func (a *app) open(ctx context.Context) (*process.Env, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	o := a.Options
	o.NoDataDir, o.Stderr = true, os.Stderr
	if o.LogLevel == "info" {
		o.LogLevel = "warn" // a client's connection is not worth a line
	}
	return process.NewEnv("herdgate", o)
}
