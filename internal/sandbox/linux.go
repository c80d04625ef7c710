//go:build linux

package sandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/landlock-lsm/go-landlock/landlock"
	llsys "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
)

// Names of the children; a program is never called so by a user.
const (
	superviseName = "herdgate-supervise"
	confineName   = "herdgate-confine"
)

// Exit codes of the children for faults of theirs, as shells have them.
const (
	exitCannotRun = 126
	ctlFD         = 3
)

// plan is what the children are told, as JSON in their first argument. The
// command itself follows as arguments.
type plan struct {
	Dir       string
	Confined  bool
	ReadOnly  []string
	ReadWrite []string
	FileBytes uint64
	OpenFiles uint64
}

func landlockAvailable() (bool, string) {
	v, err := llsys.LandlockGetABIVersion()
	switch {
	case errors.Is(err, unix.ENOSYS):
		return false, "the kernel has no Landlock"
	case errors.Is(err, unix.EOPNOTSUPP):
		return false, "Landlock is switched off in the kernel"
	case err != nil:
		return false, "Landlock cannot be used: " + err.Error()
	case v < 1:
		return false, "the kernel has no Landlock"
	}
	return true, ""
}

func (p *Process) start(s *Sandbox, c Command) error {
	if !installed.Load() {
		return p.startDirect(c)
	}
	pl := plan{
		Dir: c.Dir, Confined: s.confined, ReadOnly: c.ReadOnly, ReadWrite: c.ReadWrite,
		FileBytes: c.Limits.FileBytes, OpenFiles: c.Limits.OpenFiles,
	}
	if pl.FileBytes == 0 {
		pl.FileBytes = 4 << 30
	}
	if pl.OpenFiles == 0 {
		pl.OpenFiles = 4096
	}
	b, err := json.Marshal(pl)
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	p.cmd = &exec.Cmd{
		Path: "/proc/self/exe", Args: append([]string{superviseName, string(b)}, c.Argv...), Dir: c.Dir, Env: c.Env,
		Stdout: c.Output, Stderr: c.Output, ExtraFiles: []*os.File{r},
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true},
	}
	if err := p.cmd.Start(); err != nil {
		w.Close()
		return err
	}
	p.ctl, p.group = w, p.cmd.Process.Pid
	return nil
}

// awaitExit waits for the child to end without reaping it.
func (p *Process) awaitExit() {
	for {
		err := unix.Waitid(unix.P_PID, p.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

func (p *Process) reap() error { return p.cmd.Wait() }

func childMain(args []string) bool {
	if len(args) < 3 {
		return false
	}
	var run func(plan, string, []string) int
	switch args[0] {
	case superviseName:
		run = supervise
	case confineName:
		run = confine
	default:
		return false
	}
	var p plan
	if err := json.Unmarshal([]byte(args[1]), &p); err != nil {
		fmt.Fprintln(os.Stderr, "sandbox: plan:", err)
		syscall.Exit(exitCannotRun)
	}
	// Not os.Exit: under the race detector it waits a second.
	syscall.Exit(run(p, args[1], args[2:]))
	return true
}

// supervise runs the confiner and ends all that came out of it when it is over
// or when the program wants so.
func supervise(p plan, raw string, argv []string) int {
	runtime.LockOSThread() // the command dies with this thread if we are killed
	unix.CloseOnExec(ctlFD)
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, "sandbox: become reaper:", err)
		return exitCannotRun
	}
	// Signals that reach the supervisor are caught, not ignored: children
	// would inherit that.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)

	released := make(chan struct{})
	go func() {
		defer close(released)
		var b [1]byte
		for {
			if _, err := syscall.Read(ctlFD, b[:]); !errors.Is(err, syscall.EINTR) {
				return
			}
		}
	}()
	pid, err := syscall.ForkExec("/proc/self/exe", append([]string{confineName, raw}, argv...), &syscall.ProcAttr{
		Dir: p.Dir, Env: os.Environ(), Files: []uintptr{0, 1, 2},
		Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandbox: start:", err)
		return exitCannotRun
	}
	ended := make(chan syscall.WaitStatus, 1)
	empty := make(chan struct{})
	go reap(pid, ended, empty)

	var status syscall.WaitStatus
	over := false
	select {
	case status = <-ended:
		over = true
	case <-released:
	}
	deadline := time.NewTimer(superviseTimeout - 500*time.Millisecond)
	tick := time.NewTicker(2 * time.Millisecond)
	for {
		killDescendants(os.Getpid())
		select {
		case <-empty:
			if !over {
				status = <-ended
			}
			if status.Signaled() {
				return 128 + int(status.Signal())
			}
			return status.ExitStatus()
		case <-tick.C:
		case <-deadline.C:
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // an end that tells of the failure, unlike any exit code
		}
	}
}

// reap takes the exit of every descendant, tells that of pid, and closes empty
// when none is left.
func reap(pid int, ended chan<- syscall.WaitStatus, empty chan<- struct{}) {
	for {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil: // ECHILD: as their reaper we had all of them
			close(empty)
			return
		case got == pid:
			ended <- ws
		}
	}
}

// killDescendants stops what descends from root, so that it cannot fork away,
// and kills it.
func killDescendants(root int) {
	pids := descendants(root)
	for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
		for _, pid := range pids {
			_ = syscall.Kill(pid, sig) // gone is fine
		}
	}
}

// descendants lists the processes beneath root.
func descendants(root int) []int {
	children := map[int][]int{}
	eachProcess(func(pid int) {
		stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
		if err != nil {
			return
		}
		// The name, in brackets, may hold anything.
		f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(f) > 1 {
			if ppid, err := strconv.Atoi(f[1]); err == nil {
				children[ppid] = append(children[ppid], pid)
			}
		}
	})
	var out []int
	for todo := []int{root}; len(todo) > 0; {
		next := children[todo[0]]
		todo = append(todo[1:], next...)
		out = append(out, next...)
	}
	return out
}

func eachProcess(f func(pid int)) {
	dir, err := os.Open("/proc")
	if err != nil {
		return
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	for _, n := range names {
		if pid, err := strconv.Atoi(n); err == nil {
			f(pid)
		}
	}
}

// sweep kills every process that carries mark in its environment, again and
// again until there is none. It finds what left group, session and parent, but
// not what also emptied its environment: the supervisor does.
func sweep(mark string, limit time.Duration) bool {
	needle := []byte(markEnv + "=" + mark)
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		var found []int
		eachProcess(func(pid int) {
			env, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
			if err == nil && bytes.Contains(env, needle) && pid != os.Getpid() {
				found = append(found, pid)
			}
		})
		if len(found) == 0 {
			return true
		}
		for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
			for _, pid := range found {
				_ = syscall.Kill(pid, sig)
			}
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			return false
		}
	}
}

// What a command may read besides its own: programs and libraries, and the
// settings they need. Not all of /etc, where secrets live.
var (
	systemDirs = []string{
		"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/proc", "/sys/devices/system/cpu", "/sys/fs/cgroup",
		"/etc/ssl", "/etc/ca-certificates", "/etc/pki", "/etc/alternatives", "/etc/ld.so.conf.d", "/etc/fonts", "/etc/bash_completion.d",
		"/run/systemd/resolve",
	}
	systemFiles = []string{
		"/etc/passwd", "/etc/group", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf",
		"/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime", "/etc/timezone", "/etc/mime.types", "/etc/services", "/etc/protocols",
		"/etc/os-release", "/etc/debian_version", "/etc/bash.bashrc", "/etc/profile", "/etc/inputrc", "/etc/gitconfig", "/etc/magic",
		"/dev/urandom", "/dev/random",
	}
	deviceFiles = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/tty"}
)

// confine restricts this process and becomes the command.
func confine(p plan, _ string, argv []string) int {
	runtime.LockOSThread() // some of it is for the thread that execs
	if err := restrict(p); err != nil {
		fmt.Fprintln(os.Stderr, "sandbox:", err)
		return exitCannotRun
	}
	err := syscall.Exec(argv[0], argv, os.Environ())
	fmt.Fprintf(os.Stderr, "sandbox: run %s: %v\n", argv[0], err)
	return exitCannotRun
}

func restrict(p plan) error {
	// When memory runs out the command goes before the service. Best effort.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0)
	if err := bound(unix.RLIMIT_CORE, 0); err != nil {
		return fmt.Errorf("bound core dumps: %w", err)
	}
	if err := bound(unix.RLIMIT_FSIZE, p.FileBytes); err != nil {
		return fmt.Errorf("bound file size: %w", err)
	}
	if err := bound(unix.RLIMIT_NOFILE, p.OpenFiles); err != nil {
		return fmt.Errorf("bound open files: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	if !p.Confined {
		return nil
	}
	all := landlock.V8.BestEffort()
	if err := all.RestrictScoped(); err != nil {
		return fmt.Errorf("landlock: %w", err)
	}
	readDirs, readFiles := split(p.ReadOnly)
	writeDirs, writeFiles := split(p.ReadWrite)
	err := all.RestrictPaths(
		landlock.RODirs(append(systemDirs, readDirs...)...).IgnoreIfMissing(),
		landlock.ROFiles(append(systemFiles, readFiles...)...).IgnoreIfMissing(),
		landlock.RWFiles(append(deviceFiles, writeFiles...)...).IgnoreIfMissing(),
		landlock.RWDirs(append([]string{p.Dir}, writeDirs...)...).WithRefer().IgnoreIfMissing(),
	)
	if err != nil {
		return fmt.Errorf("landlock: %w", err)
	}
	if err := dropCapabilities(); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	return nil
}

// dropCapabilities leaves a root user only what deals with the owners of files:
// with the others it could, for one, read the environment of any process. They
// do not come back with an exec, because there are no new privileges.
func dropCapabilities() error {
	const keep = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	data[0].Permitted &= keep
	data[0].Effective &= keep
	data[0].Inheritable = 0
	data[1] = unix.CapUserData{}
	return unix.Capset(&hdr, &data[0])
}

// split tells folders from files: Landlock takes other rights for each.
func split(paths []string) (dirs, files []string) {
	for _, p := range paths {
		if info, err := os.Stat(p); err == nil && info.IsDir() {
			dirs = append(dirs, p)
		} else {
			files = append(files, p)
		}
	}
	return dirs, files
}

// bound lowers a limit; one that is lower already stays.
func bound(resource int, limit uint64) error {
	var r unix.Rlimit
	if err := unix.Getrlimit(resource, &r); err != nil {
		return err
	}
	r.Max = min(r.Max, limit)
	r.Cur = r.Max
	return unix.Setrlimit(resource, &r)
}
