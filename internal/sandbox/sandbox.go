// Package sandbox runs a command so that it stays in its place and nothing of
// it is left afterwards.
//
// # How
//
// The program starts itself again, twice. The first child, the supervisor,
// makes itself the reaper of everything that descends from it; so a process can
// leave its group, its session, its parent and its environment, and is still
// found. It holds a pipe to the program: when the pipe closes, because the call
// is stopped or because the program was killed, it kills all that descends from
// it and ends. The same happens when the command ends by itself.
//
// The second child, the confiner, restricts itself with Landlock and a filter of
// system calls, takes no new privileges, bounds its resources, lets go of all
// descriptors and of the terminal, and becomes the command. Inside, the command
// can read system folders and the paths it is given, write only its own, send
// signals only to its own, and read no memory or environment of ours. It has no
// network unless it is given, and never a socket that lies at a path: that leads
// to a service outside, which is not confined. The supervisor stands outside, so
// the command cannot kill it. Other processes can be seen in /proc, as far as their
// command line.
//
// Where the program may make control groups (version 2, with cgroup.kill), the
// command gets one of its own. All that is in it is killed at once, however fast it
// forks, and also when an unconfined command has killed its supervisor.
//
// A command can be put under a [Lease]: it then ends in time even if the program
// that should stop it is itself stopped.
//
// # Where that is not possible
//
// Starting itself again needs [Main] in the program's main. Without it, and on
// systems other than Linux, the command runs as a process group of its own; on
// Linux what left the group is found by a mark in its environment. A kernel
// without Landlock costs the confinement: [New] tells that, once, and
// [Sandbox.Confined] lets the caller run nothing then.
package sandbox

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync/atomic"
	"time"
)

// Mode says how much a command is confined.
type Mode string

// The modes.
const (
	Landlock Mode = "landlock"
	None     Mode = "none"
)

// Limits are the resources of one command; zero takes the default.
type Limits struct {
	// FileBytes is the largest file that can be written; default 4 GiB.
	FileBytes uint64
	// OpenFiles bounds open files of each process; default 4096.
	OpenFiles uint64
	// Processes bounds the processes of the command; default 512. The kernel keeps
	// it where the command has a control group that can, else by user, threads
	// included, in addition to what the user runs when the command starts. Root is
	// exempt from that: there the supervisor counts, twice a second.
	Processes uint64
	// MemoryBytes bounds the memory that each process writes to, and that of all
	// together where the command has a control group that can; default 4 GiB.
	MemoryBytes uint64
	// CPUSeconds bounds the processor time of each process; default 3600.
	CPUSeconds uint64
}

func (l Limits) orDefaults() Limits {
	for n, def := range map[*uint64]uint64{
		&l.FileBytes: 4 << 30, &l.OpenFiles: 4096, &l.Processes: 512, &l.MemoryBytes: 4 << 30, &l.CPUSeconds: 3600,
	} {
		if *n == 0 {
			*n = def
		}
	}
	return l
}

// Sandbox starts commands. It is immutable and safe for concurrent use.
type Sandbox struct {
	mode     Mode
	confined bool
}

// New returns a sandbox. If mode asks for more than this system can give,
// notice is called once, here, with what is missing; commands then run with what
// there is. Notice may be nil.
func New(mode Mode, notice func(reason string)) *Sandbox {
	s := &Sandbox{mode: mode}
	if mode != Landlock {
		return s
	}
	ok, reason := Available()
	if s.confined = ok; !ok && notice != nil {
		notice("commands cannot be confined to their workspace: " + reason)
	}
	return s
}

// Confined reports whether commands are confined to their paths.
func (s *Sandbox) Confined() bool { return s.confined }

// Available reports whether Landlock can be used here, and if not, why.
func Available() (bool, string) {
	if ok, reason := landlockAvailable(); !ok {
		return false, reason
	}
	if !installed.Load() {
		return false, "this program cannot start itself again: its main does not call sandbox.Main"
	}
	return true, ""
}

// installed is set by Main: without it a child would run the program itself.
var installed atomic.Bool

// Main must be the first call of every main function (and TestMain) of a
// program that runs commands. In the children that this package starts it does
// their work and never returns; elsewhere it returns false at once.
func Main() bool {
	installed.Store(true)
	return childMain(os.Args)
}

// Command is what to run.
type Command struct {
	// Argv is the command; Argv[0] is an absolute path.
	Argv []string
	// Dir is where it runs. It can write there.
	Dir string
	// Env is its whole environment.
	Env []string
	// Output takes stdout and stderr.
	Output *os.File
	// ReadOnly and ReadWrite are further paths that it may use.
	ReadOnly, ReadWrite []string
	// Network lets a confined command use the network; others may always.
	Network bool
	Limits  Limits
	// Lease, when set, bounds how long it may go on, see there.
	Lease *Lease
}

// Exit is how a command ended.
type Exit struct {
	// Code is the exit code, 128 + n for one that signal n ended.
	Code int
	// Leftover says that something of it may not have been ended in time.
	Leftover bool
}

// markEnv names the variable that marks the processes of one command.
const markEnv = "HERDGATE_CALL"

// How long ending everything may take before it is given up and told.
const (
	superviseTimeout = 3 * time.Second
	sweepTimeout     = 2 * time.Second
)

// Process is a running command.
type Process struct {
	cmd    *exec.Cmd
	group  int
	mark   string
	lease  *Lease
	cgroup string   // of the command's processes; empty without one
	ctl    *os.File // nil without a supervisor
	stop   chan struct{}
	done   chan struct{}
	wait   error //nolint:unused // only where waiting reaps, see direct_other.go
	exit   Exit
	err    error
}

// Start runs c. The caller must call [Process.Stop] or wait for
// [Process.Done]; after either and Done nothing of the command is left.
func (s *Sandbox) Start(c Command) (*Process, error) {
	if len(c.Argv) == 0 {
		return nil, errors.New("sandbox: no command")
	}
	var id [12]byte
	_, _ = rand.Read(id[:]) // never fails
	p := &Process{mark: hex.EncodeToString(id[:]), lease: c.Lease, stop: make(chan struct{}, 1), done: make(chan struct{})}
	c.Env = append(append([]string(nil), c.Env...), markEnv+"="+p.mark)
	if err := p.start(s, c); err != nil {
		removeCgroup(p.cgroup)
		return nil, fmt.Errorf("sandbox: start %s: %w", c.Argv[0], err)
	}
	go p.run()
	return p, nil
}

// Stop ends the command and everything that came out of it, at once. It does
// not wait: see Done. It may be called at any time and more than once.
func (p *Process) Stop() {
	select {
	case p.stop <- struct{}{}:
	default:
	}
}

// Done is closed when the command has ended and nothing of it is left.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit waits for Done and tells how the command ended. The error is a fault of
// ours.
func (p *Process) Exit() (Exit, error) {
	<-p.done
	return p.exit, p.err
}

// run waits for the child and leaves nothing behind.
func (p *Process) run() {
	defer close(p.done)
	defer p.lease.remove(p)
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		p.awaitExit()
	}()
	clean := true
	select {
	case <-exited:
	case <-p.stop:
		clean = p.end(exited)
	}
	<-exited
	if p.ctl == nil {
		p.killGroup() // before the leader is reaped: its number is still ours
	}
	err := p.reap()
	var failed *exec.ExitError
	switch state := p.cmd.ProcessState; {
	case err != nil && !errors.As(err, &failed):
		p.err = fmt.Errorf("sandbox: wait: %w", err)
	case state.ExitCode() >= 0:
		p.exit.Code = state.ExitCode()
	default:
		p.exit.Code = 128 + signalOf(state)
		clean = false
	}
	if p.ctl != nil {
		p.ctl.Close()
		// A supervisor that did not end in order cannot vouch for the rest.
		if !clean {
			killCgroup(p.cgroup)
			sweep(p.mark, sweepTimeout)
			p.exit.Leftover = true
		}
		removeCgroup(p.cgroup)
		return
	}
	p.exit.Leftover = !sweep(p.mark, sweepTimeout)
}

// end stops the command; it reports whether the supervisor did so in order.
func (p *Process) end(exited <-chan struct{}) bool {
	if p.ctl == nil {
		p.killGroup()
		return false
	}
	p.ctl.Close()
	t := time.NewTimer(superviseTimeout)
	defer t.Stop()
	select {
	case <-exited:
		return true
	case <-t.C:
		p.killGroup()
		return false
	}
}
