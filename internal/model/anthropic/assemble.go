package anthropic

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	sdk "github.com/anthropics/anthropic-sdk-go/v2"
	"github.com/anthropics/anthropic-sdk-go/v2/packages/respjson"
	"github.com/anthropics/anthropic-sdk-go/v2/packages/ssestream"
	"github.com/tidwall/gjson"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/provider"
	"github.com/herdgate/herdgate/pkg/contract"
)

// native is one block as [model.Native] keeps it: reasoning as it came, of calls
// only the place.
type native struct {
	Type      string `json:"type"`
	Text      string `json:"text,omitempty"`
	Thinking  string `json:"thinking,omitempty"`
	Signature string `json:"signature,omitempty"`
	Data      string `json:"data,omitempty"`
}

// readNative reads what this package wrote; anything else is none.
func readNative(blocks []json.RawMessage) []native {
	out := make([]native, 0, len(blocks))
	for _, b := range blocks {
		var n native
		if json.Unmarshal(b, &n) != nil {
			return nil
		}
		out = append(out, n)
	}
	return out
}

// assembly puts an answer together out of what streams in.
type assembly struct {
	source  string
	display provider.Display
	onDelta func(model.Delta)
	used    map[string]bool // ids of calls in the conversation
	blocks  []*block
	byIndex map[int64]*block
	size    int
	finish  string
	refusal string
	done    bool // message_stop was seen
	model   string
	known   bool // some figure was reported
	usage   struct{ input, output, read, written int64 }
}

// block is a part of the answer that is still coming in.
type block struct {
	kind                                  string
	text, thinking, signature, data, args strings.Builder
	id, name                              string
}

func newAssembly(req model.Request, source string, onDelta func(model.Delta)) *assembly {
	return &assembly{
		source: source, onDelta: onDelta, display: provider.Display{OnDelta: onDelta},
		used: provider.UsedIDs(req), byIndex: map[int64]*block{},
	}
}

func (a *assembly) stream(dec ssestream.Decoder, alive func()) error {
	for dec.Next() {
		alive()
		ev := dec.Event()
		data := strings.TrimSpace(string(ev.Data))
		if data == "" {
			continue
		}
		// The data names its type; the event's name is only a copy of it.
		kind := gjson.Get(data, "type").String()
		if ev.Type == "error" || kind == "error" {
			return streamError(data)
		}
		if kind == "ping" || ev.Type == "ping" {
			continue
		}
		if !json.Valid([]byte(data)) {
			return provider.Break("malformed", "the stream holds an event that is no JSON")
		}
		var event sdk.MessageStreamEventUnion
		if err := json.Unmarshal([]byte(data), &event); err != nil {
			return provider.Break("malformed", "the stream holds an event that cannot be read: "+err.Error())
		}
		if err := a.add(event); err != nil {
			return err
		}
		if a.done {
			return nil
		}
	}
	if err := dec.Err(); err != nil {
		return fmt.Errorf("read the stream: %w", err)
	}
	return nil
}

func streamError(data string) error {
	e := gjson.Get(data, "error")
	if !e.Exists() {
		e = gjson.Parse(data)
	}
	se := &provider.StreamError{Type: e.Get("type").String(), Code: e.Get("details.error_code").String(), Message: e.Get("message").String()}
	if se.Message == "" {
		se.Message = e.String()
	}
	return se
}

func (a *assembly) add(ev sdk.MessageStreamEventUnion) error {
	switch ev.Type {
	case "message_start":
		a.model = provider.Clean(ev.Message.Model)
		u := ev.Message.Usage
		a.count(u.InputTokens, u.JSON.InputTokens, &a.usage.input)
		a.count(u.OutputTokens, u.JSON.OutputTokens, &a.usage.output)
		a.count(u.CacheReadInputTokens, u.JSON.CacheReadInputTokens, &a.usage.read)
		a.count(u.CacheCreationInputTokens, u.JSON.CacheCreationInputTokens, &a.usage.written)
	case "message_delta":
		a.finish = provider.LastFinish(a.finish, string(ev.Delta.StopReason))
		if text := ev.Delta.StopDetails.Explanation; text != "" {
			a.refusal = text
		}
		u := ev.Usage // totals so far, not additions
		a.count(u.InputTokens, u.JSON.InputTokens, &a.usage.input)
		a.count(u.OutputTokens, u.JSON.OutputTokens, &a.usage.output)
		a.count(u.CacheReadInputTokens, u.JSON.CacheReadInputTokens, &a.usage.read)
		a.count(u.CacheCreationInputTokens, u.JSON.CacheCreationInputTokens, &a.usage.written)
	case "message_stop":
		a.done = true
	case "content_block_start":
		return a.start(ev.Index, ev.ContentBlock.RawJSON())
	case "content_block_delta":
		return a.piece(ev)
	}
	return nil // whatever else there may be one day
}

// count takes a figure; null and negative ones are unknown (F-110). Figures are
// totals so far, so that a later one that is smaller is a gateway's 0 for what it
// does not repeat.
func (a *assembly) count(v int64, field respjson.Field, into *int64) {
	if field.Valid() && v >= 0 {
		a.known, *into = true, max(*into, v)
	}
}

// start begins a block. Blocks of an index that was there before are others.
func (a *assembly) start(index int64, raw string) error {
	if len(a.blocks) >= 4*provider.MaxCalls {
		return provider.TooLarge()
	}
	get := func(name string) string { return gjson.Get(raw, name).String() }
	b := &block{kind: get("type"), id: get("id"), name: get("name")}
	b.thinking.WriteString(get("thinking"))
	b.signature.WriteString(get("signature"))
	b.data.WriteString(get("data"))
	if input := gjson.Get(raw, "input"); input.IsObject() && strings.TrimSpace(input.Raw) != "{}" {
		b.args.WriteString(input.Raw) // whole at once
	}
	a.byIndex[index] = b
	a.blocks = append(a.blocks, b)
	switch b.kind {
	case "text":
		a.say(b, get("text"))
	case "tool_use":
		a.onDelta(model.Delta{ToolCall: provider.Clean(b.name)})
	}
	a.size += len(raw)
	return a.fits()
}

func (a *assembly) say(b *block, text string) {
	if text != "" {
		b.text.WriteString(text)
		a.display.Add(text)
	}
}

// piece adds to a block. Blocks may come in beside each other.
func (a *assembly) piece(ev sdk.MessageStreamEventUnion) error {
	b := a.byIndex[ev.Index]
	if b == nil {
		return provider.Break("malformed", fmt.Sprintf("the stream holds a piece of block %d, which has not begun", ev.Index))
	}
	d := ev.Delta
	switch d.Type {
	case "text_delta":
		a.say(b, d.Text)
	case "input_json_delta":
		b.args.WriteString(d.PartialJSON)
	case "thinking_delta":
		b.thinking.WriteString(d.Thinking)
	case "signature_delta":
		b.signature.WriteString(d.Signature)
	}
	a.size += len(d.Text) + len(d.PartialJSON) + len(d.Thinking) + len(d.Signature)
	return a.fits()
}

func (a *assembly) fits() error {
	if a.size > provider.MaxTextBytes {
		return provider.TooLarge()
	}
	return nil
}

// whole reads an answer that does not stream.
func (a *assembly) whole(r io.Reader) error {
	body, err := io.ReadAll(r)
	if err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	if !json.Valid(body) {
		return provider.Break("malformed", "the answer is no JSON")
	}
	if gjson.GetBytes(body, "type").String() == "error" {
		return streamError(string(body))
	}
	var msg sdk.Message
	if err := json.Unmarshal(body, &msg); err != nil {
		return provider.Break("malformed", "the answer cannot be read: "+err.Error())
	}
	begin := sdk.MessageStreamEventUnion{Type: "message_start", Message: msg}
	if err := a.add(begin); err != nil {
		return err
	}
	for i, b := range gjson.GetBytes(body, "content").Array() {
		if err := a.start(int64(i), b.Raw); err != nil {
			return err
		}
	}
	a.finish, a.done, a.refusal = provider.Finish(string(msg.StopReason)), true, msg.StopDetails.Explanation
	return nil
}

// response gives the whole answer, or an error for one that broke off.
func (a *assembly) response(configured string) (model.Response, error) {
	msg := model.Message{Role: model.RoleAssistant, FinishReason: a.finish}
	var text strings.Builder
	var blocks []native
	reasoned := false
	for _, b := range a.blocks {
		switch b.kind {
		case "text":
			text.WriteString(b.text.String())
			blocks = append(blocks, native{Type: b.kind, Text: provider.Clean(b.text.String())})
		case "tool_use":
			args := b.args.String()
			if args == "" {
				args = "{}"
				if a.finish == "length" {
					args = "" // cut before its first argument
				}
			}
			msg.ToolCalls = append(msg.ToolCalls, model.ToolCall{
				ID: provider.FreeID(b.id, a.used), Name: provider.Clean(b.name), Args: provider.Clean(args),
			})
			blocks = append(blocks, native{Type: b.kind})
		case "thinking":
			// Without its signature, which comes last, it was cut and is not taken back.
			if b.signature.Len() > 0 {
				reasoned = true
				blocks = append(blocks, native{Type: b.kind, Thinking: provider.Clean(b.thinking.String()), Signature: provider.Clean(b.signature.String())})
			}
		case "redacted_thinking":
			reasoned = true
			blocks = append(blocks, native{Type: b.kind, Data: provider.Clean(b.data.String())})
		}
	}
	if a.finish == "" && !(a.done && (text.Len() > 0 || len(msg.ToolCalls) > 0)) {
		return model.Response{}, provider.Break("disconnected", "the stream ended before the answer did")
	}
	if len(msg.ToolCalls) > provider.MaxCalls {
		return model.Response{}, provider.TooLarge()
	}
	msg.Text = provider.Clean(text.String())
	if msg.Text == "" && msg.FinishReason == "refusal" {
		msg.Text = provider.Clean(a.refusal)
	}
	if msg.FinishReason == "" {
		msg.FinishReason = "stop"
		if len(msg.ToolCalls) > 0 {
			msg.FinishReason = "tool_calls"
		}
	}
	if reasoned {
		msg.Native = &model.Native{Source: a.source}
		for _, b := range blocks {
			raw, err := json.Marshal(b)
			if err != nil {
				return model.Response{}, fmt.Errorf("keep a block of the answer: %w", err)
			}
			msg.Native.Blocks = append(msg.Native.Blocks, raw)
		}
	}
	res := model.Response{Message: msg, Model: a.model}
	if a.known {
		// What was written to or read from the cache is input as well.
		in := a.usage.input + a.usage.read + a.usage.written
		res.Usage = &contract.Usage{InputTokens: in, OutputTokens: a.usage.output, TotalTokens: in + a.usage.output, CacheReadTokens: a.usage.read}
	}
	if res.Model == "" {
		res.Model = configured
	}
	return res, nil
}
