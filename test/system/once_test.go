package system

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/oklog/ulid/v2"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/postgres"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// EVT-19: what there is once in a run or task is stored once, as it was told first,
// whoever tells it again, while ordinary events of the same run are written, with one
// sink and with two that store at the same time.
func TestStoredOnce(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		s := New(t, Options{Unrecorded: true}) // it has what no service would write
		s.SinkOf("sink-1", eventsink.Config{BatchSize: 7}, sqlite.Opener(t.TempDir()))
		storedOnce(t, s)
	})
	t.Run("two sinks on postgres", func(t *testing.T) {
		t.Parallel()
		s := New(t, Options{Unrecorded: true})
		dsn := pgtest.Start(t).Database()
		for _, name := range []string{"sink-1", "sink-2"} {
			s.SinkOf(name, eventsink.Config{BatchSize: 7, Shared: true}, postgres.Opener(dsn, true))
		}
		storedOnce(t, s)
	})
}

func storedOnce(t *testing.T, s *System) {
	_, c := s.Lead("lead-1", t.TempDir())
	const writers, messages = 8, 10
	now := time.Now().UTC()
	output := "the answer"
	run := contract.RunRecord{RunID: "r_once", ThreadID: "th", Tenant: contract.DefaultTenant, Status: contract.RunCompleted, Input: "x", Output: output, CreatedAt: now, FinishedAt: &now}
	task := contract.TaskRecord{TaskID: "t_once", RunID: run.RunID, ThreadID: run.ThreadID, Tenant: run.Tenant, State: contract.StateCompleted, Attempt: 1, SubagentType: "general-purpose", Result: output, FinishedAt: &now}
	runEnd, err := event.RunEnd(run, "/herdgate/lead/test")
	if err != nil {
		t.Fatal(err)
	}
	taskEnd, err := event.Terminal(task, "/herdgate/executor/test")
	if err != nil {
		t.Fatal(err)
	}
	once := []envelope.Event{runEnd, taskEnd}
	first := map[string]uint64{}
	var mu sync.Mutex
	publish := func(ev envelope.Event) error {
		body, err := envelope.Encode(ev)
		if err != nil {
			return err
		}
		// Each under an id of its own: the server has forgotten the first.
		ack, err := s.Bus.Publish(timeout(t), bus.Write{Subject: ev.NATSSubject(s.Bus.Names), Data: body, Header: nats.Header(ev.Headers()), MsgID: ulid.Make().String()})
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if seq := first[ev.ID]; seq == 0 || ack.Seq < seq {
			first[ev.ID] = ack.Seq
		}
		return nil
	}
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range messages {
				evs := []envelope.Event{event.RunMessage(run, w*messages+i+1, contract.Step{Kind: contract.StepAI, Text: fmt.Sprint(w, i)}, "model", nil, "/herdgate/lead/test", now)}
				if i%3 == w%3 {
					evs = append(evs, once...)
				}
				for _, ev := range evs {
					if err := publish(ev); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	_, last := lastSeq(t, s)
	natstest.Eventually(t, Timeout, func() (bool, string) {
		resp, err := eventapi.List(timeout(t), s.Bus, eventapi.ListRequest{Limit: 1})
		return err == nil && resp.LastSeq >= last, fmt.Sprint("the store is at ", resp.LastSeq, " of ", last, " ", err)
	})
	var streamed []contract.EventRecord
	err = c.Stream(timeout(t), client.EventQuery{ThreadID: run.ThreadID}, 0, func(r contract.EventRecord) error {
		if streamed = append(streamed, r); len(streamed) == writers*messages+len(once) {
			return client.ErrStop
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for way, records := range map[string][]contract.EventRecord{"stored": listed(t, c, client.EventQuery{}), "streamed": streamed} {
		for i, r := range records {
			if i > 0 && r.Seq <= records[i-1].Seq {
				t.Errorf("%s: %d came after %d", way, r.Seq, records[i-1].Seq)
			}
			if r.Seq != first[r.EventID] {
				t.Errorf("%s: %s is at %d, and was told at %d first", way, r.EventID, r.Seq, first[r.EventID])
			}
		}
		if len(records) != len(first) || len(first) != writers*messages+len(once) {
			t.Errorf("%s: %d events, want %d, each once", way, len(records), len(first))
		}
	}
}
