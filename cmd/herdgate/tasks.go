package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/receipt"
	"github.com/herdgate/herdgate/pkg/contract"
)

func (a *app) tasksCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "tasks", Short: "submit tasks, look at them, cancel them", Args: cobra.NoArgs, RunE: help}
	cmd.AddCommand(a.tasksList(), a.tasksShow(), a.tasksCancel(), a.tasksSubmit())
	return cmd
}

func (a *app) tasksList() *cobra.Command {
	var q client.TaskQuery
	var run, status string
	cmd := &cobra.Command{
		Use: "list", Short: "list tasks, newest first", Args: cobra.NoArgs,
		RunE: asks(a, func(ctx context.Context, c *client.Client, _ string) (wire.TaskPage, error) {
			q.RunID, q.Status = contract.RunID(run), contract.TaskStatus(status)
			return c.ListTasks(ctx, q)
		}, printTasks),
	}
	cmd.Flags().StringVar(&run, "run", "", "tasks of this run")
	cmd.Flags().StringVar(&status, "status", "", "queued, running, completed, failed, cancelled or timed_out")
	pageFlags(cmd, &q.Limit, &q.Cursor)
	return cmd
}

func (a *app) tasksShow() *cobra.Command {
	return &cobra.Command{
		Use: "show TASK_ID", Short: "show a task with its result", Args: onlyArg("TASK_ID"),
		RunE: asks(a, func(ctx context.Context, c *client.Client, id string) (wire.Task, error) {
			return c.GetTask(ctx, contract.TaskID(id))
		}, printTask),
	}
}

func (a *app) tasksCancel() *cobra.Command {
	return &cobra.Command{
		Use: "cancel TASK_ID", Short: "cancel a task", Args: onlyArg("TASK_ID"),
		RunE: asks(a, func(ctx context.Context, c *client.Client, id string) (wire.Cancelling, error) {
			err := c.CancelTask(ctx, contract.TaskID(id))
			var api *client.Error
			if errors.As(err, &api) && api.Code == wire.CodeAlreadyFinished {
				err = fmt.Errorf("task %s has ended before: %s", printable.Line(id), printable.Line(api.FinishedStatus))
			}
			return wire.Cancelling{TaskID: contract.TaskID(id), Status: wire.StatusCancelling}, err
		}, func(w, _ io.Writer, v wire.Cancelling) error {
			return write(w, fmt.Appendf(nil, "task %s is being cancelled\n", printable.Line(string(v.TaskID))))
		}),
	}
}

func (a *app) tasksSubmit() *cobra.Command {
	var req wire.TaskRequest
	var timeout int
	cmd := &cobra.Command{
		Use: `submit "PROMPT"`, Short: "delegate one task without a lead", Args: onlyArg("PROMPT"),
		Long: `Submits one task and prints its id without waiting for its end. The prompt - is
read from the standard input.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			if req.Prompt, err = prompt(args[0], cmd.InOrStdin()); err != nil {
				return err
			}
			if cmd.Flags().Changed("timeout") {
				req.TimeoutSeconds = &timeout
			}
			t, err := c.SubmitTask(cmd.Context(), req)
			if err != nil {
				return a.explain(err)
			}
			if a.json() {
				return printJSON(cmd.OutOrStdout(), t)
			}
			if t.QueuePosition > 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "place %d in the queue\n", t.QueuePosition)
			}
			return write(cmd.OutOrStdout(), fmt.Appendf(nil, "%s\n", printable.Line(string(t.TaskID))))
		},
	}
	f := cmd.Flags()
	f.StringVar(&req.SubagentType, "type", "general-purpose", "sub-agent type")
	f.StringVar(&req.Description, "description", "", "a few words for people (default the beginning of the prompt)")
	f.StringArrayVar(&req.AcceptanceCriteria, "criterion", nil, "acceptance criterion; may be repeated")
	f.StringVar(&req.ThreadID, "thread", "", "thread whose workspace is used (default a new one)")
	f.StringVar(&req.Model, "model", "", "name of a configured model")
	f.IntVar(&timeout, "timeout", 0, "seconds that the task may run (default that of its type)")
	return cmd
}

func printTasks(w, stderr io.Writer, page wire.TaskPage) error {
	if len(page.Tasks) == 0 {
		fmt.Fprintln(stderr, "no tasks")
		return nil
	}
	var t table
	t.row("TASK", "STATUS", "TYPE", "ATTEMPT", "QUEUED", "DURATION", "TOKENS", "DESCRIPTION")
	for _, x := range page.Tasks {
		t.row(cell(string(x.TaskID)), cell(string(x.Status)), cell(x.SubagentType), fmt.Sprint(x.Attempt), cellTime(&x.QueuedAt), cellSpan(x.StartedAt, x.FinishedAt), cellTokens(x.Usage), cell(x.Description))
	}
	nextPage(stderr, page.NextCursor)
	return t.print(w, "")
}

// printReceipts lists the evidence of a task's tool calls.
func printReceipts(w io.Writer, rs []contract.Receipt) error {
	if len(rs) == 0 {
		return nil
	}
	var t table
	t.row("RECEIPT", "TOOL", "STATUS", "BYTES", "SHA256", "AT")
	for _, r := range rs {
		t.row(cell(r.ID), cell(r.ToolName), cell(r.Status), fmt.Sprint(r.OutputBytes), cell(r.OutputSHA256), cellTime(r.CreatedAt))
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return t.print(w, "")
}

func printTask(w, _ io.Writer, x wire.Task) error {
	var t table
	t.row("task", cell(string(x.TaskID)))
	t.row("run", cell(string(x.RunID)))
	t.row("thread", cell(string(x.ThreadID)))
	t.row("status", cell(string(x.Status)))
	if x.CancelRequested && !x.Status.Terminal() {
		t.row("", "being cancelled")
	}
	if x.QueuePosition != nil {
		t.row("queue position", fmt.Sprint(*x.QueuePosition))
	}
	t.row("stop reason", cellPtr(x.StopReason))
	t.row("error code", cell(string(x.ErrorCode)))
	t.row("type", cell(x.SubagentType))
	t.row("description", cell(x.Description))
	t.row("attempt", fmt.Sprint(x.Attempt))
	t.row("executor", cell(x.Executor))
	t.row("model", cellPtr(x.ModelName))
	t.row("tokens", cellUsage(x.Usage))
	if cost := cellCost(x.Usage); cost != "" {
		t.row("cost", cost)
	}
	t.row("queued", cellTime(&x.QueuedAt))
	t.row("started", cellTime(x.StartedAt))
	t.row("finished", cellTime(x.FinishedAt))
	t.row("duration", cellSpan(x.StartedAt, x.FinishedAt))
	t.row("trace", cell(x.TraceID))
	if v := x.ReceiptVerdict; v != nil {
		t.row("citations", cell(receipt.Counts(*v)))
		if len(v.Resolved)+len(v.Failed)+len(v.Unknown) > 0 {
			t.row("", cell(receipt.Limitation))
		}
	}
	if err := t.print(w, ""); err != nil {
		return err
	}
	if err := printReceipts(w, x.Receipts); err != nil {
		return err
	}
	heading := "result"
	if x.ResultTruncated {
		heading = "result (its beginning)"
	}
	return printTexts(w, text{"error", x.Error}, text{heading, x.Result})
}
