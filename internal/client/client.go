// Package client talks to a lead over HTTP: everything in its interface, and
// event streams that survive a broken connection.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
)

const (
	// callTimeout bounds a call whose context has no deadline.
	callTimeout = 30 * time.Second
	// maxAnswer bounds an answer; a page of tasks or events stays far below.
	maxAnswer = 64 << 20
)

// Error is an answer of the server that is not a success.
type Error struct {
	// Status is the HTTP status.
	Status int
	// Code is the stable code, such as "queue_full"; empty when the answer did
	// not come from a lead, but from something in between.
	Code   string
	Detail string
	// RetryAfter is how long the server asks to wait; 0 when it does not say.
	RetryAfter time.Duration
	// FinishedStatus is set with the code "already_finished".
	FinishedStatus string
	// Faults lists what is wrong with the request, where the server knows.
	Faults []wire.ProblemFault
}

// Error tells the status, the code and the detail.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "server answered %d", e.Status)
	if e.Code != "" {
		b.WriteString(" " + e.Code)
	}
	if e.Detail != "" {
		b.WriteString(": " + e.Detail)
	}
	for _, f := range e.Faults {
		fmt.Fprintf(&b, "; %s: %s", f.Location, f.Message)
	}
	return b.String()
}

// Client is safe for concurrent use.
type Client struct {
	base  *url.URL
	token string
	http  *http.Client
	// timing of streams
	idle, firstPause, maxPause, outage time.Duration
}

// New returns a client for the lead at baseURL, such as http://127.0.0.1:8484.
// The token may be empty. A nil hc takes a client of its own; one that is given
// must not have a Timeout if streams are read, because it would cut them.
func New(baseURL, token string, hc *http.Client) (*Client, error) {
	u, err := url.Parse(baseURL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("server address %q: want http://host:port or https://host:port", baseURL)
	}
	if strings.ContainsAny(token, "\r\n\x00") {
		return nil, errors.New("the token holds a line break")
	}
	if hc == nil {
		hc = &http.Client{}
	}
	u.Path = strings.TrimSuffix(u.Path, "/")
	return &Client{base: u, token: token, http: hc, idle: 45 * time.Second, firstPause: 200 * time.Millisecond, maxPause: 5 * time.Second, outage: 2 * time.Minute}, nil
}

// BaseURL is the address that the client was made with.
func (c *Client) BaseURL() string { return c.base.String() }

// StartRun starts a run and returns as soon as it is accepted.
func (c *Client) StartRun(ctx context.Context, req wire.RunRequest) (wire.RunAccepted, error) {
	return call[wire.RunAccepted](ctx, c, http.MethodPost, "/v1/runs", nil, req)
}

// RunToEnd starts a run and waits until it has ended; ctx bounds the wait.
func (c *Client) RunToEnd(ctx context.Context, req wire.RunRequest) (wire.Run, error) {
	return call[wire.Run](ctx, c, http.MethodPost, "/v1/runs", url.Values{"wait": {"true"}}, req)
}

// GetRun returns a run.
func (c *Client) GetRun(ctx context.Context, id contract.RunID) (wire.Run, error) {
	return call[wire.Run](ctx, c, http.MethodGet, "/v1/runs/"+url.PathEscape(string(id)), nil, nil)
}

// RunQuery selects runs; zero fields match anything.
type RunQuery struct {
	ThreadID contract.ThreadID
	Status   contract.RunStatus
	Limit    int
	Cursor   string
}

// ListRuns returns a page of runs, newest first.
func (c *Client) ListRuns(ctx context.Context, q RunQuery) (wire.RunPage, error) {
	v := values{}
	v.set("thread_id", string(q.ThreadID))
	v.set("status", string(q.Status))
	v.number("limit", uint64(max(q.Limit, 0)))
	v.set("cursor", q.Cursor)
	return call[wire.RunPage](ctx, c, http.MethodGet, "/v1/runs", url.Values(v), nil)
}

// CancelRun cancels a run and its tasks.
func (c *Client) CancelRun(ctx context.Context, id contract.RunID) error {
	_, err := call[wire.Cancelling](ctx, c, http.MethodPost, "/v1/runs/"+url.PathEscape(string(id))+"/cancel", nil, nil)
	return err
}

// SubmitTask delegates one task.
func (c *Client) SubmitTask(ctx context.Context, req wire.TaskRequest) (wire.TaskAccepted, error) {
	return call[wire.TaskAccepted](ctx, c, http.MethodPost, "/v1/tasks", nil, req)
}

// GetTask returns a task.
func (c *Client) GetTask(ctx context.Context, id contract.TaskID) (wire.Task, error) {
	return call[wire.Task](ctx, c, http.MethodGet, "/v1/tasks/"+url.PathEscape(string(id)), nil, nil)
}

// TaskQuery selects tasks; zero fields match anything.
type TaskQuery struct {
	RunID  contract.RunID
	Status contract.TaskStatus
	Limit  int
	Cursor string
}

// ListTasks returns a page of tasks, newest first.
func (c *Client) ListTasks(ctx context.Context, q TaskQuery) (wire.TaskPage, error) {
	v := values{}
	v.set("run_id", string(q.RunID))
	v.set("status", string(q.Status))
	v.number("limit", uint64(max(q.Limit, 0)))
	v.set("cursor", q.Cursor)
	return call[wire.TaskPage](ctx, c, http.MethodGet, "/v1/tasks", url.Values(v), nil)
}

// CancelTask cancels a task; for one that has ended the error has the code
// already_finished.
func (c *Client) CancelTask(ctx context.Context, id contract.TaskID) error {
	_, err := call[wire.Cancelling](ctx, c, http.MethodPost, "/v1/tasks/"+url.PathEscape(string(id))+"/cancel", nil, nil)
	return err
}

// Admission returns the gate's state.
func (c *Client) Admission(ctx context.Context) (admissionapi.Status, error) {
	return call[admissionapi.Status](ctx, c, http.MethodGet, "/v1/admission", nil, nil)
}

// Subagents lists the sub-agent types.
func (c *Client) Subagents(ctx context.Context) ([]wire.Subagent, error) {
	return call[[]wire.Subagent](ctx, c, http.MethodGet, "/v1/subagents", nil, nil)
}

// Subagent returns one sub-agent type.
func (c *Client) Subagent(ctx context.Context, name string) (wire.Subagent, error) {
	return call[wire.Subagent](ctx, c, http.MethodGet, "/v1/subagents/"+url.PathEscape(name), nil, nil)
}

// ManagedSubagent returns the managed definition of a name, also where it is not in
// force; an *Error with the status 404 when there is none. For administrators.
func (c *Client) ManagedSubagent(ctx context.Context, name string) (wire.Subagent, error) {
	return call[wire.Subagent](ctx, c, http.MethodGet, "/v1/subagents/"+url.PathEscape(name), url.Values{"source": {"managed"}}, nil)
}

// PutSubagent makes or changes a managed definition. A revision of 0 makes a new
// one, any other replaces just that one: else the error has the status 412.
func (c *Client) PutSubagent(ctx context.Context, name string, req wire.SubagentRequest, revision uint64) (wire.Subagent, error) {
	h := http.Header{"If-None-Match": {"*"}}
	if revision > 0 {
		h = http.Header{"If-Match": {etag(revision)}}
	}
	return callWith[wire.Subagent](ctx, c, http.MethodPut, "/v1/subagents/"+url.PathEscape(name), nil, h, req)
}

// DeleteSubagent deletes a managed definition, if it still has the revision; with 0
// whatever there is.
func (c *Client) DeleteSubagent(ctx context.Context, name string, revision uint64) error {
	h := http.Header{"If-Match": {"*"}}
	if revision > 0 {
		h = http.Header{"If-Match": {etag(revision)}}
	}
	_, err := callWith[struct{}](ctx, c, http.MethodDelete, "/v1/subagents/"+url.PathEscape(name), nil, h, nil)
	return err
}

func etag(revision uint64) string { return strconv.Quote(strconv.FormatUint(revision, 10)) }

// Ready returns nil when the server is ready to work, otherwise an *Error with
// the reasons.
func (c *Client) Ready(ctx context.Context) error {
	_, err := call[json.RawMessage](ctx, c, http.MethodGet, "/readyz", nil, nil)
	return err
}

// OpenAPI returns the OpenAPI document.
func (c *Client) OpenAPI(ctx context.Context) (json.RawMessage, error) {
	return call[json.RawMessage](ctx, c, http.MethodGet, "/openapi.json", nil, nil)
}

// EventQuery selects events; zero fields match anything.
type EventQuery struct {
	ThreadID contract.ThreadID
	RunID    contract.RunID
	TaskID   contract.TaskID
	// Types are stored types such as subagent.end.
	Types []string
	// AllAttempts shows with TaskID what superseded attempts of the task told as well.
	AllAttempts bool
	// Limit is the size of a page; streams do not use it.
	Limit int
	// OnGap, when set, is told by a stream of events that cannot be had any more.
	OnGap func(wire.Gap)
	// OnRetry, when set, is told why a stream connects again.
	OnRetry func(error)
}

func (q EventQuery) values(after uint64) url.Values {
	v := values{}
	v.set("thread_id", string(q.ThreadID))
	v.set("run_id", string(q.RunID))
	v.set("task_id", string(q.TaskID))
	for _, t := range q.Types {
		url.Values(v).Add("type", t)
	}
	if q.AllAttempts {
		v.set("attempts", "all")
	}
	v.number("after_seq", after)
	return url.Values(v)
}

// ListEvents returns a page of the events after a seq.
func (c *Client) ListEvents(ctx context.Context, q EventQuery, after uint64) (wire.EventPage, error) {
	v := values(q.values(after))
	v.number("limit", uint64(max(q.Limit, 0)))
	return call[wire.EventPage](ctx, c, http.MethodGet, "/v1/events", url.Values(v), nil)
}

type values url.Values

func (v values) set(key, value string) {
	if value != "" {
		url.Values(v).Set(key, value)
	}
}

func (v values) number(key string, n uint64) {
	if n > 0 {
		url.Values(v).Set(key, strconv.FormatUint(n, 10))
	}
}

// call sends body, when it is not nil, as JSON and reads the answer as a T.
func call[T any](ctx context.Context, c *Client, method, path string, query url.Values, body any) (T, error) {
	return callWith[T](ctx, c, method, path, query, nil, body)
}

// callWith is call with headers of its own.
func callWith[T any](ctx context.Context, c *Client, method, path string, query url.Values, header http.Header, body any) (T, error) {
	var out T
	if _, ok := ctx.Deadline(); !ok && query.Get("wait") == "" {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	req, err := c.request(ctx, method, path, query, body)
	if err != nil {
		return out, err
	}
	for name, v := range header {
		req.Header[name] = v
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return out, fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return out, problem(resp)
	}
	if resp.StatusCode == http.StatusNoContent {
		return out, nil
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return out, fmt.Errorf("%s %s: answer: %w", method, path, err)
	}
	if len(b) > maxAnswer {
		return out, fmt.Errorf("%s %s: the answer has more than %d bytes", method, path, maxAnswer)
	}
	if err := json.Unmarshal(b, &out); err != nil {
		return out, fmt.Errorf("%s %s: the answer is not the JSON of this interface: %w", method, path, err)
	}
	return out, nil
}

func (c *Client) request(ctx context.Context, method, path string, query url.Values, body any) (*http.Request, error) {
	u := *c.base
	raw := u.EscapedPath() + path
	plain, err := url.PathUnescape(raw)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	u.Path, u.RawPath, u.RawQuery = plain, raw, query.Encode()
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", method, path, err)
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), r)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("Accept", "application/json")
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	telemetry.Propagator().Inject(ctx, propagation.HeaderCarrier(req.Header))
	return req, nil
}

// problem turns an answer that is no success into an *Error.
func problem(resp *http.Response) error {
	e := &Error{Status: resp.StatusCode}
	if n, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && n > 0 {
		e.RetryAfter = time.Duration(min(n, 3600)) * time.Second
	}
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if t, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); t == wire.ProblemType {
		var p wire.Problem
		if json.Unmarshal(b, &p) == nil {
			e.Code, e.Detail, e.FinishedStatus, e.Faults = p.Code, p.Detail, p.FinishedStatus, p.Errors
			return e
		}
	}
	e.Detail = strings.TrimSpace(strings.ToValidUTF8(string(b[:min(len(b), 500)]), "\uFFFD"))
	return e
}
