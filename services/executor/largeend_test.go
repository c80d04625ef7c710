package executor

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// maxPayload is what a NATS server takes in one message unless it is told otherwise.
const maxPayload = 1 << 20

// RECEIPT-13, STATUS-07: the end is one write below the payload limit of a server,
// with status, result, stop reason, usage, model, receipts and verdict, also of a task
// with hundreds of calls and a report of 1.5 MB that JSON makes several times longer;
// and so is the end of one whose error is as long.
func TestLargestEnds(t *testing.T) {
	t.Parallel()
	const turns, perTurn = 3, 120
	long := strings.Repeat("<\x01é\"\u2028 [r7] ", 1_500_000/14)
	for name, last := range map[string]func() (model.Response, error){
		"completed": func() (model.Response, error) {
			return model.Response{Message: model.Message{Text: "Wrote it [r360 bash]. " + long}, Model: strings.Repeat("m", 300), Usage: &contract.Usage{InputTokens: 3, OutputTokens: 2, TotalTokens: 5}}, nil
		},
		"failed": func() (model.Response, error) {
			return model.Response{}, &model.Error{Kind: model.KindPermanent, Code: "http_400", Message: long}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.tools = []tool.Tool{echo{"bash"}}
			w.using(func(c *config.Config) { c.LoopDetection.Enabled = false })
			w.model.answers(func(_ context.Context, n int) (model.Response, error) {
				if n > turns {
					return last()
				}
				var ids []string
				for i := range perTurn {
					ids = append(ids, fmt.Sprintf("%d_%d_%s", n, i, strings.Repeat("<", 200)))
				}
				return model.Response{Message: bashCalls(ids...), Usage: &contract.Usage{InputTokens: 3, OutputTokens: 2, TotalTokens: 5}}, nil
			})
			writes := w.writes("t_1")
			g := w.granted("t_1", 1)
			g.Request.Subagent.MaxTurns = turns + 1
			w.background(w.begin(g))()
			natstest.Eventually(t, patience, func() (bool, string) { // the watch may be behind
				all := writes()
				return len(all) > 0 && all[len(all)-1].State.Terminal(), fmt.Sprint(len(all), " writes were seen")
			})
			all := writes()
			rec := all[len(all)-1]
			if b, err := json.Marshal(rec); err != nil || len(b) > maxPayload/2 {
				t.Errorf("the record has %d bytes (%v)", len(b), err)
			}
			for _, r := range all[:len(all)-1] {
				if r.State.Terminal() {
					t.Error("the end takes more than one write")
				}
			}
			if string(rec.State) != name || len(rec.Receipts) == 0 || rec.Usage == nil || rec.ModelName == "" {
				t.Fatalf("state %s, error %.200q, %d receipts, usage %+v, model %.20q", rec.State, rec.Error, len(rec.Receipts), rec.Usage, rec.ModelName)
			}
			if got := rec.Receipts[len(rec.Receipts)-1].ID; got != "r360" {
				t.Errorf("the last of %d receipts is %s", len(rec.Receipts), got)
			}
			if name == "completed" && (rec.ResultRef == nil || rec.ResultRef.Size < 1_500_000 || rec.ReceiptVerdict == nil || len(rec.ReceiptVerdict.Resolved) != 1 || len(rec.ReceiptVerdict.Unknown) != 1) {
				t.Errorf("result %+v, verdict %+v", rec.ResultRef, rec.ReceiptVerdict)
			}
			if name == "failed" && (rec.Error == "" || rec.ErrorCode != contract.ErrLLM) {
				t.Errorf("error %.100q (%s)", rec.Error, rec.ErrorCode)
			}
			if got := w.events("t_1"); !strings.HasSuffix(got, " "+name) {
				t.Errorf("events end with %.60q", got[max(0, len(got)-60):])
			}
		})
	}
}

// F-140: where a server takes little, the end gets in all the same: the result lies
// apart, whole, and what stands in the record and the event is cut.
func TestLargeEndsOnSmallServers(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("<\x01é\"\u2028", 1_500_000/9)
	for name, limit := range map[string]int32{"64 KiB": 64 << 10, "16 KiB": 16 << 10} {
		for _, state := range []contract.State{contract.StateCompleted, contract.StateFailed} {
			t.Run(name+" "+string(state), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, natstest.MaxPayload(limit))
				w.model.answers(func(context.Context, int) (model.Response, error) {
					if state == contract.StateFailed {
						return model.Response{}, &model.Error{Kind: model.KindPermanent, Code: "http_400", Message: long}
					}
					return model.Response{Message: model.Message{Text: long}}, nil
				})
				writes := w.writes("t_1")
				w.background(w.begin(w.granted("t_1", 1)))()
				var rec contract.TaskRecord
				natstest.Eventually(t, patience, func() (bool, string) {
					all := writes()
					if len(all) > 0 {
						rec = all[len(all)-1]
					}
					return rec.State.Terminal(), fmt.Sprint(len(all), " writes were seen")
				})
				if rec.State != state {
					t.Fatalf("state %s, error %.200q; want %s", rec.State, rec.Error, state)
				}
				if state == contract.StateFailed {
					if rec.Error == "" || rec.ErrorCode != contract.ErrLLM {
						t.Errorf("error %.100q (%s)", rec.Error, rec.ErrorCode)
					}
				} else if rec.ResultRef == nil {
					t.Error("the whole result is nowhere")
				} else if b, err := w.bus.GetBlob(w.ctx, *rec.ResultRef); err != nil || len(b) < 1_300_000 {
					t.Errorf("the result that lies apart has %d bytes, %v", len(b), err)
				}
				if got := w.events("t_1"); !strings.HasSuffix(got, " "+string(state)) {
					t.Errorf("events end with %.60q", got[max(0, len(got)-60):])
				}
			})
		}
	}
}
