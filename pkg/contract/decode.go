package contract

import (
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"
)

// ErrInvalidMessage is returned when a message breaks this contract: it will
// never be right, so its receiver refuses it for good.
var ErrInvalidMessage = errors.New("invalid message")

// ErrTooLarge is returned, beside [ErrInvalidMessage], when a message or a part of
// it is larger than the contract allows.
var ErrTooLarge = errors.New("too large")

// DecodeTaskRequest reads and validates a request.
func DecodeTaskRequest(b []byte) (TaskRequest, error) {
	r, err := decode[TaskRequest]("task request", b, MaxRequestBytes)
	if err != nil {
		return r, err
	}
	return r, r.Validate()
}

// Encode validates the request and writes it.
func (r TaskRequest) Encode() ([]byte, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	b, err := json.Marshal(r)
	if err == nil && len(b) > MaxRequestBytes {
		err = fmt.Errorf("%w: %w: task request has %d bytes; want at most %d", ErrInvalidMessage, ErrTooLarge, len(b), MaxRequestBytes)
	}
	return b, err
}

// Validate checks what a request must have before it may be published or acted on.
func (r TaskRequest) Validate() error {
	var errs []error
	if r.ContractVersion != Version {
		errs = append(errs, fmt.Errorf("contract_version is %q; this program speaks %q", r.ContractVersion, Version))
	}
	errs = append(errs, r.TaskID.Validate(), r.RunID.Validate(), r.Tenant.Validate(), r.ThreadID.Validate())
	if r.Pool != "" {
		errs = append(errs, r.Pool.Validate())
	}
	if r.Subagent.Name == "" {
		errs = append(errs, errors.New("subagent.name is empty"))
	}
	if r.Subagent.MaxTurns < 1 {
		errs = append(errs, fmt.Errorf("subagent.max_turns is %d; want at least 1", r.Subagent.MaxTurns))
	}
	if r.Subagent.TimeoutSeconds < 1 {
		errs = append(errs, fmt.Errorf("subagent.timeout_seconds is %d; want at least 1", r.Subagent.TimeoutSeconds))
	}
	if r.Prompt == "" {
		errs = append(errs, errors.New("prompt is empty"))
	}
	if len(r.Prompt) > MaxPromptBytes {
		errs = append(errs, fmt.Errorf("%w: prompt has %d bytes; want at most %d", ErrTooLarge, len(r.Prompt), MaxPromptBytes))
	}
	if n := utf8.RuneCountInString(r.Description); n > MaxDescriptionChars {
		errs = append(errs, fmt.Errorf("description has %d characters; want at most %d", n, MaxDescriptionChars))
	}
	if len(r.AcceptanceCriteria) > MaxCriteria {
		errs = append(errs, fmt.Errorf("acceptance_criteria has %d entries; want at most %d", len(r.AcceptanceCriteria), MaxCriteria))
	}
	if err := r.Identity.Validate(); err != nil {
		errs = append(errs, err)
	}
	if r.QueueTimeoutSeconds < 0 {
		errs = append(errs, fmt.Errorf("queue_timeout_seconds is %d; want 0 or more", r.QueueTimeoutSeconds))
	}
	return invalid("task request", errs)
}

// DecodeGrant reads and validates a grant.
func DecodeGrant(b []byte) (Grant, error) {
	g, err := decode[Grant]("grant", b, MaxGrantBytes)
	if err != nil {
		return g, err
	}
	var errs []error
	if g.Attempt < 1 {
		errs = append(errs, fmt.Errorf("attempt is %d; want at least 1", g.Attempt))
	}
	if g.Revision == 0 {
		errs = append(errs, errors.New("revision is 0"))
	}
	if g.LeaseTTLMS < 1000 {
		errs = append(errs, fmt.Errorf("lease_ttl_ms is %d; want at least 1000", g.LeaseTTLMS))
	}
	if g.TaskID != g.Request.TaskID {
		errs = append(errs, fmt.Errorf("task_id %q differs from the request's %q", g.TaskID, g.Request.TaskID))
	}
	if r := g.Record; r.TaskID != g.TaskID || r.Attempt != g.Attempt || r.State != StateGranted {
		errs = append(errs, fmt.Errorf("the record is of task %q, attempt %d, %q; want task %q, attempt %d, %q", r.TaskID, r.Attempt, r.State, g.TaskID, g.Attempt, StateGranted))
	}
	errs = append(errs, g.Request.Validate())
	return g, invalid("grant", errs)
}

// DecodeTaskRecord reads and validates a record.
func DecodeTaskRecord(b []byte) (TaskRecord, error) {
	r, err := decode[TaskRecord]("task record", b, MaxInlineResultBytes*6+64<<10)
	if err != nil {
		return r, err
	}
	var errs []error
	if !r.State.Valid() {
		errs = append(errs, fmt.Errorf("state is %q", r.State))
	}
	errs = append(errs, r.TaskID.Validate(), r.RunID.Validate(), r.Tenant.Validate(), r.ThreadID.Validate())
	return r, invalid("task record", errs)
}

// DecodeRunRecord reads and validates a run's record.
func DecodeRunRecord(b []byte) (RunRecord, error) {
	r, err := decode[RunRecord]("run record", b, 8<<20)
	if err != nil {
		return r, err
	}
	return r, invalid("run record", []error{r.RunID.Validate(), r.Tenant.Validate(), r.ThreadID.Validate()})
}

// Decode reads a small message of type T: a lease, a leader, limits, a
// cancellation or a trial.
func Decode[T Lease | Leader | AdmissionLimits | Cancel | Trial](b []byte) (T, error) {
	return decode[T]("message", b, 64<<10)
}

func decode[T any](what string, b []byte, limit int) (T, error) {
	var v T
	if len(b) > limit {
		return v, fmt.Errorf("%w: %w: %s has %d bytes; want at most %d", ErrInvalidMessage, ErrTooLarge, what, len(b), limit)
	}
	if err := CheckDepth(b, MaxDepth); err != nil {
		return v, fmt.Errorf("%w: %s: %w", ErrInvalidMessage, what, err)
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return v, fmt.Errorf("%w: %s: %w", ErrInvalidMessage, what, err)
	}
	return v, nil
}

func invalid(what string, errs []error) error {
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrInvalidMessage, what, err)
	}
	return nil
}

// ErrTooDeep is returned by [CheckDepth].
var ErrTooDeep = errors.New("nested too deeply")

// CheckDepth refuses JSON that nests lists and objects deeper than limit. It
// looks at brackets outside of strings only and does not validate anything
// else; it runs before a recursive decoder, whose stack an attacker could
// otherwise exhaust.
func CheckDepth(b []byte, limit int) error {
	depth, inString := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case inString:
			switch c {
			case '\\':
				i++
			case '"':
				inString = false
			}
		case c == '"':
			inString = true
		case c == '{' || c == '[':
			if depth++; depth > limit {
				return fmt.Errorf("%w: more than %d levels at byte %d", ErrTooDeep, limit, i+1)
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return nil
}
