// Package outcome decides, in one place, how each way in which a delegated task
// can end is told to everybody: its record, the tool result, the event, the
// stored end and the card. It also holds the rule that the first end wins.
// Everything in it is pure.
package outcome

import (
	"fmt"
	"strings"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Kind is a way to end.
type Kind string

// The ways to end.
const (
	// StreamFinished: the agent loop came to its own end.
	StreamFinished Kind = "stream_finished"
	// TurnBudgetExhausted: the loop was stopped at its limit of turns.
	TurnBudgetExhausted Kind = "turn_budget_exhausted"
	// Exception: the loop failed otherwise; Message tells why.
	Exception Kind = "exception"
	// CancelObserved: the executor stopped because of a cancellation.
	CancelObserved Kind = "cancel_observed"
	// ExecutionTimeout: the task's own time limit.
	ExecutionTimeout Kind = "execution_timeout"
	// AdmissionTimeout: no slot came free within the queue timeout.
	AdmissionTimeout Kind = "admission_timeout"
	// AdmissionRejected: the queue had no room.
	AdmissionRejected Kind = "admission_rejected"
	// ExecutorLost: the executor died or was cut off and the task is not run again.
	ExecutorLost Kind = "executor_lost"
	// ObserverGaveUp: the lead stopped waiting; the task may still run.
	ObserverGaveUp Kind = "observer_gave_up"
	// RecordVanished: the lead's task is nowhere to be found.
	RecordVanished Kind = "record_vanished"
	// RejectedBeforeStart: a policy refused the delegation; Reason tells which.
	RejectedBeforeStart Kind = "rejected_before_start"
	// ParentCancelled: the run that delegated was cancelled.
	ParentCancelled Kind = "parent_cancelled"
	// ToolWrapperException: the task tool itself failed; Message tells why.
	ToolWrapperException Kind = "tool_wrapper_exception"
)

// Answer is an assistant message, as far as an end depends on it.
type Answer struct {
	Text string
	// ErrorFallback marks text that was made out of a provider's failure.
	ErrorFallback bool
	ErrorDetail   string
}

// Outcome is what is known when a task ends. Fields that its kind does not name
// are ignored.
type Outcome struct {
	Kind Kind
	// LastAnswer is the last assistant message, nil if there is none. An older
	// one is never searched.
	LastAnswer *Answer
	// LastOther is the text of the last message of any kind, for when no
	// assistant spoke.
	LastOther string
	// Guards are the hard stops that guards recorded, in any order.
	Guards []contract.StopReason
	// NoText: the last answer has no text of the model's own, only the words of a
	// guard that stopped it. With a reason in Guards that is a failure.
	NoText bool
	// MaxTurns, TimeoutSeconds, QueueTimeoutSeconds are the limits that the
	// texts name.
	MaxTurns            int
	TimeoutSeconds      int
	QueueTimeoutSeconds int
	// Message is the text of an exception, Reason that of a refusal.
	Message string
	Reason  string
	// Code is the error code of an exception; empty is internal.
	Code contract.ErrorCode
	// Observed is the record's state when the observer gave up.
	Observed contract.State
}

// Placeholder is the result of a task that completed without a word.
const Placeholder = "(The sub-agent finished without a final text.)"

// ErrorKind says which text End.Error holds.
type ErrorKind string

// The kinds of error texts. A refusal before the start has its reason as kind.
const (
	ErrorNone            ErrorKind = "none"
	ErrorFallbackText    ErrorKind = "fallback_text"
	ErrorFallbackDetail  ErrorKind = "fallback_detail"
	ErrorFallbackGeneric ErrorKind = "fallback_generic"
	ErrorMaxTurns        ErrorKind = "max_turns"
	ErrorCapped          ErrorKind = "capped"
	ErrorException       ErrorKind = "exception_text"
	ErrorCancelled       ErrorKind = "cancelled_by_user"
	ErrorTimeout         ErrorKind = "timeout_seconds"
	ErrorCapacity        ErrorKind = "capacity"
	ErrorPollTimeout     ErrorKind = "poll_timeout"
	ErrorVanished        ErrorKind = "record_vanished"
	ErrorLost            ErrorKind = "executor_lost"
	ErrorUnknownType     ErrorKind = "unknown_type"
	ErrorShellDisabled   ErrorKind = "host_shell_disabled"
)

// Card is what a user interface shows.
type Card string

// The cards. Whatever has not ended well is failed.
const (
	CardInProgress Card = "in_progress"
	CardCompleted  Card = "completed"
	CardFailed     Card = "failed"
)

// End is how an outcome is told. It holds the whole payload of a terminal
// record, so that state and payload are written in one piece.
type End struct {
	// State is what the record becomes or, if the observer gave up, what it is.
	// Empty: there is no record.
	State            contract.State
	Result           string
	ResultTruncated  bool
	ResultRef        *contract.BlobRef
	Error            string
	ErrorKind        ErrorKind
	ErrorCode        contract.ErrorCode
	StopReason       contract.StopReason
	AdmissionFailure bool
	// Usage, ModelName and Receipts are the final ones; left empty, what the
	// record holds already stays.
	Usage     *contract.Usage
	ModelName string
	Receipts  []contract.Receipt
	// Verdict is on the citations of a completed task's result.
	Verdict *contract.ReceiptVerdict

	// ToolStatus is the status of the tool result; empty: there is none.
	ToolStatus contract.ToolStatus
	// Event is the terminal event, EndStatus the status of the stored end;
	// empty: there is none.
	Event     contract.EventType
	EndStatus contract.TaskStatus
	Card      Card
}

// Map decides how o is told.
func Map(o Outcome) End {
	switch o.Kind {
	case StreamFinished:
		return finished(o)
	case TurnBudgetExhausted:
		return outOfTurns(o)
	case CancelObserved:
		return ended(contract.StateCancelled, ErrorCancelled, "", "Cancelled by user.")
	case ParentCancelled:
		// The executor writes the end whatever became of the observer; there is
		// nobody left to read a tool result.
		e := ended(contract.StateCancelled, ErrorCancelled, "", "Cancelled by user.")
		e.ToolStatus = ""
		return e
	case ExecutionTimeout:
		return ended(contract.StateTimedOut, ErrorTimeout, "", fmt.Sprintf("The task did not finish within its limit of %d seconds.", o.TimeoutSeconds))
	case AdmissionTimeout:
		e := ended(contract.StateFailed, ErrorCapacity, contract.ErrQueueTimeout,
			fmt.Sprintf("No slot came free within the queue timeout of %d seconds; the task was never started.", o.QueueTimeoutSeconds))
		e.AdmissionFailure = true
		return e
	case AdmissionRejected:
		e := ended(contract.StateFailed, ErrorCapacity, contract.ErrQueueFull, "The queue is full; the task was not accepted.")
		e.AdmissionFailure = true
		return e
	case ExecutorLost:
		return ended(contract.StateFailed, ErrorLost, contract.ErrExecutorLost, "The executor was lost while it ran the task; its work may have had effects.")
	case ObserverGaveUp:
		e := ended(contract.StateTimedOut, ErrorPollTimeout, "", fmt.Sprintf(
			"No end of the task was seen within %d minutes; it was last %s.", minutes(o.TimeoutSeconds), observed(o.Observed)))
		e.State = o.Observed // the record is not the observer's to write
		e.ToolStatus = contract.ToolPollingTimedOut
		return e
	case RecordVanished:
		e := ended(contract.StateFailed, ErrorVanished, contract.ErrInternal, "The task's record has disappeared.")
		e.State = ""
		return e
	case RejectedBeforeStart:
		text := o.Message
		if strings.TrimSpace(text) == "" {
			text = "The delegation was refused: " + strings.ReplaceAll(o.Reason, "_", " ") + "."
		}
		return unrecorded(ErrorKind(o.Reason), contract.ErrPolicyDenied, text)
	case ToolWrapperException:
		return unrecorded(ErrorException, code(o.Code, contract.ErrTool), exceptionText(o.Message))
	}
	return ended(contract.StateFailed, ErrorException, code(o.Code, contract.ErrInternal), exceptionText(o.Message))
}

// ended is an end that has a record, an event and a tool result.
func ended(state contract.State, kind ErrorKind, code contract.ErrorCode, text string) End {
	return End{
		State: state, Error: text, ErrorKind: kind, ErrorCode: code,
		ToolStatus: contract.ToolStatus(state), Event: contract.TerminalEvent(state), EndStatus: state.Status(), Card: card(state),
	}
}

// unrecorded is a failed tool result without any life in the system.
func unrecorded(kind ErrorKind, code contract.ErrorCode, text string) End {
	return End{Error: text, ErrorKind: kind, ErrorCode: code, ToolStatus: contract.ToolFailed, Card: CardFailed}
}

func completed(result string, reason contract.StopReason) End {
	e := ended(contract.StateCompleted, ErrorNone, "", "")
	e.Result, e.StopReason = result, reason
	return e
}

func finished(o Outcome) End {
	if text, kind, failed := fallback(o.LastAnswer); failed {
		// A guard's stop leaves no marked answer behind, so there is no reason to tell.
		return ended(contract.StateFailed, kind, contract.ErrLLM, text)
	}
	text := o.LastOther
	if o.LastAnswer != nil {
		text = o.LastAnswer.Text
	}
	if text == "" {
		text = Placeholder
	}
	reason := firstGuard(o.Guards)
	if reason != "" && o.NoText {
		e := ended(contract.StateFailed, ErrorCapped, "", text)
		e.StopReason = reason
		return e
	}
	return completed(text, reason)
}

func outOfTurns(o Outcome) End {
	reason := firstGuard(o.Guards)
	if reason == "" {
		reason = contract.StopTurnCapped
	}
	e := ended(contract.StateFailed, ErrorMaxTurns, "", fmt.Sprintf("The limit of %d turns was reached before there was an answer.", o.MaxTurns))
	if text, kind, failed := fallback(o.LastAnswer); failed {
		e = ended(contract.StateFailed, kind, contract.ErrLLM, text)
	} else if o.LastAnswer != nil {
		if usable := strings.TrimSpace(o.LastAnswer.Text); usable != "" {
			return completed(usable, reason)
		}
	}
	e.StopReason = reason
	return e
}

// fallback reads a provider's failure from the marker of the last answer. Text
// that merely looks like an error is none.
func fallback(a *Answer) (string, ErrorKind, bool) {
	if a == nil || !a.ErrorFallback {
		return "", "", false
	}
	if text := strings.TrimSpace(a.Text); text != "" {
		return text, ErrorFallbackText, true
	}
	if detail := strings.TrimSpace(a.ErrorDetail); detail != "" {
		return detail, ErrorFallbackDetail, true
	}
	return "The model provider failed.", ErrorFallbackGeneric, true
}

// firstGuard picks the reason of the guard that stands first in the chain.
func firstGuard(recorded []contract.StopReason) contract.StopReason {
	for _, r := range []contract.StopReason{contract.StopLoopCapped, contract.StopTokenCapped, contract.StopTurnCapped} {
		for _, g := range recorded {
			if g == r {
				return r
			}
		}
	}
	return ""
}

func card(s contract.State) Card {
	switch {
	case s == contract.StateCompleted:
		return CardCompleted
	case s.Terminal():
		return CardFailed
	}
	return CardInProgress
}

func code(c, otherwise contract.ErrorCode) contract.ErrorCode {
	if c == "" {
		return otherwise
	}
	return c
}

func exceptionText(s string) string {
	if strings.TrimSpace(s) == "" {
		return "The task failed for a reason that was not told."
	}
	return s
}

func observed(s contract.State) string {
	if s == "" {
		return string(contract.TaskQueued)
	}
	return string(s.Status())
}

// minutes is a limit in whole minutes, at least one.
func minutes(seconds int) int { return max(1, (seconds+59)/60) }
