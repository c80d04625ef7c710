//go:build linux

package sandbox_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/sandbox"
)

const patience = 20 * time.Second

type outcome struct {
	out  string
	exit sandbox.Exit
	took time.Duration
}

// run runs a shell script in dir. A stop of 0 lets it end by itself.
func run(t *testing.T, s *sandbox.Sandbox, dir, script string, stop time.Duration, change ...func(*sandbox.Command)) outcome {
	t.Helper()
	return runUnder(t, nil, s, dir, script, stop, change...)
}

// runUnder is run under a lease.
func runUnder(t *testing.T, lease *sandbox.Lease, s *sandbox.Sandbox, dir, script string, stop time.Duration, change ...func(*sandbox.Command)) outcome {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	start := time.Now()
	c := sandbox.Command{
		Argv: []string{"/bin/sh", "-c", script}, Dir: dir, Output: w,
		Env: []string{"PATH=/usr/bin:/bin", "HOME=" + dir}, Lease: lease,
	}
	for _, f := range change {
		f(&c)
	}
	p, err := s.Start(c)
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	var b []byte
	var wg sync.WaitGroup
	wg.Go(func() { b, _ = io.ReadAll(r) })
	defer wg.Wait()
	var after <-chan time.Time
	if stop > 0 {
		timer := time.NewTimer(stop)
		defer timer.Stop()
		after = timer.C
	}
	limit := time.NewTimer(patience)
	defer limit.Stop()
	select {
	case <-p.Done():
	case <-after:
		p.Stop()
	case <-limit.C:
		p.Stop()
		t.Fatalf("%q did not end within %v", script, patience)
	}
	exit, err := p.Exit()
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(start)
	_ = r.SetReadDeadline(time.Now().Add(5 * time.Second)) // whoever is left may hold it
	wg.Wait()
	return outcome{string(b), exit, took}
}

// alive lists processes whose command line holds word.
func alive(t *testing.T, word string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err == nil && strings.Contains(strings.ReplaceAll(string(b), "\x00", " "), word) {
			out = append(out, f)
		}
	}
	return out
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s did not happen within %v", what, patience)
		}
	}
}

// CANCEL-01, F-080: however a process hides, it ends with the call.
func TestNothingSurvives(t *testing.T) {
	t.Parallel()
	for i, script := range []string{
		"sleep %s & echo ok",
		"(sleep %s &) ; echo ok",
		"setsid sleep %s & echo ok",
		"setsid sh -c 'setsid sleep %s &' & echo ok",
		"env -i setsid sleep %s >/dev/null 2>&1 </dev/null & echo ok",
		"setsid nohup env -i sh -c 'trap \"\" TERM HUP INT; sleep %s; sleep 1' >/dev/null 2>&1 & echo ok",
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			secs := fmt.Sprintf("61%d.%d", i, os.Getpid())
			got := run(t, sandbox.New(sandbox.None, nil), t.TempDir(), fmt.Sprintf(script, secs), 0)
			if strings.TrimSpace(got.out) != "ok" || got.exit.Code != 0 || got.exit.Leftover {
				t.Errorf("run = %+v, want ok and exit code 0", got)
			}
			if left := alive(t, "sleep "+secs); len(left) > 0 {
				t.Errorf("still alive: %v", left)
			}
		})
	}
}

// CANCEL-01: a stop reaches everything, also what ignores signals.
func TestStop(t *testing.T) {
	t.Parallel()
	secs := fmt.Sprintf("629.%d", os.Getpid())
	got := run(t, sandbox.New(sandbox.Landlock, nil), t.TempDir(),
		fmt.Sprintf("trap '' TERM INT HUP; env -i setsid sleep %s & sleep %s", secs, secs), 300*time.Millisecond)
	if got.took > 3*time.Second {
		t.Errorf("stopping took %v", got.took)
	}
	if got.exit.Code != 128+9 {
		t.Errorf("exit code = %d, want 137", got.exit.Code)
	}
	if left := alive(t, "sleep "+secs); len(left) > 0 {
		t.Errorf("still alive: %v", left)
	}
}

func TestExitCode(t *testing.T) {
	t.Parallel()
	for script, want := range map[string]int{"exit 0": 0, "exit 7": 7, "exit 254": 254, "kill -TERM $$": 143, "/nonexistent": 127} {
		if got := run(t, sandbox.New(sandbox.None, nil), t.TempDir(), script, 0); got.exit.Code != want || got.exit.Leftover {
			t.Errorf("%q: exit = %+v, want code %d", script, got.exit, want)
		}
	}
}

func needLandlock(t *testing.T) *sandbox.Sandbox {
	t.Helper()
	if ok, reason := sandbox.Available(); !ok {
		t.Skip(reason)
	}
	return sandbox.New(sandbox.Landlock, func(reason string) { t.Errorf("notice: %s", reason) })
}

// ISO-01: a confined command keeps to its folder, whatever the path.
func TestConfined(t *testing.T) {
	t.Parallel()
	s := needLandlock(t)
	base := t.TempDir()
	dir := filepath.Join(base, "ws")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(base, "secret")
	if err := os.WriteFile(secret, []byte("hidden"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		script string
		ok     bool
	}{
		"own folder":       {"echo a >f && mkdir d && mv f d/ && cat d/f", true},
		"system programs":  {"ls /usr >/dev/null && cat /etc/passwd >/dev/null", true},
		"devices":          {"echo x >/dev/null && head -c1 /dev/zero >/dev/null", true},
		"read outside":     {"cat ../secret", false},
		"read by link":     {"ln -s " + secret + " l && cat l", false},
		"write outside":    {"echo x >../made", false},
		"write to tmp":     {"echo x >/tmp/herdgate-sandbox-test", false},
		"read shadow":      {"cat /etc/shadow", false},
		"our environment":  {fmt.Sprintf("cat /proc/%d/environ", os.Getpid()), false},
		"signal us":        {fmt.Sprintf("kill -0 %d", os.Getpid()), false},
		"signal supervise": {"kill -9 $PPID", false},
		"own children":     {"sleep 60 & kill $!", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			work := dir
			if c.ok {
				work = filepath.Join(dir, strings.ReplaceAll(name, " ", "-"))
				if err := os.Mkdir(work, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			got := run(t, s, work, c.script, 0)
			if (got.exit.Code == 0) != c.ok {
				t.Errorf("exit = %+v, want success %v\n%s", got.exit, c.ok, got.out)
			}
			if strings.Contains(got.out, "hidden") {
				t.Errorf("the secret came out: %s", got.out)
			}
		})
	}
}

// A command gets no core dump, bounded files, and no new privileges.
func TestLimits(t *testing.T) {
	t.Parallel()
	got := run(t, sandbox.New(sandbox.None, nil), t.TempDir(), "ulimit -c; ulimit -n; grep NoNewPrivs /proc/self/status; env | sort", 0)
	lines := strings.Fields(got.out)
	if len(lines) < 4 || lines[0] != "0" || lines[1] != "4096" || lines[3] != "1" {
		t.Errorf("limits = %q", got.out)
	}
	for _, l := range lines[4:] {
		switch name, _, _ := strings.Cut(l, "="); name {
		case "PATH", "HOME", "PWD", "OLDPWD", "HERDGATE_CALL", "_", "SHLVL":
		default:
			t.Errorf("the environment holds %s", l)
		}
	}
}

// What is missing is told, once, and nothing else changes.
func TestNotice(t *testing.T) {
	t.Parallel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "SANDBOX_TEST_NO_MAIN=1", "SANDBOX_TEST_HOST=direct", "SANDBOX_TEST_DIR="+t.TempDir())
	cmd.WaitDelay = 5 * time.Second // whoever is left may hold the output
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := strings.Count(string(out), "notice: "); n != 1 || !strings.Contains(string(out), "sandbox.Main") {
		t.Errorf("notices = %d, want 1 that names sandbox.Main\n%s", n, out)
	}
	if !strings.Contains(string(out), "code 0 leftover false") {
		t.Errorf("output = %s", out)
	}
	if left := alive(t, fmt.Sprintf("sleep 638.%d", cmd.Process.Pid)); len(left) > 0 {
		t.Errorf("still alive: %v", left)
	}
}

// I8: when the program itself is killed, nothing of its commands goes on.
func TestKilledProgram(t *testing.T) {
	t.Parallel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "SANDBOX_TEST_HOST=wait", "SANDBOX_TEST_DIR="+t.TempDir())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	word := fmt.Sprintf("sleep 639.%d", cmd.Process.Pid)
	eventually(t, "start", func() bool { return len(alive(t, word)) > 0 })
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	eventually(t, "the end of all processes", func() bool { return len(alive(t, word)) == 0 })
}

// I5: a program that is stopped, as by SIGSTOP, cannot end its commands when its
// lease is over, nor learn that it is. Their supervisors do.
func TestLeaseOfAStoppedProgram(t *testing.T) {
	t.Parallel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "SANDBOX_TEST_HOST=lease", "SANDBOX_TEST_DIR="+t.TempDir())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	}()
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	word := fmt.Sprintf("sleep 637.%d", cmd.Process.Pid)
	eventually(t, "start", func() bool { return len(alive(t, word)) > 0 })
	// The program renews the lease as long as it runs. It never gets to run again.
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end of all processes", func() bool { return len(alive(t, word)) == 0 })
}

// A command whose lease is extended in time goes on; one whose lease is over before
// it begins does not get far.
func TestLease(t *testing.T) {
	t.Parallel()
	s := sandbox.New(sandbox.None, nil)
	var renewed, over sandbox.Lease
	renewed.Extend(2 * time.Second)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				renewed.Extend(patience)
			}
		}
	})
	got := runUnder(t, &renewed, s, t.TempDir(), "sleep 2.5; echo done", 0)
	close(stop)
	wg.Wait()
	if got.exit.Code != 0 || got.out != "done\n" {
		t.Errorf("under a renewed lease: %+v", got)
	}
	over.Extend(-time.Second)
	if got := runUnder(t, &over, s, t.TempDir(), "sleep 600", 0); got.exit.Code != 128+9 || got.exit.Leftover {
		t.Errorf("under a lease that is over: %+v", got)
	}
}

// CANCEL-01: where control groups can be had, nothing gets away by killing the
// supervisor, or by forking faster than it can look.
func TestControlGroup(t *testing.T) {
	t.Parallel()
	if !sandbox.HasCgroup() {
		t.Skip("this process may not make control groups of version 2")
	}
	for name, script := range map[string]string{
		"kills its supervisor": "env -i setsid sleep %[1]s >/dev/null 2>&1 </dev/null & sleep 0.2; kill -9 $PPID; sleep 60",
		"forks for ever":       "f() { (env -i setsid sleep %[1]s >/dev/null 2>&1 </dev/null & f &) ; sleep 0.01; }; f; sleep 0.5",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			secs := fmt.Sprintf("63%d.%d", len(name)%5, os.Getpid())
			run(t, sandbox.New(sandbox.None, nil), t.TempDir(), fmt.Sprintf(script, secs), 0)
			if left := alive(t, "sleep "+secs); len(left) > 0 {
				t.Errorf("%d are still alive", len(left))
			}
		})
	}
}

// Where the group is mounted, in the forms that /proc gives.
func TestCgroupFolder(t *testing.T) {
	t.Parallel()
	const v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
	const hybrid = "37 31 0:34 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n41 31 0:38 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n"
	for _, c := range []struct{ groups, mounts, want string }{
		{"0::/system.slice/herdgate.service\n", v2, "/sys/fs/cgroup/system.slice/herdgate.service"},
		{"9:name=systemd:/x\n8:pids:/y\n0::/\n", hybrid, "/sys/fs/cgroup/unified"},
		{"0::/pod/container\n", "30 23 0:26 /pod/container /sys/fs/cgroup rw - cgroup2 cgroup rw\n", "/sys/fs/cgroup"},
		{"0::/elsewhere\n", "30 23 0:26 /pod/container /sys/fs/cgroup rw - cgroup2 cgroup rw\n", ""},
		{"8:pids:/y\n", hybrid, ""},
		{"0::/\n", "", ""},
	} {
		if got := sandbox.CgroupFolder(c.groups, c.mounts); got != c.want {
			t.Errorf("%q with %q: %q, want %q", c.groups, c.mounts, got, c.want)
		}
	}
}

// host is a program that uses the sandbox, for the tests that need another one.
func host() {
	s := sandbox.New(sandbox.Landlock, func(reason string) { fmt.Println("notice:", reason) })
	script := fmt.Sprintf("setsid sleep 638.%d & echo ok", os.Getpid())
	var lease *sandbox.Lease
	switch os.Getenv("SANDBOX_TEST_HOST") {
	case "wait":
		script = fmt.Sprintf("env -i setsid sleep 639.%d & wait", os.Getpid())
	case "script":
		script = os.Getenv("SANDBOX_TEST_SCRIPT")
		if has, _ := sandbox.Protection(); !strings.Contains(has, "namespaces") {
			script = "echo no namespaces"
		}
	case "lease":
		script = fmt.Sprintf("env -i setsid sleep 637.%d & wait", os.Getpid())
		lease = &sandbox.Lease{}
		lease.Extend(3 * time.Second)
		go func() {
			for range time.Tick(50 * time.Millisecond) {
				lease.Extend(3 * time.Second)
			}
		}()
	}
	p, err := s.Start(sandbox.Command{
		Argv: []string{"/bin/sh", "-c", script}, Dir: os.Getenv("SANDBOX_TEST_DIR"), Output: os.Stderr, Env: []string{"PATH=/usr/bin:/bin"}, Lease: lease,
	})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("started")
	exit, err := p.Exit()
	fmt.Println("code", exit.Code, "leftover", exit.Leftover, err)
	os.Exit(0)
}
