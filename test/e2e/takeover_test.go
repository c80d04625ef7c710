package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// runLease is how long the lease of a run lives in these tests, see quick.
const runLease = 3 * time.Second

// pair is two leads with a balancer before them: a client whose connections go to
// one of the leads until they are turned to the other.
type pair struct {
	*Fleet
	lead     *Proc
	second   *client.Client
	balanced *client.Client
	turned   atomic.Bool
}

func newPair(t *testing.T, brain *Brain) *pair {
	t.Helper()
	f := NewFleet(t, script, quick, models(brain))
	p := &pair{Fleet: f}
	p.lead, _, _, _ = f.All()
	p.second = f.secondLead(t)
	transport := &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		addr := f.addr
		if p.turned.Load() {
			addr = strings.TrimPrefix(p.second.BaseURL(), "http://")
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	var err error
	if p.balanced, err = client.New("http://localhost", "", &http.Client{Transport: transport}); err != nil {
		t.Fatal(err)
	}
	return p
}

// reading is a reader of a run's events, as server-sent events.
type reading struct {
	mu     sync.Mutex
	events []contract.EventRecord
	gaps   int
	breaks int
	done   chan error
}

// read begins to read the run's events through the balancer; a break of the
// connection makes it come back with the id of the last event that it has.
func (p *pair) read(t *testing.T, id contract.RunID) *reading {
	t.Helper()
	r := &reading{done: make(chan error, 1)}
	count := func(n *int) {
		r.mu.Lock()
		defer r.mu.Unlock()
		*n++
	}
	q := client.EventQuery{RunID: id, OnGap: func(wire.Gap) { count(&r.gaps) }, OnRetry: func(error) { count(&r.breaks) }}
	ctx, cancel := context.WithTimeout(context.Background(), 2*Timeout)
	over := make(chan struct{})
	go func() {
		defer close(over)
		r.done <- p.balanced.WithPauses(50*time.Millisecond, time.Second).Stream(ctx, q, 0, func(e contract.EventRecord) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.events = append(r.events, e)
			return nil
		})
	}()
	t.Cleanup(func() { cancel(); <-over })
	return r
}

// seen waits until n of the events are of the type.
func (r *reading) seen(t *testing.T, typ string, n int) {
	t.Helper()
	eventually(t, func() (bool, string) {
		r.mu.Lock()
		defer r.mu.Unlock()
		got := 0
		for _, e := range r.events {
			if e.EventType == typ {
				got++
			}
		}
		return got >= n, fmt.Sprintf("the reader has %d of %d %s", got, n, typ)
	})
}

// whole checks that the reader has come to the run's end, over at least one break, and
// has what the store has.
func (r *reading) whole(t *testing.T, stored []contract.EventRecord) {
	t.Helper()
	select {
	case err := <-r.done:
		if err != nil {
			t.Errorf("the reader ended with %v", err)
		}
	case <-time.After(Timeout):
		t.Error("the reader did not come to the run's end")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.breaks == 0 || r.gaps != 0 {
		t.Errorf("the reader had %d breaks and %d gaps; want some breaks and no gap", r.breaks, r.gaps)
	}
	key := func(list []contract.EventRecord) (out []string) {
		for _, e := range list {
			out = append(out, fmt.Sprintf("%d %s %s %s %s", e.Seq, e.EventID, e.EventType, e.TaskID, e.Content))
		}
		return out
	}
	if got, want := key(r.events), key(stored); !slices.Equal(got, want) {
		t.Errorf("the reader has %d events, the store %d, and they are not the same\n%q\n%q", len(got), len(want), got, want)
	}
}

// taskCalls are calls of the task tool with these prompts.
func taskCalls(prompts ...string) (calls [][2]string) {
	for _, p := range prompts {
		calls = append(calls, [2]string{"task", fmt.Sprintf(`{"description":%q,"prompt":%q,"subagent_type":"general-purpose"}`, p, p)})
	}
	return calls
}

// requested lists the prompts of all tasks that the stream of requests has ever had,
// whatever became of them.
func requested(t *testing.T, conn *bus.Conn) func() []string {
	t.Helper()
	var (
		mu      sync.Mutex
		prompts []string
	)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := conn.Watch(ctx, bus.Watch{Stream: conn.Names.WorkStream(), StartSeq: 1, Subjects: []string{conn.Names.TaskRequest("*", "*")}}, func(m bus.Message, _ uint64) error {
			var req contract.TaskRequest
			if err := json.Unmarshal(m.Data, &req); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			prompts = append(prompts, req.Prompt)
			return nil
		})
		if err != nil {
			t.Errorf("requests: %v", err)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Sorted(slices.Values(prompts))
	}
}

// F-014, F-016, F-020, I4, I6, EVT-17, CANCEL-08: a lead is killed while three tasks
// of its run are at work, and a reader of the run's events is cut off by that. Another
// lead goes on with the run within the lease: nothing is delegated or asked for again,
// each task ends once, and the reader, who comes back to that lead with the id of its
// last event, gets the rest without a gap. To cancel such a run works as with any. The
// thread takes new messages meanwhile and afterwards, of a provider that is strict.
func TestRunSurvivesItsLead(t *testing.T) {
	t.Parallel()
	parts := []string{"part one", "part two", "part three"}
	for _, cancelled := range []bool{false, true} {
		t.Run(fmt.Sprintf("cancelled=%t", cancelled), func(t *testing.T) {
			t.Parallel()
			gate := make(chan struct{})
			brain := NewBrain(t, func(q Question, w http.ResponseWriter, r *http.Request) {
				list, _ := messagesOf(t, q.Body)
				if err := inPairs(list); err != nil {
					t.Errorf("%s, turn %d: %v", q.Task, q.Turn, err)
				}
				switch last := list[len(list)-1]; {
				case last.Role == "user" && last.Text == "and now?": // another run of the thread
					if strings.Contains(string(q.Body), "result of") || strings.Contains(string(q.Body), contract.DelegationInProgress) {
						t.Errorf("the thread's next run reads of what is not its own, or runs: %s", q.Body)
					}
					Say(w, "nothing runs")
				case q.Task == "delegate" && q.Turn == 0:
					Say(w, "", taskCalls(parts...)...)
				case q.Task == "delegate":
					Say(w, "all are done")
				default:
					select {
					case <-gate:
						Say(w, "result of "+q.Task)
					case <-r.Context().Done():
					}
				}
			})
			p := newPair(t, brain)
			conn := p.connect(t)
			requests := requested(t, conn)
			acc, err := p.balanced.StartRun(deadline(t), wire.RunRequest{Input: "delegate", ThreadID: "shared"})
			if err != nil {
				t.Fatal(err)
			}
			next := func() {
				t.Helper()
				run, err := p.second.RunToEnd(deadline(t), wire.RunRequest{Input: "and now?", ThreadID: "shared"})
				if err != nil || run.Status != contract.RunCompleted || *run.Output != "nothing runs" || len(run.Delegations) != 0 {
					t.Errorf("the thread's next run: %+v, %v", run, err)
				}
			}
			reader := p.read(t, acc.RunID)
			eventually(t, func() (bool, string) {
				n := 0
				for _, part := range parts {
					n += brain.Asked(part, 0)
				}
				return n == len(parts), fmt.Sprintf("%d tasks ask the model", n)
			})
			reader.seen(t, contract.RecordStart, len(parts))
			owner := owned(t, conn, acc.RunID)
			p.lead.Kill()
			killed := time.Now()
			p.turned.Store(true)
			p.API = p.second
			eventually(t, func() (bool, string) {
				now := owned(t, conn, acc.RunID)
				return now != owner, "the run is still owned by " + now
			})
			// The server counts a lease from its last renewal, whole seconds; the rest is
			// for a loaded machine.
			if d := time.Since(killed); d > 3*runLease {
				t.Errorf("the run was taken over after %v; its lease is %v", d, runLease)
			}
			want := contract.RunCompleted
			if cancelled {
				want = contract.RunCancelled
				if err := p.second.CancelRun(deadline(t), acc.RunID); err != nil {
					t.Fatal(err)
				}
			} else {
				next() // while the tasks of the other one run
				close(gate)
			}
			run := p.runEnd(t, acc.RunID)
			if cancelled {
				next()
			}
			if run.Status != want || len(run.Delegations) != len(parts) {
				t.Errorf("run = %+v, want %s with %d delegations", run, want, len(parts))
			}
			past := p.judge(t, invariant.Options{MaxRunning: 3})
			for i, d := range run.Delegations {
				state := contract.ToolCompleted
				if cancelled {
					state = contract.ToolCancelled
				}
				if d.Status != string(state) || d.Description != parts[i] {
					t.Errorf("delegation %d = %+v, want %s %s", i, d, parts[i], state)
				}
				if !count1(of(past, d.TaskID), func(e contract.EventRecord) bool { return e.EventType == contract.RecordEnd }) {
					t.Errorf("%s has not just one end", d.Description)
				}
			}
			for _, part := range parts {
				if n := brain.Asked(part, 0) + brain.Asked(part, 1); n != 1 {
					t.Errorf("the model was asked for %q %d times", part, n)
				}
			}
			if got := requests(); !slices.Equal(got, slices.Sorted(slices.Values(parts))) {
				t.Errorf("requested were %q", got)
			}
			reader.whole(t, p.all(t, client.EventQuery{RunID: acc.RunID}))
		})
	}
}

// F-008, F-014, RESULT-03: an executor is killed and does not come back. The call whose
// task it had is answered within the lease, the result of the other call is kept, and
// the run goes on with both.
func TestRunSurvivesAnExecutor(t *testing.T) {
	t.Parallel()
	var told atomic.Pointer[[]said]
	brain := NewBrain(t, func(q Question, w http.ResponseWriter, r *http.Request) {
		switch {
		case q.Task == "delegate" && q.Turn == 0:
			Say(w, "", taskCalls("held", "brief")...)
		case q.Task == "delegate":
			list, _ := messagesOf(t, q.Body)
			told.Store(&list)
			Say(w, "one of two")
		case q.Task == "held":
			<-r.Context().Done()
		default:
			Say(w, "result of "+q.Task)
		}
	})
	f := NewFleet(t, script, quick, models(brain))
	_, _, executor, _ := f.All()
	acc, err := f.API.StartRun(deadline(t), wire.RunRequest{Input: "delegate"})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() (bool, string) {
		run, err := f.API.GetRun(deadline(t), acc.RunID)
		brief := slices.ContainsFunc(run.Delegations, func(d contract.Delegation) bool {
			return d.Description == "brief" && d.Status == string(contract.ToolCompleted)
		})
		return err == nil && brief && brain.Asked("held", 0) == 1, fmt.Sprintf("%+v %v", run.Delegations, err)
	})
	executor.Kill()
	run := f.runEnd(t, acc.RunID)
	if run.Status != contract.RunCompleted || *run.Output != "one of two" {
		t.Errorf("run = %+v", run)
	}
	list := *told.Load()
	if err := inPairs(list); err != nil {
		t.Error(err)
	}
	list = slices.DeleteFunc(list, func(m said) bool { return m.Role != "tool" })
	if len(list) != 2 || !strings.Contains(list[0].Text, "Task failed.") || !strings.Contains(list[1].Text, "result of brief") {
		t.Errorf("the lead was told %+v, want a failure and the result of brief", list)
	}
	if d := run.Delegations[0]; d.ErrorCode != contract.ErrExecutorLost {
		t.Errorf("delegation = %+v, want executor_lost", d)
	}
	f.judge(t, invariant.Options{MaxRunning: 3})
}

// owned is who drives a run, as its record says.
func owned(t *testing.T, conn *bus.Conn, id contract.RunID) string {
	t.Helper()
	m, err := conn.Last(deadline(t), conn.RunStream(), conn.RunKV(contract.RunKey(id)))
	if err != nil {
		t.Fatal(err)
	}
	rec, err := contract.DecodeRunRecord(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	return rec.Owner
}

// CAP-05, CAP-08, CAP-16, I5: two leads that both hold a run for theirs. One sleeps past
// its lease while it waits for its model, whose answer wants more tasks; the other one
// has taken the run over and used up what the run may delegate. Awake again, the first
// reserves nothing, delegates nothing, and lets go.
func TestTwoLeadsShareOneAllowance(t *testing.T) {
	t.Parallel()
	const total = 3
	answered, last := make(chan struct{}), make(chan struct{})
	brain := NewBrain(t, func(q Question, w http.ResponseWriter, r *http.Request) {
		until := func(c <-chan struct{}) {
			select {
			case <-c:
			case <-r.Context().Done():
			}
		}
		switch {
		case q.Task != "crowd":
			if q.Task == "part three" {
				until(last)
			}
			Say(w, "result of "+q.Task)
		case q.Turn == 0:
			Say(w, "", taskCalls("part one", "part two")...)
		case q.Turn == 1 && q.Nth == 1: // the one that sleeps
			until(answered)
			Say(w, "", taskCalls("stale one", "stale two", "stale three")...)
		case q.Turn == 1:
			Say(w, "", taskCalls("part three", "part four")...)
		default:
			Say(w, "all are done")
		}
	})
	p := newPair(t, brain)
	conn := p.connect(t)
	requests := requested(t, conn)
	most := total
	acc, err := p.API.StartRun(deadline(t), wire.RunRequest{Input: "crowd", MaxTotalSubagents: &most})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() (bool, string) { return brain.Asked("crowd", 1) == 1, "the lead has not come to its second turn" })
	p.lead.Pause()
	p.API = p.second
	eventually(t, func() (bool, string) {
		return brain.Asked("part three", 0) == 1, "the other lead has not delegated"
	})
	close(answered) // it reaches a process that is still in the middle of its turn
	p.lead.Resume()
	letGo(t, p.lead.out)
	close(last)
	run := p.runEnd(t, acc.RunID)
	if run.Status != contract.RunCompleted || *run.Output != "all are done" {
		t.Errorf("run = %+v", run)
	}
	var names []string
	for _, d := range run.Delegations {
		names = append(names, d.Description)
	}
	want := []string{"part one", "part three", "part two"}
	if slices.Sort(names); !slices.Equal(names, want) {
		t.Errorf("delegated were %q, want %q", names, want)
	}
	if got := requests(); !slices.Equal(got, want) {
		t.Errorf("requested were %q, want %q", got, want)
	}
	p.judge(t, invariant.Options{MaxRunning: 3})
}

// letGo waits until a lead says that it drives its run no more.
func letGo(t *testing.T, out *natstest.Output) {
	t.Helper()
	eventually(t, func() (bool, string) {
		return strings.Contains(out.String(), "stopped driving a run that has not ended"), "the lead has not let go of the run"
	})
}
