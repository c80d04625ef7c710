// Package fault keeps a panic inside the handler in which it happened.
//
// One request, grant or event that makes our code panic must not end a process
// that has others. Whoever handles one thing at a time runs the handler through
// [Catch], logs what comes back with [Error.Log], and ends that one thing as an
// internal failure. What a panic says may have been made of anybody's data, so
// its text is bounded and what looks like a secret is taken out; the stack holds
// no data.
package fault

import (
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"unicode"

	"github.com/rs/zerolog"
)

// Limits on what is kept of a panic, in bytes.
const (
	maxText  = 300
	maxStack = 16 << 10
)

// Error is a panic that was caught.
type Error struct {
	text  string
	stack []byte
}

// Error says that it was our fault, and what the panic said.
func (e *Error) Error() string { return "internal fault: " + e.text }

// Log adds the panic and its stack to a log line.
func (e *Error) Log(line *zerolog.Event) *zerolog.Event {
	return line.Str("panic", e.text).Bytes("stack", e.stack)
}

// Of makes an error of what recover returned, or nil of nil. It is to be called
// in the deferred function itself: fault.Of(recover()).
func Of(recovered any) *Error {
	if recovered == nil {
		return nil
	}
	if e, ok := recovered.(*Error); ok {
		return e // one that was caught and raised again
	}
	stack := debug.Stack()
	return &Error{text: clean(said(recovered)), stack: stack[:min(len(stack), maxStack)]}
}

// Catch runs f and returns its error. A panic of f comes back as an [*Error].
func Catch(f func() error) (err error) {
	defer func() {
		if e := Of(recover()); e != nil {
			err = e
		}
	}()
	return f()
}

// As finds a panic in an error, or nil.
func As(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return nil
}

// said is the text of a panic. Of values that say nothing by themselves the type
// alone is told: their fields are data.
func said(v any) string {
	switch v := v.(type) {
	case runtime.Error:
		return v.Error()
	case error:
		return v.Error()
	case string:
		return v
	case fmt.Stringer:
		return v.String()
	}
	return fmt.Sprintf("a value of type %T", v)
}

var (
	// A word that announces a secret, and what follows it.
	announced = regexp.MustCompile(`(?i)\b((?:bearer|basic)\s+|[\w-]*(?:api[_-]?key|token|password|passwd|secret|authorization|credential)[\w-]*["']?\s*[:=]\s*["']?(?:(?:bearer|basic)\s+)?)[^\s"',;&]+`)
	// User and password of an address.
	userinfo = regexp.MustCompile(`://[^\s/@]+@`)
	// Keys that providers give out.
	keys = regexp.MustCompile(`\b(?:sk|pk|ghp|gho|xox[a-z])[-_][A-Za-z0-9_-]{8,}`)
)

// clean makes a text fit for logs, records and events: one line, bounded, without
// what looks like a secret.
func clean(s string) string {
	s = strings.ToValidUTF8(s, "\ufffd")
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s[:min(len(s), 16*maxText)])
	s = userinfo.ReplaceAllString(s, "://…@")
	s = announced.ReplaceAllString(s, "${1}…")
	s = keys.ReplaceAllString(s, "…")
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "") + "…"
	}
	return s
}
