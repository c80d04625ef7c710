package vectors

import (
	"fmt"
	"testing"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/model"
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
		got := plain(t, event.RawStep(in.Message)).(map[string]any)
		for key, w := range want {
			g, ok := got[key]
			if !ok {
				t.Errorf("step has no %s", key)
			} else if key == "tool_calls" {
				compareCalls(t, g.([]any), w.([]any))
			} else {
				equal(t, key, g, w)
			}
		}
	default:
		t.Fatalf("unknown op %q", in.Op)
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
		for _, s := range capture.Snapshot(history) {
			kind := "ai"
			if s.Message.Role == model.RoleTool {
				kind = "tool"
			}
			captured = append(captured, []any{kind, orNull(s.Message.ID), s.Message.Text})
			if s.Index != len(captured) {
				t.Errorf("index = %d, want %d", s.Index, len(captured))
			}
		}
		cursors = append(cursors, capture.Cursor())
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
	got, ok := event.Shape(chunk)
	if c.expected == nil {
		if ok {
			t.Errorf("Shape(%s) = %s, want it refused", short(in.Chunk), short(got.Content))
		}
		return
	}
	want := c.object(t, "event_type", "category", "content", "metadata")
	if !ok {
		t.Fatalf("Shape(%s) was refused", short(in.Chunk))
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
