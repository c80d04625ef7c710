package httpapi

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/agents"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

type subagentInput struct {
	Name   string `path:"name" maxLength:"128"`
	Source string `query:"source" enum:"builtin,config,file,managed" doc:"the definition of this source, also where another one has the name"`
}

type putSubagentInput struct {
	Name        string `path:"name" maxLength:"128"`
	IfMatch     string `header:"If-Match" doc:"the ETag that was seen; or *, for any"`
	IfNoneMatch string `header:"If-None-Match" doc:"*: only if there is none yet"`
	Body        wire.SubagentRequest
}

type deleteSubagentInput struct {
	Name    string `path:"name" maxLength:"128"`
	IfMatch string `header:"If-Match" doc:"the ETag that was seen; or *, for any"`
}

type subagentOutput struct {
	Status int
	ETag   string `header:"ETag"`
	Body   wire.Subagent
}

func (s *Server) registerSubagents() {
	huma.Register(s.api, huma.Operation{
		OperationID: "list-subagents", Method: http.MethodGet, Path: "/v1/subagents", Tags: []string{"subagents"},
		Summary: "List the sub-agent types, built-in ones first; administrators also see those that cannot be used",
	}, func(ctx context.Context, _ *struct{}) (*body[[]wire.Subagent], error) {
		list := []wire.Subagent{}
		for _, a := range s.deps.Registry.Catalogue() {
			if a.Usable() || who(ctx).admin {
				a.SystemPrompt = ""
				list = append(list, forReader(ctx, a))
			}
		}
		return &body[[]wire.Subagent]{list}, nil
	})
	huma.Register(s.api, huma.Operation{
		OperationID: "get-subagent", Method: http.MethodGet, Path: "/v1/subagents/{name}", Tags: []string{"subagents"}, Summary: "Show a sub-agent type",
	}, func(ctx context.Context, in *subagentInput) (*subagentOutput, error) {
		a, err := s.subagent(ctx, in.Name, in.Source)
		if err != nil {
			return nil, s.problemFor(ctx, err)
		}
		return &subagentOutput{Status: http.StatusOK, ETag: etag(a.Revision), Body: forReader(ctx, a)}, nil
	})
	huma.Register(s.api, huma.Operation{
		OperationID: "put-subagent", Method: http.MethodPut, Path: "/v1/subagents/{name}", Tags: []string{"subagents"},
		Summary: "Make or change a managed sub-agent type (administrators)", BodyReadTimeout: -1, MaxBodyBytes: -1,
		Responses: map[string]*huma.Response{"201": {Description: "the type was made"}},
	}, s.putSubagent)
	huma.Register(s.api, huma.Operation{
		OperationID: "delete-subagent", Method: http.MethodDelete, Path: "/v1/subagents/{name}", Tags: []string{"subagents"},
		Summary: "Delete a managed sub-agent type (administrators)", DefaultStatus: http.StatusNoContent,
	}, func(ctx context.Context, in *deleteSubagentInput) (*struct{}, error) {
		cond, err := condition(in.IfMatch, "")
		if err == nil {
			err = s.administrator(ctx)
		}
		if err == nil {
			err = s.deps.Agents.Delete(ctx, in.Name, cond)
		}
		if err != nil {
			return nil, s.problemFor(ctx, err)
		}
		return nil, nil
	})
}

// forReader leaves out what only administrators may see.
func forReader(ctx context.Context, a wire.Subagent) wire.Subagent {
	if !who(ctx).admin {
		a.SystemPrompt, a.Path = "", ""
	}
	return a
}

// subagent finds a definition by name, and by source if one is given. A managed
// one is read from the store: what is shown is what a change is compared with.
func (s *Server) subagent(ctx context.Context, name, source string) (wire.Subagent, error) {
	var owner wire.Subagent
	for _, a := range s.deps.Registry.Catalogue() {
		if a.Name != name || !a.Usable() && !who(ctx).admin {
			continue
		}
		if a.Usable() {
			owner = a
		}
		if a.Source != string(subagent.OriginManaged) && (a.Source == source || source == "" && a.Usable()) {
			return a, nil
		}
	}
	if source != "" && source != string(subagent.OriginManaged) || s.deps.Agents == nil || !who(ctx).admin {
		if owner.Name != "" && (source == "" || source == owner.Source) {
			return owner, nil
		}
		return wire.Subagent{}, leaderr.ErrNotFound
	}
	stored, err := s.deps.Agents.Get(ctx, name)
	if err != nil {
		return wire.Subagent{}, err
	}
	return s.managed(stored), nil
}

// managed shows a definition as it is stored, without overrides: what an
// administrator reads, changes and puts back must not take them in.
func (s *Server) managed(stored subagent.Stored) wire.Subagent {
	shadow := ""
	for _, a := range s.deps.Registry.Catalogue() {
		if a.Name == stored.Name && a.Usable() && a.Source != string(subagent.OriginManaged) {
			shadow = a.Source
		}
	}
	if _, ok := s.deps.Registry.Resolve(stored.Name); !ok && stored.Name == subagent.Bash {
		shadow = string(subagent.OriginBuiltin) // hidden, and the owner all the same
	}
	return fromEntry(subagent.Entry{
		Definition: stored.Definition(), DisplayName: stored.DisplayName, Enabled: stored.Enabled, ShadowedBy: subagent.Origin(shadow), Revision: stored.Revision,
	})
}

func (s *Server) putSubagent(ctx context.Context, in *putSubagentInput) (*subagentOutput, error) {
	b := in.Body
	cond, err := condition(in.IfMatch, in.IfNoneMatch)
	if err == nil {
		err = s.administrator(ctx)
	}
	if err == nil && b.Model != subagent.InheritModel {
		err = s.knownModel(b.Model)
	}
	if err != nil {
		return nil, s.problemFor(ctx, err)
	}
	m := subagent.Managed{
		Name: in.Name, Description: b.Description, SystemPrompt: b.SystemPrompt, Tools: b.Tools, DisallowedTools: b.DisallowedTools, Skills: b.Skills,
		Model: b.Model, Pool: contract.Pool(b.Pool), Network: b.Network, Enabled: true,
	}
	if b.DisplayName != nil {
		m.DisplayName = *b.DisplayName
	}
	if b.MaxTurns != nil {
		m.MaxTurns = *b.MaxTurns
	}
	if b.TimeoutSeconds != nil {
		m.TimeoutSeconds = *b.TimeoutSeconds
	}
	if b.Enabled != nil {
		m.Enabled = *b.Enabled
	}
	stored, created, err := s.deps.Agents.Put(ctx, m, cond)
	if err != nil {
		return nil, s.problemFor(ctx, err)
	}
	l := s.logFor(ctx)
	l.Info().Str("name", stored.Name).Uint64("revision", stored.Revision).Str("user", who(ctx).user).Msg("http: a managed sub-agent definition was stored")
	out := &subagentOutput{Status: http.StatusOK, ETag: etag(stored.Revision), Body: s.managed(stored)}
	if created {
		out.Status = http.StatusCreated
	}
	return out, nil
}

// administrator refuses callers without the role, and leads without a store.
func (s *Server) administrator(ctx context.Context) error {
	switch {
	case !who(ctx).admin:
		return newProblem(http.StatusForbidden, wire.CodeForbidden, "the administrator role is needed: sub-agent types are the whole deployment's")
	case s.deps.Agents == nil:
		return fmt.Errorf("%w: this lead has no store of managed definitions", leaderr.ErrUnavailable)
	}
	return nil
}

func etag(revision uint64) string {
	if revision == 0 {
		return ""
	}
	return strconv.Quote(strconv.FormatUint(revision, 10))
}

// condition reads the headers that say which state a change expects.
func condition(match, noneMatch string) (agents.Condition, error) {
	match, noneMatch = strings.TrimSpace(match), strings.TrimSpace(noneMatch)
	bad := func(format string, args ...any) (agents.Condition, error) {
		return agents.Condition{}, fmt.Errorf("%w: "+format, append([]any{leaderr.ErrInvalid}, args...)...)
	}
	switch {
	case match != "" && noneMatch != "":
		return bad("If-Match and If-None-Match exclude each other")
	case noneMatch == "*":
		return agents.Condition{New: true}, nil
	case noneMatch != "":
		return bad("If-None-Match is %.80q; want *", noneMatch)
	case match == "":
		return agents.Condition{}, nil
	case match == "*":
		return agents.Condition{Any: true}, nil
	}
	text, err := strconv.Unquote(match)
	n, numErr := strconv.ParseUint(text, 10, 64)
	if err != nil || numErr != nil || n == 0 || !strings.HasPrefix(match, `"`) {
		return bad(`If-Match is %.80q; want * or one ETag of this type, such as "12" in its quotes`, match)
	}
	return agents.Condition{Revision: &n}, nil
}
