package event

import (
	"encoding/json"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// shaped is a record before ids and sequence are known.
type shaped struct {
	EventType string
	Category  string
	Content   map[string]any
	Metadata  map[string]any
}

// shape turns the raw data of a task event, with its type under "type", into
// the shape that is stored. chunk is any decoded JSON value with numbers as
// json.Number. What is malformed, or no task event, is refused: it never
// reaches a store.
func shape(chunk any) (shaped, bool) {
	c, ok := chunk.(map[string]any)
	if !ok {
		return shaped{}, false
	}
	typ, _ := c["type"].(string)
	taskID, _ := c["task_id"].(string)
	if !strings.HasPrefix(typ, "task_") || taskID == "" {
		return shaped{}, false
	}
	s := shaped{
		Category: contract.CategorySubagent,
		Content:  map[string]any{"task_id": taskID},
		Metadata: map[string]any{"task_id": taskID},
	}
	switch t := contract.EventType(typ); t {
	case contract.EventTaskStarted:
		s.EventType = contract.RecordStart
		switch d := c["description"].(type) {
		case nil:
			s.Content["description"] = nil
		case string:
			s.Content["description"], _ = Truncate(Sanitize(d), contract.MaxDescriptionChars)
		default:
			return shaped{}, false
		}
	case contract.EventTaskRunning:
		s.EventType = contract.RecordStep
		index, ok := wholeNumber(c["message_index"])
		message, isObject := c["message"].(map[string]any)
		if !ok || !isObject {
			return shaped{}, false
		}
		step := rawStep(message)
		s.Content["message_index"], s.Metadata["message_index"] = index, index
		s.Content["kind"], s.Content["text"], s.Content["truncated"] = step.Kind, step.Text, step.Truncated
		if step.Kind == contract.StepTool {
			s.Content["tool_name"] = step.ToolName
		} else {
			s.Content["tool_calls"] = step.ToolCalls
		}
	case contract.EventTaskCompleted, contract.EventTaskFailed, contract.EventTaskCancelled, contract.EventTaskTimedOut:
		s.EventType = contract.RecordEnd
		s.Content["status"] = strings.TrimPrefix(typ, "task_")
		if name, _ := c["model_name"].(string); strings.TrimSpace(name) != "" {
			s.Content["model_name"] = boundName(strings.TrimSpace(name))
		}
		if u, ok := rawUsage(c["usage"]); ok {
			s.Content["usage"] = u
		}
		for _, key := range []string{"result", "error"} {
			if c[key] == nil {
				continue
			}
			text, cut := Truncate(Sanitize(anyText(c[key])), contract.MaxStepChars)
			s.Content[key] = text
			if cut {
				s.Content[key+"_truncated"] = true
			}
		}
	default:
		return shaped{}, false
	}
	return s, true
}

// rawStep bounds a message as it comes over the wire: our own step ({kind, text,
// truncated, tool_calls|tool_name}) or a provider's message ({type, content,
// tool_calls, name}). Whatever is not a tool's message is shaped as an assistant's.
func rawStep(m map[string]any) contract.Step {
	kind, ours := m["kind"].(string)
	content := m["content"]
	toolName := m["name"]
	if ours {
		content, toolName = m["text"], m["tool_name"]
	} else {
		kind, _ = m["type"].(string)
	}
	text, cut := Truncate(Sanitize(contentText(content)), contract.MaxStepChars)
	step := contract.Step{Kind: contract.StepAI, Text: text, Truncated: cut || ours && m["truncated"] == true}
	if kind == contract.StepTool {
		step.Kind = contract.StepTool
		if name, ok := toolName.(string); ok {
			name = boundName(name)
			step.ToolName = &name
		}
		return step
	}
	step.ToolCalls = []contract.StepCall{}
	calls, _ := m["tool_calls"].([]any)
	budget := maxStepArgsChars
	for _, e := range calls {
		c, ok := e.(map[string]any)
		if !ok {
			continue
		}
		if len(step.ToolCalls) == maxStepCalls {
			step.Truncated = true
			break
		}
		name, _ := c["name"].(string)
		call := stepCall(name, c["args"], &budget)
		call.ArgsTruncated = call.ArgsTruncated || ours && c["args_truncated"] == true
		step.ToolCalls = append(step.ToolCalls, call)
	}
	return step
}

// wholeNumber accepts a number that is written as a whole one, 0 or more. 1.0,
// true and "1" are not.
func wholeNumber(v any) (int64, bool) {
	n, ok := v.(json.Number)
	if !ok {
		return 0, false
	}
	i, err := strconv.ParseInt(n.String(), 10, 64)
	return i, err == nil && i >= 0
}

// rawUsage takes over usage that is whole: three figures, each a whole number, and
// the cost if there is one. One bad figure drops the block, because a guess is worse
// than nothing.
func rawUsage(v any) (map[string]any, bool) {
	m, ok := v.(map[string]any)
	if !ok {
		return nil, false
	}
	u := map[string]any{}
	for _, key := range []string{"input_tokens", "output_tokens", "total_tokens"} {
		n, ok := wholeNumber(m[key])
		if !ok {
			return nil, false
		}
		u[key] = n
	}
	if n, ok := m["cost_usd"].(json.Number); ok {
		if cost, err := n.Float64(); err == nil && cost >= 0 {
			u["cost_usd"] = contract.Money(cost)
		}
	}
	return u, true
}

// anyText is v as text: a string as it is, anything else as its JSON.
func anyText(v any) string {
	if s, ok := v.(string); ok {
		return s
	}
	return string(encode(v))
}

// Additions that a record takes over from an event's data as they are, when
// they have the right type.
var (
	startedExtras = fields{texts: []string{"subagent_type", "model_name", "executor"}, numbers: []string{"max_turns", "timeout_seconds"}}
	queuedExtras  = fields{texts: []string{"subagent_type", "description"}, numbers: []string{"queue_position"}}
	grantedExtras = fields{texts: []string{"pool"}, numbers: []string{"slot", "waited_ms"}}
	endExtras     = fields{
		texts: []string{"error_code", "stop_reason"}, numbers: []string{"duration_ms", "queue_ms"},
		flags: []string{"result_truncated", "error_truncated", "admission_failure"},
	}
)

type fields struct{ texts, numbers, flags []string }

func (f fields) copy(to, from map[string]any) {
	for _, k := range f.texts {
		if s, ok := from[k].(string); ok {
			to[k], _ = Truncate(Sanitize(s), contract.MaxDescriptionChars)
		}
	}
	for _, k := range f.numbers {
		if n, ok := wholeNumber(from[k]); ok {
			to[k] = n
		}
	}
	for _, k := range f.flags {
		if from[k] == true {
			to[k] = true
		}
	}
}

// runRecords maps the events of a run to their records.
var runRecords = map[contract.EventType]string{
	contract.EventRunStarted:   contract.RecordRunStarted,
	contract.EventRunMessage:   contract.RecordRunMessage,
	contract.EventRunCompleted: contract.RecordRunCompleted,
	contract.EventRunFailed:    contract.RecordRunFailed,
	contract.EventRunCancelled: contract.RecordRunCancelled,
}

// Record turns an event with its sequence in the stream into the record that
// the event store keeps and the feeds send. It reports false for what must not
// be stored: unknown types, data that breaks its type's shape, ids that no
// subject can have. What had to be replaced to make the data storable is told
// by "sanitized" in the metadata.
func Record(ev envelope.Event, seq uint64) (contract.EventRecord, bool) {
	rec := contract.EventRecord{
		Seq: seq, EventID: ev.ID, Tenant: ev.Tenant, ThreadID: ev.ThreadID, RunID: ev.RunID, TaskID: ev.TaskID,
		CreatedAt: ev.Time.UTC(),
	}
	if !plainID(ev.ID) || ev.Tenant.Validate() != nil || ev.ThreadID.Validate() != nil || ev.RunID.Validate() != nil {
		return rec, false
	}
	raw, sanitized := SanitizeJSON(ev.Data)
	v, err := decode(raw)
	data, ok := v.(map[string]any)
	if err != nil || !ok {
		return rec, false
	}
	s, ok := shapeEvent(ev, data)
	if !ok {
		return rec, false
	}
	if strings.HasPrefix(string(ev.Type), "task_") {
		id := contract.TaskID(s.Content["task_id"].(string))
		if ev.TaskID != "" && ev.TaskID != id || id.Validate() != nil {
			return rec, false
		}
		rec.TaskID = id
	}
	if ev.Attempt > 0 {
		s.Metadata["attempt"] = ev.Attempt
	}
	if sanitized {
		s.Metadata["sanitized"] = true
	}
	rec.EventType, rec.Category = s.EventType, s.Category
	rec.Content, rec.Metadata = encode(s.Content), encode(s.Metadata)
	return rec, true
}

// Live is [Record] for those who follow along: the metadata of a step also has
// the usage so far. Live counters stay off the store (EVT-09); what they come to
// is in the end record.
func Live(ev envelope.Event, seq uint64) (contract.EventRecord, bool) {
	rec, ok := Record(ev, seq)
	if !ok || rec.EventType != contract.RecordStep {
		return rec, ok
	}
	var data struct {
		Usage *contract.Usage `json:"usage"`
	}
	metadata, err := decode(rec.Metadata)
	m, isObject := metadata.(map[string]any)
	if err != nil || !isObject || json.Unmarshal(ev.Data, &data) != nil || data.Usage == nil {
		return rec, true
	}
	m["usage"] = data.Usage
	rec.Metadata = encode(m)
	return rec, true
}

func shapeEvent(ev envelope.Event, data map[string]any) (shaped, bool) {
	if typ, ok := runRecords[ev.Type]; ok {
		s := shaped{EventType: typ, Category: contract.CategoryRun, Content: data, Metadata: map[string]any{}}
		if ev.Type != contract.EventRunMessage {
			return s, true
		}
		index, ok := wholeNumber(data["message_index"])
		s.Metadata["message_index"] = index
		return s, ok
	}
	data["type"] = string(ev.Type)
	switch ev.Type {
	case contract.EventTaskQueued, contract.EventTaskAdmitted:
		id, _ := data["task_id"].(string)
		s := shaped{
			EventType: contract.RecordQueued, Category: contract.CategorySubagent,
			Content: map[string]any{"task_id": id}, Metadata: map[string]any{"task_id": id},
		}
		extras := queuedExtras
		if ev.Type == contract.EventTaskAdmitted {
			s.EventType, extras = contract.RecordAdmitted, grantedExtras
		}
		extras.copy(s.Content, data)
		return s, id != ""
	}
	s, ok := shape(data)
	if !ok {
		return s, false
	}
	switch s.EventType {
	case contract.RecordStart:
		startedExtras.copy(s.Content, data)
	case contract.RecordEnd:
		endExtras.copy(s.Content, data)
	}
	return s, true
}

// plainID reports whether id can be a key and a header value.
func plainID(id string) bool {
	return id != "" && len(id) <= 256 && utf8.ValidString(id) && strings.IndexFunc(id, unicode.IsControl) < 0
}
