package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/feed"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

type startRunInput struct {
	Wait   bool   `query:"wait" doc:"answer 200 with the run once it has ended"`
	Accept string `header:"Accept" doc:"text/event-stream answers with the run's events until it ends"`
	Body   wire.RunRequest
}

type runInput struct {
	RunID string `path:"run_id"`
}

type listRunsInput struct {
	ThreadID string `query:"thread_id" maxLength:"512"`
	Status   string `query:"status" enum:"running,completed,failed,cancelled"`
	Limit    int    `query:"limit" minimum:"1" maximum:"200" default:"50"`
	Cursor   string `query:"cursor" maxLength:"256" doc:"next_cursor of the page before"`
}

type body[T any] struct{ Body T }

func (s *Server) registerRuns() {
	reg := s.api.OpenAPI().Components.Schemas
	huma.Register(s.api, huma.Operation{
		OperationID: "start-run", Method: http.MethodPost, Path: "/v1/runs", Tags: []string{"runs"},
		Summary: "Start a run of the lead agent", BodyReadTimeout: -1, MaxBodyBytes: -1,
		Responses: map[string]*huma.Response{
			"200": {Description: "the finished run, or its events", Content: map[string]*huma.MediaType{
				"application/json":  {Schema: ref[wire.Run](reg)},
				"text/event-stream": {Schema: eventStreamSchema(reg)},
			}},
			"202": {Description: "the run was accepted", Content: map[string]*huma.MediaType{
				"application/json": {Schema: ref[wire.RunAccepted](reg)},
			}},
		},
	}, s.startRun)
	huma.Register(s.api, huma.Operation{
		OperationID: "get-run", Method: http.MethodGet, Path: "/v1/runs/{run_id}", Tags: []string{"runs"}, Summary: "Show a run",
	}, func(ctx context.Context, in *runInput) (*body[wire.Run], error) {
		rec, err := s.run(ctx, in.RunID)
		if err != nil {
			return nil, s.problemFor(ctx, err)
		}
		return &body[wire.Run]{wire.NewRun(rec)}, nil
	})
	huma.Register(s.api, huma.Operation{
		OperationID: "list-runs", Method: http.MethodGet, Path: "/v1/runs", Tags: []string{"runs"}, Summary: "List runs, newest first",
	}, s.listRuns)
	huma.Register(s.api, huma.Operation{
		OperationID: "cancel-run", Method: http.MethodPost, Path: "/v1/runs/{run_id}/cancel", Tags: []string{"runs"},
		Summary: "Cancel a run and every task of it", DefaultStatus: http.StatusAccepted,
	}, func(ctx context.Context, in *runInput) (*body[wire.Cancelling], error) {
		id := contract.RunID(in.RunID)
		if id.Validate() != nil {
			return nil, s.problemFor(ctx, leaderr.ErrNotFound)
		}
		if err := s.deps.Engine.Cancel(ctx, who(ctx).tenant, id); err != nil {
			return nil, s.problemFor(ctx, err)
		}
		return &body[wire.Cancelling]{wire.Cancelling{RunID: id, Status: wire.StatusCancelling}}, nil
	})
}

func (s *Server) run(ctx context.Context, id string) (contract.RunRecord, error) {
	if contract.RunID(id).Validate() != nil {
		return contract.RunRecord{}, leaderr.ErrNotFound
	}
	return s.deps.Engine.Get(ctx, who(ctx).tenant, contract.RunID(id))
}

func (s *Server) startRun(ctx context.Context, in *startRunInput) (*huma.StreamResponse, error) {
	input, err := s.runRequest(ctx, in.Body)
	if err != nil {
		return nil, s.problemFor(ctx, err)
	}
	live := acceptsEvents(in.Accept)
	var after uint64
	if live {
		// Everything of the run comes after what is there now.
		if after, err = s.deps.Feed.LastSeq(ctx); err == nil {
			err = s.openStream() // before the run begins: a refusal starts nothing
		}
		if err != nil {
			return nil, s.problemFor(ctx, err)
		}
	}
	rec, err := s.deps.Engine.Start(ctx, input)
	if err != nil {
		if live {
			s.closeStream()
		}
		return nil, s.problemFor(ctx, err)
	}
	location := "/v1/runs/" + string(rec.RunID)
	switch {
	case live:
		return s.streaming(feed.Query{Tenant: rec.Tenant, RunID: rec.RunID, UntilRunEnd: true}, after, http.Header{"Location": {location}}), nil
	case in.Wait:
		ctx, cancel := s.untilStop(ctx)
		defer cancel()
		rec, err = s.deps.Engine.Wait(ctx, rec.Tenant, rec.RunID)
		if err != nil && errors.Is(context.Cause(ctx), errStopping) {
			err = fmt.Errorf("%w: %w; ask %s later", leaderr.ErrUnavailable, errStopping, location)
		}
		if err != nil {
			return nil, s.problemFor(ctx, err)
		}
		return answer(http.StatusOK, location, wire.NewRun(rec)), nil
	}
	return answer(http.StatusAccepted, location, wire.RunAccepted{RunID: rec.RunID, ThreadID: rec.ThreadID, Status: rec.Status, TraceID: rec.TraceID}), nil
}

// runRequest checks what the schema cannot.
func (s *Server) runRequest(ctx context.Context, b wire.RunRequest) (runapi.RunInput, error) {
	bad := func(format string, args ...any) (runapi.RunInput, error) {
		return runapi.RunInput{}, fmt.Errorf("%w: "+format, append([]any{leaderr.ErrInvalid}, args...)...)
	}
	if strings.TrimSpace(b.Input) == "" {
		return bad("input is blank")
	}
	if len(b.Input) > runapi.MaxInputBytes {
		return bad("%w: input has %d bytes; want at most %d", contract.ErrTooLarge, len(b.Input), runapi.MaxInputBytes)
	}
	if b.ThreadID != "" {
		if err := contract.ThreadID(b.ThreadID).Validate(); err != nil {
			return bad("%w", err)
		}
	}
	if err := s.knownModel(b.Model); err != nil {
		return runapi.RunInput{}, err
	}
	if len(b.Metadata) > runapi.MaxMetadata {
		return bad("metadata has %d entries; want at most %d", len(b.Metadata), runapi.MaxMetadata)
	}
	for k, v := range b.Metadata {
		if k == "" || len(k) > 128 || len(v) > 4096 {
			return bad("metadata entry %.40q: want a name of 1 to 128 bytes and a value of at most 4096", k)
		}
	}
	for _, tag := range b.Tags {
		if tag == "" || len(tag) > 128 {
			return bad("tag %.40q: want 1 to 128 bytes", tag)
		}
	}
	// Names that nobody has are no fault: definitions come and go (REG-15).
	if len(b.AllowedSubagents) > maxAllowedSubagents {
		return bad("allowed_subagents has %d entries; want at most %d", len(b.AllowedSubagents), maxAllowedSubagents)
	}
	id := who(ctx)
	return runapi.RunInput{
		Tenant: id.tenant, UserID: id.user, UserRole: id.role, Attributes: id.attributes,
		Input: b.Input, ThreadID: contract.ThreadID(b.ThreadID), Model: b.Model,
		MaxConcurrentSubagents: b.MaxConcurrentSubagents, MaxTotalSubagents: b.MaxTotalSubagents,
		SubagentEnabled: b.SubagentEnabled, AllowedSubagents: b.AllowedSubagents, AvailableSkills: b.AvailableSkills, Metadata: b.Metadata, Tags: b.Tags,
	}, nil
}

func (s *Server) knownModel(name string) error {
	if name == "" || s.deps.Models == nil || slices.Contains(s.deps.Models, name) {
		return nil
	}
	return fmt.Errorf("%w: model %.80q is not configured; there are: %s", leaderr.ErrInvalid, name, strings.Join(s.deps.Models, ", "))
}

// maxAllowedSubagents bounds a caller's policy.
const maxAllowedSubagents = 1000

func (s *Server) unknownSubagent(field, name string) error {
	var names []string
	for _, a := range s.deps.Registry.Catalogue() {
		if a.Usable() {
			names = append(names, a.Name)
		}
	}
	return fmt.Errorf("%w: %s: there is no sub-agent %.80q; there are: %s", leaderr.ErrInvalid, field, name, strings.Join(names, ", "))
}

func (s *Server) listRuns(ctx context.Context, in *listRunsInput) (*body[wire.RunPage], error) {
	page, err := s.deps.Engine.List(ctx, runapi.RunQuery{
		Tenant: who(ctx).tenant, ThreadID: contract.ThreadID(in.ThreadID), Status: contract.RunStatus(in.Status), Limit: in.Limit, Cursor: in.Cursor,
	})
	if err != nil {
		return nil, s.problemFor(ctx, err)
	}
	out := wire.RunPage{Runs: make([]wire.Run, 0, len(page.Runs)), NextCursor: page.NextCursor}
	for _, r := range page.Runs {
		out.Runs = append(out.Runs, wire.NewRun(r))
	}
	return &body[wire.RunPage]{out}, nil
}

// answer writes v as JSON from an operation whose answers have several forms.
func answer(status int, location string, v any) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(hctx huma.Context) {
		_, w := humago.Unwrap(hctx)
		w.Header().Set("Content-Type", "application/json")
		if location != "" {
			w.Header().Set("Location", location)
		}
		w.WriteHeader(status)
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		// The status is sent: an error here is the client's connection.
		_ = enc.Encode(v)
	}}
}
