package e2e

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// herd is processes that hide in every way a command can: in the background, in a
// session of their own, forked twice, without an environment, deaf to signals. They
// are told apart from those of other tests by the odd time that they sleep.
type herd struct{ sleep string }

func newHerd(number int) herd {
	return herd{fmt.Sprintf("sleep %d.%d", 70000+number, os.Getpid())}
}

// size is how many processes sleep.
const herdSize = 6

func (h herd) command() string {
	return strings.NewReplacer("SLEEP", h.sleep).Replace(
		`SLEEP & (SLEEP &) ; setsid SLEEP & ` +
			`setsid sh -c 'setsid SLEEP & exit' ; ` +
			`(env -i setsid sh -c 'trap "" TERM HUP INT; SLEEP; exit' >/dev/null 2>&1 </dev/null &) ; SLEEP`)
}

// alive lists all processes that have to do with the herd.
func (h herd) alive() []string { return processes(h.sleep) }

// grazing reports whether the whole herd is there.
func (h herd) grazing() (bool, string) {
	n := 0
	for _, line := range h.alive() {
		if strings.TrimSpace(line) == h.sleep {
			n++
		}
	}
	return n == herdSize, fmt.Sprintf("%d of %d processes of the command are there", n, herdSize)
}

// pasture is a Brain for tasks that are held up in a command or in a model call the
// first time they run, and end at once the next time. It writes down what was left
// of the first attempt when the model was asked by the second one.
type pasture struct {
	*Brain
	herd herd

	mu     sync.Mutex
	closed map[string]bool     // held calls: whether their connection was closed
	left   map[string][]string // of the first attempt when the second one asked
}

// The tasks of a pasture; other tasks end at once.
const (
	inCommand = "in a command"
	inModel   = "in a model call"
)

func newPasture(t *testing.T, number int) *pasture {
	p := &pasture{herd: newHerd(number), closed: map[string]bool{}, left: map[string][]string{}}
	p.Brain = NewBrain(t, func(q Question, w http.ResponseWriter, r *http.Request) {
		kind, _, _ := strings.Cut(q.Task, ":")
		switch {
		case q.Nth > 1 || q.Turn > 0:
			p.mu.Lock()
			if q.Nth > 1 && kind == inCommand {
				p.left[q.Task] = p.herd.alive()
			}
			if q.Nth > 1 && kind == inModel && !p.closed[q.Task] {
				p.left[q.Task] = []string{"the model call of the first attempt"}
			}
			p.mu.Unlock()
			Say(w, "at last")
		case kind == inCommand:
			Say(w, "", [2]string{"bash", fmt.Sprintf(`{"command":%q}`, p.herd.command())})
		case kind == inModel:
			p.close(q.Task, false)
			Hold(r, 2*Timeout)
			p.close(q.Task, true)
		default:
			Say(w, "fine")
		}
	})
	return p
}

func (p *pasture) close(task string, closed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed[task] = closed
}

// openCalls are the tasks whose model call is held.
func (p *pasture) openCalls() map[string]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	open := map[string]bool{}
	for task, closed := range p.closed {
		if !closed {
			open[task] = true
		}
	}
	return open
}

// hungUp reports whether the executor has closed the connection of a held call.
func (p *pasture) hungUp(task string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed[task]
}

// heldUp submits one task of each kind and waits until both are held up.
func (p *pasture) heldUp(t *testing.T, f *Fleet) (command, model contract.TaskID) {
	t.Helper()
	command, model = f.submit(t, inCommand).TaskID, f.submit(t, inModel).TaskID
	eventually(t, p.herd.grazing)
	eventually(t, func() (bool, string) { return p.Asked(inModel, 0) == 1, "the model was not asked" })
	return command, model
}

// again checks that tasks were run again from the beginning, after the first attempt
// was over in every respect, and that their history is that of the second attempt.
func (p *pasture) again(t *testing.T, f *Fleet, ids map[string]contract.TaskID) {
	t.Helper()
	for name, id := range ids {
		task := f.outcome(t, id)
		if task.Status != contract.TaskCompleted || task.Attempt != 2 || task.Result == nil || *task.Result != "at last" {
			t.Errorf("%s: %s, attempt %d, %v; want completed in attempt 2", name, task.Status, task.Attempt, task.Error)
		}
		p.mu.Lock()
		left := p.left[name]
		p.mu.Unlock()
		if len(left) > 0 {
			t.Errorf("%s: when the second attempt began, there was still %q", name, left)
		}
		if n := p.Asked(name, 0); n != 2 {
			t.Errorf("%s: the model was asked %d times, want 2", name, n)
		}
		f.secondAttemptOnly(t, name, id)
	}
}

// secondAttemptOnly checks what a task that ran twice shows: its history is that of
// the second attempt, and the events of the first one can be told by their number.
func (f *Fleet) secondAttemptOnly(t *testing.T, name string, id contract.TaskID) {
	t.Helper()
	types := func(q client.EventQuery, attempt string) string {
		var out []string
		for _, e := range f.all(t, q) {
			if attempt == "" || strings.Contains(string(e.Metadata), `"attempt":`+attempt) {
				out = append(out, strings.TrimPrefix(e.EventType, "subagent."))
			}
		}
		return strings.Join(out, " ")
	}
	if got := types(client.EventQuery{TaskID: id}, ""); got != "queued admitted start step end" {
		t.Errorf("%s: its history is %s", name, got)
	}
	if got := types(client.EventQuery{TaskID: id, AllAttempts: true}, "1"); !strings.HasPrefix(got, "admitted start") || strings.Contains(got, "end") {
		t.Errorf("%s: the first attempt told %s", name, got)
	}
}

// EXEC-03, EXEC-04, I5, I8, F-008, F-052, F-062: executor.retry_lost decides what
// becomes of tasks whose executor was killed, and of those that were handed back
// after they had begun. Nothing of a killed executor's commands goes on.
func TestRetryLost(t *testing.T) {
	t.Parallel()
	for i, policy := range []string{"not_started", "never", "always"} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			p := newPasture(t, 10+i)
			f := NewFleet(t, script, models(p.Brain), "executor: { retry_lost: "+policy+", drain_timeout_seconds: 1 }\n", quick)
			_, _, first, _ := f.All()
			command, model := p.heldUp(t, f)
			second := f.service("executor")
			first.Kill()
			eventually(t, func() (bool, string) {
				left := p.herd.alive()
				return len(left) == 0, fmt.Sprintf("left of a killed executor: %q", left)
			})
			lost := map[string]contract.TaskID{inCommand: command, inModel: model}
			ended := func(name string, id contract.TaskID) {
				t.Helper()
				if task := f.outcome(t, id); task.Status != contract.TaskFailed || task.ErrorCode != contract.ErrExecutorLost || task.Attempt != 1 || p.Asked(name, 0) != 1 {
					t.Errorf("%s: %s %s, attempt %d, asked %d times; want executor_lost and no second attempt", name, task.Status, task.ErrorCode, task.Attempt, p.Asked(name, 0))
				}
			}
			if policy == "always" {
				p.again(t, f, lost)
			} else {
				for name, id := range lost {
					ended(name, id)
				}
			}
			const name = inModel + ": handed back"
			back := f.submit(t, name).TaskID
			eventually(t, func() (bool, string) { return p.Asked(name, 0) == 1, "the model was not asked" })
			f.service("executor")
			second.Stop()
			if !p.hungUp(name) {
				t.Error("an executor has gone, and its model call has not")
			}
			if policy == "never" {
				ended(name, back)
			} else {
				p.again(t, f, map[string]contract.TaskID{name: back})
			}
			f.judge(t, invariant.Options{MaxRunning: 3})
		})
	}
}

// onlyOn starts an executor that has exactly the room for two tasks, so that no
// grant lies with it while it does not answer, and waits until both are held up.
func (p *pasture) onlyOn(t *testing.T, f *Fleet, flags ...string) (executor *Proc, held map[string]contract.TaskID) {
	t.Helper()
	f.service("admission")
	f.service("eventsink")
	f.service("lead")
	executor = f.service("executor", append(flags, "--name", "first")...)
	f.ready()
	command, model := p.heldUp(t, f)
	return executor, map[string]contract.TaskID{inCommand: command, inModel: model}
}

// twoPlaces is a configuration for [pasture.onlyOn].
const twoPlaces = "executor: { retry_lost: always, max_tasks: 2 }\nsubagent_runtime: { lease_ttl_seconds: 5, leader_ttl_seconds: 3, max_running: 4 }\n"

// I5, I7, EXEC-03, CANCEL-10, CANCEL-12, F-044, F-054: an executor that is stopped
// (SIGSTOP) for longer than its lease cannot stop anything by itself. Its commands end
// all the same, before a second attempt begins; a cancellation that it cannot hear is
// carried out; and when it goes on, nothing that it says is stored.
func TestStoppedExecutorsCommandsEnd(t *testing.T) {
	t.Parallel()
	p := newPasture(t, 20)
	f := NewFleet(t, script, models(p.Brain), twoPlaces)
	first, held := p.onlyOn(t, f)
	first.Pause()
	f.service("executor", "--name", "second")
	if err := f.API.CancelTask(deadline(t), held[inModel]); err != nil {
		t.Fatal(err)
	}
	// The lead's API knows no third state: it is asked to stop, and it will have.
	if task := f.outcome(t, held[inModel]); task.Status != contract.TaskCancelled || task.Attempt != 1 || p.Asked(inModel, 0) != 1 {
		t.Errorf("the cancelled task: %s, attempt %d", task.Status, task.Attempt)
	}
	p.again(t, f, map[string]contract.TaskID{inCommand: held[inCommand]})
	if left := p.herd.alive(); len(left) > 0 {
		t.Errorf("while the executor is stopped, of its command there is still %q", left)
	}
	conn := f.connect(t)
	before := f.streamed(t, conn)
	first.Resume()
	eventually(t, func() (bool, string) { return p.hungUp(inModel), "the model call goes on" })
	f.isOfUse(t, "first")
	past := f.judge(t, invariant.Options{MaxRunning: 4})
	for name, id := range held {
		if a, b := of(before, id), of(past, id); len(a) != len(b) {
			t.Errorf("%s: after it went on, the executor stored %+v", name, b[len(a):])
		}
	}
}

// isOfUse submits tasks until the executor of that name has run one of them.
func (f *Fleet) isOfUse(t *testing.T, name string) {
	t.Helper()
	n := 0
	eventually(t, func() (bool, string) {
		n++
		task := f.outcome(t, f.submit(t, fmt.Sprint("small ", n)).TaskID)
		if task.Status != contract.TaskCompleted {
			t.Fatalf("a small task: %s %v", task.Status, task.Error)
		}
		return task.Executor == name, fmt.Sprintf("the executor %s takes no tasks any more", name)
	})
}

// I5, I8, EXEC-03, F-038, F-052: the network between an executor and NATS carries
// nothing any more, and nobody is told. Before its lease is over, the executor has
// hung up on the model and ended its commands, so that a second attempt is alone;
// what it had sent comes late, when the network heals, and changes nothing.
func TestExecutorCutOff(t *testing.T) {
	t.Parallel()
	p := newPasture(t, 30)
	f := NewFleet(t, script, models(p.Brain), twoPlaces)
	proxy := natstest.NewProxy(t, f.natsURL)
	_, held := p.onlyOn(t, f, "--nats-url", proxy.URL())
	f.service("executor", "--name", "second")
	proxy.Freeze(natstest.Both)
	p.again(t, f, held)
	if !p.hungUp(inModel) {
		t.Error("the model call goes on without a lease")
	}
	conn := f.connect(t)
	before := f.streamed(t, conn)
	proxy.Thaw()
	f.isOfUse(t, "first")
	past := f.judge(t, invariant.Options{MaxRunning: 4})
	for name, id := range held {
		if a, b := of(before, id), of(past, id); len(a) != len(b) {
			t.Errorf("%s: when the network was back, the executor stored %+v", name, b[len(a):])
		}
		if n := p.Asked(name, 0); n != 2 {
			t.Errorf("%s: the model was asked %d times, want 2", name, n)
		}
	}
}

// F-062: an executor that is stopped while it waits for grants keeps those that were
// on their way to it for a while, and no longer; the others keep getting work.
func TestStoppedIdleExecutor(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, quick)
	_, _, idle, _ := f.All()
	f.outcome(t, f.submit(t, "short").TaskID) // it waits for the next
	idle.Pause()
	f.service("executor")
	ids := f.submitAll(t, 12, "short")
	if n := f.outcomes(t, ids); n[contract.TaskCompleted] != len(ids) {
		t.Errorf("outcomes: %v; want %d completed", n, len(ids))
	}
	idle.Resume()
	f.inOrder(t, f.judge(t, invariant.Options{MaxRunning: 3})[5:], ids)
}

// I2, I4, F-178: of five executors four are told to go while all places are taken and
// others wait. Nothing is lost and nothing fails; what was not done is handed back and
// keeps its slot, so that nobody who came later is let in before it.
func TestScaleDown(t *testing.T) {
	t.Parallel()
	gate := make(chan struct{})
	brain := NewBrain(t, func(q Question, w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(q.Task, "long") {
			select {
			case <-gate:
			case <-r.Context().Done():
			}
		}
		Say(w, "done: "+q.Task)
	})
	const executors, places = 5, 2
	f := NewFleet(t, script, models(brain), fmt.Sprintf("executor: { drain_timeout_seconds: 1, max_tasks: %d }\nsubagent_runtime: { max_running: %d, max_queued: 200 }\n", places, executors*places))
	f.service("admission")
	f.service("eventsink")
	f.service("lead")
	var procs []*Proc
	for range executors {
		procs = append(procs, f.service("executor"))
	}
	f.ready()
	var ids []contract.TaskID
	for i := range executors * places {
		ids = append(ids, f.submit(t, fmt.Sprint("long ", i)).TaskID)
	}
	asked := func() int {
		n := 0
		for i := range executors * places {
			n += brain.Asked(fmt.Sprint("long ", i), 0)
		}
		return n
	}
	eventually(t, func() (bool, string) { return asked() == executors*places, fmt.Sprint(asked(), " long tasks run") })
	ids = append(ids, f.submitAll(t, 30, "short")...)
	var all sync.WaitGroup
	for _, p := range procs[1:] {
		all.Go(p.Stop)
	}
	all.Wait()
	// All that was handed back has its grant again, and those that wait still wait.
	eventually(t, func() (bool, string) {
		st, err := f.API.Admission(deadline(t))
		again := 0
		for _, id := range ids[:executors*places] {
			again += f.task(t, id).Attempt - 1
		}
		return err == nil && again == (executors-1)*places && st.Running == executors*places && st.Queued == 30, fmt.Sprintf("%d handed back, %+v, %v", again, st, err)
	})
	close(gate)
	if n := f.outcomes(t, ids); n[contract.TaskCompleted] != len(ids) {
		t.Errorf("outcomes: %v; want %d completed", n, len(ids))
	}
	past := f.judge(t, invariant.Options{MaxRunning: executors * places})
	f.inOrder(t, past, ids)
	again := 0
	for i, e := range past {
		if e.EventType == contract.RecordAdmitted && strings.Contains(string(e.Metadata), `"attempt":2`) {
			again++
			if slices.ContainsFunc(past[:i], func(e contract.EventRecord) bool {
				return e.EventType == contract.RecordAdmitted && slices.Contains(ids[executors*places:], e.TaskID)
			}) {
				t.Errorf("%s was handed back, and somebody who came later was let in before it", e.TaskID)
			}
		}
	}
	if again != (executors-1)*places {
		t.Errorf("%d tasks were granted again, want %d", again, (executors-1)*places)
	}
	procs[0].Stop()
}
