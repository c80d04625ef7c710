//go:build linux

package sandbox_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/herdgate/herdgate/internal/sandbox"
)

func needApart(t *testing.T) *sandbox.Sandbox {
	t.Helper()
	s := needLandlock(t)
	if has, _ := sandbox.Protection(); !strings.Contains(has, "namespaces") {
		t.Skip("this system gives us no namespaces: " + has)
	}
	return s
}

// ISO-01: what Landlock has no say in: modes, owners and times of files outside.
func TestModesOutside(t *testing.T) {
	t.Parallel()
	s := needApart(t)
	base := t.TempDir()
	dir, out := filepath.Join(base, "ws"), filepath.Join(base, "outside")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(out, []byte("hidden"), 0o600); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(out)
	if err != nil {
		t.Fatal(err)
	}
	for _, script := range []string{
		"chmod 777 $OUT", "chmod 777 /proc/1/root$OUT", "chown 1000 $OUT", "touch -d 2001-01-01 $OUT", "ln -s $OUT l; chmod 777 l; touch -d 2001-01-01 l",
		"umount $PWD; umount -l /; mount -o remount,rw /; chmod 777 $OUT", "unshare -Urm sh -c \"umount $PWD; mount -o remount,rw /; chmod 777 $OUT\"",
		"chmod 700 ..; chmod 777 $OUT",
	} {
		run(t, s, dir, "OUT="+out+"; "+script, 0)
		if now, err := os.Stat(out); err != nil || now.Mode() != before.Mode() || !now.ModTime().Equal(before.ModTime()) ||
			now.Sys().(*syscall.Stat_t).Uid != before.Sys().(*syscall.Stat_t).Uid {
			t.Errorf("after %q: %v, %v", script, now, err)
		}
	}
	// Its own files are its own.
	if got := run(t, s, dir, "echo x >mine && chmod 700 mine && touch -d 2001-01-01 mine && mkdir -p a/b && mv a c && rm -r c && echo fine", 0); !strings.HasSuffix(got.out, "fine\n") {
		t.Errorf("inside: %+v", got)
	}
}

// A command sees no processes but its own, and nothing of it is left in their place
// when it ends.
func TestOwnProcesses(t *testing.T) {
	t.Parallel()
	s := needApart(t)
	secs := fmt.Sprintf("641.%d", os.Getpid())
	got := run(t, s, t.TempDir(), "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f; echo; done; kill -9 1 2>/dev/null; (setsid env -i sleep "+secs+" >/dev/null 2>&1 &); sleep 0.1; exit 9", 0)
	for line := range strings.Lines(got.out) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "herdgate-apart ") && !strings.HasPrefix(line, "/bin/sh -c") && !strings.HasPrefix(line, "tr ") {
			t.Errorf("it sees %q", line)
		}
	}
	if !strings.Contains(got.out, "/bin/sh -c") || got.exit.Leftover {
		t.Errorf("%+v", got)
	}
	if left := alive(t, "sleep "+secs); len(left) > 0 {
		t.Errorf("still alive: %v", left)
	}
}

// A confined command ends with the code of its shell, and one whose shell a signal
// ended as well.
func TestExitCodeConfined(t *testing.T) {
	t.Parallel()
	s := needLandlock(t)
	for script, want := range map[string]int{"exit 0": 0, "exit 7": 7, "kill -TERM $$": 143, "kill -KILL $$": 137, "/nonexistent": 127, "(sleep 600 &); exit 3": 3} {
		if got := run(t, s, t.TempDir(), script, 0); got.exit.Code != want || got.exit.Leftover {
			t.Errorf("%q: exit = %+v, want code %d", script, got.exit, want)
		}
	}
}

// No shared memory stays when a command is over.
func TestSharedMemory(t *testing.T) {
	t.Parallel()
	s := needLandlock(t)
	size := 777_000_000 + os.Getpid()
	got := run(t, s, t.TempDir(), "", 0, asProbe(t, "shm "+strconv.Itoa(size)))
	if !strings.Contains(got.out, "shm: ") {
		t.Fatalf("%+v", got)
	}
	b, err := os.ReadFile("/proc/sysvipc/shm")
	if err != nil {
		t.Skip(err)
	}
	if strings.Contains(string(b), strconv.Itoa(size)) {
		t.Errorf("it is still there (%s):\n%s", strings.TrimSpace(got.out), b)
	}
}

// What lies in the folder for shared memory is the command's own, and goes with it.
func TestOwnSharedMemory(t *testing.T) {
	t.Parallel()
	s := needApart(t)
	if _, err := os.Stat("/dev/shm"); err != nil {
		t.Skip(err)
	}
	name := fmt.Sprintf("/dev/shm/herdgate-%d", os.Getpid())
	if err := os.WriteFile(name, []byte("hidden"), 0o644); err != nil {
		t.Skip(err)
	}
	defer os.Remove(name)
	for range 2 {
		if got := run(t, s, t.TempDir(), "ls -A /dev/shm; echo x >/dev/shm/mine && cat /dev/shm/mine; cat "+name, 0); !strings.HasPrefix(got.out, "x\n") || strings.Contains(got.out, "hidden") {
			t.Errorf("%+v", got)
		}
	}
	if _, err := os.Stat("/dev/shm/mine"); err == nil {
		t.Error("it is there outside")
	}
}

func probeShm(arg string) error {
	size, err := strconv.Atoi(arg)
	if err != nil {
		return err
	}
	_, err = unix.SysvShmGet(unix.IPC_PRIVATE, size, unix.IPC_CREAT|0o600)
	return err
}

// A command cannot make a file that runs with the rights of the executor's user,
// whoever starts it outside; otherwise files get the modes that it wants.
func TestNoSetuid(t *testing.T) {
	t.Parallel()
	s := needLandlock(t)
	dir := t.TempDir()
	got := run(t, s, dir, "", 0, asProbe(t, "setuid"))
	for line := range strings.Lines(got.out) {
		if name, res, _ := strings.Cut(strings.TrimSpace(line), ": "); strings.HasPrefix(name, "plain") != (res == "<nil>") {
			t.Errorf("%s: %s", name, res)
		}
	}
	if n := strings.Count(got.out, ": "); n != 13 {
		t.Errorf("%d of 13 ways were tried: %+v", n, got)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Mode()&(os.ModeSetuid|os.ModeSetgid) != 0 {
			t.Errorf("%s is %v, %v", e.Name(), info.Mode(), err)
		}
	}
}

func probeSetuid(say func(string, error)) {
	const plain, setuid, setgid = 0o755, 0o4755, 0o2755
	open := func(name string, flags int, mode uint32) error {
		fd, err := unix.Open(name, flags, mode)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}
	say("plain create", open("f", unix.O_CREAT|unix.O_WRONLY, plain))
	say("plain chmod", unix.Chmod("f", 0o644))
	say("plain open with a mode that counts for nothing", open("f", unix.O_RDONLY, setuid))
	say("plain temporary", open(".", unix.O_TMPFILE|unix.O_WRONLY, plain))
	say("create", open("a", unix.O_CREAT|unix.O_WRONLY, setuid))
	say("create setgid", open("b", unix.O_CREAT|unix.O_WRONLY, setgid))
	say("temporary", open(".", unix.O_TMPFILE|unix.O_WRONLY, setuid))
	say("chmod", unix.Chmod("f", setuid))
	say("chmod setgid", unix.Chmod("f", setgid))
	say("fchmodat2", unix.Fchmodat(unix.AT_FDCWD, "f", setuid, unix.AT_SYMLINK_NOFOLLOW))
	say("mknod", unix.Mknod("c", unix.S_IFREG|setuid, 0))
	fd, err := unix.Open("f", unix.O_RDWR, 0)
	if err == nil {
		err = unix.Fchmod(fd, setuid)
	}
	say("fchmod", err)
	_, err = unix.Openat2(unix.AT_FDCWD, "d", &unix.OpenHow{Flags: unix.O_CREAT | unix.O_WRONLY, Mode: setuid})
	say("openat2", err)
}

// A command does not become root of a user namespace: no file and no process outside
// would be its own, but all of the kernel would be open to it.
func TestNoUserNamespace(t *testing.T) {
	t.Parallel()
	got := run(t, needLandlock(t), t.TempDir(), "", 0, asProbe(t, "userns"))
	if want := "unshare: operation not permitted\nclone: operation not permitted\nclone3: function not implemented\n"; got.out != want {
		t.Errorf("%+v, want %q", got, want)
	}
}

func probeUserns(say func(string, error)) {
	say("unshare", unix.Unshare(unix.CLONE_NEWUSER))
	pid, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, unix.CLONE_NEWUSER|uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if errno == 0 && pid == 0 {
		syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
	say("clone", errno)
	_, _, errno = syscall.RawSyscall(unix.SYS_CLONE3, 0, 0, 0)
	say("clone3", errno)
}

// What root's commands have, those of other users have as well.
func TestOrdinaryUser(t *testing.T) {
	t.Parallel()
	needApart(t)
	if os.Getuid() != 0 {
		t.Skip("the other tests run as an ordinary user")
	}
	const nobody = 65534
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "outside")
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil { // above both
		t.Fatal(err)
	}
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(out, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(out, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SANDBOX_TEST_HOST=script", "SANDBOX_TEST_DIR="+dir,
		"SANDBOX_TEST_SCRIPT=id -u; echo x >f && chmod 700 f && cat f; chmod 777 "+out+" || echo refused; ls /proc | grep -c '^[0-9]'; grep CapEff /proc/self/status; stat -c %u f")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	cmd.WaitDelay = 5 * time.Second
	b, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	if strings.Contains(string(b), "no namespaces") {
		t.Skip("ordinary users get no namespaces here")
	}
	got := string(b)
	for _, want := range []string{"65534\nx\n", "refused\n", "CapEff:\t0000000000000000\n65534\n", "code 0 leftover false"} {
		if !strings.Contains(got, want) {
			t.Errorf("output lacks %q:\n%s", want, got)
		}
	}
	for n := range strings.Lines(got) {
		if n, err := strconv.Atoi(strings.TrimSpace(n)); err == nil && n != nobody && n > 5 {
			t.Errorf("it sees %d processes", n)
		}
	}
	if info, err := os.Stat(out); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file outside is %v, %v", info, err)
	}
}
