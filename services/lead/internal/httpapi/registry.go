package httpapi

import (
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
)

// FromRegistry shows a registry to the interface. Without shellAllowed the
// types that need the host's shell do not exist for callers.
func FromRegistry(r *subagent.Registry, shellAllowed bool) Subagents {
	return registry{r: r, shell: shellAllowed}
}

type registry struct {
	r     *subagent.Registry
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
	for _, d := range g.r.Visible(nil, g.shell) {
		out = append(out, wire.Subagent{Name: d.Name, Source: string(d.Origin), Description: d.Description, Enabled: true})
	}
	return out
}
