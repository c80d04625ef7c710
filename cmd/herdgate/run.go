package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/charmbracelet/x/term"
	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/progress"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/rungroup"
	"github.com/herdgate/herdgate/pkg/contract"
)

const (
	// exitInterrupted is the exit code of a run that Ctrl-C has ended.
	exitInterrupted = process.ExitCode(130)
	// cancelTimeout bounds the wait for the end of a run that was cancelled.
	cancelTimeout = 10 * time.Second
	// callTimeout bounds a call whose result is needed although we are leaving.
	callTimeout = 30 * time.Second
	// settleTimeout bounds the wait for a run's record after its last event.
	settleTimeout = 10 * time.Second
	maxPromptFile = 1 << 20
)

func (a *app) runCommand() *cobra.Command {
	var req wire.RunRequest
	var concurrent, total int
	cmd := &cobra.Command{
		Use: `run "PROMPT"`, Short: "submit a run, show its tasks live, print the answer", Args: onlyArg("PROMPT"),
		Long: `Submits a run and shows its tasks as they go on: a live view on a terminal, lines
elsewhere, with --output json the run's events, one a line. The answer goes to the
standard output, everything else to the standard error. The prompt - is read from
the standard input.

Ctrl-C cancels the run and waits for its end; a second one leaves at once.
The exit code is 0 when the run completed, 1 when it failed, 130 when it was
interrupted.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if req.Input, err = prompt(args[0], cmd.InOrStdin()); err != nil {
				return err
			}
			if cmd.Flags().Changed("max-concurrent") {
				req.MaxConcurrentSubagents = &concurrent
			}
			if cmd.Flags().Changed("max-total") {
				req.MaxTotalSubagents = &total
			}
			return a.run(cmd, req)
		},
	}
	f := cmd.Flags()
	f.StringVar(&req.ThreadID, "thread", "", "conversation to go on with (default a new one)")
	f.StringVar(&req.Model, "model", "", "name of a configured model (default the lead's)")
	f.IntVar(&concurrent, "max-concurrent", 0, "sub-agents at once for one answer of the lead")
	f.IntVar(&total, "max-total", 0, "sub-agents in the whole run")
	return cmd
}

func prompt(arg string, stdin io.Reader) (string, error) {
	if arg != "-" {
		return arg, nil
	}
	b, err := io.ReadAll(io.LimitReader(stdin, maxPromptFile+1))
	if err != nil {
		return "", fmt.Errorf("read the prompt: %w", err)
	}
	if len(b) > maxPromptFile {
		return "", fmt.Errorf("read the prompt: it is longer than %d bytes", maxPromptFile)
	}
	return string(b), nil
}

func (a *app) run(cmd *cobra.Command, req wire.RunRequest) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	soft, _, stop := rungroup.Signals(cmd.Context())
	defer stop()
	f := follower{client: c, out: cmd.OutOrStdout(), err: cmd.ErrOrStderr(), json: a.json()}
	run, err := f.follow(soft, req)
	if err != nil {
		return a.explain(err)
	}
	if run.Output != nil && !a.json() {
		if err := write(cmd.OutOrStdout(), []byte(printable.Block(*run.Output)+"\n")); err != nil {
			return err
		}
	}
	return ending(run, cmd.ErrOrStderr())
}

// ending turns the end of a run into the end of the program.
func ending(run wire.Run, stderr io.Writer) error {
	if run.Status == contract.RunCompleted {
		return nil
	}
	text := ""
	if run.Error != nil {
		text = ": " + printable.Block(*run.Error)
	}
	if run.ErrorCode != "" {
		text = " (" + printable.Line(string(run.ErrorCode)) + ")" + text
	}
	fmt.Fprintf(stderr, "herdgate: the run has %s%s\n", describe(run.Status), text)
	return process.ExitCode(1)
}

func describe(s contract.RunStatus) string {
	switch s {
	case contract.RunFailed:
		return "failed"
	case contract.RunCancelled:
		return "been cancelled"
	}
	return "not ended: its status is " + printable.Line(string(s))
}

// follower submits a run and shows it.
type follower struct {
	client *client.Client
	out    io.Writer
	err    io.Writer
	json   bool
	// run is the state that the events have told; set by follow.
	run *progress.Run
}

// follow submits a run and shows its events until its end. Soft comes from
// rungroup.Signals: when it ends, the run is cancelled; the end of the hard
// context leaves at once. Both end in exitInterrupted.
func (f *follower) follow(soft context.Context, req wire.RunRequest) (wire.Run, error) {
	hard := rungroup.Hard(soft)
	// Not under soft: what was accepted must be known, to be cancelled.
	call, cancel := context.WithTimeout(hard, callTimeout)
	accepted, err := f.client.StartRun(call, req)
	cancel()
	if err != nil {
		return wire.Run{}, err
	}
	f.run = progress.New(accepted.RunID)
	show := f.shower()
	stream, end := context.WithCancel(hard)
	defer end()
	done := make(chan error, 1)
	go func() {
		done <- f.client.Stream(stream, client.EventQuery{
			RunID:   accepted.RunID,
			OnRetry: func(err error) { show.Note("the connection broke, trying again: " + err.Error()) },
		}, 0, func(rec contract.EventRecord) error {
			if f.json {
				return printJSONLine(f.out, rec)
			}
			show.Show(rec)
			return nil
		})
	}()
	err, interrupted := f.wait(soft, accepted.RunID, done, end, show)
	show.Close()
	if interrupted {
		return wire.Run{}, exitInterrupted
	}
	if err != nil {
		return wire.Run{}, fmt.Errorf("%w; the run may go on: `herdgate runs show %s`", err, accepted.RunID)
	}
	return f.settled(hard, accepted.RunID)
}

// wait waits for the end of the stream, which it ends itself after a signal.
// It returns when the stream's goroutine has.
func (f *follower) wait(soft context.Context, id contract.RunID, done <-chan error, end context.CancelFunc, show progress.Shower) (err error, interrupted bool) {
	select {
	case err = <-done:
		return err, soft.Err() != nil
	case <-soft.Done():
	}
	hard := rungroup.Hard(soft)
	show.Note("cancelling the run; Ctrl-C again leaves at once")
	call, cancel := context.WithTimeout(hard, cancelTimeout)
	defer cancel()
	var api *client.Error
	if err := f.client.CancelRun(call, id); err != nil && !(errors.As(err, &api) && api.Code == wire.CodeAlreadyFinished) {
		show.Note("the run could not be cancelled: " + err.Error())
		end()
	}
	select {
	case err = <-done:
		return err, true
	case <-call.Done():
		if hard.Err() == nil {
			show.Note(fmt.Sprintf("the run has not ended within %s; `herdgate runs show %s` tells how it goes on", cancelTimeout, id))
		}
		end()
		return <-done, true
	}
}

// settled returns the run's record, which may come a moment after its last event.
func (f *follower) settled(ctx context.Context, id contract.RunID) (wire.Run, error) {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	for {
		run, err := f.client.GetRun(ctx, id)
		if err != nil || run.Status.Terminal() {
			return run, err
		}
		t := time.NewTimer(50 * time.Millisecond)
		select {
		case <-ctx.Done():
			t.Stop()
			return run, nil
		case <-t.C:
		}
	}
}

func (f *follower) shower() progress.Shower {
	if !f.json && terminal(f.err) {
		return progress.NewLive(f.err, f.run)
	}
	return progress.NewLines(f.err, f.run)
}

// terminal reports whether w is a terminal that can be drawn on.
func terminal(w io.Writer) bool {
	file, ok := w.(*os.File)
	return ok && term.IsTerminal(file.Fd()) && os.Getenv("TERM") != "dumb"
}
