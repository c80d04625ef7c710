package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
)

var clusterRounds = flag.Int("cluster.rounds", 1, "how often TestCluster goes through its cases")

// Nodes are nats-servers that replicate among each other, each a process.
type Nodes struct {
	f     *Fleet
	args  [][]string
	procs []*Proc
}

// NewClusterFleet starts three nats-servers and provisions them with three
// copies of everything.
func NewClusterFleet(t *testing.T, script string, extra ...string) (*Fleet, *Nodes) {
	t.Helper()
	f := &Fleet{t: t, dir: t.TempDir()}
	n := &Nodes{f: f}
	var urls, routes []string
	for range 3 {
		urls = append(urls, fmt.Sprintf("nats://127.0.0.1:%d", freePort(t)))
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", freePort(t)))
	}
	for i := range urls {
		name := fmt.Sprint("node-", i)
		n.args = append(n.args, []string{
			"-n", name, "-a", "127.0.0.1", "-p", urls[i][strings.LastIndexByte(urls[i], ':')+1:], "-js", "-sd", filepath.Join(f.dir, name),
			"--cluster_name", "e2e", "--cluster", routes[i], "--routes", strings.Join(routes, ","),
		})
		n.procs = append(n.procs, f.start(name, "nats-server", n.args[i]...))
	}
	f.natsURL = strings.Join(urls, ",")
	f.configure(3, script, extra...)
	// What is asked while there is no leader gets no answer.
	conn := f.connect(t)
	eventually(t, func() (bool, string) {
		_, err := conn.NC.Request("$JS.API.INFO", nil, 500*time.Millisecond)
		return err == nil, fmt.Sprint("the cluster has no leader: ", err)
	})
	eventually(t, func() (bool, string) {
		out, err := f.run("provision")
		return err == nil, fmt.Sprintf("provision: %v\n%s", err, out)
	})
	return f, n
}

// back starts a node again on its store.
func (n *Nodes) back(i int) {
	n.procs[i] = n.f.start(fmt.Sprint("node-", i), "nats-server", n.args[i]...)
}

// leads says which node leads a stream.
func (n *Nodes) leads(t *testing.T, conn *bus.Conn, stream string) int {
	t.Helper()
	leader := -1
	eventually(t, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		s, err := conn.JS.Stream(ctx, stream)
		if err != nil {
			return false, err.Error()
		}
		info := s.CachedInfo()
		if info.Cluster == nil || info.Cluster.Leader == "" {
			return false, stream + " has no leader"
		}
		_, err = fmt.Sscanf(info.Cluster.Leader, "node-%d", &leader)
		return err == nil, fmt.Sprint(info.Cluster.Leader, err)
	})
	return leader
}

// whole waits until every copy of every stream is there and up to date, so that
// the next fault is the only one.
func (n *Nodes) whole(t *testing.T, conn *bus.Conn) {
	t.Helper()
	for _, stream := range []string{conn.Names.WorkStream(), conn.TaskStream(), conn.Names.GrantStream(), conn.Names.EventStream()} {
		eventually(t, func() (bool, string) {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			defer cancel()
			s, err := conn.JS.Stream(ctx, stream)
			if err != nil {
				return false, err.Error()
			}
			info := s.CachedInfo()
			if info.Cluster == nil || info.Cluster.Leader == "" || len(info.Cluster.Replicas) != 2 {
				return false, fmt.Sprintf("%s: %+v", stream, info.Cluster)
			}
			for _, r := range info.Cluster.Replicas {
				if r.Offline || r.Active > 3*time.Second || r.Lag > 100 {
					return false, fmt.Sprintf("%s: %+v", stream, r)
				}
			}
			return true, ""
		})
	}
}

// clients are callers that submit and cancel tasks and look at them, and keep
// what they were told.
type clients struct {
	f    *Fleet
	t    *testing.T
	stop chan struct{}
	wg   sync.WaitGroup

	mu       sync.Mutex
	accepted []contract.TaskID
	told     map[contract.TaskID]contract.TaskStatus // an end that somebody was told
	refused  map[string]int                          // submissions, by what was said
	last     time.Time
	longest  time.Duration // between two acceptances
}

func (f *Fleet) clients(t *testing.T, n int, seed uint64) *clients {
	c := &clients{f: f, t: t, stop: make(chan struct{}), told: map[contract.TaskID]contract.TaskStatus{}, refused: map[string]int{}, last: time.Now()}
	for i := range n {
		c.wg.Go(func() { c.submit(rand.New(rand.NewPCG(seed, uint64(i)))) })
	}
	c.wg.Go(func() { c.look(rand.New(rand.NewPCG(seed, 99))) })
	return c
}

// wait is false when the clients are to leave.
func (c *clients) wait(d time.Duration) bool {
	select {
	case <-c.stop:
		return false
	case <-time.After(d):
		return true
	}
}

func (c *clients) submit(r *rand.Rand) {
	for c.wait(time.Duration(100+r.IntN(400)) * time.Millisecond) {
		prompt := []string{"short", "short", "short", "a note", "a note", "two seconds"}[r.IntN(6)]
		ctx, cancel := context.WithTimeout(context.Background(), Timeout)
		acc, err := c.f.API.SubmitTask(ctx, wire.TaskRequest{SubagentType: "general-purpose", Prompt: prompt})
		if err == nil && r.IntN(8) == 0 {
			c.cancel(ctx, acc.TaskID)
		}
		cancel()
		c.mu.Lock()
		if err == nil {
			c.accepted = append(c.accepted, acc.TaskID)
			c.longest = max(c.longest, time.Since(c.last))
			c.last = time.Now()
		} else {
			c.refused[c.unavailable("submit", err)]++
		}
		c.mu.Unlock()
	}
}

// unavailable checks that an error says no more than that nobody knows.
func (c *clients) unavailable(what string, err error) string {
	var e *client.Error
	if !errors.As(err, &e) {
		c.t.Errorf("%s: the lead, which was there all the time, gave no answer: %v", what, err)
		return err.Error()
	}
	if e.Code != wire.CodeUnavailable {
		c.t.Errorf("%s: %v; want %s while NATS is in trouble", what, err, wire.CodeUnavailable)
	}
	return e.Code
}

func (c *clients) cancel(ctx context.Context, id contract.TaskID) {
	err := c.f.API.CancelTask(ctx, id)
	var e *client.Error
	switch {
	case err == nil:
	case errors.As(err, &e) && e.Code == wire.CodeAlreadyFinished:
		c.tell(id, contract.TaskStatus(e.FinishedStatus))
	default:
		c.unavailable("cancel", err)
	}
}

func (c *clients) tell(id contract.TaskID, s contract.TaskStatus) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if before, ok := c.told[id]; ok && before != s {
		c.t.Errorf("task %s had ended as %s, and then as %s", id, before, s)
	}
	c.told[id] = s
}

// look asks for tasks that were accepted: they are always there.
func (c *clients) look(r *rand.Rand) {
	for c.wait(100 * time.Millisecond) {
		c.mu.Lock()
		n := len(c.accepted)
		var id contract.TaskID
		if n > 0 {
			id = c.accepted[max(0, n-1-r.IntN(20))]
		}
		c.mu.Unlock()
		if n == 0 {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), Timeout)
		task, err := c.f.API.GetTask(ctx, id)
		cancel()
		switch {
		case err != nil:
			c.unavailable("look at "+string(id), err)
		case ended(task):
			c.tell(id, task.Status)
		}
	}
}

func (c *clients) leave() {
	close(c.stop)
	c.wg.Wait()
}

// goesOn waits until tasks that were submitted from now on have ended.
func (c *clients) goesOn(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	n := len(c.accepted)
	c.mu.Unlock()
	eventually(t, func() (bool, string) {
		c.mu.Lock()
		ids := slices.Clone(c.accepted[n:])
		c.mu.Unlock()
		if len(ids) < 3 {
			return false, fmt.Sprintf("%d tasks were accepted since", len(ids))
		}
		for _, id := range ids {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			task, err := c.f.API.GetTask(ctx, id)
			cancel()
			if err == nil && ended(task) {
				return true, ""
			}
		}
		return false, fmt.Sprintf("%d tasks were accepted since, and none has ended", len(ids))
	})
}

// probe is what a service says of its readiness.
func probe(addr string) (code int, body string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/readyz", nil)
	if err != nil {
		return 0, err.Error()
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

// all waits until every service says of its readiness what it should.
func all(t *testing.T, probes map[string]string, want func(code int, body string) bool) {
	t.Helper()
	var wg sync.WaitGroup
	for name, addr := range probes {
		wg.Go(func() {
			deadline := time.Now().Add(Timeout)
			for {
				code, body := probe(addr)
				switch {
				case want(code, body):
					return
				case time.Now().After(deadline):
					t.Errorf("%s is not as it should be: %d %s", name, code, body)
					return
				}
				time.Sleep(50 * time.Millisecond) //nolint:forbidigo // polling another process with a deadline
			}
		})
	}
	wg.Wait()
}

// inDoubt makes a write that its leader takes and cannot store for want of a
// quorum, until the leader says that it has it under way.
func inDoubt(t *testing.T, conn *bus.Conn, w bus.Write) {
	t.Helper()
	underWay := false
	eventually(t, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := conn.Publish(ctx, w)
		if !errors.Is(err, bus.ErrDoubt) {
			t.Fatalf("a write without a quorum: %v; want %v", err, bus.ErrDoubt)
		}
		var api *jetstream.APIError
		underWay = underWay || errors.As(err, &api) && api.ErrorCode == 10158
		return underWay || errors.As(err, &api) && api.ErrorCode == 10008, err.Error()
	})
	if !underWay {
		t.Log("the leader stepped down before it could be asked again")
	}
}

// decided tries a write in doubt again until it is stored, and checks that it is
// there once.
func decided(t *testing.T, conn *bus.Conn, w bus.Write) {
	t.Helper()
	var ack bus.Ack
	eventually(t, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		var err error
		ack, err = conn.Publish(ctx, w)
		if err != nil && !errors.Is(err, bus.ErrDoubt) {
			t.Fatalf("a write in doubt, tried again: %v", err)
		}
		return err == nil, fmt.Sprint(err)
	})
	again, err := conn.Publish(deadline(t), w)
	if err != nil || !again.Duplicate || again.Seq != ack.Seq {
		t.Errorf("a write in doubt is stored as %+v, and then as %+v, %v", ack, again, err)
	}
}

// noQuorum is the shortest time to be without a quorum.
const noQuorum = 3 * time.Second

// I1 to I8 on three nats-servers with three copies of everything, under load:
// nodes die, restart, and lose their quorum, and the leader of the gate dies
// beside the leader of its stream. What was accepted ends once, in order and
// within the cap, and nobody is told what is not so. -cluster.rounds does it
// more than once.
func TestCluster(t *testing.T) {
	t.Parallel()
	seed, began := newSeed(t), time.Now()
	f, nodes := NewClusterFleet(t, strings.ReplaceAll(script, "echo found-it; pwd", "sleep 0.2; echo found-it"),
		"subagent_runtime: { leader_ttl_seconds: 5, max_running: 6, max_queued: 2000, queue_timeout_seconds: 600 }\n")
	probes := map[string]string{"lead": f.addr}
	services := map[string]*Proc{}
	start := func(name, kind string) {
		if probes[name] == "" {
			probes[name] = fmt.Sprintf("127.0.0.1:%d", freePort(t))
		}
		flags := []string{"--name", name}
		if kind != "lead" {
			flags = append(flags, "--metrics-addr", probes[name])
		}
		services[name] = f.service(kind, flags...)
	}
	start("gate-0", "admission")
	start("gate-1", "admission")
	start("executor-0", "executor")
	start("executor-1", "executor")
	start("sink", "eventsink")
	start("lead", "lead")
	f.ready()
	conn := f.connect(t)
	callers := f.clients(t, 3, seed)
	callers.goesOn(t)

	t.Logf("up after %v", time.Since(began).Round(time.Millisecond))
	began = time.Now()
	for round := range *clusterRounds {
		done := func(what string) {
			callers.goesOn(t)
			callers.mu.Lock()
			t.Logf("%6.1f s: %s; %d accepted, longest gap %v", time.Since(began).Seconds(), what, len(callers.accepted), callers.longest.Round(time.Millisecond))
			callers.mu.Unlock()
			nodes.whole(t, conn)
		}

		i := nodes.leads(t, conn, conn.Names.WorkStream())
		nodes.procs[i].Kill()
		callers.goesOn(t)
		nodes.back(i)
		done("killed the leader of the request stream")

		i = nodes.leads(t, conn, conn.Names.GrantStream())
		nodes.procs[i].signal(syscall.SIGTERM)
		<-nodes.procs[i].done
		nodes.back(i)
		done("restarted the leader of the grant stream")

		i = nodes.leads(t, conn, conn.Names.DeadStream())
		one, two := (i+1)%3, (i+2)%3
		nodes.procs[one].Kill()
		nodes.procs[two].Kill()
		lost := time.Now()
		// What is in doubt and still under way is in doubt when it is tried again.
		letter := bus.Write{Subject: conn.Names.Dead("e2e"), MsgID: fmt.Sprint("letter-", seed, "-", round)}
		inDoubt(t, conn, letter)
		// Before the leaders that are left have noticed, which takes some 20 s.
		all(t, probes, func(code int, body string) bool {
			return code == http.StatusServiceUnavailable && (strings.Contains(body, "JetStream cannot be used") || strings.Contains(body, "not connected to NATS"))
		})
		// One that starts now waits.
		services["executor-1"].Kill()
		start("executor-1", "executor")
		<-time.After(time.Until(lost.Add(noQuorum)))
		nodes.back(one)
		nodes.back(two)
		all(t, probes, func(code int, _ string) bool { return code == http.StatusOK })
		decided(t, conn, letter)
		done(fmt.Sprintf("no quorum for %v", time.Since(lost).Round(time.Millisecond)))

		st, err := f.API.Admission(deadline(t))
		if err != nil {
			t.Fatal(err)
		}
		leader := st.Leader[:strings.LastIndexByte(st.Leader, '-')]
		i = nodes.leads(t, conn, conn.TaskStream())
		services[leader].Kill()
		nodes.procs[i].Kill()
		callers.goesOn(t)
		nodes.back(i)
		start(leader, "admission")
		done("killed " + leader + ", which led the gate, and the leader of the task bucket")
	}
	callers.leave()
	for name, p := range services {
		select {
		case <-p.done:
			t.Errorf("%s ended by itself: %v", name, p.err)
		default:
		}
	}

	count := map[string]int{}
	for _, id := range callers.accepted {
		task := f.outcome(t, id)
		callers.tell(id, task.Status)
		key := string(task.Status)
		if task.Status == contract.TaskFailed {
			key += " " + string(task.ErrorCode)
			if task.ErrorCode != contract.ErrExecutorLost {
				t.Errorf("%s: %s: %s", id, task.ErrorCode, *task.Error)
			}
		}
		count[key]++
	}
	t.Logf("outcomes: %v, not accepted: %v", count, callers.refused)
	t.Logf("all ended after %v", time.Since(began).Round(time.Millisecond))
	past := f.judge(t, invariant.Options{MaxRunning: 6})
	t.Logf("judged after %v", time.Since(began).Round(time.Millisecond))
	ends := map[contract.TaskID]int{}
	for _, e := range past {
		if e.EventType == contract.RecordEnd {
			ends[e.TaskID]++
		}
	}
	for _, id := range callers.accepted {
		if ends[id] != 1 {
			t.Errorf("task %s was accepted and has %d ends in the stream", id, ends[id])
		}
	}
}

// F-040: the disk of NATS is full. Nothing is granted, callers are told that it is
// NATS that cannot, and the gate is not ready. When there is room again and the
// server has been started anew, as a full disk demands, all that was accepted is
// done, in order.
func TestNATSDiskFull(t *testing.T) {
	t.Parallel()
	f := &Fleet{t: t, dir: t.TempDir()}
	disk := f.dataDir("nats")
	if err := os.Mkdir(disk, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("none", disk, "tmpfs", 0, "size=64m"); err != nil {
		t.Skipf("cannot mount a small disk: %v", err)
	}
	port := freePort(t)
	f.natsURL = fmt.Sprintf("nats://127.0.0.1:%d", port)
	conf := f.write("nats.conf", fmt.Sprintf("listen: 127.0.0.1:%d\njetstream { store_dir: %q, max_file_store: 1TB }\n", port, disk))
	t.Cleanup(func() { _ = syscall.Unmount(disk, syscall.MNT_DETACH) })
	f.nats = f.start("nats-server", "nats-server", "-c", conf)
	f.configure(1, script, "subagent_runtime: { leader_ttl_seconds: 3, lease_ttl_seconds: 15, max_running: 1 }\n")
	if out, err := f.run("provision"); err != nil {
		t.Fatalf("provision: %v\n%s", err, out)
	}
	probes := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	f.service("admission", "--metrics-addr", probes)
	f.service("executor")
	f.service("eventsink")
	f.service("lead")
	f.ready()
	running := f.submit(t, "two seconds").TaskID
	ids := append([]contract.TaskID{running}, f.submitAll(t, 2, "short")...)
	f.waitFor(t, running, func(task wire.Task) bool { return task.Status == contract.TaskRunning })
	filler := filepath.Join(disk, "filler")
	if err := os.WriteFile(filler, make([]byte, 65<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("fill the disk: %v", err)
	}
	// The server notices when a block of its store is full, or at the next sync; what
	// it says that it has stored until then, it has.
	conn := f.connect(t)
	eventually(t, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		defer cancel()
		_, err := conn.Publish(ctx, bus.Write{Subject: conn.KV("cancel.nobody"), Data: make([]byte, 256<<10)})
		if err != nil && !errors.Is(err, bus.ErrDoubt) {
			t.Fatalf("a write on a full disk: %v; want %v", err, bus.ErrDoubt)
		}
		return err != nil, "the server still stores"
	})
	all(t, map[string]string{"admission": probes}, func(code int, body string) bool {
		return code == http.StatusServiceUnavailable && (strings.Contains(body, "in doubt") || strings.Contains(body, "NATS does not store"))
	})
	for _, id := range ids[1:] {
		if task := f.task(t, id); task.Status != contract.TaskQueued {
			t.Errorf("task %s is %s while nothing can be stored", id, task.Status)
		}
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	f.nats.Stop()
	f.nats = f.start("nats-server", "nats-server", "-c", conf)
	ids = append(ids, f.submitAll(t, 2, "short")...)
	n := f.outcomes(t, ids)
	t.Logf("outcomes: %v", n)
	if n[contract.TaskCompleted] < len(ids)-1 {
		t.Errorf("outcomes: %v; want all completed but the one that ran", n)
	}
	f.inOrder(t, f.judge(t, invariant.Options{MaxRunning: 1}), ids)
}
