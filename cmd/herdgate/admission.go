package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/progress"
	"github.com/herdgate/herdgate/internal/admissionapi"
)

func (a *app) admissionStatus() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "leader, slots in use, queue length, oldest waiter", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			s, err := c.Admission(cmd.Context())
			if err != nil {
				return a.explain(err)
			}
			if a.json() {
				return printJSON(cmd.OutOrStdout(), s)
			}
			return printAdmission(cmd.OutOrStdout(), s, time.Now())
		},
	}
}

func printAdmission(w io.Writer, s admissionapi.Status, now time.Time) error {
	var t table
	t.row("leader", cell(s.Leader))
	t.row("running", fmt.Sprintf("%d of %d", s.Running, s.MaxRunning))
	t.row("queued", fmt.Sprintf("%d of %d", s.Queued, s.MaxQueued))
	oldest := "-"
	if s.OldestQueuedAt != nil {
		oldest = fmt.Sprintf("%s, for %s", cellTime(s.OldestQueuedAt), progress.Seconds(max(0, now.Sub(*s.OldestQueuedAt))))
	}
	t.row("oldest waiter", oldest)
	if err := t.print(w, ""); err != nil || len(s.Slots) == 0 {
		return err
	}
	if err := write(w, []byte("\n")); err != nil {
		return err
	}
	slots := table{}
	slots.row("SLOT", "TASK", "EXECUTOR", "LEASE ENDS")
	for _, x := range s.Slots {
		slots.row(fmt.Sprint(x.Slot), cell(string(x.TaskID)), cell(x.Executor), cellTime(x.ExpiresAt))
	}
	return slots.print(w, "")
}
