package stored

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), natstest.Timeout)
	t.Cleanup(cancel)
	return ctx
}

func put(t *testing.T, conn *bus.Conn, subject string, v any) uint64 {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	ack, err := conn.Publish(within(t), bus.Write{Subject: subject, Data: data})
	if err != nil {
		t.Fatal(err)
	}
	return ack.Seq
}

func tell(t *testing.T, conn *bus.Conn, ev envelope.Event) {
	t.Helper()
	data, err := envelope.Encode(ev)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Publish(within(t), bus.Write{Subject: ev.NATSSubject(conn.Names), Data: data}); err != nil {
		t.Fatal(err)
	}
}

// request and record of a task that was granted slot 1.
func task(id contract.TaskID) (contract.TaskRequest, contract.TaskRecord) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	req := contract.TaskRequest{
		ContractVersion: contract.Version, TaskID: id, RunID: "r_1", ThreadID: "th", Tenant: contract.DefaultTenant, Prompt: "p",
		Subagent: contract.Subagent{Name: "general-purpose", MaxTurns: 1, TimeoutSeconds: 1}, CreatedAt: at,
	}
	return req, contract.TaskRecord{
		TaskID: id, RunID: "r_1", ThreadID: "th", Tenant: contract.DefaultTenant, State: contract.StateGranted, Attempt: 1, Slot: 1,
		Epoch: 1, Writer: "w", RequestSeq: 1, QueuedAt: at, GrantedAt: &at, SubagentType: "general-purpose",
	}
}

// What lies in an empty deployment, and in one with a bit of everything, is read
// from all its streams; what cannot be read is told once and holds nothing up.
func TestRead(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	r := NewReader(Config{Bus: conn, Store: true})
	v, err := r.Read(within(t))
	if err != nil {
		t.Fatal(err)
	}
	if v.Events != 0 || v.Records != 0 || !v.Whole || v.Led || v.Limits != nil || v.StoreError != nil {
		t.Errorf("nothing is %+v", v)
	}
	req, rec := task("t_1")
	put(t, conn, conn.KV(contract.LeaderKey), contract.Leader{Holder: "adm-1"})
	put(t, conn, conn.KV(contract.LimitsKey), contract.AdmissionLimits{MaxRunning: 3, MaxQueued: 64})
	put(t, conn, conn.Names.TaskRequest(req.Tenant, req.TaskID), req)
	put(t, conn, conn.KV(contract.LeaseKey("t_1")), contract.Lease{})
	rev := put(t, conn, conn.KV(contract.TaskKey("t_1")), rec)
	put(t, conn, conn.Names.TaskGrant(contract.DefaultPool, "t_1"), contract.Grant{TaskID: "t_1", Attempt: 1, Slot: 1, Revision: rev, LeaseTTLMS: 3000, Record: rec, Request: req})
	put(t, conn, conn.Names.TaskGrant(contract.DefaultPool, "t_2"), "no grant")
	put(t, conn, conn.KV(contract.TaskKey("t_9")), "no record")
	tell(t, conn, event.Queued(req, "", "", 0, "/s", rec.QueuedAt))
	tell(t, conn, event.Admitted(rec, "/s", *rec.GrantedAt))
	newer := event.Admitted(rec, "/s", *rec.GrantedAt)
	newer.Type, newer.ID = "task_promoted", "from-the-future"
	tell(t, conn, newer)
	misplaced := event.Admitted(rec, "/s", *rec.GrantedAt)
	data, err := envelope.Encode(misplaced)
	if err != nil {
		t.Fatal(err)
	}
	misplaced.RunID = "r_2"
	if _, err := conn.Publish(within(t), bus.Write{Subject: misplaced.NATSSubject(conn.Names), Data: data}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if v, err = r.Read(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	if v.Events != 2 || v.Records != 1 || v.Grants != 1 || v.Live != 1 || v.Waiting != 0 || v.Unknown != 1 || v.UnreadableCount != 2 || !v.Led || v.Limits == nil || v.Limits.MaxRunning != 3 {
		t.Errorf("read %+v", v)
	}
	if v.StoreError == nil {
		t.Error("there is no event store, and nobody says so")
	}
	if found := v.History.Check(invariant.Options{MaxRunning: 3}); len(found) > 0 {
		t.Error(found)
	}
}

// A view has a bound: the newest events are in it, and that there are older ones is
// told; the same for records.
func TestReadIsBounded(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	for i := range 10 {
		req, rec := task(contract.TaskID(fmt.Sprint("t_", i)))
		tell(t, conn, event.Queued(req, "", "", 0, "/s", rec.QueuedAt.Add(time.Duration(i)*time.Second)))
		put(t, conn, conn.KV(contract.TaskKey(rec.TaskID)), rec)
	}
	v, err := NewReader(Config{Bus: conn, MaxEvents: 4, MaxRecords: 3}).Read(within(t))
	if err != nil {
		t.Fatal(err)
	}
	_, rec := task("t_6")
	if v.Events != 4 || v.Whole || !v.Since.Equal(rec.QueuedAt.Add(6*time.Second)) || v.Records != 3 || !v.CutRecords {
		t.Errorf("%d events since %s, whole %v, %d records, cut %v", v.Events, v.Since, v.Whole, v.Records, v.CutRecords)
	}
	if tasks, _ := v.History.Tasks(); tasks != 4 {
		t.Errorf("%d tasks, want 4", tasks)
	}
}

// A look ends although new messages come all the time.
func TestReadWhileEverythingMoves(t *testing.T) {
	t.Parallel()
	srv, conn := natstest.New(t)
	other := srv.Conn("writer")
	ctx, stop := context.WithCancel(within(t))
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				_, _ = other.Publish(ctx, bus.Write{Subject: other.KV(contract.LeaseKey(contract.TaskID(fmt.Sprint("t_", i, "_", n%50)))), Data: []byte("{}")})
			}
		})
	}
	for range 5 {
		if _, err := NewReader(Config{Bus: conn}).Read(within(t)); err != nil {
			t.Error(err)
		}
	}
	stop()
	wg.Wait()
}

// A stream that is not there is told, not taken for an empty one.
func TestReadWithoutStreams(t *testing.T) {
	t.Parallel()
	conn := natstest.Start(t).Conn("test")
	if _, err := NewReader(Config{Bus: conn}).Read(within(t)); err == nil {
		t.Error("no error")
	}
}
