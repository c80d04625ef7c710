//go:build !linux

package sandbox

import "time"

func landlockAvailable() (bool, string) { return false, "Landlock exists on Linux only" }

// Protection tells what this system gives to confined commands, and what it does not.
func Protection() (has string, gaps []string) { return "no Landlock", nil }

func childMain([]string) bool { return false }

func (p *Process) start(_ *Sandbox, c Command) error { return p.startDirect(c) }

// awaitExit reaps as well: there is no other way to wait here.
func (p *Process) awaitExit() { p.wait = p.cmd.Wait() }

func (p *Process) reap() error { return p.wait }

// sweep has no way to find what left the group.
func sweep(string, time.Duration) bool { return true }

// Without a supervisor there is nobody to tell.
func (p *Process) tell(int64) {}

func clock() int64 { return 0 }

func killCgroup(string)   {}
func removeCgroup(string) {}
