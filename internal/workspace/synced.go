package workspace

import (
	"context"
	"errors"
	"sync"

	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Tools are the file tools over a copy that follows the workspace of a thread:
// every call sees the newest snapshot, and what a call writes is in the next one
// when it returns. They are for whoever works beside others for long, such as a
// lead. o must not offer the shell. done removes the copy.
func (s *Store) Tools(tenant contract.Tenant, thread contract.ThreadID, who string, o tool.Options) (tools []tool.Tool, done func(), err error) {
	if o.Bash {
		return nil, nil, errors.New("workspace: the shell cannot follow a workspace")
	}
	c, err := s.empty(tenant, thread, who)
	if err != nil {
		return nil, nil, err
	}
	ws, err := tool.NewWorkspace(c.Dir())
	if err != nil {
		c.Close()
		return nil, nil, err
	}
	mu := &sync.Mutex{}
	for _, t := range tool.Tools(ws, o) {
		w := synced{Tool: t, c: c, mu: mu}
		if f, ok := t.(tool.OnFiles); ok {
			w.writes = f.Writes()
		}
		tools = append(tools, w)
	}
	return tools, func() { _ = ws.Close(); c.Close() }, nil
}

// synced is a tool on a copy that follows.
type synced struct {
	tool.Tool
	c      *Copy
	mu     *sync.Mutex // one call at a time
	writes bool
}

// Writes implements [tool.OnFiles].
func (t synced) Writes() bool { return t.writes }

// Call implements [tool.Tool].
func (t synced) Call(ctx context.Context, call tool.Call) (tool.Result, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.c.Pull(ctx); err != nil {
		return t.failed(ctx, "the workspace cannot be read: ", err)
	}
	res, err := t.Tool.Call(ctx, call)
	if err != nil || res.IsError || !t.writes {
		return res, err
	}
	rep, err := t.c.Sync(ctx)
	if err != nil {
		t.c.broken = true // the next call begins with what is stored
		return t.failed(ctx, "the change was not stored: ", err)
	}
	if note := rep.Note(); note != "" {
		res.Text += "\n" + note
	}
	return res, nil
}

func (t synced) failed(ctx context.Context, what string, err error) (tool.Result, error) {
	if ctx.Err() != nil {
		return tool.Result{}, context.Cause(ctx)
	}
	return tool.Failure(t.Spec().Name + ": " + what + err.Error()), nil
}
