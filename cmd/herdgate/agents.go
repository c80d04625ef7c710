package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/internal/agentfile"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
)

func (a *app) agentsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "agents", Short: "look at sub-agent types, and make, change and delete managed ones", Args: cobra.NoArgs, RunE: help,
	}
	cmd.AddCommand(&cobra.Command{
		Use: "list", Short: "list all definitions: where each comes from, and which one counts", Args: cobra.NoArgs,
		RunE: asks(a, func(ctx context.Context, c *client.Client, _ string) ([]wire.Subagent, error) {
			return c.Subagents(ctx)
		}, printAgents),
	}, a.agentsShow(), a.agentsApply(), a.agentsDelete())
	return cmd
}

func (a *app) agentsShow() *cobra.Command {
	managed := false
	cmd := &cobra.Command{
		Use: "show NAME", Short: "show a type with its prompt", Args: onlyArg("NAME"),
		RunE: asks(a, func(ctx context.Context, c *client.Client, name string) (wire.Subagent, error) {
			if managed {
				return c.ManagedSubagent(ctx, name)
			}
			return c.Subagent(ctx, name)
		}, printAgent),
	}
	cmd.Flags().BoolVar(&managed, "managed", false, "the managed definition of that name, also where another one counts")
	return cmd
}

// applied is what became of one definition.
type applied struct {
	Name   string `json:"name"`
	Result string `json:"result"`
	// ShadowedBy says whose definition counts instead.
	ShadowedBy string `json:"shadowed_by,omitempty"`
	Revision   uint64 `json:"revision"`
}

func (a *app) agentsApply() *cobra.Command {
	var files []string
	cmd := &cobra.Command{
		Use: "apply -f FILE", Short: "store definitions, new or changed", Args: cobra.NoArgs,
		Long: `Stores the definitions of files in the deployment. A file is YAML with one
definition in each document (name, and the keys of subagents.custom_agents, and
enabled), or Markdown with front matter, if its name ends in .md. - reads YAML from
the standard input. All files are read before anything is stored.`,
		Example: "  herdgate agents apply -f reviewer.md -f team.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			defs, err := readDefinitions(cmd, files)
			if err != nil {
				return err
			}
			return asks(a, func(ctx context.Context, c *client.Client, _ string) ([]applied, error) {
				var out []applied
				for _, d := range defs {
					one, err := apply(ctx, c, d)
					if err != nil {
						return out, fmt.Errorf("%s (%d of %d are stored): %w", d.Name, len(out), len(defs), err)
					}
					out = append(out, one)
				}
				return out, nil
			}, printApplied)(cmd, nil)
		},
	}
	cmd.Flags().StringArrayVarP(&files, "file", "f", nil, "`FILE` with definitions; may be given several times")
	return cmd
}

func readDefinitions(cmd *cobra.Command, files []string) ([]agentfile.Definition, error) {
	if len(files) == 0 {
		return nil, errors.New("agents apply wants -f FILE, a file with definitions")
	}
	var defs []agentfile.Definition
	from := map[string]string{}
	for _, file := range files {
		list, warnings, err := readFile(cmd, file)
		if err != nil {
			return nil, err
		}
		for _, w := range warnings {
			fmt.Fprintln(cmd.ErrOrStderr(), "note: "+printable.Line(w.String()))
		}
		for _, d := range list {
			if first, twice := from[d.Name]; twice {
				return nil, fmt.Errorf("%s is defined in %s and in %s; keep one of them", d.Name, first, file)
			}
			from[d.Name] = file
			defs = append(defs, d)
		}
	}
	return defs, nil
}

func readFile(cmd *cobra.Command, file string) ([]agentfile.Definition, []agentfile.Warning, error) {
	if file == "-" {
		return agentfile.ReadDefinitions("standard input", cmd.InOrStdin())
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	return agentfile.ReadDefinitions(file, f)
}

// apply stores one definition unless it is stored as it is. What somebody else
// changes in between is not overwritten.
func apply(ctx context.Context, c *client.Client, d agentfile.Definition) (applied, error) {
	before, err := c.ManagedSubagent(ctx, d.Name)
	if notFound(err) {
		before, err = wire.Subagent{}, nil
	}
	if err != nil {
		return applied{}, err
	}
	if before.Revision > 0 && d.Same(before) {
		return applied{Name: before.Name, Result: "unchanged", ShadowedBy: before.ShadowedBy, Revision: before.Revision}, nil
	}
	now, err := c.PutSubagent(ctx, d.Name, d.Request, before.Revision)
	if err != nil {
		var api *client.Error
		if errors.As(err, &api) && api.Status == http.StatusPreconditionFailed {
			err = fmt.Errorf("somebody else has changed it in this moment; look at it, and apply again: %w", err)
		}
		return applied{}, err
	}
	out := applied{Name: now.Name, Result: "changed", ShadowedBy: now.ShadowedBy, Revision: now.Revision}
	if before.Revision == 0 {
		out.Result = "created"
	}
	return out, nil
}

func notFound(err error) bool {
	var api *client.Error
	return errors.As(err, &api) && api.Status == http.StatusNotFound
}

func (a *app) agentsDelete() *cobra.Command {
	return &cobra.Command{
		Use: "delete NAME", Short: "delete a managed definition", Args: onlyArg("NAME"),
		RunE: asks(a, func(ctx context.Context, c *client.Client, name string) (applied, error) {
			before, err := c.ManagedSubagent(ctx, name)
			if notFound(err) {
				return applied{}, fmt.Errorf("there is no managed definition %q; `herdgate agents list` shows where a type comes from", name)
			}
			var api *client.Error
			if errors.As(err, &api) && api.Code == wire.CodeInternal {
				before, err = wire.Subagent{Name: name}, nil // it cannot be shown, and all the more be deleted
			}
			if err == nil {
				err = c.DeleteSubagent(ctx, before.Name, before.Revision)
			}
			return applied{Name: before.Name, Result: "deleted", Revision: before.Revision}, err
		}, func(w, _ io.Writer, v applied) error {
			return write(w, fmt.Appendf(nil, "%s deleted\n", printable.Line(v.Name)))
		}),
	}
}

func printApplied(w, stderr io.Writer, list []applied) error {
	for _, x := range list {
		if err := write(w, fmt.Appendf(nil, "%s %s\n", printable.Line(x.Name), x.Result)); err != nil {
			return err
		}
		if x.ShadowedBy != "" {
			fmt.Fprintf(stderr, "note: %s has no effect: %s\n", printable.Line(x.Name), conflict(x.ShadowedBy))
		}
	}
	return nil
}

// conflict says whose definition counts.
func conflict(owner string) string {
	return map[string]string{
		"builtin": "a built-in type has this name", "config": "subagents.custom_agents has this name", "file": "a file of subagents.paths has this name",
	}[owner]
}

func state(x wire.Subagent) string {
	var s []string
	if !x.Enabled {
		s = append(s, "disabled")
	}
	if x.ShadowedBy != "" {
		s = append(s, "shadowed by "+x.ShadowedBy)
	}
	if len(s) == 0 {
		return "in force"
	}
	return strings.Join(s, ", ")
}

func printAgents(w, _ io.Writer, list []wire.Subagent) error {
	var t table
	t.row("NAME", "SOURCE", "STATE", "MODEL", "TURNS", "SECONDS", "DESCRIPTION")
	for _, x := range list {
		t.row(cell(x.Name), cell(x.Source), cell(state(x)), cell(x.Model), fmt.Sprint(x.MaxTurns), fmt.Sprint(x.TimeoutSeconds), cell(x.Description))
	}
	return t.print(w, "")
}

func printAgent(w, _ io.Writer, x wire.Subagent) error {
	list := func(names []string, none string) string {
		switch {
		case names == nil:
			return none
		case len(names) == 0:
			return "none"
		}
		return strings.Join(names, ", ")
	}
	var t table
	t.row("name", cell(x.Name))
	if x.DisplayName != "" {
		t.row("display name", cell(x.DisplayName))
	}
	t.row("source", cell(x.Source))
	if x.Path != "" {
		t.row("file", cell(x.Path))
	}
	t.row("state", cell(state(x)))
	if x.Revision > 0 {
		t.row("revision", fmt.Sprint(x.Revision))
	}
	t.row("description", cell(x.Description))
	t.row("tools", cell(list(x.Tools, "all that are offered")))
	t.row("disallowed", cell(list(x.DisallowedTools, "none")))
	t.row("skills", cell(list(x.Skills, "those of the parent")))
	t.row("model", cell(x.Model))
	if x.Pool != "" {
		t.row("pool", cell(x.Pool))
	}
	t.row("max turns", fmt.Sprint(x.MaxTurns))
	t.row("timeout", fmt.Sprintf("%d s", x.TimeoutSeconds))
	t.row("network", fmt.Sprint(x.Network))
	if err := t.print(w, ""); err != nil {
		return err
	}
	if x.SystemPrompt == "" {
		return nil
	}
	return printTexts(w, text{"system prompt", &x.SystemPrompt})
}
