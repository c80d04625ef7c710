package executor

import (
	"errors"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// errNoShell ends a task that needs the shell where there is none for it (REG-18).
// A lead cannot know what this machine has.
var errNoShell = errors.New("this executor runs no commands for models: " +
	"they cannot be confined here, and workspace.allow_host_bash is not set (`herdgate doctor` says what is missing)")

// shell says what commands the tools may run on this executor. What cannot be
// confined is not run, unless the configuration allows the bare host in so many
// words (REG-16).
func shell(w config.Workspace, notice func(reason string)) tool.Options {
	mode := sandbox.Landlock
	if w.Sandbox == config.SandboxNone {
		mode = sandbox.None
	}
	box := sandbox.New(mode, notice)
	return tool.Options{
		Bash: box.Confined() || w.AllowHostBash, Sandbox: box, OutputMaxChars: w.ToolOutputMaxChars,
		Limits: sandbox.Limits{
			Processes: uint64(w.Limits.Processes), MemoryBytes: uint64(w.Limits.MemoryMB) << 20,
			FileBytes: uint64(w.Limits.FileMB) << 20, CPUSeconds: uint64(w.Limits.CPUSeconds),
		},
	}
}

// shellFor narrows o to a task.
func shellFor(o tool.Options, req contract.TaskRequest) (tool.Options, error) {
	if !o.Bash && req.Subagent.Name == subagent.Bash {
		return o, errNoShell
	}
	o.Network = req.Subagent.Network
	return o, nil
}
