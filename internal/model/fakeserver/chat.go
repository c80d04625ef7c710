package fakeserver

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/script"
)

// chat is the chat completions protocol.
type chat struct{}

// thinkID marks the calls that reasoning led to, so that a request without it can
// be told.
const thinkID = "think_"

type chatRequest struct {
	Model    string        `json:"model"`
	Stream   bool          `json:"stream"`
	Messages []chatMessage `json:"messages"`
	Tools    []struct {
		Type     string `json:"type"`
		Function struct {
			Name       string          `json:"name"`
			Parameters json.RawMessage `json:"parameters"`
		} `json:"function"`
	} `json:"tools"`
}

type chatMessage struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content"`
	ToolCallID *string         `json:"tool_call_id"`
	Reasoning  string          `json:"reasoning_content"`
	ToolCalls  []struct {
		ID       string `json:"id"`
		Type     string `json:"type"`
		Function struct {
			Name      string `json:"name"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

// text gives the content, nil being none; ok is false for what is no content.
func (m chatMessage) text() (text *string, ok bool) {
	if len(m.Content) == 0 || json.Unmarshal(m.Content, &text) == nil {
		return text, true
	}
	var parts []struct{ Type, Text string }
	if json.Unmarshal(m.Content, &parts) != nil {
		return nil, false
	}
	var b strings.Builder
	for _, p := range parts {
		if p.Type != "text" {
			return nil, false
		}
		b.WriteString(p.Text)
	}
	s := b.String()
	return &s, true
}

var (
	nameForm = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)
	idForm   = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,128}$`)
)

// CheckChat says what a strict provider would refuse in a request of the chat
// completions protocol, or "".
func CheckChat(body []byte) string {
	_, refusal := chat{}.read(nil, body)
	return refusal
}

func (chat) read(_ http.Header, body []byte) (request, string) {
	var r chatRequest
	if !utf8.Valid(body) {
		return request{}, "the body is no valid UTF-8"
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return request{}, "body: " + err.Error()
	}
	switch {
	case r.Model == "":
		return request{}, "model is missing"
	case len(r.Messages) == 0:
		return request{}, "messages is empty"
	}
	out := request{model: r.Model, stream: r.Stream}
	newest := 0
	for i, m := range r.Messages {
		if m.Role == "user" {
			newest = i
		}
	}
	open, names := map[string]bool{}, map[string]string{}
	for i, m := range r.Messages {
		at := fmt.Sprintf("messages[%d]", i)
		text, ok := m.text()
		if !ok {
			return request{}, at + ": content is neither a string, nor null, nor a list of texts"
		}
		msg := model.Message{}
		if text != nil {
			msg.Text = *text
		}
		if m.Role != "tool" && len(open) > 0 {
			return request{}, fmt.Sprintf("%s: %d tool calls before it have no tool message", at, len(open))
		}
		switch m.Role {
		case "system", "developer":
			msg.Role = model.RoleSystem
			if i > 0 {
				return request{}, at + ": a system message must be the first and the only one"
			}
		case "user":
			msg.Role = model.RoleUser
		case "tool":
			msg.Role = model.RoleTool
			if m.ToolCallID == nil || !open[*m.ToolCallID] {
				return request{}, at + ": a tool message must follow the call with its tool_call_id"
			}
			msg.ToolCallID, msg.ToolName = *m.ToolCallID, names[*m.ToolCallID]
			delete(open, *m.ToolCallID)
		case "assistant":
			msg.Role = model.RoleAssistant
			if text == nil && len(m.ToolCalls) == 0 {
				return request{}, at + ": content is null without tool_calls"
			}
			for j, c := range m.ToolCalls {
				at := fmt.Sprintf("%s.tool_calls[%d]", at, j)
				switch {
				case c.ID == "" || open[c.ID]:
					return request{}, at + ": id is blank or repeated"
				case c.Type != "function":
					return request{}, at + ": type is not function"
				case !nameForm.MatchString(c.Function.Name):
					return request{}, fmt.Sprintf("%s: name %q is not valid", at, c.Function.Name)
				case !isObject(c.Function.Arguments):
					return request{}, at + ": arguments is no JSON object"
				case strings.Contains(c.ID, thinkID) && i > newest && m.Reasoning == "":
					return request{}, at + ": the reasoning_content that came with it is missing"
				}
				open[c.ID], names[c.ID] = true, c.Function.Name
				msg.ToolCalls = append(msg.ToolCalls, model.ToolCall{ID: c.ID, Name: c.Function.Name, Args: c.Function.Arguments})
			}
		default:
			return request{}, fmt.Sprintf("%s: role %q; want system, user, assistant or tool", at, m.Role)
		}
		if text == nil && m.Role != "assistant" {
			return request{}, at + ": content is missing"
		}
		out.Messages = append(out.Messages, msg)
	}
	if len(open) > 0 {
		return request{}, fmt.Sprintf("%d tool calls at the end have no tool message", len(open))
	}
	for i, t := range r.Tools {
		if !nameForm.MatchString(t.Function.Name) {
			return request{}, fmt.Sprintf("tools[%d]: name %q is not valid", i, t.Function.Name)
		}
		out.Tools = append(out.Tools, model.ToolSpec{Name: t.Function.Name})
	}
	return out, ""
}

func isObject(s string) bool {
	var v map[string]any
	return json.Unmarshal([]byte(s), &v) == nil && v != nil
}

func chatID(a answer, id string) string {
	if a.Reasoning != "" && id != "" {
		return thinkID + id
	}
	return id
}

func chatFinish(a answer) string {
	if a.Message.FinishReason == "refusal" {
		return "stop"
	}
	return a.Message.FinishReason
}

func chatUsage(a answer) any {
	if a.Usage == nil {
		if a.Fault == script.FaultNullUsage {
			return map[string]any{"prompt_tokens": nil, "completion_tokens": nil, "total_tokens": nil}
		}
		return nil
	}
	return map[string]any{
		"prompt_tokens": a.Usage.InputTokens, "completion_tokens": a.Usage.OutputTokens, "total_tokens": a.Usage.TotalTokens,
		"prompt_tokens_details": map[string]any{"cached_tokens": a.Usage.CacheReadTokens},
	}
}

// textField is where the text of an answer goes.
func textField(a answer) string {
	if a.Message.FinishReason == "refusal" {
		return "refusal"
	}
	return "content"
}

func (chat) events(a answer) []string {
	var out []string
	chunk := func(choices []any, usage any) {
		b, _ := json.Marshal(map[string]any{ // plain values cannot fail
			"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 1, "model": a.model, "choices": choices, "usage": usage,
		})
		out = append(out, "data: "+string(b)+"\n\n")
	}
	delta := func(d any) {
		chunk([]any{map[string]any{"index": 0, "delta": d, "finish_reason": nil}}, nil)
	}
	delta(map[string]any{"role": "assistant"})
	for _, p := range pieces(a.Reasoning, false) {
		delta(map[string]any{"reasoning_content": p})
	}
	for _, p := range pieces(a.Message.Text, a.Fault == script.FaultSplitUTF8) {
		// Not through the encoder, which would mend what is broken on purpose.
		out = append(out, fmt.Sprintf(`data: {"id":"chatcmpl-fake","object":"chat.completion.chunk","created":1,"model":%s,"choices":[{"index":0,"delta":{%q:%s},"finish_reason":null}]}`+"\n\n",
			quote(a.model), textField(a), quote(p)))
	}
	head := func(i int, c model.ToolCall) {
		call := map[string]any{"index": i, "type": "function", "function": map[string]any{"name": c.Name, "arguments": ""}}
		if c.ID != "" {
			call["id"] = chatID(a, c.ID)
		}
		delta(map[string]any{"tool_calls": []any{call}})
	}
	args := func(i int, p string) {
		delta(map[string]any{"tool_calls": []any{map[string]any{"index": i, "function": map[string]any{"arguments": p}}}})
	}
	eachCall(a, head, args)
	finish := chatFinish(a)
	chunk([]any{map[string]any{"index": 0, "delta": map[string]any{}, "finish_reason": finish}}, nil)
	if u := chatUsage(a); u != nil {
		chunk([]any{}, u)
	}
	return append(out, "data: [DONE]\n\n")
}

// eachCall gives heads and pieces of the calls: one call after the other, or all of
// them in turn, the last one first.
func eachCall(a answer, head func(int, model.ToolCall), args func(int, string)) {
	if a.Fault != script.FaultOutOfOrder {
		for i, c := range a.Message.ToolCalls {
			head(i, c)
			for _, p := range pieces(c.Args, false) {
				args(i, p)
			}
		}
		return
	}
	for i, c := range a.Message.ToolCalls {
		head(i, c)
	}
	for round := range 2 {
		for i := len(a.Message.ToolCalls) - 1; i >= 0; i-- {
			if p := pieces(a.Message.ToolCalls[i].Args, false); round < len(p) {
				args(i, p[round])
			}
		}
	}
}

func (chat) whole(a answer) any {
	msg := map[string]any{"role": "assistant", "content": nil}
	if a.Message.Text != "" {
		msg[textField(a)] = a.Message.Text
	}
	if a.Reasoning != "" {
		msg["reasoning_content"] = a.Reasoning
	}
	var calls []any
	for _, c := range a.Message.ToolCalls {
		calls = append(calls, map[string]any{"id": chatID(a, c.ID), "type": "function", "function": map[string]any{"name": c.Name, "arguments": c.Args}})
	}
	if calls != nil {
		msg["tool_calls"] = calls
	}
	return map[string]any{
		"id": "chatcmpl-fake", "object": "chat.completion", "created": 1, "model": a.model, "usage": chatUsage(a),
		"choices": []any{map[string]any{"index": 0, "message": msg, "finish_reason": chatFinish(a)}},
	}
}

func (chat) failure(_ int, kind, text string) any {
	return map[string]any{"error": map[string]any{"type": kind, "message": text}}
}

func (chat) failureEvent() string {
	return `data: {"error":{"type":"overloaded_error","message":"the script reports an error in its answer"}}` + "\n\n"
}
