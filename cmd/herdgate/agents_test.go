package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/herdgate/herdgate/internal/client/wire"
)

// What is wrong with a definition is told before anything is asked of a server, and
// without a server the verbs say what to do.
func TestAgentsErrors(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "bad.md"), "---\nname: a b\ndescription: d\n---\np\n")
	writeFile(t, filepath.Join(dir, "bad.yaml"), "name: a\ndescription: d\nsystem_promt: p\n")
	writeFile(t, filepath.Join(dir, "good.yaml"), "name: a\ndescription: d\nsystem_prompt: p\n")
	for _, c := range [][]string{
		{"wants -f FILE", "apply"}, {"bad.md:2: name is", "apply", "-f", "bad.md"}, {"bad.yaml, document 1", "apply", "-f", "bad.yaml"},
		{"a is defined in good.yaml and in ./good.yaml", "apply", "-f", "good.yaml", "-f", "./good.yaml"},
		{"nobody answers at http://127.0.0.1:1", "apply", "-f", "good.yaml", "--server", "http://127.0.0.1:1"},
		{"nobody answers at http://127.0.0.1:1", "list", "--server", "http://127.0.0.1:1"}, {"wants one argument, NAME", "show"},
	} {
		r := herdgate(t, dir, nil, append([]string{"agents"}, c[1:]...)...).want(t, 1)
		contains(t, "stderr", r.stderr, c[0])
	}
}

// The catalogue as text shows what counts and what is shadowed; as JSON it is what
// the server says. Control characters in a description do not reach the terminal.
func TestAgentsList(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/subagents" {
			http.NotFound(w, r)
			return
		}
		_ = json.NewEncoder(w).Encode([]wire.Subagent{
			{Name: "bash", Source: "builtin", Enabled: true, Model: "inherit"},
			{Name: "bash", Source: "managed", ShadowedBy: "builtin", Description: "mine\x1b[2J", Revision: 7},
		})
	}))
	defer srv.Close()
	r := herdgate(t, t.TempDir(), nil, "agents", "list", "--server", srv.URL).want(t, 0)
	contains(t, "stdout", r.stdout, "in force", "disabled, shadowed by builtin", "mine")
	for _, b := range []byte(r.stdout) {
		if b == 0x1b {
			t.Fatal("an escape reached the terminal")
		}
	}
	var got []wire.Subagent
	r = herdgate(t, t.TempDir(), nil, "agents", "list", "--server", srv.URL, "--output", "json").want(t, 0)
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil || len(got) != 2 || got[1].Revision != 7 {
		t.Errorf("JSON: %v %+v", err, got)
	}
}

// What a lead has stored and cannot read can be deleted.
func TestAgentsDeleteUnreadable(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodGet:
			w.Header().Set("Content-Type", wire.ProblemType)
			w.WriteHeader(http.StatusInternalServerError)
			_ = json.NewEncoder(w).Encode(wire.Problem{Status: http.StatusInternalServerError, Code: wire.CodeInternal, Detail: "it cannot be read"})
		case r.Method == http.MethodDelete && r.URL.Path == "/v1/subagents/odd" && r.Header.Get("If-Match") == "*":
			w.WriteHeader(http.StatusNoContent)
		default:
			http.NotFound(w, r)
		}
	}))
	defer srv.Close()
	r := herdgate(t, t.TempDir(), nil, "agents", "delete", "odd", "--server", srv.URL).want(t, 0)
	contains(t, "stdout", r.stdout, "odd deleted")
}
