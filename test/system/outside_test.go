package system

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// EVT-11, I4: a terminal event that is stored is not published again when the
// gate makes sure of it. The stream would refuse a second one, but a plain
// subscriber would see two ends of one task.
func TestStoredTerminalEventIsNotPublishedAgain(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	feed := s.Follow()
	first := s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("hello")
	s.Submit(req)
	feed.Ended(1)
	gone := func() (bool, string) {
		_, err := s.Bus.Last(t.Context(), s.Bus.Names.WorkStream(), s.Bus.Names.TaskRequest(req.Tenant, req.TaskID))
		if err == nil {
			return false, "the request is still there"
		}
		return errors.Is(err, bus.ErrNotFound), err.Error()
	}
	natstest.Eventually(t, Timeout, gone)
	first.Stop()

	// The request comes back, as from a lead that was in doubt.
	data, err := req.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Bus.Publish(context.Background(), bus.Write{Subject: s.Bus.Names.TaskRequest(req.Tenant, req.TaskID), Data: data}); err != nil {
		t.Fatal(err)
	}
	sub, err := s.Bus.NC.SubscribeSync(s.Bus.Names.AllEvents())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Bus.NC.Flush(); err != nil {
		t.Fatal(err)
	}
	s.Admission("adm-2")
	natstest.Eventually(t, Timeout, gone)
	if err := s.Bus.NC.Flush(); err != nil { // whatever was published before is here now
		t.Fatal(err)
	}
	for {
		m, err := sub.NextMsg(time.Millisecond)
		if errors.Is(err, nats.ErrTimeout) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Errorf("published again: %s", m.Subject)
	}
}

// Source and id together name an event: the terminal event of a record that an
// executor wrote has the executor as its source, also when the gate stores it
// because the executor died in between (protocol W15).
func TestSourceOfATerminalEventIsTheWriterOfTheRecord(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Unrecorded: true})
	feed := s.Follow()
	first := s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("hello")
	s.Submit(req)
	end := feed.Ended(1)
	if last := end[len(end)-1]; last.Source != "/herdgate/executor/ex-1" {
		t.Fatalf("the end comes from %s, want the executor", last.Source)
	}
	first.Stop()
	rec, _ := s.Record(req.TaskID)

	req = Request("hello")
	rec.TaskID, rec.RunID, rec.ThreadID = req.TaskID, req.RunID, req.ThreadID
	data, err := json.Marshal(rec)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Bus.Publish(context.Background(), bus.Write{Subject: s.Bus.KV(contract.TaskKey(req.TaskID)), Data: data}); err != nil {
		t.Fatal(err)
	}
	s.Submit(req)
	s.Admission("adm-2")
	all := feed.Until("the end that the gate stores", func(ev []envelope.Event) bool { return Count(ev, contract.EventType.TaskTerminal) == 2 })
	if last := all[len(all)-1]; last.TaskID != req.TaskID || last.Source != "/herdgate/executor/ex-1" {
		t.Errorf("the gate stored the end of %s from %s, want that of %s from the executor", last.TaskID, last.Source, req.TaskID)
	}
}
