// Package subagent knows the kinds of sub-agents: the built-in ones, those of
// the configuration, of Markdown files and of administrators, who owns a name
// and which values win, what a caller may see, and which tools a sub-agent
// gets. It reads and writes nothing.
package subagent

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Origin says where a definition comes from.
type Origin string

// The origins, in the order of their precedence.
const (
	OriginBuiltin Origin = "builtin"
	OriginConfig  Origin = "config"
	OriginFile    Origin = "file"
	OriginManaged Origin = "managed"
)

// Defaults of definitions.
const (
	// InheritModel stands for the parent's model.
	InheritModel = "inherit"
	// DefaultMaxTurns and DefaultTimeoutSeconds are those of a definition of the
	// configuration that names none.
	DefaultMaxTurns       = 50
	DefaultTimeoutSeconds = 900
	// DefaultBuiltinTimeoutSeconds is the limit of the built-in types.
	DefaultBuiltinTimeoutSeconds = 1800
)

// deniedTools are what no sub-agent needs: it must not delegate, cannot ask
// and does not present files.
func deniedTools() []string { return []string{"task", "ask_clarification", "present_files"} }

// Definition is one type of sub-agent with its effective values. For the lists,
// nil and empty differ: nil tools means all that are offered, empty none; nil
// skills means those of the parent, empty none.
type Definition struct {
	Name            string
	Origin          Origin
	Description     string
	SystemPrompt    string
	Tools           []string
	DisallowedTools []string
	Skills          []string
	// Model is the name of a configured model or [InheritModel].
	Model string
	// Pool is where its tasks run; empty is the default pool.
	Pool           contract.Pool
	MaxTurns       int
	TimeoutSeconds int
	// Network lets commands of its tasks use the network.
	Network bool
}

// Resolve returns the definition as it travels in a task request.
func (d Definition) Resolve() contract.Subagent {
	return contract.Subagent{
		Name: d.Name, Description: d.Description, SystemPrompt: d.SystemPrompt,
		Tools: slices.Clone(d.Tools), DisallowedTools: slices.Clone(d.DisallowedTools),
		Model: d.Model, Pool: d.Pool, MaxTurns: d.MaxTurns, TimeoutSeconds: d.TimeoutSeconds, Network: d.Network,
		Skills: slices.Clone(d.Skills),
	}
}

func (d Definition) clone() Definition {
	d.Tools, d.DisallowedTools, d.Skills = slices.Clone(d.Tools), slices.Clone(d.DisallowedTools), slices.Clone(d.Skills)
	return d
}

// Config is what the configuration says about sub-agents.
type Config struct {
	// TimeoutSeconds and MaxTurns are for the built-in types only. Nil:
	// [DefaultBuiltinTimeoutSeconds], and the types' own turns.
	TimeoutSeconds *int
	MaxTurns       *int
	// Agents holds overrides by type, of any origin. One for a type that does
	// not exist has no effect.
	Agents map[string]Override
	// Custom holds further types in the order of the file. One with the name of
	// a built-in type adds nothing.
	Custom []Custom
	// Files are the definitions of Markdown files in the order in which they were
	// found, Managed those of administrators. What they hold was checked when it
	// was read: one that another layer owns adds nothing, and nothing in them
	// fails the whole.
	Files   []File
	Managed []Stored
}

// Override changes single values of a type; what is nil leaves them. Prompt,
// tools and denials cannot be overridden.
type Override struct {
	TimeoutSeconds *int
	MaxTurns       *int
	Model          *string
	Pool           *contract.Pool
	// Skills: empty means none.
	Skills  []string
	Network *bool
}

// Custom is a type that the configuration defines.
type Custom struct {
	Name         string
	Description  string
	SystemPrompt string
	// Tools: nil means all that are offered, empty none.
	Tools []string
	// DisallowedTools: nil takes the default denials; a pointer to a nil or empty
	// list denies nothing.
	DisallowedTools *[]string
	Skills          []string
	Model           string // empty: inherit
	Pool            contract.Pool
	MaxTurns        *int
	TimeoutSeconds  *int
	Network         bool
}

// Entry is a definition as the catalogue of administrators shows it: also one
// that does not exist for runs.
type Entry struct {
	// Definition has the effective values for an owner, its own for the others.
	Definition Definition
	// DisplayName is for people; only managed definitions have one.
	DisplayName string
	// Enabled is false for a managed definition that is switched off.
	Enabled bool
	// ShadowedBy says who owns the name instead; empty for its owner. A managed
	// definition that is switched off owns nothing.
	ShadowedBy Origin
	// Revision is that of a managed definition in its store, else 0.
	Revision uint64
	// Path is the file of a definition that comes from one.
	Path string
}

// Registry answers for the types. It does not change once it is made and is
// safe for concurrent use.
type Registry struct {
	order   []string
	byName  map[string]Definition
	entries []Entry
}

// ErrDefinition is returned when the configuration defines a type wrongly.
var ErrDefinition = errors.New("invalid sub-agent definition")

// NewRegistry checks cfg and puts the types together: a name belongs to the
// built-in type, else to the configuration's, whole; overrides come last.
func NewRegistry(cfg Config) (*Registry, error) {
	r := &Registry{byName: map[string]Definition{}}
	var errs []error
	positive := func(what string, n *int) {
		if n != nil && *n < 1 {
			errs = append(errs, fmt.Errorf("%w: %s is %d; want at least 1", ErrDefinition, what, *n))
		}
	}
	pool := func(what string, p contract.Pool) {
		if p == "" {
			return
		}
		if err := p.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("%w: %s: %w", ErrDefinition, what, err))
		}
	}
	positive("timeout_seconds", cfg.TimeoutSeconds)
	positive("max_turns", cfg.MaxTurns)
	for _, d := range builtins() {
		d.TimeoutSeconds = or(cfg.TimeoutSeconds, DefaultBuiltinTimeoutSeconds)
		d.MaxTurns = or(cfg.MaxTurns, d.MaxTurns)
		r.add(Entry{Definition: d, Enabled: true})
	}
	seen := map[string]bool{}
	for _, c := range cfg.Custom {
		what := fmt.Sprintf("custom_agents.%s", c.Name)
		if err := contract.ValidateToken("name", c.Name); err != nil {
			errs = append(errs, fmt.Errorf("%w: %s: %w", ErrDefinition, what, err))
			continue
		}
		if seen[c.Name] {
			errs = append(errs, fmt.Errorf("%w: %s is defined twice", ErrDefinition, what))
			continue
		}
		seen[c.Name] = true
		if c.Description == "" {
			errs = append(errs, fmt.Errorf("%w: %s.description is empty; say when to use it", ErrDefinition, what))
		}
		if c.SystemPrompt == "" {
			errs = append(errs, fmt.Errorf("%w: %s.system_prompt is empty", ErrDefinition, what))
		}
		positive(what+".max_turns", c.MaxTurns)
		positive(what+".timeout_seconds", c.TimeoutSeconds)
		pool(what+".pool", c.Pool)
		r.add(Entry{Definition: c.definition(OriginConfig), Enabled: true})
	}
	for _, f := range cfg.Files {
		r.add(Entry{Definition: f.definition(OriginFile), Enabled: true, Path: f.Path})
	}
	managed := slices.Clone(cfg.Managed)
	slices.SortFunc(managed, func(a, b Stored) int { return strings.Compare(a.Name, b.Name) })
	for _, m := range managed {
		r.add(Entry{Definition: m.Definition(), DisplayName: m.DisplayName, Enabled: m.Enabled, Revision: m.Revision})
	}
	for name, o := range cfg.Agents {
		what := fmt.Sprintf("agents.%s", name)
		positive(what+".max_turns", o.MaxTurns)
		positive(what+".timeout_seconds", o.TimeoutSeconds)
		if o.Pool != nil {
			pool(what+".pool", *o.Pool)
		}
		if o.Model != nil && *o.Model == "" {
			errs = append(errs, fmt.Errorf("%w: %s.model is empty; leave it out to keep the type's own", ErrDefinition, what))
		}
		if d, ok := r.byName[name]; ok {
			r.byName[name] = o.apply(d)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return r, nil
}

// add takes the next definition in the order of precedence: the first that is
// enabled owns its name whole (REG-01).
func (r *Registry) add(e Entry) {
	d := e.Definition
	owner, taken := r.byName[d.Name]
	switch {
	case taken:
		e.ShadowedBy = owner.Origin
	case e.Enabled:
		r.order = append(r.order, d.Name)
		r.byName[d.Name] = d
	}
	r.entries = append(r.entries, e)
}

func (c Custom) definition(origin Origin) Definition {
	d := Definition{
		Name: c.Name, Origin: origin, Description: c.Description, SystemPrompt: c.SystemPrompt,
		Tools: slices.Clone(c.Tools), DisallowedTools: deniedTools(), Skills: slices.Clone(c.Skills),
		Model: c.Model, Pool: c.Pool, MaxTurns: or(c.MaxTurns, DefaultMaxTurns), TimeoutSeconds: or(c.TimeoutSeconds, DefaultTimeoutSeconds),
		Network: c.Network,
	}
	if c.DisallowedTools != nil {
		d.DisallowedTools = append([]string{}, *c.DisallowedTools...)
	}
	if d.Model == "" {
		d.Model = InheritModel
	}
	return d
}

func (o Override) apply(d Definition) Definition {
	d.TimeoutSeconds, d.MaxTurns = or(o.TimeoutSeconds, d.TimeoutSeconds), or(o.MaxTurns, d.MaxTurns)
	if o.Model != nil {
		d.Model = *o.Model
	}
	if o.Pool != nil {
		d.Pool = *o.Pool
	}
	if o.Network != nil {
		d.Network = *o.Network
	}
	if o.Skills != nil {
		d.Skills = slices.Clone(o.Skills)
	}
	return d
}

func or(p *int, otherwise int) int {
	if p == nil {
		return otherwise
	}
	return *p
}

// Get returns the type called name. The result is the caller's own.
func (r *Registry) Get(name string) (Definition, bool) {
	d, ok := r.byName[name]
	return d.clone(), ok
}

// List returns all types: the built-in ones, then the configuration's in the
// order of its file, those of files as they were found, managed ones by name.
func (r *Registry) List() []Definition {
	out := make([]Definition, 0, len(r.order))
	for _, name := range r.order {
		out = append(out, r.byName[name].clone())
	}
	return out
}

// Entries returns every definition that there is, in the order of precedence:
// also those whose name another one owns (REG-07), and those that are switched
// off (REG-08).
func (r *Registry) Entries() []Entry {
	out := slices.Clone(r.entries)
	for i, e := range out {
		d := e.Definition
		if owner := r.byName[d.Name]; e.Enabled && e.ShadowedBy == "" && owner.Origin == d.Origin {
			d = owner // with its overrides
		}
		out[i].Definition = d.clone()
	}
	return out
}

// Visible returns the types that a caller may use, in the order of [List]. For
// allowed, nil means all and empty none; names that do not exist are ignored.
// Without the right to use the host's shell the type [Bash] is hidden, and no
// list brings it back. One and the same filter serves what the model reads and
// what is executed.
func (r *Registry) Visible(allowed []string, shellAllowed bool) []Definition {
	var out []Definition
	for _, d := range r.List() {
		if d.Name == Bash && !shellAllowed || !contract.Permits(allowed, d.Name) {
			continue
		}
		out = append(out, d)
	}
	return out
}

// ErrNoModels is returned when a model is needed and none is configured.
var ErrNoModels = errors.New("no model is configured")

// EffectiveModel returns the model that a definition runs on: its own, for
// [InheritModel] the parent's, else the first that is configured.
func EffectiveModel(definition, parent, first string) (string, error) {
	for _, name := range []string{definition, parent, first} {
		if name != "" && name != InheritModel {
			return name, nil
		}
	}
	return "", fmt.Errorf("model of a sub-agent: %w", ErrNoModels)
}
