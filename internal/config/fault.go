package config

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Fault is one thing that is wrong with a configuration.
type Fault struct {
	// File, Line and Column (both from 1) tell where the value stands. Line is 0
	// when it stands in no file.
	File         string `json:"file,omitempty"`
	Line, Column int    `json:"-"`
	// Env is the environment variable that the value came from.
	Env string `json:"env,omitempty"`
	// Path is the key, with its sections joined by dots: models[0].name.
	Path string `json:"path,omitempty"`
	// Rule says what the value must be.
	Rule string `json:"rule"`
	// Got is the value as it was written, shortened, or "". It holds no secret.
	Got string `json:"got,omitempty"`
}

// String is the fault in one line: file:line:column: path: rule, got value.
func (f Fault) String() string {
	var parts []string
	switch {
	case f.Env != "":
		parts = append(parts, f.Env)
	case f.File != "" && f.Line > 0:
		parts = append(parts, fmt.Sprintf("%s:%d:%d", f.File, f.Line, f.Column))
	case f.File != "":
		parts = append(parts, f.File)
	}
	if f.Path != "" {
		parts = append(parts, f.Path)
	}
	parts = append(parts, f.Rule)
	s := strings.Join(parts, ": ")
	if f.Got != "" {
		s += ", got " + f.Got
	}
	return s
}

// Error is what [Load] returns when a configuration is wrong.
type Error struct {
	// Faults has at least one element, in the order of the file, faults of the
	// environment last.
	Faults []Fault
}

// Error has one line for each fault.
func (e *Error) Error() string {
	lines := make([]string, len(e.Faults))
	for i, f := range e.Faults {
		lines[i] = f.String()
	}
	if len(lines) == 1 {
		return "config: " + lines[0]
	}
	return fmt.Sprintf("config: %d faults:\n  %s", len(lines), strings.Join(lines, "\n  "))
}

// maxFaults bounds the list: a file that is something else altogether has a
// fault in every line.
const maxFaults = 100

// floodFaults ends the search for further faults.
const floodFaults = 1000

// maxShown bounds a shown value, in characters.
const maxShown = 60

// show is a value as a fault shows it.
func show(n *yaml.Node, s schema) string {
	switch {
	case n == nil:
		return ""
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return fmt.Sprintf("a list of %d", len(n.Content))
	case n.ShortTag() == "!!null":
		return "null"
	case s != nil && s["x-hide"] != nil:
		return hidden
	}
	// Always, because an address with its password may stand where none belongs.
	v := redactAddress(n.Value)
	if utf8.RuneCountInString(v) > maxShown {
		v = string([]rune(v)[:maxShown]) + "…"
	}
	if n.ShortTag() == "!!str" {
		return fmt.Sprintf("%q", v)
	}
	return v
}

// pathString joins the keys of a path: models, 0, name give models[0].name.
func pathString(path []string, s schema) string {
	var b strings.Builder
	for _, key := range path {
		list := s != nil && s.kind() == "array"
		switch {
		case list:
			b.WriteString("[" + key + "]")
		case b.Len() > 0:
			b.WriteString("." + key)
		default:
			b.WriteString(key)
		}
		next, _ := s.child(key)
		s = next
	}
	return b.String()
}
