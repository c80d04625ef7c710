// Package wire holds the JSON of the lead's HTTP API, for its server and its
// client alike. The OpenAPI document is made from these types, so the tags doc,
// enum, minLength and the like are part of the interface.
package wire

import (
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Codes of problems. The list only ever grows.
const (
	CodeInvalidRequest   = "invalid_request"
	CodeUnauthorized     = "unauthorized"
	CodeForbidden        = "forbidden"
	CodeNotFound         = "not_found"
	CodeMethodNotAllowed = "method_not_allowed"
	CodeAlreadyFinished  = "already_finished"
	CodeQueueFull        = "queue_full"
	CodePayloadTooLarge  = "payload_too_large"
	CodePrecondition     = "precondition_failed"
	CodeUnavailable      = "unavailable"
	CodeInternal         = "internal"
)

// Limits of the API.
const (
	// DefaultEvents and MaxEvents bound a page of events.
	DefaultEvents = 500
	MaxEvents     = 2000
	// DefaultPage and MaxPage bound a page of runs or tasks.
	DefaultPage = 50
	MaxPage     = 200
)

// EventGap is the name of the SSE event that tells of events that are no
// longer kept; its data is a [Gap].
const EventGap = "gap"

// RunRequest is the body of POST /v1/runs.
type RunRequest struct {
	Input                  string            `json:"input" minLength:"1" doc:"what the lead agent is asked to do"`
	ThreadID               string            `json:"thread_id,omitempty" maxLength:"512" doc:"the conversation to go on with; a new one when left out"`
	Model                  string            `json:"model,omitempty" maxLength:"256" doc:"name of a configured model"`
	MaxConcurrentSubagents *int              `json:"max_concurrent_subagents,omitempty" doc:"sub-agents at once for one answer of the lead; brought into the allowed range"`
	MaxTotalSubagents      *int              `json:"max_total_subagents,omitempty" doc:"sub-agents in the whole run; brought into the allowed range"`
	SubagentEnabled        *bool             `json:"subagent_enabled,omitempty" doc:"false takes delegation away from this run"`
	AllowedSubagents       []string          `json:"allowed_subagents,omitzero" required:"false" maxItems:"1000" doc:"sub-agent types that may be used; null allows all, [] none"`
	AvailableSkills        []string          `json:"available_skills,omitzero" required:"false" maxItems:"1000" doc:"skills that the lead and its sub-agents may use; null allows all, [] none"`
	Metadata               map[string]string `json:"metadata,omitempty" doc:"free text for the caller, at most 32 entries"`
	Tags                   []string          `json:"tags,omitempty" maxItems:"32"`
}

// RunAccepted is the answer to POST /v1/runs.
type RunAccepted struct {
	RunID    contract.RunID     `json:"run_id"`
	ThreadID contract.ThreadID  `json:"thread_id"`
	Status   contract.RunStatus `json:"status" enum:"running,completed,failed,cancelled"`
	TraceID  string             `json:"trace_id"`
}

// Run is a run as GET /v1/runs/{run_id} shows it.
type Run struct {
	RunID       contract.RunID        `json:"run_id"`
	ThreadID    contract.ThreadID     `json:"thread_id"`
	Status      contract.RunStatus    `json:"status" enum:"running,completed,failed,cancelled"`
	Input       string                `json:"input,omitempty"`
	Output      *string               `json:"output" doc:"the final answer; null until there is one"`
	Error       *string               `json:"error"`
	ErrorCode   contract.ErrorCode    `json:"error_code,omitempty"`
	StopReason  *string               `json:"stop_reason"`
	Model       string                `json:"model,omitempty"`
	Usage       *contract.Usage       `json:"usage" doc:"tokens of the lead and its sub-agents; null when unknown"`
	Delegations []contract.Delegation `json:"delegations"`
	Metadata    map[string]string     `json:"metadata,omitempty"`
	Tags        []string              `json:"tags,omitempty"`
	TraceID     string                `json:"trace_id"`
	CreatedAt   time.Time             `json:"created_at"`
	FinishedAt  *time.Time            `json:"finished_at"`
}

// NewRun shows a run's record.
func NewRun(r contract.RunRecord) Run {
	delegations := r.Delegations
	if delegations == nil {
		delegations = []contract.Delegation{}
	}
	return Run{
		RunID: r.RunID, ThreadID: r.ThreadID, Status: r.Status, Input: r.Input,
		Output: text(r.Output), Error: text(r.Error), ErrorCode: r.ErrorCode, StopReason: text(string(r.StopReason)),
		Model: r.Model, Usage: r.Usage, Delegations: delegations, Metadata: r.Metadata, Tags: r.Tags,
		TraceID: r.TraceID, CreatedAt: r.CreatedAt, FinishedAt: r.FinishedAt,
	}
}

// RunPage is a page of runs, newest first.
type RunPage struct {
	Runs []Run `json:"runs"`
	// NextCursor is empty on the last page.
	NextCursor string `json:"next_cursor,omitempty"`
}

// TaskRequest is the body of POST /v1/tasks.
type TaskRequest struct {
	SubagentType       string   `json:"subagent_type" minLength:"1" maxLength:"128"`
	Prompt             string   `json:"prompt" minLength:"1"`
	Description        string   `json:"description,omitempty" maxLength:"1000" doc:"a few words for people; the beginning of the prompt when left out"`
	AcceptanceCriteria []string `json:"acceptance_criteria,omitempty" maxItems:"20"`
	ThreadID           string   `json:"thread_id,omitempty" maxLength:"512"`
	Model              string   `json:"model,omitempty" maxLength:"256"`
	TimeoutSeconds     *int     `json:"timeout_seconds,omitempty" minimum:"1" maximum:"86400"`
}

// TaskAccepted is the answer to POST /v1/tasks.
type TaskAccepted struct {
	TaskID        contract.TaskID     `json:"task_id"`
	RunID         contract.RunID      `json:"run_id"`
	ThreadID      contract.ThreadID   `json:"thread_id"`
	Status        contract.TaskStatus `json:"status" enum:"queued"`
	QueuePosition int                 `json:"queue_position" doc:"1 is next; 0 when a slot seems to be free"`
}

// Task is a task as GET /v1/tasks/{task_id} shows it.
type Task struct {
	TaskID           contract.TaskID          `json:"task_id"`
	RunID            contract.RunID           `json:"run_id"`
	ThreadID         contract.ThreadID        `json:"thread_id"`
	Status           contract.TaskStatus      `json:"status" enum:"queued,running,completed,failed,cancelled,timed_out"`
	SubagentType     string                   `json:"subagent_type"`
	Description      string                   `json:"description"`
	Attempt          int                      `json:"attempt" doc:"counts from 1; 0 before the first"`
	QueuePosition    *int                     `json:"queue_position,omitempty" doc:"1 is next; only while queued and when the gate answered"`
	Result           *string                  `json:"result"`
	ResultTruncated  bool                     `json:"result_truncated,omitempty" doc:"result is only the beginning; lists always cut at 2000 characters"`
	Error            *string                  `json:"error"`
	ErrorCode        contract.ErrorCode       `json:"error_code,omitempty"`
	StopReason       *string                  `json:"stop_reason"`
	AdmissionFailure bool                     `json:"admission_failure,omitempty" doc:"the task never got a slot, so no attempt was spent"`
	CancelRequested  bool                     `json:"cancel_requested,omitempty"`
	Executor         string                   `json:"executor,omitempty"`
	ModelName        *string                  `json:"model_name"`
	Usage            *contract.Usage          `json:"usage"`
	Receipts         []contract.Receipt       `json:"receipts,omitempty" doc:"evidence of tool calls, made by the executor; left out of lists"`
	ReceiptVerdict   *contract.ReceiptVerdict `json:"receipt_verdict,omitempty" doc:"whether the calls that the result cites happened, not whether its claims are right"`
	QueuedAt         time.Time                `json:"queued_at"`
	StartedAt        *time.Time               `json:"started_at"`
	FinishedAt       *time.Time               `json:"finished_at"`
	TraceID          string                   `json:"trace_id"`
}

// TaskOf shows a task's record.
func TaskOf(r contract.TaskRecord) Task {
	verdict := r.ReceiptVerdict
	if verdict != nil && verdict.Validate() != nil {
		verdict = nil
	}
	return Task{
		TaskID: r.TaskID, RunID: r.RunID, ThreadID: r.ThreadID, Status: r.State.Status(),
		SubagentType: r.SubagentType, Description: r.Description, Attempt: r.Attempt,
		Result: text(r.Result), ResultTruncated: r.ResultTruncated, Error: text(r.Error), ErrorCode: r.ErrorCode,
		StopReason: text(string(r.StopReason)), AdmissionFailure: r.AdmissionFailure, CancelRequested: r.CancelRequested,
		Executor: r.Executor, ModelName: text(r.ModelName), Usage: r.Usage,
		Receipts: r.Receipts, ReceiptVerdict: verdict,
		QueuedAt: r.QueuedAt, StartedAt: r.StartedAt, FinishedAt: r.FinishedAt, TraceID: TraceID(r.TraceParent),
	}
}

// TaskWaiting shows a request that has no record yet. Traceparent is that of
// the request's message.
func TaskWaiting(r contract.TaskRequest, traceparent string) Task {
	return Task{
		TaskID: r.TaskID, RunID: r.RunID, ThreadID: r.ThreadID, Status: contract.TaskQueued,
		SubagentType: r.Subagent.Name, Description: r.Description, QueuedAt: r.CreatedAt, TraceID: TraceID(traceparent),
	}
}

// TaskPage is a page of tasks, newest first.
type TaskPage struct {
	Tasks []Task `json:"tasks"`
	// NextCursor is empty on the last page.
	NextCursor string `json:"next_cursor,omitempty"`
}

// Cancelling is the answer to a cancellation that was accepted.
type Cancelling struct {
	TaskID contract.TaskID `json:"task_id,omitempty"`
	RunID  contract.RunID  `json:"run_id,omitempty"`
	Status string          `json:"status" enum:"cancelling"`
}

// StatusCancelling is the status in a [Cancelling].
const StatusCancelling = "cancelling"

// EventPage is a page of events in ascending seq.
type EventPage struct {
	Events []contract.EventRecord `json:"events"`
	// NextAfterSeq is the after_seq of the next page.
	NextAfterSeq uint64 `json:"next_after_seq"`
	HasMore      bool   `json:"has_more"`
	// PrunedSeq is the seq up to which events were deleted because of their age.
	PrunedSeq uint64 `json:"pruned_seq,omitempty"`
}

// Gap tells that the events from FromSeq to ToSeq, both included, cannot be
// had any more. A FromSeq at or below the reader's own position means that the
// numbering began anew: the reader goes on after FromSeq - 1.
type Gap struct {
	FromSeq uint64 `json:"from_seq"`
	ToSeq   uint64 `json:"to_seq"`
}

// Subagent is a sub-agent type. What is not enabled, or shadowed by another
// definition of its name, does not exist for tasks; only administrators see it.
type Subagent struct {
	Name        string `json:"name"`
	Source      string `json:"source" enum:"builtin,config,file,managed"`
	Description string `json:"description"`
	Enabled     bool   `json:"enabled"`
	ShadowedBy  string `json:"shadowed_by,omitempty" enum:"builtin,config,file" doc:"whose definition of this name counts instead"`
	DisplayName string `json:"display_name,omitempty"`
	// SystemPrompt is only in the answer about a single type.
	SystemPrompt    string   `json:"system_prompt,omitempty" doc:"for administrators, and in the answer about a single type only"`
	Tools           []string `json:"tools" nullable:"true" doc:"null: all that are offered; []: none"`
	DisallowedTools []string `json:"disallowed_tools" nullable:"true"`
	Skills          []string `json:"skills" nullable:"true" doc:"null: those of the parent; []: none"`
	Model           string   `json:"model"`
	Pool            string   `json:"pool,omitempty"`
	MaxTurns        int      `json:"max_turns"`
	TimeoutSeconds  int      `json:"timeout_seconds"`
	Network         bool     `json:"network,omitempty"`
	Revision        uint64   `json:"revision,omitempty" doc:"of a managed definition; as an ETag it is a text in quotes"`
	Path            string   `json:"path,omitempty" doc:"file of the definition, for administrators"`
}

// Usable reports whether a task may name the type.
func (s Subagent) Usable() bool { return s.Enabled && s.ShadowedBy == "" }

// SubagentRequest is the body of PUT /v1/subagents/{name}.
type SubagentRequest struct {
	Description     string   `json:"description" minLength:"1" doc:"what the type is for; the lead's model reads it"`
	SystemPrompt    string   `json:"system_prompt" minLength:"1"`
	DisplayName     *string  `json:"display_name,omitempty" nullable:"true"`
	Tools           []string `json:"tools,omitzero" nullable:"true" maxItems:"1000" doc:"missing or null: all that are offered; []: none"`
	DisallowedTools []string `json:"disallowed_tools,omitzero" nullable:"true" maxItems:"1000" doc:"task, ask_clarification and present_files are always denied as well"`
	Skills          []string `json:"skills,omitzero" nullable:"true" maxItems:"1000" doc:"missing or null: those of the parent; []: none"`
	Model           string   `json:"model,omitempty" maxLength:"128" doc:"name of a configured model, or inherit: the parent's"`
	Pool            string   `json:"pool,omitempty" maxLength:"64"`
	MaxTurns        *int     `json:"max_turns,omitempty" minimum:"1" doc:"default 50"`
	TimeoutSeconds  *int     `json:"timeout_seconds,omitempty" minimum:"1" doc:"default 900"`
	Network         bool     `json:"network,omitempty" doc:"whether commands of the type may use the network"`
	Enabled         *bool    `json:"enabled,omitempty" doc:"default true; a type that is not enabled stays stored and cannot be used"`
}

// Problem is an error as RFC 9457 shows it, with a stable code.
type Problem struct {
	Type   string `json:"type,omitempty" doc:"always about:blank: code tells what happened"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Code   string `json:"code" doc:"stable; programs decide by it"`
	Detail string `json:"detail,omitempty"`
	// FinishedStatus is the status of what had finished already.
	FinishedStatus string         `json:"finished_status,omitempty"`
	Errors         []ProblemFault `json:"errors,omitempty" maxItems:"20"`
}

// Error returns the detail, or the title where there is none.
func (p *Problem) Error() string {
	if p.Detail == "" {
		return p.Title
	}
	return p.Detail
}

// GetStatus returns the HTTP status.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType returns the media type in which a problem is sent.
func (p *Problem) ContentType(string) string { return ProblemType }

// ProblemType is the media type of a [Problem].
const ProblemType = "application/problem+json"

// ProblemFault is one fault of a request.
type ProblemFault struct {
	Location string `json:"location,omitempty" doc:"where, as in body.input or query.limit"`
	Message  string `json:"message"`
}

// TraceID takes the trace id out of a traceparent, or returns "".
func TraceID(traceparent string) string {
	if len(traceparent) < 35 {
		return ""
	}
	return traceparent[3:35]
}

func text(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
