package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"time"

	"github.com/tmaxmax/go-sse"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

// ErrStop may be returned by the function of a stream to end it in order.
var ErrStop = errors.New("stop the stream")

// maxEvent bounds one event of a stream.
const maxEvent = 8 << 20

// Stream calls each for the events after the seq after, in order and each
// once: first what is there, then what comes. When the connection breaks it
// connects again and goes on where it was; it gives up when that has not worked
// for two minutes.
//
// It returns nil after ErrStop from each and, when q names a run and no task,
// at the end of that run; ctx's error when ctx is done; any other error of each
// as it is; and an *Error when the server refuses.
func (c *Client) Stream(ctx context.Context, q EventQuery, after uint64, each func(contract.EventRecord) error) error {
	s := &stream{c: c, q: q, pos: after, each: each}
	pause, lastGood := c.firstPause, time.Now()
	for {
		progress, err := s.read(ctx)
		var stop *finalError
		switch {
		case errors.As(err, &stop):
			return stop.err
		case ctx.Err() != nil:
			return ctx.Err()
		}
		if progress {
			pause, lastGood = c.firstPause, time.Now()
		}
		if time.Since(lastGood) > c.outage {
			return fmt.Errorf("event stream: no connection for %s: %w", c.outage, err)
		}
		if q.OnRetry != nil {
			q.OnRetry(err)
		}
		d := pause
		var refused *Error
		if errors.As(err, &refused) && refused.RetryAfter > d {
			d = min(refused.RetryAfter, c.maxPause)
		}
		t := time.NewTimer(d)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		}
		pause = min(2*pause, c.maxPause)
	}
}

// finalError ends a stream: with err, which may be nil.
type finalError struct{ err error }

func (f *finalError) Error() string { return fmt.Sprint("final: ", f.err) }

var errClosed = errors.New("the server closed the stream")

type stream struct {
	c    *Client
	q    EventQuery
	pos  uint64
	each func(contract.EventRecord) error
}

// read reads one connection until it ends. It reports whether it got as far as
// an answer; its error is a *finalError when there is nothing to try again.
func (s *stream) read(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	req, err := s.c.request(ctx, http.MethodGet, "/v1/events", s.q.values(0), nil)
	if err != nil {
		return false, &finalError{err}
	}
	req.Header.Set("Accept", "text/event-stream")
	// The position is ours, not that of the last connection: a connection that
	// breaks before its first event must not lose it.
	req.Header.Set("Last-Event-ID", strconv.FormatUint(s.pos, 10))
	// A connection may be dead without saying so. The server sends a comment
	// every 15 seconds; silence for much longer means that nobody is there.
	watch := time.AfterFunc(s.c.idle, func() { cancel(fmt.Errorf("silence for %s", s.c.idle)) })
	defer watch.Stop()
	resp, err := s.c.http.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNoContent: // the run has ended before pos
		return true, &finalError{nil}
	case resp.StatusCode >= 500, resp.StatusCode == http.StatusTooManyRequests, resp.StatusCode == http.StatusRequestTimeout:
		return false, problem(resp)
	case resp.StatusCode != http.StatusOK:
		return false, &finalError{problem(resp)}
	}
	if t, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); t != "text/event-stream" {
		return false, &finalError{fmt.Errorf("event stream: the answer is %q; is this the address of a lead?", resp.Header.Get("Content-Type"))}
	}
	body := &watched{r: resp.Body, on: func() { watch.Reset(s.c.idle) }}
	for ev, err := range sse.Read(body, &sse.ReadConfig{MaxEventSize: maxEvent}) {
		if err != nil {
			return true, fmt.Errorf("event stream: %w", err)
		}
		if err := s.take(ev); err != nil {
			return true, err
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		return true, cause
	}
	return true, errClosed
}

func (s *stream) take(ev sse.Event) error {
	id, err := strconv.ParseUint(ev.LastEventID, 10, 64)
	if err != nil {
		return nil // a comment in disguise: without a position it is none of ours
	}
	switch {
	case ev.Type == wire.EventGap:
		var g wire.Gap
		if err := json.Unmarshal([]byte(ev.Data), &g); err != nil {
			return &finalError{fmt.Errorf("event stream: gap: %w", err)}
		}
		s.pos = id // may go back, see [wire.Gap]
		if s.q.OnGap != nil {
			s.q.OnGap(g)
		}
		return nil
	case ev.Data == "":
		s.pos = max(s.pos, id)
		return nil
	case id <= s.pos:
		return nil
	}
	var rec contract.EventRecord
	if err := json.Unmarshal([]byte(ev.Data), &rec); err != nil {
		return &finalError{fmt.Errorf("event stream: event %d: %w", id, err)}
	}
	if err := s.each(rec); err != nil {
		if errors.Is(err, ErrStop) {
			err = nil
		}
		return &finalError{err}
	}
	s.pos = id
	if s.q.RunID != "" && s.q.TaskID == "" && rec.RunID == s.q.RunID {
		switch rec.EventType {
		case contract.RecordRunCompleted, contract.RecordRunFailed, contract.RecordRunCancelled:
			return &finalError{nil}
		}
	}
	return nil
}

// watched tells of every read that brought something.
type watched struct {
	r  io.Reader
	on func()
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.r.Read(p)
	if n > 0 {
		w.on()
	}
	return n, err
}

// WithPauses returns a copy of the client whose streams wait between first and
// longest before they connect again, instead of 200 ms to 5 s.
func (c *Client) WithPauses(first, longest time.Duration) *Client {
	d := *c
	d.firstPause, d.maxPause = first, longest
	return &d
}
