package script

import (
	"errors"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/model"
)

// Each fault without an answer is a failure that passes, also without a server.
func TestFailingFaults(t *testing.T) {
	t.Parallel()
	for _, fault := range failing {
		m := parse(t, `default: {turns: [{text: "Half of it.", fault: `+string(fault)+`}, {text: "Whole."}]}`)
		req := model.Request{Agent: "a", Messages: []model.Message{{Role: model.RoleUser, Text: "x"}}}
		_, err := m.Generate(t.Context(), req, nil)
		var e *model.Error
		if !errors.As(err, &e) || e.Kind != model.KindTransient || e.Code == "" || e.Message == "" {
			t.Errorf("%s: error %v, want one that passes", fault, err)
		}
		if res, err := m.Generate(t.Context(), req, nil); err != nil || res.Message.Text != "Whole." {
			t.Errorf("%s: the next try gives %q, %v; want Whole.", fault, res.Message.Text, err)
		}
	}
}

// Faults of an answer are in it.
func TestFaultyAnswers(t *testing.T) {
	t.Parallel()
	for fault, ok := range map[Fault]func(model.Response) bool{
		FaultBlankIDs:    func(r model.Response) bool { return r.Message.ToolCalls[1].ID == "" },
		FaultRepeatedIDs: func(r model.Response) bool { return r.Message.ToolCalls[0].ID == r.Message.ToolCalls[1].ID },
		FaultCutCall: func(r model.Response) bool {
			return r.Message.FinishReason == "length" && r.Message.ToolCalls[0].Args != "{}"
		},
		FaultNullUsage: func(r model.Response) bool { return r.Usage == nil },
	} {
		m := parse(t, `default: {turns: [{tool_calls: [{name: ls, args: {a: 1}}, {name: ls}], usage: {input_tokens: 1}, fault: `+string(fault)+`}]}`)
		res, err := m.Generate(t.Context(), model.Request{Agent: "a"}, nil)
		if err != nil || !ok(res) {
			t.Errorf("%s: %+v, usage %v, %v", fault, res.Message, res.Usage, err)
		}
	}
}

func TestRetryAfterOfAScript(t *testing.T) {
	t.Parallel()
	_, err := parse(t, `default: {turns: [{fault: rate_limit, retry_after: "3"}]}`).Generate(t.Context(), model.Request{}, nil)
	var e *model.Error
	if !errors.As(err, &e) || e.RetryAfter != 3*time.Second {
		t.Errorf("error %+v, want to wait 3 s", err)
	}
	for _, bad := range []string{`{text: x, retry_after: "3"}`, `{text: x, fault: out_of_order}`} {
		if _, err := Parse("f", []byte(`default: {turns: [`+bad+`]}`)); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}
