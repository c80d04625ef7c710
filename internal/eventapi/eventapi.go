// Package eventapi is the request-reply interface to the stored events: the
// messages of the endpoint events.list and a client for it. The event sink
// answers it, because it alone holds the database.
package eventapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Limits of the endpoint.
const (
	// DefaultLimit is the number of events in a page when the request names none.
	DefaultLimit = 500
	// MaxLimit is the largest page.
	MaxLimit = 2000
	// MaxTypes bounds the list of event types in a request.
	MaxTypes = 64
	// MaxWait bounds the wait for a barrier.
	MaxWait = 2 * time.Second
	// MaxRequestBytes bounds an encoded request.
	MaxRequestBytes = 32 << 10
	// MaxReplyBytes is where a page ends even if more would match. One single
	// record that is larger comes alone, as long as the server's payload limit
	// lets it through.
	MaxReplyBytes = 700 << 10
	// RequestTimeout bounds one request of [List], waiting included.
	RequestTimeout = MaxWait + 3*time.Second
)

// Subject returns the subject of the endpoint.
func Subject(n contract.Names) string { return n.Service("events", "list") }

// ListRequest asks for stored events. Empty filters match anything; an empty
// list of types is no filter. The filters apply before the limit.
type ListRequest struct {
	Tenant   contract.Tenant   `json:"tenant,omitempty"`
	ThreadID contract.ThreadID `json:"thread_id,omitempty"`
	RunID    contract.RunID    `json:"run_id,omitempty"`
	TaskID   contract.TaskID   `json:"task_id,omitempty"`
	// Types are stored types, such as subagent.end. A request may call them type
	// as well, as in the HTTP interface.
	Types []string `json:"types,omitempty"`
	// AfterSeq is exclusive.
	AfterSeq uint64 `json:"after_seq,omitempty"`
	// Limit is 1 to [MaxLimit]; 0 takes [DefaultLimit].
	Limit int `json:"limit,omitempty"`
	// BarrierSeq lets the reader see its own writes: the answer waits until
	// everything up to this sequence of the event stream has been processed,
	// at most WaitMS. Whether that was reached shows in LastSeq of the answer.
	BarrierSeq uint64 `json:"barrier_seq,omitempty"`
	// WaitMS is at most [MaxWait]; 0 takes MaxWait.
	WaitMS int64 `json:"wait_ms,omitempty"`
}

// Validate checks a request.
func (r ListRequest) Validate() error {
	var errs []error
	if r.Tenant != "" {
		errs = append(errs, r.Tenant.Validate())
	}
	if r.ThreadID != "" {
		errs = append(errs, r.ThreadID.Validate())
	}
	if r.RunID != "" {
		errs = append(errs, r.RunID.Validate())
	}
	if r.TaskID != "" {
		errs = append(errs, r.TaskID.Validate())
	}
	if len(r.Types) > MaxTypes {
		errs = append(errs, fmt.Errorf("types has %d entries; want at most %d", len(r.Types), MaxTypes))
	}
	if r.Limit < 0 || r.Limit > MaxLimit {
		errs = append(errs, fmt.Errorf("limit is %d; want 1 to %d, or 0 for %d", r.Limit, MaxLimit, DefaultLimit))
	}
	if r.WaitMS < 0 || r.WaitMS > MaxWait.Milliseconds() {
		errs = append(errs, fmt.Errorf("wait_ms is %d; want 0 to %d", r.WaitMS, MaxWait.Milliseconds()))
	}
	return errors.Join(errs...)
}

// Wait is how long to wait for the barrier.
func (r ListRequest) Wait() time.Duration {
	if r.WaitMS == 0 {
		return MaxWait
	}
	return time.Duration(r.WaitMS) * time.Millisecond
}

// ListResponse is a page of events in ascending sequence.
type ListResponse struct {
	Events []contract.EventRecord `json:"events"`
	// NextAfterSeq is the after_seq of the next page.
	NextAfterSeq uint64 `json:"next_after_seq"`
	HasMore      bool   `json:"has_more"`
	// LastSeq is the sequence up to which the stream has been processed.
	LastSeq uint64 `json:"last_seq"`
	// PrunedSeq is the sequence up to which events were deleted because of their
	// age.
	PrunedSeq uint64 `json:"pruned_seq,omitempty"`
	Error     *Error `json:"error,omitempty"`
}

// Error is why a request was not answered.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// The codes of errors, as in the HTTP interface.
const (
	// CodeInvalid: the request is wrong and will never work.
	CodeInvalid = "invalid_request"
	// CodeUnavailable: the store cannot answer now. Try again later.
	CodeUnavailable = "unavailable"
)

func (e *Error) Error() string { return "event store: " + e.Code + ": " + e.Message }

// ErrUnavailable is returned when no sink answers or its database cannot be
// read at the moment.
var ErrUnavailable = errors.New("event store is unavailable")

// typeFilter is the filter of the HTTP interface, type: one stored type, several
// joined by commas, or a list. Here it may be used in place of types.
type typeFilter []string

func (f *typeFilter) UnmarshalJSON(b []byte) error {
	var list []string
	if len(b) > 0 && b[0] == '"' {
		list = []string{""}
		if err := json.Unmarshal(b, &list[0]); err != nil {
			return err
		}
	} else if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	for _, joined := range list {
		for t := range strings.SplitSeq(joined, ",") {
			if t = strings.TrimSpace(t); t != "" {
				*f = append(*f, t)
			}
		}
	}
	return nil
}

// DecodeRequest reads and validates a request. Unknown fields are ignored.
func DecodeRequest(b []byte) (ListRequest, error) {
	var r ListRequest
	if len(b) > MaxRequestBytes {
		return r, fmt.Errorf("request has %d bytes; want at most %d", len(b), MaxRequestBytes)
	}
	if err := contract.CheckDepth(b, contract.MaxDepth); err != nil {
		return r, err
	}
	if len(b) > 0 {
		in := struct {
			*ListRequest
			Type typeFilter `json:"type"`
		}{ListRequest: &r}
		if err := json.Unmarshal(b, &in); err != nil {
			return r, fmt.Errorf("request is not the JSON that events.list takes: %w", err)
		}
		r.Types = append(r.Types, in.Type...)
	}
	if err := r.Validate(); err != nil {
		return r, err
	}
	if r.Limit == 0 {
		r.Limit = DefaultLimit
	}
	return r, nil
}

// List asks the event sink for a page. It waits at most [RequestTimeout] or
// until ctx is done. An error that says "try again" is [ErrUnavailable]; one
// that blames the request is an [*Error] with the code [CodeInvalid].
func List(ctx context.Context, conn *bus.Conn, req ListRequest) (ListResponse, error) {
	if err := req.Validate(); err != nil {
		return ListResponse{}, &Error{Code: CodeInvalid, Message: err.Error()}
	}
	body, err := json.Marshal(req)
	if err != nil {
		return ListResponse{}, fmt.Errorf("events.list: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	msg, err := conn.NC.RequestWithContext(ctx, Subject(conn.Names), body)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return ListResponse{}, fmt.Errorf("%w: no event sink answers on %s; is one running?", ErrUnavailable, Subject(conn.Names))
	case err != nil:
		return ListResponse{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	var resp ListResponse
	if err := json.Unmarshal(msg.Data, &resp); err != nil {
		return ListResponse{}, fmt.Errorf("%w: answer of %s: %w", ErrUnavailable, Subject(conn.Names), err)
	}
	if resp.Error != nil {
		if resp.Error.Code == CodeUnavailable {
			return ListResponse{}, fmt.Errorf("%w: %s", ErrUnavailable, resp.Error.Message)
		}
		return ListResponse{}, resp.Error
	}
	return resp, nil
}
