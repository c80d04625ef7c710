package vectors

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// STEP-05, STEP-06, STEP-07, STEP-08, EVT-10
func runStepTruncation(t *testing.T, c vectorCase) {
	in := into[struct {
		Op      string         `json:"op"`
		Message map[string]any `json:"message"`
		Text    string         `json:"text"`
		Max     int            `json:"max"`
	}](t, c.inputs)
	switch in.Op {
	case "truncate":
		want := c.object(t, "text", "truncated")
		got, cut := event.Truncate(in.Text, in.Max)
		equal(t, "text", got, want["text"])
		equal(t, "truncated", cut, want["truncated"])
	case "build":
		want := c.object(t, "kind", "text", "truncated", "tool_name", "tool_calls")
		rec, ok := record(t, map[string]any{"type": "task_running", "task_id": "c1", "message_index": 1, "message": in.Message})
		if !ok {
			t.Fatal("the event of the step was refused")
		}
		compareStep(t, "stored: ", plain(t, rec.Content).(map[string]any), want)
		if msg, ok := toMessage(t, in.Message); ok {
			compareStep(t, "made: ", plain(t, event.BuildStep(msg)).(map[string]any), want)
		}
	default:
		t.Fatalf("unknown op %q", in.Op)
	}
}

// toMessage is a provider's message as the loop has it once its provider's package
// has read it. A list of blocks is not: that package makes one text of it.
func toMessage(t *testing.T, m map[string]any) (model.Message, bool) {
	t.Helper()
	kind, _ := m["type"].(string)
	name, _ := m["name"].(string)
	msg := model.Message{Role: model.Role(kind), ToolName: name}
	switch content := m["content"].(type) {
	case nil:
	case string:
		msg.Text = content
	default:
		return msg, false
	}
	calls, _ := m["tool_calls"].([]any)
	for _, c := range calls {
		call, isObject := c.(map[string]any)
		if !isObject {
			return msg, false
		}
		args, isText := call["args"].(string)
		if !isText {
			b, err := json.Marshal(call["args"])
			if err != nil {
				t.Fatal(err)
			}
			args = string(b)
		}
		name, _ := call["name"].(string)
		id, _ := call["id"].(string)
		msg.ToolCalls = append(msg.ToolCalls, model.ToolCall{ID: id, Name: name, Args: args})
	}
	return msg, true
}

// record is what the store makes of the data of an event, its type under "type".
func record(t *testing.T, chunk any) (contract.EventRecord, bool) {
	t.Helper()
	data, err := json.Marshal(chunk)
	if err != nil {
		t.Fatal(err)
	}
	var typ string
	if m, ok := chunk.(map[string]any); ok {
		typ, _ = m["type"].(string)
	}
	return event.Record(envelope.Event{
		ID: "e1", Type: contract.EventType(typ), Tenant: contract.DefaultTenant, ThreadID: "thread", RunID: "r1", Time: time.Unix(1, 0), Data: data,
	}, 1)
}

func compareStep(t *testing.T, where string, got, want map[string]any) {
	t.Helper()
	for key, w := range want {
		g, ok := got[key]
		if !ok {
			t.Errorf("%sstep has no %s", where, key)
		} else if key == "tool_calls" {
			compareCalls(t, g.([]any), w.([]any))
		} else {
			equal(t, where+key, g, w)
		}
	}
}

// compareCalls compares what is expected of each call; args_truncated that is
// not mentioned is false.
func compareCalls(t *testing.T, got, want []any) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d calls, want %d", len(got), len(want))
	}
	for i := range want {
		g, w := got[i].(map[string]any), want[i].(map[string]any)
		where := fmt.Sprintf("call %d: ", i)
		truncated := false
		for key, v := range w {
			switch key {
			case "name", "args":
				equal(t, where+key, g[key], v)
			case "args_chars":
				s, ok := g["args"].(string)
				if !ok {
					t.Errorf("%sargs are %T, want a cut string", where, g["args"])
				}
				equal(t, where+key, utf8.RuneCountInString(s), v)
			case "args_truncated":
				truncated = v.(bool)
			default:
				t.Fatalf("%sexpected has key %q, which nothing checks", where, key)
			}
		}
		equal(t, where+"args_truncated", g["args_truncated"] == true, truncated)
		if _, ok := g["id"]; ok {
			t.Errorf("%sthe id is carried", where)
		}
	}
}

// STEP-01, STEP-02, STEP-03, STEP-04
func runStepCapture(t *testing.T, c vectorCase) {
	in := into[struct {
		Snapshots [][][3]*string `json:"snapshots"`
	}](t, c.inputs)
	want := c.object(t, "captured", "cursors")
	var capture event.Capture
	captured, cursors := []any{}, []int{}
	for _, snapshot := range in.Snapshots {
		var history []model.Message
		for _, m := range snapshot {
			history = append(history, model.Message{Role: toRole(t, text(m[0])), ID: text(m[1]), Text: text(m[2])})
		}
		steps, cursor := capture.Snapshot(history...)
		for _, s := range steps {
			kind := "ai"
			if s.Message.Role == model.RoleTool {
				kind = "tool"
			}
			captured = append(captured, []any{kind, orNull(s.Message.ID), s.Message.Text})
			if s.Index != len(captured) {
				t.Errorf("index = %d, want %d", s.Index, len(captured))
			}
		}
		cursors = append(cursors, cursor)
	}
	equal(t, "captured", captured, want["captured"])
	if w, ok := want["cursors"]; ok || !c.redesign {
		equal(t, "cursors", cursors, w)
	}
}

// EVT-01 to EVT-11
func runLifecycleEvents(t *testing.T, c vectorCase) {
	in := into[struct {
		Chunk any `json:"chunk"`
	}](t, c.inputs)
	chunk := c.inputs.(map[string]any)["chunk"] // with the form of its numbers
	got, ok := record(t, chunk)
	if c.expected == nil {
		if ok {
			t.Errorf("%s is stored as %s, want it refused", short(in.Chunk), short(got.Content))
		}
		return
	}
	want := c.object(t, "event_type", "category", "content", "metadata")
	if fields, isObject := chunk.(map[string]any); isObject && !ok {
		// EVT-08: a task id that no subject can have is refused here, blank ones among
		// them; everything else of such a case counts.
		if id, isText := fields["task_id"].(string); isText && contract.TaskID(id).Validate() != nil {
			const plainID = "c1"
			fields["task_id"] = plainID
			for _, key := range []string{"content", "metadata"} {
				if m, ok := want[key].(map[string]any); ok && m["task_id"] == id {
					m["task_id"] = plainID
				}
			}
			got, ok = record(t, fields)
		}
	}
	if !ok {
		t.Fatalf("%s was refused", short(in.Chunk))
	}
	if _, told := want["category"]; !told {
		want["category"] = "subagent"
	}
	equal(t, "event_type", got.EventType, want["event_type"])
	equal(t, "category", got.Category, want["category"])
	equal(t, "metadata", got.Metadata, want["metadata"])
	equal(t, "content", withFlags(plain(t, got.Content)), withFlags(plain(t, want["content"])))
}

// withFlags writes args_truncated out where it is left out for false.
func withFlags(content any) any {
	m, _ := content.(map[string]any)
	calls, _ := m["tool_calls"].([]any)
	for _, c := range calls {
		if call, ok := c.(map[string]any); ok && call["args_truncated"] == nil {
			call["args_truncated"] = false
		}
	}
	return content
}

// flat is the content of a provider's message as one text, as the packages of the
// providers make it: the texts of its blocks, a line each.
func flat(content any) string {
	blocks, isList := content.([]any)
	if !isList {
		s, _ := content.(string)
		return s
	}
	var parts []string
	for _, b := range blocks {
		s, _ := b.(string)
		if m, ok := b.(map[string]any); ok {
			s, _ = m["text"].(string)
		}
		if s != "" {
			parts = append(parts, s)
		}
	}
	return strings.Join(parts, "\n")
}
