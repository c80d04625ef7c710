package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/mcpserver"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/dispatch"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

// defaultDescriptionChars bounds a description that is made from the prompt.
const defaultDescriptionChars = 80

type taskInput struct {
	TaskID string `path:"task_id"`
}

type listTasksInput struct {
	RunID  string `query:"run_id" maxLength:"64"`
	Status string `query:"status" enum:"queued,running,completed,failed,cancelled,timed_out"`
	Limit  int    `query:"limit" minimum:"1" maximum:"200" default:"50"`
	Cursor string `query:"cursor" maxLength:"256" doc:"next_cursor of the page before"`
}

type taskAccepted struct {
	Location string `header:"Location"`
	Body     wire.TaskAccepted
}

func (s *Server) registerTasks() {
	huma.Register(s.api, huma.Operation{
		OperationID: "submit-task", Method: http.MethodPost, Path: "/v1/tasks", Tags: []string{"tasks"},
		Summary: "Delegate one task without a lead agent", DefaultStatus: http.StatusAccepted, BodyReadTimeout: -1, MaxBodyBytes: -1,
	}, func(ctx context.Context, in *body[wire.TaskRequest]) (*taskAccepted, error) {
		out, err := s.submitTask(ctx, in.Body)
		if err != nil {
			return nil, s.problemFor(ctx, err)
		}
		return &taskAccepted{Location: "/v1/tasks/" + string(out.TaskID), Body: out}, nil
	})
	huma.Register(s.api, huma.Operation{
		OperationID: "get-task", Method: http.MethodGet, Path: "/v1/tasks/{task_id}", Tags: []string{"tasks"}, Summary: "Show a task",
	}, func(ctx context.Context, in *taskInput) (*body[wire.Task], error) {
		t, err := s.deps.Dispatch.Get(ctx, who(ctx).tenant, contract.TaskID(in.TaskID))
		if err != nil {
			return nil, s.problemFor(ctx, err)
		}
		return &body[wire.Task]{t}, nil
	})
	huma.Register(s.api, huma.Operation{
		OperationID: "list-tasks", Method: http.MethodGet, Path: "/v1/tasks", Tags: []string{"tasks"}, Summary: "List tasks, newest first",
	}, func(ctx context.Context, in *listTasksInput) (*body[wire.TaskPage], error) {
		page, err := s.deps.Dispatch.List(ctx, dispatch.ListQuery{
			Tenant: who(ctx).tenant, RunID: contract.RunID(in.RunID), Status: contract.TaskStatus(in.Status), Limit: in.Limit, Cursor: in.Cursor,
		})
		if err != nil {
			return nil, s.problemFor(ctx, err)
		}
		return &body[wire.TaskPage]{page}, nil
	})
	huma.Register(s.api, huma.Operation{
		OperationID: "cancel-task", Method: http.MethodPost, Path: "/v1/tasks/{task_id}/cancel", Tags: []string{"tasks"},
		Summary: "Cancel a task", DefaultStatus: http.StatusAccepted,
	}, func(ctx context.Context, in *taskInput) (*body[wire.Cancelling], error) {
		id := contract.TaskID(in.TaskID)
		if err := s.deps.Dispatch.Cancel(ctx, who(ctx).tenant, id, "cancelled over HTTP"); err != nil {
			return nil, s.problemFor(ctx, err)
		}
		return &body[wire.Cancelling]{wire.Cancelling{TaskID: id, Status: wire.StatusCancelling}}, nil
	})
}

func (s *Server) submitTask(ctx context.Context, b wire.TaskRequest) (wire.TaskAccepted, error) {
	invalid := func(format string, args ...any) (wire.TaskAccepted, error) {
		return wire.TaskAccepted{}, fmt.Errorf("%w: "+format, append([]any{leaderr.ErrInvalid}, args...)...)
	}
	def, ok := s.deps.Registry.Resolve(b.SubagentType)
	if !ok {
		return wire.TaskAccepted{}, s.unknownSubagent("subagent_type", b.SubagentType)
	}
	if strings.TrimSpace(b.Prompt) == "" {
		return invalid("prompt is blank")
	}
	for i, c := range b.AcceptanceCriteria {
		if n := utf8.RuneCountInString(c); n > contract.MaxCriterionChars {
			return invalid("acceptance_criteria[%d] has %d characters; want at most %d", i, n, contract.MaxCriterionChars)
		}
	}
	if err := s.knownModel(b.Model); err != nil {
		return wire.TaskAccepted{}, err
	}
	if b.Model != "" {
		def.Model = b.Model
	}
	if b.TimeoutSeconds != nil {
		def.TimeoutSeconds = *b.TimeoutSeconds
	}
	id := who(ctx)
	req := contract.TaskRequest{
		ContractVersion:    contract.Version,
		TaskID:             s.newTaskID(ctx),
		RunID:              contract.RunID("r_" + s.deps.NewID()),
		ThreadID:           contract.ThreadID(b.ThreadID),
		Tenant:             id.tenant,
		Subagent:           def,
		Description:        b.Description,
		Prompt:             b.Prompt,
		AcceptanceCriteria: b.AcceptanceCriteria,
		ParentModel:        s.deps.DefaultModel,
		Identity:           contract.Identity{UserID: id.user, UserRole: id.role, Attributes: id.attributes, IsSubagent: true},
		CreatedAt:          s.deps.Now().UTC(),
	}
	if req.ThreadID == "" {
		req.ThreadID = contract.ThreadID("th_" + s.deps.NewID())
	}
	if strings.TrimSpace(req.Description) == "" {
		req.Description = beginning(b.Prompt)
	}
	acc, err := s.deps.Dispatch.Submit(ctx, req)
	if err != nil {
		if errors.Is(err, leaderr.ErrUnavailable) { // it may be stored all the same
			return wire.TaskAccepted{TaskID: req.TaskID}, err
		}
		return wire.TaskAccepted{}, err
	}
	if acc.Duplicate {
		// Ours, whose first answer was lost, or that of an earlier request: an id that
		// is drawn is new, but one that follows from a request need not be.
		if t, err := s.deps.Dispatch.Get(ctx, id.tenant, req.TaskID); err == nil && t.RunID != req.RunID {
			return invalid("the id of this request was used before in this session; each needs an id of its own")
		}
	}
	return wire.TaskAccepted{TaskID: req.TaskID, RunID: req.RunID, ThreadID: req.ThreadID, Status: contract.TaskQueued, QueuePosition: acc.QueuePosition}, nil
}

// newTaskID draws an id, unless it follows from the request.
func (s *Server) newTaskID(ctx context.Context) contract.TaskID {
	if id, ok := mcpserver.TaskID(ctx); ok {
		return id
	}
	return contract.TaskID("t_" + s.deps.NewID())
}

// beginning is the first line of a prompt that says something, cut.
func beginning(prompt string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(prompt), "\n")
	line = strings.TrimSpace(line)
	runes := []rune(line)
	if len(runes) > defaultDescriptionChars {
		return string(runes[:defaultDescriptionChars-1]) + "…"
	}
	return line
}

func (s *Server) registerAdmission() {
	huma.Register(s.api, huma.Operation{
		OperationID: "get-admission", Method: http.MethodGet, Path: "/v1/admission", Tags: []string{"admission"}, Summary: "Show the gate: leader, slots, queue",
	}, func(ctx context.Context, _ *struct{}) (*body[admissionapi.Status], error) {
		st, err := s.deps.Dispatch.Admission(ctx)
		if err != nil {
			return nil, s.problemFor(ctx, err)
		}
		if !who(ctx).admin {
			// Slots hold tasks of all tenants. The numbers are everybody's.
			for i := range st.Slots {
				st.Slots[i].TaskID, st.Slots[i].Executor = "", ""
			}
		}
		return &body[admissionapi.Status]{st}, nil
	})
}
