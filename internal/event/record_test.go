package event

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// EVT-02, EVT-03, EVT-04, EVT-06, EVT-09, EVT-20: what is stored of each event
// of a life, in the names that readers know.
func TestRecord(t *testing.T) {
	t.Parallel()
	want := map[string]struct{ typ, category, content, metadata string }{
		"t_1.0.task_queued":   {"subagent.queued", "subagent", `{"description":"find it","queue_position":3,"subagent_type":"general-purpose","task_id":"t_1"}`, `{"task_id":"t_1"}`},
		"t_1.2.task_admitted": {"subagent.admitted", "subagent", `{"slot":1,"task_id":"t_1","waited_ms":2000}`, `{"attempt":2,"task_id":"t_1"}`},
		"t_1.2.task_started": {"subagent.start", "subagent",
			`{"description":"find it","executor":"ex-1","max_turns":5,"model_name":"main","subagent_type":"general-purpose","task_id":"t_1","timeout_seconds":9}`, `{"attempt":2,"task_id":"t_1"}`},
		"t_1.2.task_running.1": {"subagent.step", "subagent",
			`{"kind":"ai","message_index":1,"task_id":"t_1","text":"x","tool_calls":[{"name":"ls","args":{"a":1}}],"truncated":false}`, `{"attempt":2,"message_index":1,"task_id":"t_1"}`},
		"t_1.2.task_running.2": {"subagent.step", "subagent",
			`{"kind":"tool","message_index":2,"task_id":"t_1","text":"y","tool_name":"bash","truncated":false}`, `{"attempt":2,"message_index":2,"task_id":"t_1"}`},
		"t_1.end":                {"subagent.end", "subagent", `{"duration_ms":3000,"model_name":"main","queue_ms":2000,"status":"completed","task_id":"t_1"}`, `{"attempt":2,"task_id":"t_1"}`},
		"t_1.end (failed)":       {"subagent.end", "subagent", `{"duration_ms":3000,"model_name":"main","queue_ms":2000,"status":"failed","task_id":"t_1"}`, `{"attempt":2,"task_id":"t_1"}`},
		"t_1.end (timed_out)":    {"subagent.end", "subagent", `{"duration_ms":3000,"model_name":"main","queue_ms":2000,"status":"timed_out","task_id":"t_1"}`, `{"attempt":2,"task_id":"t_1"}`},
		"t_1.end (cancelled)":    {"subagent.end", "subagent", `{"duration_ms":3000,"model_name":"main","queue_ms":2000,"status":"cancelled","task_id":"t_1"}`, `{"attempt":2,"task_id":"t_1"}`},
		"r_1.run_started":        {"run.started", "run", `{"input":"do it","lead":"lead-1","model_name":"main","run_id":"r_1"}`, `{}`},
		"r_1.run_message.1":      {"run.message", "run", `{"message":{"kind":"ai","text":"z","tool_calls":[],"truncated":false},"message_index":1,"model_name":"main","run_id":"r_1","usage":{"input_tokens":1,"output_tokens":2,"total_tokens":3}}`, `{"message_index":1}`},
		"r_1.end":                {"run.completed", "run", `{"duration_ms":1000,"model_name":"main","run_id":"r_1","status":"completed"}`, `{}`},
		"r_1.end (run_failed)":   {"run.failed", "run", `{"duration_ms":1000,"model_name":"main","run_id":"r_1","status":"failed"}`, `{}`},
		"r_1.end (run_canceled)": {"run.cancelled", "run", `{"duration_ms":1000,"model_name":"main","run_id":"r_1","status":"cancelled"}`, `{}`},
	}
	for id, ev := range everyEvent(t) {
		w, ok := want[id]
		if !ok {
			t.Fatalf("nothing is expected of %s", id)
		}
		b, err := envelope.Encode(ev)
		if err != nil {
			t.Fatal(err)
		}
		back, err := envelope.Decode(b)
		if err != nil {
			t.Fatal(err)
		}
		rec, ok := Record(back, 42)
		if !ok {
			t.Errorf("%s was refused", id)
			continue
		}
		if rec.EventType != w.typ || rec.Category != w.category || string(rec.Content) != w.content || string(rec.Metadata) != w.metadata {
			t.Errorf("%s:\n got %s %s %s %s\nwant %s %s %s %s", id, rec.EventType, rec.Category, rec.Content, rec.Metadata, w.typ, w.category, w.content, w.metadata)
		}
		if rec.Seq != 42 || rec.EventID != ev.ID || rec.Tenant != "default" || rec.ThreadID != "thread one" || rec.RunID != "r_1" || rec.TaskID != ev.TaskID || !rec.CreatedAt.Equal(ev.Time) {
			t.Errorf("%s: record = %+v", id, rec)
		}
		if len(rec.EventType) > 32 || len(rec.Category) > 16 { // EVT-10
			t.Errorf("%s: names too long: %s %s", id, rec.EventType, rec.Category)
		}
	}
}

// EVT-05: flags of a cut, usage and what we add survive the way into the store.
func TestRecordOfAnEnd(t *testing.T) {
	t.Parallel()
	rec := record(contract.StateFailed)
	rec.Error, rec.ErrorCode, rec.StopReason = strings.Repeat("e", 9000), contract.ErrLLM, contract.StopTurnCapped
	cost := contract.Money(0.25)
	rec.Usage = &contract.Usage{InputTokens: 1, OutputTokens: 2, TotalTokens: 3, CacheReadTokens: 1, CostUSD: &cost}
	got, ok := Record(must(t)(Terminal(rec, source)), 1)
	if !ok {
		t.Fatal("refused")
	}
	var c map[string]any
	if err := json.Unmarshal(got.Content, &c); err != nil {
		t.Fatal(err)
	}
	if c["error_truncated"] != true || len(c["error"].(string)) != 8192 || c["error_code"] != "llm_error" || c["stop_reason"] != "turn_capped" {
		t.Errorf("content = %.300s", got.Content)
	}
	if u, _ := json.Marshal(c["usage"]); string(u) != `{"cost_usd":0.25,"input_tokens":1,"output_tokens":2,"total_tokens":3}` {
		t.Errorf("usage = %s", u)
	}
}

// EVT-01, EVT-03, EVT-07, EVT-08: what no store should see.
func TestRecordRefuses(t *testing.T) {
	t.Parallel()
	good := envelope.Event{ID: "e1", Source: "/s", Type: contract.EventTaskCompleted, Tenant: "default", ThreadID: "th", RunID: "r", TaskID: "t", Data: json.RawMessage(`{"task_id":"t"}`)}
	if _, ok := Record(good, 1); !ok {
		t.Fatal("the good one is refused")
	}
	for name, change := range map[string]func(*envelope.Event){
		"unknown type":  func(e *envelope.Event) { e.Type = "task_paused" },
		"foreign type":  func(e *envelope.Event) { e.Type = "token" },
		"other task":    func(e *envelope.Event) { e.TaskID = "u" },
		"no task id":    func(e *envelope.Event) { e.Data = json.RawMessage(`{}`) },
		"blank task id": func(e *envelope.Event) { e.TaskID, e.Data = "", json.RawMessage(`{"task_id":" "}`) },
		"number as id":  func(e *envelope.Event) { e.Data = json.RawMessage(`{"task_id":7}`) },
		"no object":     func(e *envelope.Event) { e.Data = json.RawMessage(`[1]`) },
		"no json":       func(e *envelope.Event) { e.Data = json.RawMessage(`{`) },
		"no data":       func(e *envelope.Event) { e.Data = nil },
		"too deep": func(e *envelope.Event) {
			e.Data = json.RawMessage(`{"task_id":"t","x":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `}`)
		},
		"no event id":      func(e *envelope.Event) { e.ID = "" },
		"line break in id": func(e *envelope.Event) { e.ID = "a\nb" },
		"no thread":        func(e *envelope.Event) { e.ThreadID = "" },
		"no run":           func(e *envelope.Event) { e.RunID = "" },
		"bad tenant":       func(e *envelope.Event) { e.Tenant = "a.b" },
		"step without message": func(e *envelope.Event) {
			e.Type, e.Data = contract.EventTaskRunning, json.RawMessage(`{"task_id":"t","message_index":1}`)
		},
		"step with a float": func(e *envelope.Event) {
			e.Type, e.Data = contract.EventTaskRunning, json.RawMessage(`{"task_id":"t","message_index":1.0,"message":{}}`)
		},
		"message without index": func(e *envelope.Event) {
			e.Type, e.Data = contract.EventRunMessage, json.RawMessage(`{"run_id":"r","message":{}}`)
		},
		"queued without id": func(e *envelope.Event) { e.Type, e.Data = contract.EventTaskQueued, json.RawMessage(`{}`) },
	} {
		ev := good
		change(&ev)
		if rec, ok := Record(ev, 1); ok {
			t.Errorf("%s: stored as %+v", name, rec)
		}
	}
}

// What had to be replaced is visible and marked; honest backslashes stay.
func TestRecordSanitizes(t *testing.T) {
	t.Parallel()
	ev := envelope.Event{ID: "e1", Source: "/s", Type: contract.EventRunStarted, Tenant: "default", ThreadID: "th", RunID: "r",
		Data: json.RawMessage(`{"input":"nul \u0000 honest \\u0000","k\u0000":["\ud800"]}`)}
	rec, ok := Record(ev, 1)
	if !ok {
		t.Fatal("refused")
	}
	if want := `{"input":"nul ` + "\ufffd" + ` honest \\u0000","k` + "\ufffd" + `":["` + "\ufffd" + `"]}`; string(rec.Content) != want {
		t.Errorf("content = %s, want %s", rec.Content, want)
	}
	if string(rec.Metadata) != `{"sanitized":true}` {
		t.Errorf("metadata = %s, want the mark", rec.Metadata)
	}
}

// EVT-01, EVT-11: Shape judges raw data of any form.
func TestShapeRefusesWhatIsNoObject(t *testing.T) {
	t.Parallel()
	for _, chunk := range []any{nil, "task_completed", json.Number("1"), []any{}, true} {
		if _, ok := shape(chunk); ok {
			t.Errorf("shape(%v) was accepted", chunk)
		}
	}
	s, ok := shape(map[string]any{"type": "task_completed", "task_id": "t", "result": map[string]any{"a": json.Number("1.0")}})
	if !ok || s.Content["result"] != `{"a":1.0}` {
		t.Errorf("content = %v, want the result as text", s.Content)
	}
	// EVT-05: a blank model name is none.
	if s, ok = shape(map[string]any{"type": "task_failed", "task_id": "t", "model_name": " "}); !ok || len(s.Content) != 2 {
		t.Errorf("content = %v, want task id and status alone", s.Content)
	}
}

func FuzzRecord(f *testing.F) {
	for _, s := range []string{
		`{"task_id":"t","message_index":1,"message":{"kind":"ai","text":"x","tool_calls":[{"name":"a","args":{}}]}}`,
		`{"task_id":"t","message_index":1,"message":{"type":"tool","content":["a",{"text":"b"}],"name":null}}`,
		`{"task_id":"t","status":"failed","error":{"a":1}}`,
		`{"task_id":"t","description":"\u0000","slot":1}`, `[]`, `{`,
	} {
		f.Add(uint8(3), []byte(s))
	}
	types := append(contract.EventTypes(), "task_paused", "")
	f.Fuzz(func(t *testing.T, typ uint8, raw []byte) {
		ev := envelope.Event{ID: "e", Source: "/s", Type: types[int(typ)%len(types)], Tenant: "default", ThreadID: "th", RunID: "r", Data: raw}
		rec, ok := Record(ev, 1)
		if !ok {
			return
		}
		if !json.Valid(rec.Content) || !json.Valid(rec.Metadata) {
			t.Fatalf("record is no JSON: %q %q", rec.Content, rec.Metadata)
		}
		if _, changed := SanitizeJSON(rec.Content); changed {
			t.Fatalf("record is not clean: %q", rec.Content)
		}
	})
}

// I1, I2: a slot is one of its pool, so that the event says which; of the default
// pool it says nothing, as before there were others.
func TestRecordOfASlot(t *testing.T) {
	t.Parallel()
	for pool, want := range map[contract.Pool]any{"": nil, contract.DefaultPool: nil, "gpu": "gpu"} {
		rec := record(contract.StateGranted)
		rec.Pool = pool
		got, ok := Record(Admitted(rec, source, *rec.GrantedAt), 1)
		var c map[string]any
		if err := json.Unmarshal(got.Content, &c); err != nil || !ok {
			t.Fatal(ok, err)
		}
		if c["pool"] != want {
			t.Errorf("pool %q is told as %v, want %v", pool, c["pool"], want)
		}
	}
}
