package event

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Bounds that keep a step with very many calls small enough for one event.
const (
	maxStepCalls     = 256   // calls kept of one message
	maxStepArgsChars = 65536 // arguments of all calls of a message together
	maxNameChars     = 128   // the name of a tool or model
)

// BuildStep bounds a message for display and storage; the agent's own context
// is not touched by it. Text and each call's arguments keep at most
// [contract.MaxStepChars] code points. Arguments that are a JSON object stay
// structured unless their encoding is longer than that; anything else becomes a
// JSON string. Ids of calls are not carried.
func BuildStep(m model.Message) contract.Step {
	text, cut := Truncate(Sanitize(m.Text), contract.MaxStepChars)
	step := contract.Step{Kind: contract.StepAI, Text: text, Truncated: cut}
	if m.Role == model.RoleTool {
		step.Kind = contract.StepTool
		if m.ToolName != "" {
			name := boundName(m.ToolName)
			step.ToolName = &name
		}
		return step
	}
	step.ToolCalls = []contract.StepCall{}
	budget := maxStepArgsChars
	for i, c := range m.ToolCalls {
		if i == maxStepCalls {
			step.Truncated = true
			break
		}
		step.ToolCalls = append(step.ToolCalls, stepCall(c.Name, modelArgs(c.Args), &budget))
	}
	return step
}

// modelArgs reads arguments as a model wrote them: an object structured,
// anything else as the text that it is.
func modelArgs(args string) any {
	raw := bytes.TrimSpace([]byte(args))
	if len(raw) > 0 && raw[0] == '{' && json.Valid(raw) && contract.CheckDepth(raw, contract.MaxDepth) == nil {
		return json.RawMessage(raw)
	}
	return args
}

// stepCall bounds one call. args is a string, a json.RawMessage or a decoded
// value; budget is what is left for the arguments of the whole message.
func stepCall(name string, args any, budget *int) contract.StepCall {
	call := contract.StepCall{Name: boundName(name)}
	var text string // what the limit counts
	isText := false
	switch a := args.(type) {
	case string:
		text, isText = Sanitize(a), true
	case json.RawMessage:
		var b bytes.Buffer
		clean, _ := SanitizeJSON(a)
		if err := json.Compact(&b, clean); err != nil {
			text, isText = Sanitize(string(a)), true
			break
		}
		text = b.String()
	default:
		text = string(encode(clean(a)))
	}
	text, call.ArgsTruncated = Truncate(text, min(contract.MaxStepChars, *budget))
	if isText || call.ArgsTruncated {
		call.Args = encode(text)
	} else {
		call.Args = json.RawMessage(text)
	}
	*budget -= utf8.RuneCountInString(text)
	return call
}

func boundName(name string) string {
	name, _ = Truncate(Sanitize(name), maxNameChars)
	return name
}

// boundStep makes a step that somebody else built fit the bounds, so that an
// event made from it can always be encoded.
func boundStep(s contract.Step) contract.Step {
	text, cut := Truncate(Sanitize(s.Text), contract.MaxStepChars)
	out := contract.Step{Kind: contract.StepAI, Text: text, Truncated: s.Truncated || cut}
	if s.Kind == contract.StepTool {
		out.Kind = contract.StepTool
		if s.ToolName != nil {
			name := boundName(*s.ToolName)
			out.ToolName = &name
		}
		return out
	}
	out.ToolCalls = []contract.StepCall{}
	budget := maxStepArgsChars
	for i, c := range s.ToolCalls {
		if i == maxStepCalls {
			out.Truncated = true
			break
		}
		b := stepCall(c.Name, rawArgs(c.Args), &budget)
		b.ArgsTruncated = b.ArgsTruncated || c.ArgsTruncated
		out.ToolCalls = append(out.ToolCalls, b)
	}
	return out
}

// rawArgs reads the arguments of a step: a JSON string counts as its text,
// everything else as its encoding; what is no JSON at all is text.
func rawArgs(raw json.RawMessage) any {
	if len(raw) == 0 {
		return nil
	}
	if !json.Valid(raw) || contract.CheckDepth(raw, contract.MaxDepth) != nil {
		return string(raw)
	}
	var text string
	if bytes.TrimSpace(raw)[0] == '"' && json.Unmarshal(raw, &text) == nil {
		return text
	}
	return raw
}
