// Package agentapi is the request-reply interface to managed sub-agent definitions
// that a database keeps: the messages of the endpoints agents.list, agents.put and
// agents.delete, and a client for them. The event sink answers them, because it alone
// holds a database. They are for leads and not for others: nothing in a request says
// who asks.
package agentapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Limits of the endpoints.
const (
	// NamePattern is what the name of a definition looks like.
	NamePattern = "^[a-z0-9-]{1,64}$"
	// MaxPage is the most definitions in a page.
	MaxPage = 200
	// MaxPageBytes is where a page ends even if there are more. One single definition
	// that is larger comes alone.
	MaxPageBytes = 700 << 10
	// Room is what a message has beside one definition: no definition is taken that is
	// larger than the server's payload limit without it.
	Room = 4 << 10
	// RequestTimeout bounds one request.
	RequestTimeout = 5 * time.Second
	// maxRestarts bounds how often a list begins anew because of changes meanwhile.
	maxRestarts = 20
)

// Subjects of the endpoints, and the one on which a sink tells the store's revision, as
// a decimal number, after a change and when it begins to answer.
func ListSubject(n contract.Names) string    { return n.Service("agents", "list") }
func PutSubject(n contract.Names) string     { return n.Service("agents", "put") }
func DeleteSubject(n contract.Names) string  { return n.Service("agents", "delete") }
func ChangedSubject(n contract.Names) string { return n.Service("agents", "changed") }

// AgentsRequest asks for definitions, in the order of their names.
type AgentsRequest struct {
	// Name asks for this one alone.
	Name string `json:"name,omitempty"`
	// AfterName is exclusive.
	AfterName string `json:"after_name,omitempty"`
	// UnlessRevision leaves the definitions out while the store has this revision.
	UnlessRevision uint64 `json:"unless_revision,omitempty"`
}

// AgentsPage is a page of definitions as they were at one revision of the store.
type AgentsPage struct {
	Agents []Agent `json:"agents"`
	// Revision of the store: it grows with every change, deletions included.
	Revision uint64 `json:"revision"`
	// HasMore: the next page begins after the name of the last one here.
	HasMore bool `json:"has_more"`
	// Unchanged: the store has the revision that the request named.
	Unchanged bool     `json:"unchanged,omitempty"`
	Error     *Refusal `json:"error,omitempty"`
}

// Agent is a definition with the revision of its last change.
type Agent struct {
	Name       string          `json:"name"`
	Revision   uint64          `json:"revision"`
	Definition json.RawMessage `json:"definition"`
}

// AgentPut stores a definition.
type AgentPut struct {
	Name       string          `json:"name"`
	Definition json.RawMessage `json:"definition"`
	// Expect is the revision that it replaces; 0: there is none of that name.
	Expect uint64 `json:"expect,omitempty"`
}

// AgentDelete removes a definition.
type AgentDelete struct {
	Name string `json:"name"`
	// Expect is the revision that it removes.
	Expect uint64 `json:"expect"`
}

// AgentChanged is the answer to a change.
type AgentChanged struct {
	// Revision of the store with the change, and of the definition where it was put; 0
	// with an error.
	Revision uint64   `json:"revision"`
	Error    *Refusal `json:"error,omitempty"`
}

// Refusal is why a request was not answered.
type Refusal struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// The codes of refusals.
const (
	// CodeInvalid: the request is wrong and will never work.
	CodeInvalid = "invalid_request"
	// CodeConflict: the revision that was expected is not the last. Nothing changed.
	CodeConflict = "conflict"
	// CodeUnavailable: the store cannot answer now; a change may have landed.
	CodeUnavailable = "unavailable"
)

var (
	// ErrUnavailable is returned when no sink answers or its database does not. A
	// change may have landed, unless it is ErrNobody as well.
	ErrUnavailable = errors.New("store of sub-agent definitions is unavailable")
	// ErrNobody: there is no sink, and so nothing was done.
	ErrNobody = errors.New("no event sink answers")
	// ErrConflict: the revision that was expected is not the last.
	ErrConflict = errors.New("the expected revision is not the last")
	// ErrInvalid: the request will never work.
	ErrInvalid = errors.New("request refused")
)

var name = regexp.MustCompile(NamePattern)

func checkName(s string) error {
	if !name.MatchString(s) {
		return fmt.Errorf("name is %.80q; want 1 to 64 lower-case letters, digits and hyphens", s)
	}
	return nil
}

func checkRevision(key string, n uint64) error {
	if n > math.MaxInt64 {
		return fmt.Errorf("%s is %d; want at most %d", key, n, int64(math.MaxInt64))
	}
	return nil
}

// Validate checks a request.
func (r AgentsRequest) Validate() error {
	var errs []error
	if r.Name != "" {
		errs = append(errs, checkName(r.Name))
	}
	if r.AfterName != "" {
		errs = append(errs, checkName(r.AfterName))
	}
	return errors.Join(errs...)
}

// Validate checks a request. What the definition says is looked at by the sink.
func (r AgentPut) Validate() error {
	errs := []error{checkName(r.Name), checkRevision("expect", r.Expect)}
	if len(r.Definition) == 0 || r.Definition[0] != '{' {
		errs = append(errs, errors.New("definition is missing; want an object"))
	}
	return errors.Join(errs...)
}

// Validate checks a request.
func (r AgentDelete) Validate() error {
	err := checkRevision("expect", r.Expect)
	if r.Expect == 0 {
		err = errors.New("expect is missing; want the revision that was seen")
	}
	return errors.Join(checkName(r.Name), err)
}

// Decode reads and validates a request. Unknown fields are ignored.
func Decode[R interface{ Validate() error }](data []byte) (R, error) {
	var r R
	if err := contract.CheckDepth(data, contract.MaxDepth); err != nil {
		return r, err
	}
	if len(data) > 0 {
		if err := json.Unmarshal(data, &r); err != nil {
			return r, fmt.Errorf("request is not the JSON that this endpoint takes: %w", err)
		}
	}
	return r, r.Validate()
}

// List reads one page.
func List(ctx context.Context, c *bus.Conn, req AgentsRequest) (AgentsPage, error) {
	var page AgentsPage
	if err := ask(ctx, c, ListSubject(c.Names), req, &page); err != nil {
		return AgentsPage{}, err
	}
	return page, page.Error.err()
}

// All reads all definitions as they were at one revision; with unless, none and
// Unchanged while the store has that revision.
func All(ctx context.Context, c *bus.Conn, unless uint64) (AgentsPage, error) {
	for range maxRestarts {
		all, err := List(ctx, c, AgentsRequest{UnlessRevision: unless})
		if err != nil {
			return AgentsPage{}, err
		}
		whole, err := rest(ctx, c, &all)
		if err != nil {
			return AgentsPage{}, err
		}
		if whole {
			return all, nil
		}
	}
	return AgentsPage{}, fmt.Errorf("%w: it changes faster than it can be read", ErrUnavailable)
}

// rest reads the pages behind the first one, and reports whether all are of one
// revision.
func rest(ctx context.Context, c *bus.Conn, all *AgentsPage) (bool, error) {
	for all.HasMore {
		if len(all.Agents) == 0 {
			return false, fmt.Errorf("%w: %s answered with an empty page that is not the last", ErrUnavailable, ListSubject(c.Names))
		}
		page, err := List(ctx, c, AgentsRequest{AfterName: all.Agents[len(all.Agents)-1].Name})
		if err != nil || page.Revision != all.Revision {
			return false, err
		}
		if page.HasMore && len(page.Agents) == 0 {
			return false, fmt.Errorf("%w: %s answered with an empty page that is not the last", ErrUnavailable, ListSubject(c.Names))
		}
		all.Agents, all.HasMore = append(all.Agents, page.Agents...), page.HasMore
	}
	return true, nil
}

// Put stores a definition and returns its revision. [ErrConflict]: the expectation
// did not hold.
func Put(ctx context.Context, c *bus.Conn, req AgentPut) (uint64, error) {
	return change(ctx, c, PutSubject(c.Names), req)
}

// Delete removes a definition and returns the store's revision after it.
// [ErrConflict]: the expectation did not hold.
func Delete(ctx context.Context, c *bus.Conn, req AgentDelete) (uint64, error) {
	return change(ctx, c, DeleteSubject(c.Names), req)
}

func change(ctx context.Context, c *bus.Conn, subject string, req interface{ Validate() error }) (uint64, error) {
	var done AgentChanged
	if err := ask(ctx, c, subject, req, &done); err != nil {
		return 0, err
	}
	if err := done.Error.err(); err != nil {
		return 0, err
	}
	if done.Revision == 0 {
		return 0, fmt.Errorf("%w: the answer of %s has no revision", ErrUnavailable, subject)
	}
	return done.Revision, nil
}

func ask(ctx context.Context, c *bus.Conn, subject string, req interface{ Validate() error }, answer any) error {
	if err := req.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	body, err := json.Marshal(req)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	msg, err := c.NC.RequestWithContext(ctx, subject, body)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("%w: %w on %s; is one running?", ErrUnavailable, ErrNobody, subject)
	case errors.Is(err, nats.ErrMaxPayload):
		return fmt.Errorf("%w: it has %d bytes, and the NATS server takes %d: shorten the definition, or raise max_payload", ErrInvalid, len(body), c.NC.MaxPayload())
	case err != nil:
		return fmt.Errorf("%w: %s: %w", ErrUnavailable, subject, err)
	}
	if err := json.Unmarshal(msg.Data, answer); err != nil {
		return fmt.Errorf("%w: answer of %s: %w", ErrUnavailable, subject, err)
	}
	return nil
}

func (r *Refusal) err() error {
	if r == nil {
		return nil
	}
	kind := ErrUnavailable
	switch r.Code {
	case CodeInvalid:
		kind = ErrInvalid
	case CodeConflict:
		kind = ErrConflict
	}
	return fmt.Errorf("%w: %s", kind, r.Message)
}
