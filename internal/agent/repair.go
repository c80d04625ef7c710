package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

const lostResult = "No result: the call was interrupted, and it is not known whether it had an effect. Check before you repeat it."

// Repair returns a conversation that a strict provider accepts: every call of an
// assistant message is answered once, directly after it; results without a call
// are left out; arguments are JSON objects. The input is not changed.
func Repair(messages []model.Message) []model.Message {
	out := make([]model.Message, 0, len(messages))
	for i := 0; i < len(messages); i++ {
		m := messages[i]
		if m.Role == model.RoleTool {
			continue // taken along with its call, or without one
		}
		if len(m.ToolCalls) == 0 {
			out = append(out, m)
			continue
		}
		m.ToolCalls = replayable(m.ToolCalls)
		out = append(out, m)
		results := map[string]model.Message{}
		for j := i + 1; j < len(messages) && messages[j].Role == model.RoleTool; j++ {
			if _, dup := results[messages[j].ToolCallID]; !dup {
				results[messages[j].ToolCallID] = messages[j]
			}
		}
		for _, c := range m.ToolCalls {
			r, ok := results[c.ID]
			if !ok {
				r = model.Message{Role: model.RoleTool, ToolCallID: c.ID, ToolName: c.Name, Text: lostResult, IsError: true}
			}
			out = append(out, r)
		}
	}
	return out
}

// replayable replaces arguments that no provider would take back. The model has
// read what was wrong with them in the result.
func replayable(calls []model.ToolCall) []model.ToolCall {
	out := make([]model.ToolCall, len(calls))
	for i, c := range calls {
		if args, err := ParseArgs(c.Args); err != nil {
			c.Args = "{}"
		} else {
			c.Args = string(args)
		}
		out[i] = c
	}
	return out
}

// MaxArgsBytes bounds the arguments of one call.
const MaxArgsBytes = 1 << 20

// ParseArgs reads what a model wrote as a call's arguments: one JSON object, or
// nothing at all for a tool without any. Errors are words for the model.
func ParseArgs(args string) (json.RawMessage, error) {
	b := bytes.TrimSpace([]byte(args))
	if len(b) == 0 {
		return json.RawMessage("{}"), nil
	}
	if len(b) > MaxArgsBytes {
		return nil, fmt.Errorf("they have %d bytes, the limit is %d", len(b), MaxArgsBytes)
	}
	if err := contract.CheckDepth(b, contract.MaxDepth); err != nil {
		return nil, err
	}
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return nil, fmt.Errorf("not JSON at character %d (%w): %s", syntax.Offset, err, clip(string(b), 200))
		}
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	if _, ok := v.(map[string]any); !ok {
		return nil, fmt.Errorf("want an object, got %s", clip(string(b), 200))
	}
	return b, nil
}
