package eventsink

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go/micro"

	"github.com/herdgate/herdgate/internal/agentapi"
	"github.com/herdgate/herdgate/internal/endpoint"
	"github.com/herdgate/herdgate/internal/subagent"
)

// addAgents adds the endpoints of sub-agent definitions to the service.
func (a *api) addAgents(ctx context.Context, svc micro.Service) error {
	n := a.bus.Names
	var errs []error
	add := func(name, subject, description string, answer func(context.Context, []byte) any) {
		described, err := endpoint.Describe("agents."+name, description)
		if err != nil {
			errs = append(errs, err)
			return
		}
		refuse := func(req micro.Request, code, message string) {
			refused := &agentapi.Refusal{Code: code, Message: message}
			if name == "list" {
				a.respond(req, agentapi.AgentsPage{Agents: []agentapi.Agent{}, Error: refused}, refusal(code, message))
				return
			}
			a.respond(req, agentapi.AgentChanged{Error: refused}, refusal(code, message))
		}
		errs = append(errs, svc.AddEndpoint("agents-"+name, endpoint.Handler(a.log, func(r micro.Request) {
			a.handle(r, a.agentSlots, refuse, func() {
				ctx, cancel := context.WithTimeout(ctx, agentapi.RequestTimeout)
				defer cancel()
				a.respondAgents(r, answer(ctx, r.Data()))
			})
		}), micro.WithEndpointSubject(subject), described))
	}
	add("list", agentapi.ListSubject(n), "A page of managed sub-agent definitions, by name; for services.", a.listAgents)
	add("put", agentapi.PutSubject(n), "Stores a managed sub-agent definition in the place of a revision; for services.", a.putAgent)
	add("delete", agentapi.DeleteSubject(n), "Removes a revision of a managed sub-agent definition; for services.", a.deleteAgent)
	return errors.Join(errs...)
}

// respondAgents answers; why not stands in the headers as well.
func (a *api) respondAgents(req micro.Request, answer any) {
	var refused *agentapi.Refusal
	switch answer := answer.(type) {
	case agentapi.AgentsPage:
		refused = answer.Error
	case agentapi.AgentChanged:
		refused = answer.Error
	}
	if refused == nil {
		a.respond(req, answer)
		return
	}
	a.respond(req, answer, refusal(refused.Code, refused.Message))
}

func noAgents(code, message string) agentapi.AgentsPage {
	return agentapi.AgentsPage{Agents: []agentapi.Agent{}, Error: &agentapi.Refusal{Code: code, Message: clip(message, 2000)}}
}

func (a *api) listAgents(ctx context.Context, data []byte) any {
	req, err := agentapi.Decode[agentapi.AgentsRequest](data)
	if err != nil {
		return noAgents(agentapi.CodeInvalid, err.Error())
	}
	q := AgentQuery{Name: req.Name, AfterName: req.AfterName, Limit: agentapi.MaxPage, MaxBytes: min(agentapi.MaxPageBytes, int(a.bus.NC.MaxPayload())/2)}
	if req.UnlessRevision > 0 {
		// Most of the time nothing has changed, and one row tells.
		q.Limit = 1
	}
	list, err := a.store.Agents(ctx, q)
	if err == nil && req.UnlessRevision > 0 && list.Revision != req.UnlessRevision {
		q.Limit = agentapi.MaxPage
		list, err = a.store.Agents(ctx, q)
	}
	if err != nil {
		if !errors.Is(err, context.Canceled) { // as when the sink stops
			a.log.Warn().Err(err).Msg("list sub-agent definitions")
		}
		return noAgents(agentapi.CodeUnavailable, err.Error())
	}
	page := agentapi.AgentsPage{Agents: []agentapi.Agent{}, Revision: list.Revision}
	if req.UnlessRevision == list.Revision {
		page.Unchanged = true
		return page
	}
	page.Agents, page.HasMore = append(page.Agents, list.Agents...), list.More
	return page
}

func (a *api) putAgent(ctx context.Context, data []byte) any {
	req, err := agentapi.Decode[agentapi.AgentPut](data)
	if err == nil {
		err = a.checkAgent(req)
	}
	if err != nil {
		return changedAgents(0, fmt.Errorf("%w: %w", errRequest, err))
	}
	revision, err := a.store.PutAgent(ctx, req.Name, req.Definition, req.Expect)
	return a.told(req.Name, revision, err)
}

// checkAgent keeps out what no lead could read.
func (a *api) checkAgent(req agentapi.AgentPut) error {
	if most := int(a.bus.NC.MaxPayload()) - agentapi.Room; len(req.Definition) > most {
		return fmt.Errorf("definition has %d bytes; want at most %d, which is what the NATS server's max_payload leaves", len(req.Definition), most)
	}
	m, err := subagent.DecodeManaged(req.Definition)
	if err == nil && m.Name != req.Name {
		err = fmt.Errorf("definition has the name %q; want %q", m.Name, req.Name)
	}
	return err
}

func (a *api) deleteAgent(ctx context.Context, data []byte) any {
	req, err := agentapi.Decode[agentapi.AgentDelete](data)
	if err != nil {
		return changedAgents(0, fmt.Errorf("%w: %w", errRequest, err))
	}
	revision, err := a.store.DeleteAgent(ctx, req.Name, req.Expect)
	return a.told(req.Name, revision, err)
}

var errRequest = errors.New("invalid request")

// told answers a change, and tells the leads of one that was made.
func (a *api) told(name string, revision uint64, err error) any {
	switch {
	case err == nil:
		a.log.Info().Str("name", name).Uint64("revision", revision).Msg("a managed sub-agent definition was changed")
		a.tellAgents(revision)
	case !errors.Is(err, ErrStale) && !errors.Is(err, ErrRejected):
		a.log.Warn().Err(err).Str("name", name).Msg("a managed sub-agent definition was not changed, as far as is known")
	}
	return changedAgents(revision, err)
}

func changedAgents(revision uint64, err error) agentapi.AgentChanged {
	if err == nil {
		return agentapi.AgentChanged{Revision: revision}
	}
	code := agentapi.CodeUnavailable
	switch {
	case errors.Is(err, ErrStale):
		code = agentapi.CodeConflict
	case errors.Is(err, errRequest), errors.Is(err, ErrRejected):
		code = agentapi.CodeInvalid
	}
	return agentapi.AgentChanged{Error: &agentapi.Refusal{Code: code, Message: clip(err.Error(), 2000)}}
}

// tellAgents tells the leads that the definitions have a revision. A notice that is
// lost costs them the time until they ask the next time.
func (a *api) tellAgents(revision uint64) {
	if err := a.bus.NC.Publish(agentapi.ChangedSubject(a.bus.Names), strconv.AppendUint(nil, revision, 10)); err != nil {
		a.log.Debug().Err(err).Msg("tell leads of a change of sub-agent definitions")
	}
}

// greetAgents tells leads that were not answered until now that they are.
func (a *api) greetAgents(ctx context.Context) {
	list, err := a.store.Agents(ctx, AgentQuery{Limit: 1})
	if err != nil {
		if !errors.Is(err, context.Canceled) {
			a.log.Warn().Err(err).Msg("revision of the sub-agent definitions")
		}
		return
	}
	a.tellAgents(list.Revision)
}
