package executor

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/receipt"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// writes collects every record of a task as it is written.
func (w *world) writes(id string) func() []contract.TaskRecord {
	w.Helper()
	var mu sync.Mutex
	var recs []contract.TaskRecord
	sub, err := w.bus.NC.Subscribe(w.bus.KV(contract.TaskKey(contract.TaskID(id))), func(m *nats.Msg) {
		if rec, err := contract.DecodeTaskRecord(m.Data); err == nil {
			mu.Lock()
			defer mu.Unlock()
			recs = append(recs, rec)
		}
	})
	if err != nil {
		w.Fatal(err)
	}
	if err := w.bus.NC.Flush(); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = sub.Unsubscribe() })
	return func() []contract.TaskRecord {
		if err := w.bus.NC.Flush(); err != nil { // what was published before is here after it
			w.Fatal(err)
		}
		mu.Lock()
		defer mu.Unlock()
		return append([]contract.TaskRecord(nil), recs...)
	}
}

func bashCalls(ids ...string) model.Message {
	var m model.Message
	for _, id := range ids {
		m.ToolCalls = append(m.ToolCalls, model.ToolCall{ID: id, Name: "bash", Args: `{"n":"` + id + `"}`})
	}
	return m
}

// RECEIPT-08, RECEIPT-13, RECEIPT-15, RECEIPT-16: the one write that ends a task holds
// status, result, receipts and the verdict on its citations; what a grant brings along
// of them is not taken over. Switched off, there is no receipt anywhere.
func TestReceiptsStandInTheLastWrite(t *testing.T) {
	t.Parallel()
	for _, on := range []bool{true, false} {
		w := newWorld(t)
		w.tools = []tool.Tool{echo{"bash"}}
		w.using(func(c *config.Config) { c.Verification.ReceiptsEnabled = on })
		l := &listener{answers: []model.Message{bashCalls("a"), {Text: "Wrote it [r1 bash] and [r2]."}}}
		var err error
		if w.svc.deps.Models, err = model.NewRegistry(l); err != nil {
			t.Fatal(err)
		}
		writes := w.writes("t_1")
		g := w.granted("t_1", 1)
		g.Record.Receipts = []contract.Receipt{{ID: "r2", ToolName: "deploy", Status: "success"}}
		g.Record.ReceiptVerdict = &contract.ReceiptVerdict{CitationResolved: true}
		w.background(w.begin(g))()
		natstest.Eventually(t, patience, func() (bool, string) { // the watch may be behind
			all := writes()
			return len(all) > 0 && all[len(all)-1].State.Terminal(), fmt.Sprint(len(all), " writes were seen")
		})
		var last contract.TaskRecord
		for _, rec := range writes() {
			switch {
			case last.State.Terminal():
				t.Errorf("on=%v: another write after the end: %+v", on, rec)
			case !rec.State.Terminal() && (rec.Receipts != nil || rec.ReceiptVerdict != nil):
				t.Errorf("on=%v: receipts of somebody else on %+v", on, rec)
			}
			last = rec
		}
		if last.State != contract.StateCompleted || last.Result == "" {
			t.Fatalf("on=%v: the end is %+v", on, last)
		}
		told := ""
		for _, req := range l.sent {
			for _, m := range req.Messages {
				told += m.Text + "\n"
			}
		}
		if !on {
			if last.Receipts != nil || last.ReceiptVerdict != nil || strings.Contains(strings.ToLower(told), "receipt") {
				t.Errorf("switched off: record %+v, told\n%s", last, told)
			}
			continue
		}
		if len(last.Receipts) != 1 || last.Receipts[0].ID != "r1" || last.Receipts[0].ToolName != "bash" || last.Receipts[0].ToolCallID != "a" {
			t.Errorf("receipts = %+v", last.Receipts)
		}
		if v := last.ReceiptVerdict; v == nil || v.CitationResolved || len(v.Resolved) != 1 || len(v.Unknown) != 1 {
			t.Errorf("verdict = %+v", v)
		}
		if !strings.Contains(told, "[r1 bash] success, 2 bytes") || !strings.Contains(told, receipt.Example()) {
			t.Errorf("the model was told\n%s", told)
		}
	}
}

// CANCEL-03, CANCEL-09, RECEIPT-10, RECEIPT-14: whatever stops a task — a
// cancellation, also by a lead that has waited for too long, its time limit, its
// provider, its cap of turns — the evidence of what ran by then stays, also of calls
// whose siblings did not come back. None of it is judged.
func TestStoppedTasksKeepTheirReceipts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		stop  func(w *world) // while the model or a tool is busy
		inAll bool           // while a tool is busy
		turns int
		fails bool
		state contract.State
		want  string
	}{
		"cancelled in a model call": {stop: (*world).cancelTask, state: contract.StateCancelled, want: "r1 a, r2 b"},
		"cancelled in a tool":       {stop: (*world).cancelTask, inAll: true, state: contract.StateCancelled, want: "r1 a, r2 b"},
		"out of time":               {stop: (*world).timeOut, state: contract.StateTimedOut, want: "r1 a, r2 b"},
		"out of time in a tool":     {stop: (*world).timeOut, inAll: true, state: contract.StateTimedOut, want: "r1 a, r2 b"},
		"out of turns":              {turns: 1, state: contract.StateFailed, want: "r1 a, r2 b"},
		"provider":                  {fails: true, state: contract.StateFailed, want: "r1 a, r2 b"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			busy := make(chan struct{})
			w.tools = []tool.Tool{holding{busy: busy, back: make(chan struct{})}}
			w.model.answers(func(ctx context.Context, n int) (model.Response, error) {
				switch {
				case n == 1 && c.inAll:
					return model.Response{Message: bashCalls("a")}, nil
				case n == 2 && c.inAll:
					return model.Response{Message: bashCalls("b", "c")}, nil
				case n == 1:
					return model.Response{Message: bashCalls("a", "b")}, nil
				case c.fails:
					return model.Response{}, &model.Error{Kind: model.KindPermanent, Code: "http_400", Message: "no"}
				}
				close(busy)
				<-ctx.Done()
				return model.Response{}, context.Cause(ctx)
			})
			g := w.granted("t_1", 1)
			g.Request.Subagent.MaxTurns = max(c.turns, 1)
			if c.turns == 0 {
				g.Request.Subagent.MaxTurns = 9
			}
			wait := w.background(w.begin(g))
			if c.stop != nil {
				select {
				case <-busy:
				case <-time.After(patience):
					t.Fatal("nothing is busy")
				}
				c.stop(w)
			}
			wait()
			rec, _ := w.record("t_1")
			var got []string
			for _, r := range rec.Receipts {
				if r.Status == "success" {
					got = append(got, r.ID+" "+r.ToolCallID)
				}
			}
			if rec.State != c.state || strings.Join(got, ", ") != c.want || rec.ReceiptVerdict != nil {
				t.Errorf("state %s, receipts %q (%+v), verdict %+v; want %s with %s", rec.State, got, rec.Receipts, rec.ReceiptVerdict, c.state, c.want)
			}
		})
	}
}

// cancelTask is what is heard of a lead that gives a task up, for whatever reason.
func (w *world) cancelTask() {
	w.svc.heardCancel(&nats.Msg{Subject: w.bus.KV(contract.CancelKey("t_1"))})
}

// timeOut does what the clock of the time limit does.
func (w *world) timeOut() {
	w.svc.mu.Lock()
	defer w.svc.mu.Unlock()
	for a := range w.svc.attempts {
		a.cancel(errTimeout)
	}
}

// holding is a shell whose call "c" is busy until it is stopped, once call "b" has
// come back.
type holding struct{ busy, back chan struct{} }

func (holding) Spec() model.ToolSpec { return model.ToolSpec{Name: "bash"} }
func (h holding) Call(ctx context.Context, c tool.Call) (tool.Result, error) {
	switch c.ID {
	case "b":
		defer close(h.back)
	case "c":
		select {
		case <-h.back:
		case <-time.After(patience):
			return tool.Failure("call b does not come back"), nil
		}
		close(h.busy)
		<-ctx.Done()
		return tool.Result{}, context.Cause(ctx)
	}
	return tool.Result{Text: "hi"}, nil
}

// STATUS-04: a report that the token limit cut completes with what there is, and says
// that something is missing; any other is told as it is.
func TestCutReport(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		last  model.Message
		want  string
		state contract.State
	}{
		"cut":       {model.Message{Text: "Half of", FinishReason: "length"}, "Half of\n\n" + prompt.CutAnswer, contract.StateCompleted},
		"whole":     {model.Message{Text: "All of it", FinishReason: "stop"}, "All of it", contract.StateCompleted},
		"no text":   {model.Message{FinishReason: "length"}, outcome.Placeholder, contract.StateCompleted},
		"a failure": {model.Message{Text: "it broke", FinishReason: "length", ErrorFallback: true}, "", contract.StateFailed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			l := &listener{answers: []model.Message{c.last}}
			var err error
			if w.svc.deps.Models, err = model.NewRegistry(l); err != nil {
				t.Fatal(err)
			}
			w.begin(w.granted("t_1", 1))()
			if rec, _ := w.record("t_1"); rec.Result != c.want || rec.State != c.state || rec.StopReason != "" {
				t.Errorf("the end is %+v, want %q", rec, c.want)
			}
		})
	}
}
