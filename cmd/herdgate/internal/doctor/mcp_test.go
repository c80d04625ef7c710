package doctor

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/mcp/mcptest"
	"github.com/herdgate/herdgate/internal/process"
)

// Each MCP server is tried, and what is wrong with one is told without its secrets.
func TestMCPServers(t *testing.T) {
	t.Parallel()
	hello := mcptest.Example(t, "hello")
	secret := hello
	secret.Env = map[string]config.Secret{"KEY": "$HERDGATE_TEST_NOT_SET"}
	d := &doctor{Patient: Patient{Timeout: 30 * time.Second, Getenv: os.Getenv, Env: &process.Env{Config: config.Config{MCP: config.MCP{Servers: map[string]config.MCPServer{
		"good": hello, "none": {Command: "/does/not/exist", Enabled: true}, "off": {Command: "x"}, "unset": secret,
		"web": {URL: "http://127.0.0.1:1/?key=hush-hush", Enabled: true, Headers: map[string]config.Secret{"Authorization": "Bearer hush-hush"}},
	}}}}}}
	d.mcp(t.Context())
	var lines []string
	for _, c := range d.checks {
		lines = append(lines, fmt.Sprintf("%s %s: %s", c.Status, c.Name, c.Detail))
	}
	all := strings.Join(lines, "\n")
	for _, want := range []string{
		"ok mcp server good: 1 tools", "warn mcp server none: the command cannot be started", "ok mcp server off: not used",
		"warn mcp server unset: env.KEY: environment variable HERDGATE_TEST_NOT_SET is not set", "warn mcp server web: ", "connection refused",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is missing in\n%s", want, all)
		}
	}
	if strings.Contains(all, "hush") {
		t.Errorf("a secret is told:\n%s", all)
	}
}
