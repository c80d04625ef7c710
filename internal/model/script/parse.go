package script

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/template"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Limits of a script.
const (
	// MaxBytes bounds the file.
	MaxBytes = 1 << 20
	maxRules = 1000
	maxTurns = 1000
	maxCalls = 100
	maxDelay = 10 * time.Minute
	maxFault = 20 // how many faults of a file are told at once
)

// ErrScript is returned for a script that breaks the rules of this package. The
// text names file, line and column of each fault.
var ErrScript = errors.New("invalid script")

// Script is a parsed file. It is immutable.
type Script struct {
	model    string
	rules    []rule
	fallback *rule
}

type rule struct {
	agent     string // "*" fits all
	substring string
	regex     *regexp.Regexp
	turns     []turn
}

type turn struct {
	text   text
	calls  []call
	usage  *contract.Usage
	delay  time.Duration
	finish string
	fault  Fault
	// retryAfter is what a refusal asks for, as it is written.
	retryAfter string
	reasoning  string
}

type call struct {
	name string
	args value
}

// Fault is what goes wrong in a turn; "" is nothing.
type Fault string

// The faults after which there is no answer. Behind a server each is what its name
// says; without one, all are failures that pass.
const (
	FaultHTTP500       Fault = "http_500"
	FaultHTTP503       Fault = "http_503"
	FaultRateLimit     Fault = "rate_limit"            // status 429, with retry_after if the turn has one
	FaultOverloaded    Fault = "overloaded"            // status 529
	FaultTimeout       Fault = "timeout"               // the request is taken, nothing follows
	FaultReset         Fault = "connection_reset"      // before any answer
	FaultDisconnect    Fault = "disconnect_mid_stream" // the connection breaks in the middle of the answer
	FaultCut           Fault = "cut_stream"            // the stream ends in order, the answer does not
	FaultSilence       Fault = "silence"               // half of the answer, then nothing on an open line
	FaultComments      Fault = "comments_only"         // signs that the line is open, without end
	FaultErrorInStream Fault = "error_in_stream"       // an error event after half of the answer
)

// The faults of an answer.
const (
	FaultMalformed   Fault = "malformed_tool_args" // cut in the middle
	FaultCutCall     Fault = "cut_in_tool_call"    // the same, at the token limit
	FaultBlankIDs    Fault = "blank_call_ids"
	FaultRepeatedIDs Fault = "repeated_call_ids"
	FaultSplitUTF8   Fault = "split_utf8"   // pieces that end inside a character; behind a server only
	FaultOutOfOrder  Fault = "out_of_order" // pieces of several calls in turn; behind a server only
	FaultNullUsage   Fault = "null_usage"
)

var (
	failing = []Fault{
		FaultHTTP500, FaultHTTP503, FaultRateLimit, FaultOverloaded, FaultTimeout, FaultReset, FaultDisconnect, FaultCut, FaultSilence, FaultComments, FaultErrorInStream,
	}
	faults = append(slices.Clip(failing), FaultMalformed, FaultCutCall, FaultBlankIDs, FaultRepeatedIDs, FaultSplitUTF8, FaultOutOfOrder, FaultNullUsage)
	// needCalls are the faults of calls.
	needCalls = []Fault{FaultMalformed, FaultCutCall, FaultBlankIDs, FaultRepeatedIDs, FaultOutOfOrder}
)

// Fails reports whether a turn with the fault gives an error, not an answer.
func (f Fault) Fails() bool { return slices.Contains(failing, f) }

// text is a text that may be a template.
type text struct {
	plain string
	tmpl  *template.Template
}

// value is a JSON value whose strings may be templates.
type value struct {
	str    *text            // a string
	list   []value          // a list
	fields map[string]value // an object
	scalar any              // anything else
	kind   yaml.Kind
}

// Load reads and validates the script at path.
func Load(path string) (*Script, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("script: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("script: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > MaxBytes {
		return nil, fmt.Errorf("%w: %s has %d bytes; want a file of at most %d", ErrScript, path, info.Size(), MaxBytes)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("script: %w", err)
	}
	return Parse(path, b)
}

// Parse validates a script; name stands for its file in errors.
func Parse(name string, b []byte) (*Script, error) {
	if len(b) > MaxBytes {
		return nil, fmt.Errorf("%w: %s has %d bytes; want at most %d", ErrScript, name, len(b), MaxBytes)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrScript, name, err)
	}
	p := &parser{file: name}
	s := &Script{}
	if len(doc.Content) == 0 {
		p.fault(&yaml.Node{Line: 1, Column: 1}, "the file is empty; want rules")
	} else {
		s = p.script(doc.Content[0])
	}
	if len(p.errs) > 0 {
		return nil, fmt.Errorf("%w: %w", ErrScript, errors.Join(p.errs...))
	}
	return s, nil
}

type parser struct {
	file  string
	errs  []error
	depth int
}

func (p *parser) fault(n *yaml.Node, format string, args ...any) {
	switch {
	case len(p.errs) < maxFault:
		p.errs = append(p.errs, fmt.Errorf("%s:%d:%d: %s", p.file, n.Line, n.Column, fmt.Sprintf(format, args...)))
	case len(p.errs) == maxFault:
		p.errs = append(p.errs, fmt.Errorf("%s: further faults are left out", p.file))
	}
}

// fields calls one of handle for each key of a mapping; others are faults.
func (p *parser) fields(n *yaml.Node, what string, handle map[string]func(*yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		p.fault(n, "%s is %s; want a mapping", what, kindName(n))
		return
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		h, ok := handle[key.Value]
		switch {
		case !ok:
			names := make([]string, 0, len(handle))
			for k := range handle {
				names = append(names, k)
			}
			slices.Sort(names)
			p.fault(key, "%s has no key %q; it has %s", what, clip(key.Value, 60), strings.Join(names, ", "))
		case seen[key.Value]:
			p.fault(key, "%s: key %q is given twice", what, key.Value)
		default:
			h(val)
		}
		seen[key.Value] = true
	}
}

func (p *parser) list(n *yaml.Node, what string, limit int, each func(*yaml.Node)) {
	if n.Kind != yaml.SequenceNode {
		p.fault(n, "%s is %s; want a list", what, kindName(n))
		return
	}
	if len(n.Content) > limit {
		p.fault(n, "%s has %d entries; want at most %d", what, len(n.Content), limit)
		return
	}
	for _, c := range n.Content {
		each(c)
	}
}

func (p *parser) str(n *yaml.Node, what string) string {
	if n.Kind != yaml.ScalarNode || n.Tag != "!!str" {
		p.fault(n, "%s is %s; want a string", what, kindName(n))
		return ""
	}
	return n.Value
}

func (p *parser) int(n *yaml.Node, what string, limit int64) int64 {
	var v int64
	if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || n.Decode(&v) != nil {
		p.fault(n, "%s is %s; want a whole number", what, kindName(n))
		return 0
	}
	if v < 0 || v > limit {
		p.fault(n, "%s is %d; want 0 to %d", what, v, limit)
		return 0
	}
	return v
}

func (p *parser) script(n *yaml.Node) *Script {
	s := &Script{}
	p.fields(n, "the script", map[string]func(*yaml.Node){
		"model": func(n *yaml.Node) { s.model = p.str(n, "model") },
		"rules": func(n *yaml.Node) {
			p.list(n, "rules", maxRules, func(n *yaml.Node) { s.rules = append(s.rules, p.rule(n)) })
		},
		"default": func(n *yaml.Node) {
			r := rule{agent: "*"}
			p.fields(n, "default", map[string]func(*yaml.Node){"turns": func(n *yaml.Node) { r.turns = p.turns(n) }})
			if len(r.turns) == 0 {
				p.fault(n, "default has no turns; want at least one")
			}
			s.fallback = &r
		},
	})
	if len(s.rules) == 0 && s.fallback == nil && len(p.errs) == 0 {
		p.fault(n, "the script has neither rules nor a default; want at least one rule")
	}
	return s
}

func (p *parser) rule(n *yaml.Node) rule {
	r := rule{agent: "*"}
	p.fields(n, "rule", map[string]func(*yaml.Node){
		"agent": func(n *yaml.Node) {
			if r.agent = p.str(n, "agent"); r.agent == "" {
				p.fault(n, "agent is empty; want a name or \"*\"")
			}
		},
		"match": func(n *yaml.Node) { r.substring = p.str(n, "match") },
		"match_regex": func(n *yaml.Node) {
			re, err := regexp.Compile(p.str(n, "match_regex"))
			if err != nil {
				p.fault(n, "match_regex: %v", err)
			}
			r.regex = re
		},
		"turns": func(n *yaml.Node) { r.turns = p.turns(n) },
	})
	if n.Kind == yaml.MappingNode && len(r.turns) == 0 {
		p.fault(n, "rule has no turns; want at least one")
	}
	return r
}

func (p *parser) turns(n *yaml.Node) (turns []turn) {
	p.list(n, "turns", maxTurns, func(n *yaml.Node) { turns = append(turns, p.turn(n)) })
	return turns
}

func (p *parser) turn(n *yaml.Node) turn {
	var t turn
	p.fields(n, "turn", map[string]func(*yaml.Node){
		"text": func(n *yaml.Node) { t.text = p.text(n, p.str(n, "text")) },
		"tool_calls": func(n *yaml.Node) {
			p.list(n, "tool_calls", maxCalls, func(n *yaml.Node) { t.calls = append(t.calls, p.call(n)) })
		},
		"usage": func(n *yaml.Node) { t.usage = p.usage(n) },
		"delay_ms": func(n *yaml.Node) {
			t.delay = time.Duration(p.int(n, "delay_ms", maxDelay.Milliseconds())) * time.Millisecond
		},
		"finish_reason": func(n *yaml.Node) {
			t.finish = p.str(n, "finish_reason")
		},
		"retry_after": func(n *yaml.Node) { t.retryAfter = p.str(n, "retry_after") },
		"reasoning":   func(n *yaml.Node) { t.reasoning = p.str(n, "reasoning") },
		"fault": func(n *yaml.Node) {
			t.fault = Fault(p.str(n, "fault"))
			if !slices.Contains(faults, t.fault) {
				p.fault(n, "fault is %q; want one of %q", clip(string(t.fault), 60), faults)
			}
		},
	})
	if slices.Contains(needCalls, t.fault) && len(t.calls) == 0 {
		p.fault(n, "fault %s needs tool_calls in the same turn", t.fault)
	}
	if t.retryAfter != "" && t.fault != FaultRateLimit && t.fault != FaultOverloaded {
		p.fault(n, "retry_after needs fault %s or %s in the same turn", FaultRateLimit, FaultOverloaded)
	}
	return t
}

func (p *parser) usage(n *yaml.Node) *contract.Usage {
	const limit = 1 << 50
	u, total := &contract.Usage{}, int64(-1)
	p.fields(n, "usage", map[string]func(*yaml.Node){
		"input_tokens":  func(n *yaml.Node) { u.InputTokens = p.int(n, "input_tokens", limit) },
		"output_tokens": func(n *yaml.Node) { u.OutputTokens = p.int(n, "output_tokens", limit) },
		"total_tokens":  func(n *yaml.Node) { total = p.int(n, "total_tokens", limit) },
		"cache_read_tokens": func(n *yaml.Node) {
			u.CacheReadTokens = p.int(n, "cache_read_tokens", limit)
		},
	})
	if u.TotalTokens = total; total < 0 {
		u.TotalTokens = u.InputTokens + u.OutputTokens
	}
	return u
}

func (p *parser) call(n *yaml.Node) call {
	c := call{args: value{kind: yaml.MappingNode, fields: map[string]value{}}}
	p.fields(n, "tool call", map[string]func(*yaml.Node){
		"name": func(n *yaml.Node) { c.name = p.str(n, "name") },
		"args": func(n *yaml.Node) {
			if c.args = p.value(n); c.args.fields == nil && c.args.str == nil {
				p.fault(n, "args is %s; want a mapping, or a string for arguments that are no JSON object", kindName(n))
			}
		},
	})
	return c
}

func (p *parser) value(n *yaml.Node) value {
	if p.depth++; p.depth > 32 {
		p.fault(n, "args nest deeper than 32 levels")
		p.depth--
		return value{}
	}
	defer func() { p.depth-- }()
	v := value{kind: n.Kind}
	switch n.Kind {
	case yaml.MappingNode:
		v.fields = map[string]value{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			key := n.Content[i]
			if key.Kind != yaml.ScalarNode {
				p.fault(key, "a key of args is %s; want a string", kindName(key))
				continue
			}
			if _, twice := v.fields[key.Value]; twice {
				p.fault(key, "key %q is given twice", clip(key.Value, 60))
			}
			v.fields[key.Value] = p.value(n.Content[i+1])
		}
	case yaml.SequenceNode:
		v.list = []value{}
		for _, c := range n.Content {
			v.list = append(v.list, p.value(c))
		}
	case yaml.ScalarNode:
		if n.Tag == "!!str" {
			t := p.text(n, n.Value)
			v.str = &t
			break
		}
		if err := n.Decode(&v.scalar); err != nil {
			p.fault(n, "%v", err)
		}
		switch n.Tag {
		case "!!int", "!!bool", "!!null", "!!float":
		default:
			p.fault(n, "%s cannot stand in arguments; quote it", kindName(n))
		}
		if n.Tag == "!!float" && strings.Contains(strings.ToLower(n.Value), ".inf") || strings.EqualFold(n.Value, ".nan") {
			p.fault(n, "%s is no JSON number", n.Value)
		}
	default:
		p.fault(n, "%s cannot stand in arguments", kindName(n))
	}
	return v
}

func (p *parser) text(n *yaml.Node, s string) text {
	if !strings.Contains(s, "{{") {
		return text{plain: s}
	}
	t, err := parseTemplate(s)
	if err != nil {
		p.fault(n, "template: %v", err)
	}
	return text{tmpl: t}
}

func kindName(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	case yaml.ScalarNode:
		switch n.Tag {
		case "!!null":
			return "empty"
		case "!!str":
			return fmt.Sprintf("the string %q", clip(n.Value, 60))
		}
		return strings.TrimPrefix(n.Tag, "!!") + " " + clip(n.Value, 60)
	}
	return "nothing"
}

func clip(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n]) + "…"
}
