package waterfall

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// content is what stored events of all types hold, as far as it is drawn.
type content struct {
	Input         string          `json:"input"`
	SubagentType  string          `json:"subagent_type"`
	Description   string          `json:"description"`
	ModelName     string          `json:"model_name"`
	Executor      string          `json:"executor"`
	QueuePosition int             `json:"queue_position"`
	Kind          string          `json:"kind"`
	ToolName      *string         `json:"tool_name"`
	ToolCalls     []call          `json:"tool_calls"`
	Status        string          `json:"status"`
	Usage         *contract.Usage `json:"usage"`
	StopReason    string          `json:"stop_reason"`
	Error         string          `json:"error"`
	ErrorCode     string          `json:"error_code"`
	Message       struct {
		Kind      string  `json:"kind"`
		ToolName  *string `json:"tool_name"`
		ToolCalls []call  `json:"tool_calls"`
	} `json:"message"`
}

type call struct {
	Name string `json:"name"`
}

// agent follows one agent, the lead or an attempt of a task, from step to step. An
// answer of the model took from the step before it; the tools that it called took until
// the last of their results is there, because results are told together.
type agent struct {
	row     *Row
	depth   int
	model   string
	began   bool
	since   time.Time
	calls   []string // of the last answer, as long as their results are not all there
	results int
	turns   int
	tools   int
	attempt int
	out     []Row
}

func (a *agent) begin(at time.Time, model string) {
	if !a.began {
		a.began, a.since = true, at
	}
	a.model = cmp.Or(model, a.model)
}

// step takes in an answer of the model (with the tools it calls) or a result of a tool.
func (a *agent) step(at time.Time, kind string, calls []call) {
	a.begin(at, "") // the beginning is no longer kept
	if kind == contract.StepTool {
		a.results++
		if a.results >= len(a.calls) {
			a.toolsDone(at, false)
		}
		return
	}
	a.toolsDone(at, false)
	a.turns++
	row := a.turn(at)
	row.Turns = a.turns
	a.calls = nil
	for _, c := range calls {
		a.calls = append(a.calls, c.Name)
	}
	if len(calls) > 0 {
		row.Note = "calls " + names(a.calls)
	}
	a.out = append(a.out, row)
	a.results, a.since = 0, at
}

func (a *agent) turn(at time.Time) Row {
	name := "model"
	if a.model != "" {
		name += " " + a.model
	}
	return Row{Depth: a.depth, Kind: KindModel, Name: name, Start: a.since, End: at, Attempt: a.attempt}
}

// toolsDone closes the tools that were called. Those of a lead that are tasks have rows
// of their own.
func (a *agent) toolsDone(at time.Time, open bool) {
	called := len(a.calls)
	own := a.calls
	if a.row != nil && a.row.Kind == KindRun {
		own = slices.DeleteFunc(slices.Clone(own), func(name string) bool { return name == "task" })
	}
	a.tools += len(own)
	if len(own) > 0 {
		row := Row{Depth: a.depth, Kind: KindTool, Name: names(own), Start: a.since, End: at, Open: open, ToolCalls: len(own), Attempt: a.attempt}
		if len(own) < called {
			row.Note = "told with the results of the tasks"
		}
		a.out = append(a.out, row)
	}
	if called > 0 {
		a.calls, a.results, a.since = nil, 0, at
	}
}

// end closes what the agent was in when it ended, or is in now.
func (a *agent) end(at time.Time, open, answered bool) {
	switch {
	case !a.began || answered:
		return
	case len(a.calls) > 0:
		n := len(a.out)
		a.toolsDone(at, open)
		if len(a.out) > n {
			a.out[n].Note = "no result"
			if open {
				a.out[n].Note = "no result yet"
			}
		}
	default:
		row := a.turn(at)
		row.Open, row.minor, row.Note = open, true, "no answer"
		if open {
			row.Note = "no answer yet"
		}
		a.out = append(a.out, row)
	}
}

// names is a list of names, repeats counted.
func names(list []string) string {
	var out []string
	counts := map[string]int{}
	for _, n := range list {
		if counts[n]++; counts[n] == 1 {
			out = append(out, n)
		}
	}
	for i, n := range out {
		if counts[n] > 1 {
			out[i] = fmt.Sprintf("%s ×%d", n, counts[n])
		}
	}
	return strings.Join(out, ", ")
}

// task is what is known about a task.
type task struct {
	row   Row
	rows  []Row
	agent agent

	number   int
	waiting  time.Time // since then, for a slot; zero when it has one
	admitted time.Time // since then it has a slot and nobody has begun; zero otherwise
	position int
	attempt  int
	last     time.Time
	ended    bool
	wait     time.Duration
}

func (t *task) add(rec contract.EventRecord, c content, attempt int) {
	at := rec.CreatedAt
	if c.Description != "" || c.SubagentType != "" {
		t.row.Name = fmt.Sprintf("task %d %s", t.number, cmp.Or(c.Description, c.SubagentType))
	}
	switch rec.EventType {
	case contract.RecordQueued:
		t.waiting, t.position = at, c.QueuePosition
	case contract.RecordAdmitted:
		t.admit(at, attempt)
	case contract.RecordStart:
		if attempt > t.attempt && t.attempt > 0 {
			t.admit(at, attempt) // the gate's event is not here yet, or no longer kept
		}
		t.attempt = max(t.attempt, attempt)
		if !t.admitted.IsZero() {
			t.rows = append(t.rows, Row{Depth: t.row.Depth + 1, Kind: KindStart, Name: "until it begins", Start: t.admitted, End: at, Attempt: attempt, minor: true})
		}
		t.waiting, t.admitted = time.Time{}, time.Time{}
		t.agent = agent{depth: t.row.Depth + 1, attempt: attempt}
		t.agent.begin(at, c.ModelName)
		if c.Executor != "" {
			t.row.Note = "on " + c.Executor
		}
	case contract.RecordStep:
		if attempt >= t.attempt {
			t.agent.step(at, c.Kind, c.ToolCalls)
		}
	case contract.RecordEnd:
		t.close(at, false, c.Status == string(contract.TaskCompleted))
		t.ended, t.row.Open, t.row.End = true, false, at
		t.row.Status, t.row.StopReason, t.row.ErrorCode, t.row.Error, t.row.Usage = c.Status, c.StopReason, c.ErrorCode, firstLine(c.Error), c.Usage
	}
	t.last = at
}

// admit is the beginning of an attempt that has a slot.
func (t *task) admit(at time.Time, attempt int) {
	if attempt > 1 && t.attempt > 0 && t.attempt < attempt {
		t.finishAttempt()
		t.rows = append(t.rows, Row{Depth: t.row.Depth + 1, Kind: KindWait, Name: fmt.Sprintf("until attempt %d", attempt), Start: t.last, End: at, Attempt: attempt})
	} else if !t.waiting.IsZero() {
		t.waited(at, false)
	}
	t.waiting, t.admitted, t.attempt = time.Time{}, at, max(t.attempt, attempt)
}

func (t *task) waited(at time.Time, open bool) {
	row := Row{Depth: t.row.Depth + 1, Kind: KindWait, Name: "wait for a slot", Start: t.waiting, End: at, Open: open, minor: true}
	if t.position > 0 {
		row.Note = fmt.Sprintf("place %d", t.position)
	}
	t.wait += max(0, at.Sub(t.waiting))
	t.rows = append(t.rows, row)
}

// finishAttempt ends an attempt of which nothing more was told than its last step.
func (t *task) finishAttempt() {
	t.agent.end(t.last, false, false)
	t.take()
}

func (t *task) take() {
	for _, r := range t.agent.out {
		if t.attempt > 1 {
			r.Name += fmt.Sprintf(" (attempt %d)", t.attempt)
		}
		t.rows = append(t.rows, r)
	}
	t.row.Turns += t.agent.turns
	t.row.ToolCalls += t.agent.tools
	t.agent = agent{}
}

func (t *task) close(at time.Time, open, answered bool) {
	switch {
	case !t.waiting.IsZero():
		t.waited(at, open)
	case !t.admitted.IsZero():
		t.rows = append(t.rows, Row{Depth: t.row.Depth + 1, Kind: KindStart, Name: "until it begins", Start: t.admitted, End: at, Open: open, Attempt: t.attempt})
	default:
		t.agent.end(at, open, answered)
	}
	t.take()
	t.waiting, t.admitted = time.Time{}, time.Time{}
}

// FromEvents makes a chart of the events of a run, in ascending order of seq. What has
// not ended goes on until now.
func FromEvents(id contract.RunID, records []contract.EventRecord, now time.Time) Chart {
	chart := Chart{RunID: id}
	var run *Row
	lead := agent{depth: 1}
	var tasks []*task
	byID := map[contract.TaskID]*task{}
	var status contract.RunStatus
	for _, rec := range records {
		if rec.CreatedAt.After(now) {
			now = rec.CreatedAt // this machine's clock is behind
		}
	}
	for _, rec := range records {
		var c content
		var m struct {
			Attempt int `json:"attempt"`
		}
		// What is not as expected is left out; the rest is drawn all the same.
		if json.Unmarshal(rec.Content, &c) != nil || len(rec.Metadata) > 0 && json.Unmarshal(rec.Metadata, &m) != nil {
			chart.Notes = append(chart.Notes, fmt.Sprintf("event %d is not of the expected form and left out", rec.Seq))
			continue
		}
		at := rec.CreatedAt
		if rec.TaskID != "" {
			t := byID[rec.TaskID]
			if t == nil {
				t = &task{number: len(tasks) + 1}
				t.row = Row{Kind: KindTask, Name: fmt.Sprintf("task %d", t.number), TaskID: rec.TaskID, Start: at, Open: true}
				if run != nil {
					t.row.Depth = 1
				}
				if rec.EventType != contract.RecordQueued {
					chart.Notes = append(chart.Notes, fmt.Sprintf("the first events of task %d are no longer there", t.number))
				}
				tasks, byID[rec.TaskID] = append(tasks, t), t
			}
			t.add(rec, c, m.Attempt)
			continue
		}
		if run == nil {
			run = &Row{Kind: KindRun, Name: "lead", Start: at, End: now, Open: true}
			lead.row = run
			if rec.EventType != contract.RecordRunStarted {
				chart.Notes = append(chart.Notes, "the first events of the run are no longer there")
			}
		}
		switch rec.EventType {
		case contract.RecordRunStarted:
			lead.begin(at, c.ModelName)
		case contract.RecordRunMessage:
			lead.step(at, c.Message.Kind, c.Message.ToolCalls)
		case contract.RecordRunCompleted, contract.RecordRunFailed, contract.RecordRunCancelled:
			status = contract.RunStatus(strings.TrimPrefix(rec.EventType, "run."))
			lead.end(at, false, status == contract.RunCompleted)
			run.Open, run.End = false, at
			run.Status, run.StopReason, run.ErrorCode, run.Error, run.Usage = string(status), c.StopReason, c.ErrorCode, firstLine(c.Error), c.Usage
		}
	}
	if run != nil && run.Open {
		run.Status = string(contract.RunRunning)
		lead.end(now, true, false)
	}
	chart.assemble(run, lead, tasks, now)
	return chart
}

// assemble puts the rows in order and sums them up.
func (c *Chart) assemble(run *Row, lead agent, tasks []*task, now time.Time) {
	blocks := [][]Row{}
	for _, r := range lead.out {
		blocks = append(blocks, []Row{r})
	}
	turns, tools := lead.turns, lead.tools
	var waited time.Duration
	var statuses []string
	total := &contract.Usage{}
	for _, t := range tasks {
		if !t.ended {
			state := contract.TaskRunning
			if !t.waiting.IsZero() {
				state = contract.TaskQueued
			}
			t.close(now, true, false)
			t.row.Status, t.row.End = string(state), now
		}
		statuses = append(statuses, t.row.Status)
		blocks = append(blocks, append([]Row{t.row}, t.rows...))
		turns, tools, waited = turns+t.row.Turns, tools+t.row.ToolCalls, waited+t.wait
		if u := t.row.Usage; u != nil {
			total.TotalTokens += u.TotalTokens
			if u.CostUSD != nil {
				cost := *u.CostUSD
				if total.CostUSD != nil {
					cost += *total.CostUSD
				}
				total.CostUSD = &cost
			}
		}
	}
	slices.SortStableFunc(blocks, func(a, b []Row) int { return a[0].Start.Compare(b[0].Start) })
	if run != nil {
		run.Turns = lead.turns
		c.Rows = append(c.Rows, *run)
		if run.Usage != nil {
			total = run.Usage // the lead's own included
		}
	}
	for _, b := range blocks {
		c.Rows = append(c.Rows, b...)
	}
	c.finish()
	parts := []string{}
	if run != nil {
		parts = append(parts, cmp.Or(run.Status, string(contract.RunRunning)))
		for _, s := range []string{run.StopReason, run.ErrorCode, run.Error} {
			if s != "" {
				parts = append(parts, s)
			}
		}
	} else if len(statuses) > 0 {
		parts = append(parts, names(statuses))
	}
	parts = append(parts, length(c.End.Sub(c.Start)), count(turns, "turn"), count(tools, "tool call"))
	if len(tasks) > 0 {
		parts = append(parts, count(len(tasks), "task")+" that waited "+length(waited)+" for slots")
	}
	if total.TotalTokens > 0 {
		parts = append(parts, usage(total))
	}
	c.Summary = strings.Join(parts, ", ")
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return s
}
