package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/internal/config"
)

func (a *app) configCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "check a configuration file, print its schema", Args: cobra.NoArgs, RunE: help}
	cmd.AddCommand(&cobra.Command{
		Use: "check [FILE]", Short: "name every fault of a configuration with line and column", Args: cobra.MaximumNArgs(1),
		Long: `Checks FILE, else the file of --config, else ./herdgate.yaml, together with the
HERDGATE_ variables of the environment. Each fault is a line FILE:LINE:COLUMN: KEY:
RULE. The exit code is 1 when there is any.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			file := a.ConfigFile
			if len(args) == 1 {
				file = args[0]
			}
			return a.checkConfig(cmd, file)
		},
	}, &cobra.Command{
		Use: "schema", Short: "print the JSON Schema of the configuration file", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return write(cmd.OutOrStdout(), append(config.Schema(), '\n'))
		},
	})
	return cmd
}

// configReport is what config check prints as JSON.
type configReport struct {
	// File is empty when there is none and the defaults hold.
	File   string        `json:"file"`
	OK     bool          `json:"ok"`
	Faults []configFault `json:"faults"`
	Notes  []string      `json:"notes,omitempty"`
}

// configFault is a fault with its place, which config.Fault leaves out of JSON.
type configFault struct {
	config.Fault
	Line   int `json:"line,omitempty"`
	Column int `json:"column,omitempty"`
}

func (a *app) checkConfig(cmd *cobra.Command, file string) error {
	report := configReport{File: file, Faults: []configFault{}}
	if file == "" {
		report.File = config.DefaultFile
		if _, err := os.Stat(config.DefaultFile); errors.Is(err, os.ErrNotExist) {
			report.File = ""
		}
	}
	cfg, err := config.Load(config.Options{File: file, FileExplicit: file != "", Env: os.Environ()})
	var bad *config.Error
	switch {
	case errors.As(err, &bad):
		for _, f := range bad.Faults {
			report.Faults = append(report.Faults, configFault{Fault: f, Line: f.Line, Column: f.Column})
		}
	case err != nil:
		return err
	default:
		report.OK = true
		report.Notes = cfg.Notes()
	}
	stdout := cmd.OutOrStdout()
	if a.json() {
		err = printJSON(stdout, report)
	} else {
		err = printReport(cmd, report)
	}
	if err != nil || report.OK {
		return err
	}
	return fmt.Errorf("config: %d fault(s)", len(report.Faults))
}

func printReport(cmd *cobra.Command, r configReport) error {
	for _, n := range r.Notes {
		fmt.Fprintln(cmd.ErrOrStderr(), "note: "+n)
	}
	for _, f := range r.Faults {
		if err := write(cmd.OutOrStdout(), []byte(f.String()+"\n")); err != nil {
			return err
		}
	}
	switch {
	case !r.OK:
		return nil
	case r.File == "":
		return write(cmd.OutOrStdout(), []byte("no file; the defaults hold\n"))
	}
	return write(cmd.OutOrStdout(), []byte(r.File+": ok\n"))
}
