package openai

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	sdk "github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/tidwall/gjson"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/provider"
	"github.com/herdgate/herdgate/pkg/contract"
)

// assembly puts an answer together out of what streams in.
type assembly struct {
	onDelta func(model.Delta)
	display provider.Display
	source  string
	used    map[string]bool // ids of calls in the conversation
	text    strings.Builder
	refusal strings.Builder
	// reasoning is what some servers want back beside the calls that it led to.
	reasoning strings.Builder
	calls     []*partial
	byIndex   map[int64]*partial
	size      int
	finish    string
	done      bool // [DONE] was seen
	usage     *contract.Usage
	model     string
}

// partial is a call that is still coming in.
type partial struct {
	id   string // as the server gave it
	name string
	args strings.Builder
}

func (p *partial) complete() bool { return provider.IsObject(p.args.String()) }

func newAssembly(req model.Request, source string, onDelta func(model.Delta)) *assembly {
	return &assembly{onDelta: onDelta, display: provider.Display{OnDelta: onDelta}, source: source, used: provider.UsedIDs(req), byIndex: map[int64]*partial{}}
}

func (a *assembly) stream(dec ssestream.Decoder, alive func()) error {
	for dec.Next() {
		alive()
		ev := dec.Event()
		data := strings.TrimSpace(string(ev.Data))
		if strings.HasPrefix(data, "[DONE]") {
			a.done = true
			return nil
		}
		if err := errorIn(ev.Type, data); err != nil {
			return err
		}
		if ev.Type == "ping" || data == "" {
			continue
		}
		var chunk sdk.ChatCompletionChunk
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return provider.Break("malformed", "the stream holds a line that is no JSON: "+err.Error())
		}
		if err := a.add(chunk); err != nil {
			return err
		}
	}
	if err := dec.Err(); err != nil {
		return fmt.Errorf("read the stream: %w", err)
	}
	return nil
}

// errorIn finds an error object; "error": null is none.
func errorIn(event, data string) error {
	e := gjson.Get(data, "error")
	if !e.Exists() || e.Type == gjson.Null {
		if event != "error" {
			return nil
		}
		e = gjson.Parse(data)
	}
	pe := &provider.StreamError{Type: e.Get("type").String(), Code: e.Get("code").String(), Message: e.Get("message").String()}
	if pe.Message == "" {
		pe.Message = e.String()
	}
	return pe
}

// reasoning is a block of [model.Native].
type reasoning struct {
	Content string `json:"reasoning_content"`
}

// think takes in reasoning, which is an addition to the protocol that several
// servers have made and the library does not know.
func (a *assembly) think(raw string) {
	if r := gjson.Get(raw, "reasoning_content"); r.Type == gjson.String {
		a.reasoning.WriteString(r.Str)
		a.size += len(r.Str)
	}
}

func (a *assembly) add(chunk sdk.ChatCompletionChunk) error {
	if chunk.Model != "" {
		a.model = provider.Clean(chunk.Model)
	}
	if chunk.JSON.Usage.Valid() {
		a.count(chunk.Usage)
	}
	for _, choice := range chunk.Choices {
		if choice.Index != 0 {
			continue
		}
		a.size += len(choice.Delta.Content) + len(choice.Delta.Refusal)
		if s := choice.Delta.Content; s != "" {
			a.text.WriteString(s)
			a.display.Add(s)
		}
		a.refusal.WriteString(choice.Delta.Refusal)
		a.think(choice.Delta.RawJSON())
		for _, d := range choice.Delta.ToolCalls {
			a.size += len(d.Function.Arguments) + len(d.Function.Name)
			a.call(d.Index, d.ID, d.Function.Name, d.Function.Arguments)
		}
		a.finish = provider.LastFinish(a.finish, choice.FinishReason)
		if a.size > provider.MaxTextBytes || len(a.calls) > provider.MaxCalls {
			return provider.TooLarge()
		}
	}
	return nil
}

// call takes in a piece of a call. The index should say which call it belongs
// to, but servers repeat indexes (F-096), move on from them in the middle of a
// call (F-098), and omit or repeat ids (F-100). So a new id or a name that
// follows a whole call begins another one, and a call that is whole is never
// written to again while another is open.
func (a *assembly) call(index int64, id, name, args string) {
	at := a.byIndex[index]
	switch {
	case id != "" && at != nil && at.id == id:
		if name != "" && at.name != "" && at.complete() && strings.TrimSpace(args) != "" {
			at = nil // the same id again, for another call
		}
	case id != "" && at != nil && at.id == "" && name == "" && !at.complete():
		at.id = id // an id that comes late
	case id != "":
		at = nil
		if name == "" {
			at = a.byID(id) // index gone astray
		}
	case name != "" && at != nil:
		if at.complete() || at.args.Len() > 0 && name != at.name {
			at = nil
		}
	case name == "":
		last := a.last()
		if at == nil || at.complete() && strings.TrimSpace(args) != "" && last != nil && !last.complete() {
			at = last
		}
	}
	if at == nil {
		at = &partial{id: id}
		a.calls = append(a.calls, at)
	}
	a.byIndex[index] = at
	if name != "" && name != at.name && at.args.Len() == 0 {
		at.name += name
		a.onDelta(model.Delta{ToolCall: provider.Clean(at.name)})
	}
	at.args.WriteString(args)
}

func (a *assembly) byID(id string) *partial {
	for _, c := range a.calls {
		if c.id == id {
			return c
		}
	}
	return nil
}

func (a *assembly) last() *partial {
	if len(a.calls) == 0 {
		return nil
	}
	return a.calls[len(a.calls)-1]
}

// count takes usage figures. Null and negative ones are unknown (F-110); where
// reasoning is counted apart the larger figure stands (F-112). A later report
// replaces an earlier one, so that repeated reports count once.
func (a *assembly) count(u sdk.CompletionUsage) {
	known := false
	number := func(v int64, valid bool, into *int64) {
		if valid && v >= 0 {
			known, *into = true, v
		}
	}
	var next contract.Usage
	if a.usage != nil {
		next = *a.usage
	}
	var total, reasoning int64
	number(u.PromptTokens, u.JSON.PromptTokens.Valid(), &next.InputTokens)
	number(u.CompletionTokens, u.JSON.CompletionTokens.Valid(), &next.OutputTokens)
	number(u.TotalTokens, u.JSON.TotalTokens.Valid(), &total)
	if u.JSON.PromptTokensDetails.Valid() {
		number(u.PromptTokensDetails.CachedTokens, u.PromptTokensDetails.JSON.CachedTokens.Valid(), &next.CacheReadTokens)
	}
	if u.JSON.CompletionTokensDetails.Valid() {
		number(u.CompletionTokensDetails.ReasoningTokens, u.CompletionTokensDetails.JSON.ReasoningTokens.Valid(), &reasoning)
	}
	if !known {
		return
	}
	next.OutputTokens = max(next.OutputTokens, reasoning)
	next.TotalTokens = max(total, next.InputTokens+next.OutputTokens)
	a.usage = &next
}

// whole reads an answer that does not stream.
func (a *assembly) whole(r io.Reader) error {
	b, err := io.ReadAll(r)
	if err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	if err := errorIn("", string(b)); err != nil {
		return err
	}
	var c sdk.ChatCompletion
	if err := json.Unmarshal(b, &c); err != nil {
		return provider.Break("malformed", "the answer is no JSON: "+err.Error())
	}
	if c.Model != "" {
		a.model = provider.Clean(c.Model)
	}
	if c.JSON.Usage.Valid() {
		a.count(c.Usage)
	}
	if len(c.Choices) == 0 {
		return provider.Break("empty_answer", "the answer holds no choice")
	}
	msg := c.Choices[0].Message
	a.text.WriteString(msg.Content)
	a.refusal.WriteString(msg.Refusal)
	a.think(msg.RawJSON())
	if msg.Content != "" {
		a.onDelta(model.Delta{Text: provider.Clean(msg.Content)})
	}
	a.finish = provider.Finish(string(c.Choices[0].FinishReason))
	for _, t := range msg.ToolCalls {
		p := &partial{id: t.ID, name: t.Function.Name}
		p.args.WriteString(t.Function.Arguments)
		a.calls = append(a.calls, p)
		a.size += len(t.Function.Arguments)
		a.onDelta(model.Delta{ToolCall: provider.Clean(p.name)})
	}
	a.done = true
	if a.size += len(msg.Content); a.size > provider.MaxTextBytes || len(a.calls) > provider.MaxCalls {
		return provider.TooLarge()
	}
	return nil
}

// response gives the whole answer, or an error for one that broke off.
func (a *assembly) response(configured string) (model.Response, error) {
	if a.finish == "" && !(a.done && (a.text.Len() > 0 || len(a.calls) > 0)) {
		return model.Response{}, provider.Break("disconnected", "the stream ended before the answer did")
	}
	msg := model.Message{Role: model.RoleAssistant, Text: provider.Clean(a.text.String()), FinishReason: a.finish}
	if msg.Text == "" && a.refusal.Len() > 0 {
		msg.Text = provider.Clean(a.refusal.String())
		if a.finish == "" || a.finish == "stop" {
			msg.FinishReason = "refusal"
		}
	}
	for _, p := range a.calls {
		id := provider.FreeID(p.id, a.used)
		msg.ToolCalls = append(msg.ToolCalls, model.ToolCall{ID: id, Name: provider.Clean(p.name), Args: provider.Clean(p.args.String())})
	}
	if msg.FinishReason == "" {
		msg.FinishReason = "stop"
		if len(msg.ToolCalls) > 0 {
			msg.FinishReason = "tool_calls"
		}
	}
	if len(msg.ToolCalls) > 0 && a.reasoning.Len() > 0 {
		block, err := json.Marshal(reasoning{provider.Clean(a.reasoning.String())})
		if err != nil {
			return model.Response{}, fmt.Errorf("keep the reasoning of the answer: %w", err)
		}
		msg.Native = &model.Native{Source: a.source, Blocks: []json.RawMessage{block}}
	}
	res := model.Response{Message: msg, Usage: a.usage, Model: a.model}
	if res.Model == "" {
		res.Model = configured
	}
	return res, nil
}
