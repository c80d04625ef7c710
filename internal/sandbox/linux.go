//go:build linux

package sandbox

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/landlock-lsm/go-landlock/landlock"
	llsys "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
)

// Names of the children; a program is never called so by a user.
const (
	superviseName = "herdgate-supervise"
	apartName     = "herdgate-apart"
	confineName   = "herdgate-confine"
)

// Exit codes of the children for faults of theirs, as shells have them.
const (
	countInterval = 500 * time.Millisecond // between two looks at the number of processes
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
	Network   bool
	Limits    Limits
	// Count lets the supervisor bound the number of processes: nothing else does.
	Count bool
	// Until is when the command's lease ends, by clock; 0 is never. What comes
	// through the control pipe takes its place.
	Until int64
	// Cgroup is the control group for the command, if it can have one.
	Cgroup string
	// Apart gives the command namespaces of its own, see apart_linux.go. Others is then
	// what else counts as processes of its user.
	Apart  bool
	Others uint64
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
	return filterAvailable()
}

// Protection tells what this kernel gives to confined commands, and what it does not.
func Protection() (has string, gaps []string) {
	v, err := llsys.LandlockGetABIVersion()
	if err != nil || v < 1 {
		return "no Landlock", nil
	}
	has = fmt.Sprintf("Landlock %d, filter of system calls", v)
	apart := installed.Load() && canBeApart()
	if apart {
		has += ", namespaces"
	} else {
		gaps = append(gaps, "the command lines of all processes can be seen, and modes, owners and times of files outside that the user owns can be changed "+
			"(needs namespaces: user namespaces for ordinary users, CAP_SYS_ADMIN for root)")
	}
	for _, g := range []struct {
		since int
		gap   string
	}{
		{3, "files outside that the user may write can be emptied (needs Linux 6.2)"},
		{6, "processes of the same user, the executor as well, can be sent signals (needs Linux 6.12)"},
	} {
		if v < g.since && !apart { // namespaces prevent both
			gaps = append(gaps, g.gap)
		}
	}
	dir := makeCgroup("probe-" + strconv.Itoa(os.Getpid()))
	defer removeCgroup(dir)
	switch {
	case dir == "":
		has += ", no control groups"
	case boundCgroup(dir, Limits{}.orDefaults()):
		has += ", control groups with a bound on processes"
	default:
		has += ", control groups"
	}
	return has, gaps
}

func (p *Process) start(s *Sandbox, c Command) error {
	if !installed.Load() {
		return p.startDirect(c)
	}
	pl := plan{
		Dir: c.Dir, Confined: s.confined, ReadOnly: c.ReadOnly, ReadWrite: c.ReadWrite, Network: c.Network, Limits: c.Limits.orDefaults(),
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	p.ctl = w // before the lease may want to tell something through it
	p.cgroup = makeCgroup(p.mark)
	group := pl.Limits
	if pl.Apart = s.confined && canBeApart(); pl.Apart {
		group.Processes += apartThreads
	}
	// Root is exempt from the limit that the kernel has for users.
	pl.Count = !boundCgroup(p.cgroup, group) && os.Getuid() == 0
	pl.Until, pl.Cgroup = p.lease.add(p), p.cgroup
	b, err := json.Marshal(pl)
	if err != nil {
		p.lease.remove(p)
		w.Close()
		return err
	}
	p.cmd = &exec.Cmd{
		Path: "/proc/self/exe", Args: append([]string{superviseName, string(b)}, c.Argv...), Dir: c.Dir, Env: c.Env,
		Stdout: c.Output, Stderr: c.Output, ExtraFiles: []*os.File{r},
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true},
	}
	if err := p.cmd.Start(); err != nil {
		p.lease.remove(p)
		w.Close()
		return err
	}
	p.group = p.cmd.Process.Pid
	return nil
}

// tell sends the supervisor until when the command may go on. One that is gone
// does not mind; one that does not read for hours is not waited for.
func (p *Process) tell(until int64) {
	_ = p.ctl.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	_, _ = p.ctl.Write(binary.LittleEndian.AppendUint64(nil, uint64(until)))
}

// clock is one that all processes of this machine share and nobody sets.
func clock() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // cannot fail for this clock
	return t.Nano()
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
	case apartName:
		run = apart
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

	ctl := newControl()
	go ctl.read()
	pid, err := startConfiner(p, raw, argv)
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandbox: start:", err)
		return exitCannotRun
	}
	ended := make(chan syscall.WaitStatus, 1)
	empty := make(chan struct{})
	go reap(pid, ended, empty)

	status, over := ctl.awaitEnd(p, ended)
	deadline := time.NewTimer(superviseTimeout - 500*time.Millisecond)
	tick := time.NewTicker(2 * time.Millisecond)
	for {
		killCgroup(p.Cgroup)
		killDescendants(os.Getpid())
		select {
		case <-empty:
			removeCgroup(p.Cgroup)
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

// control is the supervisor's end of the pipe to the program.
type control struct {
	released chan struct{} // closed when the program has let go of the pipe
	extended chan int64    // the newest word on until when the command may go on

	mu sync.Mutex // held from a read until its word is in extended
}

func newControl() *control {
	return &control{released: make(chan struct{}), extended: make(chan int64, 1)}
}

// read reads words until the program has let go of the pipe.
func (c *control) read() {
	defer close(c.released)
	for c.wait(-1) && c.readWord() {
	}
}

// wait reports whether there is something to read, a closed pipe included.
func (*control) wait(millis int) bool {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: ctlFD, Events: unix.POLLIN}}, millis)
		if !errors.Is(err, unix.EINTR) {
			return err == nil && n > 0
		}
	}
}

func (c *control) readWord() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	var b [8]byte
	for have := 0; have < len(b); {
		n, err := syscall.Read(ctlFD, b[have:])
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			return false
		}
		have += n
	}
	select {
	case <-c.extended:
	default:
	}
	c.extended <- int64(binary.LittleEndian.Uint64(b[:])) // there is room: nobody else sends
	return true
}

// silent reports that the program has said nothing that was not heard yet. On a busy
// machine a word may have come in time and not have been read.
func (c *control) silent() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.extended) == 0 && !c.wait(0)
}

// awaitEnd waits until the command has ended, the program wants it to, its lease
// is over, or it has too many processes. It is true with the command's status if
// that ended by itself.
func (c *control) awaitEnd(p plan, ended <-chan syscall.WaitStatus) (syscall.WaitStatus, bool) {
	until := p.Until
	var count <-chan time.Time
	if p.Count {
		tick := time.NewTicker(countInterval)
		defer tick.Stop()
		count = tick.C
	}
	lease := time.NewTimer(time.Hour)
	defer lease.Stop()
	for {
		lease.Stop()
		if until != 0 {
			lease.Reset(time.Duration(until - clock()))
		}
		select {
		case status := <-ended:
			return status, true
		case <-c.released:
			return 0, false
		case until = <-c.extended:
			continue
		case <-count:
			if n := len(descendants(os.Getpid())); uint64(n) > p.Limits.Processes {
				fmt.Fprintf(os.Stderr, "\nsandbox: ended, because it had %d processes; at most %d are allowed\n", n, p.Limits.Processes)
				return 0, false
			}
			continue
		case <-lease.C:
		}
		if c.silent() {
			return 0, false
		}
		select {
		case until = <-c.extended:
		case <-c.released:
			return 0, false
		}
	}
}

// startConfiner starts the confiner, or the first process of its namespaces, in the command's control group if there is one.
func startConfiner(p plan, raw string, argv []string) (int, error) {
	attr := &syscall.ProcAttr{
		Dir: p.Dir, Env: os.Environ(), Files: []uintptr{0, 1, 2},
		// A session of its own: a terminal of ours is none of the command's, which
		// could put words into it that our user's shell would run.
		Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	}
	name := confineName
	if p.Apart {
		name, attr.Sys = apartName, setApart(attr.Sys)
	}
	args := append([]string{name, raw}, argv...)
	if p.Cgroup != "" {
		if dir, err := unix.Open(p.Cgroup, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
			defer unix.Close(dir)
			attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, dir
			if pid, err := syscall.ForkExec("/proc/self/exe", args, attr); err == nil {
				return pid, nil
			}
			// A system may let us make a group and put nobody into it.
			attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = false, 0
		}
	}
	return syscall.ForkExec("/proc/self/exe", args, attr)
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
	deviceFiles = []string{"/dev/null", "/dev/zero", "/dev/full"}
)

// confine restricts this process and becomes the command.
func confine(p plan, _ string, argv []string) int {
	runtime.LockOSThread() // some of it is for the thread that execs
	if err := restrict(p); err != nil {
		fmt.Fprintln(os.Stderr, "sandbox:", err)
		return exitCannotRun
	}
	err := closeOthers()
	if err == nil {
		err = syscall.Exec(argv[0], argv, os.Environ())
	}
	fmt.Fprintf(os.Stderr, "sandbox: run %s: %v\n", argv[0], err)
	return exitCannotRun
}

// closeOthers lets the command inherit no descriptor but its three: what somebody
// left open to us, a file or a socket, would lead out.
func closeOthers() error {
	if unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) == nil {
		return nil
	}
	names, err := os.ReadDir("/proc/self/fd") // before Linux 5.11
	if err != nil {
		return fmt.Errorf("find open descriptors: %w", err)
	}
	for _, n := range names {
		if fd, err := strconv.Atoi(n.Name()); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}

func restrict(p plan) error {
	// When memory runs out the command goes before the service. Best effort.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0)
	type limit struct {
		what     string
		resource int
		most     uint64
	}
	limits := []limit{
		{"core dumps", unix.RLIMIT_CORE, 0},
		{"file size", unix.RLIMIT_FSIZE, p.Limits.FileBytes},
		{"open files", unix.RLIMIT_NOFILE, p.Limits.OpenFiles},
		// What is written to, not what is mapped: some runtimes reserve far more than they use.
		{"memory", unix.RLIMIT_DATA, p.Limits.MemoryBytes},
		{"CPU time", unix.RLIMIT_CPU, p.Limits.CPUSeconds},
	}
	if uid := os.Getuid(); uid != 0 {
		others := p.Others
		if !p.Apart {
			others = threadsOf(uid)
		}
		limits = append(limits, limit{"processes", unix.RLIMIT_NPROC, others + p.Limits.Processes})
	}
	for _, l := range limits {
		if err := bound(l.resource, l.most); err != nil {
			return fmt.Errorf("bound %s: %w", l.what, err)
		}
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
	if p.Apart {
		writeDirs = append(writeDirs, shmDir) // its own
	}
	err := all.RestrictPaths(
		landlock.RODirs(append(systemDirs, readDirs...)...).IgnoreIfMissing(),
		landlock.ROFiles(append(systemFiles, readFiles...)...).IgnoreIfMissing(),
		landlock.RWFiles(append(deviceFiles, writeFiles...)...).IgnoreIfMissing(),
		landlock.RWDirs(append([]string{p.Dir}, writeDirs...)...).WithRefer().IgnoreIfMissing(),
	)
	if err != nil {
		return fmt.Errorf("landlock: %w", err)
	}
	if !p.Network {
		if err := all.RestrictNet(); err != nil {
			return fmt.Errorf("landlock: %w", err)
		}
	}
	if err := dropCapabilities(); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	return restrictCalls(p.Network, p.Apart)
}

// threadsOf counts what the kernel holds against a user's number of processes.
func threadsOf(uid int) (n uint64) {
	eachProcess(func(pid int) {
		dir := filepath.Join("/proc", strconv.Itoa(pid))
		var st unix.Stat_t
		if unix.Stat(dir, &st) != nil || int(st.Uid) != uid {
			return
		}
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		if err != nil {
			return
		}
		if f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])); len(f) > 17 {
			threads, _ := strconv.ParseUint(f[17], 10, 64) // the kernel writes a number
			n += threads
		}
	})
	return n
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
