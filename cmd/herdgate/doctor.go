package main

import (
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/doctor"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/internal/process"
)

func (a *app) doctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "doctor", Short: "find out what is wrong and how to mend it", Args: cobra.NoArgs,
		Long: `Looks at the configuration, NATS with its streams, the data directory, the event
store, the models and their keys, the sandbox, the trace collector and the lead's HTTP
API. It changes nothing and calls no model. The exit code is 1 when a check fails.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.doctor(cmd) },
	}
	cmd.Flags().StringVar(&a.NATSURL, "nats-url", "", "NATS servers, joined by commas (nats.url)")
	cmd.Flags().StringVar(&a.NATSContext, "context", "", "a context of the nats command-line tool (nats.context)")
	return cmd
}

func (a *app) doctor(cmd *cobra.Command) error {
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
		report = doctor.Examine(cmd.Context(), doctor.Patient{Env: env, DataDir: dir, Client: c, Server: a.server})
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
		err = t.print(cmd.OutOrStdout(), "")
	}
	if err != nil || report.OK {
		return err
	}
	return process.ExitCode(1)
}
