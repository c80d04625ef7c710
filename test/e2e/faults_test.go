package e2e

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
)

// outcome waits for the end of a task while anything may be away.
func (f *Fleet) outcome(t *testing.T, id contract.TaskID) wire.Task {
	t.Helper()
	var task wire.Task
	eventually(t, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		got, err := f.API.GetTask(ctx, id)
		if err != nil {
			return false, err.Error()
		}
		task = got
		return ended(task), fmt.Sprintf("task %s is %s", id, task.Status)
	})
	return task
}

// outcomes waits for the ends of tasks and returns how many of each status there are.
func (f *Fleet) outcomes(t *testing.T, ids []contract.TaskID) map[contract.TaskStatus]int {
	t.Helper()
	n := map[contract.TaskStatus]int{}
	for _, id := range ids {
		task := f.outcome(t, id)
		n[task.Status]++
		if task.Status == contract.TaskFailed {
			t.Logf("%s failed, attempt %d: %s: %s", id, task.Attempt, task.ErrorCode, *task.Error)
		}
	}
	return n
}

func (f *Fleet) submitAll(t *testing.T, n int, prompt string) []contract.TaskID {
	t.Helper()
	var ids []contract.TaskID
	for range n {
		ids = append(ids, f.submit(t, prompt).TaskID)
	}
	return ids
}

// I5, F-054: an executor that slept past its leases stores nothing any more for
// the tasks it had: not the result of a command that ended meanwhile, not the
// end; what still runs is killed. Afterwards it is as good as new.
func TestExecutorPaused(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, `
rules:
  - match: "long"
    turns: [{ tool_calls: [{ name: bash, args: { command: "sleep 600.31 & sleep 601.31" } }] }, { text: "slept" }]
  - match: "brief"
    turns: [{ tool_calls: [{ name: bash, args: { command: "sleep 2.31; echo done" } }] }, { text: "slept" }]
default: { turns: [{ text: "fine" }] }
`, quick)
	_, _, executor, _ := f.All()
	long, brief := f.submit(t, "long").TaskID, f.submit(t, "brief").TaskID
	eventually(t, func() (bool, string) {
		return len(processes("sleep 601.31")) > 0 && len(processes("sleep 2.31")) > 0, "the commands have not begun"
	})
	executor.Pause()
	began := time.Now()
	for _, id := range []contract.TaskID{long, brief} {
		if task := f.outcome(t, id); task.Status != contract.TaskFailed || task.ErrorCode != contract.ErrExecutorLost {
			t.Errorf("%s: %s %s; want executor_lost", id, task.Status, task.ErrorCode)
		}
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("the slots came back after %v; the lease is 3 s", d)
	}
	before := f.streamed(t, f.connect(t))
	executor.Resume()
	eventually(t, func() (bool, string) {
		left := processes("sleep 601.31")
		return len(left) == 0, fmt.Sprintf("left behind: %q", left)
	})
	// It goes on with other tasks; what it had under way has had its turn then.
	if task := f.outcome(t, f.submit(t, "next").TaskID); task.Status != contract.TaskCompleted {
		t.Errorf("the next task: %+v", task)
	}
	past := f.judge(t, invariant.Options{MaxRunning: 3})
	for _, id := range []contract.TaskID{long, brief} {
		// The end is the gate's, and may come a moment after the record that tells it.
		for _, e := range of(past, id)[len(of(before, id)):] {
			if e.EventType != contract.RecordEnd {
				t.Errorf("%s: the executor stored more after it had lost the task: %+v", id, e)
			}
		}
	}
}

// I1, I2, I8, ADM-05: a leader of the gate that sleeps past its key finds a
// standby in its place when it wakes. It grants nothing any more, and nobody
// waits for its answers while it sleeps.
func TestLeaderPaused(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "subagent_runtime: { lease_ttl_seconds: 3, leader_ttl_seconds: 3, max_running: 2 }\n")
	_, first, _, _ := f.All()
	old, err := f.API.Admission(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	f.service("admission")
	ids := f.submitAll(t, 2, "two seconds")
	ids = append(ids, f.submitAll(t, 20, "short")...)
	first.Pause()
	eventually(t, func() (bool, string) {
		st, err := f.API.Admission(deadline(t))
		return err == nil && st.Leader != old.Leader, fmt.Sprintf("%+v %v", st, err)
	})
	// The sleeping process must not be asked any more, or every other answer is
	// a timeout.
	for range 10 {
		began := time.Now()
		if _, err := f.API.Admission(deadline(t)); err != nil || time.Since(began) > time.Second {
			t.Errorf("the gate answered after %v: %v", time.Since(began), err)
			break
		}
	}
	ids = append(ids, f.submitAll(t, 10, "short")...)
	first.Resume()
	ids = append(ids, f.submitAll(t, 10, "short")...)
	if n := f.outcomes(t, ids); n[contract.TaskCompleted] != len(ids) {
		t.Errorf("outcomes: %v; want %d completed", n, len(ids))
	}
	f.inOrder(t, f.judge(t, invariant.Options{MaxRunning: 2}), ids)
}

// inOrder checks that tasks were admitted in the order in which they were submitted.
func (f *Fleet) inOrder(t *testing.T, past []contract.EventRecord, ids []contract.TaskID) {
	t.Helper()
	var admitted []contract.TaskID
	for _, e := range past {
		if e.EventType == contract.RecordAdmitted && !slices.Contains(admitted, e.TaskID) {
			admitted = append(admitted, e.TaskID)
		}
	}
	if !slices.Equal(admitted, ids) {
		t.Errorf("%d tasks were submitted, %d admitted, in another order", len(ids), len(admitted))
	}
}

// delegating is a brain whose lead delegates two tasks, which wait until gate is
// closed.
func delegating(t *testing.T, gate <-chan struct{}) *Brain {
	call := func(name string) [2]string {
		return [2]string{"task", `{"description":"` + name + `","prompt":"` + name + `","subagent_type":"general-purpose"}`}
	}
	return NewBrain(t, func(q Question, w http.ResponseWriter, r *http.Request) {
		switch {
		case q.Task == "delegate" && q.Turn == 0:
			Say(w, "", call("part one"), call("part two"))
		case q.Task == "delegate":
			Say(w, "both are done")
		default:
			select {
			case <-gate:
			case <-r.Context().Done():
			}
			Say(w, "result of "+q.Task)
		}
	})
}

func models(b *Brain) string {
	return "models: [{ name: main, provider: openai, model: brain-1, base_url: \"" + b.URL + "\", api_key_env: HERDGATE_TEST_KEY, idle_timeout_seconds: 30, max_retries: 0 }]\n"
}

// A lead that is killed, or sleeps past its lease, while its tasks run: the run
// goes on in another one (a restarted one, or a second one that was there all
// along), the tasks are neither lost nor run twice, and nothing is told twice.
// F-014, F-020, I4, I6, I8.
func TestLeadKilled(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"and restarted", "beside another one", "or only paused"} {
		second, paused := how != "and restarted", how == "or only paused"
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			gate := make(chan struct{})
			brain := delegating(t, gate)
			f := NewFleet(t, script, quick, models(brain))
			lead, _, _, _ := f.All()
			acc, err := f.API.StartRun(deadline(t), wire.RunRequest{Input: "delegate"})
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, func() (bool, string) {
				return brain.Asked("part one", 0)+brain.Asked("part two", 0) == 2, "the tasks have not begun"
			})
			if second {
				addr := fmt.Sprintf("127.0.0.1:%d", freePort(t))
				f.service("lead", "--http-addr", addr)
				f.API, err = client.New("http://"+addr, "", &http.Client{Transport: &http.Transport{}})
				if err != nil {
					t.Fatal(err)
				}
				f.ready()
			}
			if paused {
				lead.Pause()
				conn := f.connect(t)
				began, err := conn.Last(deadline(t), conn.RunStream(), conn.RunKV(contract.RunKey(acc.RunID)))
				if err != nil {
					t.Fatal(err)
				}
				eventually(t, func() (bool, string) {
					m, err := conn.Last(deadline(t), conn.RunStream(), conn.RunKV(contract.RunKey(acc.RunID)))
					return err == nil && m.Seq > began.Seq, fmt.Sprint("nobody has taken the run over: ", err)
				})
				lead.Resume()
			} else {
				lead.Kill()
			}
			close(gate)
			if !second {
				f.service("lead")
				f.ready()
			}
			var run wire.Run
			eventually(t, func() (bool, string) {
				run, err = f.API.GetRun(deadline(t), acc.RunID)
				return err == nil && run.Status.Terminal(), fmt.Sprint(run.Status, err)
			})
			if run.Status != contract.RunCompleted || *run.Output != "both are done" || len(run.Delegations) != 2 {
				t.Errorf("run = %+v", run)
			}
			for _, d := range run.Delegations {
				if d.Status != string(contract.ToolCompleted) || !strings.HasPrefix(d.ResultBrief, "result of part") {
					t.Errorf("delegation = %+v", d)
				}
			}
			for task, turns := range map[string]int{"delegate": 2, "part one": 1, "part two": 1} {
				for turn := range turns {
					if n := brain.Asked(task, turn); n != 1 {
						t.Errorf("turn %d of %q was asked for %d times", turn, task, n)
					}
				}
			}
			// 2 turns of the lead and 1 of each task, 7 tokens each, none counted twice.
			if run.Usage == nil || run.Usage.TotalTokens != 28 {
				t.Errorf("usage = %+v, want 28 tokens", run.Usage)
			}
			f.judge(t, invariant.Options{MaxRunning: 3})
		})
	}
}

// F-178, EXEC-03: an executor that is told to go under load finishes what it can
// and hands the rest back: nothing fails, what was handed back is attempt 2.
func TestDrainUnderLoad(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "executor: { drain_timeout_seconds: 1 }\nsubagent_runtime: { max_running: 4, lease_ttl_seconds: 3, leader_ttl_seconds: 3 }\n")
	_, _, executor, _ := f.All()
	ids := f.submitAll(t, 4, "two seconds")
	ids = append(ids, f.submitAll(t, 16, "short")...)
	eventually(t, func() (bool, string) {
		st, err := f.API.Admission(deadline(t))
		n := 0
		for _, s := range st.Slots {
			if s.Executor != "" {
				n++
			}
		}
		return err == nil && n == 4, fmt.Sprintf("%+v %v", st, err)
	})
	next := f.service("executor")
	began := time.Now()
	executor.Stop()
	if d := time.Since(began); d > 4*time.Second {
		t.Errorf("it took %v to go; the drain time is 1 s", d)
	}
	again := 0
	for _, id := range ids {
		task := f.outcome(t, id)
		if task.Status != contract.TaskCompleted || task.Attempt > 2 {
			t.Errorf("%s: %s, attempt %d, %v", id, task.Status, task.Attempt, task.Error)
		}
		again += task.Attempt - 1
	}
	if again == 0 {
		t.Error("nothing was handed back")
	}
	f.inOrder(t, f.judge(t, invariant.Options{MaxRunning: 4}), ids)
	next.Stop()
}

// F-036, F-060, I2, I4, I6: the NATS server is killed and comes back with what it
// had stored, twice, under load.
func TestNATSKilled(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "subagent_runtime: { lease_ttl_seconds: 6, leader_ttl_seconds: 3 }\n")
	f.All()
	var ids []contract.TaskID
	for i := range 40 {
		// A submission is repeated by the lead until the server is there again.
		ids = append(ids, f.submit(t, "short").TaskID)
		if i == 10 || i == 25 {
			f.nats.Kill()
			f.startNATS()
		}
	}
	if n := f.outcomes(t, ids); n[contract.TaskCompleted] != len(ids) {
		t.Errorf("outcomes: %v; want %d completed", n, len(ids))
	}
	f.inOrder(t, f.judge(t, invariant.Options{MaxRunning: 3}), ids)
}

// outage is how long NATS is away, longer than all leases of the test.
const outage = 4 * time.Second

// I4, I5, I8, F-036: NATS is away for longer than leases live. The executor stops
// its commands by its own clock while nobody can tell it to; afterwards those
// tasks end as lost, and the others run in order.
func TestNATSAway(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, strings.ReplaceAll(script, "sleep 600 & sleep 601", "sleep 600.41 & sleep 601.41"), "subagent_runtime: { lease_ttl_seconds: 3, leader_ttl_seconds: 3, max_running: 1 }\n")
	f.All()
	lost := f.submit(t, "sleep in bash").TaskID
	ids := f.submitAll(t, 10, "short")
	eventually(t, func() (bool, string) { return len(processes("sleep 601.41")) > 0, "the command has not begun" })
	f.nats.Kill()
	began := time.Now()
	eventually(t, func() (bool, string) {
		left := processes("sleep 60")
		left = slices.DeleteFunc(left, func(s string) bool { return !strings.Contains(s, ".41") })
		return len(left) == 0, fmt.Sprintf("left behind: %q", left)
	})
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("the command was stopped after %v; the lease is 3 s", d)
	}
	<-time.After(outage)
	f.startNATS()
	if task := f.outcome(t, lost); task.Status != contract.TaskFailed || task.ErrorCode != contract.ErrExecutorLost {
		t.Errorf("the running task: %+v", task)
	}
	if n := f.outcomes(t, ids); n[contract.TaskCompleted] != len(ids) {
		t.Errorf("outcomes of the waiting: %v; want %d completed", n, len(ids))
	}
	f.inOrder(t, f.judge(t, invariant.Options{MaxRunning: 1}), append([]contract.TaskID{lost}, ids...))
}
