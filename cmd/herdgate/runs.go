package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

func (a *app) runsCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "runs", Short: "look at runs and cancel them", Args: cobra.NoArgs, RunE: help}
	var q client.RunQuery
	var thread, status string
	list := &cobra.Command{
		Use: "list", Short: "list runs, newest first", Args: cobra.NoArgs,
		RunE: asks(a, func(ctx context.Context, c *client.Client, _ string) (wire.RunPage, error) {
			q.ThreadID, q.Status = contract.ThreadID(thread), contract.RunStatus(status)
			return c.ListRuns(ctx, q)
		}, printRuns),
	}
	list.Flags().StringVar(&thread, "thread", "", "runs of this thread")
	list.Flags().StringVar(&status, "status", "", "running, completed, failed or cancelled")
	pageFlags(list, &q.Limit, &q.Cursor)
	show := &cobra.Command{
		Use: "show RUN_ID", Short: "show a run with its delegations and its answer", Args: onlyArg("RUN_ID"),
		RunE: asks(a, func(ctx context.Context, c *client.Client, id string) (wire.Run, error) {
			return c.GetRun(ctx, contract.RunID(id))
		}, printRun),
	}
	cancel := &cobra.Command{
		Use: "cancel RUN_ID", Short: "cancel a run and every task of it", Args: onlyArg("RUN_ID"),
		RunE: asks(a, func(ctx context.Context, c *client.Client, id string) (wire.Cancelling, error) {
			return wire.Cancelling{RunID: contract.RunID(id), Status: wire.StatusCancelling}, c.CancelRun(ctx, contract.RunID(id))
		}, func(w, _ io.Writer, v wire.Cancelling) error {
			return write(w, fmt.Appendf(nil, "run %s is being cancelled\n", printable.Line(string(v.RunID))))
		}),
	}
	cmd.AddCommand(list, show, cancel)
	return cmd
}

// asks is a verb that asks the server for something, about what its argument names
// if it has one, and prints the answer.
func asks[T any](a *app, ask func(ctx context.Context, c *client.Client, id string) (T, error), show func(stdout, stderr io.Writer, v T) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		var id string
		if len(args) > 0 {
			id = args[0]
		}
		v, err := ask(cmd.Context(), c, id)
		if err != nil {
			return a.explain(err)
		}
		if a.json() {
			return printJSON(cmd.OutOrStdout(), v)
		}
		return show(cmd.OutOrStdout(), cmd.ErrOrStderr(), v)
	}
}

// help is what a verb does that needs another word.
func help(cmd *cobra.Command, _ []string) error { return cmd.Help() }

func pageFlags(cmd *cobra.Command, limit *int, cursor *string) {
	cmd.Flags().IntVar(limit, "limit", wire.DefaultPage, fmt.Sprintf("how many at most, 1 to %d", wire.MaxPage))
	cmd.Flags().StringVar(cursor, "cursor", "", "where the page before ended")
}

// nextPage tells how to go on, where there is more.
func nextPage(stderr io.Writer, cursor string) {
	if cursor != "" {
		fmt.Fprintf(stderr, "there are more: --cursor %s\n", printable.Line(cursor))
	}
}

func printRuns(w, stderr io.Writer, page wire.RunPage) error {
	if len(page.Runs) == 0 {
		fmt.Fprintln(stderr, "no runs")
		return nil
	}
	var t table
	t.row("RUN", "STATUS", "CREATED", "DURATION", "TASKS", "TOKENS", "INPUT")
	for _, r := range page.Runs {
		t.row(cell(string(r.RunID)), cell(string(r.Status)), cellTime(&r.CreatedAt), cellSpan(&r.CreatedAt, r.FinishedAt), fmt.Sprint(len(r.Delegations)), cellTokens(r.Usage), cell(r.Input))
	}
	nextPage(stderr, page.NextCursor)
	return t.print(w, "")
}

func printRun(w, _ io.Writer, r wire.Run) error {
	var t table
	t.row("run", cell(string(r.RunID)))
	t.row("thread", cell(string(r.ThreadID)))
	t.row("status", cell(string(r.Status)))
	t.row("stop reason", cellPtr(r.StopReason))
	t.row("model", cell(r.Model))
	t.row("tokens", cellUsage(r.Usage))
	if cost := cellCost(r.Usage); cost != "" {
		t.row("cost", cost)
	}
	t.row("created", cellTime(&r.CreatedAt))
	t.row("finished", cellTime(r.FinishedAt))
	t.row("duration", cellSpan(&r.CreatedAt, r.FinishedAt))
	t.row("trace", cell(r.TraceID))
	t.row("input", cell(r.Input))
	if err := t.print(w, ""); err != nil {
		return err
	}
	if len(r.Delegations) > 0 {
		d := table{}
		d.row("TASK", "TYPE", "STATUS", "TOKENS", "DESCRIPTION")
		for _, x := range r.Delegations {
			d.row(cell(string(x.TaskID)), cell(x.SubagentType), cell(x.Status), cellTokens(x.Usage), cell(x.Description))
		}
		if err := write(w, []byte("\n")); err != nil {
			return err
		}
		if err := d.print(w, ""); err != nil {
			return err
		}
	}
	return printTexts(w, text{"error", r.Error}, text{"output", r.Output})
}

// text is a longer text with a heading.
type text struct {
	heading string
	body    *string
}

func printTexts(w io.Writer, texts ...text) error {
	for _, t := range texts {
		if t.body == nil {
			continue
		}
		if err := write(w, fmt.Appendf(nil, "\n%s:\n%s\n", t.heading, printable.Block(*t.body))); err != nil {
			return err
		}
	}
	return nil
}
