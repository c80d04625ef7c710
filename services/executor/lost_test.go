package executor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/pkg/contract"
)

// F-050, protocol W10: the lease is renewed whatever the work does, a command that
// says nothing as well as a model that does not answer, and with it the time that the
// command is given. There is one attempt, and it completes.
func TestLongStepsKeepTheLease(t *testing.T) {
	t.Parallel()
	for _, silent := range []string{"command", "model"} {
		t.Run(silent, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			dir := w.shell()
			const ttl = 2 * time.Second
			w.says("bash", map[string]any{"command": "sleep 4.5; echo over > over"})
			if silent == "model" {
				w.model.answer = func(ctx context.Context, _ int) (model.Response, error) {
					select {
					case <-ctx.Done():
						return model.Response{}, context.Cause(ctx)
					case <-time.After(2*ttl + ttl/4):
						return model.Response{Message: model.Message{Text: "done"}}, nil
					}
				}
			}
			g := w.granted("t_1", 1)
			g.LeaseTTLMS = ttl.Milliseconds()
			w.background(w.begin(g))()
			if rec, _ := w.record("t_1"); rec.State != contract.StateCompleted || rec.Attempt != 1 || w.fenced() != 0 {
				t.Errorf("record = %+v, fenced %v", rec, w.fenced())
			}
			if _, err := os.Stat(filepath.Join(dir, "over")); err != nil && silent == "command" {
				t.Errorf("the command did not come to its end: %v", err)
			}
		})
	}
}

// F-052: the event stream takes nothing more after the work has begun. The attempt
// waits, under its lease, and nobody else gets the task; when there is room again, it
// goes on where it was, without a gap and without asking the model again.
func TestEventsAreRefusedForAWhile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	asked, goOn := make(chan struct{}), make(chan struct{})
	w.model.answer = func(context.Context, int) (model.Response, error) {
		close(asked)
		<-goOn
		return model.Response{Message: model.Message{Text: "done"}}, nil
	}
	wait := w.background(w.begin(w.granted("t_1", 1)))
	<-asked
	stream, err := w.bus.JS.Stream(w.ctx, w.bus.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	room := stream.CachedInfo().Config
	full := room
	full.MaxMsgs, full.Discard = int64(stream.CachedInfo().State.Msgs), jetstream.DiscardNew
	if _, err := w.bus.JS.UpdateStream(w.ctx, full); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	lease := func() uint64 {
		m, err := w.bus.Last(w.ctx, w.bus.TaskStream(), w.bus.KV(contract.LeaseKey("t_1")))
		if err != nil {
			t.Fatal(err)
		}
		return m.Seq
	}
	renewed := 0
	for last := lease(); renewed < 4; { // for longer than it lives
		natstest.Eventually(t, patience, func() (bool, string) { return lease() != last, "the lease is not renewed" })
		last = lease()
		renewed++
	}
	if rec, _ := w.record("t_1"); rec.State != contract.StateRunning || w.events("t_1") != "started" {
		t.Errorf("while events are refused: record = %+v, events %s", rec, w.events("t_1"))
	}
	if _, err := w.bus.JS.UpdateStream(w.ctx, room); err != nil {
		t.Fatal(err)
	}
	wait()
	if rec, _ := w.record("t_1"); rec.State != contract.StateCompleted || rec.Attempt != 1 || w.events("t_1") != "started running completed" || w.model.asked() != 1 {
		t.Errorf("record = %+v, events %s, %d model calls", rec, w.events("t_1"), w.model.asked())
	}
}

// F-054, CANCEL-04, CANCEL-05, CANCEL-06, protocol W11 and W13: an attempt ends at the
// moment at which the gate declares it lost, again and again. One of them wins, and the
// other changes nothing: neither the record nor what is told.
func TestEndRacesTheGate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const rounds = 60
	end := outcome.Map(outcome.Outcome{Kind: outcome.StreamFinished, LastAnswer: &outcome.Answer{Text: "done"}})
	won := map[bool]int{}
	for i := range rounds {
		id := fmt.Sprint("t_", i)
		a, ctx := w.attempt(w.granted(id, 1))
		lost, now := a.rec, time.Now().UTC()
		lost.State, lost.ErrorCode, lost.Error, lost.FinishedAt, lost.Writer = contract.StateFailed, contract.ErrExecutorLost, "lost", &now, fmt.Sprint("gate/", 2+i)
		data := w.json(lost)
		start := make(chan struct{})
		var both sync.WaitGroup
		both.Go(func() { <-start; a.finish(ctx, end) })
		var refused error
		both.Go(func() {
			<-start
			if i%2 == 0 {
				time.Sleep(100 * time.Microsecond) //nolint:forbidigo // the executor's way is longer: let either win at times
			}
			_, refused = w.bus.Publish(w.ctx, bus.Write{Subject: w.bus.KV(contract.TaskKey(a.rec.TaskID)), Data: data, Expect: bus.Seq(a.rev)})
		})
		close(start)
		both.Wait()
		rec, _ := w.record(id)
		gate := refused == nil
		won[gate]++
		want, told := contract.StateCompleted, "completed"
		if gate {
			want, told = contract.StateFailed, "" // which the gate tells
		} else if !errors.Is(refused, bus.ErrConflict) {
			t.Fatal(refused)
		}
		if rec.State != want || (rec.Result == "done") == gate || w.events(id) != told {
			t.Fatalf("round %d, the gate won %v: record = %+v, events %q", i, gate, rec, w.events(id))
		}
	}
	t.Logf("the gate won %d times, the executor %d times", won[true], won[false])
}
