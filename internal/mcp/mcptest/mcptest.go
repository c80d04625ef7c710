// Package mcptest gives tests real MCP servers: an example of the official SDK as a
// program, and a server over HTTP in the test's own process.
package mcptest

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/herdgate/herdgate/internal/config"
)

// Example builds an example server of the SDK, as "hello", which has a tool "greet"
// with an argument "name", and returns how it is configured.
func Example(t testing.TB, name string) config.MCPServer {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", file, "github.com/modelcontextprotocol/go-sdk/examples/server/"+name).CombinedOutput()
	if err != nil {
		t.Fatalf("the example server %s cannot be built: %v\n%s", name, err, out)
	}
	return config.MCPServer{Command: file, Enabled: true}
}

// Tool is a tool of a server over HTTP that always says the same.
type Tool struct{ Name, Description, Says string }

// HTTP serves tools over streamable HTTP until the test ends, and returns how the
// server is configured.
func HTTP(t testing.TB, tools ...Tool) config.MCPServer {
	t.Helper()
	s := mcp.NewServer(&mcp.Implementation{Name: "test", Version: "1"}, nil)
	for _, x := range tools {
		mcp.AddTool(s, &mcp.Tool{Name: x.Name, Description: x.Description}, func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: x.Says}}}, nil, nil
		})
	}
	return serve(t, s)
}

// Hanging is a server over HTTP whose tool "hang" does not return until its call is
// cancelled; asked is closed when it was called.
func Hanging(t testing.TB) (server config.MCPServer, asked <-chan struct{}) {
	t.Helper()
	called := make(chan struct{})
	var once sync.Once
	s := mcp.NewServer(&mcp.Implementation{Name: "test", Version: "1"}, nil)
	mcp.AddTool(s, &mcp.Tool{Name: "hang"}, func(ctx context.Context, _ *mcp.CallToolRequest, _ struct{}) (*mcp.CallToolResult, any, error) {
		once.Do(func() { close(called) })
		<-ctx.Done()
		return nil, nil, ctx.Err()
	})
	return serve(t, s), called
}

func serve(t testing.TB, s *mcp.Server) config.MCPServer {
	t.Helper()
	web := httptest.NewServer(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return s }, nil))
	t.Cleanup(func() {
		for session := range s.Sessions() {
			_ = session.Close() // its client may be gone
		}
		web.CloseClientConnections()
		web.Close()
	})
	return config.MCPServer{URL: config.Address(web.URL), Enabled: true}
}
