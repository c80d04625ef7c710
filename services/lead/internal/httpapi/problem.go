package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"
	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

const (
	// retryFull and retryUnavailable are what Retry-After says, in seconds.
	retryFull        = 5
	retryUnavailable = 2
	// maxDetail bounds the text of a problem, maxFaults its list of faults.
	maxDetail = 1000
	maxFaults = 20
)

func newProblem(status int, code, detail string) *wire.Problem {
	if len(detail) > maxDetail {
		detail = detail[:maxDetail] + "…"
	}
	return &wire.Problem{Type: "about:blank", Title: http.StatusText(status), Status: status, Code: code, Detail: detail}
}

// codeOf is the stable code of a status that the framework chose.
func codeOf(status int) string {
	switch status {
	case http.StatusUnauthorized:
		return wire.CodeUnauthorized
	case http.StatusForbidden:
		return wire.CodeForbidden
	case http.StatusNotFound:
		return wire.CodeNotFound
	case http.StatusMethodNotAllowed:
		return wire.CodeMethodNotAllowed
	case http.StatusConflict:
		return wire.CodeAlreadyFinished
	case http.StatusPreconditionFailed:
		return wire.CodePrecondition
	case http.StatusRequestEntityTooLarge:
		return wire.CodePayloadTooLarge
	case http.StatusTooManyRequests:
		return wire.CodeQueueFull
	case http.StatusServiceUnavailable:
		return wire.CodeUnavailable
	}
	if status >= 500 {
		return wire.CodeInternal
	}
	return wire.CodeInvalidRequest
}

// useProblems makes huma write our problems instead of its own. The hook is a
// variable of that package, hence once for the process.
var useProblems = sync.OnceFunc(func() {
	huma.NewError = func(status int, msg string, errs ...error) huma.StatusError {
		p := newProblem(status, codeOf(status), msg)
		for _, err := range errs {
			if err == nil {
				continue
			}
			if len(p.Errors) == maxFaults {
				break
			}
			// The value at fault is not sent back: it may be long, or secret.
			f := wire.ProblemFault{Message: err.Error()}
			if d, ok := err.(huma.ErrorDetailer); ok {
				f.Location, f.Message = d.ErrorDetail().Location, d.ErrorDetail().Message
			}
			p.Errors = append(p.Errors, f)
		}
		return p
	}
})

// problemFor turns an error of the layers below into an answer. An error that
// nobody expected is logged here and told as "internal" without its text.
func (s *Server) problemFor(ctx context.Context, err error) error {
	var (
		finished *leaderr.FinishedError
		problem  *wire.Problem
	)
	switch {
	case errors.As(err, &problem):
		return problem
	case errors.As(err, &finished):
		p := newProblem(http.StatusConflict, wire.CodeAlreadyFinished, finished.Error())
		p.FinishedStatus = finished.Status
		return p
	case errors.Is(err, agentstore.ErrNotFound):
		return newProblem(http.StatusNotFound, wire.CodeNotFound, err.Error())
	case errors.Is(err, agentstore.ErrUnreadable):
		l := s.logFor(ctx)
		l.Error().Err(err).Msg("http: a managed sub-agent definition cannot be read")
		return newProblem(http.StatusInternalServerError, wire.CodeInternal, err.Error()+"; delete it, or put another in its place without If-Match")
	case errors.Is(err, agentstore.ErrStale), errors.Is(err, agentstore.ErrExists):
		return newProblem(http.StatusPreconditionFailed, wire.CodePrecondition, err.Error())
	case errors.Is(err, subagent.ErrDefinition):
		return newProblem(http.StatusBadRequest, wire.CodeInvalidRequest, err.Error())
	case errors.Is(err, leaderr.ErrNotFound):
		return newProblem(http.StatusNotFound, wire.CodeNotFound, err.Error())
	case errors.Is(err, leaderr.ErrQueueFull):
		return retryAfter(newProblem(http.StatusTooManyRequests, wire.CodeQueueFull, "the queue is full and nothing was stored; try again later"), retryFull)
	case errors.Is(err, contract.ErrTooLarge):
		return newProblem(http.StatusRequestEntityTooLarge, wire.CodePayloadTooLarge, err.Error()+"; put long material into a file of the thread's workspace and name it")
	case errors.Is(err, leaderr.ErrInvalid), errors.Is(err, contract.ErrInvalidMessage), errors.Is(err, contract.ErrInvalidID):
		return newProblem(http.StatusBadRequest, wire.CodeInvalidRequest, err.Error())
	case errors.Is(err, leaderr.ErrUnavailable), errors.Is(err, agentstore.ErrUnavailable), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		l := s.logFor(ctx)
		if ctx.Err() != nil { // the caller is gone: nothing is wrong here
			l.Debug().Err(err).Msg("http: the caller left")
		} else {
			l.Warn().Err(err).Msg("http: unavailable")
		}
		return retryAfter(newProblem(http.StatusServiceUnavailable, wire.CodeUnavailable, reason(err)), retryUnavailable)
	}
	l := s.logFor(ctx)
	l.Error().Err(err).Msg("http: internal error")
	return newProblem(http.StatusInternalServerError, wire.CodeInternal, "an internal error; the log has the details")
}

// reason is the text of err for somebody outside. While there is no connection
// the client library only says that it has no buffer.
func reason(err error) string {
	return strings.ReplaceAll(err.Error(), nats.ErrReconnectBufExceeded.Error(), "not connected to NATS")
}

func retryAfter(p *wire.Problem, seconds int) error {
	return huma.ErrorWithHeaders(p, http.Header{"Retry-After": {strconv.Itoa(seconds)}})
}

// writeProblem answers outside of huma.
func writeProblem(w http.ResponseWriter, _ *http.Request, p *wire.Problem) {
	body, err := json.Marshal(p)
	if err != nil { // plain strings and numbers: cannot happen
		body = []byte(`{"status":500,"code":"internal"}`)
	}
	w.Header().Set("Content-Type", wire.ProblemType)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(body, '\n'))
}
