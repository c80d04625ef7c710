package executor

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"

	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// talker calls two tools at once with long arguments, and then says much.
type talker struct {
	args, text string

	mu    sync.Mutex
	asked []model.Request
}

func (*talker) Name() string      { return "fake" }
func (*talker) ModelName() string { return "fake-1" }
func (m *talker) Generate(_ context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked = append(m.asked, req)
	if len(m.asked) > 1 {
		return model.Response{Message: model.Message{Text: m.text}}, nil
	}
	call := func(id string) model.ToolCall { return model.ToolCall{ID: id, Name: "speak", Args: m.args} }
	return model.Response{Message: model.Message{Text: "Two at once.", ToolCalls: []model.ToolCall{call("c1"), call("c2")}}}, nil
}

type speaks struct{ text string }

func (speaks) Spec() model.ToolSpec { return model.ToolSpec{Name: "speak"} }
func (s speaks) Call(_ context.Context, c tool.Call) (tool.Result, error) {
	return tool.Result{Text: c.ID + s.text}, nil
}

// STEP-01, STEP-02, STEP-05, STEP-06, STEP-07, STEP-08, STEP-09, STEP-10, EVT-12,
// USAGE-06: every answer and every output of a task is told once and in order, cut and
// flagged; both feeds carry the same; the model itself is shown the whole.
func TestStepsAreCutForOthersAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	long := strings.Repeat("界", contract.MaxStepChars+1)
	args, err := json.Marshal(map[string]string{"k": long})
	if err != nil {
		t.Fatal(err)
	}
	m := &talker{args: string(args), text: long}
	models, err := model.NewRegistry(m)
	if err != nil {
		t.Fatal(err)
	}
	w.svc.deps.Models, w.tools = models, []tool.Tool{speaks{long}}
	run := w.begin(w.granted("t_1", 1))
	if run == nil {
		t.Fatal("the grant was not taken")
	}
	run()

	if rec, _ := w.record("t_1"); rec.State != contract.StateCompleted || rec.Result != long {
		t.Errorf("the record is %s with a result of %d bytes, want all %d", rec.State, len(rec.Result), len(long))
	}
	if len(m.asked) != 2 {
		t.Fatalf("the model was asked %d times, want twice", len(m.asked))
	}
	whole := 0
	for _, msg := range m.asked[1].Messages {
		if msg.Role == model.RoleTool && msg.Text == msg.ToolCallID+long || len(msg.ToolCalls) == 2 && msg.ToolCalls[0].Args == m.args && msg.ToolCalls[1].Args == m.args {
			whole++
		}
	}
	if whole != 3 {
		t.Errorf("the model is shown %d of its call and two results whole", whole)
	}

	stream, err := w.bus.JS.Stream(w.ctx, w.bus.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	var steps []contract.TaskRunningData
	for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
		msg, err := w.bus.Get(w.ctx, w.bus.Names.EventStream(), seq)
		if err != nil {
			t.Fatal(err)
		}
		ev, err := envelope.Decode(msg.Data)
		if err != nil {
			t.Fatal(err)
		}
		if ev.Type != contract.EventTaskRunning {
			continue
		}
		var data contract.TaskRunningData
		if err := json.Unmarshal(ev.Data, &data); err != nil {
			t.Fatal(err)
		}
		steps = append(steps, data)
		stored, ok := event.Record(ev, seq)
		live, okLive := event.Live(ev, seq)
		if !ok || !okLive || string(stored.Content) != string(live.Content) {
			t.Errorf("step %d is stored as %.100s and shown as %.100s", data.MessageIndex, stored.Content, live.Content)
		}
		if data.Usage != nil || data.ModelName != "fake-1" {
			t.Errorf("step %d has usage %+v, which nobody reported, and model %q", data.MessageIndex, data.Usage, data.ModelName)
		}
	}
	if len(steps) != 4 {
		t.Fatalf("%d steps were told, want 4", len(steps))
	}
	for i, s := range steps {
		if s.MessageIndex != i+1 {
			t.Errorf("step %d has index %d", i+1, s.MessageIndex)
		}
	}
	ask, first, second, last := steps[0].Message, steps[1].Message, steps[2].Message, steps[3].Message
	cut, _ := json.Marshal(m.args[:len(`{"k":"`)+len("界")*(contract.MaxStepChars-len(`{"k":"`))])
	if ask.Kind != contract.StepAI || ask.Truncated || len(ask.ToolCalls) != 2 || !ask.ToolCalls[1].ArgsTruncated || string(ask.ToolCalls[1].Args) != string(cut) {
		t.Errorf("the calls are told as %.200v", ask)
	}
	for id, s := range map[string]contract.Step{"c1": first, "c2": second} {
		if s.Kind != contract.StepTool || !s.Truncated || s.ToolName == nil || *s.ToolName != "speak" || s.Text != id+long[:len("界")*(contract.MaxStepChars-len(id))] {
			t.Errorf("the output of %s is told as %.100v", id, s)
		}
	}
	if last.Kind != contract.StepAI || !last.Truncated || last.Text != long[:len("界")*contract.MaxStepChars] || last.ToolCalls == nil || len(last.ToolCalls) != 0 {
		t.Errorf("the answer is told as %.100v", last)
	}
}
