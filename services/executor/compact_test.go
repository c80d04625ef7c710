package executor

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// looker calls a tool turns times and then cites the first receipt that it is shown.
type looker struct {
	turns int

	mu    sync.Mutex
	asked []model.Request
	sums  int
}

func (*looker) Name() string      { return "fake" }
func (*looker) ModelName() string { return "fake-1" }
func (l *looker) Generate(_ context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	used := &contract.Usage{InputTokens: 10, OutputTokens: 1, TotalTokens: 11}
	if req.Agent == "summarisation" {
		l.sums++
		return model.Response{Message: model.Message{Text: fmt.Sprint("SUMMARY ", l.sums)}, Usage: used}, nil
	}
	l.asked = append(l.asked, req)
	if n := len(l.asked); n <= l.turns {
		return model.Response{Message: model.Message{ToolCalls: []model.ToolCall{{ID: fmt.Sprint("c", n), Name: "look", Args: fmt.Sprintf(`{"n":%d}`, n)}}}, Usage: used}, nil
	}
	return model.Response{Message: model.Message{Text: "I looked [r1 look] and found it."}, Usage: used}, nil
}

type looks struct{}

func (looks) Spec() model.ToolSpec { return model.ToolSpec{Name: "look"} }
func (looks) Call(_ context.Context, c tool.Call) (tool.Result, error) {
	return tool.Result{Text: "seen by " + c.ID}, nil
}

// GUARD-02, GUARD-03, COMPACT-11: what a task's summaries cost is in its budget and
// in its usage.
func TestSummariesAreInTheBudget(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := &looker{turns: 40}
	models, err := model.NewRegistry(m)
	if err != nil {
		t.Fatal(err)
	}
	settings := config.Default()
	settings.Summarization.Enabled = true
	settings.Summarization.Trigger = []config.Threshold{{Type: config.ThresholdMessages, Value: 8}}
	settings.Summarization.Keep = config.Threshold{Type: config.ThresholdMessages, Value: 4}
	settings.Subagents.TokenBudget = &config.TokenBudget{Enabled: true, MaxTokens: 300, WarnThreshold: 0.7, HardStopThreshold: 1}
	w.svc.cfg.Settings, w.svc.deps.Models, w.tools = &settings, models, []tool.Tool{looks{}}
	g := w.granted("t_1", 1)
	g.Request.Subagent.MaxTurns = 50
	w.background(w.begin(g))()
	rec, _ := w.record("t_1")
	if rec.StopReason != contract.StopTokenCapped || rec.Usage == nil || rec.Usage.TotalTokens < 300 || rec.Usage.TotalTokens > 330 || m.sums < 3 {
		t.Errorf("record %+v after %d summaries; want it stopped at 300 tokens", rec, m.sums)
	}
}

// COMPACT-11, STATUS-08: a model for summaries that is not there ends the task with
// words, and leaves nothing of it running.
func TestNoModelForSummaries(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.using(func(c *config.Config) {
		name := "nowhere"
		c.Summarization.Enabled, c.Summarization.ModelName = true, &name
	})
	w.background(w.begin(w.granted("t_1", 1)))()
	if rec, _ := w.record("t_1"); rec.State != contract.StateFailed || !strings.Contains(rec.Error, "summarization.model_name") || !strings.Contains(rec.Error, "nowhere") {
		t.Errorf("record = %+v", rec)
	}
}

// COMPACT-01, COMPACT-07, COMPACT-09, COMPACT-13, STEP-09, USAGE-01: a task whose
// conversation is compacted tells every step once, with an index without a gap; its
// receipts are those of the messages that are left; summaries are paid for; and
// nothing goes into its parent's thread.
func TestTaskIsCompacted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := &looker{turns: 12}
	models, err := model.NewRegistry(m)
	if err != nil {
		t.Fatal(err)
	}
	settings := config.Default()
	settings.Summarization.Enabled = true
	settings.Summarization.Trigger = []config.Threshold{{Type: config.ThresholdMessages, Value: 8}}
	settings.Summarization.Keep = config.Threshold{Type: config.ThresholdMessages, Value: 4}
	w.svc.cfg.Settings, w.svc.deps.Models, w.tools = &settings, models, []tool.Tool{looks{}}
	g := w.granted("t_1", 1)
	g.Request.Subagent.MaxTurns, g.Request.Subagent.SystemPrompt = 20, "You look."
	run := w.begin(g)
	if run == nil {
		t.Fatal("the grant was not taken")
	}
	run()

	rec, _ := w.record("t_1")
	if rec.State != contract.StateCompleted || !strings.Contains(rec.Result, "found it") || m.sums < 2 {
		t.Fatalf("record %+v after %d summaries", rec, m.sums)
	}
	if want := int64(11 * (13 + m.sums)); rec.Usage == nil || rec.Usage.TotalTokens != want {
		t.Errorf("usage %+v, want %d tokens", rec.Usage, want)
	}
	stream, err := w.bus.JS.Stream(w.ctx, w.bus.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	steps := 0
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
		if steps++; data.MessageIndex != steps || strings.Contains(data.Message.Text, "SUMMARY") {
			t.Errorf("step %d: %+v", steps, data)
		}
	}
	if steps != 25 {
		t.Errorf("%d steps were told, want 25", steps)
	}
	for i, req := range m.asked {
		systems, at := 0, -1
		for j, msg := range req.Messages {
			if msg.Role == model.RoleSystem {
				systems++
			}
			if strings.Contains(msg.Text, "SUMMARY") {
				at = j
			}
		}
		if systems != 1 || req.Messages[0].Role != model.RoleSystem || len(req.Messages) > 13 || i == 12 && at < 1 {
			t.Errorf("request %d has %d system messages of %d, the summary at %d", i, systems, len(req.Messages), at)
		}
	}
	// The receipts that were shown are those of the calls that are left (RECEIPT-08).
	if len(rec.Receipts) == 0 || len(rec.Receipts) >= 12 || rec.Receipts[len(rec.Receipts)-1].ToolCallID != "c12" {
		t.Errorf("receipts = %+v", rec.Receipts)
	}
	if v := rec.ReceiptVerdict; v == nil || !v.CitationResolved || len(v.Resolved) != 1 {
		t.Errorf("verdict = %+v", v)
	}
	runs, err := w.bus.JS.Stream(w.ctx, w.bus.RunStream())
	if err != nil || runs.CachedInfo().State.Msgs != 0 {
		t.Errorf("%v: something was written beside the task", err)
	}
}
