package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/demo"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/progress"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/spanfile"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/stack"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/rungroup"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// openAIKey is the variable whose key is enough for a model that is not configured.
const openAIKey = "OPENAI_API_KEY"

// startTimeout bounds the wait until the services of the demo are ready.
const startTimeout = 30 * time.Second

func (a *app) demoCommand() *cobra.Command {
	var model string
	var keep bool
	cmd := &cobra.Command{
		Use: "demo", Short: "the main job with nothing set up: a lead and three sub-agents search a sample project", Args: cobra.NoArgs,
		Long: `Runs everything in this process on an embedded NATS server: a lead gets a question
about a bundled sample project, hands its three parts to three sub-agents in parallel,
and puts their findings together. The searches are real; the words of the offline model
are scripted. The files stay in the data directory, a fresh temporary one unless
--data-dir names another.

With --model the same question goes to a real model: one of the configuration, or, with
OPENAI_API_KEY set, any name that this provider knows.`,
		Example: `  herdgate demo
  herdgate demo --keep
  OPENAI_API_KEY=… herdgate demo --model gpt-5-mini`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir := ""
			if cmd.Flags().Changed("data-dir") {
				dir = a.DataDir
			}
			return a.demo(cmd, dir, model, keep)
		},
	}
	cmd.Flags().StringVar(&model, "model", "", "model to ask in place of the offline one")
	cmd.Flags().BoolVar(&keep, "keep", false, "leave everything running afterwards, until Ctrl-C, for a look around")
	return cmd
}

// demonstration is a demo on its way.
type demonstration struct {
	env    *process.Env
	dir    string
	thread contract.ThreadID
	spans  string // file of the trace, or empty when a collector gets it
	log    string
	addr   string
}

func (a *app) demo(cmd *cobra.Command, dir, model string, keep bool) error {
	soft, hard, stop := rungroup.Signals(cmd.Context())
	defer stop()
	fresh := dir == ""
	if fresh {
		var err error
		if dir, err = os.MkdirTemp("", "herdgate-demo-"); err != nil {
			return fmt.Errorf("demo: a folder for its files: %w; --data-dir names another place", err)
		}
	}
	d, closeAll, err := a.newDemonstration(dir, model)
	if err != nil {
		if fresh {
			err = errors.Join(err, os.RemoveAll(dir))
		}
		return err
	}
	defer closeAll()
	listening := make(chan string, 1)
	d.env.OnHTTP = func(addr string) { listening <- addr }
	s, err := stack.Start(soft, stack.Config{Env: d.env, Services: stack.Services(), Serve: serves()})
	if err != nil {
		if soft.Err() != nil {
			return exitInterrupted
		}
		return err
	}
	// Not under soft: Ctrl-C cancels the run first, which needs the services.
	ctx, end := context.WithCancel(hard)
	defer end()
	stopped := make(chan error, 1)
	go func() { stopped <- s.Run(ctx) }()
	err = d.show(soft, cmd, listening, stopped, a.json(), keep)
	end()
	stopErr := <-stopped
	if err == nil && stopErr != nil {
		err = fmt.Errorf("demo: the services did not end in order: %w; see %s", stopErr, d.log)
	}
	return err
}

// newDemonstration sets everything up that needs no goroutine. The settings are
// the defaults, whatever the configuration says; only models and tracing are
// taken from it.
func (a *app) newDemonstration(dir, model string) (_ *demonstration, _ func(), err error) {
	dir, err = process.DataDir(dir)
	if err != nil {
		return nil, nil, err
	}
	d := &demonstration{dir: dir, thread: contract.ThreadID("demo-" + bus.RandomToken(4)), log: filepath.Join(dir, "demo.log")}
	// Log lines would tear the picture apart.
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("demo: %w", err)
	}
	closers := []io.Closer{log}
	closeAll := func() {
		for _, c := range closers {
			_ = c.Close() // a log and a trace: nothing to save
		}
	}
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	o := a.Options
	o.DataDir, o.Stderr = dir, log
	env, err := process.NewEnv("demo", o)
	if err != nil {
		return nil, nil, err
	}
	cfg := config.Default()
	cfg.Models, cfg.Telemetry = env.Config.Models, env.Config.Telemetry
	cfg.Telemetry.MetricsAddr = ""
	cfg.HTTP.Addr = "127.0.0.1:0"
	cfg.Executor.DrainTimeoutSeconds = 0
	env.Config = cfg
	if err := useModel(env, model); err != nil {
		return nil, nil, err
	}
	if cfg.Telemetry.OTLPEndpoint == "" {
		d.spans = filepath.Join(dir, "trace.jsonl")
		spans, err := spanfile.Create(d.spans)
		if err != nil {
			return nil, nil, err
		}
		closers = append(closers, spans)
		env.Exporter = spans
	}
	d.env = env
	if err := demo.CopyTo(d.workspace()); err != nil {
		return nil, nil, err
	}
	return d, closeAll, nil
}

func (d *demonstration) workspace() string {
	return tool.ThreadDir(d.env.WorkspaceRoot(), contract.DefaultTenant, d.thread)
}

// useModel makes env use the model called name, "" being the offline one.
func useModel(env *process.Env, name string) error {
	if name == "" {
		env.Script = demo.Script()
		return nil
	}
	var known []string
	for _, m := range env.Config.Models {
		if m.Name == name {
			if m.APIKeyEnv != "" && os.Getenv(m.APIKeyEnv) == "" {
				return fmt.Errorf("--model %s: its key is missing: set the environment variable %s", name, m.APIKeyEnv)
			}
			env.Config.Lead.Model = name
			return nil
		}
		known = append(known, m.Name)
	}
	if os.Getenv(openAIKey) != "" {
		env.Config.Models = []config.Model{{
			Name: name, Provider: config.ProviderOpenAI, Model: name, APIKeyEnv: openAIKey,
			RequestTimeoutSeconds: 600, IdleTimeoutSeconds: 60, MaxRetries: 3,
		}}
		return nil
	}
	list := "none is configured"
	if len(known) > 0 {
		list = "configured are " + strings.Join(known, ", ")
	}
	return fmt.Errorf("--model %s: %s; add it under models in herdgate.yaml, or set %s to use a model of that provider by its name", name, list, openAIKey)
}

// show waits until the services are ready, runs the demo and prints what it was.
func (d *demonstration) show(soft context.Context, cmd *cobra.Command, listening <-chan string, stopped chan error, asJSON, keep bool) error {
	stdout, stderr := cmd.OutOrStdout(), cmd.ErrOrStderr()
	c, err := d.ready(soft, listening, stopped)
	if err != nil {
		return err
	}
	if !asJSON {
		fmt.Fprintf(stderr, "lead, admission, executor, eventsink and NATS run in this process (%s, files in %s)\n\n", d.addr, d.dir)
	}
	f := follower{client: c, out: io.Discard, err: stderr, json: false}
	if asJSON {
		f.err = io.Discard
	}
	run, err := f.follow(soft, wire.RunRequest{Input: demo.Prompt(), ThreadID: string(d.thread)})
	if failedAlready(err) {
		return err
	}
	if err != nil {
		return fmt.Errorf("demo: %w; the log is %s", err, d.log)
	}
	hard := rungroup.Hard(soft)
	events, err := d.countEvents(hard, c, run.RunID)
	if err != nil {
		return fmt.Errorf("demo: read the events: %w; the log is %s", err, d.log)
	}
	if asJSON {
		err = printJSON(stdout, d.report(run, f.run, events))
	} else {
		err = d.print(stdout, run, f.run, events, keep)
	}
	if err != nil {
		return err
	}
	if err := ending(run, stderr); err != nil || !keep {
		return err
	}
	fmt.Fprintln(stderr, "\neverything goes on running; Ctrl-C stops it")
	select {
	case <-soft.Done():
		return nil
	case err := <-stopped:
		stopped <- nil
		return err
	}
}

// ready waits until the HTTP API answers that everything is ready.
func (d *demonstration) ready(soft context.Context, listening <-chan string, stopped chan error) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(soft, startTimeout)
	defer cancel()
	failed := func(err error) error {
		stopped <- nil // for who waits for the end
		if err == nil {
			err = errors.New("it does not say why")
		}
		return fmt.Errorf("demo: a service ended at once: %w; the log is %s", err, d.log)
	}
	select {
	case addr := <-listening:
		d.addr = "http://" + addr
	case err := <-stopped:
		return nil, failed(err)
	case <-ctx.Done():
		return nil, d.notReady(soft, ctx.Err())
	}
	c, err := client.New(d.addr, "", nil)
	if err != nil {
		return nil, err
	}
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for {
		if err = c.Ready(ctx); err == nil {
			return c, nil
		}
		select {
		case <-poll.C:
		case err := <-stopped:
			return nil, failed(err)
		case <-ctx.Done():
			return nil, d.notReady(soft, err)
		}
	}
}

func (d *demonstration) notReady(soft context.Context, err error) error {
	if soft.Err() != nil {
		return exitInterrupted
	}
	return fmt.Errorf("demo: not ready within %s: %w; the log is %s", startTimeout, err, d.log)
}

// countEvents counts the stored events of the run.
func (d *demonstration) countEvents(ctx context.Context, c *client.Client, id contract.RunID) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	n, after := 0, uint64(0)
	for {
		page, err := c.ListEvents(ctx, client.EventQuery{RunID: id, Limit: wire.MaxEvents}, after)
		if err != nil {
			return 0, err
		}
		n += len(page.Events)
		if !page.HasMore || page.NextAfterSeq <= after {
			return n, nil
		}
		after = page.NextAfterSeq
	}
}

// demoReport is what demo prints as JSON.
type demoReport struct {
	Run       wire.Run   `json:"run"`
	Tasks     []demoTask `json:"tasks"`
	Events    int        `json:"events"`
	DataDir   string     `json:"data_dir"`
	Database  string     `json:"database"`
	Workspace string     `json:"workspace"`
	Trace     string     `json:"trace,omitempty"`
	Log       string     `json:"log"`
}

type demoTask struct {
	TaskID      contract.TaskID `json:"task_id"`
	Type        string          `json:"subagent_type"`
	Description string          `json:"description"`
	Status      string          `json:"status"`
	Model       string          `json:"model_name,omitempty"`
	Attempt     int             `json:"attempt"`
	DurationMS  int64           `json:"duration_ms"`
	Steps       int             `json:"steps"`
	Usage       *contract.Usage `json:"usage"`
	StopReason  string          `json:"stop_reason,omitempty"`
	Error       string          `json:"error,omitempty"`
}

func (d *demonstration) report(run wire.Run, p *progress.Run, events int) demoReport {
	r := demoReport{
		Run: run, Tasks: []demoTask{}, Events: events, DataDir: d.dir, Database: d.database(), Workspace: d.workspace(), Trace: d.spans, Log: d.log,
	}
	for _, t := range p.Tasks {
		r.Tasks = append(r.Tasks, demoTask{
			TaskID: t.ID, Type: t.Type, Description: t.Description, Status: t.State, Model: t.Model, Attempt: t.Attempt,
			DurationMS: t.DurationMS, Steps: t.Steps, Usage: t.Usage, StopReason: t.StopReason, Error: t.Error,
		})
	}
	return r
}

func (d *demonstration) database() string { return filepath.Join(d.dir, sqlite.File) }

func (d *demonstration) print(w io.Writer, run wire.Run, p *progress.Run, events int, keep bool) error {
	var b strings.Builder
	b.WriteString("\n")
	var tasks table
	tasks.row("", "TYPE", "DESCRIPTION", "STATUS", "ATTEMPT", "DURATION", "TOKENS", "STEPS")
	for _, t := range p.Tasks {
		tasks.row(t.Name(), cell(t.Type), cell(t.Description), cell(t.State), fmt.Sprint(t.Attempt), progress.Seconds(t.Elapsed(time.Now())), t.Tokens(), fmt.Sprint(t.Steps))
	}
	if err := tasks.print(&b, ""); err != nil {
		return err
	}
	if run.Output != nil {
		fmt.Fprintf(&b, "\n%s\n", printable.Block(*run.Output))
	}
	b.WriteString("\n")
	var places table
	places.row("run", cell(string(run.RunID))+", thread "+cell(string(d.thread)))
	places.row("events", fmt.Sprintf("%d of this run in %s, table events", events, d.database()))
	if d.spans != "" {
		places.row("trace", fmt.Sprintf("%s in %s", cell(run.TraceID), d.spans))
	} else {
		places.row("trace", fmt.Sprintf("%s, sent to %s", cell(run.TraceID), bus.Redact(d.env.Config.Telemetry.OTLPEndpoint)))
	}
	places.row("workspace", d.workspace())
	places.row("log", d.log)
	if err := places.print(&b, ""); err != nil {
		return err
	}
	server := ""
	b.WriteString("\nTo look further:\n")
	if keep {
		server = " --server " + d.addr
	} else {
		fmt.Fprintf(&b, "  herdgate up --data-dir %s   # and, in another terminal:\n", d.dir)
	}
	fmt.Fprintf(&b, "  herdgate runs show %s%s\n", cell(string(run.RunID)), server)
	fmt.Fprintf(&b, "  herdgate tasks list --run %s%s\n", cell(string(run.RunID)), server)
	fmt.Fprintf(&b, "  herdgate events --run %s%s\n", cell(string(run.RunID)), server)
	if d.env.Script != nil {
		b.WriteString("The offline model was asked; `herdgate demo --model NAME` asks a real one.\n")
	}
	return write(w, []byte(b.String()))
}

// failedAlready reports whether err only sets the exit code.
func failedAlready(err error) bool {
	var code process.ExitCode
	return errors.As(err, &code)
}
