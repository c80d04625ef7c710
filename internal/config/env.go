package config

import (
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// envPrefix begins the names of our environment variables.
const envPrefix = "HERDGATE_"

// kubernetesService matches the variables that Kubernetes sets in every pod for
// a service whose name begins with herdgate.
var kubernetesService = regexp.MustCompile(`^HERDGATE_([A-Z0-9]+_)*(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

// EnvKeys returns the environment variables of all scalar keys, sorted.
func EnvKeys() []string {
	c, err := theSchema()
	if err != nil {
		return nil
	}
	var names []string
	for name := range envPaths(c.strict) {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// envPaths maps the name of each variable to the path of its key.
func envPaths(s schema) map[string][]string {
	out := map[string][]string{}
	var walk func(s schema, path []string)
	walk = func(s schema, path []string) {
		for name, p := range s.properties() {
			at := append(path[:len(path):len(path)], name)
			if p.scalar() {
				out[envPrefix+strings.ToUpper(strings.Join(at, "__"))] = at
			} else {
				walk(p, at)
			}
		}
	}
	walk(s, nil)
	return out
}

// applyEnv lays the environment over the document. Variables that the
// configuration itself names (keys and tokens) are not settings.
func (t *tree) applyEnv(env []string, s schema) {
	paths := envPaths(s)
	var unknown []string
	values := map[string]string{}
	for _, kv := range env {
		name, value, ok := strings.Cut(kv, "=")
		if !ok || !strings.HasPrefix(name, envPrefix) {
			continue
		}
		if _, dup := values[name]; !dup {
			if _, known := paths[name]; !known {
				unknown = append(unknown, name)
			}
		}
		values[name] = value // the last one counts, as in os/exec
	}
	for name, path := range paths {
		if value, ok := values[name]; ok {
			t.set(path, envNode(value, s.at(path)), name)
		}
	}
	if len(unknown) == 0 {
		return
	}
	named := t.namedVariables(s)
	known := make([]string, 0, len(paths))
	for name := range paths {
		known = append(known, name)
	}
	slices.Sort(unknown)
	for _, name := range unknown {
		switch {
		case name == "HERDGATE_VECTORS", strings.HasPrefix(name, "HERDGATE_TEST_"),
			kubernetesService.MatchString(name), named[name]:
			continue
		}
		t.faults = append(t.faults, Fault{Env: name, Rule: unknownVariable(name, s) + suggest(name, known)})
	}
}

// unknownVariable says why a variable is not a setting.
func unknownVariable(name string, s schema) string {
	path := strings.Split(strings.ToLower(strings.TrimPrefix(name, envPrefix)), "__")
	for i := range path {
		switch at := s.at(path[:i+1]); at.kind() {
		case "array":
			return "must be set in the file: " + strings.Join(path[:i+1], ".") + " is a list"
		case "object":
			if at["additionalProperties"] != false {
				return "must be set in the file: " + strings.Join(path[:i+1], ".") + " holds names of your own"
			}
			if i == len(path)-1 {
				return "must name a key: " + strings.Join(path, ".") + " is a section"
			}
		}
	}
	return "must be the variable of a configuration key; there is no key of that name"
}

// envNode is the value of a variable as the document would hold it. Texts are
// taken as they are; for all else the value is read as YAML reads a plain word.
func envNode(value string, s schema) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Value: value}
	if s.kind() == "string" && !(s.nullable() && value == "null") {
		n.Tag = "!!str"
		return n
	}
	n.Value = strings.TrimSpace(value)
	n.Tag = n.ShortTag()
	if n.Value == "" {
		n.Tag = "!!str" // a plain nothing would be null, which nobody has written
	}
	return n
}

// namedVariables are the environment variables that the document refers to.
func (t *tree) namedVariables(s schema) map[string]bool {
	out := map[string]bool{}
	var walk func(n *yaml.Node, s schema, key string)
	walk = func(n *yaml.Node, s schema, key string) {
		switch n.Kind {
		case yaml.ScalarNode:
			if strings.HasSuffix(key, "_env") {
				out[n.Value] = true
			} else if m := envRef.FindStringSubmatch(n.Value); m != nil && s != nil && s["x-hide"] != nil {
				out[m[1]] = true
			}
		case yaml.MappingNode:
			for i := 0; i+1 < len(n.Content); i += 2 {
				c, _ := s.child(n.Content[i].Value)
				walk(n.Content[i+1], c, n.Content[i].Value)
			}
		case yaml.SequenceNode:
			for _, e := range n.Content {
				c, _ := s.child("0")
				walk(e, c, key)
			}
		}
	}
	walk(t.root, s, "")
	return out
}
