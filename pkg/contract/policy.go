package contract

import (
	"errors"
	"fmt"
	"slices"
)

// ErrNotPermitted is returned for a request whose caller may not use the type of
// sub-agent that it asks for.
var ErrNotPermitted = errors.New("the caller's policy does not permit it")

// Permits reports whether a caller's policy permits a type of sub-agent: nil
// permits every one, an empty list none. Names compare exactly.
func Permits(allowed []string, name string) bool {
	return allowed == nil || slices.Contains(allowed, name)
}

// CheckPolicy returns ErrNotPermitted when the request asks for a type that its
// own copy of the caller's policy does not permit.
func (r TaskRequest) CheckPolicy() error {
	if Permits(r.AllowedSubagents, r.Subagent.Name) {
		return nil
	}
	return fmt.Errorf("%w: sub-agent type %.80q is not among allowed_subagents", ErrNotPermitted, r.Subagent.Name)
}
