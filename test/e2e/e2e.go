// Package e2e runs Herdgate as its users do: separate processes of the built
// binaries, an outside nats-server, real signals, a database in a file.
package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/test/history"
)

// Timeout bounds every wait.
const Timeout = 40 * time.Second

// bin holds the built binaries.
var bin string

// build builds what the tests start. It is called once, by TestMain.
func build(dir string) error {
	bin = dir
	for name, pkg := range map[string]string{
		"herdgate": "github.com/herdgate/herdgate/cmd/herdgate", "lead": "github.com/herdgate/herdgate/services/lead/cmd/lead",
		"admission": "github.com/herdgate/herdgate/services/admission/cmd/admission", "executor": "github.com/herdgate/herdgate/services/executor/cmd/executor",
		"eventsink": "github.com/herdgate/herdgate/services/eventsink/cmd/eventsink", "nats-server": "github.com/nats-io/nats-server/v2",
	} {
		cmd := exec.Command("go", "build", "-o", filepath.Join(dir, name), pkg)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
		}
	}
	return nil
}

// Fleet is a deployment of one test: a NATS server and services that share a
// data directory.
type Fleet struct {
	t       *testing.T
	dir     string
	nats    *Proc
	natsURL string
	config  string
	addr    string
	API     *client.Client
	// recorder notes what really happened; nil when nobody asked for it.
	recorder *history.Recorder

	// Where the processes run, when not here: what their command lines begin with,
	// and how the test gets there.
	enter []string
	// mutant is what is broken on purpose in the services; see package mutant.
	mutant string
	dial   func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Proc is a running process.
type Proc struct {
	t    *testing.T
	name string
	cmd  *exec.Cmd
	out  *natstest.Output
	done chan struct{}
	err  error
}

// start runs a binary until the test ends.
func (f *Fleet) start(name, binary string, args ...string) *Proc {
	f.t.Helper()
	p := &Proc{t: f.t, name: name, out: &natstest.Output{}, done: make(chan struct{})}
	argv := append(slices.Concat(f.enter, []string{f.binary(binary)}), args...)
	p.cmd = exec.Command(argv[0], argv[1:]...)
	p.cmd.Dir = f.dir
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.out
	p.cmd.Env = append(os.Environ(), "HERDGATE_TEST_KEY=none", "MUTANT="+f.mutant)
	if err := p.cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	go func() { p.err = p.cmd.Wait(); close(p.done) }()
	f.t.Cleanup(func() {
		p.Kill()
		if f.t.Failed() {
			out := p.out.String()
			f.t.Logf("--- %s\n%s", name, out[max(0, len(out)-6000):])
		}
	})
	return p
}

// binary is where a program lies.
func (f *Fleet) binary(name string) string {
	if f.mutant != "" && slices.Contains(mutable, name) {
		return filepath.Join(bin, "mutant", name)
	}
	return filepath.Join(bin, name)
}

// mutable are the programs that can be broken on purpose.
var mutable = []string{"admission", "executor"}

// Kill ends the process at once.
func (p *Proc) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// Stop ends the process in order and checks that it says so.
func (p *Proc) Stop() {
	p.t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
		if p.err != nil {
			p.t.Errorf("%s ended with %v after SIGTERM", p.name, p.err)
		}
	case <-time.After(Timeout):
		p.t.Errorf("%s did not stop", p.name)
	}
}

// NewFleet starts a nats-server and provisions it; extra is added to the
// configuration file, where models of its own take the place of the script.
func NewFleet(t *testing.T, script string, extra ...string) *Fleet {
	t.Helper()
	f := &Fleet{t: t, dir: t.TempDir()}
	f.natsURL = fmt.Sprintf("nats://127.0.0.1:%d", freePort(t))
	f.startNATS()
	f.configure(1, script, extra...)
	if out, err := f.run("provision"); err != nil {
		t.Fatalf("provision: %v\n%s", err, out)
	}
	f.record()
	return f
}

// configure writes the configuration of a fleet whose servers are known.
func (f *Fleet) configure(replicas int, script string, extra ...string) {
	f.t.Helper()
	f.write("script.yaml", script)
	f.addr = fmt.Sprintf("127.0.0.1:%d", freePort(f.t))
	more := strings.Join(extra, "\n") + "\n"
	if !strings.Contains(more, "models:") {
		more += "models: [{ name: offline, provider: script, script: script.yaml }]\n"
	}
	f.config = f.write("herdgate.yaml", fmt.Sprintf("nats: { url: %q, replicas: %d }\nhttp: { addr: %q }\n%s", f.natsURL, replicas, f.addr, more))
	var err error
	f.API, err = client.New("http://"+f.addr, "", &http.Client{Transport: &http.Transport{DialContext: f.dial}})
	if err != nil {
		f.t.Fatal(err)
	}
}

// startNATS starts the server, the first time or again on the same port and store.
func (f *Fleet) startNATS() {
	f.t.Helper()
	port := f.natsURL[strings.LastIndexByte(f.natsURL, ':')+1:]
	f.nats = f.start("nats-server", "nats-server", "-a", "127.0.0.1", "-p", port, "-js", "-sd", filepath.Join(f.dir, "nats"))
}

func (f *Fleet) write(name, text string) string {
	f.t.Helper()
	path := filepath.Join(f.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
	return path
}

// run runs a verb of herdgate to its end.
func (f *Fleet) run(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	argv := append(slices.Concat(f.enter, []string{filepath.Join(bin, "herdgate")}, args), "--config", f.config)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = f.dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// service starts one of the stand-alone binaries; of a flag that is given twice
// the last one counts.
func (f *Fleet) service(name string, flags ...string) *Proc {
	f.t.Helper()
	return f.start(name, name, append([]string{"--config", f.config, "--data-dir", filepath.Join(f.dir, "data"), "--log-level", "debug"}, flags...)...)
}

// All starts the four services and waits until the lead is ready.
func (f *Fleet) All() (lead, admission, executor, sink *Proc) {
	f.t.Helper()
	admission, executor, sink = f.service("admission"), f.service("executor"), f.service("eventsink")
	lead = f.service("lead")
	f.ready()
	return lead, admission, executor, sink
}

func (f *Fleet) ready() {
	f.t.Helper()
	eventually(f.t, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := f.API.Ready(ctx); err != nil {
			return false, "lead: " + err.Error()
		}
		if _, err := f.API.Admission(ctx); err != nil {
			return false, fmt.Sprint("admission: ", err)
		}
		_, err := f.API.ListEvents(ctx, client.EventQuery{Limit: 1}, 0)
		return err == nil, fmt.Sprint("event store: ", err)
	})
}

// eventually polls until ok, or fails the test.
func eventually(t *testing.T, ok func() (bool, string)) {
	t.Helper()
	deadline := time.Now().Add(Timeout)
	for {
		good, why := ok()
		if good {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %v: %s", Timeout, why)
		}
		time.Sleep(20 * time.Millisecond) //nolint:forbidigo // polling another process with a deadline
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	t.Cleanup(cancel)
	return ctx
}

// processes lists the command lines of all running processes that hold text.
func processes(text string) []string {
	var found []string
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, d := range dirs {
		b, err := os.ReadFile(d)
		if line := strings.ReplaceAll(string(b), "\x00", " "); err == nil && strings.Contains(line, text) {
			found = append(found, line)
		}
	}
	return found
}
