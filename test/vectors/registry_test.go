package vectors

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
)

type vectorAgent struct {
	Name            string    `json:"name"`
	Tools           []string  `json:"tools"`
	DisallowedTools *[]string `json:"disallowed_tools"`
	Skills          []string  `json:"skills"`
	Model           string    `json:"model"`
	MaxTurns        *int      `json:"max_turns"`
	TimeoutSeconds  *int      `json:"timeout_seconds"`
	Enabled         *bool     `json:"enabled"`
}

func (a vectorAgent) custom(name string) subagent.Custom {
	return subagent.Custom{
		Name: name, Description: "d", SystemPrompt: "p", Tools: a.Tools, DisallowedTools: a.DisallowedTools, Skills: a.Skills,
		Model: a.Model, MaxTurns: a.MaxTurns, TimeoutSeconds: a.TimeoutSeconds,
	}
}

func (a vectorAgent) managed(t *testing.T) subagent.Stored {
	t.Helper()
	m := subagent.Managed{Name: a.Name, Description: "d", SystemPrompt: "p", Tools: a.Tools, Skills: a.Skills, Model: a.Model, Enabled: a.Enabled == nil || *a.Enabled}
	if a.DisallowedTools != nil {
		m.DisallowedTools = *a.DisallowedTools
	}
	if a.MaxTurns != nil {
		m.MaxTurns = *a.MaxTurns
	}
	if a.TimeoutSeconds != nil {
		m.TimeoutSeconds = *a.TimeoutSeconds
	}
	m, err := m.Normalize()
	if err != nil {
		t.Fatal(err)
	}
	return subagent.Stored{Managed: m, Revision: 1}
}

// REG-01 to REG-12
func runRegistryPrecedence(t *testing.T, c vectorCase) {
	in := into[struct {
		Op              string                 `json:"op"`
		DefinitionModel string                 `json:"definition_model"`
		ParentModel     *string                `json:"parent_model"`
		First           *string                `json:"first_configured_model"`
		Query           string                 `json:"query"`
		Custom          map[string]vectorAgent `json:"custom_agents"`
		Managed         []vectorAgent          `json:"managed"`
		Overrides       map[string]struct {
			TimeoutSeconds *int     `json:"timeout_seconds"`
			MaxTurns       *int     `json:"max_turns"`
			Model          *string  `json:"model"`
			Skills         []string `json:"skills"`
		} `json:"overrides"`
		Globals struct {
			TimeoutSeconds *int `json:"timeout_seconds"`
			MaxTurns       *int `json:"max_turns"`
		} `json:"globals"`
	}](t, c.inputs)
	if in.Op == "resolve_model" {
		got, err := subagent.EffectiveModel(in.DefinitionModel, text(in.ParentModel), text(in.First))
		if errors.Is(err, subagent.ErrNoModels) {
			got = "error:no_models"
		}
		equal(t, "model", got, c.object(t, "model")["model"])
		return
	}
	cfg := subagent.Config{TimeoutSeconds: in.Globals.TimeoutSeconds, MaxTurns: in.Globals.MaxTurns, Agents: map[string]subagent.Override{}}
	for _, name := range slices.Sorted(maps.Keys(in.Custom)) {
		cfg.Custom = append(cfg.Custom, in.Custom[name].custom(name))
	}
	for _, m := range in.Managed {
		cfg.Managed = append(cfg.Managed, m.managed(t))
	}
	for name, o := range in.Overrides {
		cfg.Agents[name] = subagent.Override{TimeoutSeconds: o.TimeoutSeconds, MaxTurns: o.MaxTurns, Model: o.Model, Skills: o.Skills}
	}
	r, err := subagent.NewRegistry(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if in.Query == "*" {
		names := []string{}
		for _, d := range r.List() {
			names = append(names, d.Name)
		}
		equal(t, "names", names, c.object(t, "names")["names"])
		return
	}
	want, ok := c.expected.(map[string]any)
	if !ok {
		t.Fatal("expected is no object")
	}
	d, found := r.Get(in.Query)
	equal(t, "found", found, want["found"])
	effective, _ := want["effective"].(map[string]any)
	got := map[string]any{
		"origin": string(d.Origin), "tools": d.Tools, "disallowed_tools": d.DisallowedTools, "skills": d.Skills,
		"model": d.Model, "max_turns": d.MaxTurns, "timeout_seconds": d.TimeoutSeconds,
	}
	for key, value := range effective {
		have, known := got[key]
		if !known {
			t.Fatalf("nothing compares %q", key)
		}
		if list, isList := have.([]string); isList && list == nil {
			have = nil
		}
		equal(t, key, have, value)
	}
}

// REG-13 to REG-18
func runAllowedSubagents(t *testing.T, c vectorCase) {
	in := into[struct {
		Op           string   `json:"op"`
		Names        []string `json:"names"`
		Type         string   `json:"type"`
		Allowed      []string `json:"allowed"`
		ShellAllowed *bool    `json:"shell_allowed"`
	}](t, c.inputs)
	var cfg subagent.Config
	for _, name := range in.Names {
		if name != subagent.GeneralPurpose && name != subagent.Bash {
			cfg.Custom = append(cfg.Custom, vectorAgent{}.custom(name))
		}
	}
	r, err := subagent.NewRegistry(cfg)
	if err != nil {
		t.Fatal(err)
	}
	// What cannot be determined hides nothing.
	visible := r.Visible(in.Allowed, in.ShellAllowed == nil || *in.ShellAllowed)
	if in.Op == "list" {
		names := []string{}
		for _, d := range visible {
			names = append(names, d.Name)
		}
		equal(t, "visible", names, c.object(t, "visible")["visible"])
		return
	}
	want, ok := c.expected.(map[string]any)
	if !ok {
		t.Fatal("expected is no object")
	}
	d, err := subagent.Choose(visible, in.Allowed, in.Type)
	var refused *subagent.RefusedError
	decision := "start"
	if errors.As(err, &refused) {
		decision = "refuse"
	}
	equal(t, "decision", decision, want["decision"])
	request := contract.TaskRequest{AllowedSubagents: in.Allowed, Subagent: contract.Subagent{Name: in.Type}}
	if decision == "start" {
		if d.Name != in.Type || request.CheckPolicy() != nil {
			t.Errorf("chosen is %q; the request's own policy says %v", d.Name, request.CheckPolicy())
		}
		return
	}
	for key, value := range want {
		switch key {
		case "decision":
		case "status": // the tool's result of a refusal is tested where it is made
		case "events": // a refusal comes before any request, so there are none
			equal(t, key, []string{}, value)
		case "names_offered":
			if refused.ByPolicy {
				equal(t, key, "none_by_policy", value)
			} else {
				equal(t, key, refused.Offered, value)
			}
		default:
			t.Fatalf("nothing compares %q", key)
		}
	}
}
