package executor

import (
	"context"
	"time"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/mcp"
	"github.com/herdgate/herdgate/internal/model/configured"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/internal/workspace"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Serve runs an executor process as its configuration says. The program must
// call sandbox.Main first thing in main.
func Serve(ctx context.Context, env *process.Env) error {
	p, err := env.Open(ctx, "executor", func(n contract.Names) []string {
		used := []string{n.GrantStream(), n.EventStream(), n.DeadStream(), contract.KVStream(n.TaskBucket())}
		if env.Config.Workspace.Backend == config.WorkspaceObjectStore {
			used = append(used, contract.KVStream(n.RunBucket()), provision.ObjectStream(n.BlobStore()))
		}
		return used
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
	opts := shell(env.Config.Workspace, func(reason string) {
		what := "no commands are run for models; workspace.allow_host_bash would allow them all the same"
		if env.Config.Workspace.AllowHostBash {
			what = "commands of models run on the bare host, as workspace.allow_host_bash allows"
		}
		p.Log.Warn().Str("reason", reason).Msg(what)
	})
	root := env.WorkspaceRoot()
	openIn := func(req contract.TaskRequest, dir string) ([]tool.Tool, func(), error) {
		opts, err := shellFor(opts, req)
		if err != nil {
			return nil, nil, err
		}
		opts.Fetch = fetchFor(env.Config.Workspace.WebFetch, req)
		ws, err := tool.NewWorkspace(dir)
		if err != nil {
			return nil, nil, err
		}
		return tool.Tools(ws, opts), func() { _ = ws.Close() }, nil
	}
	var workspaces *workspace.Store // nil: all executors see the same folder
	if env.Config.Workspace.Backend == config.WorkspaceObjectStore {
		if workspaces, err = workspace.Open(workspace.Config{Bus: p.Bus, Root: root}); err != nil {
			return err
		}
		defer workspaces.Close()
	}
	external := mcp.New(mcp.Config{Servers: env.Config.MCP.Servers, OutputMaxChars: env.Config.Workspace.ToolOutputMaxChars, Log: p.Log})
	defer external.Close()
	// A zero Config takes the default; a configured 0 hands back at once.
	drain := max(time.Duration(env.Config.Executor.DrainTimeoutSeconds)*time.Second, time.Nanosecond)
	svc, err := New(Config{
		Name: env.Name, Pool: contract.Pool(env.Config.Executor.Pool), MaxTasks: env.Config.Executor.MaxTasks, DrainTimeout: drain,
		StallTimeout: time.Duration(env.Config.Executor.StallTimeoutSeconds) * time.Second, Settings: &env.Config,
	}, Deps{
		Bus: p.Bus, Models: models, Log: p.Log, TracerProvider: p.Tel.TracerProvider(), Content: p.Tel.Content(), Registerer: env.Metrics.Registerer(), Ready: p.Ready,
		Tools: func(req contract.TaskRequest) ([]tool.Tool, func(), error) {
			return openIn(req, tool.ThreadDir(root, req.Tenant, req.ThreadID))
		},
		Workspaces: workspaces, ToolsIn: openIn, Skills: env.Skills(p.Log), MCP: external,
	})
	if err != nil {
		return err
	}
	return svc.Run(ctx)
}
