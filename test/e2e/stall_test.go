package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
)

// F-014, CONFIG-01, protocol W11: work in which nothing happens for
// executor.stall_timeout_seconds is ended with all its processes and a code of its
// own; work that says something now and then goes on for longer.
func TestStalledTask(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, `
rules:
  - match: "silent"
    turns: [{ tool_calls: [{ name: bash, args: { command: "sleep 600.77 & sleep 601.77" } }] }, { text: "slept" }]
  - match: "talking"
    turns: [{ tool_calls: [{ name: bash, args: { command: "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do echo $i; sleep 0.3; done" } }] }, { text: "talked" }]
default: { turns: [{ text: "fine" }] }
`, "executor: { stall_timeout_seconds: 2 }\n")
	f.All()
	silent, talking := f.submit(t, "silent").TaskID, f.submit(t, "talking").TaskID
	if task := f.outcome(t, silent); task.Status != contract.TaskFailed || task.ErrorCode != contract.ErrExecutorStalled || task.Error == nil || !strings.Contains(*task.Error, "2s") {
		t.Errorf("%s: %s %s %v; want executor_stalled after 2 s", silent, task.Status, task.ErrorCode, task.Error)
	}
	if left := processes("sleep 601.77"); len(left) > 0 {
		t.Errorf("left behind at the end of the task: %q", left)
	}
	if task := f.outcome(t, talking); task.Status != contract.TaskCompleted || task.Result == nil || *task.Result != "talked" {
		t.Errorf("%s: %s %s", talking, task.Status, task.ErrorCode)
	}
	eventually(t, func() (bool, string) {
		st, err := f.API.Admission(deadline(t))
		return err == nil && st.Running == 0, fmt.Sprintf("slots in use at the end: %+v, %v", st, err)
	})
	f.judge(t, invariant.Options{MaxRunning: 3})
}
