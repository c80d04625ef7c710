package subagent

import (
	"fmt"
	"strings"

	"github.com/herdgate/herdgate/pkg/contract"
)

// RefusedError says why a type cannot be used (REG-17): there is none of that
// name, or the caller may not use it. To a caller the two are the same.
type RefusedError struct {
	// Name is what was asked for.
	Name string
	// Offered are the names of the types that may be used instead.
	Offered []string
	// ByPolicy: none may, because of the caller's policy.
	ByPolicy bool
}

// Error is written for the model that asked.
func (e *RefusedError) Error() string {
	offer := "There are none."
	switch {
	case len(e.Offered) > 0:
		offer = "Available types: " + strings.Join(e.Offered, ", ") + "."
	case e.ByPolicy:
		offer = "The policy of this run permits none."
	}
	if e.Name == "" {
		return "subagent_type is missing. " + offer
	}
	name := e.Name
	if r := []rune(name); len(r) > 80 {
		name = string(r[:79]) + "…"
	}
	return fmt.Sprintf("There is no sub-agent type %q for this run. %s", name, offer)
}

// Choose returns the type called name out of those that a caller may use, as
// [Registry.Visible] gave them for its policy allowed; else a *RefusedError.
func Choose(visible []Definition, allowed []string, name string) (Definition, error) {
	refused := &RefusedError{Name: name}
	for _, d := range visible {
		if d.Name == name && contract.Permits(allowed, name) {
			return d.clone(), nil
		}
		refused.Offered = append(refused.Offered, d.Name)
	}
	refused.ByPolicy = allowed != nil && len(visible) == 0
	return Definition{}, refused
}
