package vectors

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
)

// CAP-01, CAP-02, CAP-03, CONFIG-02
func runConcurrencyClamp(t *testing.T, c vectorCase) {
	in := into[struct {
		Requested        *int `json:"requested"`
		FrozenMaxRunning *int `json:"frozen_max_running"`
	}](t, c.inputs)
	equal(t, "Clamp", delegation.Clamp(in.Requested, in.FrozenMaxRunning), c.expected)
}

type ledgerEntry struct {
	ID     *string `json:"id"`
	RunID  *string `json:"run_id"`
	Status string  `json:"status"`
}

func entries(l []ledgerEntry) []delegation.Entry {
	var out []delegation.Entry
	for _, e := range l {
		out = append(out, delegation.Entry{ID: text(e.ID), RunID: text(e.RunID)})
	}
	return out
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// CAP-06, CAP-07, CAP-08, CAP-09, CAP-10, CONFIG-03
func runTotalCap(t *testing.T, c vectorCase) {
	in := into[struct {
		Configured  *int          `json:"configured"`
		Override    *int          `json:"override"`
		Ledger      []ledgerEntry `json:"ledger"`
		RunID       *string       `json:"run_id"`
		SchemaValue any           `json:"schema_value"`
	}](t, c.inputs)
	if m := c.inputs.(map[string]any); hasKey(m, "schema_value") {
		want := c.object(t, "accepted")
		n, isNumber := in.SchemaValue.(json.Number)
		i, err := n.Int64()
		equal(t, "accepted", isNumber && err == nil && delegation.CheckMaxTotal(int(i)) == nil, want["accepted"])
		return
	}
	want := c.object(t, "max_total", "prior", "remaining")
	ledger, runID := entries(in.Ledger), text(in.RunID)
	total := delegation.MaxTotal(in.Configured, in.Override)
	prior, unknown := delegation.Used(ledger, runID)
	equal(t, "max_total", total, want["max_total"])
	equal(t, "prior", prior, want["prior"])
	equal(t, "remaining", delegation.Remaining(total, ledger, runID), want["remaining"])
	if unknown != (runID == "") {
		t.Errorf("unknown run = %v for run id %q", unknown, runID)
	}
}

func hasKey(m map[string]any, key string) bool { _, ok := m[key]; return ok }

// nameAndID is a call as the files write it: [name, id].
type nameAndID [2]*string

func toCalls(list []nameAndID) []model.ToolCall {
	var out []model.ToolCall
	for _, c := range list {
		out = append(out, model.ToolCall{Name: text(c[0]), ID: text(c[1]), Args: "{}"})
	}
	return out
}

func toRole(t *testing.T, s string) model.Role {
	t.Helper()
	switch s {
	case "assistant", "ai":
		return model.RoleAssistant
	case "human", "user":
		return model.RoleUser
	case "tool":
		return model.RoleTool
	case "system":
		return model.RoleSystem
	}
	t.Fatalf("unknown message type %q", s)
	return ""
}

// CAP-04, CAP-05, CAP-11, CAP-12, CAP-13, CAP-14, CAP-15
func runLimitTrim(t *testing.T, c vectorCase) {
	in := into[struct {
		Calls           []nameAndID `json:"calls"`
		LastMessageType string      `json:"last_message_type"`
		Messages        []struct {
			Type  string      `json:"type"`
			Calls []nameAndID `json:"calls"`
		} `json:"messages"`
		MaxConcurrent int           `json:"max_concurrent"`
		MaxTotal      int           `json:"max_total"`
		Ledger        []ledgerEntry `json:"ledger"`
		RunID         *string       `json:"run_id"`
		RawIDs        []*string     `json:"raw_ids"`
		FinishReason  *string       `json:"finish_reason"`
		Content       any           `json:"content"`
		FunctionCall  any           `json:"function_call"`
	}](t, c.inputs)
	given := c.inputs.(map[string]any)

	var history []model.Message
	for _, m := range in.Messages {
		history = append(history, model.Message{ID: "earlier", Role: toRole(t, m.Type), ToolCalls: toCalls(m.Calls)})
	}
	content := flat(in.Content)
	if len(in.Messages) == 0 {
		last := model.Message{ID: "m1", Role: model.RoleAssistant, Text: content, ToolCalls: toCalls(in.Calls), FinishReason: "tool_calls",
			Metadata: map[string]any{delegation.FunctionCallKey: map[string]any{"name": "task"}, "other": "stays"}}
		if in.LastMessageType != "" {
			last.Role = toRole(t, in.LastMessageType)
		}
		if hasKey(given, "finish_reason") {
			last.FinishReason = text(in.FinishReason)
		}
		if in.RawIDs != nil {
			var raw []any
			for _, id := range in.RawIDs {
				entry := map[string]any{"type": "function"}
				if id != nil {
					entry["id"] = *id
				}
				raw = append(raw, entry)
			}
			last.Metadata[delegation.RawToolCallsKey] = raw
		}
		history = append(history, last)
	}
	before := plain(t, history)
	out, did := delegation.TrimLast(history, delegation.Limits{
		MaxConcurrent: in.MaxConcurrent, MaxTotal: in.MaxTotal, Ledger: entries(in.Ledger), RunID: text(in.RunID),
	})
	equal(t, "the caller's messages", history, before)

	want := c.object(t, "changed", "same_message_id", "kept_ids", "dropped_ids", "raw_ids", "finish_reason", "notice_appended", "run_stop_reason")
	equal(t, "changed", did.Changed, want["changed"])
	if want["changed"] == false {
		equal(t, "messages", out, before)
		return
	}
	last, was := out[len(out)-1], history[len(history)-1]
	equal(t, "same_message_id", last.ID == was.ID, want["same_message_id"])
	equal(t, "kept_ids", callIDs(last.ToolCalls), want["kept_ids"])
	equal(t, "dropped_ids", callIDs(did.Dropped), want["dropped_ids"])
	var raw any
	if list, ok := last.Metadata[delegation.RawToolCallsKey].([]any); ok {
		ids := []any{}
		for _, e := range list {
			ids = append(ids, e.(map[string]any)["id"])
		}
		raw = ids
	}
	equal(t, "raw_ids", raw, want["raw_ids"])
	equal(t, "finish_reason", orNull(last.FinishReason), want["finish_reason"])
	noticed := last.Text != content
	equal(t, "notice_appended", noticed, want["notice_appended"])
	if noticed && (!strings.HasPrefix(last.Text, content) || !strings.HasSuffix(last.Text, delegation.LimitNotice)) {
		t.Errorf("text = %q, want the old text and then the notice", last.Text)
	}
	equal(t, "run_stop_reason", orNull(did.StopReason), want["run_stop_reason"])
	if _, legacy := last.Metadata[delegation.FunctionCallKey]; legacy != (len(last.ToolCalls) > 0) {
		t.Errorf("legacy function call kept = %v with %d calls left", legacy, len(last.ToolCalls))
	}
	if last.Metadata["other"] != "stays" {
		t.Errorf("metadata = %v, want the rest of it untouched", last.Metadata)
	}
}

func callIDs(calls []model.ToolCall) []string {
	ids := []string{}
	for _, c := range calls {
		ids = append(ids, c.ID)
	}
	return ids
}

// TOOL-01, TOOL-02, TOOL-03, TOOL-04, TOOL-05, SKILL-06, SKILL-07, SKILL-08, DEFER-02
func runToolFilter(t *testing.T, c vectorCase) {
	in := into[struct {
		Stage        string     `json:"stage"`
		Offered      []string   `json:"offered"`
		ParentScope  []string   `json:"parent_scope"`
		Allow        []string   `json:"allow"`
		Deny         []string   `json:"deny"`
		Declarations [][]string `json:"active_skill_declarations"`
		Unresolvable bool       `json:"active_skill_unresolvable"`
		SearchTool   bool       `json:"deferral_yields_search_tool"`
	}](t, c.inputs)
	switch in.Stage {
	case "names":
		equal(t, "FilterTools", subagent.FilterTools(in.Offered, in.Allow, in.Deny), c.expected)
	case "skill":
		allowed, unrestricted := subagent.SkillPolicy(in.Declarations)
		want, restricted := c.expected.([]any)
		if unrestricted == restricted {
			t.Fatalf("unrestricted = %v, want %s", unrestricted, short(c.expected))
		}
		if restricted { // a set: order says nothing
			names := make([]string, 0, len(want))
			for _, w := range want {
				names = append(names, w.(string))
			}
			slices.Sort(names)
			got := slices.Sorted(slices.Values(allowed))
			if !slices.Equal(got, names) {
				t.Errorf("allowed = %q, want %q", got, names)
			}
		}
	case "chain":
		equal(t, "Chain", subagent.Chain(subagent.Stages{
			ParentScope: in.ParentScope, Allow: in.Allow, Deny: in.Deny,
			ActiveSkills: in.Declarations, SkillsUnresolvable: in.Unresolvable, SearchTool: in.SearchTool,
		}), c.expected)
	default:
		t.Fatalf("unknown stage %q", in.Stage)
	}
}

// RESULT-01, RESULT-02, RESULT-03, RESULT-04, RESULT-05, STATUS-07
func runResultMessage(t *testing.T, c vectorCase) {
	in := into[struct {
		Status     contract.ToolStatus `json:"status"`
		Result     *string             `json:"result"`
		Error      *string             `json:"error"`
		StopReason *string             `json:"stop_reason"`
	}](t, c.inputs)
	want := c.object(t, "headline", "cap", "body", "body_text", "metadata_error")
	got, s := delegation.ResultMessage(in.Status, text(in.Result), text(in.Error), contract.StopReason(text(in.StopReason)))
	equal(t, "headline", s.Headline, want["headline"])
	equal(t, "cap", orNull(s.Cap), want["cap"])
	equal(t, "body", s.Body, want["body"])
	equal(t, "body_text", s.BodyText, want["body_text"])
	metadataError := orNull(s.MetadataError)
	if s.StockError {
		metadataError = "default"
	}
	equal(t, "metadata_error", metadataError, want["metadata_error"])
	if s.StockError && (s.MetadataError == "" || !strings.Contains(got, s.MetadataError) && s.Cap == "") {
		t.Errorf("text %q does not hold the stock sentence %q", got, s.MetadataError)
	}
	if !strings.HasSuffix(got, s.BodyText) {
		t.Errorf("text %q does not end with the body %q", got, s.BodyText)
	}
	if s.Headline == delegation.PollingTimedOut && got != s.MetadataError {
		t.Errorf("text = %q, want the detail alone: %q", got, s.MetadataError)
	}
	for reason, label := range map[contract.StopReason]string{
		contract.StopTokenCapped: "token budget", contract.StopTurnCapped: "turn budget", contract.StopLoopCapped: "repeated tool-call loop",
	} {
		if has := strings.Contains(got, label); has != (s.Cap == reason) {
			t.Errorf("text %q names %q: %v, want %v", got, label, has, s.Cap == reason)
		}
	}
}
