package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

func (a *app) eventsCommand() *cobra.Command {
	var filter eventFilter
	var limit int
	var follow bool
	cmd := &cobra.Command{
		Use: "events", Short: "print events as JSON lines", Args: cobra.NoArgs,
		Long: `Prints the stored events that match, one JSON record a line, oldest first. With
--follow it goes on with those that come, until it is interrupted; of one run (--run
without --task), until that run ends.`,
		Example: `  herdgate events --run RUN_ID
  herdgate events --type subagent.end --follow`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 0 {
				return fmt.Errorf("--limit: %d is negative; want 1 or more, or 0 for all", limit)
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			left, after := limit, filter.after
			each := func(rec contract.EventRecord) error {
				if err := printJSONLine(cmd.OutOrStdout(), rec); err != nil {
					return err
				}
				if left--; left == 0 {
					return client.ErrStop
				}
				return nil
			}
			stderr := cmd.ErrOrStderr()
			q := filter.query()
			q.OnGap = func(g wire.Gap) {
				fmt.Fprintf(stderr, "the events %d to %d are no longer kept\n", g.FromSeq, g.ToSeq)
			}
			q.OnRetry = func(err error) { fmt.Fprintf(stderr, "the connection broke, trying again: %v\n", err) }
			if follow {
				// A server that is not there at all is told at once, not waited for.
				probe := q
				probe.Limit = 1
				if _, err := c.ListEvents(cmd.Context(), probe, after); err != nil {
					return a.explain(err)
				}
				return a.explain(c.Stream(cmd.Context(), q, after, each))
			}
			for {
				q.Limit = wire.DefaultEvents
				if limit > 0 {
					q.Limit = min(left, wire.MaxEvents)
				}
				page, err := c.ListEvents(cmd.Context(), q, after)
				if err != nil {
					return a.explain(err)
				}
				for _, rec := range page.Events {
					if err := each(rec); errors.Is(err, client.ErrStop) {
						return nil
					} else if err != nil {
						return err
					}
				}
				if !page.HasMore || page.NextAfterSeq <= after {
					return nil
				}
				after = page.NextAfterSeq
			}
		},
	}
	f := cmd.Flags()
	filter.flags(f)
	f.BoolVar(&follow, "follow", false, "go on with events as they come")
	f.IntVar(&limit, "limit", 0, "stop after so many; 0 prints all")
	cmd.AddCommand(a.eventsExportCommand(), a.eventsVerifyCommand())
	return cmd
}

func (f *eventFilter) flags(flags *pflag.FlagSet) {
	flags.StringVar(&f.run, "run", "", "events of this run")
	flags.StringVar(&f.task, "task", "", "events of this task")
	flags.StringVar(&f.thread, "thread", "", "events of this thread")
	flags.StringSliceVar(&f.types, "type", nil, "stored type, such as subagent.end; may be repeated or joined by commas")
	flags.Uint64Var(&f.after, "after-seq", 0, "only events after this sequence")
	flags.BoolVar(&f.allAttempts, "all-attempts", false, "with --task: also what attempts told that were followed by another one")
}

// split takes lists apart that came with blanks.
func split(list []string) []string {
	var out []string
	for _, s := range list {
		if s = strings.TrimSpace(s); s != "" {
			out = append(out, s)
		}
	}
	return out
}
