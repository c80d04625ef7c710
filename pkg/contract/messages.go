package contract

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"
)

// Limits on what the messages may carry, in bytes unless they say otherwise.
// A message that breaks one is refused when it is made.
const (
	// MaxRequestBytes bounds an encoded task request.
	MaxRequestBytes = 256 << 10
	// MaxGrantBytes bounds an encoded grant: the request and the fresh record.
	MaxGrantBytes = MaxRequestBytes + 32<<10
	// MaxPromptBytes bounds a prompt, so that a request keeps room for the rest.
	MaxPromptBytes = 192 << 10
	// MaxInlineResultBytes is the largest result inside a record. A larger one
	// lies in the blob store and the record holds a reference and a preview.
	MaxInlineResultBytes = 256 << 10
	// MaxResultBytes is the largest result at all; what is longer is cut and flagged.
	MaxResultBytes = 8 << 20
	// MaxErrorChars bounds an error text, in code points.
	MaxErrorChars = 8192
	// MaxStepChars bounds the text and each argument block of a step, in code points.
	MaxStepChars = 8192
	// MaxDescriptionChars bounds a task's description, in code points.
	MaxDescriptionChars = 1000
	// MaxCriteria and MaxCriterionChars bound acceptance criteria.
	MaxCriteria       = 20
	MaxCriterionChars = 500
	// MaxDepth bounds the nesting of JSON that we accept from outside.
	MaxDepth = 100
)

// TaskRequest asks for one delegation. Everything that the task needs is in
// it, resolved once by whoever publishes it; nothing is looked up again later.
type TaskRequest struct {
	ContractVersion string   `json:"contract_version"`
	TaskID          TaskID   `json:"task_id"`
	RunID           RunID    `json:"run_id"`
	ThreadID        ThreadID `json:"thread_id"`
	Tenant          Tenant   `json:"tenant"`
	Pool            Pool     `json:"pool,omitempty"`
	// ToolCallID is the provider's id of the call that made this task. It is
	// correlation only: providers repeat and omit them.
	ToolCallID string `json:"tool_call_id,omitempty"`
	// Subagent is the definition as it was when the task was made.
	Subagent           Subagent `json:"subagent"`
	Description        string   `json:"description,omitempty"`
	Prompt             string   `json:"prompt"`
	AcceptanceCriteria []string `json:"acceptance_criteria,omitempty"`
	// ParentModel is the model that "inherit" stands for.
	ParentModel string `json:"parent_model,omitempty"`
	// OfferedTools is the parent's tool scope, the outer bound for the child;
	// null offers whatever the executor has.
	OfferedTools []string `json:"offered_tools"`
	// AllowedSubagents is the caller's policy as it was copied when its run began:
	// without it every type is permitted, with [] none. Whoever handles the
	// request goes by this copy alone.
	AllowedSubagents []string `json:"allowed_subagents,omitzero"`
	Identity         Identity `json:"identity"`
	// QueueTimeoutSeconds bounds the wait for a slot; 0 takes the gate's own.
	QueueTimeoutSeconds int       `json:"queue_timeout_seconds,omitempty"`
	CreatedAt           time.Time `json:"created_at"`
}

// Subagent is a resolved sub-agent definition. For the lists, null and empty
// differ: null tools means all that are offered, [] means none; null or []
// disallowed tools deny nothing.
type Subagent struct {
	Name            string   `json:"name"`
	Description     string   `json:"description,omitempty"`
	SystemPrompt    string   `json:"system_prompt,omitempty"`
	Tools           []string `json:"tools"`
	DisallowedTools []string `json:"disallowed_tools"`
	// Model is the name of a configured model, or "inherit".
	Model string `json:"model,omitempty"`
	// Pool is where tasks of this type run unless a request names another; empty
	// is the default pool.
	Pool           Pool `json:"pool,omitempty"`
	MaxTurns       int  `json:"max_turns"`
	TimeoutSeconds int  `json:"timeout_seconds"`
	// Network lets commands of the type's tasks use the network.
	Network bool `json:"network,omitempty"`
	// Skills are the skills that the task may be shown, under its parent's policy
	// already; without it all that are enabled, with [] none.
	Skills []string `json:"skills,omitzero"`
}

// Grant is the right to run one attempt of a task. It is void as soon as the
// task's record has a revision other than the grant's.
type Grant struct {
	TaskID  TaskID `json:"task_id"`
	Attempt int    `json:"attempt"`
	Slot    int    `json:"slot"`
	// Epoch is the leader's revision when the record was written.
	Epoch uint64 `json:"epoch"`
	// Revision is the record's revision: what the claim and the first lease expect.
	Revision uint64 `json:"revision"`
	// LastEventSeq is the sequence of the task's newest event as far as the gate
	// knows: what the executor's first event expects.
	LastEventSeq uint64 `json:"last_event_seq"`
	LeaseTTLMS   int64  `json:"lease_ttl_ms"`
	// Record is the record as it stands at Revision, so that nobody has to read
	// it before the claim: a lagging replica could lie.
	Record  TaskRecord  `json:"record"`
	Request TaskRequest `json:"request"`
}

// TaskRecord is the durable state of a task that was granted or has ended. It
// is state machine and fence in one: every write expects the revision that the
// writer has read, first writes the leader's.
type TaskRecord struct {
	TaskID   TaskID   `json:"task_id"`
	RunID    RunID    `json:"run_id"`
	ThreadID ThreadID `json:"thread_id"`
	Tenant   Tenant   `json:"tenant"`
	Pool     Pool     `json:"pool,omitempty"`
	State    State    `json:"state"`
	// Attempt counts from 1; 0 is a task that ended before it had a slot.
	Attempt int `json:"attempt"`
	// Lost counts the attempts that were lost.
	Lost int `json:"lost,omitempty"`
	Slot int `json:"slot"`
	// Epoch is the leader revision of the newest grant.
	Epoch uint64 `json:"epoch"`
	// Writer names who wrote this revision: process, incarnation and a counter.
	// It is new for each write, so that "was this me?" has one answer.
	Writer     string `json:"writer"`
	RequestSeq uint64 `json:"request_seq"`
	// CancelRequested is the mark by which the gate withdraws a running attempt.
	CancelRequested bool `json:"cancel_requested,omitempty"`
	// Started says of a released record whether any effect had begun.
	Started  bool   `json:"started,omitempty"`
	Executor string `json:"executor,omitempty"`

	SubagentType   string `json:"subagent_type"`
	Description    string `json:"description,omitempty"`
	TimeoutSeconds int    `json:"timeout_seconds,omitempty"`
	// TraceParent and TraceState are those of the delegation, so that every
	// event made from the record alone hangs in the right trace.
	TraceParent string `json:"traceparent,omitempty"`
	TraceState  string `json:"tracestate,omitempty"`

	QueuedAt   time.Time  `json:"queued_at"`
	GrantedAt  *time.Time `json:"granted_at,omitempty"`
	StartedAt  *time.Time `json:"started_at,omitempty"`
	FinishedAt *time.Time `json:"finished_at,omitempty"`
	// Date is the date that the agent was told, in the deployment's time zone: its
	// newest attempt's.
	Date string `json:"date,omitempty"`

	// The terminal fields.
	Result string `json:"result,omitempty"`
	// ResultRef points to the whole result when it was too large for the
	// record; Result then holds its beginning.
	ResultRef        *BlobRef   `json:"result_ref,omitempty"`
	ResultTruncated  bool       `json:"result_truncated,omitempty"`
	Error            string     `json:"error,omitempty"`
	ErrorCode        ErrorCode  `json:"error_code,omitempty"`
	StopReason       StopReason `json:"stop_reason,omitempty"`
	AdmissionFailure bool       `json:"admission_failure,omitempty"`
	ModelName        string     `json:"model_name,omitempty"`
	Usage            *Usage     `json:"usage,omitempty"`
	// Receipts tell which tools really ran. They stand in the same write as the
	// end, so that nobody sees an end without them.
	Receipts []Receipt `json:"receipts,omitempty"`
	// ReceiptVerdict compares the citations of a completed task's result with them.
	ReceiptVerdict *ReceiptVerdict `json:"receipt_verdict,omitempty"`
}

// Receipt is the evidence that a tool call happened, made by the executor and
// never by a model.
type Receipt struct {
	// ID is r1, r2 … in the order of the calls.
	ID         string `json:"id"`
	ToolCallID string `json:"tool_call_id,omitempty"`
	ToolName   string `json:"tool_name,omitempty"`
	Status     string `json:"status,omitempty"` // success, error or partial_success
	// ArgsSHA256 and OutputSHA256 are the first 16 hexadecimal digits.
	ArgsSHA256   string     `json:"args_sha256,omitempty"`
	OutputSHA256 string     `json:"output_sha256,omitempty"`
	OutputBytes  int64      `json:"output_bytes,omitempty"`
	CreatedAt    *time.Time `json:"created_at,omitempty"`
}

// BlobRef points into the blob store.
type BlobRef struct {
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
	Size   int64  `json:"size"`
}

// Lease is the value of a task's heartbeat key.
type Lease struct {
	Executor string `json:"executor"`
	Attempt  int    `json:"attempt"`
}

// Leader is the value of the leader key.
type Leader struct {
	// Holder is the process name with its random incarnation.
	Holder string `json:"holder"`
	// Writer is new for each write (see [TaskRecord.Writer]).
	Writer string `json:"writer"`
}

// AdmissionLimits is what the gate enforces. Leads read it from the limits key and
// never from a configuration file, so that nobody is promised more than there is.
type AdmissionLimits struct {
	// MaxRunning is the capacity of the default pool, Pools that of the others.
	MaxRunning          int          `json:"max_running"`
	Pools               map[Pool]int `json:"pools,omitempty"`
	MaxQueued           int          `json:"max_queued"`
	AdmissionPolicy     string       `json:"admission_policy"`
	QueueTimeoutSeconds int          `json:"queue_timeout_seconds"`
}

// Capacity is how many tasks may run at once, over all pools.
func (l AdmissionLimits) Capacity() int {
	n := l.MaxRunning
	for _, more := range l.Pools {
		n += more
	}
	return n
}

// Cancel is the value of a cancellation key.
type Cancel struct {
	Reason      string    `json:"reason,omitempty"`
	RequestedAt time.Time `json:"requested_at"`
}

// Trial says how often a grant was opened that had been delivered before, and
// neither led to a claim nor was given back: whoever opened it did not live to
// tell.
type Trial struct {
	Attempt int `json:"attempt"`
	Times   int `json:"times"`
	// Executor is who opened it last.
	Executor string `json:"executor,omitempty"`
}

// Usage counts tokens. A task without any figure from its provider has no
// Usage at all: unknown is never zero.
type Usage struct {
	InputTokens  int64 `json:"input_tokens"`
	OutputTokens int64 `json:"output_tokens"`
	TotalTokens  int64 `json:"total_tokens"`
	// CacheReadTokens is the part of the input that the provider had cached.
	CacheReadTokens int64 `json:"cache_read_tokens,omitempty"`
	// CostUSD is what the tokens cost, of the calls whose model has a price in the
	// configuration; nil if none has.
	CostUSD *Money `json:"cost_usd,omitempty"`
}

// Money is an amount in US dollars. It is written in plain decimals, at most nine
// of them.
type Money float64

// MarshalJSON writes the amount.
func (m Money) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(m)) || math.IsInf(float64(m), 0) {
		return nil, fmt.Errorf("an amount of %v cannot be written", float64(m))
	}
	return strconv.AppendFloat(nil, float64(m.round()), 'f', -1, 64), nil
}

// round cuts what adding in binary leaves behind the ninth decimal.
func (m Money) round() Money { return Money(math.Round(float64(m)*1e9) / 1e9) }

// addMoney is the sum of two amounts, either of which may be unknown.
func addMoney(a, b *Money) *Money {
	if a == nil && b == nil {
		return nil
	}
	var sum Money
	for _, m := range []*Money{a, b} {
		if m != nil {
			sum += *m
		}
	}
	sum = sum.round()
	return &sum
}

// Add returns the sum of two figures, either of which may be unknown.
func (u *Usage) Add(v *Usage) *Usage {
	switch {
	case u == nil && v == nil:
		return nil
	case u == nil:
		w := *v
		return &w
	case v == nil:
		w := *u
		return &w
	}
	return &Usage{
		InputTokens:     u.InputTokens + v.InputTokens,
		OutputTokens:    u.OutputTokens + v.OutputTokens,
		TotalTokens:     u.TotalTokens + v.TotalTokens,
		CacheReadTokens: u.CacheReadTokens + v.CacheReadTokens,
		CostUSD:         addMoney(u.CostUSD, v.CostUSD),
	}
}

// Step is one assistant message or tool result of a sub-agent, bounded for
// display and storage.
type Step struct {
	Kind      string `json:"kind"` // "ai" or "tool"
	Text      string `json:"text"`
	Truncated bool   `json:"truncated"`
	// ToolCalls are those of an "ai" step; never null there.
	ToolCalls []StepCall `json:"tool_calls"`
	// ToolName is that of a "tool" step; null when the tool is not known.
	ToolName *string `json:"tool_name"`
}

// MarshalJSON writes the keys that belong to the step's kind: an assistant step
// always has tool_calls, a tool step always has tool_name.
func (s Step) MarshalJSON() ([]byte, error) {
	if s.Kind == StepTool {
		return json.Marshal(struct {
			Kind      string  `json:"kind"`
			Text      string  `json:"text"`
			Truncated bool    `json:"truncated"`
			ToolName  *string `json:"tool_name"`
		}{s.Kind, s.Text, s.Truncated, s.ToolName})
	}
	calls := s.ToolCalls
	if calls == nil {
		calls = []StepCall{}
	}
	return json.Marshal(struct {
		Kind      string     `json:"kind"`
		Text      string     `json:"text"`
		Truncated bool       `json:"truncated"`
		ToolCalls []StepCall `json:"tool_calls"`
	}{s.Kind, s.Text, s.Truncated, calls})
}

// The kinds of steps.
const (
	StepAI   = "ai"
	StepTool = "tool"
)

// StepCall is one tool call of an assistant step. Args is the arguments as
// JSON, or a JSON string with the beginning of them when they were too long.
type StepCall struct {
	Name          string          `json:"name"`
	Args          json.RawMessage `json:"args"`
	ArgsTruncated bool            `json:"args_truncated,omitempty"`
}

// The data of the events, one type each.

// TaskQueuedData is the data of task_queued.
type TaskQueuedData struct {
	TaskID        TaskID `json:"task_id"`
	SubagentType  string `json:"subagent_type"`
	Description   string `json:"description"`
	QueuePosition int    `json:"queue_position"` // 1 is next; 0 got a slot at once
}

// TaskAdmittedData is the data of task_admitted.
type TaskAdmittedData struct {
	TaskID TaskID `json:"task_id"`
	// Pool whose slot it is; empty is the default pool.
	Pool     Pool  `json:"pool,omitempty"`
	Slot     int   `json:"slot"`
	WaitedMS int64 `json:"waited_ms"`
}

// TaskStartedData is the data of task_started.
type TaskStartedData struct {
	TaskID         TaskID `json:"task_id"`
	Description    string `json:"description"`
	SubagentType   string `json:"subagent_type"`
	ModelName      string `json:"model_name"`
	MaxTurns       int    `json:"max_turns"`
	TimeoutSeconds int    `json:"timeout_seconds"`
	Executor       string `json:"executor"`
}

// TaskRunningData is the data of task_running.
type TaskRunningData struct {
	TaskID TaskID `json:"task_id"`
	// MessageIndex counts the steps of an attempt from 1 without a gap.
	MessageIndex int    `json:"message_index"`
	Message      Step   `json:"message"`
	ModelName    string `json:"model_name,omitempty"`
	// Usage is the sum so far: snapshots replace each other, they are not added.
	Usage *Usage `json:"usage,omitempty"`
}

// TaskEndData is the data of the four terminal task events.
type TaskEndData struct {
	TaskID           TaskID     `json:"task_id"`
	Status           TaskStatus `json:"status"`
	Result           string     `json:"result,omitempty"`
	ResultTruncated  bool       `json:"result_truncated,omitempty"`
	Error            string     `json:"error,omitempty"`
	ErrorTruncated   bool       `json:"error_truncated,omitempty"`
	ErrorCode        ErrorCode  `json:"error_code,omitempty"`
	StopReason       StopReason `json:"stop_reason,omitempty"`
	AdmissionFailure bool       `json:"admission_failure,omitempty"`
	ModelName        string     `json:"model_name,omitempty"`
	Usage            *Usage     `json:"usage,omitempty"`
	DurationMS       int64      `json:"duration_ms"`
	QueueMS          int64      `json:"queue_ms"`
}

// RunStartedData is the data of run_started.
type RunStartedData struct {
	RunID     RunID  `json:"run_id"`
	Input     string `json:"input"`
	Truncated bool   `json:"truncated,omitempty"`
	ModelName string `json:"model_name"`
	Lead      string `json:"lead"`
}

// RunMessageData is the data of run_message: one message of the lead itself.
type RunMessageData struct {
	RunID        RunID  `json:"run_id"`
	MessageIndex int    `json:"message_index"`
	Message      Step   `json:"message"`
	ModelName    string `json:"model_name,omitempty"`
	Usage        *Usage `json:"usage,omitempty"`
}

// RunEndData is the data of the three terminal run events.
type RunEndData struct {
	RunID           RunID      `json:"run_id"`
	Status          RunStatus  `json:"status"`
	Output          string     `json:"output,omitempty"`
	OutputTruncated bool       `json:"output_truncated,omitempty"`
	Error           string     `json:"error,omitempty"`
	ErrorTruncated  bool       `json:"error_truncated,omitempty"`
	ErrorCode       ErrorCode  `json:"error_code,omitempty"`
	StopReason      StopReason `json:"stop_reason,omitempty"`
	ModelName       string     `json:"model_name,omitempty"`
	Usage           *Usage     `json:"usage,omitempty"`
	DurationMS      int64      `json:"duration_ms"`
}

// EventRecord is a stored event, as the read side returns it. Content and
// metadata come back as structured as they went in.
type EventRecord struct {
	// Seq is the event's sequence in its stream: the same live and stored, on
	// every replica, strictly rising within a thread.
	Seq       uint64          `json:"seq"`
	EventID   string          `json:"event_id"`
	Tenant    Tenant          `json:"tenant"`
	ThreadID  ThreadID        `json:"thread_id"`
	RunID     RunID           `json:"run_id"`
	TaskID    TaskID          `json:"task_id"`    // null in events of a run
	EventType string          `json:"event_type"` // at most 32 characters
	Category  string          `json:"category"`   // "subagent" or "run"
	Content   json.RawMessage `json:"content"`
	Metadata  json.RawMessage `json:"metadata"`
	CreatedAt time.Time       `json:"created_at"`
}

// Event types and categories of stored events.
const (
	RecordQueued   = "subagent.queued"
	RecordAdmitted = "subagent.admitted"
	RecordStart    = "subagent.start"
	RecordStep     = "subagent.step"
	RecordEnd      = "subagent.end"

	RecordRunStarted   = "run.started"
	RecordRunMessage   = "run.message"
	RecordRunCompleted = "run.completed"
	RecordRunFailed    = "run.failed"
	RecordRunCancelled = "run.cancelled"

	CategorySubagent = "subagent"
	CategoryRun      = "run"
)

// Delegation is one entry of a run's ledger.
type Delegation struct {
	TaskID       TaskID     `json:"task_id"`
	ToolCallID   string     `json:"tool_call_id,omitempty"`
	RunID        RunID      `json:"run_id"`
	Description  string     `json:"description"`
	SubagentType string     `json:"subagent_type"`
	Status       string     `json:"status"` // in_progress or a tool status
	StopReason   StopReason `json:"stop_reason,omitempty"`
	ErrorCode    ErrorCode  `json:"error_code,omitempty"`
	ResultBrief  string     `json:"result_brief,omitempty"`
	// ResultSHA256 is the hexadecimal digest of the whole result.
	ResultSHA256 string `json:"result_sha256,omitempty"`
	// MessageID is the message of the run with which the delegation came back.
	MessageID string    `json:"message_id,omitempty"`
	ModelName string    `json:"model_name,omitempty"`
	Usage     *Usage    `json:"usage,omitempty"`
	CreatedAt time.Time `json:"created_at"`
}

// DelegationInProgress is the status of a delegation that has not come back.
const DelegationInProgress = "in_progress"

// RunRecord is the durable state of a lead's run. It is written after every
// step, by compare-and-set, so that any replica can answer for the run and
// another one can take it over.
type RunRecord struct {
	RunID    RunID     `json:"run_id"`
	ThreadID ThreadID  `json:"thread_id"`
	Tenant   Tenant    `json:"tenant"`
	Status   RunStatus `json:"status"`
	Input    string    `json:"input"`
	Model    string    `json:"model"`
	// Owner is the lead process that drives the run.
	Owner string `json:"owner"`
	// Writer is new for each write (see [TaskRecord.Writer]).
	Writer      string       `json:"writer"`
	Output      string       `json:"output,omitempty"`
	Error       string       `json:"error,omitempty"`
	ErrorCode   ErrorCode    `json:"error_code,omitempty"`
	StopReason  StopReason   `json:"stop_reason,omitempty"`
	Usage       *Usage       `json:"usage,omitempty"`
	Delegations []Delegation `json:"delegations,omitempty"`
	// Messages is the lead's own conversation, opaque to everybody else.
	Messages json.RawMessage `json:"messages,omitempty"`
	// Options holds the request's options as they were resolved when it came in.
	Options     RunOptions        `json:"options"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	Tags        []string          `json:"tags,omitempty"`
	TraceParent string            `json:"traceparent,omitempty"`
	TraceID     string            `json:"trace_id,omitempty"`
	CreatedAt   time.Time         `json:"created_at"`
	FinishedAt  *time.Time        `json:"finished_at,omitempty"`
}

// RunOptions are the limits of one run.
type RunOptions struct {
	SubagentEnabled bool `json:"subagent_enabled"`
	// MaxConcurrentSubagents and MaxTotalSubagents are the enforced numbers.
	MaxConcurrentSubagents int `json:"max_concurrent_subagents"`
	MaxTotalSubagents      int `json:"max_total_subagents"`
	// AllowedSubagents: null allows all, [] none.
	AllowedSubagents []string `json:"allowed_subagents"`
	// AvailableSkills: without it all that are enabled, with [] none.
	AvailableSkills []string `json:"available_skills,omitzero"`
}
