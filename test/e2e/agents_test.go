package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

const scouting = `
rules:
  - agent: lead
    match: "scout"
    turns:
      - tool_calls: [{ name: task, args: { description: "look", prompt: "look around", subagent_type: scout } }]
      - text: "The scout: {{ .LastToolResult }}"
  - agent: scout
    match: "look"
    turns: [{ text: "nothing moves" }]
default: { turns: [{ text: "nothing to do" }] }
`

// REG-01, REG-06, REG-07, REG-08, REG-13 to REG-15: a definition that is applied at
// one lead is delegated to through another one that runs already; the caller's
// policy, switching off, a file of the same name and deletion count there as well. So
// it is where the definitions lie in the event sink's database.
func TestManagedAgents(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"nats", "sql"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			managedAgents(t, backend)
		})
	}
}

func managedAgents(t *testing.T, backend string) {
	f := NewFleet(t, scouting, quick, "subagents: { paths: [agents] }", "agent_storage: { backend: "+backend+" }")
	agents := filepath.Join(f.dir, "agents")
	if err := os.Mkdir(agents, 0o700); err != nil {
		t.Fatal(err)
	}
	_, _, _, sink := f.All()
	addr := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	f.service("lead", "--http-addr", addr, "--name", "lead-2")
	other, err := client.New("http://"+addr, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		err := other.Ready(ctx)
		return err == nil, fmt.Sprint("second lead: ", err)
	})
	cli := func(words string, args ...string) {
		t.Helper()
		out, err := f.run(append(append([]string{"agents"}, args...), "--server", "http://"+f.addr)...)
		if err != nil || !strings.Contains(strings.Join(strings.Fields(out), " "), words) {
			t.Fatalf("agents %v: %v, want %q in\n%s", args, err, words, out)
		}
	}
	// seen waits until the other lead shows the definition of a source so.
	seen := func(source, want string) {
		t.Helper()
		eventually(t, func() (bool, string) {
			list, err := other.Subagents(deadline(t))
			got := "none"
			for _, a := range list {
				if a.Name == "scout" && a.Source == source {
					got = fmt.Sprintf("enabled %v, shadowed by %q", a.Enabled, a.ShadowedBy)
				}
			}
			return got == want, fmt.Sprintf("%s: %s, want %s (%v)", source, got, want, err)
		})
	}
	run := func(allowed []string) wire.Run {
		t.Helper()
		r, err := other.RunToEnd(deadline(t), wire.RunRequest{Input: "ask the scout", AllowedSubagents: allowed})
		if err != nil || len(r.Delegations) != 1 {
			t.Fatalf("run: %v, %+v", err, r)
		}
		return r
	}
	file := f.write("scout.yaml", "name: Scout\ndescription: looks around\nsystem_prompt: You look.\ntools: [ls]\n---\nname: other\ndescription: d\nsystem_prompt: p\n")

	if r := run(nil); r.Delegations[0].ErrorCode != contract.ErrPolicyDenied || !strings.Contains(*r.Output, "Available types: general-purpose") {
		t.Errorf("before there is a scout: %+v, %s", r.Delegations, *r.Output)
	}
	cli("scout created other created", "apply", "-f", file)
	cli("scout unchanged other unchanged", "apply", "-f", file)
	seen("managed", `enabled true, shadowed by ""`)
	if r := run(nil); r.Delegations[0].SubagentType != "scout" || r.Delegations[0].Status != "completed" || !strings.Contains(*r.Output, "nothing moves") {
		t.Errorf("delegated: %+v, %s", r.Delegations, *r.Output)
	}
	if r := run([]string{"scout"}); r.Delegations[0].Status != "completed" {
		t.Errorf("allowed by a list: %+v", r.Delegations)
	}
	if r := run([]string{"other"}); r.Delegations[0].ErrorCode != contract.ErrPolicyDenied || !strings.Contains(*r.Output, "Available types: other.") {
		t.Errorf("not allowed: %+v, %s", r.Delegations, *r.Output)
	}

	f.write("scout.yaml", "name: scout\ndescription: looks around\nsystem_prompt: You look.\ntools: [ls]\nenabled: false\n")
	cli("scout changed", "apply", "-f", file)
	seen("managed", `enabled false, shadowed by ""`)
	_, err = other.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: "scout", Prompt: "look"})
	var api *client.Error
	if !errors.As(err, &api) || api.Status != http.StatusBadRequest {
		t.Errorf("a task for what is switched off: %v", err)
	}
	cli("managed disabled", "list")

	// A file of the same name counts, without a restart, and the conflict is shown.
	f.write("agents/scout.md", "---\nname: scout\ndescription: from a file\ntools: LS\n---\nYou look, too.\n")
	seen("file", `enabled true, shadowed by ""`)
	seen("managed", `enabled false, shadowed by "file"`)
	cli("scout managed disabled, shadowed by file", "list")
	cli("You look, too.", "show", "scout")
	cli("You look.", "show", "scout", "--managed")
	if r := run(nil); r.Delegations[0].Status != "completed" {
		t.Errorf("with the file: %+v", r.Delegations)
	}
	cli("scout deleted", "delete", "scout")
	seen("managed", "none")
	if out, err := f.run("agents", "delete", "scout", "--server", "http://"+f.addr); err == nil || !strings.Contains(out, "agents list") {
		t.Errorf("deleted twice: %v %s", err, out)
	}
	if backend == "sql" {
		f.agentsWithoutASink(sink, other, cli)
	}
}

// agentsWithoutASink kills the sink. What is stored stays in force in every lead that
// has read it, changes are refused as unavailable, a lead that has read nothing is not
// ready, and with a new sink all goes on by itself.
func (f *Fleet) agentsWithoutASink(sink *Proc, other *client.Client, cli func(words string, args ...string)) {
	t := f.t
	cli("other managed in force", "list")
	sink.Kill()
	file := f.write("third.yaml", "name: third\ndescription: d\nsystem_prompt: p\n")
	if out, err := f.run("agents", "apply", "-f", file, "--server", "http://"+f.addr); err == nil || !strings.Contains(out, "no event sink answers") {
		t.Errorf("applied without a sink: %v %s", err, out)
	}
	probes := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	f.service("lead", "--http-addr", probes, "--name", "lead-3")
	readyz(t, probes, http.StatusServiceUnavailable, "sub-agent definitions have not been read yet")
	cli("other managed in force", "list")
	if task, err := other.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: "other", Prompt: "look"}); err != nil {
		t.Errorf("a task for what was read before: %+v, %v", task, err)
	}
	f.service("eventsink", "--name", "eventsink-2")
	readyz(t, probes, http.StatusOK, "")
	eventually(t, func() (bool, string) {
		out, err := f.run("agents", "apply", "-f", file, "--server", "http://"+f.addr)
		return err == nil && strings.Contains(out, "third created"), fmt.Sprintf("with a new sink: %v %s", err, out)
	})
	eventually(t, func() (bool, string) {
		_, err := other.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: "third", Prompt: "look"})
		return err == nil, fmt.Sprint("a task for a new one at the other lead: ", err)
	})
}
