package script

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Faults by chance come as often as they should, in all kinds, and again with the
// same seed; what they need is there, and the step that was given stays as it was.
func TestRandom(t *testing.T) {
	t.Parallel()
	calls := func() Step {
		return Step{Usage: &contract.Usage{InputTokens: 1}, Message: model.Message{Role: model.RoleAssistant, Text: "Look.", FinishReason: "tool_calls", ToolCalls: []model.ToolCall{
			{ID: "call_1_0", Name: "ls", Args: `{"path": "."}`}, {ID: "call_1_1", Name: "ls", Args: `{"path": "x"}`},
		}}}
	}
	text := Step{Message: model.Message{Role: model.RoleAssistant, Text: "Done.", FinishReason: "stop"}}
	r := Random{Seed: 7, Every: 3}
	const n = 6000
	seen := map[string]int{}
	total := 0
	for i := range n {
		step := calls()
		got, kind := r.Change("c", i, step)
		if again, same := r.Change("c", i, calls()); same != kind || !reflect.DeepEqual(again, got) {
			t.Fatalf("answer %d: %q and then %q with the same seed", i, kind, same)
		}
		if !reflect.DeepEqual(step, calls()) {
			t.Fatalf("answer %d, %s: the step that was given changed to %+v", i, kind, step)
		}
		if (kind == "") != reflect.DeepEqual(got, step) {
			t.Errorf("answer %d, %q: %+v", i, kind, got)
		}
		if kind != "" {
			total++
		}
		seen[kind]++
		if _, kind := r.Change(fmt.Sprint("d", i), 0, text); kind == ChanceUnknownTool || slices.Contains(needCalls, Fault(kind)) {
			t.Fatalf("an answer without calls got %s", kind)
		}
	}
	if total < n/3-n/20 || total > n/3+n/20 {
		t.Errorf("%d of %d answers have a fault, want about a third", total, n)
	}
	for _, kind := range Chances() {
		if seen[kind] == 0 {
			t.Errorf("%s never came in %d answers", kind, n)
		}
	}
	other := Random{Seed: 8, Every: 3}
	if a, b := kinds(r, calls()), kinds(other, calls()); slices.Equal(a, b) {
		t.Errorf("two seeds give the same faults: %q", a)
	}
	if _, kind := (Random{}).Change("c", 0, text); kind != "" {
		t.Errorf("without a number of answers there was %s", kind)
	}
	if got, kind := (Random{Every: 1}).Change("c", 0, Step{Fault: FaultReset}); kind != "" || got.Fault != FaultReset {
		t.Errorf("a fault of the script became %q", kind)
	}
}

func kinds(r Random, s Step) (out []string) {
	for i := range 50 {
		_, kind := r.Change("c", i, s)
		out = append(out, kind)
	}
	return out
}
