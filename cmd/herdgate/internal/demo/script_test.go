package demo

import (
	"context"
	"encoding/json"
	"errors"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/script"
	"github.com/herdgate/herdgate/internal/tool"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// delegate stands for the task tool: it runs a sub-agent on the spot, with the
// real loop and the real tools.
type delegate struct {
	model model.Model
	tools []tool.Tool

	mu    sync.Mutex
	calls []taskArgs
	used  []string // tools of the sub-agents
}

type taskArgs struct {
	Description  string `json:"description"`
	Prompt       string `json:"prompt"`
	SubagentType string `json:"subagent_type"`
}

func (d *delegate) Spec() model.ToolSpec {
	return model.ToolSpec{Name: "task", Parameters: json.RawMessage(`{"type":"object"}`)}
}

func (d *delegate) Call(ctx context.Context, call tool.Call) (tool.Result, error) {
	var args taskArgs
	if err := json.Unmarshal(call.Args, &args); err != nil {
		return tool.Result{}, err
	}
	res, err := agent.Run(ctx, agent.Config{
		Agent: args.SubagentType, Model: d.model, Tools: d.tools, MaxTurns: 10,
	}, []model.Message{{Role: model.RoleUser, Text: args.Prompt}})
	if err != nil {
		return tool.Result{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, args)
	for _, m := range res.Messages {
		if m.Role != model.RoleTool {
			continue
		}
		d.used = append(d.used, m.ToolName)
		if m.IsError {
			return tool.Result{}, errors.New(m.ToolName + ": " + m.Text)
		}
	}
	if res.Usage == nil {
		return tool.Result{}, errors.New("a turn of the script has no usage")
	}
	return tool.Result{Text: "Task Succeeded. Result: " + res.LastAssistant().Text}, nil
}

// run lets the offline model do the demonstration over the project in dir.
func run(t *testing.T, dir string) (answer string, d *delegate) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := script.Parse("script.yaml", Script())
	if err != nil {
		t.Fatal(err)
	}
	ws, err := tool.NewWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer ws.Close()
	offline := script.New("offline", s)
	d = &delegate{model: offline, tools: tool.Tools(ws, tool.Options{})}
	res, err := agent.Run(ctx, agent.Config{Agent: "lead", Model: offline, Tools: []tool.Tool{d}, MaxTurns: 10},
		[]model.Message{{Role: model.RoleUser, Text: Prompt()}})
	if err != nil {
		t.Fatal(err)
	}
	return res.LastAssistant().Text, d
}

var found = regexp.MustCompile(`(?m)^([a-z]+/[^ :]+:[0-9]+): (.*)$`)

func places(answer string) []string {
	var out []string
	for _, m := range found.FindAllStringSubmatch(answer, -1) {
		out = append(out, m[1])
	}
	slices.Sort(out)
	return out
}

func TestScriptFindsTheTruth(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := CopyTo(dir); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	answer, d := run(t, dir)
	took := time.Since(began)
	want, err := Truth()
	if err != nil {
		t.Fatal(err)
	}
	if got := places(answer); !slices.Equal(got, want) {
		t.Errorf("the answer lists\n%s\nwant\n%s\nanswer:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"), answer)
	}
	if !strings.Contains(answer, "in 13 places") {
		t.Errorf("the answer does not count the places:\n%s", answer)
	}
	if len(d.calls) != 3 {
		t.Fatalf("the lead delegates %d times, want 3", len(d.calls))
	}
	for _, c := range d.calls {
		if c.SubagentType != "general-purpose" || c.Description == "" {
			t.Errorf("delegation %+v, want a general-purpose one with a description", c)
		}
	}
	for _, name := range []string{"grep", "read_file"} {
		if !slices.Contains(d.used, name) {
			t.Errorf("no sub-agent used %s", name)
		}
	}
	// Three in parallel; one after the other would take longer than this.
	if took > 3*time.Second {
		t.Errorf("the demonstration took %v, want less than 3 s", took)
	}
}

// The answer comes from the files, not from the script: what changes in the
// workspace changes in the answer.
func TestScriptQuotesTheFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := CopyTo(dir); err != nil {
		t.Fatal(err)
	}
	ws, err := tool.NewWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer ws.Close()
	edit := func(file, text string) {
		t.Helper()
		args, err := json.Marshal(map[string]string{"path": file, "content": text})
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range tool.Tools(ws, tool.Options{}) {
			if w.Spec().Name == "write_file" {
				if res, err := w.Call(t.Context(), tool.Call{Args: args}); err != nil || res.IsError {
					t.Fatalf("write %s: %v %s", file, err, res.Text)
				}
			}
		}
	}
	edit("web/src/components/RefundButton.tsx", "export {};\n")
	edit("workers/audit/audit.go", "package audit\n\nvar _, _ = legacyclient.FetchOrder(nil, \"x\")\n")

	answer, _ := run(t, dir)
	got := places(answer)
	if slices.Contains(got, "web/src/components/RefundButton.tsx:5") {
		t.Error("the answer lists a use that is gone")
	}
	if !slices.Contains(got, "workers/audit/audit.go:3") {
		t.Errorf("the answer lacks the new use:\n%s", answer)
	}
}
