package agent

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
)

// F-020, F-070: open calls get a result that says so, results without a call go,
// and what is late does not move to another call.
func TestRepair(t *testing.T) {
	t.Parallel()
	says := func(c ...model.ToolCall) model.Message { return model.Message{Role: model.RoleAssistant, ToolCalls: c} }
	res := func(id, text string) model.Message {
		return model.Message{Role: model.RoleTool, ToolCallID: id, Text: text}
	}
	ask := model.Message{Role: model.RoleUser, Text: "?"}
	ok := call("a", "ls", "{}")
	for _, c := range []struct {
		name string
		in   []model.Message
		want []string // of the tool messages
	}{
		{"in order", []model.Message{ask, says(ok), res("a", "A")}, []string{"a=A"}},
		{"crash before the result", []model.Message{ask, says(ok)}, []string{"a=" + prompt.LostResult}},
		{"crash between two results", []model.Message{ask, says(ok, call("b", "ls", "")), res("b", "B")}, []string{"a=" + prompt.LostResult, "b=B"}},
		{"a new turn after a crash", []model.Message{ask, says(ok), ask, res("a", "late")}, []string{"a=" + prompt.LostResult}},
		{"results in another order", []model.Message{ask, says(ok, call("b", "ls", "")), res("b", "B"), res("a", "A")}, []string{"a=A", "b=B"}},
		{"a second result", []model.Message{ask, says(ok), res("a", "A"), res("a", "again")}, []string{"a=A"}},
		{"a result without a call", []model.Message{ask, res("x", "X"), says(ok), res("a", "A"), res("y", "Y")}, []string{"a=A"}},
		{"one id twice", []model.Message{ask, says(ok, ok), res("a", "A"), res("a", "B")}, []string{"a=A", "call_1_2=B"}},
		{"one id in two messages", []model.Message{ask, says(ok), res("a", "A"), says(ok), res("a", "B")}, []string{"a=A", "call_3_1=B"}},
		{"blank ids", []model.Message{ask, says(call("", "ls", ""), call(" ", "ls", "")), res("", "A"), res(" ", "B")}, []string{"call_1_1=A", "call_1_2=B"}},
		{"arguments that are none", []model.Message{ask, says(call("a", " ", "[1]")), res("a", "A")}, []string{"a=A"}},
	} {
		in := append([]model.Message(nil), c.in...)
		out := Repair(c.in)
		var got []string
		for _, m := range out {
			if m.Role == model.RoleTool {
				got = append(got, m.ToolCallID+"="+m.Text)
			}
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: results %q, want %q", c.name, got, c.want)
		}
		if !reflect.DeepEqual(in, c.in) {
			t.Errorf("%s: the input was changed", c.name)
		}
		pairs(t, out)
	}
	in := []model.Message{ask, says(ok), res("a", "A"), {Role: model.RoleAssistant, Text: "done"}}
	if out := Repair(in); !reflect.DeepEqual(out, in) {
		t.Errorf("what was in order became %+v", out)
	}
}

// F-020, F-070: whatever a conversation looks like, what Repair makes of it can
// be replayed, keeps what was said, and stays as it is when repaired again.
func TestRepairHolds(t *testing.T) {
	t.Parallel()
	ids := []string{"", " ", "a", "b", "c", "call_0_1", "call_1_1", "call_1_2", "call_2_1"}
	args := []string{"", "{}", ` {"a":1} `, "null", "[]", "{", `{"a":"` + "\xff" + `"}`, strings.Repeat("[", 200)}
	names := []string{"", "ls", "task"}
	roles := []model.Role{model.RoleUser, model.RoleAssistant, model.RoleAssistant, model.RoleTool, model.RoleTool, model.RoleSystem}
	for seed := range uint64(5000) {
		r := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // the same cases each time
		messages := make([]model.Message, r.IntN(13))
		for i := range messages {
			m := &messages[i]
			if m.Role = roles[r.IntN(len(roles))]; m.Role == model.RoleTool {
				m.ToolCallID, m.Text = ids[r.IntN(len(ids))], fmt.Sprint("result ", i)
				continue
			}
			for range r.IntN(4) {
				m.ToolCalls = append(m.ToolCalls, model.ToolCall{ID: ids[r.IntN(len(ids))], Name: names[r.IntN(len(names))], Args: args[r.IntN(len(args))]})
			}
		}
		checkRepair(t, messages)
		if seed < 500 {
			checkGrowth(t, messages)
		}
	}
}

func checkRepair(t interface{ Fatalf(string, ...any) }, in []model.Message) {
	out := Repair(in)
	if why := unpaired(out); why != "" {
		t.Fatalf("%s in %+v", why, out)
	}
	kept := 0
	for _, m := range in {
		if m.Role != model.RoleTool {
			kept++
		}
	}
	for _, m := range out {
		if m.Role != model.RoleTool {
			kept--
		}
		for _, c := range m.ToolCalls {
			var v map[string]any
			if json.Unmarshal([]byte(c.Args), &v) != nil || v == nil {
				t.Fatalf("arguments %q are no object", c.Args)
			}
		}
	}
	if kept != 0 {
		t.Fatalf("%d messages were lost", kept)
	}
	if again := Repair(out); !reflect.DeepEqual(again, out) {
		t.Fatalf("repaired again it became %+v, was %+v", again, out)
	}
}

// checkGrowth: a conversation that grows is repaired as if it had been there at once,
// wherever it stood before, and what was returned then stays as it was.
func checkGrowth(t interface{ Fatalf(string, ...any) }, in []model.Message) {
	out := Repair(in)
	for n := range in {
		var r repairer
		before := r.repair(in[:n])
		kept := slices.Clone(before)
		if grown := r.repair(in); !reflect.DeepEqual(grown, out) {
			t.Fatalf("after %d messages it became %+v, want %+v", n, grown, out)
		}
		_ = append(before, model.Message{Text: "of another"})
		if again := r.repair(in); !reflect.DeepEqual(again, out) || !reflect.DeepEqual(before, kept) {
			t.Fatalf("after %d messages what had been returned was changed", n)
		}
	}
}

// F-070: the same over conversations that are read from bytes.
func FuzzRepair(f *testing.F) {
	f.Add([]byte(`[{"role":"assistant","tool_calls":[{"id":"a","name":"ls","args":"{"},{"id":"a"}]},{"role":"tool","tool_call_id":"a","text":"x"}]`))
	f.Add([]byte(`[{"role":"tool"},{"role":"user","text":"?"},{"role":"assistant","tool_calls":[{}]}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var in []model.Message
		if json.Unmarshal(b, &in) != nil {
			return
		}
		checkRepair(t, in)
		checkGrowth(t, in)
	})
}

// F-104, F-126: arguments are one object, bounded in size and depth.
func FuzzParseArgs(f *testing.F) {
	for _, s := range []string{"", "{}", "null", `{"a":[1,{"b":null}]}`, "{} {}", strings.Repeat(`{"a":`, 99) + "1" + strings.Repeat("}", 99)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		args, err := ParseArgs(s)
		if err != nil {
			if len([]rune(err.Error())) > 600 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		var v map[string]any
		if err := json.Unmarshal(args, &v); err != nil || v == nil {
			t.Errorf("%q was taken for an object", args)
		}
		again, err := ParseArgs(string(args))
		if err != nil || string(again) != string(args) {
			t.Errorf("%q is not stable", args)
		}
	})
}
