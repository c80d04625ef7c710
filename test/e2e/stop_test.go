package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
)

// secondLead starts another lead and returns its API.
func (f *Fleet) secondLead(t *testing.T) *client.Client {
	t.Helper()
	addr := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	f.service("lead", "--http-addr", addr)
	api, err := client.New("http://"+addr, "", &http.Client{Transport: &http.Transport{}})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		err := api.Ready(ctx)
		return err == nil, fmt.Sprint("second lead: ", err)
	})
	return api
}

// cancelOverNATS asks whichever lead gets the request.
func cancelOverNATS(t *testing.T, conn *bus.Conn, id contract.TaskID) error {
	t.Helper()
	body, err := json.Marshal(map[string]string{"task_id": string(id)})
	if err != nil {
		return err
	}
	m, err := conn.NC.RequestWithContext(deadline(t), conn.Names.Service("task", "cancel"), body)
	if err != nil {
		return err
	}
	if m.Header.Get(micro.ErrorCodeHeader) == "" {
		return nil
	}
	e := &client.Error{}
	var p wire.Problem
	if err := json.Unmarshal(m.Data, &p); err != nil {
		return err
	}
	e.Code, e.FinishedStatus, e.Detail = p.Code, p.FinishedStatus, p.Detail
	e.Status, err = strconv.Atoi(m.Header.Get(micro.ErrorCodeHeader))
	return errors.Join(err, e)
}

// end is what was seen at the moment when a task's record said cancelled.
type end struct {
	at   time.Time
	left []string        // processes of the command
	open map[string]bool // tasks whose model call went on
}

// watchEnds notes what is left of the work at the moment when a record becomes
// cancelled, and looks whether a terminal event comes before its record.
func (p *pasture) watchEnds(t *testing.T, conn *bus.Conn) func(id contract.TaskID) (end, bool) {
	t.Helper()
	var mu sync.Mutex
	ends := map[contract.TaskID]end{}
	follow := func(subject string, f func(m *nats.Msg)) {
		t.Helper()
		sub, err := conn.NC.Subscribe(subject, f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sub.Unsubscribe() })
	}
	follow(conn.KV(contract.TaskKey("*")), func(m *nats.Msg) {
		rec, err := contract.DecodeTaskRecord(m.Data)
		if err != nil || rec.State != contract.StateCancelled {
			return
		}
		e := end{at: time.Now(), left: p.herd.alive(), open: p.openCalls()}
		mu.Lock()
		defer mu.Unlock()
		if _, ok := ends[rec.TaskID]; !ok {
			ends[rec.TaskID] = e
		}
	})
	follow(conn.Names.Events(contract.EventSubject{Type: contract.EventTaskCancelled}), func(m *nats.Msg) {
		at, err := conn.Names.ParseEvent(m.Subject)
		if err != nil {
			t.Error(err)
			return
		}
		last, err := conn.Last(context.Background(), conn.TaskStream(), conn.KV(contract.TaskKey(at.Task)))
		if err != nil {
			t.Errorf("%s: %v", at.Task, err)
			return
		}
		if rec, err := contract.DecodeTaskRecord(last.Data); err != nil || rec.State != contract.StateCancelled {
			t.Errorf("%s is told to be cancelled, and its record says %s, %v", at.Task, rec.State, err)
		}
	})
	if err := conn.NC.Flush(); err != nil {
		t.Fatal(err)
	}
	return func(id contract.TaskID) (end, bool) {
		mu.Lock()
		defer mu.Unlock()
		e, ok := ends[id]
		return e, ok
	}
}

// runEnd waits for the end of a run.
func (f *Fleet) runEnd(t *testing.T, id contract.RunID) wire.Run {
	t.Helper()
	var run wire.Run
	eventually(t, func() (bool, string) {
		var err error
		run, err = f.API.GetRun(deadline(t), id)
		return err == nil && run.Status.Terminal(), fmt.Sprintf("run %s is %s, %v", id, run.Status, err)
	})
	return run
}

// stopTime is how long a running task may take to stop.
const stopTime = 2 * time.Second

// I7, CANCEL-01, CANCEL-02, CANCEL-05, CANCEL-07, CANCEL-08, CANCEL-12, F-016, F-076,
// F-078: a run's tasks, of which one runs a command, one asks a model and one waits,
// are cancelled by a lead that does not drive the run; single ones by a NATS request;
// and those of a run whose lead has died, by the one that is left. Each is cancelled
// only after its processes have ended and its model call was hung up, its record comes
// before its event, and nothing of it begins afterwards.
func TestStopWithProof(t *testing.T) {
	t.Parallel()
	p := newPasture(t, 40)
	const waits = "waits"
	kinds := []string{inCommand, inModel, waits}
	leads := NewBrain(t, func(q Question, w http.ResponseWriter, _ *http.Request) {
		var calls [][2]string
		for _, kind := range kinds {
			if q.Turn == 0 {
				calls = append(calls, [2]string{"task", fmt.Sprintf(`{"description":%q,"prompt":"%s: %s","subagent_type":"general-purpose"}`, kind, kind, q.Task)})
			}
		}
		Say(w, "so it goes", calls...)
	})
	f := NewFleet(t, script, `models:
  - { name: main, provider: openai, model: brain-1, base_url: "`+p.URL+`", api_key_env: HERDGATE_TEST_KEY, max_retries: 0 }
  - { name: lead, provider: openai, model: brain-2, base_url: "`+leads.URL+`", api_key_env: HERDGATE_TEST_KEY, max_retries: 0 }
lead: { model: lead }
subagents: { agents: { general-purpose: { model: main } } }
`, quick)
	driver, _, _, _ := f.All()
	other := f.secondLead(t)
	conn := f.connect(t)
	ends := p.watchEnds(t, conn)
	// Of three slots one is taken, so that the third task of each run waits.
	f.submit(t, inModel+": by itself")
	begin := func(round string) (contract.RunID, map[string]contract.TaskID) {
		t.Helper()
		acc, err := f.API.StartRun(deadline(t), wire.RunRequest{Input: round})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, p.herd.grazing)
		ids := map[string]contract.TaskID{}
		eventually(t, func() (bool, string) {
			page, err := f.API.ListTasks(deadline(t), client.TaskQuery{RunID: acc.RunID})
			if err != nil {
				return false, err.Error()
			}
			for _, task := range page.Tasks {
				ids[task.Description] = task.TaskID
			}
			n := p.Asked(inModel+": "+round, 0)
			return len(ids) == len(kinds) && n == 1, fmt.Sprintf("the run has %d tasks; the model was asked %d times", len(ids), n)
		})
		return acc.RunID, ids
	}
	cancelled := func(kind, round string, id contract.TaskID, limit time.Time) {
		t.Helper()
		var e end
		eventually(t, func() (bool, string) { var ok bool; e, ok = ends(id); return ok, kind + " is not cancelled" })
		if kind == inCommand && len(e.left) > 0 {
			t.Errorf("%s, %s: cancelled, and there is still %q", kind, round, e.left)
		}
		if e.open[kind+": "+round] {
			t.Errorf("%s, %s: cancelled, and its model call goes on", kind, round)
		}
		if d := e.at.Sub(limit); !limit.IsZero() && d > 0 {
			t.Errorf("%s, %s: it stopped %v too late", kind, round, d)
		}
	}

	const first, second, third = "first", "second", "third"
	run, ids := begin(first)
	limit := time.Now().Add(stopTime)
	if err := other.CancelRun(deadline(t), run); err != nil {
		t.Fatal(err)
	}
	for kind, id := range ids {
		cancelled(kind, first, id, limit)
	}
	got := f.runEnd(t, run)
	if got.Status != contract.RunCancelled {
		t.Errorf("run = %+v", got)
	}
	allCancelled := func(run wire.Run) {
		t.Helper()
		if len(run.Delegations) != len(kinds) {
			t.Errorf("run = %+v", run)
		}
		for _, d := range run.Delegations {
			if d.Status != string(contract.ToolCancelled) {
				t.Errorf("delegation %s is %s, want cancelled", d.Description, d.Status)
			}
		}
	}
	allCancelled(got)

	run, ids = begin(second)
	for _, kind := range []string{waits, inModel, inCommand} {
		limit := time.Now().Add(stopTime)
		if err := cancelOverNATS(t, conn, ids[kind]); err != nil {
			t.Fatal(err)
		}
		cancelled(kind, second, ids[kind], limit)
		var finished *client.Error
		if err := cancelOverNATS(t, conn, ids[kind]); !errors.As(err, &finished) || finished.Status != http.StatusConflict || finished.FinishedStatus != string(contract.TaskCancelled) {
			t.Errorf("%s: cancelled again: %v", kind, err)
		}
	}
	// The lead is told, and goes on.
	if got = f.runEnd(t, run); got.Status != contract.RunCompleted || got.Output == nil || *got.Output != "so it goes" {
		t.Errorf("run = %+v", got)
	}
	allCancelled(got)

	run, ids = begin(third)
	driver.Kill()
	f.API = other
	if err := other.CancelRun(deadline(t), run); err != nil {
		t.Fatal(err)
	}
	if got = f.runEnd(t, run); got.Status != contract.RunCancelled {
		t.Errorf("run = %+v", got)
	}
	for kind, id := range ids {
		cancelled(kind, third, id, time.Time{})
	}
	allCancelled(got)

	for _, round := range []string{first, second, third} {
		if a, b, c, d := p.Asked(inCommand+": "+round, 0), p.Asked(inCommand+": "+round, 1), p.Asked(inModel+": "+round, 0), p.Asked(waits+": "+round, 0); a != 1 || b != 0 || c != 1 || d != 0 {
			t.Errorf("%s: the model was asked %d, %d, %d and %d times, want 1, 0, 1 and 0", round, a, b, c, d)
		}
	}
	if left := p.openCalls(); len(left) != 1 {
		t.Errorf("the task that nobody cancelled should be the only one that goes on: %v", left)
	}
	if n := f.rows(t, `SELECT count(*) FROM events WHERE event_type = 'subagent.end' AND json_extract(content, '$.status') = 'cancelled'`)[0][0]; n != int64(3*len(kinds)) {
		t.Errorf("%v tasks are cancelled in the database, want %d", n, 3*len(kinds))
	}
	for _, v := range invariant.Check(f.all(t, client.EventQuery{}), invariant.Options{MaxRunning: 3}) {
		t.Error(v)
	}
}

// I2, I4, I7, I8, CANCEL-02, CANCEL-04, CANCEL-05, CANCEL-06, CANCEL-11, ADM-06, ADM-07,
// ADM-16, F-048, F-054: cancellations race with grants, completions, queue timeouts,
// lost executors and restarts of the gate, through two leads and NATS, some of them
// twice. Each task ends once. Who was told that it had ended was told how; and where
// the wish was accepted and the task ended otherwise, that end was stored after it.
func TestCancelRaces(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, strings.ReplaceAll(script, "delay_ms: 30", "delay_ms: 90"), `executor: { drain_timeout_seconds: 1 }
subagent_runtime: { lease_ttl_seconds: 3, leader_ttl_seconds: 3, max_running: 6, max_queued: 500, queue_timeout_seconds: 5 }
`)
	_, gate, executor, _ := f.All()
	standby := f.service("admission")
	f.service("executor")
	other := f.secondLead(t)
	conn := f.connect(t)

	const n, span = 150, 6 * time.Second
	type told struct {
		id       contract.TaskID
		finished string // or accepted
	}
	var mu sync.Mutex
	var answers []told
	cancel := func(id contract.TaskID, how int) {
		var err error
		switch how {
		case 0:
			err = f.API.CancelTask(deadline(t), id)
		case 1:
			err = other.CancelTask(deadline(t), id)
		default:
			err = cancelOverNATS(t, conn, id)
		}
		a := told{id: id}
		var e *client.Error
		switch {
		case err == nil:
		case errors.As(err, &e) && e.Code == wire.CodeAlreadyFinished && e.FinishedStatus != "":
			a.finished = e.FinishedStatus
		default:
			t.Errorf("cancel %s: %v", id, err)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		answers = append(answers, a)
	}
	var wg sync.WaitGroup
	wg.Go(func() { // the gate dies three times, an executor twice
		for i := range 3 {
			<-time.After(span / 4)
			gate.Kill()
			gate, standby = standby, f.service("admission")
			if i < 2 {
				executor.Kill()
				executor = f.service("executor")
			}
		}
	})
	var ids []contract.TaskID
	for i := range n {
		api := f.API
		if i%2 == 1 {
			api = other
		}
		prompt := "short"
		if i%6 == 5 {
			prompt = "two seconds" // such a task is lost with its executor
		}
		acc, err := api.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: prompt})
		if err != nil {
			t.Error(err)
			continue
		}
		ids = append(ids, acc.TaskID)
		for range i % 3 { // none, one or two who cancel
			d, how := time.Duration(rand.Int64N(int64(span))), rand.IntN(3)
			if i%4 == 0 {
				d /= 20 // soon
			}
			wg.Go(func() { <-time.After(d); cancel(acc.TaskID, how) })
		}
		<-time.After(span / n / 2)
	}
	wg.Wait()
	var missing *client.Error
	if err := cancelOverNATS(t, conn, "t_never_heard_of"); !errors.As(err, &missing) || missing.Status != http.StatusNotFound {
		t.Errorf("cancel what is not there: %v", err)
	}

	count := map[string]int{}
	ended := map[contract.TaskID]contract.TaskStatus{}
	for _, id := range ids {
		task := f.outcome(t, id)
		ended[id] = task.Status
		count[strings.TrimSpace(string(task.Status)+" "+string(task.ErrorCode))]++
		switch {
		case task.Status == contract.TaskCompleted, task.Status == contract.TaskCancelled:
		case task.ErrorCode == contract.ErrQueueTimeout, task.ErrorCode == contract.ErrExecutorLost:
		default:
			t.Errorf("%s: %s %s %v", id, task.Status, task.ErrorCode, task.Error)
		}
	}
	seq := func(key string) uint64 {
		t.Helper()
		m, err := conn.Last(deadline(t), conn.TaskStream(), conn.KV(key))
		if err != nil {
			t.Fatal(err)
		}
		return m.Seq
	}
	beaten := 0
	for _, a := range answers {
		switch {
		case a.finished != "" && a.finished != string(ended[a.id]):
			t.Errorf("%s: somebody was told %s, it is %s", a.id, a.finished, ended[a.id])
		case a.finished == "" && ended[a.id] != contract.TaskCancelled:
			beaten++
			// Two may have asked, and the newer wish is the one that is kept: the
			// record must then be newer than none of them. It is enough to look at
			// tasks that one asked for.
			if one := count1(answers, func(b told) bool { return b.id == a.id }); one && seq(contract.TaskKey(a.id)) < seq(contract.CancelKey(a.id)) {
				t.Errorf("%s: it had ended as %s when its cancellation was accepted", a.id, ended[a.id])
			}
		}
	}
	t.Logf("outcomes: %v; %d answers, %d accepted and beaten", count, len(answers), beaten)
	if count["completed"] == 0 || count["cancelled"] == 0 {
		t.Errorf("outcomes: %v; the test wants both", count)
	}
	f.judge(t, invariant.Options{MaxRunning: 6})
}

// count1 reports whether exactly one of list is meant.
func count1[T any](list []T, meant func(T) bool) bool {
	n := 0
	for _, x := range list {
		if meant(x) {
			n++
		}
	}
	return n == 1
}
