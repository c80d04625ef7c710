package e2e

import (
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"

	_ "github.com/herdgate/herdgate/services/eventsink/sqlite" // the driver
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "herdgate-e2e")
	if err == nil {
		err = build(dir)
	}
	code := 1
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// script is the model of the tests: what a task does stands in its prompt.
const script = `
rules:
  - agent: lead
    match: "delegate"
    turns:
      - tool_calls:
          - { name: task, args: { description: "first part", prompt: "read the first note", subagent_type: general-purpose } }
          - { name: task, args: { description: "second part", prompt: "read the second note", subagent_type: general-purpose } }
        usage: { input_tokens: 10, output_tokens: 5 }
      - text: "Both parts: {{ range .ToolResults }}{{ .Text }} {{ end }}"
        usage: { input_tokens: 20, output_tokens: 5 }
  - agent: general-purpose
    match: "note"
    turns:
      - tool_calls: [{ name: bash, args: { command: "echo found-it; pwd" } }]
        usage: { input_tokens: 3, output_tokens: 1 }
      - text: "The note says {{ .LastToolResult }}"
        usage: { input_tokens: 3, output_tokens: 1 }
  - match: "sleep in bash"
    turns:
      - tool_calls: [{ name: bash, args: { command: "sleep 600 & sleep 601" } }]
      - text: "slept"
  - match: "very long"
    turns: [{ delay_ms: 600000, text: "late" }]
  - match: "two seconds"
    turns: [{ delay_ms: 2000, text: "ok" }]
  - match: "short"
    turns: [{ delay_ms: 30, text: "ok", usage: { input_tokens: 1, output_tokens: 1 } }]
default: { turns: [{ text: "nothing to do" }] }
`

const quick = `subagent_runtime: { lease_ttl_seconds: 3, leader_ttl_seconds: 3 }
`

func (f *Fleet) submit(t *testing.T, prompt string) wire.TaskAccepted {
	t.Helper()
	acc, err := f.API.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: prompt})
	if err != nil {
		t.Fatal(err)
	}
	return acc
}

func (f *Fleet) task(t *testing.T, id contract.TaskID) wire.Task {
	t.Helper()
	task, err := f.API.GetTask(deadline(t), id)
	if err != nil {
		t.Fatal(err)
	}
	return task
}

func (f *Fleet) waitFor(t *testing.T, id contract.TaskID, ok func(wire.Task) bool) wire.Task {
	t.Helper()
	var task wire.Task
	eventually(t, func() (bool, string) {
		task = f.task(t, id)
		return ok(task), fmt.Sprintf("task %s is %s", id, task.Status)
	})
	return task
}

func ended(task wire.Task) bool { return task.Status.Terminal() }

// rows reads the event store's file, as an operator would.
func (f *Fleet) rows(t *testing.T, query string, args ...any) [][]any {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(f.dir, "data", "events.db")+"?mode=ro&_pragma=busy_timeout(5000)")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := db.QueryContext(deadline(t), query, args...)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	cols, err := rows.Columns()
	if err != nil {
		t.Fatal(err)
	}
	var out [][]any
	for rows.Next() {
		row := make([]any, len(cols))
		ptrs := make([]any, len(cols))
		for i := range row {
			ptrs[i] = &row[i]
		}
		if err := rows.Scan(ptrs...); err != nil {
			t.Fatal(err)
		}
		out = append(out, row)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// all reads every event of the store through the API.
func (f *Fleet) all(t *testing.T, q client.EventQuery) []contract.EventRecord {
	t.Helper()
	var out []contract.EventRecord
	after := uint64(0)
	for {
		page, err := f.API.ListEvents(deadline(t), q, after)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, page.Events...)
		if !page.HasMore {
			return out
		}
		after = page.NextAfterSeq
	}
}

// The main job over four processes and a NATS server of its own: run, SSE,
// answer, events, database, trace. ARCH-05, EVT-12, EVT-17, I6, I10.
func TestFourProcesses(t *testing.T) {
	t.Parallel()
	spans := NewCollector(t)
	f := NewFleet(t, script, `telemetry: { otlp_endpoint: "`+spans.URL+`" }`)
	lead, admission, executor, sink := f.All()
	acc, err := f.API.StartRun(deadline(t), wire.RunRequest{Input: "please delegate"})
	if err != nil {
		t.Fatal(err)
	}
	var feed []contract.EventRecord
	if err := f.API.Stream(deadline(t), client.EventQuery{RunID: acc.RunID}, 0, func(e contract.EventRecord) error {
		feed = append(feed, e)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if last := feed[len(feed)-1].EventType; last != contract.RecordRunCompleted {
		t.Errorf("the feed ends with %s", last)
	}
	run, err := f.API.GetRun(deadline(t), acc.RunID)
	if err != nil {
		t.Fatal(err)
	}
	if run.Output == nil || strings.Count(*run.Output, "found-it") != 2 {
		t.Errorf("output = %v", run.Output)
	}
	// 2 turns of the lead and 2 of each task: 15 + 25 + 4 × 4.
	if run.Usage == nil || run.Usage.TotalTokens != 56 {
		t.Errorf("usage = %+v, want 56 tokens", run.Usage)
	}
	stored := f.all(t, client.EventQuery{RunID: acc.RunID})
	if len(stored) != len(feed) {
		t.Fatalf("%d events stored, %d followed", len(stored), len(feed))
	}
	for i := range feed {
		if stored[i].Seq != feed[i].Seq || stored[i].EventID != feed[i].EventID {
			t.Errorf("event %d: stored %d %s, followed %d %s", i, stored[i].Seq, stored[i].EventID, feed[i].Seq, feed[i].EventID)
		}
	}
	for _, e := range feed {
		if e.EventType == contract.RecordStart && !strings.Contains(string(e.Content), `"model_name"`) {
			t.Errorf("which model ran is not told: %s", e.Content)
		}
	}
	if n := f.rows(t, `SELECT count(*) FROM events WHERE run_id = ?`, string(acc.RunID))[0][0]; n != int64(len(feed)) {
		t.Errorf("%v rows in the database, want %d", n, len(feed))
	}
	f.judge(t, invariant.Options{MaxRunning: 3})
	// SIGTERM flushes the last spans.
	for _, p := range []*Proc{lead, executor, admission, sink} {
		p.Stop()
	}
	if why := spans.Check(run.TraceID); why != "" {
		t.Error(why)
	}
}

// I1, I2, ADM-05: sixty tasks at once, three at a time, in the order of
// submission.
func TestSixtyTasks(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "")
	f.All()
	const n = 60
	var ids []contract.TaskID
	for range n {
		ids = append(ids, f.submit(t, "short").TaskID)
	}
	for _, id := range ids {
		if task := f.waitFor(t, id, ended); task.Status != contract.TaskCompleted {
			t.Errorf("%s: %s", id, task.Status)
		}
	}
	past := f.judge(t, invariant.Options{MaxRunning: 3})
	var started []contract.TaskID
	for _, e := range past {
		if e.EventType == contract.RecordStart {
			started = append(started, e.TaskID)
		}
	}
	if !slices.Equal(started, ids) {
		t.Errorf("tasks were started in another order than submitted")
	}
	f.inOrder(t, past, ids)
}

// I3, ADM-04: of eighty long tasks 67 fit, and 13 are told to come back.
func TestBurst(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "")
	f.All()
	accepted, refused := 0, 0
	for range 80 {
		_, err := f.API.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: "very long"})
		var e *client.Error
		switch {
		case err == nil:
			accepted++
		case errors.As(err, &e) && e.Status == 429 && e.Code == "queue_full" && e.RetryAfter > 0:
			refused++
		default:
			t.Fatal(err)
		}
	}
	if accepted != 67 || refused != 13 {
		t.Errorf("%d accepted and %d refused; want 67 and 13", accepted, refused)
	}
	eventually(t, func() (bool, string) {
		st, err := f.API.Admission(deadline(t))
		return err == nil && st.Running == 3 && st.Queued == 64, fmt.Sprintf("%+v %v", st, err)
	})
	for _, v := range invariant.Check(f.all(t, client.EventQuery{}), invariant.Options{MaxRunning: 3}) {
		t.Error(v)
	}
}

// I8: the executor dies while it runs a task of a lead's run. The run ends, the
// slot is free within the lease and a second.
func TestExecutorKilled(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, strings.Replace(script, `prompt: "read the first note"`, `prompt: "very long"`, 1), quick)
	_, _, executor, _ := f.All()
	acc, err := f.API.StartRun(deadline(t), wire.RunRequest{Input: "please delegate"})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() (bool, string) {
		return len(f.all(t, client.EventQuery{RunID: acc.RunID, Types: []string{contract.RecordEnd}})) == 1, "the short task has not ended"
	})
	executor.Kill()
	began := time.Now()
	f.service("executor")
	eventually(t, func() (bool, string) {
		st, err := f.API.Admission(deadline(t))
		return err == nil && st.Running == 0, fmt.Sprintf("%+v %v", st, err)
	})
	if d := time.Since(began); d > 4*time.Second {
		t.Errorf("the slot came back after %v; the lease is 3 s", d)
	}
	var run wire.Run
	eventually(t, func() (bool, string) {
		run, err = f.API.GetRun(deadline(t), acc.RunID)
		return err == nil && run.Status.Terminal(), fmt.Sprint(run.Status, err)
	})
	if run.Status != contract.RunCompleted || !strings.Contains(*run.Output, "found-it") {
		t.Errorf("run = %+v", run)
	}
	lost := 0
	for _, d := range run.Delegations {
		if d.ErrorCode == contract.ErrExecutorLost {
			lost++
		}
	}
	if lost != 1 {
		t.Errorf("delegations = %+v; want one executor_lost", run.Delegations)
	}
	f.judge(t, invariant.Options{MaxRunning: 3})
}

// ADM-08, I2: the gate dies with twenty waiting; after a restart all run in the
// old order.
func TestAdmissionKilled(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, quick)
	_, admission, _, _ := f.All()
	var ids []contract.TaskID
	for range 3 {
		ids = append(ids, f.submit(t, "two seconds").TaskID)
	}
	for range 20 {
		ids = append(ids, f.submit(t, "short").TaskID)
	}
	eventually(t, func() (bool, string) {
		st, err := f.API.Admission(deadline(t))
		return err == nil && st.Running == 3 && st.Queued == 20, fmt.Sprintf("%+v %v", st, err)
	})
	admission.Kill()
	f.service("admission")
	for _, id := range ids {
		if task := f.waitFor(t, id, ended); task.Status != contract.TaskCompleted || task.Attempt != 1 {
			t.Errorf("%s: %s, attempt %d", id, task.Status, task.Attempt)
		}
	}
	f.inOrder(t, f.judge(t, invariant.Options{MaxRunning: 3}), ids)
}

// I6, EVT-14: the sink dies again and again; no event is missing or doubled.
func TestSinkKilled(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "")
	_, _, _, sink := f.All()
	const n = 60
	var ids []contract.TaskID
	for i := range n {
		ids = append(ids, f.submit(t, "short").TaskID)
		if i%15 == 7 {
			sink.Kill()
			sink = f.service("eventsink")
		}
	}
	for _, id := range ids {
		f.waitFor(t, id, ended)
	}
	// queued, admitted, start, one step, end
	eventually(t, func() (bool, string) {
		got := f.rows(t, `SELECT count(*), count(DISTINCT event_id), count(DISTINCT task_id) FROM events WHERE task_id <> ''`)[0]
		return got[0] == int64(5*n) && got[1] == int64(5*n) && got[2] == int64(n), fmt.Sprintf("rows, ids, tasks = %v; want %d, %d, %d", got, 5*n, 5*n, n)
	})
	for _, row := range f.rows(t, `SELECT task_id, group_concat(event_type, ' ') FROM (SELECT task_id, event_type FROM events WHERE task_id <> '' ORDER BY seq) GROUP BY task_id`) {
		if row[1] != "subagent.queued subagent.admitted subagent.start subagent.step subagent.end" {
			t.Errorf("%v: %v", row[0], row[1])
		}
	}
	f.judge(t, invariant.Options{MaxRunning: 3})
}

// I7, CANCEL-01, CANCEL-02: a stop that stops.
func TestCancel(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, strings.ReplaceAll(script, "sleep 600 & sleep 601", "sleep 600.25 & sleep 601.25"), "")
	f.All()
	acc := f.submit(t, "sleep in bash")
	eventually(t, func() (bool, string) { return len(processes("sleep 601.25")) > 0, "the command has not begun" })
	began := time.Now()
	if err := f.API.CancelTask(deadline(t), acc.TaskID); err != nil {
		t.Fatal(err)
	}
	task := f.waitFor(t, acc.TaskID, ended)
	if d := time.Since(began); d > 2*time.Second || task.Status != contract.TaskCancelled {
		t.Errorf("%s after %v", task.Status, d)
	}
	for _, p := range []string{"sleep 600.25", "sleep 601.25"} {
		if left := processes(p); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	}
	var e *client.Error
	if err := f.API.CancelTask(deadline(t), acc.TaskID); !errors.As(err, &e) || e.Status != 409 || e.Code != "already_finished" {
		t.Errorf("cancelling it again: %v", err)
	}
	f.judge(t, invariant.Options{MaxRunning: 3})
}

// The services wait for what they need and say so; SIGTERM ends them in order.
func TestStartBeforeNATS(t *testing.T) {
	t.Parallel()
	f := &Fleet{t: t, dir: t.TempDir()}
	f.write("script.yaml", script)
	f.config = f.write("herdgate.yaml", fmt.Sprintf("nats: { url: nats://127.0.0.1:%d }\nmodels: [{ name: offline, provider: script, script: script.yaml }]\n", freePort(t)))
	p := f.start("executor", "executor", "--config", f.config, "--data-dir", filepath.Join(f.dir, "data"))
	eventually(t, func() (bool, string) { return strings.Contains(p.out.String(), "NATS"), p.out.String() })
	p.Stop()
}
