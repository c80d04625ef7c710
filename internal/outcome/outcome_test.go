package outcome

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/herdgate/herdgate/pkg/contract"
)

var kinds = []Kind{
	StreamFinished, TurnBudgetExhausted, Exception, CancelObserved, ExecutionTimeout, AdmissionTimeout, AdmissionRejected, ExecutorLost,
	ObserverGaveUp, RecordVanished, RejectedBeforeStart, ParentCancelled, ToolWrapperException, "something new",
}

// STATUS-01, STATUS-02, GUARD-12: whatever happens, the words are those of the
// contract and agree with each other; an unknown way to end is a failure.
func TestMapIsConsistent(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		for _, answer := range []*Answer{nil, {}, {Text: "x"}, {Text: "x", ErrorFallback: true}} {
			e := Map(Outcome{Kind: k, LastAnswer: answer, Guards: []contract.StopReason{contract.StopTokenCapped}, Observed: contract.StateRunning, Message: "m", Reason: "unknown_type"})
			switch {
			case e.Event != "" && e.Event != contract.TerminalEvent(contract.State(e.EndStatus)):
				t.Errorf("%s: event %s, stored end %s", k, e.Event, e.EndStatus)
			case k != ObserverGaveUp && e.State != "" && (e.EndStatus != e.State.Status() || !e.State.Terminal()):
				t.Errorf("%s: state %s, stored end %s", k, e.State, e.EndStatus)
			case e.AdmissionFailure != e.ErrorCode.AdmissionFailure():
				t.Errorf("%s: admission failure %v with code %q", k, e.AdmissionFailure, e.ErrorCode)
			case e.StopReason != "" && !e.StopReason.ValidForTask():
				t.Errorf("%s: stop reason %q", k, e.StopReason)
			case (e.State == contract.StateCompleted) != (e.Result != "") || (e.Result == "") != (e.Error != ""):
				t.Errorf("%s: state %s with result %q and error %q", k, e.State, e.Result, e.Error)
			case (e.Card == CardCompleted) != (e.State == contract.StateCompleted) || e.Card == CardInProgress:
				t.Errorf("%s: card %s for state %s", k, e.Card, e.State)
			}
		}
	}
}

// STATUS-05, STATUS-09, STATUS-10, ADM-10: the code tells the receiver what to do, the text
// what happened.
func TestMapCodesAndTexts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		o    Outcome
		code contract.ErrorCode
		text string
	}{
		{Outcome{Kind: StreamFinished, LastAnswer: &Answer{Text: " down ", ErrorFallback: true}}, contract.ErrLLM, "down"},
		{Outcome{Kind: TurnBudgetExhausted, LastAnswer: &Answer{ErrorFallback: true, ErrorDetail: " 503 "}}, contract.ErrLLM, "503"},
		{Outcome{Kind: TurnBudgetExhausted, MaxTurns: 17}, "", "17 turns"},
		{Outcome{Kind: AdmissionTimeout, QueueTimeoutSeconds: 300}, contract.ErrQueueTimeout, "300 seconds"},
		{Outcome{Kind: AdmissionRejected}, contract.ErrQueueFull, "queue is full"},
		{Outcome{Kind: ExecutorLost}, contract.ErrExecutorLost, "executor was lost"},
		{Outcome{Kind: ExecutionTimeout, TimeoutSeconds: 1800}, "", "1800 seconds"},
		{Outcome{Kind: ObserverGaveUp, TimeoutSeconds: 90, Observed: contract.StateRunning}, "", "2 minutes; it was last running"},
		{Outcome{Kind: ObserverGaveUp, TimeoutSeconds: 1, Observed: ""}, "", "last queued"},
		{Outcome{Kind: Exception, Message: "kaboom"}, contract.ErrInternal, "kaboom"},
		{Outcome{Kind: Exception, Message: " ", Code: contract.ErrTool}, contract.ErrTool, "not told"},
		{Outcome{Kind: RejectedBeforeStart, Reason: "host_shell_disabled"}, contract.ErrPolicyDenied, "host shell disabled"},
		{Outcome{Kind: RejectedBeforeStart, Reason: "unknown_type", Message: "there are a, b"}, contract.ErrPolicyDenied, "there are a, b"},
		{Outcome{Kind: ToolWrapperException, Message: "bad"}, contract.ErrTool, "bad"},
		{Outcome{Kind: RecordVanished}, contract.ErrInternal, "disappeared"},
		{Outcome{Kind: CancelObserved}, "", "Cancelled"},
	} {
		if e := Map(c.o); e.ErrorCode != c.code || !strings.Contains(e.Error, c.text) {
			t.Errorf("%s: code %q text %q, want %q and %q", c.o.Kind, e.ErrorCode, e.Error, c.code, c.text)
		}
	}
}

// GUARD-13, GUARD-14: the reason of the first guard in the chain, usable text
// trimmed.
func TestMapTurnBudget(t *testing.T) {
	t.Parallel()
	e := Map(Outcome{Kind: TurnBudgetExhausted, LastAnswer: &Answer{Text: "  half \n"}, LastOther: "tool", Guards: []contract.StopReason{contract.StopTokenCapped, contract.StopLoopCapped}})
	if e.State != contract.StateCompleted || e.Result != "half" || e.StopReason != contract.StopLoopCapped {
		t.Errorf("end = %+v", e)
	}
	if e = Map(Outcome{Kind: TurnBudgetExhausted, LastOther: "tool output"}); e.State != contract.StateFailed || e.StopReason != contract.StopTurnCapped {
		t.Errorf("without an answer: %+v", e)
	}
}

// GUARD-12, F-068: words of a guard alone are nothing usable; without a reason they
// are an answer like any other.
func TestMapCapWithoutText(t *testing.T) {
	t.Parallel()
	o := Outcome{Kind: StreamFinished, LastAnswer: &Answer{Text: "stopped"}, NoText: true, Guards: []contract.StopReason{contract.StopSafetyCapped, contract.StopTokenCapped}}
	if e := Map(o); e.State != contract.StateFailed || e.Error != "stopped" || e.ErrorKind != ErrorCapped || e.StopReason != contract.StopTokenCapped || e.Result != "" {
		t.Errorf("end = %+v", e)
	}
	o.Guards = o.Guards[:1]
	if e := Map(o); e.State != contract.StateCompleted || e.Result != "stopped" || e.StopReason != "" {
		t.Errorf("without a reason of a task: %+v", e)
	}
}

// CANCEL-08, EVT-22: the end is written although the parent is gone, and there
// is no tool result.
func TestMapParentCancelled(t *testing.T) {
	t.Parallel()
	e := Map(Outcome{Kind: ParentCancelled})
	if e.State != contract.StateCancelled || e.Event != contract.EventTaskCancelled || e.ToolStatus != "" {
		t.Errorf("end = %+v", e)
	}
}

var at = time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("x", 3600))

// CANCEL-04, CANCEL-05: the first end wins whole; the loser changes nothing.
func TestTerminate(t *testing.T) {
	t.Parallel()
	usage := &contract.Usage{TotalTokens: 5}
	rec := contract.TaskRecord{TaskID: "t", State: contract.StateRunning, Usage: usage, ModelName: "m", Receipts: []contract.Receipt{{ID: "r1"}}}
	end := Map(Outcome{Kind: StreamFinished, LastAnswer: &Answer{Text: "done"}, Guards: []contract.StopReason{contract.StopTokenCapped}})
	first, err := Terminate(rec, end, at)
	if err != nil {
		t.Fatal(err)
	}
	want := rec
	utc := at.UTC()
	want.State, want.Result, want.StopReason, want.FinishedAt = contract.StateCompleted, "done", contract.StopTokenCapped, &utc
	if !reflect.DeepEqual(first, want) {
		t.Errorf("record = %+v, want %+v", first, want)
	}
	second, err := Terminate(first, Map(Outcome{Kind: CancelObserved}), at.Add(time.Second))
	if !errors.Is(err, ErrAlreadyTerminal) || !reflect.DeepEqual(second, first) {
		t.Errorf("second end: %v, %+v", err, second)
	}
	for _, s := range []contract.State{"", contract.StateRunning, contract.StateGranted, contract.StateReleased, "weird"} {
		if got, err := Terminate(rec, End{State: s}, at); !errors.Is(err, ErrNotTerminal) || !reflect.DeepEqual(got, rec) {
			t.Errorf("end as %q: %v", s, err)
		}
	}
}

// ADM-16: a task that ends before it was ever granted, or between grant and
// claim, ends exactly once.
func TestTerminateBeforeStart(t *testing.T) {
	t.Parallel()
	for _, s := range []contract.State{"", contract.StateGranted, contract.StateReleased} {
		rec, err := Terminate(contract.TaskRecord{State: s}, Map(Outcome{Kind: AdmissionTimeout, QueueTimeoutSeconds: 1}), at)
		if err != nil || rec.State != contract.StateFailed || !rec.AdmissionFailure || rec.ErrorCode != contract.ErrQueueTimeout {
			t.Errorf("from %q: %v, %+v", s, err, rec)
		}
		if _, err := Terminate(rec, Map(Outcome{Kind: StreamFinished}), at); !errors.Is(err, ErrAlreadyTerminal) {
			t.Errorf("from %q, again: %v", s, err)
		}
	}
}

// CANCEL-06, USAGE-03: snapshots replace each other, and nothing enters a record that has ended.
func TestProgress(t *testing.T) {
	t.Parallel()
	usage := &contract.Usage{TotalTokens: 5}
	rec, err := Progress{Usage: usage, ModelName: "m"}.Apply(contract.TaskRecord{State: contract.StateRunning, Usage: &contract.Usage{TotalTokens: 3}})
	if err != nil || rec.Usage.TotalTokens != 5 || rec.ModelName != "m" {
		t.Fatalf("%v, %+v", err, rec)
	}
	usage.TotalTokens = 99
	if rec.Usage.TotalTokens != 5 {
		t.Error("the record shares memory with the caller")
	}
	if rec, err = (Progress{}).Apply(rec); err != nil || rec.Usage.TotalTokens != 5 || rec.ModelName != "m" {
		t.Errorf("empty progress: %v, %+v", err, rec)
	}
	rec, err = Terminate(rec, End{State: contract.StateTimedOut, Receipts: []contract.Receipt{}}, at)
	if err != nil || rec.Usage.TotalTokens != 5 || len(rec.Receipts) != 0 {
		t.Errorf("%v, %+v", err, rec)
	}
	if got, err := (Progress{Usage: usage}).Apply(rec); !errors.Is(err, ErrAlreadyTerminal) || got.Usage.TotalTokens != 5 {
		t.Errorf("after the end: %v", err)
	}
}

// A record stays within its bounds whatever ended.
func TestTerminateCuts(t *testing.T) {
	t.Parallel()
	rec, err := Terminate(contract.TaskRecord{State: contract.StateRunning}, End{State: contract.StateCompleted, Result: "xx" + strings.Repeat("界", contract.MaxInlineResultBytes/3+1), Error: strings.Repeat("界", contract.MaxErrorChars+1)}, at)
	if err != nil || !rec.ResultTruncated || len(rec.Result) > contract.MaxInlineResultBytes || len(rec.Result) < contract.MaxInlineResultBytes-3 || !utf8.ValidString(rec.Result) {
		t.Errorf("%v: result has %d bytes, truncated %v", err, len(rec.Result), rec.ResultTruncated)
	}
	if utf8.RuneCountInString(rec.Error) != contract.MaxErrorChars {
		t.Errorf("error has %d code points", utf8.RuneCountInString(rec.Error))
	}
	rec, err = Terminate(contract.TaskRecord{State: contract.StateRunning}, End{State: contract.StateCompleted, Result: strings.Repeat("x", contract.MaxInlineResultBytes)}, at)
	if err != nil || rec.ResultTruncated {
		t.Errorf("a result at the bound was cut: %v", err)
	}
}

// RECEIPT-13, RECEIPT-14: receipts and verdict are part of the end; evidence of what
// was done outlives a stop, the verdict on a result that is dropped does not.
func TestEndHoldsReceipts(t *testing.T) {
	t.Parallel()
	done := End{State: contract.StateCompleted, Result: "x", Receipts: []contract.Receipt{{ID: "r1"}}, Verdict: &contract.ReceiptVerdict{CitationResolved: true}}
	rec, err := Terminate(contract.TaskRecord{State: contract.StateRunning}, done, at)
	if err != nil || len(rec.Receipts) != 1 || rec.ReceiptVerdict != done.Verdict {
		t.Errorf("%v: %+v", err, rec)
	}
	if e := (End{State: contract.StateCancelled}).With(done); len(e.Receipts) != 1 || e.Verdict != nil {
		t.Errorf("stopped: %+v", e)
	}
	if e := (End{Receipts: []contract.Receipt{}}).With(done); len(e.Receipts) != 0 {
		t.Errorf("none of its own are replaced: %+v", e)
	}
}

// CANCEL-03: what was spent stays told, and an end's own figures win.
func TestEndWith(t *testing.T) {
	t.Parallel()
	spent := End{Usage: &contract.Usage{TotalTokens: 5}, ModelName: "m", Result: "not taken over"}
	if e := (End{State: contract.StateTimedOut}).With(spent); e.Usage.TotalTokens != 5 || e.ModelName != "m" || e.Result != "" || e.State != contract.StateTimedOut {
		t.Errorf("end = %+v", e)
	}
	if e := (End{Usage: &contract.Usage{TotalTokens: 7}, ModelName: "own"}).With(spent); e.Usage.TotalTokens != 7 || e.ModelName != "own" {
		t.Errorf("end = %+v", e)
	}
}
