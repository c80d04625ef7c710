package event

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// MaxRunOutputChars bounds the output of a run in its last event, in code
// points. The whole output is in the run's record.
const MaxRunOutputChars = 65536

// ErrNotFinished is returned when a terminal event is asked for and the record
// has not ended.
var ErrNotFinished = errors.New("record has not ended")

// Queued is the event of an accepted request; position 1 is next, 0 got a slot
// at once. Its id is <task_id>.0.task_queued.
func Queued(req contract.TaskRequest, traceparent, tracestate string, position int, source string, at time.Time) envelope.Event {
	description, _ := Truncate(Sanitize(req.Description), contract.MaxDescriptionChars)
	ev := build(contract.EventTaskQueued, contract.TaskQueuedData{
		TaskID: req.TaskID, SubagentType: boundName(req.Subagent.Name), Description: description, QueuePosition: max(0, position),
	})
	ev.ID = taskEventID(req.TaskID, 0, contract.EventTaskQueued)
	ev.Tenant, ev.ThreadID, ev.RunID, ev.TaskID = req.Tenant, req.ThreadID, req.RunID, req.TaskID
	return finish(ev, string(req.TaskID), source, at, traceparent, tracestate)
}

// Admitted is the event of a granted slot. Its id is
// <task_id>.<attempt>.task_admitted.
func Admitted(rec contract.TaskRecord, source string, at time.Time) envelope.Event {
	var waited time.Duration
	if rec.GrantedAt != nil {
		waited = rec.GrantedAt.Sub(rec.QueuedAt)
	}
	data := contract.TaskAdmittedData{TaskID: rec.TaskID, Slot: rec.Slot, WaitedMS: millis(waited)}
	if rec.Pool != contract.DefaultPool {
		data.Pool = rec.Pool
	}
	ev := build(contract.EventTaskAdmitted, data)
	ev.ID = taskEventID(rec.TaskID, rec.Attempt, contract.EventTaskAdmitted)
	return ofTask(ev, rec, source, at)
}

// Started is the event of an attempt whose work begins. Task id, and what data
// leaves empty of description and type, come from the record. Its id is
// <task_id>.<attempt>.task_started.
func Started(rec contract.TaskRecord, data contract.TaskStartedData, source string, at time.Time) envelope.Event {
	data.TaskID = rec.TaskID
	if data.Description == "" {
		data.Description = rec.Description
	}
	if data.SubagentType == "" {
		data.SubagentType = rec.SubagentType
	}
	data.Description, _ = Truncate(Sanitize(data.Description), contract.MaxDescriptionChars)
	data.SubagentType, data.ModelName, data.Executor = boundName(data.SubagentType), boundName(data.ModelName), boundName(data.Executor)
	ev := build(contract.EventTaskStarted, data)
	ev.ID = taskEventID(rec.TaskID, rec.Attempt, contract.EventTaskStarted)
	return ofTask(ev, rec, source, at)
}

// Running is the event of one step; index counts from 1 without a gap within
// the attempt, usage is the sum so far or nil. Its id is
// <task_id>.<attempt>.task_running.<index>.
func Running(rec contract.TaskRecord, index int, step contract.Step, model string, usage *contract.Usage, source string, at time.Time) envelope.Event {
	ev := build(contract.EventTaskRunning, contract.TaskRunningData{
		TaskID: rec.TaskID, MessageIndex: index, Message: boundStep(step), ModelName: boundName(model), Usage: cleanUsage(usage),
	})
	ev.ID = taskEventID(rec.TaskID, rec.Attempt, contract.EventTaskRunning) + "." + strconv.Itoa(index)
	return ofTask(ev, rec, source, at)
}

// Terminal is the last event of a task, made from its terminal record alone,
// its time included, so that whoever publishes it publishes the same. Its id is
// <task_id>.end. Result and error are cut to [contract.MaxStepChars]; the whole
// ones are in the record. A record that has not ended is [ErrNotFinished].
func Terminal(rec contract.TaskRecord, source string) (envelope.Event, error) {
	if !rec.State.Terminal() || rec.FinishedAt == nil {
		return envelope.Event{}, fmt.Errorf("terminal event of task %s in state %q: %w", rec.TaskID, rec.State, ErrNotFinished)
	}
	data := contract.TaskEndData{
		TaskID: rec.TaskID, Status: rec.State.Status(), ErrorCode: rec.ErrorCode, StopReason: rec.StopReason,
		AdmissionFailure: rec.AdmissionFailure, ModelName: boundName(rec.ModelName), Usage: cleanUsage(rec.Usage),
	}
	// Only a completed task has a result, only another one an error.
	if rec.State == contract.StateCompleted {
		data.Result, data.ResultTruncated = Truncate(Sanitize(rec.Result), contract.MaxStepChars)
		data.ResultTruncated = data.ResultTruncated || rec.ResultTruncated || rec.ResultRef != nil
	} else {
		data.Error, data.ErrorTruncated = Truncate(Sanitize(rec.Error), contract.MaxStepChars)
	}
	end, granted := *rec.FinishedAt, rec.GrantedAt
	if granted != nil {
		data.QueueMS = millis(granted.Sub(rec.QueuedAt))
		data.DurationMS = millis(end.Sub(*granted))
	} else {
		data.QueueMS = millis(end.Sub(rec.QueuedAt))
	}
	if rec.StartedAt != nil {
		data.DurationMS = millis(end.Sub(*rec.StartedAt))
	}
	ev := build(contract.TerminalEvent(rec.State), data)
	ev.ID = string(rec.TaskID) + ".end"
	return ofTask(ev, rec, source, end), nil
}

// RunStarted is the first event of a run. Its id is <run_id>.run_started.
func RunStarted(run contract.RunRecord, source string, at time.Time) envelope.Event {
	input, cut := Truncate(Sanitize(run.Input), contract.MaxStepChars)
	ev := build(contract.EventRunStarted, contract.RunStartedData{
		RunID: run.RunID, Input: input, Truncated: cut, ModelName: boundName(run.Model), Lead: boundName(run.Owner),
	})
	ev.ID = string(run.RunID) + "." + string(contract.EventRunStarted)
	return ofRun(ev, run, source, at)
}

// RunMessage is the event of one message of the lead itself, counted from 1.
// Its id is <run_id>.run_message.<index>.
func RunMessage(run contract.RunRecord, index int, step contract.Step, model string, usage *contract.Usage, source string, at time.Time) envelope.Event {
	ev := build(contract.EventRunMessage, contract.RunMessageData{
		RunID: run.RunID, MessageIndex: index, Message: boundStep(step), ModelName: boundName(model), Usage: cleanUsage(usage),
	})
	ev.ID = string(run.RunID) + "." + string(contract.EventRunMessage) + "." + strconv.Itoa(index)
	return ofRun(ev, run, source, at)
}

// RunEnd is the last event of a run, made from its record alone. Its id is
// <run_id>.end. The output is cut to [MaxRunOutputChars]. A run that has not
// ended is [ErrNotFinished].
func RunEnd(run contract.RunRecord, source string) (envelope.Event, error) {
	if !run.Status.Terminal() || run.FinishedAt == nil {
		return envelope.Event{}, fmt.Errorf("terminal event of run %s in status %q: %w", run.RunID, run.Status, ErrNotFinished)
	}
	data := contract.RunEndData{
		RunID: run.RunID, Status: run.Status, ErrorCode: run.ErrorCode, StopReason: run.StopReason,
		ModelName: boundName(run.Model), Usage: cleanUsage(run.Usage), DurationMS: millis(run.FinishedAt.Sub(run.CreatedAt)),
	}
	data.Output, data.OutputTruncated = Truncate(Sanitize(run.Output), MaxRunOutputChars)
	data.Error, data.ErrorTruncated = Truncate(Sanitize(run.Error), contract.MaxStepChars)
	ev := build(contract.EventType("run_"+string(run.Status)), data)
	ev.ID = string(run.RunID) + ".end"
	return ofRun(ev, run, source, *run.FinishedAt), nil
}

func taskEventID(id contract.TaskID, attempt int, t contract.EventType) string {
	return string(id) + "." + strconv.Itoa(attempt) + "." + string(t)
}

// build encodes data. It cannot fail for the types of this package: their
// texts are sanitised and the only raw JSON, a step's arguments, went through
// boundStep.
func build(t contract.EventType, data any) envelope.Event {
	ev, err := envelope.New(t, data)
	if err != nil {
		return envelope.Event{Type: t, DataSchema: envelope.DataSchema(t)}
	}
	return ev
}

func ofTask(ev envelope.Event, rec contract.TaskRecord, source string, at time.Time) envelope.Event {
	ev.Tenant, ev.ThreadID, ev.RunID, ev.TaskID = rec.Tenant, rec.ThreadID, rec.RunID, rec.TaskID
	ev.Attempt = max(0, rec.Attempt)
	return finish(ev, string(rec.TaskID), source, at, rec.TraceParent, rec.TraceState)
}

func ofRun(ev envelope.Event, run contract.RunRecord, source string, at time.Time) envelope.Event {
	ev.Tenant, ev.ThreadID, ev.RunID = run.Tenant, run.ThreadID, run.RunID
	return finish(ev, string(run.RunID), source, at, run.TraceParent, "")
}

// finish fills what all events have. Trace context that is malformed is left
// out: it must not make the event unpublishable.
func finish(ev envelope.Event, subject, source string, at time.Time, traceparent, tracestate string) envelope.Event {
	ev.Subject, ev.Source, ev.Time = subject, source, at.UTC()
	if envelope.ValidTraceParent(traceparent) {
		ev.TraceParent = traceparent
		if envelope.ValidTraceState(tracestate) {
			ev.TraceState = tracestate
		}
	}
	return ev
}

// millis is d in whole milliseconds; clocks of two machines may disagree, so
// that a negative one counts as none.
func millis(d time.Duration) int64 { return max(0, d.Milliseconds()) }
