package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/stack"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/mcpserver"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/rungroup"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
)

// mcpTokenEnv holds the token of an embedded system while that starts.
const mcpTokenEnv = "HERDGATE_MCP_TOKEN"

func (a *app) mcpCommand() *cobra.Command {
	return &cobra.Command{
		Use: "mcp", Short: "be an MCP server on stdio: any MCP client can delegate", Args: cobra.NoArgs,
		Long: `Offers the tools task, task_status and cancel_task to an MCP client on the standard
input and output; the log goes to the standard error. It ends when its input does, and
cancels what it still waits for.

With --server it works on a running system. Without, it runs a system of its own in this
process, in a temporary directory unless --data-dir names one.`,
		Example: `  herdgate mcp
  herdgate mcp --server http://127.0.0.1:8484
  herdgate mcp --server https://herdgate.example.com --token-env HERDGATE_TOKEN`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("log-level") {
				a.LogLevel = "warn" // clients show what comes on the standard error
			}
			// The client may be gone when we write to it. That must not kill us: there
			// are tasks to cancel. Ignored signals would be so in our children as well.
			broken := make(chan os.Signal, 1)
			signal.Notify(broken, syscall.SIGPIPE)
			defer signal.Stop(broken)
			if cmd.Flags().Changed("server") {
				return a.mcpRemote(cmd)
			}
			dir := ""
			if cmd.Flags().Changed("data-dir") {
				dir = a.DataDir
			}
			return a.mcpEmbedded(cmd, dir)
		},
	}
}

// mcpRemote serves the tools of a running system.
func (a *app) mcpRemote(cmd *cobra.Command) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	w := cmd.ErrOrStderr()
	log, err := telemetry.NewLogger(w, "mcp", a.LogLevel, process.LogFormat(a.LogFormat, w))
	if err != nil {
		return err
	}
	soft, _, stop := rungroup.Signals(cmd.Context())
	defer stop()
	return serveMCP(soft, remote{c, a.explain}, mcpserver.Config{Version: process.Version, Log: log}, cmd.InOrStdin(), cmd.OutOrStdout())
}

// mcpEmbedded serves the tools of a system in this process.
func (a *app) mcpEmbedded(cmd *cobra.Command, dir string) (err error) {
	soft, hard, stop := rungroup.Signals(cmd.Context())
	defer stop()
	if dir == "" {
		if dir, err = os.MkdirTemp("", "herdgate-mcp-"); err != nil {
			return fmt.Errorf("mcp: a folder for its files: %w; --data-dir names another place", err)
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	}
	o := a.Options
	o.DataDir, o.Stderr = dir, cmd.ErrOrStderr()
	env, err := process.NewEnv("mcp", o)
	if err != nil {
		return err
	}
	if len(env.Config.Models) == 0 {
		env.Script = offline
		env.Log.Warn().Msg("no model is configured: a built-in offline model answers; add one under models in herdgate.yaml")
	}
	// Its HTTP API is for this process alone.
	token := rand.Text()
	if err := os.Setenv(mcpTokenEnv, token); err != nil {
		return fmt.Errorf("mcp: %w", err)
	}
	defer os.Unsetenv(mcpTokenEnv)
	env.Config.HTTP.Addr = "127.0.0.1:0"
	env.Config.HTTP.Auth.Mode = config.AuthTokens
	env.Config.HTTP.Auth.Tokens = []config.Token{{Name: "mcp", TokenEnv: mcpTokenEnv}}
	env.Config.Telemetry.MetricsAddr = ""
	env.Config.Executor.DrainTimeoutSeconds = 0
	listening := make(chan string, 1)
	env.OnHTTP = func(addr string) { listening <- addr }
	s, err := stack.Start(soft, stack.Config{Env: env, Services: stack.Services(), Serve: serves()})
	if err != nil {
		if soft.Err() != nil {
			return nil
		}
		return err
	}
	// Not under soft: tasks are cancelled before the services stop.
	ctx, end := context.WithCancel(hard)
	defer end()
	stopped := make(chan struct{})
	var stopErr error
	go func() {
		defer close(stopped)
		stopErr = s.Run(ctx)
	}()
	err = func() error {
		c, err := readyClient(soft, listening, stopped, token)
		if err != nil || c == nil {
			return err
		}
		// A system that ends by itself ends the session.
		open, shut := context.WithCancel(soft)
		defer shut()
		go func() {
			select {
			case <-stopped:
				shut()
			case <-open.Done():
			}
		}()
		log := env.LogOf("mcp")
		return serveMCP(open, remote{c, func(err error) error { return err }}, mcpserver.Config{Version: process.Version, Log: log}, cmd.InOrStdin(), cmd.OutOrStdout())
	}()
	end()
	<-stopped
	return errors.Join(err, stopErr)
}

// readyClient waits until the system in this process is ready. There is no client
// when it was asked to stop before.
func readyClient(soft context.Context, listening <-chan string, stopped <-chan struct{}, token string) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(soft, startTimeout)
	defer cancel()
	late := func(err error) (*client.Client, error) {
		if soft.Err() != nil {
			return nil, nil
		}
		return nil, fmt.Errorf("mcp: not ready within %s: %w", startTimeout, err)
	}
	var c *client.Client
	select {
	case addr := <-listening:
		var err error
		if c, err = client.New("http://"+addr, token, nil); err != nil {
			return nil, err
		}
	case <-stopped:
		return nil, nil // its error follows
	case <-ctx.Done():
		return late(ctx.Err())
	}
	for {
		err := c.Ready(ctx)
		if err == nil {
			return c, nil
		}
		select {
		case <-stopped:
			return nil, nil
		default:
		}
		if pause.For(ctx, 20*time.Millisecond) != nil {
			return late(err)
		}
	}
}

// serveMCP serves one client until its input ends, or soft does; the end of the hard
// context leaves at once. Calls that are open then are cancelled, with their tasks.
func serveMCP(soft context.Context, b mcpserver.Backend, cfg mcpserver.Config, stdin io.Reader, stdout io.Writer) error {
	in, feed := io.Pipe()
	// A read of the standard input cannot be broken off: this goroutine may outlive us.
	go func() {
		_, err := io.Copy(feed, stdin)
		_ = feed.CloseWithError(err)
	}()
	undo := context.AfterFunc(soft, func() { _ = feed.Close() })
	defer undo()
	session, err := mcpserver.New(b, cfg).Connect(context.WithoutCancel(soft), &sdk.IOTransport{Reader: in, Writer: unclosed{stdout}, MaxLineLength: maxMCPLine}, nil)
	if err != nil {
		return fmt.Errorf("mcp: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- session.Wait() }()
	select {
	case err = <-ended:
	case <-rungroup.Hard(soft).Done():
		return nil
	}
	if err != nil && soft.Err() == nil && !errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("mcp: the session broke: %w", err)
	}
	return nil
}

// maxMCPLine bounds a message of the client, like the body of an HTTP request.
const maxMCPLine = 1 << 20

// unclosed is an output that belongs to somebody else.
type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }

// remote is what the tools work on: a system that is reached over HTTP.
type remote struct {
	c       *client.Client
	explain func(error) error
}

// problem makes the error of a tool.
func (r remote) problem(ctx context.Context, err error) error {
	var api *client.Error
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return err
	case errors.As(err, &api) && api.Code != "":
		p := &wire.Problem{Status: api.Status, Code: api.Code, Detail: api.Detail, FinishedStatus: api.FinishedStatus, Errors: api.Faults}
		if api.RetryAfter > 0 {
			p.Detail += fmt.Sprintf(" (in %d s)", int(api.RetryAfter/time.Second))
		}
		return p
	}
	return &wire.Problem{Code: wire.CodeUnavailable, Detail: r.explain(err).Error()}
}

func (r remote) Subagents(ctx context.Context) ([]wire.Subagent, error) {
	l, err := r.c.Subagents(ctx)
	return l, r.problem(ctx, err)
}

func (r remote) SubmitTask(ctx context.Context, req wire.TaskRequest) (wire.TaskAccepted, error) {
	acc, err := r.c.SubmitTask(ctx, req)
	return acc, r.problem(ctx, err)
}

func (r remote) GetTask(ctx context.Context, id contract.TaskID) (wire.Task, error) {
	t, err := r.c.GetTask(ctx, id)
	return t, r.problem(ctx, err)
}

func (r remote) CancelTask(ctx context.Context, id contract.TaskID) error {
	return r.problem(ctx, r.c.CancelTask(ctx, id))
}

// Position is the beginning: a task of ours has few events, and they are found by it.
func (r remote) Position(context.Context) (uint64, error) { return 0, nil }

func (r remote) Follow(ctx context.Context, id contract.TaskID, after uint64, each func(contract.EventRecord) bool) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	err := r.c.Stream(inner, client.EventQuery{TaskID: id, OnGap: func(wire.Gap) { cancel() }}, after, func(rec contract.EventRecord) error {
		if !each(rec) {
			return client.ErrStop
		}
		return nil
	})
	return r.problem(ctx, err)
}
