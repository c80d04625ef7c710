package main

import (
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/doctor"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/internal/process"
)

func (a *app) doctorCommand() *cobra.Command {
	var past doctor.Past
	var history bool
	cmd := &cobra.Command{
		Use: "doctor", Short: "find out what is wrong and how to mend it", Args: cobra.NoArgs,
		Long: `Looks at the configuration, NATS with its streams, the data directory, the event
store, the models and their keys, MCP servers, the sandbox, the trace collector and the lead's HTTP
API. It changes nothing. Providers are asked whether they have the model and take the
key; nothing is generated. The exit code is 1 when a check fails.

With --history it also reads what is stored — events, task records, grants, the queue —
and checks that what must always hold has held: the capacity, the order, one end for
each task, nothing written by those who had lost their task, no event missing. The
system may run meanwhile: what is only under way is read again before it is judged.`,
		Example: `  herdgate doctor
  herdgate doctor --history --output json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !history {
				return a.doctor(cmd, nil)
			}
			if past.MaxEvents < 1 {
				return fmt.Errorf("--max-events: %d; want 1 or more", past.MaxEvents)
			}
			if past.ClockSkew < 0 {
				return fmt.Errorf("--clock-skew: %s is negative", past.ClockSkew)
			}
			return a.doctor(cmd, &past)
		},
	}
	cmd.Flags().BoolVar(&history, "history", false, "judge what is stored as well")
	cmd.Flags().IntVar(&past.MaxEvents, "max-events", doctor.DefaultEvents, "with --history: read so many events at most, the newest ones")
	cmd.Flags().DurationVar(&past.ClockSkew, "clock-skew", 2*time.Second, "with --history: how far the clocks of the machines may be apart")
	cmd.Flags().StringVar(&a.NATSURL, "nats-url", "", "NATS servers, joined by commas (nats.url)")
	cmd.Flags().StringVar(&a.NATSContext, "context", "", "a context of the nats command-line tool (nats.context)")
	return cmd
}

func (a *app) doctor(cmd *cobra.Command, past *doctor.Past) error {
	env, err := a.open(cmd.Context())
	var report doctor.Report
	if err != nil {
		report.Checks = []doctor.Check{{Name: "configuration", Status: doctor.Fail, Detail: err.Error(), Mend: "correct it; `herdgate config check` checks it alone"}}
	} else {
		dir, err := filepath.Abs(a.DataDir)
		if err != nil {
			return err
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		report = doctor.Examine(cmd.Context(), doctor.Patient{Env: env, DataDir: dir, Client: c, Server: a.server, Past: past})
		report.Checks = append([]doctor.Check{{Name: "configuration", Status: doctor.OK, Detail: "valid"}}, report.Checks...)
	}
	if a.json() {
		err = printJSON(cmd.OutOrStdout(), report)
	} else {
		var t table
		for _, c := range report.Checks {
			t.row(string(c.Status), printable.Line(c.Name), printable.Line(c.Detail))
			if c.Mend != "" {
				t.row("", "", "-> "+printable.Line(c.Mend))
			}
		}
		if err = t.print(cmd.OutOrStdout(), ""); err == nil && report.History != nil {
			err = printHistory(cmd.OutOrStdout(), report.History)
		}
	}
	if err != nil || report.OK {
		return err
	}
	return process.ExitCode(1)
}

// printHistory prints each violation with what proves it.
func printHistory(w io.Writer, h *doctor.History) error {
	for _, v := range h.Violations {
		if err := write(w, []byte("\n"+printable.Line(v.Rule+": "+v.Subject+": "+v.Text)+"\n")); err != nil {
			return err
		}
		var t table
		for _, e := range v.Proof {
			t.row(e.Source, fmt.Sprint(e.Seq), e.At.UTC().Format(time.RFC3339Nano), printable.Line(e.What), printable.Line(e.ID))
		}
		if err := t.print(w, "  "); err != nil {
			return err
		}
	}
	return nil
}
