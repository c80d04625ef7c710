//go:build linux

package sandbox_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/herdgate/herdgate/internal/sandbox"
)

// ISO-01: the ways out of a folder that are known: each is tried, and neither does
// what lies outside come out, nor is anything changed there.
func TestEscapes(t *testing.T) {
	t.Parallel()
	s := needLandlock(t)
	if _, err := os.Stat("/proc/self/root"); err != nil {
		t.Skip("there is no /proc")
	}
	for name, script := range map[string]string{
		"climbing":               "cat ../outside/secret || cat $PWD/../outside/secret || cat ./a/../../outside/secret",
		"absolute":               "cat $OUT/secret",
		"link":                   "ln -s $OUT l; cat l/secret; echo changed >l/secret; echo x >l/new",
		"link to a link":         "ln -s ../outside l; ln -s l m; cat m/secret; rm m/secret",
		"proc root":              "cat /proc/self/root$OUT/secret; echo changed >/proc/self/root$OUT/secret",
		"proc cwd":               "cat /proc/self/cwd/../outside/secret; echo changed >/proc/self/cwd/../outside/secret",
		"cwd of the supervisor":  "cat /proc/$PPID/cwd/../outside/secret; cat /proc/$PPID/root$OUT/secret",
		"root of the program":    "cat /proc/$US/root$OUT/secret; cat /proc/$US/cwd/secret",
		"hard link in":           "ln $OUT/secret here && cat here && echo changed >here",
		"hard link out":          "echo changed >mine; ln -f mine $OUT/secret; ln mine $OUT/new",
		"move in":                "mv $OUT/secret here; cat here",
		"move out":               "echo changed >mine; mv -f mine $OUT/secret; mv d $OUT/new",
		"our open descriptors":   "cat <&9; cat /proc/self/fd/9; cat /dev/fd/9; echo changed >&9",
		"descriptors of us":      "cat /proc/$US/fd/*; for f in /proc/$US/fd/* /proc/$PPID/fd/*; do echo changed >$f; done",
		"emptying":               ": >$OUT/secret; truncate -s 0 $OUT/secret",
		"modes and times":        "touch $OUT/new; mkdir $OUT/new; ln -s x $OUT/new; mkfifo $OUT/new",
		"removing":               "rm -rf $OUT/secret; rmdir $OUT; rm -rf $OUT",
		"device of the disk":     "mknod disk b $MAJOR $MINOR && head -c 10 disk && echo hidden",
		"device of memory":       "mknod mem c 1 1 && head -c 10 mem && echo hidden",
		"mount":                  "mkdir -p m; mount --bind $OUT m && cat m/secret; unshare -Urm sh -c \"mount --bind $OUT m && cat m/secret\"",
		"change of root":         "chroot $OUT cat /secret; unshare -Ur chroot $OUT /secret",
		"memory of the program":  "head -c 10 /proc/$US/mem && echo hidden; cat /proc/$US/environ | grep -q . && echo hidden",
		"settings of the kernel": "echo 1 >/proc/sys/kernel/sysrq && echo hidden; echo 0 >/proc/self/oom_score_adj && echo hidden",
		"race with a link":       "mkdir r; (while :; do rm -rf r; ln -s $OUT r; rm r; mkdir r; done) & i=0; while [ $i -lt 150 ]; do cat r/secret; echo changed >r/secret; i=$((i+1)); done; kill $!",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			base := t.TempDir()
			dir, out := filepath.Join(base, "ws"), filepath.Join(base, "outside")
			for _, d := range []string{filepath.Join(dir, "a"), filepath.Join(dir, "d"), out} {
				if err := os.MkdirAll(d, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			secret := filepath.Join(out, "secret")
			if err := os.WriteFile(secret, []byte("hidden"), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(secret, 0o666); err != nil {
				t.Fatal(err)
			}
			var st unix.Stat_t
			if err := unix.Stat(out, &st); err != nil {
				t.Fatal(err)
			}
			env := fmt.Sprintf("OUT=%s US=%d MAJOR=%d MINOR=%d; ", out, os.Getpid(), unix.Major(st.Dev), unix.Minor(st.Dev))
			got := run(t, s, dir, env+script, 0)
			if strings.Contains(got.out, "hidden") || got.exit.Leftover {
				t.Errorf("exit %+v, output %q", got.exit, got.out)
			}
			if b, err := os.ReadFile(secret); err != nil || string(b) != "hidden" {
				t.Errorf("the file outside became %q, %v", b, err)
			}
			if entries, err := os.ReadDir(out); err != nil || len(entries) != 1 {
				t.Errorf("outside holds %v, %v", entries, err)
			}
		})
	}
}

// A descriptor that somebody left open to us, without the mark that it ends with an
// exec, does not reach a command, confined or not.
func TestOpenDescriptors(t *testing.T) {
	t.Parallel()
	name := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(name, []byte("hidden"), 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(name, unix.O_RDWR, 0) // no O_CLOEXEC
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for _, mode := range []sandbox.Mode{sandbox.Landlock, sandbox.None} {
		got := run(t, sandbox.New(mode, nil), t.TempDir(), fmt.Sprintf("cat /proc/self/fd/%d; ls -l /proc/self/fd", fd), 0)
		if strings.Contains(got.out, "hidden") || strings.Contains(got.out, "secret") {
			t.Errorf("%s: %s", mode, got.out)
		}
	}
}

// A command has no terminal of ours: what it wrote into that by TIOCSTI, our user's
// shell would run.
func TestOwnSession(t *testing.T) {
	t.Parallel()
	got := run(t, sandbox.New(sandbox.None, nil), t.TempDir(), "cut -d' ' -f6,7 /proc/$$/stat; echo $$", 0)
	if f := strings.Fields(got.out); len(f) != 3 || f[0] != f[2] || f[1] != "0" {
		t.Errorf("session, terminal, process = %q, want a session of its own without terminal", got.out)
	}
}

// asProbe makes the command this test program, see probe.
func asProbe(t *testing.T, what string, change ...func(*sandbox.Command)) func(*sandbox.Command) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return func(c *sandbox.Command) {
		c.Argv, c.ReadOnly = []string{exe}, []string{exe}
		c.Env = append(c.Env, "SANDBOX_TEST_PROBE="+what)
		for _, f := range change {
			f(c)
		}
	}
}

// probe tries what its variable names and says what came of it.
func probe() {
	say := func(what string, err error) { fmt.Printf("%s: %v\n", what, err) }
	switch what, arg, _ := strings.Cut(os.Getenv("SANDBOX_TEST_PROBE"), " "); what {
	case "sockets":
		for name, s := range map[string][2]int{
			"tcp": {unix.AF_INET, unix.SOCK_STREAM}, "udp": {unix.AF_INET, unix.SOCK_DGRAM}, "tcp6": {unix.AF_INET6, unix.SOCK_STREAM}, "udp6": {unix.AF_INET6, unix.SOCK_DGRAM},
			"raw": {unix.AF_INET, unix.SOCK_RAW}, "packet": {unix.AF_PACKET, unix.SOCK_RAW}, "unix": {unix.AF_UNIX, unix.SOCK_STREAM}, "unixgram": {unix.AF_UNIX, unix.SOCK_DGRAM},
			"vsock": {unix.AF_VSOCK, unix.SOCK_STREAM}, "alg": {unix.AF_ALG, unix.SOCK_SEQPACKET}, "netlink": {unix.AF_NETLINK, unix.SOCK_RAW},
		} {
			_, err := unix.Socket(s[0], s[1], 0)
			say(name, err)
		}
		_, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		say("pair", err)
		var params [120]byte
		_, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 4, uintptr(unsafe.Pointer(&params)), 0)
		say("io_uring", errno)
		_, err = unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false)
		say("keys", err)
	case "shm":
		say("shm", probeShm(arg))
	case "userns":
		probeUserns(say)
	case "setuid":
		probeSetuid(say)
	case "dial":
		c, err := net.Dial("tcp", arg)
		if err == nil {
			c.Close()
		}
		say("dial", err)
	}
	syscall.Exit(0)
}

// No network unless the command is given it: no socket of any kind, and no call
// that makes one past the filter. A pair of sockets between a command's own
// processes is none.
func TestNetwork(t *testing.T) {
	t.Parallel()
	s := needLandlock(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	open := func(c *sandbox.Command) { c.Network = true }
	const refused = "permission denied"
	results := func(out string) map[string]string {
		m := map[string]string{}
		for line := range strings.Lines(out) {
			k, v, _ := strings.Cut(strings.TrimSpace(line), ": ")
			m[k] = v
		}
		return m
	}
	never := []string{"unix", "unixgram", "packet", "vsock", "alg"}
	inet := []string{"tcp", "udp", "tcp6", "udp6", "netlink"}
	for _, c := range []struct {
		name            string
		got             map[string]string
		allowed, denied []string
	}{
		{"without", results(run(t, s, t.TempDir(), "", 0, asProbe(t, "sockets")).out), nil, append(append([]string{"raw"}, never...), inet...)},
		{"with", results(run(t, s, t.TempDir(), "", 0, asProbe(t, "sockets", open)).out), inet, never},
	} {
		for _, k := range append(c.allowed, "pair") {
			if c.got[k] != "<nil>" && !strings.HasSuffix(k, "6") { // a machine may have no IPv6
				t.Errorf("%s network: %s: %q, want success", c.name, k, c.got[k])
			}
		}
		for _, k := range c.denied {
			if c.got[k] != refused {
				t.Errorf("%s network: %s: %q, want %s", c.name, k, c.got[k], refused)
			}
		}
		if c.got["io_uring"] != "function not implemented" || c.got["keys"] != "function not implemented" {
			t.Errorf("%s network: io_uring %q, keys %q", c.name, c.got["io_uring"], c.got["keys"])
		}
	}
	if got := run(t, s, t.TempDir(), "", 0, asProbe(t, "dial "+l.Addr().String())).out; !strings.Contains(got, refused) {
		t.Errorf("without network: %s", got)
	}
	if got := run(t, s, t.TempDir(), "", 0, asProbe(t, "dial "+l.Addr().String(), open)).out; got != "dial: <nil>\n" {
		t.Errorf("with network: %s", got)
	}
}

// Processes, memory, file size and processor time are bounded, confined or not.
func TestBounds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limits sandbox.Limits
		script string
		want   func(outcome) bool
	}{
		"as told": {sandbox.Limits{FileBytes: 8 << 20, MemoryBytes: 64 << 20, CPUSeconds: 77}, "ulimit -f; ulimit -d; ulimit -t; ulimit -Hd",
			func(o outcome) bool { return strings.Join(strings.Fields(o.out), " ") == "16384 65536 77 65536" }},
		"file size": {sandbox.Limits{FileBytes: 1 << 20}, "head -c 2000000 /dev/zero >f; wc -c <f",
			func(o outcome) bool { return strings.HasSuffix(strings.TrimSpace(o.out), "1048576") }},
		"memory": {sandbox.Limits{MemoryBytes: 64 << 20}, "x=$(head -c 100000000 /dev/zero | tr '\\0' x); echo ${#x}",
			func(o outcome) bool { return o.exit.Code != 0 && !strings.Contains(o.out, "100000000") }},
		"CPU time": {sandbox.Limits{CPUSeconds: 1}, "while :; do :; done", func(o outcome) bool { return o.exit.Code == 128+9 }},
		"processes": {sandbox.Limits{Processes: 20}, "i=0; while [ $i -lt 60 ]; do sleep 60 & i=$((i+1)); done; wait; echo finished",
			func(o outcome) bool {
				return o.exit.Code != 0 && !o.exit.Leftover && !strings.Contains(o.out, "finished")
			}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := run(t, sandbox.New(sandbox.None, nil), t.TempDir(), c.script, 0, func(cmd *sandbox.Command) { cmd.Limits = c.limits })
			if !c.want(got) {
				t.Errorf("%+v", got)
			}
		})
	}
}

// A control group is told the bounds for which it has controllers.
func TestBoundCgroup(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if sandbox.BoundCgroup("", sandbox.Limits{Processes: 9}) || sandbox.BoundCgroup(dir, sandbox.Limits{Processes: 9}) {
		t.Error("bounded without a controller")
	}
	for _, f := range []string{"pids.max", "memory.max"} {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if !sandbox.BoundCgroup(dir, sandbox.Limits{Processes: 9, MemoryBytes: 4096}) {
		t.Error("not bounded")
	}
	for f, want := range map[string]string{"pids.max": "9", "memory.max": "4096"} {
		if b, err := os.ReadFile(filepath.Join(dir, f)); err != nil || string(b) != want {
			t.Errorf("%s = %q, %v; want %s", f, b, err, want)
		}
	}
}

// What the kernel gives is told.
func TestProtection(t *testing.T) {
	t.Parallel()
	needLandlock(t)
	if has, _ := sandbox.Protection(); !strings.Contains(has, "Landlock ") || !strings.Contains(has, "control groups") {
		t.Errorf("protection = %q", has)
	}
}
