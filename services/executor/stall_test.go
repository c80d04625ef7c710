package executor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// stallLimit is far above what a command's next line takes on a busy machine.
const stallLimit = time.Second

// stalls makes the executor one with a short stall timeout.
func (w *world) stalls() {
	w.Helper()
	w.svc = w.service(w.svc.bus, func(c *Config) { c.StallTimeout = stallLimit })
}

// shell gives the tasks real tools, and returns their folder.
func (w *world) shell() string {
	w.Helper()
	dir := w.TempDir()
	ws, err := tool.NewWorkspace(dir)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = ws.Close() })
	w.tools = tool.Tools(ws, tool.Options{Bash: true, Sandbox: sandbox.New(sandbox.None, nil)})
	return dir
}

// says makes the model call a tool once, and then answer.
func (w *world) says(name string, args map[string]any) {
	w.Helper()
	w.model.answer = func(_ context.Context, n int) (model.Response, error) {
		r := model.Response{Message: model.Message{Text: "done"}, Usage: &contract.Usage{InputTokens: 3, OutputTokens: 2, TotalTokens: 5}}
		if n == 1 {
			r.Message = model.Message{ToolCalls: []model.ToolCall{{ID: "c1", Name: name, Args: string(w.json(args))}}}
		}
		return r, nil
	}
}

func (w *world) stalled() float64 {
	w.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(w.svc.metrics.stalled)
	families, err := reg.Gather()
	if err != nil {
		w.Fatal(err)
	}
	return families[0].GetMetric()[0].GetCounter().GetValue()
}

func (w *world) endedAsStalled(usage int64) {
	w.Helper()
	rec, _ := w.record("t_1")
	if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrExecutorStalled || !strings.Contains(rec.Error, "executor.stall_timeout_seconds") || !strings.Contains(rec.Error, "1s") {
		w.Errorf("record = %+v; want failed with executor_stalled and the limit in its text", rec)
	}
	if rec.Usage == nil || rec.Usage.TotalTokens != usage {
		w.Errorf("usage = %+v, want %d tokens", rec.Usage, usage)
	}
	if ev := w.events("t_1"); !strings.HasSuffix(ev, " failed") || w.fenced() != 0 || w.stalled() != 1 {
		w.Errorf("events = %s, fenced %v, stalled %v", ev, w.fenced(), w.stalled())
	}
}

// F-118, CANCEL-03, protocol W11: a model that says something and then nothing
// does not hold a slot for ever; its call is over before the record ends.
func TestSilentModelIsStalled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.stalls()
	var cause error
	var before contract.TaskRecord
	w.model.answer = func(ctx context.Context, _ int) (model.Response, error) {
		w.model.tell(model.Delta{Text: "well"})
		<-ctx.Done()
		cause = context.Cause(ctx)
		before, _ = w.record("t_1")
		return model.Response{Usage: &contract.Usage{InputTokens: 7, TotalTokens: 7}}, cause
	}
	w.background(w.begin(w.granted("t_1", 1)))()
	if !errors.Is(cause, errStalled) || before.State != contract.StateRunning {
		t.Errorf("the model was stopped by %v while the record was %q", cause, before.State)
	}
	w.endedAsStalled(7)
}

// F-118: pieces of an answer are progress, also those that show nothing.
func TestSlowModelIsNotStalled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.stalls()
	w.model.answer = func(ctx context.Context, _ int) (model.Response, error) {
		tick, over := time.NewTicker(stallLimit/10), time.NewTimer(5*stallLimit/2)
		defer tick.Stop()
		defer over.Stop()
		for {
			select {
			case <-ctx.Done():
				return model.Response{}, context.Cause(ctx)
			case <-tick.C:
				w.model.tell(model.Delta{})
			case <-over.C:
				return model.Response{Message: model.Message{Text: "at last"}}, nil
			}
		}
	}
	w.background(w.begin(w.granted("t_1", 1)))()
	if rec, _ := w.record("t_1"); rec.State != contract.StateCompleted || rec.Result != "at last" {
		t.Errorf("record = %+v", rec)
	}
}

// F-014, CANCEL-03, protocol W11: a command without output is ended with all its
// processes, then the record is written, with what was spent before.
func TestSilentCommandIsStalled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	dir := w.shell()
	w.stalls()
	w.says("bash", map[string]any{"command": "sleep 600 & echo $$ $! > pids; sleep 600"})
	wait := w.background(w.begin(w.granted("t_1", 1)))
	var pids []string
	natstest.Eventually(t, patience, func() (bool, string) {
		b, _ := os.ReadFile(filepath.Join(dir, "pids"))
		pids = strings.Fields(string(b))
		return len(pids) == 2, "the command has not begun"
	})
	wait()
	for _, pid := range pids {
		if _, err := os.Stat("/proc/" + pid); err == nil {
			t.Errorf("process %s is alive after the end of the task", pid)
		}
	}
	w.endedAsStalled(5)
}

// F-014, F-050: a command that prints now and then may take longer than the limit.
func TestTalkingCommandIsNotStalled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.shell()
	w.stalls()
	w.says("bash", map[string]any{"command": "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo $i; sleep 0.2; done"})
	began := time.Now()
	w.background(w.begin(w.granted("t_1", 1)))()
	if rec, _ := w.record("t_1"); rec.State != contract.StateCompleted || time.Since(began) < 2*stallLimit {
		t.Errorf("after %v: record = %+v", time.Since(began), rec)
	}
}

// TOOL-07: a tool's own limit of the same length comes before the stall; its model
// is told and goes on.
func TestToolsOwnLimitComesFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.shell()
	w.stalls()
	w.says("bash", map[string]any{"command": "sleep 600", "timeout_seconds": stallLimit.Seconds()})
	w.background(w.begin(w.granted("t_1", 1)))()
	if rec, _ := w.record("t_1"); rec.State != contract.StateCompleted || w.model.asked() != 2 {
		t.Errorf("after %d model calls: record = %+v", w.model.asked(), rec)
	}
}

// nap is a tool that says nothing while it runs, and whose calls run one by one.
type nap struct{ stubborn }

func (nap) Writes() bool { return true }

func (nap) Call(ctx context.Context, _ tool.Call) (tool.Result, error) {
	t := time.NewTimer(stallLimit / 2)
	defer t.Stop()
	select {
	case <-t.C:
		return tool.Result{Text: "rested"}, nil
	case <-ctx.Done():
		return tool.Result{}, context.Cause(ctx)
	}
}

// F-014: the start and the end of each tool are progress, although no step is told
// until the last of an answer's tools has ended.
func TestOneToolAfterTheOtherIsNotStalled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.tools = []tool.Tool{nap{stubborn{named: named{name: "nap"}}}}
	w.stalls()
	w.model.answer = func(_ context.Context, n int) (model.Response, error) {
		var msg model.Message
		if n > 1 {
			msg.Text = "done"
		}
		for i := range 5 * (2 - n) {
			msg.ToolCalls = append(msg.ToolCalls, model.ToolCall{ID: fmt.Sprint("c", i), Name: "nap", Args: "{}"})
		}
		return model.Response{Message: msg}, nil
	}
	w.background(w.begin(w.granted("t_1", 1)))()
	if rec, _ := w.record("t_1"); rec.State != contract.StateCompleted || w.model.asked() != 2 {
		t.Errorf("after %d model calls: record = %+v", w.model.asked(), rec)
	}
}

// stubborn is a tool that does not heed its context.
type stubborn struct {
	named
	let chan struct{}
}

func (s stubborn) Spec() model.ToolSpec {
	return model.ToolSpec{Name: s.name, Parameters: json.RawMessage(`{"type":"object"}`)}
}

func (s stubborn) Call(context.Context, tool.Call) (tool.Result, error) {
	<-s.let
	return tool.Result{Text: "late"}, nil
}

// I5, protocol W10, W13: work that does not end although it was stopped loses its
// lease, although the process lives; what it says later is dropped.
func TestStubbornWorkLosesItsLease(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	let := make(chan struct{})
	w.tools = []tool.Tool{stubborn{named{name: "deaf"}, let}}
	w.stalls()
	w.says("deaf", map[string]any{})
	wait := w.background(w.begin(w.granted("t_1", 1)))
	lease := w.bus.KV(contract.LeaseKey("t_1"))
	natstest.Eventually(t, patience, func() (bool, string) {
		m, err := w.bus.Last(w.ctx, w.bus.TaskStream(), lease)
		return errors.Is(err, bus.ErrNotFound) || err == nil && m.Deleted(), fmt.Sprintf("the lease is renewed: %v", err)
	})
	rec, rev := w.record("t_1")
	if rec.State != contract.StateRunning {
		t.Errorf("record = %+v while an effect goes on", rec)
	}
	now := time.Now().UTC()
	rec.State, rec.FinishedAt, rec.ErrorCode, rec.Writer = contract.StateFailed, &now, contract.ErrExecutorLost, "gate/2"
	rev = w.put(rec, rev)
	close(let)
	wait()
	if rec, now := w.record("t_1"); now != rev || rec.ErrorCode != contract.ErrExecutorLost || strings.Contains(w.events("t_1"), "failed") {
		t.Errorf("record at %d, want %d: %+v, events %s", now, rev, rec, w.events("t_1"))
	}
}
