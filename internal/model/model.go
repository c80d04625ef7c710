// Package model is the seam between the agent loop and whoever answers it: one
// small interface with streaming, tool calls, usage and cancellation. Providers
// live beneath (openai, script); nothing above knows which one is at work.
package model

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Role says who speaks.
type Role string

// The roles of messages.
const (
	RoleSystem    Role = "system"
	RoleUser      Role = "user"
	RoleAssistant Role = "assistant"
	RoleTool      Role = "tool"
)

// Message is one message of a conversation.
type Message struct {
	// ID is unique within the conversation; the loop gives it.
	ID   string `json:"id,omitempty"`
	Role Role   `json:"role"`
	Text string `json:"text,omitempty"`
	// ToolCalls are the calls of an assistant message, in the model's order.
	ToolCalls []ToolCall `json:"tool_calls,omitempty"`
	// ToolCallID and ToolName belong to a tool message: the call it answers.
	ToolCallID string `json:"tool_call_id,omitempty"`
	ToolName   string `json:"tool_name,omitempty"`
	// IsError marks a tool message that tells of a failure.
	IsError bool `json:"is_error,omitempty"`
	// FinishReason is why the model stopped: "stop", "tool_calls", "length",
	// "content_filter", "refusal", or whatever else the provider said.
	FinishReason string `json:"finish_reason,omitempty"`
	// Native is what else the provider sent and may want to see again.
	Native *Native `json:"native,omitempty"`
	// ErrorFallback marks an assistant message that the loop made out of a
	// provider's failure; ErrorDetail is the provider's own text.
	ErrorFallback bool   `json:"error_fallback,omitempty"`
	ErrorDetail   string `json:"error_detail,omitempty"`
	// Metadata is for the program, never sent to a provider.
	Metadata map[string]any `json:"metadata,omitempty"`
}

// Native is the answer in its provider's own form, as far as the provider demands
// it back: reasoning with its signature, and where it stood between text and
// calls. Only the model that wrote it reads it and is sent it (F-124).
type Native struct {
	// Source is the model and server that wrote it.
	Source string `json:"source"`
	// Blocks are unchanged and in order.
	Blocks []json.RawMessage `json:"blocks"`
}

// From returns the blocks if source wrote them.
func (n *Native) From(source string) []json.RawMessage {
	if n == nil || n.Source != source {
		return nil
	}
	return n.Blocks
}

// ToolCall is one call that a model asks for. Args is what the model wrote; it
// need not be JSON.
type ToolCall struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	Args string `json:"args"`
}

// ToolSpec describes a tool to a model.
type ToolSpec struct {
	Name        string
	Description string
	// Parameters is a JSON Schema of type object.
	Parameters json.RawMessage
}

// Request is one call of a model.
type Request struct {
	// Messages are shared with later requests: whoever wants others puts a slice of
	// its own here.
	Messages []Message
	Tools    []ToolSpec
	// Agent is the type of the agent that asks: "lead" or a sub-agent's name.
	Agent string
}

// Response is a whole answer.
type Response struct {
	Message Message
	// Usage is what the provider reported, or nil.
	Usage *contract.Usage
	// Model is the model as the provider named it, or the configured name.
	Model string
}

// Delta is a piece of an answer as it streams in. It is for display and for
// noticing life, never for decisions: those wait for the Response. An empty one
// says only that more of the answer has come, nothing of which is for display.
type Delta struct {
	Text     string
	ToolCall string // name of a call that has begun
	// Restart says that the pieces so far are void: the model is asked again.
	Restart bool
}

// Model answers requests. It is safe for concurrent use.
type Model interface {
	// Name is the configured name.
	Name() string
	// ModelName is the provider's name of the model.
	ModelName() string
	// Generate asks and waits for the whole answer. It calls onDelta, which may
	// be nil, from one goroutine for each piece. It returns promptly with
	// ctx's cause once ctx is done. A provider's refusal or failure is a *Error.
	Generate(ctx context.Context, req Request, onDelta func(Delta)) (Response, error)
}

// ErrorKind says what a caller should do about a provider's failure.
type ErrorKind string

// The kinds of provider failures.
const (
	// KindTransient may succeed later: 429, 5xx, a broken connection, silence.
	KindTransient ErrorKind = "transient"
	// KindPermanent will not: a bad key, an unknown model, a refused request.
	KindPermanent ErrorKind = "permanent"
)

// Marks in the metadata of messages that no person wrote.
const (
	// MetaHidden marks a user message that the program added.
	MetaHidden = "hidden"
	// MetaReminder marks a message, such as the date, that must stay in view.
	MetaReminder = "dynamic_reminder"
)

// Marked reports whether the message's metadata has the mark.
func (m Message) Marked(mark string) bool { v, _ := m.Metadata[mark].(bool); return v }

// safetyReasons are the finish reasons, of all providers, that mean that a safety
// system has cut the answer or refused one.
var safetyReasons = map[string]bool{
	"content_filter": true, "refusal": true, "safety": true, "blocklist": true, "prohibited_content": true, "spii": true, "recitation": true,
	"content_filtered": true, "guardrail_intervened": true,
}

// CutForSafety reports whether the provider's safety system has cut the answer or
// refused one.
func (m Message) CutForSafety() bool { return safetyReasons[strings.ToLower(m.FinishReason)] }

// TooLong reports whether err says that a provider refused a request because the
// conversation does not fit into what the model can read. Providers have a code
// for it only at times, so that its usual words count as well.
func TooLong(err error) bool {
	var e *Error
	if !errors.As(err, &e) || e.Kind != KindPermanent {
		return false
	}
	text := strings.ToLower(e.Code + " " + e.Message)
	for _, words := range []string{
		"context_length_exceeded", "context length", "context limit", "context window", "context size", "context_window",
		"prompt is too long", "input is too long", "request_too_large", "too many tokens", "maximum number of tokens",
	} {
		if strings.Contains(text, words) {
			return true
		}
	}
	return false
}

// Error is a provider's failure after all retries.
type Error struct {
	Kind    ErrorKind
	Code    string // short and stable: rate_limited, http_500, timeout, disconnected, malformed, unauthorized …
	Message string
	// RetryAfter is what the provider asked for, 0 if nothing.
	RetryAfter time.Duration
	Err        error
}

func (e *Error) Error() string { return fmt.Sprintf("model: %s: %s", e.Code, e.Message) }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// ErrUnknown is returned when no model of that name is configured.
var ErrUnknown = errors.New("unknown model")

// Registry holds the configured models by name.
type Registry struct {
	order  []string
	models map[string]Model
}

// NewRegistry returns a registry of models in their configured order, the first
// being the default. Names must be unique.
func NewRegistry(models ...Model) (*Registry, error) {
	r := &Registry{models: map[string]Model{}}
	for _, m := range models {
		if _, dup := r.models[m.Name()]; dup {
			return nil, fmt.Errorf("models: name %q is given twice", m.Name())
		}
		r.order = append(r.order, m.Name())
		r.models[m.Name()] = m
	}
	return r, nil
}

// Get returns the model called name; "" and "inherit" are the default.
func (r *Registry) Get(name string) (Model, error) {
	if len(r.order) == 0 {
		return nil, fmt.Errorf("%w: no model is configured; add one under models in herdgate.yaml", ErrUnknown)
	}
	if name == "" || name == "inherit" {
		name = r.order[0]
	}
	if m, ok := r.models[name]; ok {
		return m, nil
	}
	return nil, fmt.Errorf("%w: %q; configured are %q", ErrUnknown, name, r.order)
}

// Names returns the configured names in order.
func (r *Registry) Names() []string { return append([]string(nil), r.order...) }
