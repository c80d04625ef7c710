package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Landlock says which files are read and written. It says nothing about their modes,
// owners and times, about which processes there are, nor about memory that processes
// share by number. So a confined command is set apart as well, where the system lets
// us: with namespaces of its own it sees in /proc only what came out of it, all files
// but its own are on read-only mounts, and shared memory ends with it.
//
// The first process in there, started between the supervisor and the confiner, is
// ours. It makes the mounts, takes the exit of what was left behind by its parent, and
// ends with the command; then the kernel kills the rest.

// apartThreads is room in the control group for the threads of the first process.
const apartThreads = 24

// shmDir is where the C library has shared memory and semaphores, which, for one,
// Python's multiprocessing needs.
const shmDir = "/dev/shm"

// probeTime bounds the trial, which takes some milliseconds unless the machine is busy.
const probeTime = time.Minute

// canBeApart tries once whether commands can be set apart here.
var canBeApart = sync.OnceValue(func() bool {
	b, err := json.Marshal(plan{})
	if err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args, cmd.Env, cmd.SysProcAttr = []string{apartName, string(b), ""}, []string{}, setApart(&syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL})
	cmd.WaitDelay = time.Second
	return cmd.Run() == nil
})

// setApart asks for namespaces. Root makes them with its own rights; in a user
// namespace it would lose files that belong to others. Any other user needs one.
func setApart(a *syscall.SysProcAttr) *syscall.SysProcAttr {
	a.Cloneflags = unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC
	if uid, gid := os.Getuid(), os.Getgid(); uid != 0 {
		a.Cloneflags |= unix.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
		a.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN} // to mount; the confiner drops it
	}
	return a
}

// apart is the first process of a command's namespaces. Without a command it is the
// trial.
func apart(p plan, _ string, argv []string) int {
	p.Others = threadsOf(os.Getuid()) // while /proc still shows them
	if err := mountApart(append([]string{p.Dir}, p.ReadWrite...)); err != nil {
		fmt.Fprintln(os.Stderr, "sandbox: set the command apart:", err)
		return exitCannotRun
	}
	if argv[0] == "" {
		return 0
	}
	b, err := json.Marshal(p)
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandbox: plan:", err)
		return exitCannotRun
	}
	pid, err := syscall.ForkExec("/proc/self/exe", append([]string{confineName, string(b)}, argv...), &syscall.ProcAttr{
		Dir: p.Dir, Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandbox: start:", err)
		return exitCannotRun
	}
	for {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			fmt.Fprintln(os.Stderr, "sandbox: wait:", err)
			return exitCannotRun
		case got == pid && ws.Signaled():
			return 128 + int(ws.Signal())
		case got == pid:
			return ws.ExitStatus()
		}
	}
}

// mountApart makes all mounts of this namespace read-only but those of folders that
// may be written, and gives it a /proc of its own processes and a place for shared
// memory. Nothing outside sees it.
func mountApart(writable []string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("part from the mounts outside: %w", err)
	}
	var bound []string
	for _, path := range writable {
		if _, err := os.Stat(path); path == "" || err != nil {
			continue // Landlock leaves out what is missing, too
		}
		if err := unix.Mount(path, path, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("mount %s: %w", path, err)
		}
		bound = append(bound, path)
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("make the mounts read-only: %w", err)
	}
	for _, path := range bound {
		if err := unix.MountSetattr(unix.AT_FDCWD, path, 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("make %s writable: %w", path, err)
		}
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if _, err := os.Stat(shmDir); err == nil {
		if err := unix.Mount("tmpfs", shmDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=1777,size=64m"); err != nil {
			return fmt.Errorf("mount %s: %w", shmDir, err)
		}
	}
	return nil
}
