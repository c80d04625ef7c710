package progress

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var begin = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// record makes a record; it comes at second after the run's begin.
func record(task contract.TaskID, typ string, second int, content, metadata string) contract.EventRecord {
	return contract.EventRecord{
		RunID: "r_1", TaskID: task, EventType: typ, Content: json.RawMessage(content), Metadata: json.RawMessage(metadata),
		CreatedAt: begin.Add(time.Duration(second) * time.Second),
	}
}

func life() []contract.EventRecord {
	return []contract.EventRecord{
		record("", "run.started", 0, `{"model_name":"main","input":"x"}`, `{}`),
		record("", "run.message", 1, `{"message_index":1,"message":{"kind":"ai","text":"Both at once.\nMore.","tool_calls":[{"name":"task"}]}}`, `{"message_index":1}`),
		record("t_1", "subagent.queued", 1, `{"description":"first","subagent_type":"general-purpose","queue_position":0}`, `{}`),
		record("t_2", "subagent.queued", 1, `{"description":"second","subagent_type":"bash","queue_position":4}`, `{}`),
		record("t_1", "subagent.admitted", 2, `{"slot":1,"waited_ms":10}`, `{"attempt":1}`),
		record("t_1", "subagent.start", 3, `{"description":"first","subagent_type":"general-purpose","model_name":"main","executor":"ex-1"}`, `{"attempt":1}`),
		record("t_1", "subagent.step", 4, `{"kind":"ai","message_index":1,"text":"hm","tool_calls":[{"name":"grep"},{"name":"ls"}]}`, `{"attempt":1,"usage":{"total_tokens":7}}`),
		record("t_1", "subagent.step", 5, `{"kind":"tool","message_index":2,"text":"out","tool_name":"grep"}`, `{"attempt":1}`),
		record("t_1", "subagent.step", 5, `{"kind":"ai","message_index":3,"text":"done","tool_calls":[]}`, `{"attempt":1,"usage":{"total_tokens":20}}`),
		record("t_1", "subagent.end", 6, `{"status":"completed","result":"r","duration_ms":3000,"queue_ms":2000,"usage":{"input_tokens":15,"output_tokens":10,"total_tokens":25}}`, `{"attempt":1}`),
		record("t_2", "subagent.end", 7, `{"status":"failed","error":"no slot\nin time","error_code":"queue_timeout","duration_ms":0,"queue_ms":6000}`, `{}`),
		record("", "run.message", 8, `{"message_index":4,"message":{"kind":"ai","text":"The answer.","tool_calls":[]}}`, `{"message_index":4}`),
		record("", "run.completed", 9, `{"status":"completed","output":"The answer.","duration_ms":9000,"usage":{"total_tokens":99}}`, `{}`),
	}
}

func lines(run *Run, records []contract.EventRecord) []string {
	var out []string
	for _, rec := range records {
		for _, l := range run.Add(rec) {
			out = append(out, l.String())
		}
	}
	return out
}

func TestLines(t *testing.T) {
	t.Parallel()
	run := New("r_1")
	want := []string{
		"run        started    r_1",
		"lead                  Both at once.",
		"task 1     queued     first",
		"task 2     queued     second (place 4)",
		"task 1     started    general-purpose, main",
		"task 1     running    grep, ls",
		"task 1     completed  3 steps, 3.0 s, 25 tokens",
		"task 2     failed     0 steps, 0.0 s, queue_timeout, no slot",
		"run        completed  9.0 s, 99 tokens",
	}
	if got := lines(run, life()); !slices.Equal(got, want) {
		t.Errorf("lines:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	first := run.Tasks[0]
	if run.Status != contract.RunCompleted || len(run.Tasks) != 2 || first.LastTool != "ls" || first.Executor != "ex-1" || first.QueueMS != 2000 || !first.Ended() {
		t.Errorf("run %+v, task %+v", run, first)
	}
}

// A new attempt begins anew: its steps and tokens are not those of the lost one.
func TestSecondAttempt(t *testing.T) {
	t.Parallel()
	run := New("r_1")
	lines(run, life()[:8])
	got := lines(run, []contract.EventRecord{record("t_1", "subagent.start", 30, `{"model_name":"main","subagent_type":"general-purpose"}`, `{"attempt":2}`)})
	if want := "task 1     started    general-purpose, main, attempt 2"; len(got) != 1 || got[0] != want {
		t.Errorf("line %q, want %q", got, want)
	}
	if task := run.Tasks[0]; task.Steps != 0 || task.LastTool != "" || task.Tokens() != "-" || task.Attempt != 2 {
		t.Errorf("task = %+v", task)
	}
}

func TestElapsed(t *testing.T) {
	t.Parallel()
	run, now := New("r_1"), begin.Add(20*time.Second)
	var got []time.Duration
	for _, rec := range life() {
		run.Add(rec)
		if rec.TaskID == "t_1" {
			got = append(got, run.Tasks[0].Elapsed(now))
		}
	}
	// Waiting since second 1, running since second 3, at last what the end says.
	want := []time.Duration{19 * time.Second, 19 * time.Second, 17 * time.Second, 17 * time.Second, 17 * time.Second, 17 * time.Second, 3 * time.Second}
	if !slices.Equal(got, want) {
		t.Errorf("elapsed %v, want %v", got, want)
	}
}

func TestStrangeRecordsArePassedOver(t *testing.T) {
	t.Parallel()
	run := New("r_1")
	for _, rec := range []contract.EventRecord{
		record("", "run.started", 0, `[]`, `{}`), record("t", "subagent.step", 0, `{`, `{}`),
		record("", "something.new", 0, `{}`, `{}`), record("", "run.message", 0, `{}`, ``), {},
	} {
		if got := run.Add(rec); got != nil {
			t.Errorf("%s %s gives %v", rec.EventType, rec.Content, got)
		}
	}
	for i := range maxTasks + 10 {
		run.Add(record(contract.TaskID(fmt.Sprintf("t_%d", i)), "subagent.queued", 0, `{}`, `{}`))
	}
	if len(run.Tasks) != maxTasks {
		t.Errorf("%d tasks are kept, want %d", len(run.Tasks), maxTasks)
	}
}

// What a model says must not steer the terminal, in no field that is shown.
func TestHostileText(t *testing.T) {
	t.Parallel()
	evil := `\u001b[2J\u009b\u202e\r\n`
	run := New("r_1")
	var out bytes.Buffer
	show := NewLines(&out, run)
	for _, rec := range life() {
		text := string(rec.Content)
		for _, word := range []string{"first", "second", "main", "grep", "general-purpose", "completed", "queue_timeout", "no slot", "Both", "ex-1", "The answer"} {
			text = strings.ReplaceAll(text, word, word+evil)
		}
		rec.Content = json.RawMessage(text)
		show.Show(rec)
	}
	show.Note("note \x1b[31m")
	picture := (&view{run: run, now: begin, width: 200}).draw()
	for name, text := range map[string]string{"lines": out.String(), "picture": picture} {
		if strings.ContainsAny(text, "\x1b\u009b\u202e\r") {
			t.Errorf("%s: %q", name, text)
		}
		if !strings.Contains(text, `\x1b[2J`) {
			t.Errorf("%s lack the escaped text: %q", name, text)
		}
	}
}

func TestPicture(t *testing.T) {
	t.Parallel()
	v := &view{run: New("r_1"), now: begin.Add(4 * time.Second), width: 80}
	for _, rec := range life()[:8] {
		v.Update(rec)
	}
	v.Update(note("a remark"))
	got := v.draw()
	for _, want := range []string{
		`(?m)^⠋ run r_1 \(running, main\)$`, `(?m)^  Both at once\.$`, `(?m)^⠋ task 1   running +1\.0 s +ls +7  first$`,
		`(?m)^· task 2   queued +3\.0 s +-  second$`, `(?m)^a remark$`,
	} {
		if !regexp.MustCompile(want).MatchString(got) {
			t.Errorf("the picture does not match %q:\n%s", want, got)
		}
	}
	for _, rec := range life()[8:] {
		v.Update(rec)
	}
	v.Update(tea.WindowSizeMsg{Width: 30, Height: 10})
	for _, line := range strings.Split(v.draw(), "\n") {
		if n := len([]rune(line)); n > 30 {
			t.Errorf("line of %d columns in a window of 30: %q", n, line)
		}
	}
	if got := v.draw(); !strings.Contains(got, "✓ task 1") || !strings.Contains(got, "✗ task 2") {
		t.Errorf("the picture at the end:\n%s", got)
	}
}

func TestLive(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	run := New("r_1")
	live := NewLive(&out, run, tea.WithWindowSize(100, 30), tea.WithEnvironment([]string{"TERM=xterm-256color"}))
	for _, rec := range life() {
		live.Show(rec)
	}
	live.Note("bye")
	live.Close()
	if run.Status != contract.RunCompleted || !strings.Contains(out.String(), "task 2") {
		t.Errorf("status %s, drawn %q", run.Status, out.String())
	}
	live.Show(life()[0]) // after the end: no harm
}

func TestSeconds(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "0.0 s", 340 * time.Millisecond: "0.3 s", 12 * time.Second: "12 s", 125 * time.Second: "2 min 5 s", 3*time.Hour + 4*time.Minute: "3 h 4 min",
	} {
		if got := Seconds(d); got != want {
			t.Errorf("Seconds(%v) = %q, want %q", d, got, want)
		}
	}
}
