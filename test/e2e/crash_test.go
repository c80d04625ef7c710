package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// letter waits for the dead letter of a service about a task and returns its reason.
func (f *Fleet) letter(t *testing.T, conn *bus.Conn, origin string, id contract.TaskID) (reason string) {
	t.Helper()
	eventually(t, func() (bool, string) {
		m, err := conn.Last(deadline(t), conn.Names.DeadStream(), conn.Names.Dead(origin))
		reason = m.Header.Get(bus.HeaderReason)
		return err == nil && strings.HasSuffix(m.Header.Get(bus.HeaderOriginSubject), "."+string(id)), fmt.Sprintf("letter %q, %v", reason, err)
	})
	return reason
}

// isCrash checks that a task has ended as one that crashes executors.
func isCrash(t *testing.T, f *Fleet, id contract.TaskID) {
	t.Helper()
	if task := f.outcome(t, id); task.Status != contract.TaskFailed || task.ErrorCode != contract.ErrInternal || task.Error == nil || !strings.Contains(*task.Error, "crashed executors") {
		t.Errorf("%s: %s %s %v; want internal, with the reason", id, task.Status, task.ErrorCode, task.Error)
	}
}

// EXEC-06, I8, F-058: a task that kills whoever runs it ends after the second time,
// although lost work is to run again always. Its request is kept with the reason,
// and the fleet goes on.
func TestTaskThatKillsExecutors(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var current *Proc
	var kills int
	brain := NewBrain(t, func(q Question, w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(q.Task, "poison") && current != nil {
			kills++
			current.Kill()
			current = nil
			return
		}
		Say(w, "fine")
	})
	f := NewFleet(t, script, models(brain), "executor: { retry_lost: always, max_tasks: 1 }\n", quick)
	f.service("admission")
	f.service("eventsink")
	f.service("lead")
	next := func(n int) *Proc {
		mu.Lock()
		defer mu.Unlock()
		current = f.service("executor", "--name", fmt.Sprint("ex-", n))
		return current
	}
	ex := next(1)
	f.ready()
	poison := f.submit(t, "poison").TaskID
	others := f.submitAll(t, 3, "healthy")
	for n := 2; n <= 3; n++ {
		select {
		case <-ex.done:
		case <-time.After(Timeout):
			t.Fatalf("executor %d was not killed", n-1)
		}
		ex = next(n)
	}
	isCrash(t, f, poison)
	if n := f.outcomes(t, others); n[contract.TaskCompleted] != len(others) {
		t.Errorf("the other tasks: %v", n)
	}
	if reason := f.letter(t, f.connect(t), "admission", poison); !strings.Contains(reason, "2 of its attempts were lost") {
		t.Errorf("dead letter: %s", reason)
	}
	mu.Lock()
	if kills != 2 || current == nil {
		t.Errorf("%d executors were killed, want 2", kills)
	}
	mu.Unlock()
	eventually(t, func() (bool, string) {
		st, err := f.API.Admission(deadline(t))
		return err == nil && st.Running == 0, fmt.Sprintf("slots in use at the end: %+v, %v", st, err)
	})
	if ends := f.judge(t, invariant.Options{MaxRunning: 3}); len(of(ends, poison)) == 0 {
		t.Error("the history knows nothing of the task")
	}
}

// EXEC-06, I8, F-058: a grant that kills whoever opens it, before the task is
// claimed. Its record never expires, so the executors themselves end it, and go on.
func TestGrantThatKillsExecutors(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "executor: { max_tasks: 1 }\n", quick)
	conn := f.connect(t)
	// The server waits this long for a word of somebody who has a grant.
	name := conn.Names.GrantConsumer(contract.DefaultPool)
	cons, err := conn.JS.Consumer(deadline(t), conn.Names.GrantStream(), name)
	if err != nil {
		t.Fatal(err)
	}
	cfg := cons.CachedInfo().Config
	cfg.AckWait = time.Second
	if _, err := conn.JS.UpdateConsumer(deadline(t), conn.Names.GrantStream(), cfg); err != nil {
		t.Fatal(err)
	}
	f.service("admission")
	f.service("eventsink")
	f.service("lead")
	var poison contract.TaskID
	for n := 1; n <= 3; n++ {
		// The first write for a grant does not get out; the executor dies with it.
		proxy := natstest.NewProxy(t, f.natsURL)
		hit := proxy.FreezeAt("lease.")
		ex := f.service("executor", "--name", fmt.Sprint("ex-", n), "--nats-url", proxy.URL())
		if n == 1 {
			f.ready()
			poison = f.submit(t, "short").TaskID
		}
		select {
		case <-hit:
		case <-time.After(Timeout):
			t.Fatalf("executor %d did not open the grant", n)
		}
		ex.Kill()
		proxy.Refuse()
	}
	other := f.submit(t, "short").TaskID
	f.service("executor", "--name", "ex-4")
	isCrash(t, f, poison)
	if task := f.outcome(t, other); task.Status != contract.TaskCompleted {
		t.Errorf("the task behind it: %s %v", task.Status, task.Error)
	}
	if reason := f.letter(t, conn, "executor", poison); !strings.Contains(reason, "crashed executors 2 times") {
		t.Errorf("dead letter: %s", reason)
	}
	// A delivery that is ended is told by the server, and counted (F-058).
	eventually(t, func() (bool, string) {
		_, err := conn.Last(deadline(t), conn.Names.AdvisoryStream(), "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>")
		return err == nil, fmt.Sprint("advisory: ", err)
	})
	for _, e := range f.all(t, client.EventQuery{TaskID: poison}) {
		if e.EventType == contract.RecordStart {
			t.Error("it has begun")
		}
	}
	f.judge(t, invariant.Options{MaxRunning: 3})
}
