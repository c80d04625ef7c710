package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/provision"
)

// reachTimeout bounds the wait for a NATS server.
const reachTimeout = 10 * time.Second

func (a *app) provisionCommand() *cobra.Command {
	var dry bool
	cmd := &cobra.Command{
		Use: "provision", Short: "create or update streams, buckets and consumers", Args: cobra.NoArgs,
		Long: `Compares the streams, buckets and consumers on the NATS server with the
configuration, and creates or updates what differs. Nothing is deleted. What cannot be
changed in place is told, and then nothing is changed at all.

Signs: + is created, ~ is changed, ! cannot be changed in place. The embedded server of
` + "`herdgate up`" + ` is provisioned by that verb.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.provision(cmd, dry) },
	}
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print the difference and change nothing")
	cmd.Flags().StringVar(&a.NATSURL, "nats-url", "", "NATS servers, joined by commas (nats.url)")
	cmd.Flags().StringVar(&a.NATSContext, "context", "", "a context of the nats command-line tool (nats.context)")
	return cmd
}

// provisionReport is what provision prints as JSON.
type provisionReport struct {
	DryRun  bool     `json:"dry_run"`
	InLine  bool     `json:"in_line"`
	Changes []change `json:"changes"`
	Error   string   `json:"error,omitempty"`
}

type change struct {
	Kind    string        `json:"kind"`
	Name    string        `json:"name"`
	Action  string        `json:"action"` // create, update or refuse
	Unsafe  bool          `json:"unsafe,omitempty"`
	Setting []fieldChange `json:"settings"`
}

type fieldChange struct {
	Name    string `json:"name"`
	Have    string `json:"have,omitempty"`
	Want    string `json:"want"`
	InPlace bool   `json:"in_place"`
	Trims   bool   `json:"trims,omitempty"`
}

func (a *app) provision(cmd *cobra.Command, dry bool) error {
	env, err := a.open(cmd.Context())
	if err != nil {
		return err
	}
	assets, err := env.Assets()
	if err != nil {
		return err
	}
	cfg, err := env.BusConfig("provision")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), reachTimeout)
	conn, err := bus.Connect(ctx, cfg, env.Log)
	cancel()
	if err != nil {
		return err
	}
	defer conn.Close()
	act := provision.Apply
	if dry {
		act = provision.Plan
	}
	changes, actErr := act(cmd.Context(), conn.NC, assets)
	if actErr != nil && !errors.Is(actErr, provision.ErrNotInPlace) && len(changes) == 0 {
		return actErr
	}
	if a.json() {
		err = printJSON(cmd.OutOrStdout(), reportOf(dry, changes, actErr))
	} else if len(changes) == 0 {
		err = write(cmd.OutOrStdout(), fmt.Appendf(nil, "in line: %d streams and %d consumers are as they should be\n", len(assets.Streams), len(assets.Consumers)))
	} else {
		err = provision.WriteDiff(cmd.OutOrStdout(), changes)
		if dry {
			fmt.Fprintln(cmd.ErrOrStderr(), "nothing was changed: this was a dry run")
		}
	}
	return errors.Join(err, actErr)
}

func reportOf(dry bool, changes []provision.Change, err error) provisionReport {
	r := provisionReport{DryRun: dry, InLine: len(changes) == 0 || !dry && err == nil, Changes: []change{}}
	if err != nil {
		r.Error = err.Error()
	}
	for _, c := range changes {
		out := change{Kind: string(c.Kind), Name: c.Name, Action: "update", Unsafe: c.Unsafe(), Setting: []fieldChange{}}
		switch {
		case c.Missing:
			out.Action = "create"
		case !c.InPlace():
			out.Action = "refuse"
		}
		for _, f := range c.Fields {
			out.Setting = append(out.Setting, fieldChange{Name: f.Name, Have: f.Have, Want: f.Want, InPlace: c.Missing || f.InPlace, Trims: f.Trims})
		}
		r.Changes = append(r.Changes, out)
	}
	return r
}
