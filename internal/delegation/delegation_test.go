package delegation

import (
	"crypto/sha256"
	"encoding/hex"
	"reflect"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

func ptr[T any](v T) *T { return &v }

// CAP-01, CAP-02: one number, whatever was asked for.
func TestClamp(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		requested, frozen *int
		want              int
	}{
		{nil, nil, 3}, {nil, ptr(5), 5}, {nil, ptr(0), 1}, {nil, ptr(-4), 1}, {nil, ptr(65), 64},
		{ptr(0), ptr(3), 1}, {ptr(-1), nil, 1}, {ptr(3), ptr(3), 3}, {ptr(4), ptr(3), 3}, {ptr(64), ptr(100), 64}, {ptr(2), nil, 2},
	} {
		if got := Clamp(c.requested, c.frozen); got != c.want {
			t.Errorf("Clamp(%v, %v) = %d, want %d", show(c.requested), show(c.frozen), got, c.want)
		}
	}
}

// CAP-03: the number follows the frozen capacity alone; a request above it never
// gets more.
func TestClampNeverPromisesMoreThanThereIs(t *testing.T) {
	t.Parallel()
	for frozen := -2; frozen < 80; frozen++ {
		for requested := -2; requested < 80; requested++ {
			got := Clamp(&requested, &frozen)
			if got < 1 || got > MaxPerResponse || got > max(1, frozen) {
				t.Fatalf("Clamp(%d, %d) = %d", requested, frozen, got)
			}
		}
	}
}

func show(p *int) any {
	if p == nil {
		return nil
	}
	return *p
}

// CAP-06, CAP-07
func TestMaxTotal(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		configured, override *int
		want                 int
	}{{nil, nil, 6}, {ptr(9), nil, 9}, {ptr(9), ptr(0), 1}, {ptr(9), ptr(-3), 1}, {nil, ptr(51), 50}, {nil, ptr(50), 50}, {ptr(9), ptr(2), 2}} {
		if got := MaxTotal(c.configured, c.override); got != c.want {
			t.Errorf("MaxTotal(%v, %v) = %d, want %d", show(c.configured), show(c.override), got, c.want)
		}
	}
	for n, ok := range map[int]bool{0: false, 1: true, 50: true, 51: false, -1: false} {
		if err := CheckMaxTotal(n); (err == nil) != ok {
			t.Errorf("CheckMaxTotal(%d) = %v", n, err)
		}
	}
}

// CAP-08, CAP-09, CAP-10: distinct ids of this run; an unknown run counts all.
func TestUsed(t *testing.T) {
	t.Parallel()
	ledger := []Entry{{"a", "r1"}, {"a", "r1"}, {"b", "r1"}, {"", "r1"}, {"c", "r0"}, {"d", ""}}
	for run, want := range map[string]int{"r1": 2, "r0": 1, "r9": 0, "": 4} {
		n, unknown := Used(ledger, run)
		if n != want || unknown != (run == "") {
			t.Errorf("Used(%q) = %d, %v, want %d", run, n, unknown, want)
		}
		if got := Remaining(1, ledger, run); got != max(0, 1-want) {
			t.Errorf("Remaining(%q) = %d", run, got)
		}
	}
}

func calls(names ...string) []model.ToolCall {
	var out []model.ToolCall
	for _, n := range names {
		name, id, _ := strings.Cut(n, ":")
		out = append(out, model.ToolCall{Name: name, ID: id})
	}
	return out
}

// CAP-05, CAP-12: position decides, not id; what is kept of the raw calls
// matches the kept calls one to one.
func TestTrimByPosition(t *testing.T) {
	t.Parallel()
	raw := []any{map[string]any{"id": "x"}, map[string]any{"id": "x"}, "odd", map[string]any{"id": 7}}
	m := model.Message{ID: "m", Role: model.RoleAssistant, ToolCalls: calls("task:x", "task:x"), FinishReason: "tool_calls",
		Metadata: map[string]any{RawToolCallsKey: raw, FunctionCallKey: "f"}}
	got, did := Trim(m, Limits{MaxConcurrent: 1, MaxTotal: 6, RunID: "r"})
	if len(got.ToolCalls) != 1 || len(did.Dropped) != 1 || got.ID != "m" || did.Capped || got.Text != "" {
		t.Errorf("got %+v, %+v", got, did)
	}
	if left := got.Metadata[RawToolCallsKey].([]any); len(left) != 1 || got.Metadata[FunctionCallKey] != "f" {
		t.Errorf("metadata = %v, want one raw call and the legacy key", got.Metadata)
	}
	if len(m.Metadata[RawToolCallsKey].([]any)) != 4 || len(m.ToolCalls) != 2 {
		t.Error("the caller's message was changed")
	}
}

// CAP-11, CAP-13, CAP-14: nothing left of the run's allowance: notice and stop
// reason even if other tools' calls survive, and then the finish reason stays.
func TestTrimExhausted(t *testing.T) {
	t.Parallel()
	l := Limits{MaxConcurrent: 3, MaxTotal: 1, Ledger: []Entry{{"a", "r"}}, RunID: "r"}
	m := model.Message{Role: model.RoleAssistant, Text: "plan", ToolCalls: calls("ls:l", "task:t"), FinishReason: "tool_calls",
		Metadata: map[string]any{FunctionCallKey: "f"}}
	got, did := Trim(m, l)
	if !did.Capped || did.StopReason != contract.StopSubagentCapped || got.Text != "plan\n\n"+LimitNotice || got.FinishReason != "tool_calls" || len(got.ToolCalls) != 1 {
		t.Errorf("got %+v, %+v", got, did)
	}
	if got.Metadata[FunctionCallKey] != "f" {
		t.Error("the legacy key goes only with the last call")
	}
	m.ToolCalls = calls("task:t")
	if got, _ = Trim(m, l); got.FinishReason != "stop" || got.Metadata[FunctionCallKey] != nil {
		t.Errorf("got %+v, want finish reason stop and no legacy key", got)
	}
	if did.Used != 1 || did.UnknownRun {
		t.Errorf("used %d, unknown run %v", did.Used, did.UnknownRun)
	}
}

// CAP-04, CAP-15: only a fresh answer is looked at, and dropped calls are told
// apart so that they are never counted.
func TestTrimLast(t *testing.T) {
	t.Parallel()
	over := model.Message{ID: "a", Role: model.RoleAssistant, ToolCalls: calls("task:1", "task:2")}
	l := Limits{MaxConcurrent: 1, MaxTotal: 6, RunID: "r"}
	for _, history := range [][]model.Message{nil, {over, {Role: model.RoleTool}}, {{Role: model.RoleTool, ToolCalls: over.ToolCalls}}} {
		if out, did := TrimLast(history, l); did.Changed || !reflect.DeepEqual(out, history) {
			t.Errorf("TrimLast(%+v) changed it", history)
		}
	}
	history := []model.Message{over, over}
	out, did := TrimLast(history, l)
	if len(out[0].ToolCalls) != 2 || len(out[1].ToolCalls) != 1 || len(history[1].ToolCalls) != 2 || did.Dropped[0].ID != "2" {
		t.Errorf("out = %+v, dropped %+v", out, did.Dropped)
	}
}

// RESULT-01: a status that is none of ours reads as a failure, never as success.
func TestResultMessageUnknownStatus(t *testing.T) {
	t.Parallel()
	text, s := ResultMessage("weird", "done", "", contract.StopTurnCapped)
	if s.Headline != Failed || s.MetadataError == "" || strings.Contains(text, "done") || !strings.Contains(text, "turn budget") {
		t.Errorf("text %q, %+v", text, s)
	}
}

// STATUS-11, STATUS-12, STATUS-13, STATUS-14, STATUS-16
func TestMetadata(t *testing.T) {
	t.Parallel()
	sum := sha256.Sum256([]byte("  ok \n"))
	usage := map[string]any{"input_tokens": int64(1), "output_tokens": int64(2), "total_tokens": int64(3)}
	for name, c := range map[string]struct {
		in   Facts
		want map[string]any
	}{
		"result trimmed, digest of the whole": {Facts{Status: contract.ToolCompleted, Result: "  ok \n", Error: "x"},
			map[string]any{"subagent_status": "completed", "subagent_result_brief": "ok", "subagent_result_sha256": hex.EncodeToString(sum[:])}},
		"blank result": {Facts{Status: contract.ToolCompleted, Result: " "}, map[string]any{"subagent_status": "completed"}},
		"failure": {Facts{Status: contract.ToolFailed, Result: "half", Error: " e ", StopReason: contract.StopTurnCapped},
			map[string]any{"subagent_status": "failed", "subagent_error": "e", "subagent_stop_reason": "turn_capped"}},
		"blank error": {Facts{Status: contract.ToolPollingTimedOut, Error: " "}, map[string]any{"subagent_status": "polling_timed_out"}},
		"model and usage": {Facts{Status: contract.ToolCancelled, ModelName: "  m-1 ", Usage: &contract.Usage{InputTokens: 1, OutputTokens: 2, TotalTokens: 3, CacheReadTokens: 9}},
			map[string]any{"subagent_status": "cancelled", "subagent_model_name": "m-1", "subagent_token_usage": usage}},
		"senseless usage": {Facts{Status: contract.ToolTimedOut, Usage: &contract.Usage{InputTokens: -1, OutputTokens: 2, TotalTokens: 1}, ModelName: " "},
			map[string]any{"subagent_status": "timed_out"}},
	} {
		got, err := Metadata(c.in)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %v, %v, want %v", name, got, err, c.want)
		}
	}
	for _, u := range []contract.Usage{{InputTokens: -1}, {OutputTokens: -1}, {TotalTokens: -1}} {
		if got, err := Metadata(Facts{Status: contract.ToolFailed, Usage: &u}); err != nil || len(got) != 1 {
			t.Errorf("usage %+v gives %v, %v, want it left out whole", u, got, err)
		}
	}
	for _, bad := range []Facts{{Status: "max_turns_reached"}, {}, {Status: "running"}, {Status: contract.ToolCompleted, StopReason: contract.StopSafetyCapped}, {Status: contract.ToolFailed, StopReason: "nope"}} {
		if m, err := Metadata(bad); err == nil {
			t.Errorf("Metadata(%+v) = %v, want it refused", bad, m)
		}
	}
}

// STATUS-15
func TestBound(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in    string
		limit int
		want  string
	}{
		{strings.Repeat("e", 2000), 2000, strings.Repeat("e", 2000)},
		{"  " + strings.Repeat("漢", 2000) + "\n", 2000, strings.Repeat("漢", 2000)},
		{strings.Repeat("漢", 2001), 2000, strings.Repeat("漢", 1333) + "\n...\n" + strings.Repeat("漢", 662)},
		{strings.Repeat("a", 1500) + strings.Repeat("b", 501), 2000, strings.Repeat("a", 1333) + "\n...\n" + strings.Repeat("a", 161) + strings.Repeat("b", 501)},
		{"abcdefghij", 5, "abcde"}, {"abcdefghij", 6, "abcdef"}, {"abcdefghij", 0, ""}, {"abcdefghij", -1, ""},
		{strings.Repeat("a", 30), 20, strings.Repeat("a", 13) + "\n...\n" + "aa"},
	} {
		if got := Bound(c.in, c.limit); got != c.want {
			t.Errorf("Bound(%.20q…, %d) = %.40q, want %.40q", c.in, c.limit, got, c.want)
		}
	}
}
