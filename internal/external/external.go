// Package external makes of the tools of MCP servers what one execution is offered: the
// tools, those on demand, and what the agent is told of them. Leads and executors do it
// in the same way.
package external

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/deferral"
	"github.com/herdgate/herdgate/internal/mcp"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/tool"
)

// Offer is what one execution has of external tools. The zero value and nil have none.
type Offer struct {
	missing  []prompt.Unavailable
	hints    []prompt.Hint
	deferred *deferral.Session
}

// Open asks the servers for their tools. pass narrows all of an execution's tools, its
// own and the external ones, to those that it may have, and it is that which the
// catalogue of tools on demand is made of (DEFER-02). The tools that are returned are
// all that can be called.
func Open(ctx context.Context, m *mcp.Manager, cfg config.ToolSearch, own []tool.Tool, wanted func(server string) bool, pass func([]tool.Tool) []tool.Tool) (*Offer, []tool.Tool, error) {
	list, missing, err := m.Tools(ctx, wanted)
	if err != nil {
		return nil, nil, err
	}
	all := slices.Clone(own)
	byName := make(map[string]mcp.Tool, len(list))
	for _, t := range list {
		all = append(all, t)
		byName[t.Spec().Name] = t
	}
	if pass != nil {
		all = pass(all)
	}
	o := &Offer{}
	for _, x := range missing {
		o.missing = append(o.missing, prompt.Unavailable(x))
	}
	var left []mcp.Tool
	for _, t := range all {
		if x, ok := byName[t.Spec().Name]; ok {
			left = append(left, x)
		}
	}
	o.hints = hints(left)
	if !cfg.Enabled || len(left) == 0 { // DEFER-01
		return o, all, nil
	}
	entries := make([]deferral.Entry, len(left))
	for i, t := range left {
		entries[i] = deferral.Entry{Spec: t.Spec()}
		if r := t.Routing(); prefers(r) {
			entries[i].Prefer, entries[i].Priority, entries[i].Keywords = true, r.Priority, r.Keywords
		}
	}
	o.deferred = deferral.New(deferral.NewCatalogue(entries), cfg.AutoPromoteTopK)
	return o, append(all, o.deferred.Tool()), nil
}

func prefers(r *config.Routing) bool { return r != nil && r.Mode == "prefer" && len(r.Keywords) > 0 }

// hints are those of the servers that have a tool here, by priority and name.
func hints(tools []mcp.Tool) []prompt.Hint {
	type hint struct {
		prompt.Hint
		priority int
	}
	var all []hint
	for _, t := range tools {
		if r := t.Routing(); prefers(r) && !slices.ContainsFunc(all, func(h hint) bool { return h.Server == t.Server() }) {
			all = append(all, hint{prompt.Hint{Server: t.Server(), Keywords: r.Keywords}, r.Priority})
		}
	}
	slices.SortFunc(all, func(a, b hint) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority), strings.Compare(a.Server, b.Server))
	})
	var out []prompt.Hint
	for _, h := range all {
		out = append(out, h.Hint)
	}
	return out
}

// Section is what the agent is told of tools on demand and of servers that are away.
func (o *Offer) Section() string {
	if o == nil {
		return ""
	}
	var parts []string
	if o.deferred != nil {
		parts = append(parts, o.deferred.Section())
	}
	if s := prompt.Missing(o.missing); s != "" {
		parts = append(parts, s)
	}
	return strings.Join(parts, "\n\n")
}

// Routing is what the agent is told of what the servers are for.
func (o *Offer) Routing() string {
	if o == nil {
		return ""
	}
	return prompt.Routing(o.hints)
}

// Pieces are the parts of the chain; none where nothing is deferred.
func (o *Offer) Pieces() []agent.Piece {
	if o == nil || o.deferred == nil {
		return nil
	}
	return o.deferred.Pieces()
}

// Replay takes up the state of a conversation; see [deferral.Session.Replay].
func (o *Offer) Replay(kept deferral.State, messages []model.Message, text string) {
	if o != nil && o.deferred != nil {
		o.deferred.Replay(kept, messages, text)
	}
}
