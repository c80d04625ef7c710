package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
)

// ADM-05, ADM-14, CONFIG-02: as the file says: a type of sub-agent runs on the
// executors of its pool and counts against its capacity alone, and a type at its
// limit waits while others pass.
func TestPoolsAndLimits(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, `
rules:
  - match: "held"
    turns: [{ tool_calls: [{ name: bash, args: { command: "sleep 600.91" } }] }, { text: "held" }]
default: { turns: [{ text: "fine" }] }
`, `
subagent_runtime: { max_running: 2, limits: { per_type: { slow: 1 } }, pools: { big: { max_running: 1 } } }
subagents:
  custom_agents:
    slow: { description: d, system_prompt: p }
    heavy: { description: d, system_prompt: p, pool: big }
`)
	other := f.write("big.yaml", strings.TrimSpace(f.read("herdgate.yaml"))+"\nexecutor: { pool: big }\n")
	f.All()
	f.service("executor", "--config", other, "--data-dir", filepath.Join(f.dir, "data-big"))

	ask := func(kind, prompt string) contract.TaskID {
		acc, err := f.API.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: kind, Prompt: prompt})
		if err != nil {
			t.Fatal(err)
		}
		return acc.TaskID
	}
	slow, slow2 := ask("slow", "held"), ask("slow", "quick")
	heavy, heavy2 := ask("heavy", "held"), ask("heavy", "quick")
	// Both are held; what comes later passes those who wait for them.
	if task := f.outcome(t, ask("general-purpose", "quick")); task.Status != contract.TaskCompleted {
		t.Errorf("a task behind a full type: %+v", task)
	}
	eventually(t, func() (bool, string) {
		st, err := f.API.Admission(deadline(t))
		return err == nil && st.Running == 2 && st.Queued == 2 && st.MaxRunning == 3, fmt.Sprintf("%+v, %v", st, err)
	})
	for _, id := range []contract.TaskID{slow2, heavy2} {
		if task, err := f.API.GetTask(deadline(t), id); err != nil || task.Status != contract.TaskQueued || task.QueuePosition == nil || *task.QueuePosition != 1 {
			t.Errorf("%s: %+v, %v; want the first in its queue", id, task, err)
		}
	}
	out, err := f.run("admission", "status", "--server", "http://"+f.addr)
	if err != nil || !strings.Contains(out, "big      1 of 1") || !strings.Contains(out, string(heavy)) {
		t.Errorf("admission status: %v\n%s", err, out)
	}
	for _, id := range []contract.TaskID{slow, heavy} {
		if err := f.API.CancelTask(deadline(t), id); err != nil {
			t.Error(err)
		}
	}
	for _, id := range []contract.TaskID{slow2, heavy2} {
		if task := f.outcome(t, id); task.Status != contract.TaskCompleted {
			t.Errorf("%s: %+v", id, task)
		}
	}
	f.judge(t, invariant.Options{MaxRunning: 2, Pools: map[contract.Pool]invariant.Pool{"big": {MaxRunning: 1}}, Limits: invariant.Limits{PerType: map[string]int{"slow": 1}}})
}

// read reads a file of the fleet.
func (f *Fleet) read(name string) string {
	f.t.Helper()
	b, err := os.ReadFile(filepath.Join(f.dir, name))
	if err != nil {
		f.t.Fatal(err)
	}
	return string(b)
}
