package executor

import (
	"context"
	"time"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model/configured"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Serve runs an executor process as its configuration says. The program must
// call sandbox.Main first thing in main.
func Serve(ctx context.Context, env *process.Env) error {
	p, err := env.Open(ctx, "executor", func(n contract.Names) []string {
		return []string{n.GrantStream(), n.EventStream(), n.DeadStream(), contract.KVStream(n.TaskBucket())}
	})
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer p.Close()
	models, err := configured.Open(env, p.Log)
	if err != nil {
		return err
	}
	mode := sandbox.Landlock
	if env.Config.Workspace.Sandbox == config.SandboxNone {
		mode = sandbox.None
	}
	box := sandbox.New(mode, func(reason string) {
		p.Log.Warn().Str("reason", reason).Msg("commands are run with less confinement than configured")
	})
	opts := tool.Options{Bash: env.ShellAllowed(), Sandbox: box, OutputMaxChars: env.Config.Workspace.ToolOutputMaxChars}
	root := env.WorkspaceRoot()
	// A zero Config takes the default; a configured 0 hands back at once.
	drain := max(time.Duration(env.Config.Executor.DrainTimeoutSeconds)*time.Second, time.Nanosecond)
	svc, err := New(Config{
		Name: env.Name, Pool: contract.Pool(env.Config.Executor.Pool), MaxTasks: env.Config.Executor.MaxTasks, DrainTimeout: drain,
		StallTimeout: time.Duration(env.Config.Executor.StallTimeoutSeconds) * time.Second, Settings: &env.Config,
	}, Deps{
		Bus: p.Bus, Models: models, Log: p.Log, TracerProvider: p.Tel.TracerProvider(), Registerer: env.Metrics.Registerer(), Ready: p.Ready,
		Tools: func(req contract.TaskRequest) ([]tool.Tool, func(), error) {
			ws, err := tool.NewWorkspace(tool.ThreadDir(root, req.Tenant, req.ThreadID))
			if err != nil {
				return nil, nil, err
			}
			return tool.Tools(ws, opts), func() { _ = ws.Close() }, nil
		},
	})
	if err != nil {
		return err
	}
	return svc.Run(ctx)
}
