package vectors

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/pkg/contract"
)

// stateOf reads a status of the files: "pending" is a task that has its slot
// and no claim.
func stateOf(status string) contract.State {
	if status == "pending" || status == "queued" {
		return contract.StateGranted
	}
	return contract.State(status)
}

// statusOf is its inverse, null for no record.
func statusOf(s contract.State) any {
	switch {
	case s == "":
		return nil
	case s.Status() == contract.TaskQueued:
		return "pending"
	}
	return string(s.Status())
}

// STATUS-01 to STATUS-10, GUARD-11 to GUARD-15, CANCEL-01, CANCEL-05, CANCEL-08
func runStatusStopReason(t *testing.T, c vectorCase) {
	type answer struct {
		Text          any    `json:"text"`
		ErrorFallback any    `json:"error_fallback"`
		ErrorDetail   string `json:"error_detail"`
	}
	in := into[struct {
		Outcome          outcome.Kind `json:"outcome"`
		LastAI           *answer      `json:"last_ai"`
		LastOtherText    any          `json:"last_other_text"`
		EarlierAIText    any          `json:"earlier_ai_text"`
		EarlierAIMarked  bool         `json:"earlier_ai_marked"`
		Guards           []string     `json:"guards"`
		Message          string       `json:"message"`
		TimeoutSeconds   int          `json:"timeout_seconds"`
		MaxTurns         int          `json:"max_turns"`
		RecordStatus     string       `json:"record_status"`
		Reason           string       `json:"reason"`
		BeforeFirstChunk bool         `json:"before_first_chunk"`
	}](t, c.inputs)
	o := outcome.Outcome{
		Kind: in.Outcome, LastOther: flat(in.LastOtherText), Message: in.Message, Reason: in.Reason,
		TimeoutSeconds: in.TimeoutSeconds, MaxTurns: in.MaxTurns, QueueTimeoutSeconds: 300,
	}
	switch in.Outcome {
	case outcome.StreamFinished, outcome.TurnBudgetExhausted, outcome.Exception, outcome.CancelObserved, outcome.ExecutionTimeout,
		outcome.AdmissionTimeout, outcome.AdmissionRejected, outcome.ExecutorLost, outcome.ObserverGaveUp, outcome.RecordVanished,
		outcome.RejectedBeforeStart, outcome.ParentCancelled, outcome.ToolWrapperException:
	default:
		t.Fatalf("unknown outcome %q", in.Outcome)
	}
	if in.LastAI != nil {
		// Only the boolean true is the marker.
		o.LastAnswer = &outcome.Answer{Text: flat(in.LastAI.Text), ErrorFallback: in.LastAI.ErrorFallback == true, ErrorDetail: in.LastAI.ErrorDetail}
	}
	for _, g := range in.Guards {
		switch g {
		case "loop", "token", "turn":
			o.Guards = append(o.Guards, contract.StopReason(g+"_capped"))
		default:
			t.Fatalf("unknown guard %q", g)
		}
	}
	if in.Outcome == outcome.ObserverGaveUp {
		o.Observed = stateOf(in.RecordStatus)
	}
	end := outcome.Map(o)

	want := c.object(t, "status", "stop_reason", "result_kind", "error_kind", "admission_failure", "tool_status", "event", "end_status",
		"card", "result_text", "redesign_end_status")
	if status, ok := want["redesign_end_status"]; ok { // ours: the executor writes the end, so that there is an event as well
		want["end_status"], want["event"] = status, "task_"+status.(string)
	}
	equal(t, "status", statusOf(end.State), want["status"])
	equal(t, "stop_reason", orNull(end.StopReason), want["stop_reason"])
	equal(t, "result_kind", resultKind(end.Result), want["result_kind"])
	equal(t, "error_kind", end.ErrorKind, want["error_kind"])
	equal(t, "admission_failure", end.AdmissionFailure, want["admission_failure"])
	equal(t, "tool_status", orNull(end.ToolStatus), want["tool_status"])
	equal(t, "event", orNull(end.Event), want["event"])
	equal(t, "end_status", orNull(end.EndStatus), want["end_status"])
	equal(t, "card", end.Card, want["card"])
	if s, ok := want["result_text"]; ok {
		equal(t, "result_text", end.Result, s)
	}
	checkErrorText(t, end, o)
}

func resultKind(result string) string {
	switch result {
	case "":
		return "none"
	case outcome.Placeholder:
		return "sentinel"
	}
	return "text"
}

// checkErrorText compares the text with the kind that the end claims for it.
func checkErrorText(t *testing.T, end outcome.End, o outcome.Outcome) {
	t.Helper()
	want, exact := "", false
	switch end.ErrorKind {
	case outcome.ErrorNone:
		exact = true
	case outcome.ErrorFallbackText:
		want, exact = strings.TrimSpace(o.LastAnswer.Text), true
	case outcome.ErrorFallbackDetail:
		want, exact = strings.TrimSpace(o.LastAnswer.ErrorDetail), true
	case outcome.ErrorException:
		want, exact = o.Message, true
	case outcome.ErrorTimeout:
		want = strconv.Itoa(o.TimeoutSeconds)
	case outcome.ErrorMaxTurns:
		want = strconv.Itoa(o.MaxTurns)
	case outcome.ErrorPollTimeout:
		want = string(o.Observed.Status())
	}
	if exact && end.Error != want || !strings.Contains(end.Error, want) || !exact && end.Error == "" {
		t.Errorf("error = %q, want %q (whole: %v)", end.Error, want, exact)
	}
}

type casPayload struct {
	Status     string      `json:"status,omitempty"`
	Result     string      `json:"result,omitempty"`
	Error      string      `json:"error,omitempty"`
	StopReason string      `json:"stop_reason,omitempty"`
	ModelName  string      `json:"model_name,omitempty"`
	Usage      json.Number `json:"usage,omitempty"`
	Receipts   []string    `json:"receipts,omitempty"`
}

func usageOf(t *testing.T, n json.Number) *contract.Usage {
	t.Helper()
	if n == "" {
		return nil
	}
	i, err := n.Int64()
	if err != nil {
		t.Fatal(err)
	}
	return &contract.Usage{TotalTokens: i}
}

func receiptsOf(ids []string) []contract.Receipt {
	if ids == nil {
		return nil
	}
	out := []contract.Receipt{}
	for _, id := range ids {
		out = append(out, contract.Receipt{ID: id})
	}
	return out
}

// CANCEL-04, CANCEL-05, CANCEL-06, ADM-16
func runTerminalCAS(t *testing.T, c vectorCase) {
	in := into[struct {
		Start  casPayload `json:"start"`
		Writes []struct {
			Op    string `json:"op"`
			Field string `json:"field"`
			Value any    `json:"value"`
			casPayload
		} `json:"writes"`
	}](t, c.inputs)
	want := c.object(t, "accepted", "record")
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	rec := contract.TaskRecord{
		TaskID: "t1", State: stateOf(in.Start.Status), Result: in.Start.Result, Error: in.Start.Error,
		StopReason: contract.StopReason(in.Start.StopReason), ModelName: in.Start.ModelName,
		Usage: usageOf(t, in.Start.Usage), Receipts: receiptsOf(in.Start.Receipts),
	}
	if !rec.State.Valid() {
		t.Fatalf("unknown start status %q", in.Start.Status)
	}
	accepted := []any{}
	for _, w := range in.Writes {
		at = at.Add(time.Second)
		var next contract.TaskRecord
		var err error
		switch w.Op {
		case "terminal":
			next, err = outcome.Terminate(rec, outcome.End{
				State: contract.State(w.Status), Result: w.Result, Error: w.Error, StopReason: contract.StopReason(w.StopReason),
				ModelName: w.ModelName, Usage: usageOf(t, w.Usage), Receipts: receiptsOf(w.Receipts),
			}, at)
		case "publish":
			var p outcome.Progress
			switch w.Field {
			case "usage":
				p.Usage = usageOf(t, into[json.Number](t, w.Value))
			case "receipts":
				p.Receipts = receiptsOf(into[[]string](t, w.Value))
			case "model_name":
				p.ModelName = into[string](t, w.Value)
			default:
				t.Fatalf("unknown field %q", w.Field)
			}
			next, err = p.Apply(rec)
		default:
			t.Fatalf("unknown op %q", w.Op)
		}
		switch {
		case err == nil:
			accepted = append(accepted, true)
		case errors.Is(err, outcome.ErrAlreadyTerminal):
			accepted = append(accepted, false)
		case errors.Is(err, outcome.ErrNotTerminal):
			accepted = append(accepted, "error")
		default:
			t.Fatal(err)
		}
		if err != nil {
			equal(t, "record after a refusal", next, rec)
		}
		rec = next
	}
	equal(t, "accepted", accepted, want["accepted"])
	got := casPayload{Result: rec.Result, Error: rec.Error, StopReason: string(rec.StopReason), ModelName: rec.ModelName}
	got.Status, _ = statusOf(rec.State).(string)
	if rec.Usage != nil {
		got.Usage = json.Number(strconv.FormatInt(rec.Usage.TotalTokens, 10))
	}
	for _, r := range rec.Receipts {
		got.Receipts = append(got.Receipts, r.ID)
	}
	equal(t, "record", got, want["record"])
}
