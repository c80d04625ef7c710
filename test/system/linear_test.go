package system

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/test/history"
)

// Sleepy answers after a short while, a little different for each task.
type Sleepy struct{ Echo }

// Generate implements model.Model.
func (m Sleepy) Generate(ctx context.Context, req model.Request, each func(model.Delta)) (model.Response, error) {
	select {
	case <-time.After(time.Duration(20+rand.IntN(120)) * time.Millisecond):
	case <-ctx.Done():
		return model.Response{}, context.Cause(ctx)
	}
	return m.Echo.Generate(ctx, req, each)
}

// calls notes what clients of the API ask and are told.
type calls struct {
	tap *history.Tap
	mu  sync.Mutex
	ops []porcupine.Operation
}

// note makes one call and notes it, unless it got no answer.
func (c *calls) note(who int, what string, id contract.TaskID, call func() (contract.TaskStatus, error)) {
	from := c.tap.Now()
	status, err := call()
	to := c.tap.Now()
	if err != nil {
		return
	}
	if !status.Terminal() {
		status = ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ops = append(c.ops, porcupine.Operation{
		ClientId: 100 + who, Call: int64(from), Return: int64(to),
		Input: history.RecordCall{Op: what, Task: id}, Output: history.RecordReturn{Status: status, Refused: what == "cancel" && status != ""},
	})
}

func (c *calls) get(who int, api *client.Client, id contract.TaskID) {
	c.note(who, "get", id, func() (contract.TaskStatus, error) {
		ctx, cancel := context.WithTimeout(context.Background(), Timeout)
		defer cancel()
		task, err := api.GetTask(ctx, id)
		return task.Status, err
	})
}

func (c *calls) cancel(who int, api *client.Client, id contract.TaskID) {
	c.note(who, "cancel", id, func() (contract.TaskStatus, error) {
		ctx, cancel := context.WithTimeout(context.Background(), Timeout)
		defer cancel()
		err := api.CancelTask(ctx, id)
		var e *client.Error
		if errors.As(err, &e) && e.Code == "already_finished" {
			return contract.TaskStatus(e.FinishedStatus), nil
		}
		return "", err
	})
}

// I1, I4, I5, CANCEL-04, CANCEL-05: two leads, two gates, three executors and people
// who ask and cancel, all at once; a gate is cut off, and the write of an end is
// held back on its way for longer than the lease. What all of
// them did and were told, on the wire and over the API, fits one order in which
// each slot has one holder and each task one end.
func TestSlotsAndEndsAreLinearizable(t *testing.T) {
	t.Parallel()
	const tasks, running = 60, 3
	tap := history.NewTap(history.KeepRecords(contract.MustNames(contract.DefaultPrefix)))
	s := New(t, Options{MaxRunning: running, MaxQueued: tasks, Model: Sleepy{}, Tap: tap})
	dir := filepath.Join(t.TempDir(), "workspaces")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	first := s.Admission("adm-1")
	s.Admission("adm-2")
	for i := range 3 {
		s.Executor(fmt.Sprint("ex-", i+1), 1, time.Second)
	}
	var leads []*client.Client
	for i := range 2 {
		_, c := s.Lead(fmt.Sprint("lead-", i+1), dir)
		leads = append(leads, c)
	}
	feed := s.Follow()
	log := &calls{tap: tap}
	ids := make(chan contract.TaskID, tasks)
	var known []contract.TaskID
	var mu sync.Mutex
	some := func() contract.TaskID {
		mu.Lock()
		defer mu.Unlock()
		if len(known) == 0 {
			return ""
		}
		// Most are among the last ones, which have not ended.
		return known[max(0, len(known)-1-rand.IntN(2*running+4))]
	}
	var submitting, asking sync.WaitGroup
	for i, api := range leads {
		submitting.Go(func() {
			for n := range tasks / 2 {
				acc, err := api.SubmitTask(timeout(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: fmt.Sprintf("task %d of %d", n, i)})
				if err != nil {
					t.Errorf("submit: %v", err)
					return
				}
				mu.Lock()
				known = append(known, acc.TaskID)
				mu.Unlock()
				ids <- acc.TaskID
			}
		})
	}
	over := make(chan struct{})
	for i := range 4 {
		asking.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-over:
					return
				case <-time.After(time.Duration(rand.IntN(40)) * time.Millisecond):
				}
				id := some()
				switch {
				case id == "":
				case n%5 == 0 && i%2 == 0:
					log.cancel(i, leads[i%2], id)
				default:
					log.get(i, leads[i%2], id)
				}
			}
		})
	}
	started := func(n int) {
		feed.Until(fmt.Sprint(n, " starts"), func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskStarted)) >= n })
	}
	started(5)
	var late contract.TaskID
	held := tap.HoldAt("ex-1", func(x history.Exchange) bool {
		rec, err := contract.DecodeTaskRecord(x.Data)
		late = rec.TaskID
		return err == nil && rec.State == contract.StateCompleted
	})
	select {
	case <-held:
	case <-time.After(Timeout):
		t.Fatal("the executor ends nothing")
	}
	first.Conn.NC.Close() // cut off without a word
	// The gate ends the task: as lost, unless somebody has cancelled it meanwhile.
	feed.Until("the end of the task whose end is held back", func(ev []envelope.Event) bool {
		return slices.ContainsFunc(ev, func(e envelope.Event) bool { return e.TaskID == late && e.Type.TaskTerminal() })
	})
	tap.Release("ex-1")
	submitting.Wait()
	feed.Ended(tasks)
	close(over)
	asking.Wait()
	close(ids)
	// Afterwards everybody is told the same, by both leads.
	for id := range ids {
		for i, api := range leads {
			log.get(i, api, id)
			log.cancel(i, api, id)
		}
	}
	s.judge(t)

	ctx := timeout(t)
	revs, err := s.recorder.Revisions(ctx)
	if err != nil {
		t.Fatal(err)
	}
	slots, records, err := history.Operations(s.Bus.Names, tap.Exchanges(), revs)
	if err != nil {
		t.Fatal(err)
	}
	records = append(records, log.ops...)
	count := map[string]int{}
	for _, op := range slots {
		count["slot "+op.Input.(history.SlotCall).Op]++
		if n := op.Input.(history.SlotCall).Slot; n > running {
			t.Errorf("slot %d of %d was taken", n, running)
		}
	}
	for _, op := range records {
		key := op.Input.(history.RecordCall).Op
		if op.Output.(history.RecordReturn).Refused {
			key += " refused"
		}
		count[key]++
	}
	t.Logf("operations: %v", count)
	if count["slot acquire"] == 0 || count["slot release"] != count["slot acquire"] || count["cancel"] == 0 || count["cancel refused"] < tasks || count["write refused"] == 0 {
		t.Errorf("operations: %v; want each slot given back, cancellations that were taken and refused, and a write that was refused", count)
	}
	if err := history.Linearizable(history.SlotModel, slots, Timeout); err != nil {
		t.Errorf("slots: %v", err)
	}
	if err := history.Linearizable(history.RecordModel, records, Timeout); err != nil {
		t.Errorf("records: %v", err)
	}
}
