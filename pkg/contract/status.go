package contract

// State is where a task's record stands. A task without a record is queued.
//
//	(absent) → granted → running → completed | failed | timed_out | cancelled
//	              ↑ ↑_______|  ↓
//	              |______ released
type State string

// The states of a record. Granted, running and released hold a slot.
const (
	StateGranted   State = "granted"
	StateRunning   State = "running"
	StateReleased  State = "released"
	StateCompleted State = "completed"
	StateFailed    State = "failed"
	StateTimedOut  State = "timed_out"
	StateCancelled State = "cancelled"
)

// Terminal reports whether the state is an end: a terminal record is never
// written again.
func (s State) Terminal() bool {
	switch s {
	case StateCompleted, StateFailed, StateTimedOut, StateCancelled:
		return true
	}
	return false
}

// Live reports whether a record in this state holds a slot.
func (s State) Live() bool {
	return s == StateGranted || s == StateRunning || s == StateReleased
}

// Valid reports whether s is one of the states above.
func (s State) Valid() bool { return s.Terminal() || s.Live() }

// TaskStatus is what the outside sees of a task. Granted and released records
// are still queued for the caller: no work is being done.
type TaskStatus string

// The statuses of a task.
const (
	TaskQueued    TaskStatus = "queued"
	TaskRunning   TaskStatus = "running"
	TaskCompleted TaskStatus = "completed"
	TaskFailed    TaskStatus = "failed"
	TaskCancelled TaskStatus = "cancelled"
	TaskTimedOut  TaskStatus = "timed_out"
)

// Status maps the state of a record to what the outside sees.
func (s State) Status() TaskStatus {
	switch {
	case s.Terminal():
		return TaskStatus(s)
	case s == StateRunning:
		return TaskRunning
	}
	return TaskQueued
}

// Terminal reports whether the status is an end.
func (s TaskStatus) Terminal() bool { return State(s).Terminal() }

// Valid reports whether s is one of the statuses above.
func (s TaskStatus) Valid() bool { return s == TaskQueued || s == TaskRunning || s.Terminal() }

// ToolStatus is the status on the tool result that the lead's model reads. It
// has one value more than a task: the lead may give up waiting although the
// task has not ended.
type ToolStatus string

// The statuses of a tool result.
const (
	ToolCompleted       ToolStatus = "completed"
	ToolFailed          ToolStatus = "failed"
	ToolCancelled       ToolStatus = "cancelled"
	ToolTimedOut        ToolStatus = "timed_out"
	ToolPollingTimedOut ToolStatus = "polling_timed_out"
)

// StopReason says that a guard ended work early. It is an addition to a
// status, never a status of its own, so that older readers are not broken by a
// new guard.
type StopReason string

// The stop reasons. Only the first three are legal for a task, the others are
// a run's.
const (
	StopTokenCapped    StopReason = "token_capped"
	StopTurnCapped     StopReason = "turn_capped"
	StopLoopCapped     StopReason = "loop_capped"
	StopSafetyCapped   StopReason = "safety_capped"
	StopSubagentCapped StopReason = "subagent_limit_capped"
	StopLengthCapped   StopReason = "model_length_capped"
)

// ValidForTask reports whether r may stand on a task.
func (r StopReason) ValidForTask() bool {
	return r == StopTokenCapped || r == StopTurnCapped || r == StopLoopCapped
}

// ErrorCode says what kind of failure ended a task; it decides what the
// receiver should do. The list only ever grows.
type ErrorCode string

// The error codes.
const (
	// ErrQueueFull: the bounded queue had no room. Try again later.
	ErrQueueFull ErrorCode = "queue_full"
	// ErrQueueTimeout: no slot came free within the queue timeout. Try again later.
	ErrQueueTimeout ErrorCode = "queue_timeout"
	// ErrExecutorLost: the executor died or was cut off; the work may have had effects.
	ErrExecutorLost ErrorCode = "executor_lost"
	// ErrExecutorStalled: nothing happened in the task for longer than the executor
	// allows, so it was stopped; the work may have had effects.
	ErrExecutorStalled ErrorCode = "executor_stalled"
	// ErrLLM: the model provider failed for good.
	ErrLLM ErrorCode = "llm_error"
	// ErrTool: a tool made it impossible to go on.
	ErrTool ErrorCode = "tool_error"
	// ErrPolicyDenied: a policy forbids this delegation.
	ErrPolicyDenied ErrorCode = "policy_denied"
	// ErrInvalidRequest: the request breaks the contract and never will work.
	ErrInvalidRequest ErrorCode = "invalid_request"
	// ErrInternal: a fault of Herdgate.
	ErrInternal ErrorCode = "internal"
)

// AdmissionFailure reports whether the code means that the task never got a
// slot, so that no attempt was spent.
func (c ErrorCode) AdmissionFailure() bool { return c == ErrQueueFull || c == ErrQueueTimeout }

// RunStatus is where a run of a lead stands.
type RunStatus string

// The statuses of a run.
const (
	RunRunning   RunStatus = "running"
	RunCompleted RunStatus = "completed"
	RunFailed    RunStatus = "failed"
	RunCancelled RunStatus = "cancelled"
)

// Terminal reports whether the status is an end.
func (s RunStatus) Terminal() bool {
	return s == RunCompleted || s == RunFailed || s == RunCancelled
}

// EventType is the CloudEvents type of an event.
type EventType string

// The event types.
const (
	EventTaskQueued    EventType = "task_queued"
	EventTaskAdmitted  EventType = "task_admitted"
	EventTaskStarted   EventType = "task_started"
	EventTaskRunning   EventType = "task_running"
	EventTaskCompleted EventType = "task_completed"
	EventTaskFailed    EventType = "task_failed"
	EventTaskTimedOut  EventType = "task_timed_out"
	EventTaskCancelled EventType = "task_cancelled"
	EventRunStarted    EventType = "run_started"
	EventRunMessage    EventType = "run_message"
	EventRunCompleted  EventType = "run_completed"
	EventRunFailed     EventType = "run_failed"
	EventRunCancelled  EventType = "run_cancelled"
)

// EventTypes lists every event type, in the order of a life.
func EventTypes() []EventType {
	return []EventType{
		EventTaskQueued, EventTaskAdmitted, EventTaskStarted, EventTaskRunning,
		EventTaskCompleted, EventTaskFailed, EventTaskTimedOut, EventTaskCancelled,
		EventRunStarted, EventRunMessage, EventRunCompleted, EventRunFailed, EventRunCancelled,
	}
}

// TerminalEvent is the event type that tells of a terminal state, or "".
func TerminalEvent(s State) EventType {
	if !s.Terminal() {
		return ""
	}
	return EventType("task_" + string(s))
}

// Terminal reports whether the event is the last one of its task or run.
func (t EventType) Terminal() bool { return t.TaskTerminal() || t.RunTerminal() }

// TaskTerminal reports whether the event is the last one of a task.
func (t EventType) TaskTerminal() bool {
	switch t {
	case EventTaskCompleted, EventTaskFailed, EventTaskTimedOut, EventTaskCancelled:
		return true
	}
	return false
}

// RunTerminal reports whether the event is the last one of a run.
func (t EventType) RunTerminal() bool {
	return t == EventRunCompleted || t == EventRunFailed || t == EventRunCancelled
}
