package executor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/internal/workspace"
	"github.com/herdgate/herdgate/pkg/contract"
)

// openTools opens the tools of the task: over the folder of its thread or, where
// workspaces are kept in NATS, over a copy that is its own.
func (a *attempt) openTools(ctx context.Context) (tools []tool.Tool, files *workspace.Copy, done func(), err error) {
	req := a.grant.Request
	if a.s.deps.Workspaces == nil {
		tools, done, err = a.s.deps.Tools(req)
		return tools, nil, done, err
	}
	a.turn.giveWay() // it may take a while
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(req.Subagent.TimeoutSeconds)*time.Second, errTimeout)
	defer cancel()
	files, err = a.s.deps.Workspaces.Checkout(ctx, req.Tenant, req.ThreadID, string(req.TaskID))
	if err != nil {
		return nil, nil, nil, err
	}
	tools, closeTools, err := a.s.deps.ToolsIn(req, files.Dir())
	if err != nil {
		files.Close()
		return nil, nil, nil, err
	}
	return tools, files, func() { closeTools(); files.Close() }, nil
}

// fetchFor says whether a task may fetch pages: where that is enabled, and its
// type names the tool. All tools do not include it, because data leaves by it.
func fetchFor(cfg config.WebFetch, req contract.TaskRequest) *tool.FetchOptions {
	if !cfg.Enabled || !slices.Contains(req.Subagent.Tools, tool.WebFetchName) {
		return nil
	}
	return &tool.FetchOptions{AllowPrivate: cfg.AllowPrivate}
}

// keepFiles stores what the task changed in its workspace, when its work has come
// to an end of its own. What was stopped from outside leaves the last snapshot. What
// the parent has to know about it stands in the result.
func (j *job) keepFiles(ctx context.Context, end outcome.End) (outcome.End, error) {
	if j.files == nil {
		return end, nil
	}
	rep, err := j.files.Push(ctx, j.a.gate)
	note := rep.Note()
	switch {
	case ctx.Err() != nil:
		return end, context.Cause(ctx)
	case errors.Is(err, workspace.ErrLimit):
		note = fmt.Sprintf("Note on the workspace: what this task changed in it was not kept: %v.", err)
	case err != nil:
		return end, err
	}
	if note == "" {
		return end, nil
	}
	j.a.log.Warn().Int("conflicts", len(rep.Conflicts)).Int("left_out", len(rep.LeftOut)).AnErr("reason", err).Msg("not all changes to the workspace are in their place")
	if end.State == contract.StateCompleted {
		end.Result += "\n\n" + note
	} else {
		end.Error += "\n" + note
	}
	return end, nil
}
