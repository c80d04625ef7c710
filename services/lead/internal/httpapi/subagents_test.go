package httpapi

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/agents"
)

// newAgentsRig serves the interface with a store of managed definitions, behind
// tokens: "root" is an administrator's, "user" is not.
func newAgentsRig(t *testing.T) *rig {
	t.Helper()
	r, _ := newAgentsRigOn(t)
	return r
}

func newAgentsRigOn(t *testing.T) (*rig, *bus.Conn) {
	t.Helper()
	cat, err := subagent.NewCatalogue(subagent.Config{Custom: []subagent.Custom{{Name: "coder", Description: "d", SystemPrompt: "p"}}})
	if err != nil {
		t.Fatal(err)
	}
	var m *agents.Manager
	_, conn := natstest.New(t)
	r := newRig(t, func(c *Config, d *Deps) {
		c.AuthMode = AuthTokens
		c.Tokens = []Token{{Name: "a", TokenEnv: "ROOT", Roles: []string{"administrator"}}, {Name: "b", TokenEnv: "USER"}}
		c.Getenv = func(k string) string { return strings.ToLower(k) }
		m = agents.New(agents.Config{Catalogue: cat, Store: agentstore.NewNATS(conn, zerolog.Nop()), Log: zerolog.Nop()})
		d.Registry, d.Agents, d.Models = FromRegistry(cat, true), m, []string{"main"}
	})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return r, conn
}

const (
	root = "Bearer root"
	user = "Bearer user"
)

func (r *rig) catalogue(token string) map[string]wire.Subagent {
	r.t.Helper()
	status, _, text := r.do("GET", "/v1/subagents", "", "Authorization", token)
	var list []wire.Subagent
	if err := json.Unmarshal([]byte(text), &list); err != nil || status != http.StatusOK {
		r.t.Fatalf("catalogue: %d %v %s", status, err, text)
	}
	out := map[string]wire.Subagent{}
	for _, a := range list {
		if a.SystemPrompt != "" {
			r.t.Errorf("the list holds the prompt of %s", a.Name)
		}
		out[a.Name+"/"+a.Source] = a
	}
	return out
}

// REG-06, REG-07, REG-08: managed definitions over HTTP, with revisions; the
// catalogue shows what is in force, and to administrators what is not and why.
func TestManagedSubagents(t *testing.T) {
	t.Parallel()
	r := newAgentsRig(t)
	const path, body = "/v1/subagents/Searcher", `{"description":"finds things","system_prompt":"You search.","tools":["grep"," grep ","ls"],"max_turns":7}`
	status, h, text := r.do("PUT", path, body, "Authorization", root, "If-None-Match", "*")
	var got wire.Subagent
	if err := json.Unmarshal([]byte(text), &got); err != nil || status != http.StatusCreated {
		t.Fatalf("PUT = %d %s", status, text)
	}
	if got.Name != "searcher" || got.Source != "managed" || !got.Enabled || got.ShadowedBy != "" || strings.Join(got.Tools, ",") != "grep,ls" ||
		strings.Join(got.DisallowedTools, ",") != "task,ask_clarification,present_files" || got.MaxTurns != 7 || got.TimeoutSeconds != 900 {
		t.Errorf("stored %+v", got)
	}
	first := h.Get("ETag")
	if a, ok := r.catalogue(user)["searcher/managed"]; !ok || !a.Usable() || a.Revision == 0 {
		t.Errorf("in the catalogue at once: %v, %+v", ok, a)
	}
	status, h, text = r.do("GET", "/v1/subagents/searcher", "", "Authorization", root)
	if status != http.StatusOK || h.Get("ETag") != first || !strings.Contains(text, "You search.") {
		t.Errorf("GET = %d, ETag %s, want %s: %s", status, h.Get("ETag"), first, text)
	}
	if _, _, text = r.do("GET", "/v1/subagents/searcher", "", "Authorization", user); strings.Contains(text, "You search.") {
		t.Errorf("a user reads the prompt: %s", text)
	}

	r.wantProblem(http.StatusPreconditionFailed, wire.CodePrecondition, "PUT", path, body, "Authorization", root, "If-None-Match", "*")
	status, h, _ = r.do("PUT", path, strings.Replace(body, "finds", "really finds", 1), "Authorization", root, "If-Match", first)
	second := h.Get("ETag")
	if status != http.StatusOK || second == first || second == "" {
		t.Fatalf("PUT with the ETag = %d, %s after %s", status, second, first)
	}
	r.wantProblem(http.StatusPreconditionFailed, wire.CodePrecondition, "PUT", path, body, "Authorization", root, "If-Match", first)
	r.wantProblem(http.StatusPreconditionFailed, wire.CodePrecondition, "DELETE", path, "", "Authorization", root, "If-Match", first)
	if status, _, text := r.do("PUT", path, strings.Replace(body, `{`, `{"enabled":false,`, 1), "Authorization", root); status != http.StatusOK {
		t.Errorf("PUT without a condition = %d %s", status, text)
	}
	if a := r.catalogue(root)["searcher/managed"]; a.Enabled || a.Usable() || a.Name == "" {
		t.Errorf("switched off: %+v", a)
	}
	if _, there := r.catalogue(user)["searcher/managed"]; there {
		t.Error("a user sees what is switched off")
	}
	r.wantProblem(http.StatusNotFound, wire.CodeNotFound, "GET", "/v1/subagents/searcher", "", "Authorization", user)
	r.wantProblem(http.StatusBadRequest, wire.CodeInvalidRequest, "POST", "/v1/tasks", `{"subagent_type":"searcher","prompt":"p"}`, "Authorization", user)

	if status, _, text := r.do("DELETE", path, "", "Authorization", root); status != http.StatusNoContent || text != "" {
		t.Errorf("DELETE = %d %s", status, text)
	}
	for _, method := range []string{"GET", "DELETE"} {
		r.wantProblem(http.StatusNotFound, wire.CodeNotFound, method, path, "", "Authorization", root)
	}
	r.wantProblem(http.StatusNotFound, wire.CodeNotFound, "PUT", path, body, "Authorization", root, "If-Match", "*")
	r.wantProblem(http.StatusNotFound, wire.CodeNotFound, "PUT", path, body, "Authorization", root, "If-Match", second)
}

// REG-07: a managed definition whose name another one owns is stored, is shown as
// shadowed, and is not what tasks get.
func TestShadowedSubagent(t *testing.T) {
	t.Parallel()
	r := newAgentsRig(t)
	for name, owner := range map[string]string{"coder": "config", "bash": "builtin"} {
		status, h, text := r.do("PUT", "/v1/subagents/"+name, `{"description":"mine","system_prompt":"mine"}`, "Authorization", root)
		if status != http.StatusCreated || !strings.Contains(text, `"shadowed_by":"`+owner+`"`) {
			t.Errorf("PUT %s = %d %s", name, status, text)
		}
		list := r.catalogue(root)
		if a := list[name+"/managed"]; a.ShadowedBy != owner || a.Usable() {
			t.Errorf("%s: %+v", name, a)
		}
		if a := list[name+"/"+owner]; !a.Usable() {
			t.Errorf("%s: the owner is %+v", name, a)
		}
		if got, ok := r.server.deps.Registry.Resolve(name); !ok || got.SystemPrompt == "mine" {
			t.Errorf("%s: a task gets %+v", name, got)
		}
		if _, own, text := r.do("GET", "/v1/subagents/"+name, "", "Authorization", root); own.Get("ETag") != "" || strings.Contains(text, `"mine"`) {
			t.Errorf("GET %s = %s", name, text)
		}
		if _, managed, text := r.do("GET", "/v1/subagents/"+name+"?source=managed", "", "Authorization", root); managed.Get("ETag") != h.Get("ETag") || !strings.Contains(text, `"mine"`) {
			t.Errorf("GET %s of the managed one = %s", name, text)
		}
	}
}

// What is stored and cannot be read is the fault of nobody who asks for it, and can be
// deleted and replaced.
func TestUnreadableSubagent(t *testing.T) {
	t.Parallel()
	r, conn := newAgentsRigOn(t)
	for _, name := range []string{"odd", "bad"} {
		if _, err := conn.Publish(t.Context(), bus.Write{Subject: contract.KVSubject(conn.Names.AgentBucket(), contract.AgentKey(name)), Data: []byte(`{"sudo":true}`)}); err != nil {
			t.Fatal(err)
		}
	}
	p := r.wantProblem(http.StatusInternalServerError, wire.CodeInternal, "GET", "/v1/subagents/odd?source=managed", "", "Authorization", root)
	if !strings.Contains(p.Detail, "odd, revision ") || !strings.Contains(p.Detail, "delete it") {
		t.Errorf("told %q", p.Detail)
	}
	r.wantProblem(http.StatusNotFound, wire.CodeNotFound, "GET", "/v1/subagents/odd?source=managed", "", "Authorization", user)
	if status, _, text := r.do("DELETE", "/v1/subagents/odd", "", "Authorization", root, "If-Match", "*"); status != http.StatusNoContent {
		t.Errorf("DELETE = %d %s", status, text)
	}
	if status, _, text := r.do("PUT", "/v1/subagents/bad", `{"description":"d","system_prompt":"p"}`, "Authorization", root); status != http.StatusOK {
		t.Errorf("PUT = %d %s", status, text)
	}
}

// REG-06: what is refused, by whom, and why.
func TestManagedSubagentRefusals(t *testing.T) {
	t.Parallel()
	r := newAgentsRig(t)
	const good = `{"description":"d","system_prompt":"p"}`
	r.wantProblem(http.StatusForbidden, wire.CodeForbidden, "PUT", "/v1/subagents/x", good, "Authorization", user)
	r.wantProblem(http.StatusForbidden, wire.CodeForbidden, "DELETE", "/v1/subagents/x", "", "Authorization", user)
	for _, c := range []struct {
		name, body, says string
		header           []string
	}{
		{"a_b", good, "letters, digits and hyphens", nil},
		{"x", `{"description":"  ","system_prompt":"p"}`, "description is blank", nil},
		{"x", `{"description":"d","system_prompt":"p","tools":["a",""]}`, "tools[1] is blank", nil},
		{"x", `{"description":"d","system_prompt":"p","model":"ghost"}`, "there are: main", nil},
		{"x", `{"description":"d","system_prompt":"p","pool":"a b"}`, "pool", nil},
		{"x", good, "ETag", []string{"If-Match", "7"}},
		{"x", good, "exclude each other", []string{"If-Match", "*", "If-None-Match", "*"}},
	} {
		p := r.wantProblem(http.StatusBadRequest, wire.CodeInvalidRequest, "PUT", "/v1/subagents/"+c.name, c.body, append([]string{"Authorization", root}, c.header...)...)
		if !strings.Contains(p.Detail, c.says) {
			t.Errorf("%s %s: %q, want %q in it", c.name, c.body, p.Detail, c.says)
		}
	}
	r.wantProblem(http.StatusUnprocessableEntity, wire.CodeInvalidRequest, "PUT", "/v1/subagents/x", `{"description":"d","system_prompt":"p","sudo":true}`, "Authorization", root)
	r.wantProblem(http.StatusUnprocessableEntity, wire.CodeInvalidRequest, "PUT", "/v1/subagents/x", `{"description":"d","system_prompt":"p","max_turns":0}`, "Authorization", root)
}
