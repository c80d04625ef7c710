package run

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/guard"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

func withGuards(c *Config, _ *Deps) {
	c.Guards = guard.Config{
		Loop:   config.Default().LoopDetection,
		Budget: config.TokenBudget{Enabled: true, MaxTokens: 1000, WarnThreshold: 0.7, HardStopThreshold: 1},
	}
}

// GUARD-12, GUARD-13, GUARD-20, GUARD-21: on a lead's run the guards set the run's
// stop reason, also those that are none of a task's.
func TestGuardsOfALead(t *testing.T) {
	t.Parallel()
	ls := func(i int) model.ToolCall {
		return model.ToolCall{ID: fmt.Sprint("c", i), Name: "ls", Args: `{"path":"."}`}
	}
	for _, tt := range []struct {
		name   string
		answer func(turn int) (model.Response, error)
		status contract.RunStatus
		code   contract.ErrorCode
		stop   contract.StopReason
		told   string
		calls  int
	}{
		{"loop with text", func(turn int) (model.Response, error) { return call("so far", ls(turn)) },
			contract.RunCompleted, "", contract.StopLoopCapped, "so far\n\n[Stopped", 5},
		{"loop without text", func(turn int) (model.Response, error) { return call("", ls(turn)) },
			contract.RunFailed, "", contract.StopLoopCapped, "again and again", 5},
		{"loop after a task", func(turn int) (model.Response, error) {
			if turn == 0 {
				return call("", taskCall("t", "Oslo"))
			}
			return call("", ls(turn))
		}, contract.RunCompleted, "", contract.StopLoopCapped, "fact about Oslo", 6},
		{"tokens", func(turn int) (model.Response, error) {
			r, err := call("so far", ls(turn))
			r.Usage = &contract.Usage{InputTokens: 500}
			return r, err
		}, contract.RunCompleted, "", contract.StopTokenCapped, "token budget", 2},
		{"safety", func(turn int) (model.Response, error) {
			r, err := call("so far", ls(turn))
			r.Message.FinishReason = "content_filter"
			return r, err
		}, contract.RunCompleted, "", contract.StopSafetyCapped, "so far\n\n[The model's provider", 1},
		{"safety without text", func(turn int) (model.Response, error) {
			r, err := call("", ls(turn))
			r.Message.FinishReason = "refusal"
			return r, err
		}, contract.RunFailed, contract.ErrLLM, contract.StopSafetyCapped, "safety reasons", 1},
		{"a guard after the limit of delegations", func(turn int) (model.Response, error) {
			if turn < 2 {
				return call("more", taskCall(fmt.Sprint("t", turn), "Oslo"), ls(turn))
			}
			return call("so far", ls(turn))
		}, contract.RunCompleted, "", contract.StopLoopCapped, "so far", 7},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord { return completed("fact about " + req.Description) })
			var ran atomic.Int32
			files := &funcTool{name: "ls", call: func(context.Context, tool.Call) (tool.Result, error) {
				ran.Add(1)
				return tool.Result{Text: "files"}, nil
			}}
			m := &scripted{answer: func(_ context.Context, turn int, _ model.Request) (model.Response, error) { return tt.answer(turn) }}
			one := 1
			l := w.lead("lead-a", m, withTools(files), withGuards, func(c *Config, _ *Deps) { c.MaxTotal = &one })
			rec := l.wait(l.start(runapi.RunInput{}).RunID)
			if rec.Status != tt.status || rec.ErrorCode != tt.code || rec.StopReason != tt.stop || !strings.Contains(rec.Output+rec.Error, tt.told) {
				t.Errorf("run ended %s %q %q, output %q, error %q", rec.Status, rec.ErrorCode, rec.StopReason, rec.Output, rec.Error)
			}
			if n := len(m.requests()); n != tt.calls {
				t.Errorf("the model was asked %d times, want %d", n, tt.calls)
			}
			if tt.stop == contract.StopSafetyCapped && ran.Load() != 0 {
				t.Error("a call of an answer that the provider cut was run")
			}
			w.events(rec.RunID)
		})
	}
}

// EXEC-10: what a sub-agent has written into the common workspace is not replaced by a
// lead that has not read it.
func TestLeadReadsBeforeItWrites(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ws, err := tool.NewWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ws.Close() })
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord {
		if err := os.WriteFile(filepath.Join(dir, "report"), []byte("of the sub-agent"), 0o600); err != nil {
			t.Error(err)
		}
		return completed("it is in report")
	})
	write := model.ToolCall{ID: "w", Name: "write_file", Args: `{"path":"report","content":"of the lead"}`}
	m := &scripted{answer: func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
		switch turn {
		case 0:
			return call("", taskCall("t", "Oslo"))
		case 1:
			return call("", write)
		case 2:
			return call("", model.ToolCall{ID: "r", Name: "read_file", Args: `{"path":"report"}`})
		case 3:
			if b, err := os.ReadFile(filepath.Join(dir, "report")); err != nil || string(b) != "of the sub-agent" {
				t.Errorf("%v: the lead replaced what it had not read by %q", err, b)
			}
			return call("", write)
		}
		return call("done")
	}}
	l := w.lead("lead-a", m, withTools(tool.Tools(ws, tool.Options{})...))
	rec := l.wait(l.start(runapi.RunInput{}).RunID)
	b, err := os.ReadFile(filepath.Join(dir, "report"))
	if err != nil || string(b) != "of the lead" || rec.Status != contract.RunCompleted {
		t.Errorf("%v: the run is %s and the file %q; want it replaced once it was read", err, rec.Status, b)
	}
}

// GUARD-04, GUARD-21: a lead that takes a run over counts on from where the run is.
func TestGuardsOfALeadThatTakesOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	held := make(chan struct{})
	answer := func(hold int) func(ctx context.Context, turn int, _ model.Request) (model.Response, error) {
		return func(ctx context.Context, turn int, _ model.Request) (model.Response, error) {
			if turn == hold {
				close(held)
				<-ctx.Done()
				return model.Response{}, context.Cause(ctx)
			}
			return call("so far", model.ToolCall{ID: fmt.Sprint(hold, turn), Name: "ls", Args: `{}`})
		}
	}
	files := &funcTool{name: "ls", call: func(context.Context, tool.Call) (tool.Result, error) { return tool.Result{Text: "files"}, nil }}
	a := w.lead("lead-a", &scripted{answer: answer(3)}, withTools(files), withGuards)
	id := a.start(runapi.RunInput{}).RunID
	select {
	case <-held:
	case <-time.After(patience):
		t.Fatal("the first lead never came to its fourth turn")
	}
	a.die()
	second := &scripted{answer: answer(-1)}
	b := w.lead("lead-b", second, withTools(files), withGuards)
	rec := b.wait(id)
	if rec.StopReason != contract.StopLoopCapped || len(second.requests()) != 2 {
		t.Errorf("run ended %s with %q after %d more model calls; want two", rec.Status, rec.StopReason, len(second.requests()))
	}
}
