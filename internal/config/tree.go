package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Bounds on a document.
const (
	// MaxFileBytes is the largest configuration file.
	MaxFileBytes = 1 << 20
	// maxNodes bounds the document after aliases are written out: a few lines
	// of them can stand for billions of values, and some steps cost the square
	// of what one mapping holds.
	maxNodes = 10_000
	maxDepth = 32
)

// tree is a document without aliases and merge keys, in which every value
// knows where it came from.
type tree struct {
	file string
	root *yaml.Node
	// env has the environment variable of the values that came from one.
	env    map[*yaml.Node]string
	faults []Fault
	count  int
}

// parse reads one YAML document. What is wrong with its form becomes a fault;
// the tree then holds what could be read.
func parse(file string, data []byte) *tree {
	t := &tree{file: file, root: &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}, env: map[*yaml.Node]string{}}
	if len(data) > MaxFileBytes {
		t.faults = append(t.faults, Fault{File: file, Rule: fmt.Sprintf("must have at most %d bytes", MaxFileBytes), Got: strconv.Itoa(len(data)) + " bytes"})
		return t
	}
	if !utf8.Valid(data) {
		line := 1 + bytes.Count(data[:invalidAt(data)], []byte("\n"))
		t.faults = append(t.faults, Fault{File: file, Line: line, Column: 1, Rule: "must be UTF-8 text"})
		return t
	}
	if depth(data) > maxDepth*4 {
		t.faults = append(t.faults, Fault{File: file, Rule: fmt.Sprintf("must not be nested deeper than %d levels", maxDepth)})
		return t
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, second yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return t
	case err != nil:
		t.faults = append(t.faults, t.syntax(err))
		return t
	}
	switch err := dec.Decode(&second); {
	case errors.Is(err, io.EOF):
	case err != nil:
		t.faults = append(t.faults, t.syntax(err))
		return t
	default:
		t.faults = append(t.faults, t.fault(&second, nil, "must hold one document; a second one begins here", ""))
		return t
	}
	if len(doc.Content) == 0 || isNull(doc.Content[0]) {
		return t
	}
	root := t.expand(doc.Content[0], nil, map[*yaml.Node]bool{}, 0)
	if root == nil || t.count > maxNodes {
		return t
	}
	if root.Kind != yaml.MappingNode {
		t.faults = append(t.faults, t.fault(root, nil, "must be a mapping of sections", show(root, nil)))
		return t
	}
	t.root = root
	return t
}

func invalidAt(data []byte) int {
	at := 0
	for at < len(data) {
		r, n := utf8.DecodeRune(data[at:])
		if r == utf8.RuneError && n == 1 {
			break
		}
		at += n
	}
	return at
}

// depth is the deepest run of open brackets: the parser recurses for each, so
// they are counted before it sees them. Brackets in texts make it too high,
// which the generous bound allows for.
func depth(data []byte) int {
	deepest, open := 0, 0
	for _, c := range data {
		switch c {
		case '[', '{':
			open++
			deepest = max(deepest, open)
		case ']', '}':
			open = max(0, open-1)
		case '\n':
			// A bracket in a comment or a text is never closed.
			if open > maxDepth*4 {
				return open
			}
		}
	}
	return deepest
}

var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// syntax turns an error of the parser into a fault. The parser tells the line
// only.
func (t *tree) syntax(err error) Fault {
	f := Fault{File: t.file, Line: 1, Column: 1}
	msg := err.Error()
	if m := yamlLine.FindStringSubmatch(msg); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil {
			f.Line = n
		}
		msg = msg[len(m[0]):]
	}
	f.Rule = "must be YAML: " + msg
	return f
}

// fault is a fault at a node.
func (t *tree) fault(n *yaml.Node, path []string, rule, got string) Fault {
	f := Fault{Path: t.path(path), Rule: rule, Got: got}
	if n == nil {
		f.File = t.file
		return f
	}
	if name, ok := t.env[n]; ok {
		f.Env = name
		return f
	}
	f.File, f.Line, f.Column = t.file, n.Line, n.Column
	return f
}

// path writes a path as people do; without a schema it cannot be told from the
// keys alone what is a list.
func (t *tree) path(path []string) string {
	c, err := theSchema()
	if err != nil {
		return strings.Join(path, ".")
	}
	return pathString(path, c.strict)
}

// expand copies a node without aliases and merge keys. It returns nil for what
// it has made a fault of.
func (t *tree) expand(n *yaml.Node, path []string, open map[*yaml.Node]bool, level int) *yaml.Node {
	t.count++
	switch {
	case t.count > maxNodes:
		if t.count == maxNodes+1 {
			t.faults = append(t.faults, t.fault(n, path, fmt.Sprintf("must have at most %d values, aliases written out", maxNodes), ""))
		}
		return nil
	case level > maxDepth:
		t.faults = append(t.faults, t.fault(n, path, fmt.Sprintf("must not be nested deeper than %d levels", maxDepth), ""))
		return nil
	}
	at := *n // for positions: an alias counts where it stands
	if n.Kind == yaml.AliasNode {
		if open[n.Alias] {
			t.faults = append(t.faults, t.fault(n, path, "must not refer to itself", "*"+n.Value))
			return nil
		}
		n = n.Alias
	}
	out := &yaml.Node{Kind: n.Kind, Style: n.Style, Tag: n.Tag, Value: n.Value, Line: at.Line, Column: at.Column}
	switch n.Kind {
	case yaml.ScalarNode:
		switch n.ShortTag() {
		case "!!str", "!!int", "!!float", "!!bool", "!!null":
		case "!!timestamp":
			// YAML's dates are texts to us, quoted or not.
			out.Tag = "!!str"
		default:
			t.faults = append(t.faults, t.fault(&at, path, "must not have a tag", n.Tag))
			return nil
		}
	case yaml.SequenceNode:
		open[n] = true
		defer delete(open, n)
		for i, c := range n.Content {
			e := t.expand(c, append(path[:len(path):len(path)], strconv.Itoa(i)), open, level+1)
			if e == nil {
				// The place stays, so that later elements keep their number.
				e = &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null", Value: "null", Line: c.Line, Column: c.Column}
				t.mute(e)
			}
			out.Content = append(out.Content, e)
		}
	case yaml.MappingNode:
		open[n] = true
		defer delete(open, n)
		t.expandMapping(n, out, path, open, level)
	default:
		return nil
	}
	return out
}

// muted marks values that already have a fault.
const muted = "\x00muted"

func (t *tree) mute(n *yaml.Node) { n.HeadComment = muted }

func (t *tree) expandMapping(n, out *yaml.Node, path []string, open map[*yaml.Node]bool, level int) {
	lines := map[string]int{}
	var merges []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if key.Kind == yaml.AliasNode {
			key = &yaml.Node{Kind: key.Alias.Kind, Tag: key.Alias.Tag, Value: key.Alias.Value, Line: key.Line, Column: key.Column}
		}
		if key.Kind != yaml.ScalarNode {
			t.faults = append(t.faults, t.fault(key, path, "must have plain keys", show(key, nil)))
			continue
		}
		if key.ShortTag() == "!!merge" {
			merges = append(merges, value)
			continue
		}
		name := key.Value
		at := append(path[:len(path):len(path)], name)
		if first, ok := lines[name]; ok {
			t.faults = append(t.faults, t.fault(key, at, fmt.Sprintf("must be given once; it stands in line %d already", first), ""))
			continue
		}
		lines[name] = key.Line
		if v := t.expand(value, at, open, level+1); v != nil {
			out.Content = append(out.Content, keyNode(key, name), v)
		}
	}
	// Own keys win over merged ones, and those of earlier merges over later ones.
	for _, m := range merges {
		merged := t.expand(m, append(path[:len(path):len(path)], "<<"), open, level+1)
		if merged == nil {
			continue
		}
		sources := []*yaml.Node{merged}
		if merged.Kind == yaml.SequenceNode {
			sources = merged.Content
		}
		for _, src := range sources {
			if src.Kind != yaml.MappingNode {
				t.faults = append(t.faults, t.fault(src, path, "must merge mappings only", show(src, nil)))
				continue
			}
			for i := 0; i+1 < len(src.Content); i += 2 {
				if _, ok := lines[src.Content[i].Value]; !ok {
					lines[src.Content[i].Value] = src.Content[i].Line
					out.Content = append(out.Content, src.Content[i], src.Content[i+1])
				}
			}
		}
	}
}

func keyNode(from *yaml.Node, name string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: name, Line: from.Line, Column: from.Column}
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// lookup returns key and value of a mapping, or the element of a list (with a
// nil key), or nils.
func lookup(n *yaml.Node, key string) (k, v *yaml.Node) {
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				return n.Content[i], n.Content[i+1]
			}
		}
	case yaml.SequenceNode:
		if i, err := strconv.Atoi(key); err == nil && i >= 0 && i < len(n.Content) {
			return nil, n.Content[i]
		}
	}
	return nil, nil
}

// at returns the node at path, or nil.
func (t *tree) at(path []string) *yaml.Node {
	n := t.root
	for _, key := range path {
		if n == nil {
			return nil
		}
		_, n = lookup(n, key)
	}
	return n
}

// keyAt returns the key at the end of path, or nil.
func (t *tree) keyAt(path []string) *yaml.Node {
	if len(path) == 0 {
		return nil
	}
	parent := t.at(path[:len(path)-1])
	if parent == nil {
		return nil
	}
	k, _ := lookup(parent, path[len(path)-1])
	return k
}

// nearest returns the node at path or, when the file does not have it, the
// nearest node around it.
func (t *tree) nearest(path []string) *yaml.Node {
	for i := len(path); i > 0; i-- {
		if n := t.at(path[:i]); n != nil {
			return n
		}
	}
	return nil
}

// set puts a value from an environment variable at path, making the sections
// on the way.
func (t *tree) set(path []string, value *yaml.Node, env string) {
	n := t.root
	for i, key := range path {
		last := i == len(path)-1
		k, v := lookup(n, key)
		switch {
		case last && k != nil:
			for j := 0; j+1 < len(n.Content); j += 2 {
				if n.Content[j] == k {
					n.Content[j+1] = value
				}
			}
		case last:
			n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key}, value)
		case v == nil:
			v = &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
			t.env[v] = env
			n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key}, v)
		case v.Kind != yaml.MappingNode && isNull(v):
			*v = yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Line: v.Line, Column: v.Column}
		case v.Kind != yaml.MappingNode:
			return // the file's value is a fault by itself
		}
		n = v
	}
	t.env[value] = env
}
