package run

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

func skills(t *testing.T, files map[string]string) skill.Loader {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, more := range files {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf("---\nname: %s\ndescription: About %s.\n%s---\nThe way of %s.\n", name, name, more, name)
		if err := os.WriteFile(filepath.Join(dir, name, skill.FileName), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return skill.Loader{Public: []string{dir}}
}

func withSkills(l skill.Loader) leadOption { return func(_ *Config, d *Deps) { d.Skills = l } }

func fileTools(t *testing.T) []tool.Tool {
	t.Helper()
	ws, err := tool.NewWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ws.Close() })
	return tool.Tools(ws, tool.Options{})
}

func offered(req model.Request) string {
	var out []string
	for _, s := range req.Tools {
		out = append(out, s.Name)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// SKILL-01, SKILL-06, SKILL-08, SKILL-10: a lead's skills are those of its run, their
// limits survive a take-over by a lead whose files lie elsewhere, and its sub-agents
// get the list cut to the run's.
func TestSkillsOfARun(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return completed("found") })
	files := map[string]string{"notes": "allowed-tools: [task, grep]\n", "other": "", "secret": ""}
	here, there := skills(t, files), skills(t, files)
	reached := make(chan struct{})
	first := &scripted{answer: func(ctx context.Context, turn int, _ model.Request) (model.Response, error) {
		if turn == 0 {
			return call("", model.ToolCall{ID: "r", Name: "read_file", Args: fmt.Sprintf(`{"path":%q}`, filepath.Join(here.Public[0], "notes", skill.FileName))})
		}
		close(reached)
		<-ctx.Done()
		return model.Response{}, context.Cause(ctx)
	}}
	a := w.lead("lead-a", first, withSkills(here), withTools(fileTools(t)...))
	rec := a.start(runapi.RunInput{Input: "go", AvailableSkills: []string{"other", "notes"}})
	select {
	case <-reached:
	case <-time.After(patience):
		t.Fatal("the lead does not ask a second time")
	}
	reqs := first.requests()
	if prompt := reqs[0].Messages[0].Text; !strings.Contains(prompt, "- notes: About notes.") || strings.Contains(prompt, "secret") || strings.Contains(prompt, "The way of") {
		t.Errorf("the lead is told %q", prompt)
	}
	if got := offered(reqs[0]); !strings.Contains(got, "write_file") || offered(reqs[1]) != "grep read_file task" {
		t.Errorf("offered are %q, and then %q", got, offered(reqs[1]))
	}

	second := &scripted{answer: func(_ context.Context, turn int, req model.Request) (model.Response, error) {
		if turn == 0 {
			return call("", model.ToolCall{ID: "w", Name: "write_file", Args: `{"path":"a","content":"x"}`}, taskCall("t", "Hanoi"))
		}
		return say(results(req)[0].Text)
	}}
	a.die()
	w.lead("lead-b", second, withSkills(there), withTools(fileTools(t)...)).wait(rec.RunID)
	end := second.requests()
	if got := offered(end[0]); got != "grep read_file task" {
		t.Errorf("after the take-over offered are %q", got)
	}
	if got := results(end[1])[0]; !got.IsError || !strings.Contains(got.Text, "the active skill notes allows only grep, task") {
		t.Errorf("the call was answered %+v", got)
	}
	if got := w.gate.requests(); len(got) != 1 || !slices.Equal(got[0].Subagent.Skills, []string{"other", "notes"}) {
		t.Errorf("requests are %+v", got)
	}
}

// SKILL-08, SKILL-09: a run whose skills cannot be read fails; one that may use none
// does not look.
func TestSkillsThatCannotBeRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return completed("found") })
	m := &scripted{answer: func(context.Context, int, model.Request) (model.Response, error) { return say("done") }}
	l := w.lead("lead-a", m, withSkills(skill.Loader{Public: []string{filepath.Join(t.TempDir(), "none")}}))
	if rec := l.wait(l.start(runapi.RunInput{}).RunID); rec.Status != contract.RunFailed || !strings.Contains(rec.Error, "skills.paths") || len(m.requests()) != 0 {
		t.Errorf("%s: %s, %d model calls", rec.Status, rec.Error, len(m.requests()))
	}
	if rec := l.wait(l.start(runapi.RunInput{AvailableSkills: []string{}}).RunID); rec.Status != contract.RunCompleted {
		t.Errorf("%s: %s", rec.Status, rec.Error)
	}
}
