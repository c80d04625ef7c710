package eventsink

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/nats-io/nats.go/micro"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agentapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/endpoint"
	"github.com/herdgate/herdgate/internal/eventapi"
)

// Bounds of the endpoint.
const (
	// maxRequests is how many requests are answered at the same time, those
	// that wait for a barrier included.
	maxRequests = 64
	// replyRoom is left in a reply for what is not an event.
	replyRoom = 4 << 10
)

// api answers events.list and the endpoints of sub-agent definitions.
type api struct {
	bus      *bus.Conn
	store    Store
	shared   bool // others move the cursor as well
	progress *progress
	log      zerolog.Logger

	slots      chan struct{}
	agentSlots chan struct{} // so that readers of events do not take them

	mu      sync.Mutex
	service micro.Service // nil before start
	stopped bool
	wg      sync.WaitGroup
}

func newAPI(conn *bus.Conn, st Store, shared bool, p *progress, log zerolog.Logger) *api {
	return &api{bus: conn, store: st, shared: shared, progress: p, log: log, slots: make(chan struct{}, maxRequests), agentSlots: make(chan struct{}, maxRequests)}
}

// start announces the endpoints. Starting again does nothing. Requests under way
// end early when ctx is done.
func (a *api) start(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.service != nil {
		return nil
	}
	svc, err := micro.AddService(a.bus.NC, micro.Config{
		Name: "herdgate-eventsink", Version: "1.0.0", Description: "Stored events of tasks and runs, and sub-agent definitions.",
	})
	if err != nil {
		return fmt.Errorf("announce events.list: %w", err)
	}
	subject := eventapi.Subject(a.bus.Names)
	handle := endpoint.Handler(a.log, func(r micro.Request) {
		a.handle(r, a.slots, a.refuse, func() { a.answer(ctx, r) })
	})
	described, err := endpoint.Describe("events.list", "A page of stored events in ascending seq, by thread, run, task and type.")
	if err == nil {
		err = errors.Join(
			svc.AddEndpoint("list", handle, micro.WithEndpointSubject(subject), described),
			svc.AddEndpoint("list-tenant", handle, micro.WithEndpointSubject(endpoint.Bound(subject, endpoint.AnyTenant)), described),
			a.addAgents(ctx, svc),
		)
	}
	if err == nil {
		// Whoever hears that the sink is ready is answered.
		err = a.bus.NC.FlushTimeout(bus.WriteTimeout)
	}
	if err != nil {
		_ = svc.Stop() // the first error is the one that counts
		return fmt.Errorf("announce the endpoints: %w", err)
	}
	a.service = svc
	a.wg.Go(func() { a.greetAgents(ctx) })
	return nil
}

// stop takes no more requests and waits for those under way.
func (a *api) stop() {
	a.mu.Lock()
	a.stopped = true
	svc := a.service
	a.mu.Unlock()
	if svc != nil {
		if err := svc.Stop(); err != nil {
			a.log.Debug().Err(err).Msg("stop the endpoints")
		}
	}
	a.wg.Wait()
}

// handle runs on the subscription's goroutine, so it must not wait.
func (a *api) handle(req micro.Request, slots chan struct{}, refuse func(req micro.Request, code, message string), answer func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stopped {
		refuse(req, eventapi.CodeUnavailable, "the event sink is stopping")
		return
	}
	select {
	case slots <- struct{}{}:
	default:
		refuse(req, eventapi.CodeUnavailable, fmt.Sprintf("%d requests are being answered already; try again", maxRequests))
		return
	}
	a.wg.Go(func() {
		defer func() { <-slots }()
		answer()
	})
}

func (a *api) answer(ctx context.Context, req micro.Request) {
	r, err := eventapi.DecodeRequest(req.Data())
	if err == nil {
		r.Tenant, err = endpoint.TenantOf(eventapi.Subject(a.bus.Names), req.Subject(), r.Tenant)
	}
	if err != nil {
		a.refuse(req, eventapi.CodeInvalid, err.Error())
		return
	}
	ctx, cancel := context.WithTimeout(ctx, eventapi.RequestTimeout)
	defer cancel()
	if a.shared && r.BarrierSeq > a.progress.current() {
		// What another sink has told of may have been lost on the way.
		if seq, err := a.store.LastSeq(ctx); err == nil {
			a.progress.advance(seq)
		}
	}
	if r.BarrierSeq > 0 {
		wait, done := context.WithTimeout(ctx, r.Wait())
		a.progress.wait(wait, r.BarrierSeq) // how far it got is in the answer
		done()
	}
	// Before reading: what is listed is at least that new.
	last := a.progress.current()
	events, more, err := a.store.List(ctx, Query{
		Tenant: r.Tenant, ThreadID: r.ThreadID, RunID: r.RunID, TaskID: r.TaskID, Types: r.Types,
		AfterSeq: r.AfterSeq, Limit: r.Limit, MaxBytes: eventapi.MaxReplyBytes,
	})
	if err != nil {
		a.log.Warn().Err(err).Msg("list events")
		a.refuse(req, eventapi.CodeUnavailable, err.Error())
		return
	}
	pruned, err := a.store.Pruned(ctx)
	if err != nil {
		a.log.Warn().Err(err).Msg("list events")
		a.refuse(req, eventapi.CodeUnavailable, err.Error())
		return
	}
	page := page{Events: []json.RawMessage{}, NextAfterSeq: r.AfterSeq, HasMore: more, LastSeq: last, PrunedSeq: pruned}
	size := 0
	for _, e := range events {
		b, err := encode(e)
		if err != nil {
			a.log.Error().Err(err).Uint64("seq", e.Seq).Msg("a stored event is damaged")
			a.refuse(req, eventapi.CodeUnavailable, fmt.Sprintf("stored event at %d is damaged: %v", e.Seq, err))
			return
		}
		if size += len(b) + 1; size > eventapi.MaxReplyBytes-replyRoom && len(page.Events) > 0 {
			page.HasMore = true
			break
		}
		page.Events = append(page.Events, b)
		page.NextAfterSeq = e.Seq
	}
	a.respond(req, page)
}

// page is an eventapi.ListResponse whose events are encoded already.
type page struct {
	Events       []json.RawMessage `json:"events"`
	NextAfterSeq uint64            `json:"next_after_seq"`
	HasMore      bool              `json:"has_more"`
	LastSeq      uint64            `json:"last_seq"`
	PrunedSeq    uint64            `json:"pruned_seq,omitempty"`
	Error        *eventapi.Error   `json:"error,omitempty"`
}

// refuse answers with the reason in the body and, as all endpoints do, in the
// headers that micro services have for it.
func (a *api) refuse(req micro.Request, code, message string) {
	message = clip(message, 2000)
	a.respond(req, page{Events: []json.RawMessage{}, LastSeq: a.progress.current(), Error: &eventapi.Error{Code: code, Message: message}}, refusal(code, message))
}

// statuses are the codes of refusals as HTTP has them.
var statuses = map[string]string{eventapi.CodeUnavailable: "503", agentapi.CodeConflict: "409"}

// refusal puts the reason into the headers. Not req.Error: that keeps the error for
// the handler, which has returned.
func refusal(code, message string) micro.RespondOpt {
	header := strings.NewReplacer("\r", " ", "\n", " ").Replace(message)
	return micro.WithHeaders(micro.Headers{micro.ErrorHeader: {header}, micro.ErrorCodeHeader: {cmp.Or(statuses[code], "400")}})
}

func (a *api) respond(req micro.Request, answer any, opts ...micro.RespondOpt) {
	b, err := encode(answer)
	if err == nil {
		err = req.Respond(b, opts...)
	}
	if err != nil {
		a.log.Warn().Err(err).Str("endpoint", req.Subject()).Int("bytes", len(b)).Msg("answer a request")
	}
}

// encode writes JSON as it is: the usual escaping of "<" would make a page up
// to six times larger than its events.
func encode(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
