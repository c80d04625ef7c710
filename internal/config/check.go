package config

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"go.yaml.in/yaml/v3"
)

// Check reads a configuration from data, lays env (NAME=value, as from
// os.Environ) over it and returns it with everything that is wrong. file is its
// name in the faults; relative paths in data mean files beside it. With faults,
// the Config has defaults in place of what is wrong and should not be used.
func Check(file string, data []byte, env []string) (Config, []Fault) {
	c, err := theSchema()
	if err != nil {
		return Default(), []Fault{{Rule: err.Error()}}
	}
	t := parse(file, data)
	t.applyEnv(env, c.strict)
	normalise(t.root, c.strict)

	k := &checker{tree: t, schema: c.strict, env: env, bad: map[string]bool{}}
	k.validate(c.validator)
	if len(t.faults) > floodFaults {
		return Default(), k.sorted()
	}
	k.resolvePaths(t.root, c.strict)

	cfg := Default()
	if err := t.root.Decode(&cfg); err != nil {
		// Whatever the schema lets through the structs can hold; if not, the
		// schema has a hole, and no half-read configuration may leave here.
		if len(t.faults) == 0 {
			t.faults = append(t.faults, t.syntax(err))
		}
		return Default(), k.sorted()
	}
	if _, agents := lookup(t.root, "subagents"); agents != nil {
		if _, custom := lookup(agents, "custom_agents"); custom != nil {
			for i := 0; i+1 < len(custom.Content); i += 2 {
				cfg.Subagents.CustomAgentNames = append(cfg.Subagents.CustomAgentNames, custom.Content[i].Value)
			}
		}
	}
	cfg.fillBudgets()
	k.rules(cfg)
	return cfg, k.sorted()
}

// normalise removes what means the same as missing, and wraps a lone element
// that stands for a list.
func normalise(n *yaml.Node, s schema) {
	switch n.Kind {
	case yaml.MappingNode:
		kept := n.Content[:0:0]
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, value := n.Content[i], n.Content[i+1]
			c, known := s.child(key.Value)
			if known && isNull(value) && value.HeadComment != muted && (c.kind() == "object" || c.kind() == "array") && c["x-null"] == nil {
				continue
			}
			if known && c["x-single"] == true && value.Kind == yaml.MappingNode {
				value = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: value.Line, Column: value.Column, Content: []*yaml.Node{value}}
			}
			if known {
				normalise(value, c)
			}
			kept = append(kept, key, value)
		}
		n.Content = kept
	case yaml.SequenceNode:
		if c, ok := s.child("0"); ok {
			for _, e := range n.Content {
				normalise(e, c)
			}
		}
	}
}

// checker collects the faults of one document.
type checker struct {
	tree   *tree
	schema schema
	env    []string
	// bad has the paths that have a fault already, joined by \x00.
	bad map[string]bool
}

func (k *checker) add(f Fault, path []string) {
	k.tree.faults = append(k.tree.faults, f)
	k.bad[strings.Join(path, "\x00")] = true
}

// isBad reports whether path, or something around it, has a fault.
func (k *checker) isBad(path []string) bool {
	for i := range path {
		if k.bad[strings.Join(path[:i+1], "\x00")] {
			return true
		}
	}
	return false
}

func (k *checker) sorted() []Fault {
	faults := k.tree.faults
	slices.SortStableFunc(faults, func(a, b Fault) int {
		if (a.Env == "") != (b.Env == "") {
			if a.Env == "" {
				return -1
			}
			return 1
		}
		if a.Env != b.Env {
			return strings.Compare(a.Env, b.Env)
		}
		if a.Line != b.Line {
			return a.Line - b.Line
		}
		return a.Column - b.Column
	})
	faults = slices.Compact(faults)
	if len(faults) > maxFaults {
		more := len(faults) - maxFaults
		faults = append(faults[:maxFaults:maxFaults], Fault{File: k.tree.file, Rule: fmt.Sprintf("has at least %d more faults", more)})
	}
	return faults
}

// validate checks the document against the schema, makes a fault of each
// difference, and takes the faulty values out, so that the rest can be checked
// further.
func (k *checker) validate(v *jsonschema.Schema) {
	err := v.Validate(instance(k.tree.root, k.schema))
	if err == nil {
		return
	}
	var all *jsonschema.ValidationError
	if !errors.As(err, &all) {
		k.add(Fault{File: k.tree.file, Rule: err.Error()}, nil)
		return
	}
	var prune [][]string
	for _, e := range leaves(all) {
		if len(k.tree.faults) > floodFaults {
			return
		}
		if why, ok := e.ErrorKind.(*kind.PropertyNames); ok {
			// The validator goes on using the buffer in which it tells this place: only
			// the length of it holds.
			for _, at := range k.badNames(k.tree.root, nil, len(e.InstanceLocation), why.Property) {
				if k.isBad(at) {
					continue
				}
				names, _ := k.schema.at(at[:len(at)-1])["propertyNames"].(map[string]any)
				rule := fmt.Sprintf("must be a name that matches %v (at most %v characters)", names["pattern"], names["maxLength"])
				k.add(k.tree.fault(k.tree.keyAt(at), at, rule, strconv.Quote(clip(why.Property))), at)
				prune = append(prune, at)
			}
			continue
		}
		path := e.InstanceLocation
		if n := k.tree.at(path); n != nil && n.HeadComment == muted {
			prune = append(prune, path)
			continue
		}
		switch why := e.ErrorKind.(type) {
		case *kind.AdditionalProperties:
			for _, name := range why.Properties {
				k.unknownKey(path, name)
			}
		case *kind.Required:
			for _, name := range why.Missing {
				at := join(path, name)
				s := k.schema.at(at)
				k.add(k.tree.fault(k.tree.nearest(path), at, "is required and "+s.rule(), ""), at)
			}
		case *kind.MaxProperties:
			k.add(k.tree.fault(k.tree.at(path), path, fmt.Sprintf("must have at most %d keys", why.Want), strconv.Itoa(why.Got)), path)
			prune = append(prune, path)
		default:
			if k.isBad(path) {
				continue // one value can break several keywords; the rule names all
			}
			n, s := k.tree.at(path), k.schema.at(path)
			k.add(k.tree.fault(n, path, s.rule(), show(n, s)), path)
			prune = append(prune, path)
		}
	}
	k.prune(prune)
}

// badNames returns the places of the keys called name, below mappings so many levels
// deep, whose schema does not take that name.
func (k *checker) badNames(n *yaml.Node, path []string, depth int, name string) [][]string {
	var out [][]string
	switch {
	case n.Kind == yaml.MappingNode && depth == 0:
		names, ok := k.schema.at(path)["propertyNames"].(map[string]any)
		if _, value := lookup(n, name); ok && value != nil && !takes(names, name) {
			out = append(out, join(path, name))
		}
	case n.Kind == yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			out = append(out, k.badNames(n.Content[i+1], join(path, n.Content[i].Value), depth-1, name)...)
		}
	case n.Kind == yaml.SequenceNode && depth > 0:
		for i, e := range n.Content {
			out = append(out, k.badNames(e, join(path, strconv.Itoa(i)), depth-1, name)...)
		}
	}
	return out
}

// takes reports whether a schema of names takes name.
func takes(names map[string]any, name string) bool {
	pattern, _ := names["pattern"].(string)
	rule, err := regexp.Compile(pattern)
	if err != nil || !rule.MatchString(name) {
		return false
	}
	limit, err := strconv.Atoi(fmt.Sprint(names["maxLength"]))
	return err != nil || utf8.RuneCountInString(name) <= limit
}

func clip(s string) string {
	if r := []rune(s); len(r) > maxShown {
		return string(r[:maxShown]) + "…"
	}
	return s
}

// leaves are the errors at the ends of the tree of errors: those that name a
// keyword of one value.
func leaves(e *jsonschema.ValidationError) []*jsonschema.ValidationError {
	if _, ok := e.ErrorKind.(*kind.PropertyNames); ok || len(e.Causes) == 0 {
		return []*jsonschema.ValidationError{e}
	}
	var out []*jsonschema.ValidationError
	for _, c := range e.Causes {
		out = append(out, leaves(c)...)
	}
	return out
}

func (k *checker) unknownKey(path []string, name string) {
	at := join(path, name)
	var names []string
	for n := range k.schema.at(path).properties() {
		names = append(names, n)
	}
	where := "the top level"
	if len(path) > 0 {
		where = k.tree.path(path)
	}
	hint := suggest(name, names)
	if hint == "" {
		hint = k.elsewhere(name)
	}
	k.add(k.tree.fault(k.tree.keyAt(at), at, "is not a key of "+where+hint, ""), at)
}

// elsewhere finds a key of that name in another section: most often a key is
// not misspelt but misplaced.
func (k *checker) elsewhere(name string) string {
	var found []string
	for section, s := range k.schema.properties() {
		if _, ok := s.property(name); ok {
			found = append(found, section+"."+name)
		}
	}
	if len(found) == 0 {
		return ""
	}
	slices.Sort(found)
	return "; did you mean " + strings.Join(found, " or ") + "?"
}

func join(path []string, key ...string) []string {
	return append(path[:len(path):len(path)], key...)
}

// prune takes values out of the document. In lists of sections the place stays,
// empty, so that the numbers of the others still fit.
func (k *checker) prune(paths [][]string) {
	// From the end, so that numbers stay right when elements go.
	slices.SortFunc(paths, func(a, b []string) int { return -slices.CompareFunc(a, b, compareKeys) })
	for _, path := range paths {
		if len(path) == 0 {
			k.tree.root = &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
			continue
		}
		parent := k.tree.at(path[:len(path)-1])
		if parent == nil {
			continue
		}
		last := path[len(path)-1]
		switch parent.Kind {
		case yaml.MappingNode:
			for i := 0; i+1 < len(parent.Content); i += 2 {
				if parent.Content[i].Value == last {
					parent.Content = slices.Delete(parent.Content, i, i+2)
					break
				}
			}
		case yaml.SequenceNode:
			i, err := strconv.Atoi(last)
			if err != nil || i >= len(parent.Content) {
				continue
			}
			if k.schema.at(path).kind() == "object" {
				parent.Content[i] = &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
			} else {
				parent.Content = slices.Delete(parent.Content, i, i+1)
			}
		}
	}
}

func compareKeys(a, b string) int {
	x, errX := strconv.Atoi(a)
	y, errY := strconv.Atoi(b)
	if errX == nil && errY == nil {
		return x - y
	}
	return strings.Compare(a, b)
}

// instance turns a node into the values that the validator knows. Numbers keep
// their form: 3.0 is no integer to us.
func instance(n *yaml.Node, s schema) any {
	switch n.Kind {
	case yaml.MappingNode:
		m := make(map[string]any, len(n.Content)/2)
		for i := 0; i+1 < len(n.Content); i += 2 {
			c, _ := s.child(n.Content[i].Value)
			m[n.Content[i].Value] = instance(n.Content[i+1], c)
		}
		return m
	case yaml.SequenceNode:
		list := make([]any, len(n.Content))
		c, _ := s.child("0")
		for i, e := range n.Content {
			list[i] = instance(e, c)
		}
		return list
	}
	switch n.ShortTag() {
	case "!!null":
		if s["x-null"] == "keep" {
			return []any{} // a list that may be null in earnest
		}
		return nil
	case "!!bool":
		var b bool
		if n.Decode(&b) == nil {
			return b
		}
	case "!!int":
		var i int64
		if n.Decode(&i) == nil {
			return i
		}
	case "!!float":
		var f float64
		// Infinity and "not a number" are numbers to YAML only.
		if n.Decode(&f) == nil && !math.IsInf(f, 0) && !math.IsNaN(f) && s.kind() != "integer" {
			return f
		}
	}
	if n.ShortTag() != "!!str" && s.kind() == "string" {
		return false // what is not a text must not pass for one
	}
	return n.Value
}

// resolvePaths makes the relative file names of the document absolute or
// relative to where we run. Those from the environment stay: whoever sets a
// variable thinks of where the program runs.
func (k *checker) resolvePaths(n *yaml.Node, s schema) {
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if c, ok := s.child(n.Content[i].Value); ok {
				k.resolvePaths(n.Content[i+1], c)
			}
		}
	case yaml.SequenceNode:
		if c, ok := s.child("0"); ok {
			for _, e := range n.Content {
				k.resolvePaths(e, c)
			}
		}
	case yaml.ScalarNode:
		if _, env := k.tree.env[n]; env || n.Value == "" || n.ShortTag() != "!!str" {
			return
		}
		switch s["x-path"] {
		case true:
			n.Value = k.beside(n.Value)
		case "dotted":
			if strings.HasPrefix(n.Value, "./") || strings.HasPrefix(n.Value, "../") {
				n.Value = k.beside(n.Value)
			}
		}
	}
}

func (k *checker) beside(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	joined := filepath.Join(filepath.Dir(k.tree.file), p)
	if filepath.IsAbs(joined) || strings.HasPrefix(joined, "..") {
		return joined
	}
	// A name with a dot in front cannot be taken for a command in the PATH.
	return "." + string(filepath.Separator) + joined
}
