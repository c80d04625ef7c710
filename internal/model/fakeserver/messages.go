package fakeserver

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/script"
)

// messages is the messages protocol.
type messages struct{}

type messagesRequest struct {
	Model     string `json:"model"`
	MaxTokens int    `json:"max_tokens"`
	Stream    bool   `json:"stream"`
	System    content
	Messages  []struct {
		Role    string
		Content content
	}
	Tools []struct {
		Name   string
		Schema struct{ Type string } `json:"input_schema"`
	}
}

// content is a text or a list of blocks.
type content []contentBlock

type contentBlock struct {
	Type      string
	Text      string
	Thinking  *string
	Signature string
	Data      string
	ID        string
	Name      string
	Input     json.RawMessage
	ToolUseID string `json:"tool_use_id"`
	Content   content
	IsError   bool `json:"is_error"`
}

func (c *content) UnmarshalJSON(b []byte) error {
	var text string
	if json.Unmarshal(b, &text) == nil {
		*c = content{{Type: "text", Text: text}}
		return nil
	}
	var blocks []contentBlock
	if err := json.Unmarshal(b, &blocks); err != nil {
		return fmt.Errorf("content is neither a string nor a list of blocks: %w", err)
	}
	*c = blocks
	return nil
}

func (c content) text() string {
	var parts []string
	for _, b := range c {
		parts = append(parts, b.Text)
	}
	return strings.Join(parts, "\n")
}

// fields are those of a request; the API refuses others, such as temperature.
var fields = []string{
	"model", "max_tokens", "stream", "system", "messages", "tools", "tool_choice", "thinking", "metadata", "stop_sequences", "output_config", "service_tier", "cache_control",
}

// sign is the signature of reasoning; a request whose does not fit has changed it.
func sign(thinking string) string {
	sum := sha256.Sum256([]byte("signed " + thinking))
	return hex.EncodeToString(sum[:])
}

// redacted stands beside reasoning that is not shown.
const redacted = "cmVkYWN0ZWQ="

// CheckMessages says what a strict provider would refuse in a request of the
// messages protocol, or "".
func CheckMessages(body []byte) string {
	_, refusal := messages{}.read(http.Header{"Anthropic-Version": {"any"}}, body)
	return refusal
}

func (messages) read(header http.Header, body []byte) (request, string) {
	var r messagesRequest
	var all map[string]json.RawMessage
	if !utf8.Valid(body) {
		return request{}, "the body is no valid UTF-8"
	}
	if err := json.Unmarshal(body, &all); err != nil {
		return request{}, "body: " + err.Error()
	}
	for k := range all {
		if !slices.Contains(fields, k) {
			return request{}, k + ": extra inputs are not permitted"
		}
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return request{}, "body: " + err.Error()
	}
	switch {
	case header.Get("Anthropic-Version") == "":
		return request{}, "the header anthropic-version is missing"
	case r.Model == "":
		return request{}, "model is missing"
	case r.MaxTokens < 1:
		return request{}, "max_tokens is missing or below 1"
	case len(r.Messages) == 0:
		return request{}, "messages is empty"
	case r.Messages[0].Role != "user":
		return request{}, "messages[0]: the first message must be a user's"
	case r.Messages[len(r.Messages)-1].Role != "user":
		return request{}, "the last message must be a user's: answers that begin are not supported"
	}
	out := request{model: r.Model, stream: r.Stream}
	for i, b := range r.System {
		if b.Type != "text" || strings.TrimSpace(b.Text) == "" {
			return request{}, fmt.Sprintf("system[%d]: want a text that is not blank", i)
		}
	}
	if len(r.System) > 0 {
		out.Messages = append(out.Messages, model.Message{Role: model.RoleSystem, Text: r.System.text()})
	}
	var open []string
	seen, names := map[string]bool{}, map[string]string{}
	for i, m := range r.Messages {
		at := fmt.Sprintf("messages[%d]", i)
		var more []model.Message
		var refusal string
		switch {
		case i > 0 && m.Role == r.Messages[i-1].Role:
			return request{}, at + ": roles must alternate"
		case len(m.Content) == 0:
			return request{}, at + ": content is empty"
		case m.Role == "user":
			more, refusal = readUser(at, m.Content, open, names)
			open = nil
		case m.Role == "assistant":
			var msg model.Message
			msg, refusal = readAssistant(at, m.Content, seen, names)
			for _, c := range msg.ToolCalls {
				open = append(open, c.ID)
			}
			more = []model.Message{msg}
		default:
			return request{}, fmt.Sprintf("%s: role %q; want user or assistant", at, m.Role)
		}
		if refusal != "" {
			return request{}, refusal
		}
		out.Messages = append(out.Messages, more...)
	}
	for i, t := range r.Tools {
		switch {
		case !nameForm.MatchString(t.Name):
			return request{}, fmt.Sprintf("tools[%d]: name %q is not valid", i, t.Name)
		case t.Schema.Type != "object":
			return request{}, fmt.Sprintf("tools[%d]: input_schema.type is %q; want object", i, t.Schema.Type)
		}
		out.Tools = append(out.Tools, model.ToolSpec{Name: t.Name})
	}
	return out, ""
}

// readUser reads results, which come first and answer each open call once, and texts.
func readUser(at string, blocks content, open []string, names map[string]string) ([]model.Message, string) {
	var out []model.Message
	waiting := slices.Clone(open)
	texts := false
	for j, b := range blocks {
		at := fmt.Sprintf("%s.content[%d]", at, j)
		switch b.Type {
		case "tool_result":
			n := slices.Index(waiting, b.ToolUseID)
			switch {
			case n < 0:
				return nil, fmt.Sprintf("%s: tool_use_id %q is that of no call in the message before, or is answered already", at, b.ToolUseID)
			case texts:
				return nil, at + ": results must come before texts"
			}
			for _, c := range b.Content {
				if c.Type != "text" || c.Text == "" {
					return nil, at + ": the content of a result must be texts that are not empty"
				}
			}
			waiting = slices.Delete(waiting, n, n+1)
			out = append(out, model.Message{Role: model.RoleTool, ToolCallID: b.ToolUseID, ToolName: names[b.ToolUseID], Text: b.Content.text(), IsError: b.IsError})
		case "text":
			if strings.TrimSpace(b.Text) == "" {
				return nil, at + ": text must not be blank"
			}
			texts = true
			out = append(out, model.Message{Role: model.RoleUser, Text: b.Text})
		default:
			return nil, fmt.Sprintf("%s: type %q; want text or tool_result", at, b.Type)
		}
	}
	if len(waiting) > 0 {
		return nil, fmt.Sprintf("%s: no tool_result for %q", at, waiting)
	}
	return out, ""
}

func readAssistant(at string, blocks content, seen map[string]bool, names map[string]string) (model.Message, string) {
	msg := model.Message{Role: model.RoleAssistant}
	thought := false
	for j, b := range blocks {
		at := fmt.Sprintf("%s.content[%d]", at, j)
		switch b.Type {
		case "text":
			if strings.TrimSpace(b.Text) == "" {
				return msg, at + ": text must not be blank"
			}
			msg.Text += b.Text
		case "thinking":
			if b.Thinking == nil || b.Signature != sign(*b.Thinking) {
				return msg, at + ": the signature does not fit; thinking must come back unchanged"
			}
			thought = true
		case "redacted_thinking":
			if b.Data != redacted {
				return msg, at + ": redacted_thinking must come back unchanged"
			}
		case "tool_use":
			switch {
			case !idForm.MatchString(b.ID) || seen[b.ID]:
				return msg, fmt.Sprintf("%s: id %q is not valid or repeated", at, b.ID)
			case !nameForm.MatchString(b.Name):
				return msg, fmt.Sprintf("%s: name %q is not valid", at, b.Name)
			case !isObject(string(b.Input)):
				return msg, at + ": input is no object"
			case strings.Contains(b.ID, thinkID) && !thought:
				return msg, at + ": the thinking that led to this call must stand before it"
			}
			seen[b.ID], names[b.ID] = true, b.Name
			msg.ToolCalls = append(msg.ToolCalls, model.ToolCall{ID: b.ID, Name: b.Name, Args: string(b.Input)})
		default:
			return msg, fmt.Sprintf("%s: type %q; want text, tool_use, thinking or redacted_thinking", at, b.Type)
		}
	}
	if last := blocks[len(blocks)-1].Type; last == "thinking" || last == "redacted_thinking" {
		return msg, at + ": the last block must not be thinking"
	}
	return msg, ""
}

func stopReason(finish string) string {
	switch finish {
	case "stop":
		return "end_turn"
	case "tool_calls":
		return "tool_use"
	case "length":
		return "max_tokens"
	case "content_filter":
		return "refusal"
	}
	return finish
}

func useID(a answer, id string) string {
	if id == "" {
		return ""
	}
	id = strings.TrimPrefix(id, "call_")
	if a.Reasoning != "" {
		id = thinkID + id
	}
	return "toolu_" + id
}

func messagesUsage(a answer) any {
	if a.Usage == nil {
		if a.Fault == script.FaultNullUsage {
			return map[string]any{"input_tokens": nil, "output_tokens": nil}
		}
		return nil
	}
	// What came from the cache is counted apart in this protocol.
	return map[string]any{
		"input_tokens": max(a.Usage.InputTokens-a.Usage.CacheReadTokens, 0), "output_tokens": a.Usage.OutputTokens,
		"cache_read_input_tokens": a.Usage.CacheReadTokens, "cache_creation_input_tokens": 0,
	}
}

func (messages) events(a answer) []string {
	var out []string
	event := func(kind string, fields map[string]any) {
		fields["type"] = kind
		b, _ := json.Marshal(fields) // plain values cannot fail
		out = append(out, "event: "+kind+"\ndata: "+string(b)+"\n\n")
	}
	next := 0
	start := func(block map[string]any) int {
		event("content_block_start", map[string]any{"index": next, "content_block": block})
		next++
		return next - 1
	}
	delta := func(i int, d map[string]any) { event("content_block_delta", map[string]any{"index": i, "delta": d}) }
	stop := func(i int) { event("content_block_stop", map[string]any{"index": i}) }

	event("message_start", map[string]any{"message": map[string]any{
		"id": "msg_fake", "type": "message", "role": "assistant", "model": a.model, "content": []any{}, "stop_reason": nil, "usage": messagesUsage(a),
	}})
	event("ping", map[string]any{})
	if a.Reasoning != "" {
		i := start(map[string]any{"type": "thinking", "thinking": "", "signature": ""})
		for _, p := range pieces(a.Reasoning, false) {
			delta(i, map[string]any{"type": "thinking_delta", "thinking": p})
		}
		delta(i, map[string]any{"type": "signature_delta", "signature": sign(a.Reasoning)})
		stop(i)
		stop(start(map[string]any{"type": "redacted_thinking", "data": redacted}))
	}
	if a.Message.Text != "" {
		i := start(map[string]any{"type": "text", "text": ""})
		for _, p := range pieces(a.Message.Text, a.Fault == script.FaultSplitUTF8) {
			// Not through the encoder, which would mend what is broken on purpose.
			out = append(out, fmt.Sprintf("event: content_block_delta\n"+`data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%s}}`+"\n\n", i, quote(p)))
		}
		stop(i)
	}
	first := next
	eachCall(a, func(_ int, c model.ToolCall) {
		start(map[string]any{"type": "tool_use", "id": useID(a, c.ID), "name": c.Name, "input": map[string]any{}})
	}, func(i int, p string) {
		delta(first+i, map[string]any{"type": "input_json_delta", "partial_json": p})
	})
	for i := range a.Message.ToolCalls {
		stop(first + i)
	}
	end := map[string]any{"delta": map[string]any{"stop_reason": stopReason(a.Message.FinishReason), "stop_sequence": nil}}
	if u := messagesUsage(a); u != nil {
		end["usage"] = u
	}
	event("message_delta", end)
	event("message_stop", map[string]any{})
	return out
}

func (messages) whole(a answer) any {
	blocks := []any{}
	if a.Reasoning != "" {
		blocks = append(blocks, map[string]any{"type": "thinking", "thinking": a.Reasoning, "signature": sign(a.Reasoning)})
	}
	if a.Message.Text != "" {
		blocks = append(blocks, map[string]any{"type": "text", "text": a.Message.Text})
	}
	for _, c := range a.Message.ToolCalls {
		input := json.RawMessage(c.Args)
		if !isObject(c.Args) {
			input = json.RawMessage("{}") // nothing else can be said in this form
		}
		blocks = append(blocks, map[string]any{"type": "tool_use", "id": useID(a, c.ID), "name": c.Name, "input": input})
	}
	return map[string]any{
		"id": "msg_fake", "type": "message", "role": "assistant", "model": a.model, "content": blocks,
		"stop_reason": stopReason(a.Message.FinishReason), "stop_sequence": nil, "usage": messagesUsage(a),
	}
}

func (messages) failure(_ int, kind, text string) any {
	return map[string]any{"type": "error", "error": map[string]any{"type": kind, "message": text}}
}

func (messages) failureEvent() string {
	return "event: error\n" + `data: {"type":"error","error":{"type":"overloaded_error","message":"the script reports an error in its answer"}}` + "\n\n"
}
