//go:build unix

package sandbox

import (
	"os"
	"os/exec"
	"syscall"
)

// startDirect runs the command as a process group of its own.
func (p *Process) startDirect(c Command) error {
	p.cmd = &exec.Cmd{
		Path: c.Argv[0], Args: c.Argv, Dir: c.Dir, Env: c.Env, Stdout: c.Output, Stderr: c.Output,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true},
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.group = p.cmd.Process.Pid
	return nil
}

func (p *Process) killGroup() { _ = syscall.Kill(-p.group, syscall.SIGKILL) } // gone is fine

func signalOf(s *os.ProcessState) int {
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return int(ws.Signal())
	}
	return 0
}
