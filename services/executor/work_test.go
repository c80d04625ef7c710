package executor

import (
	"slices"
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

type named struct {
	tool.Tool
	name string
}

func (n named) Spec() model.ToolSpec { return model.ToolSpec{Name: n.name} }

// CTX-08, TOOL-01, TOOL-02, ISO-09: the parent's scope bounds the child, then its own
// lists do; the task tool never passes.
func TestAllowedTools(t *testing.T) {
	t.Parallel()
	var all []tool.Tool
	for _, n := range []string{"bash", "ls", "read_file", "task", "grep"} {
		all = append(all, named{name: n})
	}
	for _, c := range []struct {
		offered, allow, deny, want []string
	}{
		{nil, nil, nil, []string{"bash", "ls", "read_file", "grep"}},
		{nil, []string{}, nil, nil},
		{nil, []string{"grep", "ls", "nope", "task"}, nil, []string{"ls", "grep"}},
		{[]string{"grep", "bash", "task"}, nil, []string{"bash"}, []string{"grep"}},
		{[]string{}, []string{"ls"}, nil, nil},
		{[]string{"ls"}, []string{"ls"}, []string{"ls"}, nil},
	} {
		a := &attempt{grant: contract.Grant{Request: contract.TaskRequest{OfferedTools: c.offered, Subagent: contract.Subagent{Tools: c.allow, DisallowedTools: c.deny}}}}
		var got []string
		for _, x := range a.allowed(all) {
			got = append(got, x.Spec().Name)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("offered %q, allowed %q, denied %q: got %q, want %q", c.offered, c.allow, c.deny, got, c.want)
		}
	}
}

// REG-12: a child has its parent's model unless it has one.
func TestModelOfTask(t *testing.T) {
	t.Parallel()
	req := contract.TaskRequest{ParentModel: "parent"}
	for name, want := range map[string]string{"": "parent", "inherit": "parent", "own": "own"} {
		req.Subagent.Model = name
		if got := (&attempt{grant: contract.Grant{Request: req}}).modelName(); got != want {
			t.Errorf("model %q becomes %q, want %q", name, got, want)
		}
	}
}
