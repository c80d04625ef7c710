// Package progress turns the events of a run into what a person wants to see:
// a line for each event that is worth one, the state of each task, and a table
// at the end. It only computes; package main prints, view.go draws.
package progress

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/pkg/contract"
)

// The states of a task beside its statuses.
const (
	// StateAdmitted: it has a slot, and no executor has begun yet.
	StateAdmitted = "admitted"
)

const (
	// maxText bounds a text within a line, in characters.
	maxText = 100
	// maxTasks bounds the tasks that are kept: a run has at most 50.
	maxTasks = 200
)

// Task is what the events have told about one task.
type Task struct {
	// Number counts the tasks of the run from 1, in the order of their events.
	Number      int
	ID          contract.TaskID
	Type        string
	Description string
	Model       string
	Executor    string
	// State is a status, or StateAdmitted.
	State   string
	Attempt int
	// Steps counts the messages of the current attempt, answers of the model and
	// results of tools.
	Steps    int
	LastTool string
	// Usage is nil while nothing is known.
	Usage      *contract.Usage
	QueuedAt   time.Time
	StartedAt  time.Time
	EndedAt    time.Time
	QueueMS    int64
	DurationMS int64
	StopReason string
	ErrorCode  string
	Error      string
}

// Name is how lines call the task.
func (t *Task) Name() string { return fmt.Sprintf("task %d", t.Number) }

// Ended reports whether the task has ended.
func (t *Task) Ended() bool { return contract.TaskStatus(t.State).Terminal() }

// Elapsed is how long the task has been in its present phase: waiting or
// running; of one that has ended, how long it ran.
func (t *Task) Elapsed(now time.Time) time.Duration {
	switch {
	case t.Ended() && t.DurationMS > 0:
		return time.Duration(t.DurationMS) * time.Millisecond
	case t.Ended():
		return 0
	case !t.StartedAt.IsZero() && t.State == string(contract.TaskRunning):
		return max(0, now.Sub(t.StartedAt))
	case !t.QueuedAt.IsZero():
		return max(0, now.Sub(t.QueuedAt))
	}
	return 0
}

// Tokens is the text for the tokens used so far.
func (t *Task) Tokens() string {
	if t.Usage == nil {
		return "-"
	}
	return fmt.Sprint(t.Usage.TotalTokens)
}

// Run is the state of a run.
type Run struct {
	ID       contract.RunID
	Status   contract.RunStatus
	Model    string
	LastText string
	Tasks    []*Task

	byID map[contract.TaskID]*Task
}

// New returns the state of a run of which nothing is known yet.
func New(id contract.RunID) *Run {
	return &Run{ID: id, Status: contract.RunRunning, byID: map[contract.TaskID]*Task{}}
}

// Line is something that has happened.
type Line struct{ Who, What, Text string }

// String is the line in columns; it is safe to print.
func (l Line) String() string {
	return strings.TrimRight(fmt.Sprintf("%-10s %-10s %s", printable.Line(l.Who), printable.Line(l.What), printable.Line(l.Text)), " ")
}

// content is what the records of all types hold, as far as it is shown.
type content struct {
	SubagentType  string          `json:"subagent_type"`
	Description   string          `json:"description"`
	ModelName     string          `json:"model_name"`
	Executor      string          `json:"executor"`
	QueuePosition int             `json:"queue_position"`
	Slot          int             `json:"slot"`
	WaitedMS      int64           `json:"waited_ms"`
	Kind          string          `json:"kind"`
	Text          string          `json:"text"`
	ToolName      *string         `json:"tool_name"`
	ToolCalls     []call          `json:"tool_calls"`
	Status        string          `json:"status"`
	Usage         *contract.Usage `json:"usage"`
	DurationMS    int64           `json:"duration_ms"`
	QueueMS       int64           `json:"queue_ms"`
	StopReason    string          `json:"stop_reason"`
	Error         string          `json:"error"`
	ErrorCode     string          `json:"error_code"`
	Message       struct {
		Kind      string `json:"kind"`
		Text      string `json:"text"`
		ToolCalls []call `json:"tool_calls"`
	} `json:"message"`
}

type call struct {
	Name string `json:"name"`
}

type metadata struct {
	Attempt int             `json:"attempt"`
	Usage   *contract.Usage `json:"usage"`
}

// Add takes in the next record of the run and returns what is worth a line.
// Records of unknown types or of an unexpected form are passed over.
func (r *Run) Add(rec contract.EventRecord) []Line {
	var c content
	if len(rec.Content) > 0 && json.Unmarshal(rec.Content, &c) != nil {
		return nil
	}
	var m metadata
	if len(rec.Metadata) > 0 && json.Unmarshal(rec.Metadata, &m) != nil {
		return nil
	}
	if rec.TaskID != "" {
		return r.task(rec, c, m)
	}
	switch rec.EventType {
	case contract.RecordRunStarted:
		r.Model = printable.Cut(c.ModelName, maxText)
		return []Line{{"run", "started", string(rec.RunID)}}
	case contract.RecordRunMessage:
		return r.message(c)
	case contract.RecordRunCompleted:
		r.Status = contract.RunCompleted
	case contract.RecordRunFailed:
		r.Status = contract.RunFailed
	case contract.RecordRunCancelled:
		r.Status = contract.RunCancelled
	default:
		return nil
	}
	return []Line{{"run", string(r.Status), ending("", c)}}
}

// message shows what the lead says while it goes on; its last answer is the
// result and not shown here.
func (r *Run) message(c content) []Line {
	if c.Message.Kind != contract.StepAI {
		return nil
	}
	text := firstLine(c.Message.Text)
	if text != "" {
		r.LastText = text
	}
	if text == "" || len(c.Message.ToolCalls) == 0 {
		return nil
	}
	return []Line{{"lead", "", text}}
}

func (r *Run) task(rec contract.EventRecord, c content, m metadata) []Line {
	t := r.byID[rec.TaskID]
	if t == nil {
		if len(r.Tasks) == maxTasks {
			return nil
		}
		t = &Task{Number: len(r.Tasks) + 1, ID: rec.TaskID, State: string(contract.TaskQueued), QueuedAt: rec.CreatedAt}
		r.byID[rec.TaskID] = t
		r.Tasks = append(r.Tasks, t)
	}
	t.Attempt = max(t.Attempt, m.Attempt)
	set(&t.Type, c.SubagentType)
	set(&t.Description, c.Description)
	set(&t.Model, c.ModelName)
	switch rec.EventType {
	case contract.RecordQueued:
		text := t.Description
		if c.QueuePosition > 0 {
			text += fmt.Sprintf(" (place %d)", c.QueuePosition)
		}
		return []Line{{t.Name(), "queued", printable.Cut(text, maxText)}}
	case contract.RecordAdmitted:
		t.State = StateAdmitted
		return nil
	case contract.RecordStart:
		t.State, t.StartedAt, t.Executor = string(contract.TaskRunning), rec.CreatedAt, printable.Cut(c.Executor, maxText)
		t.Steps, t.LastTool, t.Usage = 0, "", nil
		text := t.Type + ", " + t.Model
		if t.Attempt > 1 {
			text += fmt.Sprintf(", attempt %d", t.Attempt)
		}
		return []Line{{t.Name(), "started", printable.Cut(text, maxText)}}
	case contract.RecordStep:
		return t.step(c, m)
	case contract.RecordEnd:
		t.State, t.EndedAt = printable.Cut(c.Status, 20), rec.CreatedAt
		t.QueueMS, t.DurationMS = c.QueueMS, c.DurationMS
		t.StopReason, t.ErrorCode, t.Error = printable.Cut(c.StopReason, 40), printable.Cut(c.ErrorCode, 40), firstLine(c.Error)
		if c.Usage != nil {
			t.Usage = c.Usage
		}
		return []Line{{t.Name(), t.State, ending(count(t.Steps, "step"), c)}}
	}
	return nil
}

func (t *Task) step(c content, m metadata) []Line {
	t.Steps++
	if m.Usage != nil {
		t.Usage = m.Usage
	}
	if c.Kind != contract.StepAI || len(c.ToolCalls) == 0 {
		return nil
	}
	var names []string
	for _, call := range c.ToolCalls {
		names = append(names, printable.Cut(call.Name, 40))
	}
	t.LastTool = names[len(names)-1]
	return []Line{{t.Name(), "running", printable.Cut(strings.Join(names, ", "), maxText)}}
}

// ending is the text of a last line.
func ending(first string, c content) string {
	var parts []string
	if first != "" {
		parts = append(parts, first)
	}
	parts = append(parts, Seconds(time.Duration(c.DurationMS)*time.Millisecond))
	if c.Usage != nil {
		parts = append(parts, fmt.Sprintf("%d tokens", c.Usage.TotalTokens))
		if cost := c.Usage.CostUSD; cost != nil {
			parts = append(parts, Dollars(*cost))
		}
	}
	if c.StopReason != "" {
		parts = append(parts, c.StopReason)
	}
	if c.ErrorCode != "" {
		parts = append(parts, c.ErrorCode)
	}
	if c.Error != "" {
		parts = append(parts, firstLine(c.Error))
	}
	return strings.Join(parts, ", ")
}

// Dollars is an amount for people: $12.35, $0.0123, and what is less than a
// hundredth of a cent as that.
func Dollars(m contract.Money) string {
	switch v := float64(m); {
	case v >= 1:
		return fmt.Sprintf("$%.2f", v)
	case v > 0 && v < 0.0001:
		return "< $0.0001"
	default:
		return fmt.Sprintf("$%.4f", v)
	}
}

// Seconds is a duration for people: 0.3 s, 12 s, 4 min 5 s.
func Seconds(d time.Duration) string {
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	}
	return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return printable.Cut(s, maxText)
}

func set(field *string, value string) {
	if value != "" {
		*field = printable.Cut(value, maxText)
	}
}
