package delegation

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Headline says in one word how a delegation ended.
type Headline string

// The headlines. All but [Succeeded] are words of the tool status.
const (
	Succeeded       Headline = "succeeded"
	Failed          Headline = "failed"
	Cancelled       Headline = "cancelled"
	TimedOut        Headline = "timed_out"
	PollingTimedOut Headline = "polling_timed_out"
)

// Body says what follows the headline in the text.
type Body string

// The bodies.
const (
	BodyResult Body = "result"
	BodyError  Body = "error"
	BodyNone   Body = "none"
)

// Summary is how a result text was made.
type Summary struct {
	Headline Headline
	// Cap is the stop reason that the text names, or "".
	Cap      contract.StopReason
	Body     Body
	BodyText string
	// MetadataError is the error for the program; "" if it completed.
	MetadataError string
	// StockError: MetadataError is the stock sentence of the status.
	StockError bool
}

// capLabels are the words for the reasons that a task may carry.
var capLabels = map[contract.StopReason]string{
	contract.StopTokenCapped: "token budget",
	contract.StopTurnCapped:  "turn budget",
	contract.StopLoopCapped:  "repeated tool-call loop",
}

// stock are the sentences for an end without an error of its own.
var stock = map[contract.ToolStatus]string{
	contract.ToolFailed:          "The task failed.",
	contract.ToolCancelled:       "The task was cancelled.",
	contract.ToolTimedOut:        "The task ran out of time.",
	contract.ToolPollingTimedOut: "No end of the task was seen in time.",
}

// ResultMessage writes the text that the lead's model reads for a delegation
// that ended. A result is passed on whole and untrimmed, and only if the task
// completed; an error only if it did not. A stop reason is named on success and
// failure, and only if it is one that a task may carry. An unknown status reads
// as a failure.
func ResultMessage(status contract.ToolStatus, result, errText string, reason contract.StopReason) (string, Summary) {
	label, capped := capLabels[reason]
	note := ""
	s := Summary{}
	if capped && (status == contract.ToolCompleted || headline(status) == Failed) {
		s.Cap = reason
		note = " (stopped early: " + label + ")"
	}
	s.Headline = headline(status)
	if status == contract.ToolCompleted {
		s.Body, s.BodyText = BodyResult, result
		return "Task succeeded" + note + ". Result:\n" + result, s
	}
	s.Body, s.BodyText = BodyError, strings.TrimSpace(errText)
	s.MetadataError = s.BodyText
	if s.BodyText == "" {
		s.Body, s.StockError = BodyNone, true
		if s.MetadataError = stock[status]; s.MetadataError == "" {
			s.MetadataError = stock[contract.ToolFailed]
		}
	}
	switch {
	case s.Headline == PollingTimedOut:
		return s.MetadataError, s
	case s.Body == BodyNone && note == "":
		return s.MetadataError, s
	}
	text := map[Headline]string{Failed: "Task failed", Cancelled: "Task cancelled", TimedOut: "Task timed out"}[s.Headline] + note + "."
	if s.Body == BodyError {
		text += " Error: " + s.BodyText
	}
	return text, s
}

func headline(status contract.ToolStatus) Headline {
	switch status {
	case contract.ToolCompleted:
		return Succeeded
	case contract.ToolCancelled, contract.ToolTimedOut, contract.ToolPollingTimedOut:
		return Headline(status)
	}
	return Failed
}

// Keys of the metadata on a tool result. Readers ignore keys that they do not
// know.
const (
	StatusKey       = "subagent_status"
	StopReasonKey   = "subagent_stop_reason"
	ErrorKey        = "subagent_error"
	ResultBriefKey  = "subagent_result_brief"
	ResultSHA256Key = "subagent_result_sha256"
	ModelNameKey    = "subagent_model_name"
	TokenUsageKey   = "subagent_token_usage"
)

// MaxMetadataChars bounds a text in the metadata, in code points.
const MaxMetadataChars = 2000

// Facts are what is known of a delegation that ended. Empty means not known.
type Facts struct {
	Status     contract.ToolStatus
	Result     string
	Error      string
	StopReason contract.StopReason
	ModelName  string
	Usage      *contract.Usage
	// Verdict is on the citations of a completed task's result.
	Verdict *contract.ReceiptVerdict
}

// Metadata writes the structured facts of a tool result: they, not its text,
// are the protocol. Only a completed task has a result, bounded and with the
// digest of the whole; only another one has an error. Usage that is unknown or
// makes no sense is left out whole. A status or stop reason that is not one of
// the contract's is refused, so that a slip is noticed here and not by a reader.
func Metadata(f Facts) (map[string]any, error) {
	if _, known := stock[f.Status]; !known && f.Status != contract.ToolCompleted {
		return nil, fmt.Errorf("metadata of a delegation: %q is no tool status", f.Status)
	}
	if f.StopReason != "" && !f.StopReason.ValidForTask() {
		return nil, fmt.Errorf("metadata of a delegation: %q is no stop reason of a task", f.StopReason)
	}
	m := map[string]any{StatusKey: string(f.Status)}
	if f.Status == contract.ToolCompleted {
		if strings.TrimSpace(f.Result) != "" {
			sum := sha256.Sum256([]byte(f.Result))
			m[ResultBriefKey], m[ResultSHA256Key] = Bound(f.Result, MaxMetadataChars), hex.EncodeToString(sum[:])
		}
		if f.Verdict != nil && f.Verdict.Validate() == nil {
			m[ReceiptVerdictKey] = *f.Verdict
		}
	} else if strings.TrimSpace(f.Error) != "" {
		m[ErrorKey] = Bound(f.Error, MaxMetadataChars)
	}
	if f.StopReason != "" {
		m[StopReasonKey] = string(f.StopReason)
	}
	if name := strings.TrimSpace(f.ModelName); name != "" {
		m[ModelNameKey] = name
	}
	if u := f.Usage; u != nil && u.InputTokens >= 0 && u.OutputTokens >= 0 && u.TotalTokens >= 0 {
		m[TokenUsageKey] = map[string]any{"input_tokens": u.InputTokens, "output_tokens": u.OutputTokens, "total_tokens": u.TotalTokens}
	}
	return m, nil
}

// cutMarker stands where [Bound] took text out.
const cutMarker = "\n...\n"

// Bound trims text and, if it is longer than limit code points, keeps its first
// two thirds and its end, with a marker between them. A limit that has no room
// for that cuts the end off.
func Bound(text string, limit int) string {
	text = strings.TrimSpace(text)
	if len(text) <= limit || utf8.RuneCountInString(text) <= limit {
		return text
	}
	runes := []rune(text)
	head := limit * 2 / 3
	tail := limit - head - utf8.RuneCountInString(cutMarker)
	if tail <= 0 {
		return string(runes[:max(0, limit)])
	}
	return string(runes[:head]) + cutMarker + string(runes[len(runes)-tail:])
}
