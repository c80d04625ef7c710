//go:build !unix

package sandbox

import (
	"os"
	"os/exec"
)

// startDirect runs the command; this system has no process groups to end.
func (p *Process) startDirect(c Command) error {
	p.cmd = &exec.Cmd{Path: c.Argv[0], Args: c.Argv, Dir: c.Dir, Env: c.Env, Stdout: c.Output, Stderr: c.Output}
	return p.cmd.Start()
}

func (p *Process) killGroup() { _ = p.cmd.Process.Kill() } // gone is fine

func signalOf(*os.ProcessState) int { return 0 }
