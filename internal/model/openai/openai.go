// Package openai asks models through the chat completions protocol, which many
// servers speak: the vendor itself, gateways, and local servers under a base URL
// of their own.
//
// Servers differ and misbehave. What this package holds on to: an answer is
// whole or it is an error, never an empty or half success; calls that stream in
// are never glued together; ids are unique; text is valid UTF-8; silence ends; a
// key is in no error and no log.
package openai

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"strings"
	"time"

	sdk "github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/openai/openai-go/v3/shared"

	"github.com/herdgate/herdgate/internal/model"
)

// Limits and defaults.
const (
	DefaultBaseURL        = "https://api.openai.com/v1/"
	DefaultRequestTimeout = 600 * time.Second
	DefaultIdleTimeout    = 60 * time.Second

	maxAnswerBytes = 64 << 20 // of one response body
	maxTextBytes   = 8 << 20  // of text and arguments together
	maxCalls       = 256
)

var (
	errIdle    = errors.New("no data within the idle timeout")
	errRequest = errors.New("not finished within the request timeout")
)

// Config describes one model.
type Config struct {
	// Name is the configured name, Model the server's name for it.
	Name, Model string
	// BaseURL is the server's address with its version; empty is DefaultBaseURL.
	BaseURL string
	// Key gives the API key; it is asked at every request and may give "", which
	// local servers allow. Nil is "".
	Key func() string
	// RequestTimeout bounds one request as a whole, IdleTimeout the time without
	// data in it, comments not counted. Zero takes the defaults.
	RequestTimeout, IdleTimeout time.Duration
}

// Model asks one model of one server.
type Model struct {
	cfg    Config
	client sdk.Client
	http   *http.Client
}

var _ model.Model = (*Model)(nil)

// New returns a model. It connects to nothing yet.
func New(cfg Config) (*Model, error) {
	if cfg.Model == "" {
		return nil, fmt.Errorf("model %q: model is empty; want the provider's name of it", cfg.Name)
	}
	if cfg.BaseURL == "" {
		cfg.BaseURL = DefaultBaseURL
	}
	if !strings.HasPrefix(cfg.BaseURL, "http://") && !strings.HasPrefix(cfg.BaseURL, "https://") {
		return nil, fmt.Errorf("model %q: base_url does not begin with http:// or https://", cfg.Name)
	}
	if cfg.RequestTimeout <= 0 {
		cfg.RequestTimeout = DefaultRequestTimeout
	}
	if cfg.IdleTimeout <= 0 {
		cfg.IdleTimeout = DefaultIdleTimeout
	}
	if cfg.Key == nil {
		cfg.Key = func() string { return "" }
	}
	transport := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		ForceAttemptHTTP2:     true,
		MaxIdleConns:          64,
		MaxIdleConnsPerHost:   64,
		IdleConnTimeout:       60 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ExpectContinueTimeout: time.Second,
	}
	m := &Model{cfg: cfg, http: &http.Client{Transport: transport}}
	// The SDK's own constructor reads keys and addresses from the environment,
	// which must not reach another server than the one that is configured.
	m.client = sdk.Client{Options: []option.RequestOption{
		option.WithBaseURL(cfg.BaseURL),
		option.WithHTTPClient(m.http),
		option.WithMaxRetries(0), // package retry does it, visibly
	}}
	return m, nil
}

// Name implements model.Model.
func (m *Model) Name() string { return m.cfg.Name }

// ModelName implements model.Model.
func (m *Model) ModelName() string { return m.cfg.Model }

// CloseIdleConnections lets go of connections that no request uses.
func (m *Model) CloseIdleConnections() { m.http.CloseIdleConnections() }

// Generate implements model.Model. It does not retry.
func (m *Model) Generate(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	if onDelta == nil {
		onDelta = func(model.Delta) {}
	}
	if ctx.Err() != nil {
		return model.Response{}, context.Cause(ctx)
	}
	params, err := buildParams(m.cfg.Model, req)
	if err != nil {
		return model.Response{}, &model.Error{Kind: model.KindPermanent, Code: "invalid_request", Message: err.Error(), Err: err}
	}
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	deadline := time.AfterFunc(m.cfg.RequestTimeout, func() { cancel(errRequest) })
	defer deadline.Stop()
	idle := time.AfterFunc(m.cfg.IdleTimeout, func() { cancel(errIdle) })
	defer idle.Stop()

	res, err := m.ask(inner, params, req, onDelta, func() {
		idle.Reset(m.cfg.IdleTimeout)
		onDelta(model.Delta{}) // reasoning and arguments show nothing, but are life
	})
	if err == nil {
		return res, nil
	}
	if ctx.Err() != nil {
		return model.Response{}, context.Cause(ctx)
	}
	if cause := context.Cause(inner); cause != nil {
		return model.Response{}, m.timeout(cause)
	}
	return model.Response{}, m.explain(err)
}

func (m *Model) ask(ctx context.Context, params sdk.ChatCompletionNewParams, req model.Request, onDelta func(model.Delta), alive func()) (model.Response, error) {
	opts := []option.RequestOption{option.WithJSONSet("stream", true), option.WithHeader("Accept", "text/event-stream")}
	if key := m.cfg.Key(); key != "" {
		opts = append(opts, option.WithAPIKey(key))
	}
	var raw *http.Response
	if err := m.client.Execute(ctx, http.MethodPost, "chat/completions", params, &raw, opts...); err != nil {
		return model.Response{}, err
	}
	body := raw.Body
	defer body.Close()
	alive()
	limited := &boundedBody{r: body, left: maxAnswerBytes}
	a := newAssembly(req, onDelta)
	var err error
	if media, _, _ := mime.ParseMediaType(raw.Header.Get("Content-Type")); media == "application/json" {
		err = a.whole(limited) // the server does not stream
	} else {
		// Some servers forget the empty line after the last event.
		raw.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(limited, strings.NewReader("\n\n")), body}
		raw.Header.Set("Content-Type", "text/event-stream")
		err = a.stream(ssestream.NewDecoder(raw), alive)
	}
	if err != nil {
		return model.Response{}, err
	}
	return a.response(m.cfg.Model)
}

// boundedBody ends a body that never ends by itself.
type boundedBody struct {
	r    io.Reader
	left int
}

var errTooLong = errors.New("the answer is larger than 64 MiB")

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errTooLong
	}
	n, err := b.r.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// buildParams writes the request in the protocol's form. Whatever is in the
// conversation, a strict server must be able to accept it (F-102, F-104, F-108).
func buildParams(name string, req model.Request) (sdk.ChatCompletionNewParams, error) {
	p := sdk.ChatCompletionNewParams{
		Model:         name,
		StreamOptions: sdk.ChatCompletionStreamOptionsParam{IncludeUsage: param.NewOpt(true)},
	}
	for _, msg := range req.Messages {
		text := clean(msg.Text)
		switch msg.Role {
		case model.RoleSystem:
			p.Messages = append(p.Messages, sdk.SystemMessage(text))
		case model.RoleUser:
			p.Messages = append(p.Messages, sdk.UserMessage(text))
		case model.RoleTool:
			p.Messages = append(p.Messages, sdk.ToolMessage(text, msg.ToolCallID))
		case model.RoleAssistant:
			// Content is always a string: null is refused by some servers.
			am := sdk.ChatCompletionAssistantMessageParam{}
			am.Content.OfString = param.NewOpt(text)
			for _, c := range msg.ToolCalls {
				am.ToolCalls = append(am.ToolCalls, sdk.ChatCompletionMessageToolCallUnionParam{
					OfFunction: &sdk.ChatCompletionMessageFunctionToolCallParam{
						ID:       c.ID,
						Function: sdk.ChatCompletionMessageFunctionToolCallFunctionParam{Name: replayName(c.Name), Arguments: replayArgs(c.Args)},
					},
				})
			}
			p.Messages = append(p.Messages, sdk.ChatCompletionMessageParamUnion{OfAssistant: &am})
		default:
			return p, fmt.Errorf("message with role %q; want system, user, assistant or tool", msg.Role)
		}
	}
	for _, t := range req.Tools {
		schema := shared.FunctionParameters{"type": "object", "properties": map[string]any{}}
		if len(t.Parameters) > 0 {
			schema = nil
			if err := json.Unmarshal(t.Parameters, &schema); err != nil {
				return p, fmt.Errorf("tool %q: parameters: %w", t.Name, err)
			}
		}
		p.Tools = append(p.Tools, sdk.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
			Name: t.Name, Description: param.NewOpt(t.Description), Parameters: schema,
		}))
	}
	return p, nil
}

// replayArgs gives arguments that a server can parse: broken ones are quoted
// shortly inside an object instead of being sent as they are.
func replayArgs(args string) string {
	if isObject(args) {
		return clean(args)
	}
	if strings.TrimSpace(args) == "" {
		return "{}"
	}
	quote := []rune(clean(args))
	if len(quote) > 200 {
		quote = append(quote[:200], '…')
	}
	b, _ := json.Marshal(map[string]string{"invalid_arguments": string(quote)}) // a map of strings cannot fail
	return string(b)
}

// replayName gives a name that a server accepts.
func replayName(name string) string {
	out := strings.Map(func(r rune) rune {
		if r == '_' || r == '-' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return r
		}
		return '_'
	}, name)
	if out == "" {
		return "unnamed_tool"
	}
	return out[:min(len(out), 64)]
}

func isObject(s string) bool {
	return strings.HasPrefix(strings.TrimLeft(s, " \t\r\n"), "{") && json.Valid([]byte(s))
}

func clean(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
