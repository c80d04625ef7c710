package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

var (
	failoverSamples = flag.Int("failover.samples", 1, "how many times as often as usual each kind of fail-over is measured")
	failoverOutage  = flag.Duration("failover.outage", 0, "how much longer than the fail-over a leader stays frozen or cut off; after half a minute connections break")
	failoverWaiting = flag.Int("failover.waiting", 200, "how many tasks wait when a leader is told to go")
)

const (
	leaderTTL = 3 * time.Second // the least that a configuration takes
	// What a fail-over may take: after a leader that said nothing, and after one
	// that handed the gate back.
	silentLimit  = leaderTTL + time.Second
	orderedLimit = 500 * time.Millisecond
)

// trio is a fleet with three admission processes, one of which leads.
type trio struct {
	*Fleet
	t       *testing.T
	names   []string
	procs   map[string]*Proc
	proxies map[string]*natstest.Proxy // between a process and NATS; none in a namespace
	probes  map[string]string          // where a process shows its metrics
	ledger  *ledger
	ids     []contract.TaskID // in the order of submission
}

const trioConfig = "subagent_runtime: { lease_ttl_seconds: 6, leader_ttl_seconds: 3, max_running: 3, max_queued: 1500, queue_timeout_seconds: 600 }\n"

// newTrio starts a fleet with three admission processes, each behind a proxy.
func newTrio(t *testing.T) *trio {
	t.Helper()
	g := &trio{
		Fleet: NewFleet(t, script, trioConfig), t: t, names: []string{"adm-1", "adm-2", "adm-3"},
		procs: map[string]*Proc{}, proxies: map[string]*natstest.Proxy{}, probes: map[string]string{},
	}
	for _, name := range g.names {
		g.proxies[name] = natstest.NewProxy(t, g.natsURL)
		g.start(name)
	}
	g.beside()
	return g
}

// start starts an admission process, the first time or again.
func (g *trio) start(name string) {
	g.t.Helper()
	g.probes[name] = fmt.Sprintf("127.0.0.1:%d", freePort(g.t))
	flags := []string{"--name", name, "--metrics-addr", g.probes[name]}
	if p := g.proxies[name]; p != nil {
		flags = append(flags, "--nats-url", p.URL())
	}
	g.procs[name] = g.service("admission", flags...)
}

// beside starts what a gate is for, and the ledger.
func (g *trio) beside() {
	g.t.Helper()
	for _, name := range g.names {
		g.standsReady(name)
	}
	g.service("executor")
	g.service("eventsink")
	g.service("lead")
	g.ledger = newLedger(g.t, g.connect(g.t))
	g.ready()
}

// leader is the name of the process that holds the leader key.
func (g *trio) leader() string {
	g.t.Helper()
	name := ""
	eventually(g.t, func() (bool, string) {
		name = g.ledger.leader()
		return g.procs[name] != nil, "nobody holds the leader key"
	})
	return name
}

// get asks a process for a page of its probes.
func (g *trio) get(name, path string) (int, string) {
	c := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DialContext: g.dial, DisableKeepAlives: true}}
	resp, err := c.Get("http://" + g.probes[name] + path) //nolint:noctx // it has a timeout
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(b)
}

// standsReady waits until a process leads or could.
func (g *trio) standsReady(name string) {
	g.t.Helper()
	eventually(g.t, func() (bool, string) {
		code, body := g.get(name, "/readyz")
		return code == http.StatusOK, fmt.Sprintf("%s is not ready: %d %s", name, code, body)
	})
}

// metric reads a counter or gauge of the gate in a process.
func (g *trio) metric(name, metric string) (float64, error) {
	_, body := g.get(name, "/metrics")
	m := regexp.MustCompile(`(?m)^herdgate_admission_` + metric + ` (\S+)$`).FindStringSubmatch(body)
	if m == nil {
		return 0, fmt.Errorf("%s shows no metric %s: %.200s", name, metric, body)
	}
	return strconv.ParseFloat(m[1], 64)
}

// standsBy waits until a process that led has noticed that it does not any more.
func (g *trio) standsBy(name string) {
	g.t.Helper()
	eventually(g.t, func() (bool, string) {
		v, err := g.metric(name, "leader")
		return err == nil && v == 0, fmt.Sprintf("%s: leader = %v, %v", name, v, err)
	})
	g.standsReady(name)
}

// left waits until a process that was told to go has gone.
func (g *trio) left(name string) {
	g.t.Helper()
	select {
	case <-g.procs[name].done:
		if err := g.procs[name].err; err != nil {
			g.t.Errorf("%s ended with %v after SIGTERM", name, err)
		}
	case <-time.After(Timeout):
		g.t.Fatalf("%s did not stop", name)
	}
}

// fill submits tasks until n wait, and lets one of them run for two seconds when the
// queue was short.
func (g *trio) fill(n int) {
	g.t.Helper()
	if *failoverSamples > 1 {
		// At any moment between two renewals, not always at the same.
		<-time.After(rand.N(leaderTTL / 3))
	}
	missing := n - g.waiting()
	if missing > n/2 {
		g.ids = append(g.ids, g.submit(g.t, "two seconds").TaskID)
	}
	g.ids = append(g.ids, g.submitAll(g.t, missing, "short")...)
}

// failOver is one measured take-over.
type failOver struct {
	from, to    string
	free, crown time.Duration // until the leader key was free, and held by another
	grant       time.Duration // until the first grant of the new leader was stored
}

func (m failOver) String() string {
	ms := func(d time.Duration) time.Duration { return d.Round(time.Millisecond) }
	return fmt.Sprintf("%s → %s: key free after %v, held by another after %v, first grant after %v", m.from, m.to, ms(m.free), ms(m.crown), ms(m.grant))
}

// failOver hurts the leader and waits until another process has granted a task.
func (g *trio) failOver(hurt func(leader string)) failOver {
	g.t.Helper()
	m := failOver{from: g.leader()}
	// The server's clock stamps what it stores, and is the one of this machine.
	began := time.Now()
	hurt(m.from)
	// On a slow machine all others may have their slots already.
	g.ids = append(g.ids, g.submit(g.t, "short").TaskID)
	grant := g.ledger.await(func(e entry) bool { return e.first && e.by != m.from && e.at.After(began) })
	m.to, m.grant = grant.by, grant.at.Sub(began)
	for _, e := range g.ledger.all() {
		if e.leader && e.at.After(began) && e.by != m.from {
			if e.by == "" {
				m.free = e.at.Sub(began)
				continue
			}
			m.crown = e.at.Sub(began)
			break
		}
	}
	return m
}

// finish waits for all tasks and judges what was recorded of them.
func (g *trio) finish(cancelled ...contract.TaskID) {
	g.t.Helper()
	for _, id := range g.ids {
		task := g.outcome(g.t, id)
		if slices.Contains(cancelled, id) && task.Status == contract.TaskCancelled {
			continue
		}
		if task.Status != contract.TaskCompleted || task.Attempt != 1 {
			g.t.Errorf("%s: %s, attempt %d, %v; want completed at the first attempt", id, task.Status, task.Attempt, task.Error)
		}
	}
	past := g.judge(g.t, invariant.Options{MaxRunning: 3})
	started := map[contract.TaskID]bool{}
	for _, e := range past {
		if e.EventType == contract.RecordAdmitted {
			started[e.TaskID] = true
		}
	}
	g.inOrder(g.t, past, slices.DeleteFunc(slices.Clone(g.ids), func(id contract.TaskID) bool {
		return slices.Contains(cancelled, id) && !started[id]
	}))
	g.ledger.check()
}

// ADM-08, I1, I2, I4, I8: the leader of three admission processes is killed, frozen
// past its key, cut off from NATS without a closed connection, or told to go, while
// tasks run and wait. A standby grants within leader_ttl_seconds and a second, or
// within half a second when it was told; the old leader grants nothing any more;
// nothing is lost, the order and the cap hold.
func TestFailOver(t *testing.T) {
	t.Parallel()
	freed := func(g *trio, leader string) { g.standsBy(leader) }
	again := func(g *trio, leader string) { g.start(leader); g.standsReady(leader) }
	for _, c := range []struct {
		name             string
		samples, waiting int
		limit            time.Duration
		hurt, heal       func(g *trio, leader string)
	}{
		{"killed", 1, 40, silentLimit, func(g *trio, leader string) { g.procs[leader].Kill() }, again},
		{"frozen", 1, 40, silentLimit, func(g *trio, leader string) { g.procs[leader].Pause() },
			func(g *trio, leader string) { g.procs[leader].Resume(); freed(g, leader) }},
		{"cut off", 1, 40, silentLimit, func(g *trio, leader string) { g.proxies[leader].Freeze(natstest.Both) },
			func(g *trio, leader string) { g.proxies[leader].Thaw(); freed(g, leader) }},
		// The server hears the leader, whose next renewal prolongs the key once.
		{"deaf", 1, 40, silentLimit + leaderTTL/3, func(g *trio, leader string) { g.proxies[leader].Freeze(natstest.Down) },
			func(g *trio, leader string) { g.proxies[leader].Thaw(); freed(g, leader) }},
		{"told to go", 3, *failoverWaiting, orderedLimit, func(g *trio, leader string) { g.procs[leader].signal(syscall.SIGTERM) },
			func(g *trio, leader string) { g.left(leader); again(g, leader) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := newTrio(t)
			// On a busy machine one measurement tells little, hence the second tries.
			late := 0
			var took []time.Duration
			for n := c.samples * *failoverSamples; len(took) < n; {
				g.fill(c.waiting)
				m := g.failOver(func(leader string) { c.hurt(g, leader) })
				t.Log(m)
				<-time.After(*failoverOutage)
				c.heal(g, m.from)
				if m.grant > c.limit {
					if late++; late == 2+n {
						t.Errorf("a standby granted after %v, and that late %d times; the limit is %v", m.grant, late, c.limit)
						break
					}
					continue
				}
				took = append(took, m.grant)
			}
			slices.Sort(took)
			if len(took) > 0 {
				t.Logf("%s, %d waiting: %d samples, p50 %v, max %v; beyond %v: %d", c.name, c.waiting, len(took), took[len(took)/2], took[len(took)-1], c.limit, late)
			}
			// Most of a long queue has done its duty.
			g.finish(g.cancelAllBut(100)...)
		})
	}
}

// waiting is how many tasks have no slot yet.
func (g *trio) waiting() int {
	g.t.Helper()
	n := 0
	eventually(g.t, func() (bool, string) {
		st, err := g.API.Admission(deadline(g.t))
		n = st.Queued
		return err == nil, fmt.Sprint(err)
	})
	return n
}

// cancelAllBut cancels the newest tasks when more than n wait, and returns those
// that it tried.
func (g *trio) cancelAllBut(n int) []contract.TaskID {
	g.t.Helper()
	surplus := g.waiting() - n
	if surplus <= 0 {
		return nil
	}
	tried := g.ids[len(g.ids)-surplus:]
	work := make(chan contract.TaskID)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for id := range work {
				var e *client.Error
				if err := g.API.CancelTask(deadline(g.t), id); err != nil && (!errors.As(err, &e) || e.Code != "already_finished") {
					g.t.Errorf("cancel %s: %v", id, err)
				}
			}
		})
	}
	for _, id := range tried {
		work <- id
	}
	close(work)
	wg.Wait()
	return tried
}

// ADM-08, I1, I2, I4: all three admission processes are replaced one after the
// other, the leader first, while tasks keep coming. Nobody has to wait for a key to
// expire.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	g := newTrio(t)
	stop := make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			acc, err := g.API.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: "short"})
			if err != nil {
				t.Errorf("submit: %v", err)
				return
			}
			g.ids = append(g.ids, acc.TaskID)
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	})
	first := g.leader()
	order := append([]string{first}, slices.DeleteFunc(slices.Clone(g.names), func(s string) bool { return s == first })...)
	began := time.Now()
	for _, name := range order {
		g.ledger.await(func(e entry) bool { return e.first && e.at.After(began) }) // tasks flow
		g.procs[name].Stop()
		g.start(name)
		g.standsReady(name)
		began = time.Now()
	}
	g.ledger.await(func(e entry) bool { return e.first && e.at.After(began) })
	close(stop)
	work.Wait()
	g.finish()
	free := time.Time{}
	handed := 0
	for _, e := range g.ledger.all() {
		switch {
		case e.given:
			free, handed = e.at, handed+1
		case e.first && !free.IsZero():
			d := e.at.Sub(free)
			t.Logf("handed over to %s: granting again %v after the key was given back", e.by, d)
			if d > leaderTTL {
				t.Errorf("%s granted %v after the key was given back; somebody waited for an expiry", e.by, d)
			}
			free = time.Time{}
		}
	}
	if handed == 0 {
		t.Error("the leader was stopped and no key was given back")
	}
	t.Logf("%d tasks, %d hand-overs", len(g.ids), handed)
}

// I1, I4, protocol W5: a frozen leader that wakes and does grant. Its write was
// under way when it froze; it arrives after another process has been elected and
// has granted the same task. The server refuses it, and the task runs once. That the
// process counts such a refusal is tested beside the fence; here it hears of its
// successor first.
func TestFrozenLeaderTriesToGrant(t *testing.T) {
	t.Parallel()
	g := newTrio(t)
	conn := g.connect(t)
	all, err := conn.NC.SubscribeSync(">")
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.NC.Flush(); err != nil {
		t.Fatal(err)
	}
	old := g.leader()
	hit := g.proxies[old].FreezeAt("PUB $KV.HG_TASKS.task.")
	id := g.submit(t, "short").TaskID
	g.ids = append(g.ids, id)
	select {
	case <-hit:
	case <-time.After(Timeout):
		t.Fatalf("%s does not grant", old)
	}
	g.procs[old].Pause()
	if grant := g.ledger.await(func(e entry) bool { return e.first && e.task == id }); grant.by == old {
		t.Fatalf("%s granted although its line was frozen", old)
	}
	g.procs[old].Resume()
	g.proxies[old].Thaw()
	g.standsBy(old)
	// What everybody can see: the write, and what the server answered to it.
	for answer := ""; ; {
		msg, err := all.NextMsgWithContext(deadline(t))
		if err != nil {
			t.Fatalf("the old leader's grant was not answered: %v", err)
		}
		if msg.Subject == conn.KV(contract.TaskKey(id)) {
			if rec, err := contract.DecodeTaskRecord(msg.Data); err == nil && nameOf(rec.Writer) == old && rec.State == contract.StateGranted {
				answer = msg.Reply
			}
		}
		if answer != "" && msg.Subject == answer {
			if !strings.Contains(string(msg.Data), `"err_code":10071`) {
				t.Errorf("the server answered the old leader's grant with %s; want 10071, wrong last sequence", msg.Data)
			}
			break
		}
	}
	g.finish()
	for _, e := range g.ledger.all() {
		if e.task == id && e.by == old {
			t.Errorf("a record of the old leader was stored at %v", e.at)
		}
	}
}

// I1, I2, I4, I8: the network between the leader and NATS is really cut, by taking
// down the link between two namespaces, and comes back: no end notices, and what the
// leader sent meanwhile arrives late.
func TestNetworkCut(t *testing.T) {
	t.Parallel()
	link := newLink(t)
	g := &trio{t: t, names: []string{"adm-1", "adm-2", "adm-3"}, procs: map[string]*Proc{}, probes: map[string]string{}}
	g.Fleet = &Fleet{t: t, dir: t.TempDir(), enter: inside(link.hub), dial: dialInside(link.hub)}
	g.natsURL = fmt.Sprintf("nats://%s:%d", hubAddr, freePort(t))
	g.nats = g.Fleet.start("nats-server", "nats-server", "-a", hubAddr, "-p", g.natsURL[strings.LastIndexByte(g.natsURL, ':')+1:], "-js", "-sd", filepath.Join(g.dir, "nats"))
	g.configure(1, script, trioConfig)
	if out, err := g.run("provision"); err != nil {
		t.Fatalf("provision: %v\n%s", err, out)
	}
	// The first one leads; it is alone on the other side of the link.
	g.enter = inside(link.far)
	g.start("adm-1")
	g.enter = inside(link.hub)
	conn := g.connect(t)
	eventually(t, func() (bool, string) {
		m, err := conn.Last(deadline(t), conn.TaskStream(), conn.KV(contract.LeaderKey))
		return err == nil && !m.Deleted(), fmt.Sprint("nobody leads yet: ", err)
	})
	far := &trio{Fleet: &Fleet{dial: dialInside(link.far)}, t: t, probes: g.probes}
	far.standsReady("adm-1")
	g.start("adm-2")
	g.start("adm-3")
	g.names = []string{"adm-2", "adm-3"}
	g.beside()
	late := 0
	for n := *failoverSamples; n > 0; {
		g.fill(40)
		m := g.failOver(func(leader string) {
			if leader != "adm-1" {
				t.Fatalf("%s leads, want the one on the other side", leader)
			}
			link.down()
		})
		t.Log(m)
		<-time.After(*failoverOutage)
		link.up()
		far.standsBy("adm-1")
		if m.grant <= silentLimit {
			n--
		} else if late++; late == 3 {
			t.Errorf("a standby granted %v after the cut; the limit is %v", m.grant, silentLimit)
			break
		}
		// It is as good as new: with the others gone it leads again.
		for _, name := range g.names {
			g.procs[name].Stop()
		}
		g.fill(10)
		g.ledger.await(func(e entry) bool { return e.first && e.task == g.ids[len(g.ids)-1] && e.by == "adm-1" })
		for _, name := range g.names {
			g.start(name)
			g.standsReady(name)
		}
	}
	g.finish()
}

// link is two network namespaces and a cable between them.
type link struct {
	t        *testing.T
	hub, far string
}

// The addresses of the two ends; they exist in the namespaces alone.
const hubAddr, farAddr = "10.255.77.1", "10.255.77.2"

// newLink makes two namespaces that see each other and nothing else, until the test
// ends, or skips it.
func newLink(t *testing.T) *link {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("network namespaces need the program ip: ", err)
	}
	token := bus.RandomToken(4)
	l := &link{t: t, hub: "herdgate-hub-" + token, far: "herdgate-far-" + token}
	for _, ns := range []string{l.hub, l.far} {
		if out, err := exec.Command("ip", "netns", "add", ns).CombinedOutput(); err != nil {
			t.Skipf("a network namespace cannot be made here: %v: %s", err, out)
		}
		t.Cleanup(func() { l.ip("netns", "del", ns) })
	}
	if out, err := exec.Command("ip", "-n", l.hub, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", l.far).CombinedOutput(); err != nil {
		t.Skipf("a link between network namespaces cannot be made here: %v: %s", err, out)
	}
	for ns, addr := range map[string]string{l.hub: hubAddr, l.far: farAddr} {
		l.ip("-n", ns, "addr", "add", addr+"/30", "dev", "cable")
		l.ip("-n", ns, "link", "set", "lo", "up")
		l.ip("-n", ns, "link", "set", "cable", "up")
	}
	return l
}

func (l *link) ip(args ...string) {
	l.t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		l.t.Errorf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

func (l *link) down() { l.ip("-n", l.hub, "link", "set", "cable", "down") }
func (l *link) up()   { l.ip("-n", l.hub, "link", "set", "cable", "up") }

// inside is how a command line begins that runs in a namespace.
func inside(ns string) []string { return []string{"ip", "netns", "exec", ns} }

// dialInside connects from within a namespace. A socket belongs to the namespace in
// which its thread was when it was made.
func dialInside(ns string) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		type result struct {
			conn net.Conn
			err  error
		}
		done := make(chan result, 1)
		go func() {
			// Never unlocked: the thread ends with the goroutine instead of going on in
			// the wrong place.
			runtime.LockOSThread()
			f, err := os.Open("/var/run/netns/" + ns)
			if err != nil {
				done <- result{err: err}
				return
			}
			defer f.Close()
			if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
				done <- result{err: fmt.Errorf("enter namespace %s: %w", ns, err)}
				return
			}
			conn, err := new(net.Dialer).DialContext(ctx, network, addr)
			done <- result{conn, err}
		}()
		r := <-done
		return r.conn, r.err
	}
}

// ledger follows the leader key and the records, in the order of their stream.
type ledger struct {
	t *testing.T

	mu      sync.Mutex
	entries []entry
	bad     []string
	more    chan struct{} // closed and replaced with each entry
}

// entry is a message of the task bucket: the leader key with its holder, which is
// empty when the key was deleted or has expired, or a record.
type entry struct {
	at     time.Time // when the server stored it
	seq    uint64
	leader bool
	by     string // name of the holder, or of the leader that granted
	task   contract.TaskID
	first  bool // the first grant of a task
	given  bool // the key was given back; without this it expired
}

func newLedger(t *testing.T, conn *bus.Conn) *ledger {
	l := &ledger{t: t, more: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	ready := make(chan struct{})
	var once sync.Once
	prefix := conn.KV("")
	key := uint64(0)    // newest revision of the leader key
	var holders []entry // and who held it, as far as was seen
	holder := func(rev uint64) string {
		for _, e := range slices.Backward(holders) {
			if e.seq <= rev {
				return e.by
			}
		}
		return ""
	}
	seen := map[contract.TaskID]bool{}
	go func() {
		done <- conn.Watch(ctx, bus.Watch{
			Stream: conn.TaskStream(), LastPerSubject: true, Subjects: []string{conn.KV("task.*"), conn.KV(contract.LeaderKey)},
			OnStart: func(uint64) { once.Do(func() { close(ready) }) },
		}, func(m bus.Message, _ uint64) error {
			kind, id, err := contract.ParseKey(strings.TrimPrefix(m.Subject, prefix))
			if err != nil {
				return err
			}
			e := entry{at: m.Time, seq: m.Seq, leader: kind == contract.KeyLeader}
			switch {
			case e.leader:
				key = m.Seq
				if e.given = m.Header.Get("KV-Operation") != ""; !m.Deleted() {
					v, err := contract.Decode[contract.Leader](m.Data)
					if err != nil {
						return err
					}
					e.by = nameOf(v.Holder)
				}
				holders = append(holders, e)
			case m.Deleted():
				return nil
			default:
				rec, err := contract.DecodeTaskRecord(m.Data)
				if err != nil {
					return err
				}
				e.task = contract.TaskID(id)
				e.first = !seen[e.task] && rec.Attempt == 1
				fenced := rec.State == contract.StateGranted || rec.Attempt == 0
				if fenced {
					e.by = nameOf(rec.Writer)
				} else {
					// The bucket keeps one message a key: whoever reads late sees what became
					// of the grant.
					e.by = holder(rec.Epoch)
					if rec.GrantedAt != nil {
						e.at = *rec.GrantedAt
					}
				}
				if !seen[e.task] && fenced && rec.Attempt <= 1 && rec.Epoch < key {
					l.fault("%s was granted or ended under revision %d of the leader key, which had moved on to %d: %+v", id, rec.Epoch, key, rec)
				}
				seen[e.task] = true
			}
			l.add(e)
			return nil
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("ledger: %v", err)
		}
	})
	select {
	case <-ready:
	case <-time.After(Timeout):
		t.Fatal("the ledger could not be opened")
	}
	return l
}

// nameOf is the name in a writer: name-incarnation or name-incarnation/number.
func nameOf(writer string) string { return writer[:max(0, strings.LastIndexByte(writer, '-'))] }

func (l *ledger) add(e entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries = append(l.entries, e)
	close(l.more)
	l.more = make(chan struct{})
}

func (l *ledger) fault(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bad = append(l.bad, fmt.Sprintf(format, args...))
}

func (l *ledger) all() []entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.entries)
}

// leader is who holds the key, as far as is known.
func (l *ledger) leader() string {
	name := ""
	for _, e := range l.all() {
		if e.leader {
			name = e.by
		}
	}
	return name
}

// await waits for an entry, which may be there already.
func (l *ledger) await(ok func(entry) bool) entry {
	l.t.Helper()
	limit := time.After(Timeout)
	for next := 0; ; {
		l.mu.Lock()
		fresh, more := l.entries[next:], l.more
		next = len(l.entries)
		l.mu.Unlock()
		if i := slices.IndexFunc(fresh, ok); i >= 0 {
			return fresh[i]
		}
		select {
		case <-more:
		case <-limit:
			l.t.Fatalf("not within %v; %d entries", Timeout, next)
		}
	}
}

// check tells what should not have been stored.
func (l *ledger) check() {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, text := range l.bad {
		l.t.Error(text)
	}
}
