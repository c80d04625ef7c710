package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/doctor"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/pkg/contract"
)

func (a *app) eventsVerifyCommand() *cobra.Command {
	var v doctor.Verify
	var run string
	cmd := &cobra.Command{
		Use: "verify", Short: "compare the events with the records and the event store", Args: cobra.NoArgs,
		Long: `Compares the event stream with the records of tasks and runs and with the event
store: ends without their event, events without a record, a wrong order, gaps in
message_index, events that are there twice, events that the store lacks, holds otherwise
or alone has. The system may run meanwhile. The exit code is 1 when something is found and not
mended.

With --repair an end that is missing is stored, made from its record: with the id that it
always has, and only if nobody else has stored it. What cannot be mended is told.`,
		Example: `  herdgate events verify --since 24h
  herdgate events verify --run RUN_ID --repair --output json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if v.Since < 0 {
				return fmt.Errorf("--since: %s is negative", v.Since)
			}
			if v.MaxEvents < 1 {
				return fmt.Errorf("--max-events: %d; want 1 or more", v.MaxEvents)
			}
			if v.Run = contract.RunID(run); run != "" {
				if err := v.Run.Validate(); err != nil {
					return fmt.Errorf("--run: %w", err)
				}
			}
			return a.eventsVerify(cmd, v)
		},
	}
	f := cmd.Flags()
	f.StringVar(&run, "run", "", "of this run and its tasks alone")
	f.DurationVar(&v.Since, "since", 0, "only what happened so long ago at most; 0 is all")
	f.BoolVar(&v.Repair, "repair", false, "store ends that are missing, from their records")
	f.IntVar(&v.MaxEvents, "max-events", doctor.DefaultEvents, "read so many events at most, the newest ones")
	f.StringVar(&a.NATSURL, "nats-url", "", "NATS servers, joined by commas (nats.url)")
	f.StringVar(&a.NATSContext, "context", "", "a context of the nats command-line tool (nats.context)")
	return cmd
}

func (a *app) eventsVerify(cmd *cobra.Command, v doctor.Verify) error {
	env, err := a.open(cmd.Context())
	if err != nil {
		return err
	}
	cfg, err := env.BusConfig("events-verify")
	if err != nil {
		return err
	}
	if cfg.URL == "" {
		cfg.URL = "nats://" + env.Config.NATS.Embedded.Listen
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), reachTimeout)
	c, err := bus.Connect(ctx, cfg, env.Log)
	cancel()
	if err != nil {
		return fmt.Errorf("%w; --nats-url names another server", err)
	}
	defer c.Close()
	got, err := doctor.VerifyEvents(cmd.Context(), c, v)
	if err != nil {
		return err
	}
	if a.json() {
		err = printJSON(cmd.OutOrStdout(), got)
	} else {
		err = printVerified(cmd, got)
	}
	if err != nil || got.OK {
		return err
	}
	return process.ExitCode(1)
}

func printVerified(cmd *cobra.Command, got doctor.Verified) error {
	var t table
	for _, f := range got.Findings {
		state := "wrong"
		if f.Mended {
			state = "mended"
		}
		t.row(state, printable.Line(f.Subject), printable.Line(f.Text))
		for _, e := range f.Proof {
			t.row("", "", printable.Line("see "+e.String()))
		}
		if f.Mend != "" {
			t.row("", "", printable.Line("-> "+f.Mend))
		}
	}
	if got.StoreError != "" {
		t.row("wrong", "event store", printable.Line("it was not compared: "+got.StoreError))
	}
	sum := fmt.Sprintf("%d events, %d task records, %d run records, the store up to %d", got.Events, got.Records, got.RunRecords, got.StoredTo)
	if got.Cut != "" {
		sum += "; " + got.Cut
	}
	state := "ok"
	if !got.OK {
		state = "failed"
	}
	t.row(state, "compared", sum)
	return t.print(cmd.OutOrStdout(), "")
}
