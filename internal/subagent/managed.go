package subagent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Bounds of definitions that people write: those of the configuration.
const (
	MaxNameChars        = 64
	MaxDescriptionChars = 10_000
	MaxPromptChars      = 100_000
	MaxListItems        = 1000
	maxItemChars        = 256
	maxDisplayChars     = 200
	maxTurns            = 1_000_000
	maxTimeoutSeconds   = 31_536_000
)

// Managed is a definition that an administrator made. It belongs to the whole
// deployment. As JSON it is what a store keeps.
type Managed struct {
	Name         string `json:"name"`
	DisplayName  string `json:"display_name,omitempty"`
	Description  string `json:"description"`
	SystemPrompt string `json:"system_prompt"`
	// Tools and Skills: nil and empty differ, as in [Definition].
	Tools           []string      `json:"tools"`
	DisallowedTools []string      `json:"disallowed_tools"`
	Skills          []string      `json:"skills"`
	Model           string        `json:"model"`
	Pool            contract.Pool `json:"pool,omitempty"`
	MaxTurns        int           `json:"max_turns"`
	TimeoutSeconds  int           `json:"timeout_seconds"`
	Network         bool          `json:"network,omitempty"`
	Enabled         bool          `json:"enabled"`
}

// Stored is a managed definition with its revision in the store.
type Stored struct {
	Managed
	Revision uint64
}

var managedName = regexp.MustCompile(`^[A-Za-z0-9-]+$`)

// ManagedName returns the name under which a managed definition is stored: in
// lower case.
func ManagedName(name string) (string, error) {
	switch {
	case !managedName.MatchString(name):
		return "", fmt.Errorf("%w: name is %.80q; want letters, digits and hyphens only", ErrDefinition, name)
	case len(name) > MaxNameChars:
		return "", fmt.Errorf("%w: name has %d characters; want at most %d", ErrDefinition, len(name), MaxNameChars)
	}
	return strings.ToLower(name), nil
}

// Normalize checks m and returns it as it is stored (REG-06): the name in lower
// case, texts trimmed, lists without repeats, the denials of the built-in types
// added, missing values filled in. The error names all faults.
func (m Managed) Normalize() (Managed, error) {
	var faults []error
	bad := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("%w: "+format, append([]any{ErrDefinition}, args...)...))
	}
	name, err := ManagedName(m.Name)
	if err != nil {
		faults = append(faults, err)
	}
	m.Name, m.DisplayName = name, strings.TrimSpace(m.DisplayName)
	checkText(bad, "display_name", m.DisplayName, maxDisplayChars)
	m.Description = required(bad, "description", m.Description, MaxDescriptionChars, "say when to use it")
	m.SystemPrompt = required(bad, "system_prompt", m.SystemPrompt, MaxPromptChars, "it is what the sub-agent is told first")
	m.Tools = nameList(bad, "tools", m.Tools)
	m.DisallowedTools = withDenials(nameList(bad, "disallowed_tools", m.DisallowedTools))
	if n := len(m.DisallowedTools); n > MaxListItems { // or it could be stored, and not be read again
		bad("disallowed_tools has %d items with the %d that are always denied; want at most %d", n, len(deniedTools()), MaxListItems)
	}
	m.Skills = nameList(bad, "skills", m.Skills)
	if m.Model = strings.TrimSpace(m.Model); m.Model == "" {
		m.Model = InheritModel
	}
	checkText(bad, "model", m.Model, 128)
	if m.Pool != "" {
		if err := m.Pool.Validate(); err != nil {
			bad("pool: %w", err)
		}
	}
	if m.MaxTurns == 0 {
		m.MaxTurns = DefaultMaxTurns
	}
	if m.TimeoutSeconds == 0 {
		m.TimeoutSeconds = DefaultTimeoutSeconds
	}
	if m.MaxTurns < 1 || m.MaxTurns > maxTurns {
		bad("max_turns is %d; want 1 to %d", m.MaxTurns, maxTurns)
	}
	if m.TimeoutSeconds < 1 || m.TimeoutSeconds > maxTimeoutSeconds {
		bad("timeout_seconds is %d; want 1 to %d", m.TimeoutSeconds, maxTimeoutSeconds)
	}
	if err := errors.Join(faults...); err != nil {
		return Managed{}, err
	}
	return m, nil
}

func required(bad func(string, ...any), key, text string, limit int, why string) string {
	text = strings.TrimSpace(text)
	if text == "" {
		bad("%s is blank; %s", key, why)
	}
	checkText(bad, key, text, limit)
	return text
}

func checkText(bad func(string, ...any), key, text string, limit int) {
	if !utf8.ValidString(text) {
		bad("%s is not valid UTF-8", key)
	}
	if n := utf8.RuneCountInString(text); n > limit {
		bad("%s has %d characters; want at most %d", key, n, limit)
	}
}

// nameList trims names and drops repeats; nil stays nil.
func nameList(bad func(string, ...any), key string, list []string) []string {
	if list == nil {
		return nil
	}
	if len(list) > MaxListItems {
		bad("%s has %d items; want at most %d", key, len(list), MaxListItems)
		return []string{}
	}
	out := make([]string, 0, len(list))
	for i, name := range list {
		name = strings.TrimSpace(name)
		switch {
		case name == "":
			bad("%s[%d] is blank; want a name", key, i)
		case utf8.RuneCountInString(name) > maxItemChars || !utf8.ValidString(name):
			bad("%s[%d] is no name: want at most %d characters of UTF-8", key, i, maxItemChars)
		case !slices.Contains(out, name):
			out = append(out, name)
		}
	}
	return out
}

// withDenials adds what no sub-agent needs.
func withDenials(list []string) []string {
	out := slices.Clone(list)
	for _, name := range deniedTools() {
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}

// Definition returns m as a type of sub-agent, before any override.
func (m Managed) Definition() Definition {
	d := Definition{
		Name: m.Name, Origin: OriginManaged, Description: m.Description, SystemPrompt: m.SystemPrompt,
		Tools: slices.Clone(m.Tools), DisallowedTools: withDenials(m.DisallowedTools), Skills: slices.Clone(m.Skills),
		Model: m.Model, Pool: m.Pool, MaxTurns: m.MaxTurns, TimeoutSeconds: m.TimeoutSeconds, Network: m.Network,
	}
	if d.Model == "" {
		d.Model = InheritModel
	}
	if d.MaxTurns == 0 {
		d.MaxTurns = DefaultMaxTurns
	}
	if d.TimeoutSeconds == 0 {
		d.TimeoutSeconds = DefaultTimeoutSeconds
	}
	return d
}

// DecodeManaged reads what a store keeps. Unknown fields are refused: they may
// narrow what the sub-agent can do, and to pass over them would widen it.
func DecodeManaged(data []byte) (Managed, error) {
	if err := contract.CheckDepth(data, contract.MaxDepth); err != nil {
		return Managed{}, fmt.Errorf("%w: %w", ErrDefinition, err)
	}
	m := Managed{Enabled: true}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&m); err != nil {
		return Managed{}, fmt.Errorf("%w: %w", ErrDefinition, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Managed{}, fmt.Errorf("%w: there is more after the definition", ErrDefinition)
	}
	return m.Normalize()
}
