// Package anthropic asks models through the messages protocol. It holds on to the
// same as its neighbour openai: an answer is whole or it is an error, calls are
// never glued together, ids are unique, text is valid UTF-8, silence ends, and a
// key is in no error and no log.
//
// What the protocol wants and others do not is made here: the system prompt apart,
// results as blocks of a user's message, turns that alternate, no blank texts, and
// reasoning given back as it came.
package anthropic

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"

	sdk "github.com/anthropics/anthropic-sdk-go/v2"
	"github.com/anthropics/anthropic-sdk-go/v2/option"
	"github.com/anthropics/anthropic-sdk-go/v2/packages/param"
	"github.com/anthropics/anthropic-sdk-go/v2/packages/ssestream"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/provider"
)

const (
	// DefaultBaseURL is the vendor's own address.
	DefaultBaseURL = "https://api.anthropic.com/"
	// DefaultMaxOutputTokens is the bound of an answer; the protocol demands one.
	DefaultMaxOutputTokens = 16_384
)

// Config describes one model. Its base URL may end with /v1 or not.
type Config = provider.Config

// Model asks one model of one server.
type Model struct {
	cfg    Config
	source string
	client sdk.Client
	http   *http.Client
	// thinks is set once the server has said that this model cannot be asked not to.
	thinks atomic.Bool
}

var _ model.Model = (*Model)(nil)

// New returns a model. It connects to nothing yet.
func New(cfg Config) (*Model, error) {
	cfg, err := cfg.Checked(DefaultBaseURL)
	if err != nil {
		return nil, err
	}
	if cfg.MaxOutputTokens <= 0 {
		cfg.MaxOutputTokens = DefaultMaxOutputTokens
	}
	m := &Model{cfg: cfg, source: cfg.Source("anthropic"), http: provider.NewHTTPClient()}
	// The SDK's own constructor reads keys, profiles and addresses from the
	// environment, which must not reach another server than the one configured.
	m.client = sdk.Client{Options: []option.RequestOption{
		option.WithBaseURL(strings.TrimSuffix(strings.TrimRight(cfg.BaseURL, "/"), "/v1") + "/"),
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
	params, err := m.params(req)
	if err != nil {
		return model.Response{}, provider.Invalid(err)
	}
	generate := func() (model.Response, error) {
		return m.cfg.Call(ctx, onDelta, func(ctx context.Context, alive func()) (model.Response, error) {
			return m.ask(ctx, params, req, onDelta, alive)
		})
	}
	// Thinking is off (EXEC-07), as far as the model can do without.
	quiet := !m.thinks.Load()
	if quiet {
		off := sdk.NewThinkingConfigDisabledParam()
		params.Thinking = sdk.ThinkingConfigParamUnion{OfDisabled: &off}
	}
	res, err := generate()
	var refused *model.Error
	if quiet && errors.As(err, &refused) && refused.Code == "http_400" && strings.Contains(refused.Message, "thinking") && strings.Contains(refused.Message, "disabled") {
		m.thinks.Store(true)
		trace.SpanFromContext(ctx).AddEvent("model.thinking_always_on")
		params.Thinking = sdk.ThinkingConfigParamUnion{}
		return generate()
	}
	return res, err
}

func (m *Model) ask(ctx context.Context, params sdk.MessageNewParams, req model.Request, onDelta func(model.Delta), alive func()) (model.Response, error) {
	opts := []option.RequestOption{option.WithJSONSet("stream", true), option.WithHeader("Accept", "text/event-stream")}
	if key := m.cfg.Key(); key != "" {
		opts = append(opts, option.WithAPIKey(key))
	}
	var raw *http.Response
	// Not the SDK's own streaming call: that one would put spans of its own into
	// our traces and send trace headers to the provider.
	if err := m.client.Execute(ctx, http.MethodPost, "v1/messages", params, &raw, opts...); err != nil {
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

// What stands where the protocol wants words and the conversation has none.
const (
	noText = "(no text)"
	goOn   = "Go on."
)

// params writes the request in the protocol's form. Whatever is in the
// conversation, a strict server must be able to accept it.
func (m *Model) params(req model.Request) (sdk.MessageNewParams, error) {
	p := sdk.MessageNewParams{Model: m.cfg.Model, MaxTokens: int64(m.cfg.MaxOutputTokens)}
	var t turns
	for _, msg := range req.Messages {
		text := provider.Clean(msg.Text)
		blank := strings.TrimSpace(text) == ""
		switch msg.Role {
		case model.RoleSystem:
			if !blank {
				p.System = append(p.System, sdk.TextBlockParam{Text: text})
			}
		case model.RoleUser:
			if blank {
				text = noText
			}
			t.user(sdk.NewTextBlock(text))
		case model.RoleTool:
			result := sdk.ToolResultBlockParam{ToolUseID: callID(msg.ToolCallID)}
			if !blank {
				result.Content = []sdk.ToolResultBlockParamContentUnion{{OfText: &sdk.TextBlockParam{Text: text}}}
			}
			if msg.IsError {
				result.IsError = param.NewOpt(true)
			}
			t.user(sdk.ContentBlockParamUnion{OfToolResult: &result})
		case model.RoleAssistant:
			t.assistant(m.blocks(msg)...)
		default:
			return p, fmt.Errorf("message with role %q; want system, user, assistant or tool", msg.Role)
		}
	}
	// The first word is the user's, and so is the last: a conversation that ends
	// with the model's words would be taken as the beginning of its answer.
	if n := len(t.list); n == 0 || t.list[n-1].OfAssistant != nil {
		t.user(sdk.NewTextBlock(goOn))
	}
	if t.list[0].OfAssistant != nil {
		t.list = append([]sdk.MessageParam{sdk.NewUserMessage(sdk.NewTextBlock(noText))}, t.list...)
	}
	p.Messages = t.list
	for _, spec := range req.Tools {
		schema, err := inputSchema(spec)
		if err != nil {
			return p, err
		}
		tool := sdk.ToolParam{Name: spec.Name, InputSchema: schema}
		if spec.Description != "" {
			tool.Description = param.NewOpt(spec.Description)
		}
		p.Tools = append(p.Tools, sdk.ToolUnionParam{OfTool: &tool})
	}
	return p, nil
}

func inputSchema(spec model.ToolSpec) (sdk.ToolInputSchemaParam, error) {
	schema := sdk.ToolInputSchemaParam{Properties: map[string]any{}}
	if len(spec.Parameters) == 0 {
		return schema, nil
	}
	var fields map[string]any
	if err := json.Unmarshal(spec.Parameters, &fields); err != nil {
		return schema, fmt.Errorf("tool %q: parameters: %w", spec.Name, err)
	}
	delete(fields, "type") // the protocol's own is always object
	schema.Properties, schema.ExtraFields = nil, fields
	return schema, nil
}

// turns are messages of roles that alternate.
type turns struct{ list []sdk.MessageParam }

func (t *turns) user(blocks ...sdk.ContentBlockParamUnion) {
	if n := len(t.list); n > 0 && t.list[n-1].OfUser != nil {
		t.list[n-1].OfUser.Content = append(t.list[n-1].OfUser.Content, blocks...)
		return
	}
	t.list = append(t.list, sdk.NewUserMessage(blocks...))
}

func (t *turns) assistant(blocks ...sdk.ContentBlockParamUnion) {
	switch n := len(t.list); {
	case len(blocks) == 0: // an empty answer says nothing
	case n > 0 && t.list[n-1].OfAssistant != nil:
		t.list[n-1].OfAssistant.Content = append(t.list[n-1].OfAssistant.Content, blocks...)
	default:
		t.list = append(t.list, sdk.NewAssistantMessage(blocks...))
	}
}

// blocks gives an assistant message in the protocol's form, with the reasoning of
// this very model where it stood. Text and calls are those of the message, which
// others may have changed since; then reasoning comes first.
func (m *Model) blocks(msg model.Message) []sdk.ContentBlockParamUnion {
	var out []sdk.ContentBlockParamUnion
	text := func(s string) {
		if s = provider.Clean(s); strings.TrimSpace(s) != "" {
			out = append(out, sdk.NewTextBlock(s))
		}
	}
	call := func(c model.ToolCall) {
		out = append(out, sdk.ContentBlockParamUnion{OfToolUse: &sdk.ToolUseBlockParam{
			ID: callID(c.ID), Name: provider.ReplayName(c.Name), Input: json.RawMessage(provider.ReplayArgs(c.Args)),
		}})
	}
	native, same := readNative(msg.Native.From(m.source)), false
	if len(native) > 0 {
		words, calls := "", 0
		for _, b := range native {
			switch b.Type {
			case "text":
				words += b.Text
			case "tool_use":
				calls++
			}
		}
		same = provider.Clean(words) == provider.Clean(msg.Text) && calls == len(msg.ToolCalls)
	}
	next := 0
	for _, b := range native {
		switch {
		case b.Type == "thinking":
			out = append(out, sdk.NewThinkingBlock(b.Signature, b.Thinking))
		case b.Type == "redacted_thinking":
			out = append(out, sdk.NewRedactedThinkingBlock(b.Data))
		case b.Type == "text" && same:
			text(b.Text)
		case b.Type == "tool_use" && same:
			call(msg.ToolCalls[next])
			next++
		}
	}
	if !same {
		text(msg.Text)
		for _, c := range msg.ToolCalls {
			call(c)
		}
	}
	// Reasoning that leads to nothing must not be the end of a message.
	for n := len(out); n > 0 && (out[n-1].OfThinking != nil || out[n-1].OfRedactedThinking != nil); n = len(out) {
		out = out[:n-1]
	}
	return out
}

var idForm = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,128}$`)

// callID gives an id that the server accepts; ids of other providers may have
// other characters.
func callID(id string) string {
	if idForm.MatchString(id) {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return "call_" + hex.EncodeToString(sum[:12])
}
