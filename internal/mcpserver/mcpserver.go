// Package mcpserver offers Herdgate to MCP clients: the tools task, task_status and
// cancel_task. What stands behind them is a [Backend]; the transport is stdio or
// streamable HTTP ([NewHandler]).
//
// A call of task lasts as long as its task. Whoever takes the call back, or is gone,
// takes the task back as well.
package mcpserver

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

// The names of the tools.
const (
	ToolTask       = "task"
	ToolTaskStatus = "task_status"
	ToolCancelTask = "cancel_task"
)

// CodeMeta is the key in the _meta of a refused call under which its code stands,
// one of those of the HTTP API.
const CodeMeta = "herdgate/code"

// Backend is what the tools work on. Its errors are *wire.Problem where they are
// known ones. On whose behalf it acts is in the context, or fixed.
type Backend interface {
	// Subagents lists the types that a task may name, and maybe others.
	Subagents(ctx context.Context) ([]wire.Subagent, error)
	// SubmitTask stores a task. If it may be stored although there is an error, the
	// answer has its id.
	SubmitTask(ctx context.Context, req wire.TaskRequest) (wire.TaskAccepted, error)
	GetTask(ctx context.Context, id contract.TaskID) (wire.Task, error)
	CancelTask(ctx context.Context, id contract.TaskID) error
	// Position is a sequence that all events of later tasks come after; 0 will do.
	Position(ctx context.Context) (uint64, error)
	// Follow calls each for the events of a task after a sequence, in order. It
	// returns when each does not want more, with ctx's error when ctx is done, and
	// otherwise when it cannot go on, or when events are lost.
	Follow(ctx context.Context, id contract.TaskID, after uint64, each func(contract.EventRecord) (more bool)) error
}

// Config says how to serve.
type Config struct {
	// Version of the program.
	Version string
	Log     zerolog.Logger
	// Stopping, when set, ends calls while their tasks go on; it is for servers of
	// which there are others.
	Stopping context.Context
	// Heartbeat is the time between two notifications of progress of a task that
	// says nothing; default 15 s.
	Heartbeat time.Duration
	// MaxTasks bounds the calls that wait for a task; 0: there is no bound.
	MaxTasks int
}

// Bounds.
const (
	// submitTimeout and cancelTimeout bound what must be brought to an end although
	// the caller is gone.
	submitTimeout = 30 * time.Second
	cancelTimeout = 10 * time.Second
	// settleTimeout is how long a task's record may be behind its last event.
	settleTimeout = 20 * time.Second
	// blindTimeout is how long a task is waited for that cannot be followed.
	blindTimeout = 2 * time.Minute
)

type server struct {
	b       Backend
	cfg     Config
	waiting atomic.Int64
}

// New returns a server with the tools; run it on a transport of the SDK.
func New(b Backend, cfg Config) *sdk.Server {
	if cfg.Heartbeat <= 0 {
		cfg.Heartbeat = 15 * time.Second
	}
	s := &server{b: b, cfg: cfg}
	srv := sdk.NewServer(&sdk.Implementation{Name: "herdgate", Title: "Herdgate", Version: cfg.Version}, &sdk.ServerOptions{
		Instructions: instructions,
		Capabilities: &sdk.ServerCapabilities{Tools: &sdk.ToolCapabilities{}},
	})
	yes, no := true, false
	sdk.AddTool(srv, &sdk.Tool{
		Name: ToolTask, Title: "Delegate a task", Description: taskDescription(nil), InputSchema: taskInput(nil), OutputSchema: taskOutput(),
		Annotations: &sdk.ToolAnnotations{Title: "Delegate a task", DestructiveHint: &yes, OpenWorldHint: &yes},
	}, s.task)
	sdk.AddTool(srv, &sdk.Tool{
		Name: ToolTaskStatus, Title: "Show a task", Description: statusDescription, InputSchema: idInput(), OutputSchema: taskOutput(),
		Annotations: &sdk.ToolAnnotations{Title: "Show a task", ReadOnlyHint: true, IdempotentHint: true, DestructiveHint: &no, OpenWorldHint: &no},
	}, s.status)
	sdk.AddTool(srv, &sdk.Tool{
		Name: ToolCancelTask, Title: "Cancel a task", Description: cancelDescription, InputSchema: idInput(), OutputSchema: cancelOutput(),
		Annotations: &sdk.ToolAnnotations{Title: "Cancel a task", IdempotentHint: true, DestructiveHint: &yes, OpenWorldHint: &no},
	}, s.cancel)
	srv.AddReceivingMiddleware(s.current)
	return srv
}

// current puts the sub-agent types of the moment into the list of tools: they come
// and go.
func (s *server) current(next sdk.MethodHandler) sdk.MethodHandler {
	return func(ctx context.Context, method string, req sdk.Request) (sdk.Result, error) {
		res, err := next(ctx, method, req)
		list, ok := res.(*sdk.ListToolsResult)
		if err != nil || !ok {
			return res, err
		}
		all, err := s.b.Subagents(ctx)
		if err != nil {
			s.cfg.Log.Warn().Err(err).Msg("mcp: the sub-agent types cannot be listed")
			return list, nil
		}
		var usable []wire.Subagent
		for _, a := range all {
			if a.Usable() {
				usable = append(usable, a)
			}
		}
		out := *list
		out.Tools = nil
		for _, t := range list.Tools {
			if t.Name == ToolTask {
				c := *t
				c.Description, c.InputSchema = taskDescription(usable), taskInput(usable)
				t = &c
			}
			out.Tools = append(out.Tools, t)
		}
		return &out, nil
	}
}

// taskID is the argument of two tools.
type taskID struct {
	TaskID contract.TaskID `json:"task_id"`
}

func (s *server) status(ctx context.Context, _ *sdk.CallToolRequest, in taskID) (*sdk.CallToolResult, any, error) {
	t, err := s.b.GetTask(ctx, in.TaskID)
	if err != nil {
		return s.refused(err), nil, nil
	}
	return shown(t), stateOf(t), nil
}

// cancelling is the answer of cancel_task.
type cancelling struct {
	TaskID contract.TaskID `json:"task_id"`
	Status string          `json:"status"`
}

func (s *server) cancel(ctx context.Context, _ *sdk.CallToolRequest, in taskID) (*sdk.CallToolResult, any, error) {
	if err := s.b.CancelTask(ctx, in.TaskID); err != nil {
		return s.refused(err), nil, nil
	}
	return text("The task is being cancelled."), cancelling{in.TaskID, wire.StatusCancelling}, nil
}

// refused is a call that came to nothing: the code first, then what is wrong.
func (s *server) refused(err error) *sdk.CallToolResult {
	var p *wire.Problem
	switch {
	case errors.As(err, &p):
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		p = &wire.Problem{Code: wire.CodeUnavailable, Detail: err.Error()}
	default:
		s.cfg.Log.Error().Err(err).Msg("mcp: internal error")
		p = &wire.Problem{Code: wire.CodeInternal, Detail: "an internal error; the log has the details"}
	}
	var b strings.Builder
	b.WriteString(p.Code + ": " + p.Error())
	for _, f := range p.Errors {
		b.WriteString("; " + f.Location + ": " + f.Message)
	}
	res := text(bounded(b.String(), maxErrorChars))
	res.IsError, res.Meta = true, sdk.Meta{CodeMeta: p.Code}
	return res
}

func text(parts ...string) *sdk.CallToolResult {
	res := &sdk.CallToolResult{Content: []sdk.Content{}}
	for _, p := range parts {
		res.Content = append(res.Content, &sdk.TextContent{Text: p})
	}
	return res
}
