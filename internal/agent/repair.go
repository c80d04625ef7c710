package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Repair returns a conversation that a strict provider accepts: every call has a
// name and an id of its own and is answered once, directly after its message;
// results without a call are left out; arguments are JSON objects. The input is
// not changed, and what is in order already is as it was.
func Repair(messages []model.Message) []model.Message { return new(repairer).repair(messages) }

// repairer repairs a conversation that grows. What it has repaired once it does not
// look at again, so that a turn costs what is new in it and not the whole history.
type repairer struct {
	seen int // how many messages out was made of
	out  []model.Message
	used map[string]bool
}

// repair returns what [Repair] would. messages begin with those of the last call, or
// the repairer was reset. The result must not be changed.
func (r *repairer) repair(messages []model.Message) []model.Message {
	if r.seen > len(messages) || r.seen > 0 && r.seen < len(messages) && messages[r.seen].Role == model.RoleTool {
		r.reset() // results of calls that were taken for unanswered
	}
	if r.used == nil {
		r.used, r.out = map[string]bool{}, make([]model.Message, 0, len(messages)+len(messages)/4+8)
	}
	for i := r.seen; i < len(messages); i++ {
		m := messages[i]
		if m.Role == model.RoleTool {
			continue // taken along with its call, or without one
		}
		if m.Role != model.RoleAssistant || len(m.ToolCalls) == 0 {
			m.ToolCalls = nil
			r.out = append(r.out, m)
			continue
		}
		results := map[string][]model.Message{}
		for j := i + 1; j < len(messages) && messages[j].Role == model.RoleTool; j++ {
			results[messages[j].ToolCallID] = append(results[messages[j].ToolCallID], messages[j])
		}
		m.ToolCalls = replayable(m.ToolCalls)
		answers := make([]model.Message, len(m.ToolCalls))
		for k := range m.ToolCalls {
			c := &m.ToolCalls[k]
			answers[k] = model.Message{Role: model.RoleTool, ToolName: c.Name, Text: prompt.LostResult, IsError: true}
			if rs := results[c.ID]; len(rs) > 0 {
				answers[k], results[c.ID] = rs[0], rs[1:]
			}
			c.ID = freeID(c.ID, r.used, len(r.out), k)
			answers[k].ToolCallID = c.ID
		}
		r.out = append(append(r.out, m), answers...)
	}
	r.seen = len(messages)
	return slices.Clip(r.out) // whoever appends to it makes a copy
}

// reset begins anew. What was returned before stays as it is.
func (r *repairer) reset() { *r = repairer{} }

// freeID returns id, or one that is not used yet, and marks it as used.
func freeID(id string, used map[string]bool, message, position int) string {
	if strings.TrimSpace(id) == "" {
		id = ""
	}
	for n := position + 1; id == "" || used[id]; n++ {
		id = fmt.Sprintf("call_%d_%d", message, n)
	}
	used[id] = true
	return id
}

// replayable replaces names and arguments that no provider would take back. The
// model has read what was wrong with them in the result.
func replayable(calls []model.ToolCall) []model.ToolCall {
	out := make([]model.ToolCall, len(calls))
	for i, c := range calls {
		if strings.TrimSpace(c.Name) == "" {
			c.Name = unnamed
		}
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
