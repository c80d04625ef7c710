package httpapi

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/feed"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

type eventsInput struct {
	ThreadID    string   `query:"thread_id" maxLength:"512"`
	RunID       string   `query:"run_id" maxLength:"64"`
	TaskID      string   `query:"task_id" maxLength:"64"`
	Type        []string `query:"type,explode" doc:"stored types such as subagent.end; repeat it or join them by commas"`
	Attempts    string   `query:"attempts" enum:"newest,all" default:"newest" doc:"with task_id: all shows what superseded attempts of the task told as well"`
	AfterSeq    uint64   `query:"after_seq" doc:"exclusive"`
	Limit       int      `query:"limit" minimum:"1" maximum:"2000" default:"500" doc:"of a page; a stream has none"`
	Accept      string   `header:"Accept" doc:"text/event-stream answers with history and then live"`
	LastEventID string   `header:"Last-Event-ID" maxLength:"64" doc:"of a stream: wins over after_seq"`
}

func (s *Server) registerEvents() {
	reg := s.api.OpenAPI().Components.Schemas
	huma.Register(s.api, huma.Operation{
		OperationID: "list-events", Method: http.MethodGet, Path: "/v1/events", Tags: []string{"events"},
		Summary: "Read events in ascending seq, as a page or as a stream",
		Responses: map[string]*huma.Response{
			"200": {Description: "a page, or a stream of server-sent events", Content: map[string]*huma.MediaType{
				"application/json":  {Schema: ref[wire.EventPage](reg)},
				"text/event-stream": {Schema: eventStreamSchema(reg)},
			}},
		},
	}, s.events)
}

// ref registers the schema of T and returns a reference to it.
func ref[T any](reg huma.Registry) *huma.Schema {
	t := reflect.TypeFor[T]()
	return reg.Schema(t, true, t.Name())
}

// eventStreamSchema describes the data of the events of a stream.
func eventStreamSchema(reg huma.Registry) *huma.Schema {
	return &huma.Schema{
		Type:        huma.TypeString,
		Description: "server-sent events: id is the seq, event the event_type, data an EventRecord; an event \"gap\" has a Gap as data",
		Extensions: map[string]any{
			"x-data": []*huma.Schema{ref[contract.EventRecord](reg), ref[wire.Gap](reg)},
		},
	}
}

func (s *Server) events(ctx context.Context, in *eventsInput) (*huma.StreamResponse, error) {
	q := feed.Query{
		Tenant: who(ctx).tenant, ThreadID: contract.ThreadID(in.ThreadID), RunID: contract.RunID(in.RunID), TaskID: contract.TaskID(in.TaskID),
		AllAttempts: in.Attempts == "all", AfterSeq: in.AfterSeq, Limit: in.Limit,
	}
	// The ids become parts of subjects below: nothing but ids gets there.
	var errs []error
	if q.ThreadID != "" {
		errs = append(errs, q.ThreadID.Validate())
	}
	if q.RunID != "" {
		errs = append(errs, q.RunID.Validate())
	}
	if q.TaskID != "" {
		errs = append(errs, q.TaskID.Validate())
	}
	if err := errors.Join(errs...); err != nil {
		return nil, s.problemFor(ctx, err)
	}
	for _, t := range in.Type {
		for t := range strings.SplitSeq(t, ",") {
			if t = strings.TrimSpace(t); t != "" { // EVT-17: an empty list is no filter
				q.Types = append(q.Types, t)
			}
		}
	}
	if !acceptsEvents(in.Accept) {
		page, err := s.deps.Feed.List(ctx, q)
		if err != nil {
			return nil, s.problemFor(ctx, err)
		}
		return answer(http.StatusOK, "", page), nil
	}
	after := in.AfterSeq
	if id := strings.TrimSpace(in.LastEventID); id != "" {
		n, err := strconv.ParseUint(id, 10, 64)
		if err != nil {
			return nil, s.problemFor(ctx, fmt.Errorf("%w: Last-Event-ID is %.64q; want the seq of an event", leaderr.ErrInvalid, id))
		}
		after = n
	}
	q.UntilRunEnd = q.RunID != "" && q.TaskID == ""
	// Whether there can be a stream is found out while the answer may still be
	// an error.
	over, err := s.deps.Feed.Over(ctx, q, after)
	if err == nil && !over {
		_, err = s.deps.Feed.LastSeq(ctx)
	}
	if err == nil && !over {
		err = s.openStream()
	}
	switch {
	case err != nil:
		return nil, s.problemFor(ctx, err)
	case over:
		// 204 is how the standard tells a reader not to come back.
		return &huma.StreamResponse{Body: func(hctx huma.Context) { hctx.SetStatus(http.StatusNoContent) }}, nil
	}
	return s.streaming(q, after, nil), nil
}

func acceptsEvents(accept string) bool {
	for part := range strings.SplitSeq(accept, ",") {
		if t, _, err := mime.ParseMediaType(strings.TrimSpace(part)); err == nil && t == "text/event-stream" {
			return true
		}
	}
	return false
}

// openStream takes one of the bounded places for streams; streaming gives it back.
func (s *Server) openStream() error {
	s.metrics.open.Inc()
	if s.streams.Add(1) > int64(s.cfg.MaxStreams) {
		s.closeStream()
		return fmt.Errorf("%w: %d event streams are open, which is the limit", leaderr.ErrUnavailable, s.cfg.MaxStreams)
	}
	return nil
}

func (s *Server) closeStream() {
	s.metrics.open.Dec()
	s.streams.Add(-1)
}

// streaming answers with the feed of q, in a place that openStream has taken.
func (s *Server) streaming(q feed.Query, after uint64, header http.Header) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(hctx huma.Context) {
		defer s.closeStream()
		r, w := humago.Unwrap(hctx)
		for k, v := range header {
			w.Header()[k] = v
		}
		s.stream(r.Context(), w, q, after)
	}}
}

func (s *Server) stream(ctx context.Context, w http.ResponseWriter, q feed.Query, after uint64) {
	ctx, cancel := s.untilStop(ctx)
	defer cancel()
	h := w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // nginx would hold events back
	w.WriteHeader(http.StatusOK)
	sw := &sseWriter{w: w, rc: http.NewResponseController(w), timeout: s.cfg.WriteTimeout, pos: after}

	var beat sync.WaitGroup
	beat.Go(func() {
		t := time.NewTicker(s.cfg.KeepAlive)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
				if sw.comment("keep-alive") != nil {
					cancel()
					return
				}
			}
		}
	})
	// A reader of selected types has not seen the run's last event; with its id
	// the reader knows that it is through, and is told so if it comes back.
	q.AtEnd = func(seq uint64) {
		if seq > sw.pos {
			_ = sw.write(fmt.Sprintf("id: %d\n\n", seq))
		}
	}
	err := sw.write("retry: 1000\n: open\n\n")
	if err == nil {
		err = s.deps.Feed.Stream(ctx, q, after, sw.event, sw.gap)
	}
	stopping := errors.Is(context.Cause(ctx), errStopping)
	cancel()
	beat.Wait()
	reason, say := endOf(err, sw.failed, stopping)
	s.metrics.ended.WithLabelValues(reason).Inc()
	l := s.logFor(ctx)
	e := l.Debug()
	switch reason {
	case endSlow, endUnavailable:
		e = l.Warn()
	case endError:
		e = l.Error()
	}
	e.Err(cmp.Or(sw.failed, err)).Str("reason", reason).Uint64("after_seq", sw.pos).Str("tenant", string(q.Tenant)).
		Msg("http: an event stream has ended")
	if say != "" {
		_ = sw.comment(say)
	}
}

// Why streams end, as the metric and the log say it.
const (
	endFinished    = "finished"    // the run has ended
	endLeft        = "left"        // the reader went
	endSlow        = "slow"        // the reader took nothing for the write timeout
	endStopping    = "stopping"    // this server is shutting down
	endUnavailable = "unavailable" // events could not be read
	endError       = "error"
)

// endOf is why a stream ended with err, and what the reader is told as a comment.
// One that takes nothing can be told nothing: its connection is cut, within an
// event maybe, and it comes back with the id of the last whole one.
func endOf(err, failed error, stopping bool) (reason, say string) {
	const back = "; come back with Last-Event-ID"
	switch {
	case errors.Is(failed, os.ErrDeadlineExceeded):
		return endSlow, ""
	case failed != nil:
		return endLeft, ""
	case err == nil:
		return endFinished, "end of the run"
	case stopping:
		return endStopping, errStopping.Error() + back
	case errors.Is(err, context.Canceled):
		return endLeft, ""
	case errors.Is(err, leaderr.ErrUnavailable):
		return endUnavailable, "events cannot be read at the moment" + back
	}
	return endError, "internal error" + back
}

// errWrite: the reader did not take what was written within the deadline, or
// is gone.
var errWrite = errors.New("event stream reader is too slow or gone")

// sseWriter writes server-sent events for two goroutines: the feed and the
// keep-alive.
type sseWriter struct {
	mu      sync.Mutex
	w       http.ResponseWriter
	rc      *http.ResponseController
	timeout time.Duration
	failed  error // of the first write that failed
	// pos is the position of the reader; the feed's goroutine alone uses it.
	pos uint64
}

func (s *sseWriter) write(text string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed != nil {
		return errWrite
	}
	// Without a deadline a reader that stops reading would hold this for ever.
	_ = s.rc.SetWriteDeadline(time.Now().Add(s.timeout))
	_, err := s.w.Write([]byte(text))
	if err == nil {
		err = s.rc.Flush()
	}
	if err != nil {
		s.failed = err
		return fmt.Errorf("%w: %w", errWrite, err)
	}
	return nil
}

func (s *sseWriter) comment(text string) error { return s.write(": " + text + "\n\n") }

func (s *sseWriter) event(rec contract.EventRecord) error {
	return s.data(rec.Seq, rec.EventType, rec)
}

func (s *sseWriter) gap(from, to uint64) error {
	// The id moves the reader to where it goes on. That is back, before the gap,
	// when the gap says that the reader's position never was one.
	next := to
	if from <= s.pos {
		next = from - 1
	}
	return s.data(next, wire.EventGap, wire.Gap{FromSeq: from, ToSeq: to})
}

func (s *sseWriter) data(id uint64, name string, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("event %d: %w", id, err)
	}
	s.pos = id
	// JSON from the encoder has no line breaks, so it is one data line.
	var b bytes.Buffer
	fmt.Fprintf(&b, "id: %d\nevent: %s\ndata: %s\n\n", id, name, body)
	return s.write(b.String())
}
