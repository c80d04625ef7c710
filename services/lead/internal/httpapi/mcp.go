package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/mcpserver"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/feed"
)

// registerMCP serves the tools of MCP. No state is kept between two requests, so
// that it does not matter which lead gets the next one.
func (s *Server) registerMCP(mux *http.ServeMux) {
	handler := mcpserver.NewHandler(local{s}, mcpserver.HTTPConfig{
		Config:    mcpserver.Config{Version: s.cfg.Version, Log: s.log, Stopping: s.stopping, Heartbeat: s.cfg.KeepAlive, MaxTasks: s.cfg.MaxCalls},
		KeepAlive: s.cfg.KeepAlive, WriteTimeout: s.cfg.WriteTimeout,
		Owner: func(ctx context.Context) string {
			id := who(ctx)
			return fmt.Sprintf("%q %q", id.tenant, id.user)
		},
	})
	message := &huma.Schema{Type: huma.TypeObject, Description: "a message of JSON-RPC 2.0 as MCP has it", AdditionalProperties: true}
	mux.Handle("POST /mcp", handler)
	s.api.OpenAPI().AddOperation(&huma.Operation{
		OperationID: "mcp", Method: http.MethodPost, Path: "/mcp", Tags: []string{"mcp"},
		Summary: "The tools task, task_status and cancel_task for clients of the Model Context Protocol (streamable HTTP)",
		RequestBody: &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{
			"application/json": {Schema: message},
		}},
		Responses: map[string]*huma.Response{
			"200": {Description: "the answer, as a stream of server-sent events: progress, then the result", Content: map[string]*huma.MediaType{
				"text/event-stream": {Schema: &huma.Schema{Type: huma.TypeString, Description: "each data is a message of JSON-RPC 2.0"}},
				"application/json":  {Schema: message},
			}},
			"202": {Description: "a notification was taken"},
		},
	})
}

// local is what the tools work on: this lead, on behalf of whoever calls.
type local struct{ s *Server }

// problem makes the error of a tool, without what is for HTTP alone.
func (l local) problem(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	var p *wire.Problem
	if told := l.s.problemFor(ctx, err); errors.As(told, &p) {
		return p
	}
	return err
}

func (l local) Subagents(context.Context) ([]wire.Subagent, error) {
	return l.s.deps.Registry.Catalogue(), nil
}

func (l local) SubmitTask(ctx context.Context, req wire.TaskRequest) (wire.TaskAccepted, error) {
	acc, err := l.s.submitTask(ctx, req)
	return acc, l.problem(ctx, err)
}

func (l local) GetTask(ctx context.Context, id contract.TaskID) (wire.Task, error) {
	t, err := l.s.deps.Dispatch.Get(ctx, who(ctx).tenant, id)
	return t, l.problem(ctx, err)
}

func (l local) CancelTask(ctx context.Context, id contract.TaskID) error {
	return l.problem(ctx, l.s.deps.Dispatch.Cancel(ctx, who(ctx).tenant, id, "cancelled over MCP"))
}

func (l local) Position(ctx context.Context) (uint64, error) {
	n, err := l.s.deps.Feed.LastSeq(ctx)
	return n, l.problem(ctx, err)
}

// errEventsLost: somebody has to look at the task itself.
var errEventsLost = errors.New("events of the task are not kept any more")

func (l local) Follow(ctx context.Context, id contract.TaskID, after uint64, each func(contract.EventRecord) bool) error {
	err := l.s.deps.Feed.Stream(ctx, feed.Query{Tenant: who(ctx).tenant, TaskID: id}, after, func(rec contract.EventRecord) error {
		if !each(rec) {
			return feed.ErrStop
		}
		return nil
	}, func(uint64, uint64) error { return errEventsLost })
	if ctx.Err() != nil || errors.Is(err, errEventsLost) {
		return err
	}
	return l.problem(ctx, err)
}
