package mcp

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/tool"
)

// Limits of time.
const (
	defaultConnectTimeout = 30 * time.Second
	defaultListTimeout    = 10 * time.Second
	defaultCallTimeout    = 120 * time.Second
	defaultGrace          = 2 * time.Second
	firstPause            = time.Second
	lastPause             = time.Minute
)

// Config is what a Manager is made of. Only Servers must be set.
type Config struct {
	// Servers by name; those that are not enabled are passed over.
	Servers map[string]config.MCPServer
	// OutputMaxChars bounds the text of a result; default 20000.
	OutputMaxChars int
	// ConnectTimeout bounds the start of a server, up to its list of tools; default
	// 30 s. CallTimeout bounds a call, default 120 s.
	ConnectTimeout, CallTimeout time.Duration
	// Grace is how long a process has between the end of its input and its own;
	// default 2 s.
	Grace time.Duration
	// FirstPause and LastPause bound the pauses between attempts to reach a server
	// that fails; default 1 s to 60 s.
	FirstPause, LastPause time.Duration
	// Lookup finds environment variables; nil is os.LookupEnv.
	Lookup func(string) (string, bool)
	Log    zerolog.Logger
}

// Manager has the MCP servers of one service. It is safe for concurrent use.
type Manager struct {
	cfg     Config
	servers []*server // by name

	ctx  context.Context //nolint:containedctx // the servers' lifetime
	stop context.CancelFunc
	wg   sync.WaitGroup
}

// New returns a Manager. It starts and asks nothing yet.
func New(cfg Config) *Manager {
	if cfg.OutputMaxChars <= 0 {
		cfg.OutputMaxChars = 20000
	}
	cfg.ConnectTimeout = cmp.Or(cfg.ConnectTimeout, defaultConnectTimeout)
	cfg.CallTimeout = cmp.Or(cfg.CallTimeout, defaultCallTimeout)
	cfg.Grace = cmp.Or(cfg.Grace, defaultGrace)
	cfg.FirstPause = cmp.Or(cfg.FirstPause, firstPause)
	cfg.LastPause = cmp.Or(cfg.LastPause, lastPause)
	if cfg.Lookup == nil {
		cfg.Lookup = os.LookupEnv
	}
	m := &Manager{cfg: cfg}
	m.ctx, m.stop = context.WithCancel(context.Background())
	for _, name := range slices.Sorted(maps.Keys(cfg.Servers)) {
		if cfg.Servers[name].Enabled {
			m.servers = append(m.servers, newServer(m, name, cfg.Servers[name]))
		}
	}
	return m
}

// Close ends the servers and waits until they have ended.
func (m *Manager) Close() {
	if m == nil {
		return
	}
	var wg sync.WaitGroup
	for _, s := range m.servers {
		wg.Go(s.close)
	}
	wg.Wait()
	m.stop()
	m.wg.Wait()
}

// Tool is a tool of an MCP server.
type Tool interface {
	tool.Tool
	// Server is the name of its server.
	Server() string
	// Routing hints when it fits; nil if nothing does.
	Routing() *config.Routing
}

// Missing is a server whose tools cannot be offered.
type Missing struct{ Server, Reason string }

// Tools returns the tools of all servers, in the order of their names, and the servers
// whose tools are not known because they cannot be reached. Those of a server that was
// reached before are offered all the same: a call tries it again. Tools waits for
// servers that are being started, at most until ctx is done. Where wanted is not nil,
// servers that it does not want are left alone.
func (m *Manager) Tools(ctx context.Context, wanted func(server string) bool) ([]Tool, []Missing, error) {
	if m == nil || len(m.servers) == 0 {
		return nil, nil, nil
	}
	lists := make([][]Tool, len(m.servers))
	reasons := make([]error, len(m.servers))
	var wg sync.WaitGroup
	for i, s := range m.servers {
		if wanted == nil || wanted(s.name) {
			wg.Go(func() { lists[i], reasons[i] = s.list(ctx) })
		}
	}
	wg.Wait()
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	var missing []Missing
	for i, err := range reasons {
		if err != nil {
			missing = append(missing, Missing{Server: m.servers[i].name, Reason: err.Error()})
		}
	}
	all := slices.Concat(lists...)
	slices.SortFunc(all, func(a, b Tool) int { return strings.Compare(a.Spec().Name, b.Spec().Name) })
	return all, missing, nil
}

// Wanted says whose tools pass lists of tools, of which nil passes all: servers that no
// list names need not even be running.
func Wanted(lists ...[]string) func(server string) bool {
	return func(server string) bool {
		for _, list := range lists {
			if list != nil && !slices.ContainsFunc(list, func(name string) bool { return ServerOf(name) == server && Remote(name) }) {
				return false
			}
		}
		return true
	}
}

// Enabled reports whether there is any server.
func (m *Manager) Enabled() bool { return m != nil && len(m.servers) > 0 }

// Probe starts or reaches one server, counts its tools and leaves it. Warnings are
// about tools that cannot be offered.
func Probe(ctx context.Context, name string, cfg config.MCPServer, lookup func(string) (string, bool)) (tools int, warnings []string, err error) {
	cfg.Enabled = true
	m := New(Config{Servers: map[string]config.MCPServer{name: cfg}, Lookup: lookup, Log: zerolog.Nop()})
	defer m.Close()
	list, missing, err := m.Tools(ctx, nil)
	switch {
	case err != nil:
		return 0, nil, fmt.Errorf("it does not answer in time: %w", err)
	case len(missing) > 0:
		return 0, nil, fmt.Errorf("%s", missing[0].Reason)
	}
	s := m.servers[0]
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(list), slices.Sorted(maps.Keys(s.told)), nil
}
