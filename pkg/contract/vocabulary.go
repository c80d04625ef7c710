package contract

import "strings"

// The lists of all words, in the order in which they are explained in their
// types. Whoever prints, documents or checks a vocabulary takes it from here.

// States lists the states of a task's record.
func States() []State {
	return []State{StateGranted, StateRunning, StateReleased, StateCompleted, StateFailed, StateTimedOut, StateCancelled}
}

// TaskStatuses lists what the outside may see of a task.
func TaskStatuses() []TaskStatus {
	return []TaskStatus{TaskQueued, TaskRunning, TaskCompleted, TaskFailed, TaskCancelled, TaskTimedOut}
}

// ToolStatuses lists the statuses of a tool result.
func ToolStatuses() []ToolStatus {
	return []ToolStatus{ToolCompleted, ToolFailed, ToolCancelled, ToolTimedOut, ToolPollingTimedOut}
}

// RunStatuses lists the statuses of a run.
func RunStatuses() []RunStatus {
	return []RunStatus{RunRunning, RunCompleted, RunFailed, RunCancelled}
}

// StopReasons lists the stop reasons, those of tasks first.
func StopReasons() []StopReason {
	return []StopReason{StopTokenCapped, StopTurnCapped, StopLoopCapped, StopSafetyCapped, StopSubagentCapped, StopLengthCapped}
}

// ErrorCodes lists the codes of failures.
func ErrorCodes() []ErrorCode {
	return []ErrorCode{
		ErrQueueFull, ErrQueueTimeout, ErrExecutorLost, ErrExecutorStalled, ErrLLM, ErrTool, ErrPolicyDenied, ErrInvalidRequest, ErrInternal,
	}
}

// Record is the event_type under which events of the type are stored.
func (t EventType) Record() string {
	switch t {
	case EventTaskQueued:
		return RecordQueued
	case EventTaskAdmitted:
		return RecordAdmitted
	case EventTaskStarted:
		return RecordStart
	case EventTaskRunning:
		return RecordStep
	case EventTaskCompleted, EventTaskFailed, EventTaskTimedOut, EventTaskCancelled:
		return RecordEnd
	case EventRunStarted:
		return RecordRunStarted
	case EventRunMessage:
		return RecordRunMessage
	case EventRunCompleted:
		return RecordRunCompleted
	case EventRunFailed:
		return RecordRunFailed
	case EventRunCancelled:
		return RecordRunCancelled
	}
	return ""
}

// Category is the category under which events of the type are stored.
func (t EventType) Category() string {
	switch rec := t.Record(); {
	case strings.HasPrefix(rec, CategorySubagent+"."):
		return CategorySubagent
	case rec != "":
		return CategoryRun
	}
	return ""
}
