package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/herdgate/herdgate/internal/rungroup"
)

// Flags adds the flags that every process has.
func (o *Options) Flags(fs *pflag.FlagSet) {
	fs.StringVar(&o.ConfigFile, "config", "", "configuration file (default ./herdgate.yaml if it is there)")
	fs.StringVar(&o.DataDir, "data-dir", "./.herdgate", "directory for the event store, workspaces and the embedded server")
	fs.StringVar(&o.LogLevel, "log-level", "info", "debug, info, warn or error")
	fs.StringVar(&o.LogFormat, "log-format", "", "json or console (default console on a terminal, json elsewhere)")
}

// ServiceFlags adds the flags of a process that runs services.
func (o *Options) ServiceFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.NATSURL, "nats-url", "", "NATS servers, joined by commas (nats.url)")
	fs.StringVar(&o.NATSContext, "context", "", "a context of the nats command-line tool (nats.context)")
	fs.StringVar(&o.HTTPAddr, "http-addr", "", "host:port of the lead's HTTP API (http.addr)")
	fs.StringVar(&o.MetricsAddr, "metrics-addr", "", "host:port for health and metrics (telemetry.metrics_addr)")
	fs.StringVar(&o.Name, "name", "", "name of the process, unique in the deployment (default service, host and a random part)")
}

// Serve runs one service until ctx is done.
type Serve func(ctx context.Context, env *Env) error

// Command is the command line of one service: the verb of herdgate and the
// stand-alone binary are the same.
func Command(service, short string, serve Serve, opts ...func(*Options)) *cobra.Command {
	var o Options
	for _, opt := range opts {
		opt(&o)
	}
	cmd := &cobra.Command{
		Use: service, Short: short, Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			env, err := NewEnv(service, o)
			if err != nil {
				return err
			}
			return env.Run(cmd.Context(), rungroup.Component{Name: service, Run: func(ctx context.Context) error { return serve(ctx, env) }})
		},
	}
	o.Flags(cmd.Flags())
	o.ServiceFlags(cmd.Flags())
	return cmd
}

// Run runs components until a signal comes or one of them ends, with health and
// metrics beside them, and joins them all.
func (e *Env) Run(ctx context.Context, components ...rungroup.Component) error {
	soft, _, stop := rungroup.Signals(ctx)
	defer stop()
	if addr := e.Config.Telemetry.MetricsAddr; addr != "" {
		components = append(components, rungroup.Component{Name: "metrics", Run: func(ctx context.Context) error { return e.Metrics.Serve(ctx, addr) }})
	}
	return rungroup.Run(soft, e.Log, e.Grace(), components...)
}

// Grace is how long work may go on after a stop was asked for: the executor's
// drain time, and a little for handing back what is left.
func (e *Env) Grace() time.Duration {
	return time.Duration(e.Config.Executor.DrainTimeoutSeconds)*time.Second + 5*time.Second
}

// Main runs a command as a whole program and returns its exit code.
func Main(cmd *cobra.Command) int {
	cmd.Version = Version
	if err := cmd.ExecuteContext(context.Background()); err != nil {
		var code ExitCode
		if errors.As(err, &code) {
			return int(code)
		}
		fmt.Fprintf(os.Stderr, "%s: %v\n", cmd.Name(), err)
		return 1
	}
	return 0
}

// ExitCode is an error that only sets the exit code: what there was to say has
// been said.
type ExitCode int

func (c ExitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }
