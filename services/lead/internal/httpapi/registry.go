package httpapi

import (
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
)

// FromRegistry shows a registry to the interface. Without shellAllowed the
// types that need the host's shell do not exist for callers.
func FromRegistry(r Types, shellAllowed bool) Subagents {
	return registry{r: r, shell: shellAllowed}
}

// Types are the sub-agent types in force: a *subagent.Catalogue, or a
// *subagent.Registry where nothing changes.
type Types interface {
	Visible(allowed []string, shellAllowed bool) []subagent.Definition
	Entries() []subagent.Entry
}

type registry struct {
	r     Types
	shell bool
}

func (g registry) Resolve(name string) (contract.Subagent, bool) {
	visible := g.r.Visible([]string{name}, g.shell)
	if len(visible) == 0 {
		return contract.Subagent{}, false
	}
	return visible[0].Resolve(), true
}

func (g registry) Catalogue() []wire.Subagent {
	var out []wire.Subagent
	for _, e := range g.r.Entries() {
		if a := fromEntry(e); a.Name != subagent.Bash || g.shell || !a.Usable() {
			out = append(out, a)
		}
	}
	return out
}

func fromEntry(e subagent.Entry) wire.Subagent {
	d := e.Definition
	return wire.Subagent{
		Name: d.Name, Source: string(d.Origin), Description: d.Description, Enabled: e.Enabled, ShadowedBy: string(e.ShadowedBy),
		DisplayName: e.DisplayName, SystemPrompt: d.SystemPrompt, Tools: d.Tools, DisallowedTools: d.DisallowedTools, Skills: d.Skills,
		Model: d.Model, Pool: string(d.Pool), MaxTurns: d.MaxTurns, TimeoutSeconds: d.TimeoutSeconds, Network: d.Network,
		Revision: e.Revision, Path: e.Path,
	}
}
