package lead

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/herdgate/herdgate/internal/agentfile"
	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/guard"
	"github.com/herdgate/herdgate/internal/mcp"
	"github.com/herdgate/herdgate/internal/model/configured"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/workspace"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/httpapi"
)

// maxPromptFile bounds the file of a system prompt.
const maxPromptFile = 64 << 10

// filesInterval is how often the folders of subagents.paths are read again.
const filesInterval = 5 * time.Second

// maxDrain bounds the wait for active runs: another lead can go on with them.
const maxDrain = 10 * time.Second

// Serve runs a lead process as its configuration says.
func Serve(ctx context.Context, env *process.Env) error {
	cfg, err := configOf(env)
	if err != nil {
		return err
	}
	env.Metrics.Probes.Set(CheckName, errors.New("starting"))
	door, err := httpapi.OpenDoor(ctx, cfg.HTTP, env.Metrics.Handler(), env.Metrics.Probes.Ready, env.LogOf("lead"))
	if err != nil {
		return err
	}
	defer door.Close()
	p, err := env.Open(ctx, "lead", func(n contract.Names) []string {
		used := []string{n.WorkStream(), n.EventStream(), contract.KVStream(n.TaskBucket()), contract.KVStream(n.RunBucket())}
		if env.Config.Workspace.Backend == config.WorkspaceObjectStore {
			used = append(used, provision.ObjectStream(n.BlobStore()))
		}
		if env.Config.AgentStorage.Backend == config.StorageNATS {
			used = append(used, contract.KVStream(n.AgentBucket()))
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
	catalogue, err := subagent.NewCatalogue(env.Subagents())
	if err != nil {
		return err
	}
	var files func() ([]subagent.File, bool)
	if folders := env.Config.Subagents.Paths; len(folders) > 0 {
		files = agentfile.NewReader(folders, subagent.Markdown{Models: models.Names()}, p.Log).Read
	}
	store, err := agentStore(env, p)
	if err != nil {
		return err
	}
	var workspaces *workspace.Store // nil: all executors see the same folder
	if env.Config.Workspace.Backend == config.WorkspaceObjectStore {
		if workspaces, err = workspace.Open(workspace.Config{Bus: p.Bus, Root: env.WorkspaceRoot()}); err != nil {
			return err
		}
		defer workspaces.Close()
	}
	external := mcp.New(mcp.Config{Servers: env.Config.MCP.Servers, OutputMaxChars: env.Config.Workspace.ToolOutputMaxChars, Log: p.Log})
	defer external.Close()
	svc, err := New(cfg, Deps{
		Workspaces: workspaces, Skills: env.Skills(p.Log), MCP: external,
		Bus: p.Bus, Models: models, Catalogue: catalogue, AgentStore: store, AgentFiles: files, FilesInterval: filesInterval, Log: p.Log, TracerProvider: p.Tel.TracerProvider(), Content: p.Tel.Content(),
		Registerer: env.Metrics.Registerer(), Probes: env.Metrics.Handler(), Door: door, Ready: p.Ready, Ask: p.Metrics.Probes.Ask,
	})
	if err != nil {
		return err
	}
	told, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-svc.Listening():
			if env.OnHTTP != nil {
				env.OnHTTP(svc.Addr().String())
			}
		case <-told.Done():
		}
	})
	err = svc.Run(ctx)
	stop()
	wg.Wait()
	return err
}

// agentStore opens where managed definitions are kept.
func agentStore(env *process.Env, p *process.Service) (agentstore.Store, error) {
	switch env.Config.AgentStorage.Backend {
	case config.StorageFile:
		return agentstore.NewFile(env.DataDir, p.Log)
	case config.StorageSQL: // the event sink has the database
		return agentstore.NewSink(p.Bus, p.Log), nil
	}
	return agentstore.NewNATS(p.Bus, p.Log), nil
}

// configOf takes what a lead needs out of the whole configuration.
func configOf(env *process.Env) (Config, error) {
	c := env.Config
	role, err := readPrompt(c.Lead.SystemPromptFile)
	if err != nil {
		return Config{}, err
	}
	cfg := Config{
		Name: env.Name, Version: process.Version,
		HTTP:  HTTPConfig{Addr: c.HTTP.Addr, AuthMode: c.HTTP.Auth.Mode},
		Model: c.Lead.Model, MaxTurns: c.Lead.MaxTurns, RoleText: role,
		SubagentsEnabled: c.Subagents.Enabled, MaxConcurrent: c.Subagents.MaxConcurrent, MaxTotal: &c.Subagents.MaxTotalPerRun,
		ShellAllowed: env.ShellAllowed(), WorkspaceRoot: env.WorkspaceRoot(), ToolOutputMaxChars: c.Workspace.ToolOutputMaxChars,
		Guards: guard.Config{Loop: c.LoopDetection}, Settings: &env.Config,
		// A zero Config takes the default; a configured 0 hands over at once.
		DrainTimeout: min(max(time.Duration(c.Executor.DrainTimeoutSeconds)*time.Second, time.Nanosecond), maxDrain),
		// A lead that is gone is noticed as soon as an executor that is gone.
		RunLeaseTTL: time.Duration(c.SubagentRuntime.LeaseTTLSeconds) * time.Second,
	}
	if c.Lead.TokenBudget != nil {
		cfg.Guards.Budget = *c.Lead.TokenBudget
	}
	for _, t := range c.HTTP.Auth.Tokens {
		cfg.HTTP.Tokens = append(cfg.HTTP.Tokens, Token{Name: t.Name, TokenEnv: t.TokenEnv, Tenant: contract.Tenant(t.Tenant), UserID: t.UserID, Roles: t.Roles, Attributes: t.Attributes})
	}
	return cfg, nil
}

func readPrompt(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	f, err := os.Open(file)
	if err != nil {
		return "", fmt.Errorf("lead.system_prompt_file: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxPromptFile+1))
	if err != nil {
		return "", fmt.Errorf("lead.system_prompt_file: %w", err)
	}
	if len(b) > maxPromptFile {
		return "", fmt.Errorf("lead.system_prompt_file: %s has more than %d bytes", file, maxPromptFile)
	}
	return string(b), nil
}
