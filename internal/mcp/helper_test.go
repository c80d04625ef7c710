package mcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/tool"
)

const patience = 30 * time.Second

// modeVar makes this test binary a server.
const modeVar = "TEST_MCP_MODE"

func TestMain(m *testing.M) {
	switch mode := os.Getenv(modeVar); mode {
	case "":
		goleak.VerifyTestMain(m)
	case "sdk":
		if err := sdkServer().Run(context.Background(), &sdk.StdioTransport{}); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	default:
		rawServer(mode)
	}
}

// sdkServer is a real server with a few tools.
func sdkServer() *sdk.Server {
	s := sdk.NewServer(&sdk.Implementation{Name: "test"}, nil)
	text := func(s string) *sdk.CallToolResult {
		return &sdk.CallToolResult{Content: []sdk.Content{&sdk.TextContent{Text: s}}}
	}
	type args struct {
		Text string `json:"text,omitempty"`
	}
	add := func(name string, f func(ctx context.Context, a args) (*sdk.CallToolResult, error)) {
		sdk.AddTool(s, &sdk.Tool{Name: name, Description: "About " + name + "."}, func(ctx context.Context, _ *sdk.CallToolRequest, a args) (*sdk.CallToolResult, any, error) {
			r, err := f(ctx, a)
			return r, nil, err
		})
	}
	add("echo", func(_ context.Context, a args) (*sdk.CallToolResult, error) { return text("you said " + a.Text), nil })
	add("pid", func(context.Context, args) (*sdk.CallToolResult, error) { return text(fmt.Sprint(os.Getpid())), nil })
	add("env", func(context.Context, args) (*sdk.CallToolResult, error) {
		fmt.Fprintln(os.Stderr, "my environment is", os.Environ())
		return text(strings.Join(os.Environ(), "\n")), nil
	})
	add("fail", func(context.Context, args) (*sdk.CallToolResult, error) { return nil, fmt.Errorf("no such issue") })
	add("big", func(context.Context, args) (*sdk.CallToolResult, error) { return text(strings.Repeat("x", 1<<20)), nil })
	add("die", func(context.Context, args) (*sdk.CallToolResult, error) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	})
	add("hang", func(ctx context.Context, a args) (*sdk.CallToolResult, error) {
		_ = os.WriteFile(a.Text, []byte("begun"), 0o600)
		<-ctx.Done()
		_ = os.WriteFile(a.Text, []byte("cancelled"), 0o600)
		return nil, ctx.Err()
	})
	add("structured", func(context.Context, args) (*sdk.CallToolResult, error) {
		return &sdk.CallToolResult{Content: []sdk.Content{}, StructuredContent: map[string]any{"answer": 42}}, nil
	})
	return s
}

// rawServer speaks the protocol by hand, and lies in it.
func rawServer(mode string) {
	if mode == "stubborn" || mode == "deaf" {
		signal.Ignore(syscall.SIGTERM, syscall.SIGPIPE)
	}
	var mu sync.Mutex
	say := func(format string, a ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf(format+"\n", a...)
	}
	object := `{"type":"object"}`
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			if mode == "stubborn" || mode == "deaf" {
				select {} // an end of input means nothing to it
			}
			return
		}
		var req struct {
			ID     json.RawMessage `json:"id"`
			Method string          `json:"method"`
			Params struct {
				Name   string `json:"name"`
				Cursor string `json:"cursor"`
			} `json:"params"`
		}
		if json.Unmarshal(line, &req) != nil || req.ID == nil {
			continue
		}
		id := string(req.ID)
		answer := func(result string) {
			say(`{"jsonrpc":"2.0","id":%s,"result":%s}`, id, strings.NewReplacer("\n", " ", "\t", "").Replace(result))
		}
		switch req.Method {
		case "initialize":
			if mode == "mute" {
				continue
			}
			if mode == "garbage" {
				say("Server v1 ready!\n{\"level\":\"info\"}\n[1,2\n\n")
			}
			answer(`{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"raw","version":"1"}}`)
		case "tools/list":
			switch mode {
			case "badtools":
				answer(`{"tools":[
					{"name":"good","description":"fine","inputSchema":` + object + `},
					{"name":"typeless","inputSchema":{}},
					{"name":"list","inputSchema":{"type":"array"}},
					{"name":"none"},
					{"name":7,"inputSchema":` + object + `},
					{"name":"text","inputSchema":"object"},
					{"name":"deep","inputSchema":{"type":"object","properties":` + strings.Repeat(`{"a":`, 60) + `1` + strings.Repeat(`}`, 60) + `}},
					{"name":"fat","inputSchema":{"type":"object","description":"` + strings.Repeat("x", 70<<10) + `"}},
					{"name":"wrong","inputSchema":{"type":"object","properties":7}},
					{"name":"reading","inputSchema":{"type":"object","properties":{"a":{"$ref":"file:///etc/passwd"}}}},
					null,
					{"name":"a b","inputSchema":` + object + `},{"name":"a.b","inputSchema":` + object + `},
					{"name":"` + strings.Repeat("n", 100) + `","inputSchema":` + object + `}]}`)
			case "nulls":
				answer(`{"tools":[` + strings.Repeat("null,", 100000) + `{"name":"good","inputSchema":` + object + `}]}`)
			case "pages":
				answer(fmt.Sprintf(`{"tools":[{"name":"t%s","inputSchema":%s}],"nextCursor":"%s1"}`, req.Params.Cursor, object, req.Params.Cursor))
			case "swap":
				name := "old"
				if b, _ := os.ReadFile(os.Getenv("TEST_MCP_FILE")); len(b) > 0 {
					name = "new"
				}
				answer(`{"tools":[{"name":"` + name + `","inputSchema":` + object + `}]}`)
			default:
				answer(`{"tools":[{"name":"call","inputSchema":` + object + `},{"name":"odd","inputSchema":` + object + `},{"name":"deep","inputSchema":` + object + `},{"name":"huge","inputSchema":` + object + `},{"name":"stray","inputSchema":` + object + `}]}`)
				if mode == "deaf" {
					select {} // reads nothing from now on
				}
				for n := 0; mode == "asking"; n++ { // and asks without end
					say(`{"jsonrpc":"2.0","id":"p%d","method":"ping"}`, n)
				}
			}
		case "tools/call":
			switch req.Params.Name {
			case "odd":
				answer(`{"content":[{"type":"text","text":"one"},{"type":"hologram","data":"x"},null,{"type":"image","mimeType":"image/png","data":"` + strings.Repeat("AAAA", 500) + `"},
					{"type":"audio","mimeType":"audio/wav","data":"AAAA"},{"type":"resource_link","uri":"file:///x","name":"X"},{"type":"text","text":5},
					{"type":"resource","resource":{"uri":"mem:y","text":"inside"}}],"isError":"yes"}`)
			case "deep":
				answer(`{"content":[],"structuredContent":` + strings.Repeat("[", 20000) + strings.Repeat("]", 20000) + `}`)
			case "huge":
				answer(`{"content":[{"type":"text","text":"` + string(bytes.Repeat([]byte("y"), maxMessage)) + `"}]}`)
			case "stray":
				say(`{"jsonrpc":"2.0","id":424242,"result":{"content":[{"type":"text","text":"not yours"}]}}`)
			case "new":
				say(`{"jsonrpc":"2.0","id":%s,"error":{"code":-32602,"message":"unknown tool"}}`, id)
			default:
				if mode == "swap" {
					say(`{"jsonrpc":"2.0","id":%s,"error":{"code":-32602,"message":"unknown tool %s"}}`, id, req.Params.Name)
					continue
				}
				answer(`{"content":[{"type":"text","text":"fine"}]}`)
			}
		default:
			say(`{"jsonrpc":"2.0","id":%s,"error":{"code":-32601,"message":"no such method"}}`, id)
		}
	}
}

// logs is a log that a test reads.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// own is this test binary as a server.
func own(mode string, env map[string]config.Secret) config.MCPServer {
	s := config.MCPServer{Command: os.Args[0], Enabled: true, Env: map[string]config.Secret{modeVar: config.Secret(mode)}}
	for k, v := range env {
		s.Env[k] = v
	}
	return s
}

func manager(t *testing.T, servers map[string]config.MCPServer, change ...func(*Config)) (*Manager, *logs) {
	t.Helper()
	l := &logs{}
	cfg := Config{Servers: servers, Log: zerolog.New(l).Level(zerolog.DebugLevel), FirstPause: time.Millisecond, Grace: 50 * time.Millisecond, ConnectTimeout: patience, CallTimeout: patience}
	for _, f := range change {
		f(&cfg)
	}
	m := New(cfg)
	t.Cleanup(m.Close)
	return m, l
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	t.Cleanup(cancel)
	return ctx
}

func tools(t *testing.T, m *Manager) map[string]Tool {
	t.Helper()
	list, missing, err := m.Tools(within(t), nil)
	if err != nil || len(missing) > 0 {
		t.Fatalf("missing %v, error %v", missing, err)
	}
	out := map[string]Tool{}
	for _, x := range list {
		out[x.Spec().Name] = x
	}
	return out
}

func call(t *testing.T, x tool.Tool, args string) tool.Result {
	t.Helper()
	if x == nil {
		t.Fatal("there is no such tool")
	}
	res, err := x.Call(within(t), tool.Call{ID: "c", Args: json.RawMessage(args)})
	if err != nil {
		t.Fatal(err)
	}
	return res
}
