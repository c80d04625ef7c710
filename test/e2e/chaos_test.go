package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
)

var (
	chaosSeed   = flag.Uint64("chaos.seed", 0, "what TestChaos does; 0 is something else each time")
	chaosLength = flag.Duration("chaos.length", 3*time.Second, "how long TestChaos goes on")
)

// crew is processes of one kind that are killed, paused, stopped and started again.
type crew struct {
	f     *Fleet
	kind  string
	procs []*Proc
	flags func(i int) []string
}

func (f *Fleet) crew(kind string, n int, flags func(i int) []string) *crew {
	c := &crew{f: f, kind: kind, flags: flags}
	for i := range n {
		c.procs = append(c.procs, c.start(i))
	}
	return c
}

func (c *crew) start(i int) *Proc {
	if c.flags == nil {
		return c.f.service(c.kind)
	}
	return c.f.service(c.kind, c.flags(i)...)
}

// harm does something to one of the crew and puts it right again.
func (c *crew) harm(r *rand.Rand) string {
	i := r.IntN(len(c.procs))
	p := c.procs[i]
	switch what := r.IntN(3); what {
	case 0:
		p.Kill()
		c.procs[i] = c.start(i)
		return "killed " + c.kind
	case 1:
		d := time.Duration(r.IntN(4500)) * time.Millisecond
		p.Pause()
		<-time.After(d)
		p.Resume()
		return fmt.Sprintf("paused %s for %v", c.kind, d)
	default:
		p.signal(syscall.SIGTERM)
		select {
		case <-p.done:
		case <-time.After(15 * time.Second):
			c.f.t.Errorf("%s did not stop within 15 s", c.kind)
			p.Kill()
		}
		// Before it listens for signals, the signal itself ends it.
		if p.err != nil && p.err.Error() != "signal: terminated" {
			c.f.t.Errorf("%s ended with %v after SIGTERM", c.kind, p.err)
		}
		c.procs[i] = c.start(i)
		return "stopped " + c.kind
	}
}

func newSeed(t *testing.T) uint64 {
	seed := *chaosSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-chaos.seed=%d", seed)
	return seed
}

// I1 to I8: everything dies, pauses and comes back at random, the server
// included, while tasks are submitted and cancelled. Each accepted task ends
// once, in order, with a reason. -chaos.length makes it longer, -chaos.seed does
// the same again.
func TestChaos(t *testing.T) {
	t.Parallel()
	seed := newSeed(t)
	// All executors share the files, as they do on one machine.
	f := NewFleet(t, strings.ReplaceAll(script, "echo found-it; pwd", "sleep 0.2; echo found-it"),
		"executor: { drain_timeout_seconds: 1 }\nsubagent_runtime: { lease_ttl_seconds: 3, leader_ttl_seconds: 3, max_running: 4, max_queued: 1000, queue_timeout_seconds: 600 }\n")
	crews := []*crew{f.crew("admission", 2, nil), f.crew("executor", 2, nil), f.crew("eventsink", 1, nil)}
	f.service("lead")
	f.ready()

	stop := make(chan struct{})
	var ids []contract.TaskID
	var work sync.WaitGroup
	work.Go(func() {
		r := rand.New(rand.NewPCG(seed, 2))
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(r.IntN(160)) * time.Millisecond):
			}
			ctx, cancel := context.WithTimeout(context.Background(), Timeout)
			prompt := []string{"short", "a note", "short", "short", "a note", "short", "short", "two seconds"}[r.IntN(8)]
			acc, err := f.API.SubmitTask(ctx, wire.TaskRequest{SubagentType: "general-purpose", Prompt: prompt})
			if err != nil {
				t.Errorf("submit: %v", err)
			} else {
				ids = append(ids, acc.TaskID)
				if r.IntN(6) == 0 {
					id := ids[max(0, len(ids)-1-r.IntN(10))]
					var e *client.Error
					if err := f.API.CancelTask(ctx, id); err != nil && !(errors.As(err, &e) && e.Code == "already_finished") {
						t.Errorf("cancel: %v", err)
					}
				}
			}
			cancel()
		}
	})
	end := time.Now().Add(*chaosLength)
	var harm sync.WaitGroup
	for i, c := range crews {
		harm.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(10+i)))
			for time.Now().Before(end) {
				t.Log(c.harm(r))
				<-time.After(time.Duration(r.IntN(800)) * time.Millisecond)
			}
		})
	}
	harm.Go(func() {
		r := rand.New(rand.NewPCG(seed, 3))
		for {
			<-time.After(time.Duration(1000+r.IntN(5000)) * time.Millisecond)
			if time.Now().After(end) {
				return
			}
			d := time.Duration(r.IntN(4000)) * time.Millisecond
			if r.IntN(2) == 0 {
				// Connections stay, answers are late.
				f.nats.Pause()
				<-time.After(d)
				f.nats.Resume()
				t.Logf("paused nats-server for %v", d)
				continue
			}
			f.nats.Kill()
			<-time.After(d / 2)
			f.startNATS()
			t.Logf("killed nats-server for %v", d/2)
		}
	})
	harm.Wait()
	close(stop)
	work.Wait()
	count := map[string]int{}
	for _, id := range ids {
		task := f.outcome(t, id)
		key := string(task.Status)
		if task.Status == contract.TaskFailed {
			key += " " + string(task.ErrorCode)
			if task.ErrorCode != contract.ErrExecutorLost {
				t.Errorf("%s: %s: %s", id, task.ErrorCode, *task.Error)
			}
		}
		count[key]++
	}
	t.Logf("outcomes: %v", count)
	f.judge(t, invariant.Options{MaxRunning: 4})
}

// F-014, F-020, I4, I6, I8: two leads die, pause and leave at random, while runs
// delegate. Every run that was begun completes, told once, with each of its tasks
// run once and counted once.
func TestLeadChaos(t *testing.T) {
	t.Parallel()
	seed := newSeed(t)
	f := NewFleet(t, strings.ReplaceAll(script, "echo found-it; pwd", "sleep 0.3; echo found-it"),
		"executor: { drain_timeout_seconds: 1 }\nsubagent_runtime: { lease_ttl_seconds: 3, leader_ttl_seconds: 3, max_running: 8 }\n")
	f.service("admission")
	f.service("executor")
	f.service("eventsink")
	addrs := []string{f.addr, fmt.Sprintf("127.0.0.1:%d", freePort(t))}
	leads := f.crew("lead", 2, func(i int) []string { return []string{"--http-addr", addrs[i]} })
	f.ready()
	var apis []*client.Client
	for _, addr := range addrs {
		api, err := client.New("http://"+addr, "", &http.Client{Transport: &http.Transport{}, Timeout: 5 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		apis = append(apis, api)
	}
	end := time.Now().Add(*chaosLength)
	var work sync.WaitGroup
	work.Go(func() {
		r := rand.New(rand.NewPCG(seed, 2))
		for time.Now().Before(end) {
			// One that gets no answer may have begun all the same.
			_, _ = apis[r.IntN(2)].StartRun(deadline(t), wire.RunRequest{Input: "please delegate"})
			<-time.After(time.Duration(r.IntN(250)) * time.Millisecond)
		}
	})
	r := rand.New(rand.NewPCG(seed, 1))
	for time.Now().Before(end) {
		t.Log(leads.harm(r))
		<-time.After(time.Duration(r.IntN(500)) * time.Millisecond)
	}
	work.Wait()
	f.ready()
	past := f.judge(t, invariant.Options{MaxRunning: 8})
	runs, starts := 0, map[contract.RunID]int{}
	for _, e := range past {
		if e.EventType == contract.RecordStart {
			starts[e.RunID]++
		}
	}
	for _, e := range past {
		if e.EventType != contract.RecordRunStarted {
			continue
		}
		runs++
		var run wire.Run
		eventually(t, func() (bool, string) {
			var err error
			run, err = f.API.GetRun(deadline(t), e.RunID)
			return err == nil && run.Status.Terminal(), fmt.Sprint(err)
		})
		// 2 turns of the lead and 2 of each task: 15 + 25 + 4 × 4. A turn of the
		// lead whose answer died with it is not counted; its tasks are.
		if run.Status != contract.RunCompleted || len(run.Delegations) != 2 || strings.Count(*run.Output, "found-it") != 2 || run.Usage.TotalTokens != 56 || starts[run.RunID] != 2 {
			t.Errorf("%d tasks were started for run %+v", starts[run.RunID], run)
		}
	}
	t.Logf("%d runs", runs)
	if runs == 0 {
		t.Error("no run was begun")
	}
}
