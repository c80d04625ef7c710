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
	"fmt"
	"net/http"

	sdk "github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/openai/openai-go/v3/shared"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/provider"
)

// DefaultBaseURL is the vendor's own address.
const DefaultBaseURL = "https://api.openai.com/v1/"

// Config describes one model. Its base URL holds the version.
type Config = provider.Config

// Model asks one model of one server.
type Model struct {
	cfg    Config
	source string
	client sdk.Client
	http   *http.Client
}

var _ model.Model = (*Model)(nil)

// New returns a model. It connects to nothing yet.
func New(cfg Config) (*Model, error) {
	cfg, err := cfg.Checked(DefaultBaseURL)
	if err != nil {
		return nil, err
	}
	m := &Model{cfg: cfg, source: cfg.Source("openai"), http: provider.NewHTTPClient()}
	// The SDK's own constructor reads keys and addresses from the environment,
	// which must not reach another server than the one that is configured.
	m.client = sdk.Client{Options: []option.RequestOption{
		option.WithBaseURL(cfg.BaseURL),
		option.WithHTTPClient(m.http),
		option.WithMaxRetries(0), // package retry does it, visibly
		option.WithMiddleware(provider.Refusals),
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
	params, err := buildParams(m.cfg, m.source, req)
	if err != nil {
		return model.Response{}, provider.Invalid(err)
	}
	return m.cfg.Call(ctx, onDelta, func(ctx context.Context, alive func()) (model.Response, error) {
		return m.ask(ctx, params, req, onDelta, alive)
	})
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
	alive()
	a := newAssembly(req, m.source, onDelta)
	err := provider.Read(raw, alive, a.whole, func(raw *http.Response) error { return a.stream(ssestream.NewDecoder(raw), alive) })
	if err != nil {
		return model.Response{}, err
	}
	return a.response(m.cfg.Model)
}

// buildParams writes the request in the protocol's form. Whatever is in the
// conversation, a strict server must be able to accept it (F-102, F-104, F-108).
func buildParams(cfg Config, source string, req model.Request) (sdk.ChatCompletionNewParams, error) {
	p := sdk.ChatCompletionNewParams{
		Model:         cfg.Model,
		StreamOptions: sdk.ChatCompletionStreamOptionsParam{IncludeUsage: param.NewOpt(true)},
	}
	if cfg.MaxOutputTokens > 0 {
		p.MaxCompletionTokens = param.NewOpt(int64(cfg.MaxOutputTokens))
	}
	asked := 0 // where the newest question stands
	for i, msg := range req.Messages {
		if msg.Role == model.RoleUser {
			asked = i
		}
	}
	for i, msg := range req.Messages {
		text := provider.Clean(msg.Text)
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
			// Reasoning belongs to the calls of the present question; servers that
			// want it refuse or ignore that of earlier ones.
			if blocks := msg.Native.From(source); len(blocks) == 1 && i > asked && len(msg.ToolCalls) > 0 {
				var r reasoning
				if json.Unmarshal(blocks[0], &r) == nil && r.Content != "" {
					am.SetExtraFields(map[string]any{"reasoning_content": r.Content})
				}
			}
			for _, c := range msg.ToolCalls {
				am.ToolCalls = append(am.ToolCalls, sdk.ChatCompletionMessageToolCallUnionParam{
					OfFunction: &sdk.ChatCompletionMessageFunctionToolCallParam{
						ID:       c.ID,
						Function: sdk.ChatCompletionMessageFunctionToolCallFunctionParam{Name: provider.ReplayName(c.Name), Arguments: provider.ReplayArgs(c.Args)},
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
