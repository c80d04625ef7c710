package subagent

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func ptr[T any](v T) *T { return &v }

func registry(t *testing.T, cfg Config) *Registry {
	t.Helper()
	r, err := NewRegistry(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func get(t *testing.T, r *Registry, name string) Definition {
	t.Helper()
	d, ok := r.Get(name)
	if !ok {
		t.Fatalf("no type %q", name)
	}
	return d
}

func names(list []Definition) []string {
	out := []string{}
	for _, d := range list {
		out = append(out, d.Name)
	}
	return out
}

func coder() Custom {
	return Custom{Name: "coder", Description: "writes code", SystemPrompt: "You write code."}
}

var denied = []string{"task", "ask_clarification", "present_files"}

// REG-02, REG-03, REG-04, ISO-09: the built-in types as they are.
func TestBuiltins(t *testing.T) {
	t.Parallel()
	r := registry(t, Config{})
	g, b := get(t, r, "general-purpose"), get(t, r, "bash")
	if g.Tools != nil || !slices.Equal(g.DisallowedTools, denied) || g.Skills != nil || g.Model != "inherit" || g.MaxTurns != 150 || g.TimeoutSeconds != 1800 || g.Origin != OriginBuiltin {
		t.Errorf("general-purpose = %+v", g)
	}
	if !slices.Equal(b.Tools, []string{"bash", "ls", "read_file", "write_file", "str_replace"}) || !slices.Equal(b.DisallowedTools, denied) || b.MaxTurns != 60 || b.TimeoutSeconds != 1800 || b.Model != "inherit" || b.Skills != nil {
		t.Errorf("bash = %+v", b)
	}
	for _, d := range r.List() { // ROUTE-10: a sub-agent cannot ask, and its prompt says so
		if !strings.Contains(d.SystemPrompt, "cannot ask") || d.Description == "" {
			t.Errorf("%s: prompt or description is unfit", d.Name)
		}
	}
}

// REG-01, REG-11: the built-in owner wins whole; names stand once, in order.
func TestOwnership(t *testing.T) {
	t.Parallel()
	impostor := coder()
	impostor.Name, impostor.MaxTurns, impostor.Tools = "bash", ptr(5), []string{}
	critic := coder()
	critic.Name = "critic"
	r := registry(t, Config{Custom: []Custom{coder(), impostor, critic}})
	if got := names(r.List()); !slices.Equal(got, []string{"general-purpose", "bash", "coder", "critic"}) {
		t.Errorf("list = %q", got)
	}
	if b := get(t, r, "bash"); b.Origin != OriginBuiltin || b.MaxTurns != 60 || len(b.Tools) != 5 {
		t.Errorf("bash = %+v", b)
	}
	if _, ok := r.Get("ghost"); ok {
		t.Error("there is a ghost")
	}
}

// REG-05: what a type of the configuration gets when it says nothing, and the
// difference between no list and an empty one.
func TestConfigDefaults(t *testing.T) {
	t.Parallel()
	d := get(t, registry(t, Config{Custom: []Custom{coder()}, TimeoutSeconds: ptr(60), MaxTurns: ptr(3)}), "coder")
	if d.Tools != nil || !slices.Equal(d.DisallowedTools, denied) || d.Skills != nil || d.Model != "inherit" || d.MaxTurns != 50 || d.TimeoutSeconds != 900 || d.Origin != OriginConfig {
		t.Errorf("coder = %+v", d)
	}
	c := coder()
	c.Tools, c.DisallowedTools, c.Skills = []string{}, new([]string), []string{}
	d = get(t, registry(t, Config{Custom: []Custom{c}}), "coder")
	if d.Tools == nil || len(d.Tools) != 0 || len(d.DisallowedTools) != 0 || d.Skills == nil {
		t.Errorf("coder with empty lists = %+v", d)
	}
}

// REG-09, REG-10: override, else the global number for built-ins only, else the
// definition's own.
func TestOverrides(t *testing.T) {
	t.Parallel()
	c := coder()
	c.Skills, c.Model = []string{"a"}, "x"
	r := registry(t, Config{
		TimeoutSeconds: ptr(60), MaxTurns: ptr(3), Custom: []Custom{c},
		Agents: map[string]Override{
			"general-purpose": {MaxTurns: ptr(9), Skills: []string{}},
			"coder":           {TimeoutSeconds: ptr(5), Model: ptr("m")},
			"bash":            {Network: ptr(true)},
			"ghost":           {MaxTurns: ptr(1)},
		},
	})
	if g := get(t, r, "general-purpose"); g.MaxTurns != 9 || g.TimeoutSeconds != 60 || g.Skills == nil || len(g.Skills) != 0 || g.Model != "inherit" {
		t.Errorf("general-purpose = %+v", g)
	}
	if b := get(t, r, "bash"); b.MaxTurns != 3 || b.TimeoutSeconds != 60 || !b.Network || !b.Resolve().Network {
		t.Errorf("bash = %+v", b)
	}
	if d := get(t, r, "coder"); d.Model != "m" || d.TimeoutSeconds != 5 || d.MaxTurns != 50 || !slices.Equal(d.Skills, []string{"a"}) || d.Network || d.SystemPrompt != c.SystemPrompt {
		t.Errorf("coder = %+v", d)
	}
	if _, ok := r.Get("ghost"); ok {
		t.Error("an override alone defines a type")
	}
}

// CONFIG-03, REG-05: faults are told all at once, each with its place.
func TestRegistryRefuses(t *testing.T) {
	t.Parallel()
	_, err := NewRegistry(Config{
		TimeoutSeconds: ptr(0), MaxTurns: ptr(-1),
		Custom: []Custom{{Name: "empty"}, {Name: "a.b"}, coder(), coder(), {Name: "zero", Description: "d", SystemPrompt: "p", MaxTurns: ptr(0), TimeoutSeconds: ptr(0)}},
		Agents: map[string]Override{"bash": {Model: ptr(""), MaxTurns: ptr(0)}},
	})
	if !errors.Is(err, ErrDefinition) {
		t.Fatalf("error = %v", err)
	}
	for _, want := range []string{
		"timeout_seconds is 0", "max_turns is -1", "custom_agents.empty.description", "custom_agents.empty.system_prompt", "custom_agents.a.b", "coder is defined twice",
		"custom_agents.zero.max_turns is 0", "custom_agents.zero.timeout_seconds is 0", "agents.bash.model is empty", "agents.bash.max_turns is 0",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error does not tell %q: %v", want, err)
		}
	}
}

// REG-13, REG-15, REG-16
func TestVisible(t *testing.T) {
	t.Parallel()
	r := registry(t, Config{Custom: []Custom{coder()}})
	for _, c := range []struct {
		allowed []string
		shell   bool
		want    []string
	}{
		{nil, true, []string{"general-purpose", "bash", "coder"}},
		{nil, false, []string{"general-purpose", "coder"}},
		{[]string{}, true, []string{}},
		{[]string{"coder", "coder", "ghost", "general-purpose"}, true, []string{"general-purpose", "coder"}},
		{[]string{"bash"}, false, []string{}},
		{[]string{"Coder"}, true, []string{}},
	} {
		if got := names(r.Visible(c.allowed, c.shell)); !slices.Equal(got, c.want) {
			t.Errorf("Visible(%q, %v) = %q, want %q", c.allowed, c.shell, got, c.want)
		}
	}
}

// REG-12
func TestEffectiveModel(t *testing.T) {
	t.Parallel()
	for _, c := range [][4]string{{"m-a", "m-p", "m-1", "m-a"}, {"inherit", "m-p", "m-1", "m-p"}, {"inherit", "", "m-1", "m-1"}, {"", "inherit", "m-1", "m-1"}} {
		if got, err := EffectiveModel(c[0], c[1], c[2]); err != nil || got != c[3] {
			t.Errorf("EffectiveModel(%q, %q, %q) = %q, %v, want %q", c[0], c[1], c[2], got, err, c[3])
		}
	}
	if _, err := EffectiveModel("inherit", "", ""); !errors.Is(err, ErrNoModels) {
		t.Errorf("without models: %v", err)
	}
}

// A caller cannot change the registry through what it got, and what travels in
// a request keeps the difference between null and [].
func TestResolveIsACopy(t *testing.T) {
	t.Parallel()
	r := registry(t, Config{})
	d := get(t, r, "bash")
	s := d.Resolve()
	d.Tools[0], d.DisallowedTools[0], s.Tools[1] = "x", "x", "x"
	r.List()[1].Tools[0] = "x"
	if got := get(t, r, "bash"); got.Tools[0] != "bash" || got.DisallowedTools[0] != "task" || got.Tools[1] != "ls" {
		t.Errorf("bash was changed from outside: %+v", got)
	}
	if s = get(t, r, "general-purpose").Resolve(); s.Tools != nil || s.MaxTurns != 150 || s.TimeoutSeconds != 1800 || s.SystemPrompt == "" || s.Name != "general-purpose" || s.Model != "inherit" {
		t.Errorf("resolved = %+v", s)
	}
	if s = (Definition{Tools: []string{}}).Resolve(); s.Tools == nil {
		t.Error("an empty list of tools became null, which means all")
	}
}

// TOOL-01, TOOL-02, TOOL-05, SKILL-07, SKILL-08: stages only narrow, for all lists over a few names.
func TestChainOnlyNarrows(t *testing.T) {
	t.Parallel()
	scope := []string{"bash", "task", "read_file", "list_uploaded_files", "mcp"}
	subsets := [][]string{nil}
	for bits := range 1 << len(scope) {
		set := []string{}
		for i, name := range scope {
			if bits>>i&1 == 1 {
				set = append(set, name)
			}
		}
		subsets = append(subsets, set)
	}
	for _, allow := range subsets {
		for _, deny := range subsets {
			for _, skill := range [][]string{nil, {}, {"bash", "task"}} {
				got := Chain(Stages{ParentScope: scope, Allow: allow, Deny: deny, ActiveSkills: [][]string{skill}, SearchTool: true})
				for _, name := range got {
					ok := name == "tool_search" || slices.Contains(scope, name) && name != "task" && name != "list_uploaded_files" &&
						(allow == nil || slices.Contains(allow, name)) && !slices.Contains(deny, name) &&
						(skill == nil || slices.Contains(skill, name) || name == "read_file")
					if !ok {
						t.Fatalf("allow %q deny %q skill %q gives %q", allow, deny, skill, got)
					}
				}
				if !slices.Contains(got, "tool_search") {
					t.Fatalf("allow %q deny %q skill %q: no search tool in %q", allow, deny, skill, got)
				}
			}
		}
	}
}

// SKILL-06, SKILL-07: no active skill, no restriction; duplicates once.
func TestSkillPolicy(t *testing.T) {
	t.Parallel()
	if got, free := SkillPolicy(nil); got != nil || !free {
		t.Errorf("no skill: %q, %v", got, free)
	}
	if got, free := SkillPolicy([][]string{nil, {}}); got == nil || len(got) != 0 || free {
		t.Errorf("declared empty: %q, %v", got, free)
	}
	if got, _ := SkillPolicy([][]string{{"b", "a"}, {"a", "c"}}); !reflect.DeepEqual(got, []string{"b", "a", "c"}) {
		t.Errorf("union = %q", got)
	}
}

func managed(name string) Stored {
	return Stored{Managed: Managed{Name: name, Description: "m", SystemPrompt: "m", MaxTurns: 9, TimeoutSeconds: 9, Enabled: true}, Revision: 3}
}

func file(name string) File {
	c := coder()
	c.Name, c.Description = name, "f"
	return File{Custom: c, Path: "/agents/" + name + ".md"}
}

// REG-01, REG-07, REG-08, REG-11: layers in order, the first owner wins whole, what
// is shadowed or switched off is shown and does not exist, overrides come last.
func TestLayers(t *testing.T) {
	t.Parallel()
	off := managed("off")
	off.Enabled = false
	cfg := Config{
		Custom: []Custom{coder()}, Files: []File{file("writer"), file("bash"), file("coder"), file("aide")},
		Managed: []Stored{managed("zeta"), off, managed("writer"), managed("bash"), managed("coder")},
		Agents:  map[string]Override{"writer": {MaxTurns: ptr(2)}, "zeta": {MaxTurns: ptr(4)}, "off": {MaxTurns: ptr(5)}},
	}
	r := registry(t, cfg)
	if got := names(r.List()); !slices.Equal(got, []string{"general-purpose", "bash", "coder", "writer", "aide", "zeta"}) {
		t.Errorf("list = %q", got)
	}
	if d := get(t, r, "writer"); d.Origin != OriginFile || d.Description != "f" || d.MaxTurns != 2 {
		t.Errorf("writer = %+v", d)
	}
	if d := get(t, r, "zeta"); d.Origin != OriginManaged || d.MaxTurns != 4 || !slices.Equal(d.DisallowedTools, denied) {
		t.Errorf("zeta = %+v", d)
	}
	if _, ok := r.Get("off"); ok {
		t.Error("what is switched off exists")
	}
	var got []string
	for _, e := range r.Entries() {
		line := e.Definition.Name + " " + string(e.Definition.Origin)
		if !e.Enabled {
			line += " off"
		}
		if e.ShadowedBy != "" {
			line += " by " + string(e.ShadowedBy)
		}
		if e.Definition.Name == "writer" && (e.ShadowedBy == "") != (e.Definition.MaxTurns == 2) {
			t.Errorf("an override is for the owner alone: %+v", e)
		}
		got = append(got, line)
	}
	want := []string{
		"general-purpose builtin", "bash builtin", "coder config", "writer file", "bash file by builtin", "coder file by config", "aide file",
		"bash managed by builtin", "coder managed by config", "off managed off", "writer managed by file", "zeta managed",
	}
	if !slices.Equal(got, want) {
		t.Errorf("entries\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// A registry that was taken stays as it was; the catalogue moves on, and what is
// wrong in the configuration is told at the start.
func TestCatalogue(t *testing.T) {
	t.Parallel()
	if _, err := NewCatalogue(Config{Custom: []Custom{{Name: "x"}}}); !errors.Is(err, ErrDefinition) {
		t.Errorf("a wrong configuration: %v", err)
	}
	c, err := NewCatalogue(Config{Custom: []Custom{coder()}})
	if err != nil {
		t.Fatal(err)
	}
	before := c.Current()
	c.SetManaged([]Stored{managed("alpha"), managed("beta")})
	c.SetFiles([]File{file("beta")})
	if got := names(c.Visible([]string{"beta", "alpha"}, true)); !slices.Equal(got, []string{"beta", "alpha"}) || len(before.List()) != 3 {
		t.Errorf("visible = %q, before %q", got, names(before.List()))
	}
	if d := get(t, c.Current(), "beta"); d.Origin != OriginFile {
		t.Errorf("beta = %+v", d)
	}
	c.SetFiles(nil)
	if d := get(t, c.Current(), "beta"); d.Origin != OriginManaged {
		t.Errorf("beta = %+v", d)
	}
}

// REG-06: what a store takes, and how.
func TestManagedIsNormalized(t *testing.T) {
	t.Parallel()
	m, err := Managed{Name: "My-Agent", DisplayName: "  ", Description: " d ", SystemPrompt: "\n p\n", Tools: []string{" a", "a", "b"}, Skills: []string{}, DisallowedTools: []string{"x", "task"}}.Normalize()
	if err != nil || m.Name != "my-agent" || m.DisplayName != "" || m.Description != "d" || m.SystemPrompt != "p" || !slices.Equal(m.Tools, []string{"a", "b"}) ||
		m.Skills == nil || len(m.Skills) != 0 || !slices.Equal(m.DisallowedTools, []string{"x", "task", "ask_clarification", "present_files"}) || m.Model != InheritModel || m.MaxTurns != 50 || m.TimeoutSeconds != 900 {
		t.Errorf("%+v, %v", m, err)
	}
	bad := Managed{Name: "a_b", Description: " ", Tools: []string{""}, Model: strings.Repeat("m", 200), Pool: "a b", MaxTurns: -1, TimeoutSeconds: maxTimeoutSeconds + 1}
	_, err = bad.Normalize()
	for _, want := range []string{"name is", "description is blank", "system_prompt is blank", "tools[0]", "model has", "pool", "max_turns", "timeout_seconds"} {
		if !errors.Is(err, ErrDefinition) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q", err, want)
		}
	}
	for _, data := range []string{`{"name":"a","description":"d","system_prompt":"p","root":1}`, `{} {}`, `[`, strings.Repeat("[", 5000)} {
		if _, err := DecodeManaged([]byte(data)); !errors.Is(err, ErrDefinition) {
			t.Errorf("%.40s: %v", data, err)
		}
	}
	if m, err := DecodeManaged([]byte(`{"name":"a","description":"d","system_prompt":"p"}`)); err != nil || !m.Enabled {
		t.Errorf("without enabled: %+v, %v", m, err)
	}
}

// REG-17: a refusal tells what there is, that the policy permits nothing, or that
// there is nothing.
func TestRefusalTexts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		visible []Definition
		allowed []string
		name    string
		want    string
	}{
		{[]Definition{{Name: "a"}, {Name: "b"}}, nil, "x", `There is no sub-agent type "x" for this run. Available types: a, b.`},
		{nil, []string{}, "x", `There is no sub-agent type "x" for this run. The policy of this run permits none.`},
		{nil, nil, "x", `There is no sub-agent type "x" for this run. There are none.`},
		{[]Definition{{Name: "a"}}, nil, "", "subagent_type is missing. Available types: a."},
	} {
		if _, err := Choose(c.visible, c.allowed, c.name); err == nil || err.Error() != c.want {
			t.Errorf("Choose(%q) = %v, want %s", c.name, err, c.want)
		}
	}
	if _, err := Choose([]Definition{{Name: "a"}}, []string{"b"}, "a"); err == nil {
		t.Error("a list that was made for another policy was believed")
	}
}
