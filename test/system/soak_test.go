package system

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission"
	"github.com/herdgate/herdgate/services/executor"
)

var (
	soakLeases = flag.Int("soak.leases", 200, "how many tasks run in TestSoak")
	soakLength = flag.Duration("soak.length", 5*time.Second, "how long TestSoak goes on once they all run")
	soakTTL    = flag.Duration("soak.ttl", 6*time.Second, "lease TTL of TestSoak")
	soakBurn   = flag.Int("soak.burn", 0, "busy processes beside TestSoak, for each core")
)

const soakExecutors = 4

// soakEnv says what a process of TestSoak is: a role, a name, the server, how many
// tasks run, and the lease TTL in seconds.
const soakEnv = "SOAK_PROCESS"

// soakMain runs a process of TestSoak, if this is one. It ends with its input, so that
// none outlives the test.
func soakMain() {
	var role, name, url string
	var tasks, seconds int
	if _, err := fmt.Sscan(os.Getenv(soakEnv), &role, &name, &url, &tasks, &seconds); err != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if role == "burn" {
		runtime.GOMAXPROCS(1)
		for x := uint64(1); ctx.Err() == nil; {
			for range 10_000_000 {
				x = x*6364136223846793005 + 1442695040888963407
			}
		}
		os.Exit(0)
	}
	if err := soakService(ctx, role, name, url, tasks, time.Duration(seconds)*time.Second); err != nil {
		fmt.Fprintln(os.Stderr, name, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func soakService(ctx context.Context, role, name, url string, tasks int, ttl time.Duration) error {
	log := zerolog.New(os.Stderr).Level(zerolog.WarnLevel).With().Str("process", name).Logger()
	conn, err := bus.Connect(ctx, bus.Config{URL: url, Name: name, Prefix: contract.DefaultPrefix}, log)
	if err != nil {
		return err
	}
	defer conn.Close()
	if role == "admission" {
		svc, err := admission.New(admission.Config{Name: name, MaxRunning: tasks, MaxQueued: tasks, QueueTimeout: time.Hour, LeaseTTL: ttl}, admission.Deps{Bus: conn, Log: log})
		if err != nil {
			return err
		}
		return svc.Run(ctx)
	}
	models, err := model.NewRegistry(NewHeld())
	if err != nil {
		return err
	}
	svc, err := executor.New(executor.Config{Name: name, MaxTasks: (tasks + soakExecutors - 1) / soakExecutors, StallTimeout: time.Hour, DrainTimeout: time.Millisecond},
		executor.Deps{Bus: conn, Models: models, Log: log, Tools: func(contract.TaskRequest) ([]tool.Tool, func(), error) { return nil, func() {}, nil }})
	if err != nil {
		return err
	}
	return svc.Run(ctx)
}

// soaker is a process of TestSoak.
type soaker struct {
	cmd *exec.Cmd
	in  io.Closer
}

func startSoaker(t *testing.T, role, name, url string, tasks int) *soaker {
	t.Helper()
	p := &soaker{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), fmt.Sprint(soakEnv, "=", role, " ", name, " ", url, " ", tasks, " ", int(soakTTL.Seconds())))
	p.cmd.Stderr = os.Stderr
	in, err := p.cmd.StdinPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	p.in = in
	t.Cleanup(func() {
		_ = p.in.Close()
		kill := time.AfterFunc(Timeout, func() { _ = p.cmd.Process.Kill() })
		defer kill.Stop()
		if err := p.cmd.Wait(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if role != "burn" {
			s := p.cmd.ProcessState
			t.Logf("%s used %v of processor time", name, (s.UserTime() + s.SystemTime()).Round(10*time.Millisecond))
		}
	})
	return p
}

// renewals is what the server stored of leases.
type renewals struct {
	mu     sync.Mutex
	last   map[string]time.Time // by lease, on the server's clock
	gaps   []time.Duration      // between two renewals of one lease, while it counts
	counts bool
	gone   []string // leases that ran out
	moved  []string // records of other states than granted and running, or of another attempt
	runs   map[contract.TaskID]bool
}

func (r *renewals) see(conn *bus.Conn, m bus.Message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kind, id, err := contract.ParseKey(strings.TrimPrefix(m.Subject, conn.KV("")))
	switch {
	case err != nil:
	case kind == contract.KeyLease && m.Deleted():
		r.gone = append(r.gone, id)
	case kind == contract.KeyLease:
		if before, ok := r.last[id]; ok && r.counts {
			r.gaps = append(r.gaps, m.Time.Sub(before))
		}
		r.last[id] = m.Time
	case kind == contract.KeyTask:
		rec, err := contract.DecodeTaskRecord(m.Data)
		switch {
		case err != nil || rec.Attempt != 1 || rec.State != contract.StateGranted && rec.State != contract.StateRunning:
			r.moved = append(r.moved, fmt.Sprintf("%s: %s, attempt %d %v", id, rec.State, rec.Attempt, err))
		case rec.State == contract.StateRunning:
			r.runs[rec.TaskID] = true
		}
	}
}

// ADM-09, I8: leases of work that goes on do not run out, however busy the machine is:
// executors in four processes renew them beside processes that only burn time. What
// the server stored is what counts: each lease, and the time between two renewals of it.
func TestSoak(t *testing.T) {
	t.Parallel()
	n := *soakLeases
	s := New(t, Options{MaxRunning: n, MaxQueued: n, Listen: true, Unrecorded: true})
	r := &renewals{last: map[string]time.Time{}, runs: map[contract.TaskID]bool{}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- s.Bus.Watch(ctx, bus.Watch{Stream: s.Bus.TaskStream(), Subjects: []string{s.Bus.KV("lease.*"), s.Bus.KV("task.*")}, StartSeq: 1},
			func(m bus.Message, _ uint64) error { r.see(s.Bus, m); return nil })
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	startSoaker(t, "admission", "adm-1", s.Server.URL(), n)
	for i := range soakExecutors {
		startSoaker(t, "executor", fmt.Sprint("ex-", i+1), s.Server.URL(), n)
	}
	began := time.Now()
	for i := range n {
		req := Request(fmt.Sprint("hold ", i))
		req.Subagent.TimeoutSeconds = int(time.Hour.Seconds())
		s.Submit(req)
	}
	limit := Timeout + time.Duration(n)*20*time.Millisecond
	natstest.Eventually(t, limit, func() (bool, string) {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.runs) == n || len(r.moved) > 0, fmt.Sprintf("%d of %d tasks run", len(r.runs), n)
	})
	t.Logf("%d tasks run after %v", n, time.Since(began).Round(time.Millisecond))

	burning := *soakBurn * runtime.NumCPU()
	for i := range burning {
		startSoaker(t, "burn", fmt.Sprint("burn-", i), "-", 0)
	}
	r.mu.Lock()
	r.counts = true
	r.mu.Unlock()
	<-time.After(*soakLength)
	load, _ := os.ReadFile("/proc/loadavg") // elsewhere nobody tells
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.gone) > 0 || len(r.moved) > 0 {
		t.Errorf("%d leases ran out, %d records moved, such as %v", len(r.gone), len(r.moved), slices.Concat(r.moved, r.gone)[0])
	}
	if len(r.gaps) == 0 {
		if *soakLength > *soakTTL {
			t.Error("no lease was renewed")
		}
		return
	}
	slices.Sort(r.gaps)
	late := func(q float64) time.Duration {
		return max(0, r.gaps[int(q*float64(len(r.gaps)-1))]-*soakTTL/3).Round(time.Millisecond)
	}
	// Who was never renewed again is as late as the whole took.
	now, oldest := slices.MaxFunc(values(r.last), time.Time.Compare), slices.MinFunc(values(r.last), time.Time.Compare)
	t.Logf("%d leases of %v, %d executors, %d busy processes on %d cores, load %.5s, %v: %.0f renewals a second", len(r.last), *soakTTL, soakExecutors, burning, runtime.NumCPU(), load, *soakLength, float64(len(r.gaps))/soakLength.Seconds())
	t.Logf("later than a third of the TTL by: p50 %v, p99 %v, p99.9 %v, worst %v; at the end the oldest lease was %v old; %d ran out",
		late(0.5), late(0.99), late(0.999), late(1), now.Sub(oldest).Round(time.Millisecond), len(r.gone))
	if age := now.Sub(oldest); age >= *soakTTL {
		t.Errorf("a lease was not renewed for %v", age)
	}
	if len(r.last) != n {
		t.Errorf("%d leases for %d tasks", len(r.last), n)
	}
}

func values(m map[string]time.Time) []time.Time {
	out := make([]time.Time, 0, len(m))
	for _, v := range m {
		out = append(out, v)
	}
	return out
}
