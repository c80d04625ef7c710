package agentfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/subagent"
)

// Definition is what one document of a file asks to be stored.
type Definition struct {
	Name    string
	Request wire.SubagentRequest
}

// Same reports whether a stored definition is what d asks for.
func (d Definition) Same(stored wire.Subagent) bool {
	r := d.Request
	enabled, display := true, ""
	if r.Enabled != nil {
		enabled = *r.Enabled
	}
	if r.DisplayName != nil {
		display = strings.TrimSpace(*r.DisplayName)
	}
	number := func(n *int, otherwise int) int {
		if n == nil {
			return otherwise
		}
		return *n
	}
	same := func(a, b []string) bool { return (a == nil) == (b == nil) && slices.Equal(a, b) }
	return stored.Name == d.Name && stored.Enabled == enabled && stored.DisplayName == display && stored.Description == r.Description &&
		stored.SystemPrompt == r.SystemPrompt && same(stored.Tools, r.Tools) && same(stored.DisallowedTools, r.DisallowedTools) && same(stored.Skills, r.Skills) &&
		stored.Model == r.Model && stored.Pool == r.Pool && stored.Network == r.Network &&
		stored.MaxTurns == number(r.MaxTurns, subagent.DefaultMaxTurns) && stored.TimeoutSeconds == number(r.TimeoutSeconds, subagent.DefaultTimeoutSeconds)
}

// maxApply bounds a file with documents.
const maxApply = 16 << 20

// document is a definition in YAML: the keys of custom_agents, with name, and what
// only managed definitions have.
type document struct {
	Name            string   `yaml:"name"`
	DisplayName     *string  `yaml:"display_name"`
	Description     string   `yaml:"description"`
	SystemPrompt    string   `yaml:"system_prompt"`
	Tools           []string `yaml:"tools"`
	DisallowedTools []string `yaml:"disallowed_tools"`
	Skills          []string `yaml:"skills"`
	Model           string   `yaml:"model"`
	Pool            string   `yaml:"pool"`
	MaxTurns        *int     `yaml:"max_turns"`
	TimeoutSeconds  *int     `yaml:"timeout_seconds"`
	Network         bool     `yaml:"network"`
	Enabled         *bool    `yaml:"enabled"`
}

// ReadDefinitions reads a file for the store of managed definitions: Markdown, if
// its name ends in .md, else YAML, or JSON, with one definition in each document.
// Nothing of a file with a fault is returned.
func ReadDefinitions(file string, r io.Reader) ([]Definition, []Warning, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxApply+1))
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(data) > maxApply {
		return nil, nil, fmt.Errorf("%s has more than %d bytes", file, maxApply)
	}
	if strings.EqualFold(filepath.Ext(file), ".md") {
		return readMarkdown(file, data)
	}
	var out []Definition
	seen := map[string]bool{}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	for n := 1; ; n++ {
		var d *document
		err := dec.Decode(&d)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, nil, fmt.Errorf("%s, document %d: %s", file, n, strings.TrimPrefix(err.Error(), "yaml: "))
		}
		if d == nil {
			continue // nothing between two separators
		}
		def, err := d.definition()
		if err == nil && seen[def.Name] {
			err = fmt.Errorf("%s is defined in a document before already", def.Name)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("%s, document %d: %w", file, n, err)
		}
		seen[def.Name] = true
		out = append(out, def)
	}
	if len(out) == 0 {
		return nil, nil, fmt.Errorf("%s holds no definition; want name, description and system_prompt", file)
	}
	return out, nil, nil
}

func (d *document) definition() (Definition, error) {
	m := subagent.Managed{
		Name: d.Name, Description: d.Description, SystemPrompt: d.SystemPrompt, Tools: d.Tools, DisallowedTools: d.DisallowedTools,
		Skills: d.Skills, Model: d.Model,
	}
	m, err := m.Normalize()
	if err != nil {
		return Definition{}, err
	}
	return Definition{Name: m.Name, Request: wire.SubagentRequest{
		Description: m.Description, SystemPrompt: m.SystemPrompt, DisplayName: d.DisplayName, Tools: m.Tools, DisallowedTools: m.DisallowedTools,
		Skills: m.Skills, Model: m.Model, Pool: d.Pool, MaxTurns: d.MaxTurns, TimeoutSeconds: d.TimeoutSeconds, Network: d.Network, Enabled: d.Enabled,
	}}, nil
}

func readMarkdown(file string, data []byte) ([]Definition, []Warning, error) {
	c, notes, err := subagent.Markdown{}.Parse(data)
	if e, ok := subagent.IsLineError(err); ok {
		return nil, nil, fmt.Errorf("%s:%d: %s", file, e.Line, e.Text)
	} else if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", file, err)
	}
	var warnings []Warning
	for _, n := range notes {
		warnings = append(warnings, Warning{fmt.Sprintf("%s:%d", file, n.Line), n.Text})
	}
	d := document{
		Name: c.Name, Description: c.Description, SystemPrompt: c.SystemPrompt, Tools: c.Tools, DisallowedTools: *c.DisallowedTools, Skills: c.Skills,
		Model: c.Model, Pool: string(c.Pool), MaxTurns: c.MaxTurns, TimeoutSeconds: c.TimeoutSeconds, Network: c.Network,
	}
	def, err := d.definition()
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", file, err)
	}
	return []Definition{def}, warnings, nil
}
