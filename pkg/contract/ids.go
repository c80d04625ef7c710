package contract

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxToken is the longest token that may appear in a subject.
const MaxToken = 64

// MaxThreadID bounds a thread id, in bytes: users choose thread ids freely,
// but they travel in every event.
const MaxThreadID = 512

// Ids have types of their own so that the compiler catches a swapped argument.
type (
	// TaskID names one delegation. The lead makes it, deterministically from
	// run, message and call position, so that a replayed lead cannot delegate
	// the same call twice.
	TaskID string
	// RunID names one turn of a lead agent, or the group that a task submitted
	// without a lead belongs to.
	RunID string
	// ThreadID names a conversation. Users choose it and it may hold anything;
	// on subjects it appears as [ThreadID.Token].
	ThreadID string
	// Tenant separates customers from each other.
	Tenant string
	// Pool names a group of executors that share grants.
	Pool string
)

// MarshalJSON writes an id that is not there as null: an event of a run belongs
// to no task, and neither does an empty name.
func (id TaskID) MarshalJSON() ([]byte, error) {
	if id == "" {
		return []byte("null"), nil
	}
	return json.Marshal(string(id))
}

const (
	// DefaultTenant is the tenant of a deployment without authentication.
	DefaultTenant Tenant = "default"
	// DefaultUser is on whose behalf a task runs that nobody asked for by name
	// (CTX-10).
	DefaultUser = "default"
	// DefaultPool is the pool of a task whose definition names none.
	DefaultPool Pool = "default"
)

// ErrInvalidID is returned when an id cannot be used as a subject token.
var ErrInvalidID = errors.New("invalid id")

// ValidateToken checks that s can be one token of a subject, a file name and a
// key: 1 to 64 characters out of A-Z, a-z, 0-9, underscore and hyphen.
func ValidateToken(what, s string) error {
	if s == "" {
		return fmt.Errorf("%w: %s is empty; want 1 to %d characters of A-Z a-z 0-9 _ -", ErrInvalidID, what, MaxToken)
	}
	if len(s) > MaxToken {
		return fmt.Errorf("%w: %s has %d characters; want at most %d", ErrInvalidID, what, len(s), MaxToken)
	}
	for i := range len(s) {
		if !tokenByte(s[i]) {
			return fmt.Errorf("%w: %s has %s at position %d; want only A-Z a-z 0-9 _ -", ErrInvalidID, what, strconv.QuoteToASCII(s[i:i+1]), i+1)
		}
	}
	return nil
}

func tokenByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-'
}

// Validate reports whether the id can be a subject token.
func (id TaskID) Validate() error { return validateID("task id", string(id)) }

// Validate reports whether the id can be a subject token.
func (id RunID) Validate() error { return validateID("run id", string(id)) }

// Validate reports whether the tenant can be a subject token.
func (t Tenant) Validate() error { return validateID("tenant", string(t)) }

// Validate reports whether the pool can be a subject token.
func (p Pool) Validate() error { return ValidateToken("pool", string(p)) }

// validateID refuses the lone underscore as well: on event subjects it stands
// for "no task".
func validateID(what, s string) error {
	if s == NoTask {
		return fmt.Errorf("%w: %s %q is reserved", ErrInvalidID, what, s)
	}
	return ValidateToken(what, s)
}

// Validate reports whether the id can be carried: it must be neither empty nor
// longer than [MaxThreadID] bytes, and must be valid UTF-8 without control
// characters. Anything else goes.
func (id ThreadID) Validate() error {
	switch {
	case id == "":
		return fmt.Errorf("%w: thread id is empty", ErrInvalidID)
	case len(id) > MaxThreadID:
		return fmt.Errorf("%w: thread id has %d bytes; want at most %d", ErrInvalidID, len(id), MaxThreadID)
	}
	if !utf8.ValidString(string(id)) {
		return fmt.Errorf("%w: thread id is not valid UTF-8", ErrInvalidID)
	}
	for i, r := range string(id) {
		if unicode.IsControl(r) {
			return fmt.Errorf("%w: thread id has control character %U at byte %d", ErrInvalidID, r, i+1)
		}
	}
	return nil
}

// hashedPrefix marks the tokens of ids that cannot stand for themselves.
const hashedPrefix = "h_"

// Token returns the subject token for the thread: the id itself when it is a
// valid token, otherwise a digest of it. An id that looks like a digest is
// digested as well, so that two threads never share a token.
func (id ThreadID) Token() string {
	s := string(id)
	if ValidateToken("thread id", s) == nil && s != NoTask && !strings.HasPrefix(s, hashedPrefix) {
		return s
	}
	return hashedPrefix + digest(s)
}

// NewTaskID derives the id of the delegation made by the call at position (from
// 0) of the lead's message number (from 0) in run. The same call always gets
// the same id.
func NewTaskID(run RunID, message, position int) TaskID {
	return TaskID("t_" + digest(fmt.Sprintf("%s/%d/%d", run, message, position)))
}

var lowerBase32 = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

// digest is 130 bits of SHA-256 in 26 characters: short enough for a subject,
// long enough that nobody finds two inputs with the same one.
func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return lowerBase32.EncodeToString(sum[:])[:26]
}
