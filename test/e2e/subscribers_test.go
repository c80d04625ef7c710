package e2e

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"

	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// examples asks for the examples that need more than Go: make test-examples.
var examples = flag.Bool("examples", false, "run the examples in other languages too; they need node and npm's packages, the nats tool, bash and python3")

// program is where another language's program is, or the end of the test.
func program(t *testing.T, name, how string) string {
	t.Helper()
	if !*examples {
		t.Skip("needs -examples: make test-examples")
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%s is missing: %s", name, how)
	}
	if path, err = filepath.Abs(path); err != nil {
		t.Fatal(err)
	}
	return path
}

// checkout is the top folder of the sources.
func checkout(t *testing.T) string {
	t.Helper()
	_, file, _, ok := runtime.Caller(0)
	if !ok {
		t.Fatal("the place of the sources is not known")
	}
	return filepath.Join(filepath.Dir(file), "..", "..")
}

// follower is an example that tells events, one a line: the sequence first, the type,
// the id last.
type follower struct {
	argv []string
	env  []string
	// again is how many lines each new life may tell that an earlier one told; lives
	// that tell everything from the beginning are fresh.
	again int
	fresh bool
	// file is where it keeps what all its lives told. Killed between the file and its
	// output, it has told the event to the file alone.
	file string
}

// I6, EVT-12: a service outside reads on where it was, whether it or the NATS server is
// killed in the middle, and sees every event that the store has, once and in order.
// The example is built as by a stranger, from packed modules.
func TestSubscriberGo(t *testing.T) {
	t.Parallel()
	binary := buildStranger(t)
	followed(t, func(url string) follower {
		return follower{argv: []string{binary, "-nats", url, "-out", "told.log", "-ack-wait", "2s"}, file: "told.log"}
	})
}

// The same with NATS's packages for Node.js; each event is valid by the published schema.
func TestSubscriberNode(t *testing.T) {
	t.Parallel()
	node := program(t, "node", "install Node.js 20 or newer")
	dir := filepath.Join(checkout(t), "examples", "subscriber-node")
	if _, err := os.Stat(filepath.Join(dir, "node_modules")); err != nil {
		t.Fatalf("%v; make test-examples installs the packages, or npm ci in %s", err, dir)
	}
	followed(t, func(url string) follower {
		return follower{argv: []string{node, filepath.Join(dir, "subscriber.mjs"), "--nats", url, "--ack-wait", "2"}, again: 1}
	})
}

// The same with the nats tool.
func TestSubscriberShell(t *testing.T) {
	t.Parallel()
	nats := program(t, "nats", "make test-examples builds it, see https://github.com/nats-io/natscli")
	bash := program(t, "bash", "install it")
	script := filepath.Join(checkout(t), "examples", "subscriber-shell", "subscriber.sh")
	followed(t, func(url string) follower {
		return follower{
			argv:  []string{bash, script, "received"},
			env:   []string{"NATS_URL=" + url, "ACK_WAIT=2s", "PATH=" + filepath.Dir(nats) + string(os.PathListSeparator) + os.Getenv("PATH")},
			fresh: true,
		}
	})
}

// A client without any package submits a task and sees it through.
func TestSubmitPython(t *testing.T) {
	t.Parallel()
	python := program(t, "python3", "install Python 3.9 or newer")
	l := newLive(t)
	out, err := exec.CommandContext(deadline(t), python, filepath.Join(checkout(t), "examples", "submit-python", "submit.py"), "--server", "http://"+l.addr, "short").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	_, task, _ := strings.Cut(lines[0], " ")
	var told []string
	for _, line := range lines[1 : len(lines)-1] {
		told = append(told, line[strings.LastIndexByte(line, ' ')+1:])
	}
	if stored := l.stored(t, "--task", task); !slices.Equal(told, stored) {
		t.Errorf("it told %q, stored are %q", told, stored)
	}
	if last := lines[len(lines)-1]; last != "completed ok" {
		t.Errorf("it ended with %q", last)
	}
}

// live is a system that runs as in the documentation: a process that is the NATS
// server, and one that has the services.
type live struct {
	*Fleet
	server *Proc
}

func newLive(t *testing.T) *live {
	t.Helper()
	l := &live{Fleet: &Fleet{t: t, dir: t.TempDir()}}
	l.natsURL = fmt.Sprintf("nats://127.0.0.1:%d", freePort(t))
	l.write("server.yaml", "{}\n")
	l.serve()
	l.configure(1, script)
	eventually(t, func() (bool, string) {
		out, err := l.run("provision")
		return err == nil, out
	})
	l.start("up", "herdgate", "up", "--config", l.config, "--data-dir", filepath.Join(l.dir, "data"), "--metrics-addr", "127.0.0.1:0")
	l.ready()
	return l
}

// serve starts the NATS server, the first time or again on the same port and store.
func (l *live) serve() {
	l.t.Helper()
	l.server = l.start("nats", "herdgate", "up", "--services", "none", "--nats-listen", strings.TrimPrefix(l.natsURL, "nats://"),
		"--config", filepath.Join(l.dir, "server.yaml"), "--data-dir", filepath.Join(l.dir, "server"))
}

// stored is what herdgate events prints: the ids, oldest first.
func (l *live) stored(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.CommandContext(deadline(t), filepath.Join(bin, "herdgate"), append([]string{"events", "--config", l.config, "--server", "http://" + l.addr}, args...)...)
	cmd.Dir = l.dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("herdgate events: %v\n%s", err, stderr.String())
	}
	var ids []string
	for dec := json.NewDecoder(bytes.NewReader(out)); dec.More(); {
		var e contract.EventRecord
		if err := dec.Decode(&e); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, e.EventID)
	}
	return ids
}

// life is one process of a follower.
type life struct {
	cmd         *exec.Cmd
	out, errout natstest.Output
	done        chan struct{}
}

// begin starts one. What it starts itself dies with it: they are a process group.
func (l *live) begin(f follower) *life {
	l.t.Helper()
	p := &life{cmd: exec.Command(f.argv[0], f.argv[1:]...), done: make(chan struct{})}
	p.cmd.Dir, p.cmd.Env = l.dir, append(os.Environ(), f.env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.errout
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		l.t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.done) }()
	l.t.Cleanup(func() {
		p.kill()
		if l.t.Failed() {
			l.t.Logf("--- %s\n%s%s", filepath.Base(f.argv[0]), p.out.String(), p.errout.String())
		}
	})
	return p
}

func (p *life) kill() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
}

// ids are those of the whole lines that it told.
func (p *life) ids() []string { return idsOf(p.out.String()) }

func idsOf(text string) []string {
	var ids []string
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); strings.HasSuffix(line, "\n") && len(fields) > 0 {
			ids = append(ids, fields[len(fields)-1])
		}
	}
	return ids
}

// followed runs tasks beside a follower that is killed in the middle, and kills the
// server too; then it compares what the follower told with the store.
func followed(t *testing.T, of func(url string) follower) {
	t.Helper()
	l := newLive(t)
	f := of(l.natsURL)
	first := l.begin(f)
	submit := func(n int) []contract.TaskID {
		var ids []contract.TaskID
		for range n {
			ids = append(ids, l.submit(t, "read the note").TaskID)
		}
		return ids
	}
	tasks := submit(6)
	eventually(t, func() (bool, string) {
		return len(first.ids()) >= 8, "the subscriber tells nothing: " + first.errout.String()
	})
	first.kill() // with tasks still running, or just ended
	tasks = append(tasks, submit(6)...)

	second := l.begin(f)
	eventually(t, func() (bool, string) {
		return len(second.ids()) > 0, "the subscriber does not go on: " + second.errout.String()
	})
	l.server.Kill()
	l.serve()
	l.ready()
	tasks = append(tasks, submit(6)...)
	for _, id := range tasks {
		if task := l.waitFor(t, id, ended); task.Status != contract.TaskCompleted {
			t.Errorf("%s: %s", id, task.Status)
		}
	}
	var stored []string
	eventually(t, func() (bool, string) {
		stored = l.stored(t)
		ends := len(slices.DeleteFunc(slices.Clone(stored), func(id string) bool { return !strings.HasSuffix(id, ".end") }))
		return ends >= len(tasks), fmt.Sprintf("%d of %d endings are stored", ends, len(tasks))
	})
	told := func() []string {
		if f.file != "" {
			b, err := os.ReadFile(filepath.Join(l.dir, f.file))
			if err != nil {
				t.Fatal(err)
			}
			return idsOf(string(b))
		}
		if f.fresh {
			return second.ids()
		}
		a, b := first.ids(), second.ids()
		for n := range min(f.again, len(a), len(b)) {
			if a[len(a)-1-n] == b[0] {
				b = b[1:]
			}
		}
		return append(a, b...)
	}
	eventually(t, func() (bool, string) {
		return len(told()) >= len(stored), fmt.Sprintf("told are %d of %d events\n%s", len(told()), len(stored), second.errout.String())
	})
	if got := told(); !slices.Equal(got, stored) {
		t.Errorf("it told %d events, stored are %d, and they are not the same in the same order\n%q\n%q", len(got), len(stored), got, stored)
	}
	for _, p := range []*life{first, second} {
		if strings.Contains(p.errout.String(), "invalid") {
			t.Errorf("an event does not fit its schema:\n%s", p.errout.String())
		}
	}
	t.Logf("%d tasks, %d events, each told once", len(tasks), len(stored))
}

// buildStranger builds examples/subscriber-go as a program of somebody else would be:
// without the checkout, out of the two public modules packed into a proxy of modules.
// I11: it needs these two and what nats.go needs, and nothing else.
func buildStranger(t *testing.T) string {
	t.Helper()
	top, dir := checkout(t), t.TempDir()
	const version, prefix = "v0.1.0", "github.com/herdgate/herdgate/"
	ours := []string{prefix + "pkg/contract", prefix + "pkg/envelope"}
	proxy := filepath.Join(dir, "proxy")
	for _, path := range ours {
		pack(t, proxy, module.Version{Path: path, Version: version}, filepath.Join(top, strings.TrimPrefix(path, prefix)))
	}
	src := filepath.Join(dir, "src")
	if err := os.CopyFS(src, os.DirFS(filepath.Join(top, "examples", "subscriber-go"))); err != nil {
		t.Fatal(err)
	}
	// A module cache of its own: what is packed here must not stay in the user's. Other
	// modules come out of the user's cache as far as it has them.
	settings := strings.Split(strings.TrimSpace(output(t, top, nil, "go", "env", "GOMODCACHE", "GOPROXY", "GONOSUMDB")), "\n")
	settings = append(settings, "", "", "") // empty ones at the end are trimmed away
	env := append(os.Environ(),
		"GOWORK=off", "GOFLAGS=-mod=mod -modcacherw", "GOMODCACHE="+filepath.Join(dir, "cache"),
		"GOPROXY=file://"+proxy+",file://"+filepath.Join(settings[0], "cache", "download")+","+settings[1],
		"GONOSUMDB="+strings.Trim(prefix+"*,"+prefix+"pkg/*,"+settings[2], ","))
	args := []string{"mod", "edit"}
	for _, path := range ours {
		args = append(args, "-dropreplace="+path)
	}
	output(t, src, env, "go", args...)
	binary := filepath.Join(dir, "subscriber")
	output(t, src, env, "go", "build", "-trimpath", "-o", binary, ".")
	output(t, src, env, "go", "vet", ".")
	output(t, src, env, "go", "test", "-count=1", ".")

	// The go.sum of what nats.go needs by itself, by its own go.mod.
	allowed := map[string]bool{"github.com/nats-io/nats.go": true}
	for line := range strings.Lines(output(t, src, env, "go", "mod", "graph")) {
		from, to, _ := strings.Cut(strings.TrimSpace(line), " ")
		if from, _, _ = strings.Cut(from, "@"); allowed[from] {
			to, _, _ = strings.Cut(to, "@")
			allowed[to] = true
		}
	}
	b, err := os.ReadFile(filepath.Join(src, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for line := range strings.Lines(string(b)) {
		listed[strings.Fields(line)[0]] = true
	}
	for path := range maps.Keys(listed) {
		if !allowed[path] && !slices.Contains(ours, path) {
			t.Errorf("go.sum lists %s, which nats.go does not need", path)
		}
	}
	for _, path := range ours {
		if !listed[path] {
			t.Errorf("go.sum does not list %s: was it built from the checkout?\n%s", path, b)
		}
	}
	for path := range strings.Lines(output(t, src, env, "go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", ".")) {
		if path = strings.TrimSpace(path); strings.HasPrefix(path, prefix) && !slices.Contains(ours, path) {
			t.Errorf("it links %s", path)
		}
	}
	return binary
}

// pack puts a module into a proxy that is a folder.
func pack(t *testing.T, proxy string, m module.Version, dir string) {
	t.Helper()
	at := filepath.Join(proxy, filepath.FromSlash(m.Path), "@v")
	mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	if err == nil {
		err = os.MkdirAll(at, 0o755)
	}
	var packed bytes.Buffer
	if err == nil {
		err = zip.CreateFromDir(&packed, m, dir)
	}
	if err != nil {
		t.Fatalf("pack %s: %v", m, err)
	}
	for name, b := range map[string][]byte{
		"list": []byte(m.Version + "\n"), m.Version + ".mod": mod, m.Version + ".zip": packed.Bytes(),
		m.Version + ".info": fmt.Appendf(nil, `{"Version":%q,"Time":"2026-01-02T03:04:05Z"}`, m.Version),
	} {
		if err := os.WriteFile(filepath.Join(at, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// output runs a command to its end and returns what it prints.
func output(t *testing.T, dir string, env []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Env = dir, env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, out, stderr.String())
	}
	return string(out)
}
