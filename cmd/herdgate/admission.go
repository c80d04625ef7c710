package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/progress"
	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/pkg/contract"
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
	t.row("epoch", fmt.Sprint(s.Epoch))
	t.row("running", fmt.Sprintf("%d of %d", s.Running, s.MaxRunning))
	t.row("queued", fmt.Sprintf("%d of %d", s.Queued, s.MaxQueued))
	oldest := "-"
	if s.OldestQueuedAt != nil {
		oldest = fmt.Sprintf("%s, for %s", cellTime(s.OldestQueuedAt), progress.Seconds(max(0, now.Sub(*s.OldestQueuedAt))))
	}
	t.row("oldest waiter", oldest)
	if n := s.Totals; !n.Since.IsZero() {
		t.row("since", cellTime(&n.Since))
		t.row("grants", fmt.Sprint(n.Grants))
		t.row("expired leases", fmt.Sprint(n.Expiries))
		t.row("refusals", refusals(n.Refusals))
		t.row("fence rejections", fmt.Sprint(n.FenceRejections))
		t.row("take-overs", fmt.Sprint(n.Takeovers))
	}
	parts := []table{t}
	if len(s.Pools) > 1 {
		pools := table{}
		pools.row("POOL", "RUNNING", "QUEUED", "OLDEST WAITER")
		for _, p := range s.Pools {
			pools.row(cell(string(p.Pool)), fmt.Sprintf("%d of %d", p.Running, p.MaxRunning), fmt.Sprint(p.Queued), cellTime(p.OldestQueuedAt))
		}
		parts = append(parts, pools)
	}
	if len(s.Slots) > 0 {
		slots := table{}
		slots.row("POOL", "SLOT", "TASK", "EXECUTOR", "LEASE ENDS", "LEFT")
		for _, x := range s.Slots {
			left := "-"
			if x.ExpiresAt != nil {
				left = progress.Seconds(max(0, x.ExpiresAt.Sub(now)))
			}
			slots.row(cell(string(x.Pool)), fmt.Sprint(x.Slot), cell(string(x.TaskID)), cell(x.Executor), cellTime(x.ExpiresAt), left)
		}
		parts = append(parts, slots)
	}
	for i, part := range parts {
		if i > 0 {
			if err := write(w, []byte("\n")); err != nil {
				return err
			}
		}
		if err := part.print(w, ""); err != nil {
			return err
		}
	}
	return nil
}

func refusals(by map[contract.ErrorCode]int) string {
	if len(by) == 0 {
		return "0"
	}
	var parts []string
	for _, code := range slices.Sorted(maps.Keys(by)) {
		parts = append(parts, fmt.Sprintf("%d %s", by[code], cell(string(code))))
	}
	return strings.Join(parts, ", ")
}
