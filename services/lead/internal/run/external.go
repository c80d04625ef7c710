package run

import (
	"context"
	"fmt"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/deferral"
	"github.com/herdgate/herdgate/internal/external"
	"github.com/herdgate/herdgate/internal/guard"
	"github.com/herdgate/herdgate/internal/mcp"
	"github.com/herdgate/herdgate/internal/tool"
)

// openExternal adds the tools of MCP servers to the lead's own.
func (d *drive) openExternal(ctx context.Context, own []tool.Tool) ([]tool.Tool, error) {
	var tools []tool.Tool
	var err error
	d.external, tools, err = external.Open(ctx, d.e.deps.MCP, d.toolSearch(), own, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("external tools: %w", err)
	}
	return tools, nil
}

func (d *drive) toolSearch() config.ToolSearch {
	if s := d.e.cfg.Settings; s != nil {
		return s.ToolSearch
	}
	return config.ToolSearch{}
}

// externalPieces are the parts of the chain that external tools need.
func (d *drive) externalPieces() []agent.Piece {
	return append([]agent.Piece{guard.RemoteResults()}, d.external.Pieces()...)
}

// deferredAsMeant refuses a run whose external tools would be bound although they are
// to be found on demand (DEFER-08).
func (d *drive) deferredAsMeant(cfg agent.Config) error {
	return deferral.Check(d.toolSearch().Enabled, cfg.Tools, mcp.Remote, cfg.Chain)
}
