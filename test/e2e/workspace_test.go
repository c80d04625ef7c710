package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

// pairs holds the tasks of a pair until both of them have got as far, so that they
// must be on two executors with room for one.
type pairs struct {
	mu   sync.Mutex
	came map[string]chan struct{}
}

func (p *pairs) meet(r *http.Request, name string) {
	p.mu.Lock()
	other, second := p.came[name]
	if !second {
		other = make(chan struct{})
		p.came[name] = other
	}
	p.mu.Unlock()
	if second {
		close(other)
		return
	}
	select {
	case <-other:
	case <-r.Context().Done():
	}
}

// CTX-01, ISO-01: with workspaces in NATS, executors that share no folder see each
// other's files, and so does the lead. Siblings that write the same file lose
// nothing, and the result of the later one says so. A task that is stopped, and an
// executor that is killed, leave the workspace as it was.
func TestWorkspaceOverExecutors(t *testing.T) {
	t.Parallel()
	p := &pairs{came: map[string]chan struct{}{}}
	brain := NewBrain(t, func(q Question, w http.ResponseWriter, r *http.Request) {
		kind, who, _ := strings.Cut(q.Task, " ")
		bash := func(command string) {
			b, _ := json.Marshal(map[string]string{"command": command})
			Say(w, "", [2]string{"bash", string(b)})
		}
		switch {
		case kind == "write" && q.Turn == 0:
			bash("mkdir -p notes; echo by-" + who + " >notes/" + who + "; echo by-" + who + " >shared")
		case kind == "look" && q.Turn == 0:
			bash("cat notes/* shared; ls -A . .conflicts/*")
		case kind == "hold" && q.Turn == 0:
			bash("echo unfinished >shared; rm -r notes")
		case kind == "hold":
			Hold(r, 2*Timeout)
		case kind == "lead" && q.Turn == 0:
			Say(w, "", [2]string{"read_file", `{"path":"notes/one"}`}, [2]string{"write_file", `{"path":"plan","content":"of the lead"}`})
		case kind == "plan" && q.Turn == 0:
			bash("cat plan")
		default:
			if kind == "write" || kind == "look" {
				p.meet(r, kind)
			}
			Say(w, "done")
		}
	})
	f := NewFleet(t, script, models(brain), "workspace: { backend: object_store }\nexecutor: { max_tasks: 1, retry_lost: never }\n", quick)
	f.service("admission")
	f.service("eventsink")
	f.service("lead", "--data-dir", f.dataDir("lead"))
	dirs := []string{f.dataDir("ex-a"), f.dataDir("ex-b")}
	executors := map[string]*Proc{}
	for _, d := range dirs {
		executors[filepath.Base(d)] = f.service("executor", "--data-dir", d, "--name", filepath.Base(d))
	}
	f.ready()
	thread := contract.ThreadID("th_files")
	submit := func(prompt string) contract.TaskID {
		t.Helper()
		acc, err := f.API.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: prompt, ThreadID: string(thread)})
		if err != nil {
			t.Fatal(err)
		}
		return acc.TaskID
	}
	pair := func(prompts ...string) (tasks []wire.Task) {
		t.Helper()
		var ids []contract.TaskID
		for _, text := range prompts {
			ids = append(ids, submit(text))
		}
		for _, id := range ids {
			task := f.outcome(t, id)
			if task.Status != contract.TaskCompleted || task.Result == nil {
				t.Fatalf("%s: %s, %v", id, task.Status, task.Error)
			}
			tasks = append(tasks, task)
		}
		if tasks[0].Executor == tasks[1].Executor {
			t.Errorf("both ran on %s", tasks[0].Executor)
		}
		return tasks
	}
	// saw is what was stored of a task's steps.
	saw := func(q client.EventQuery) string {
		t.Helper()
		b, err := json.Marshal(f.all(t, q))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}

	written := pair("write one", "write two")
	told, won := 0, ""
	for i, task := range written {
		if strings.Contains(*task.Result, `"shared": the version of this task is ".conflicts/`+string(task.TaskID)+`/shared"`) {
			told++
		} else {
			won = []string{"one", "two"}[i]
		}
	}
	if told != 1 {
		t.Fatalf("%d of 2 results tell of the conflict: %q, %q", told, *written[0].Result, *written[1].Result)
	}
	both := func() {
		t.Helper()
		for _, task := range pair("look a", "look b") {
			got := saw(client.EventQuery{TaskID: task.TaskID})
			if want := `by-one\\nby-two\\nby-` + won + `\\n`; !strings.Contains(got, want) && !strings.Contains(got, strings.ReplaceAll(want, `\\`, `\`)) {
				t.Errorf("%s sees %s; want %s", task.Executor, got, want)
			}
		}
		p.mu.Lock()
		delete(p.came, "look")
		p.mu.Unlock()
	}
	both()

	// The lead sees them too, and they see what it writes.
	if run, err := f.API.RunToEnd(deadline(t), wire.RunRequest{Input: "lead", ThreadID: string(thread)}); err != nil || run.Status != contract.RunCompleted {
		t.Errorf("run: %+v, %v", run, err)
	} else if got := saw(client.EventQuery{RunID: run.RunID}); !strings.Contains(got, "by-one") {
		t.Errorf("the lead sees %s", got)
	}
	plan := f.outcome(t, submit("plan"))
	if got := saw(client.EventQuery{TaskID: plan.TaskID}); !strings.Contains(got, "of the lead") {
		t.Errorf("the task sees %s", got)
	}

	// Stopped, and killed.
	held := submit("hold cancelled")
	eventually(t, func() (bool, string) { return brain.Asked("hold cancelled", 1) == 1, "the task is not held" })
	if err := f.API.CancelTask(deadline(t), held); err != nil {
		t.Fatal(err)
	}
	if task := f.outcome(t, held); task.Status != contract.TaskCancelled {
		t.Errorf("the task ended as %s", task.Status)
	}
	held = submit("hold killed")
	eventually(t, func() (bool, string) { return brain.Asked("hold killed", 1) == 1, "the task is not held" })
	name := f.task(t, held).Executor
	executors[name].Kill()
	if task := f.outcome(t, held); task.Status != contract.TaskFailed {
		t.Errorf("the task ended as %s", task.Status)
	}
	copies := func() []string {
		left, _ := filepath.Glob(filepath.Join(f.dataDir(name), "workspaces", ".copies", "*", "*"))
		return left
	}
	if len(copies()) == 0 {
		t.Errorf("a killed executor left nothing; where are its copies? %v", entries(f.dataDir(name)))
	}
	f.service("executor", "--data-dir", f.dataDir(name), "--name", name)
	both()
	if left := copies(); len(left) > 0 {
		t.Errorf("left of a killed executor: %v", left)
	}
}

func entries(dir string) (names []string) {
	_ = filepath.WalkDir(dir, func(p string, _ os.DirEntry, _ error) error { names = append(names, p); return nil })
	return names
}
