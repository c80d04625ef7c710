package doctor

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/herdgate/herdgate/internal/mcp"
)

// mcp starts or reaches each MCP server, as leads and executors do.
func (d *doctor) mcp(ctx context.Context) {
	servers := d.Env.Config.MCP.Servers
	type found struct {
		tools    int
		warnings []string
		err      error
	}
	names := slices.Sorted(maps.Keys(servers))
	seen := make([]found, len(names))
	ctx, cancel := context.WithTimeout(ctx, 4*d.Timeout) // some load their program first
	defer cancel()
	var wg sync.WaitGroup
	for i, name := range names {
		if servers[name].Enabled {
			wg.Go(func() { seen[i].tools, seen[i].warnings, seen[i].err = mcp.Probe(ctx, name, servers[name], d.lookup) })
		}
	}
	wg.Wait()
	for i, name := range names {
		check, f := "mcp server "+name, seen[i]
		switch {
		case !servers[name].Enabled:
			d.say(OK, check, "not used: enabled is false", "")
		case f.err != nil:
			d.say(Warn, check, f.err.Error()+"; agents go on without its tools",
				"correct mcp.servers."+name+", or start it; leads and executors on other machines must reach it as well")
		case len(f.warnings) > 0:
			d.say(Warn, check, fmt.Sprintf("%d tools; %s", f.tools, strings.Join(f.warnings[:min(len(f.warnings), 10)], "; ")), "its maker has to correct these; the others can be used")
		default:
			d.say(OK, check, fmt.Sprintf("%d tools", f.tools), "")
		}
	}
}

// lookup is os.LookupEnv, or as much of it as a test's own function tells.
func (d *doctor) lookup(name string) (string, bool) {
	if _, ok := os.LookupEnv(name); ok {
		return d.Getenv(name), true
	}
	v := d.Getenv(name)
	return v, v != ""
}
