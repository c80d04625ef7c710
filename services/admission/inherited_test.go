package admission

import (
	"context"
	"math"
	"testing"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// I4: a first write goes over nothing, whatever the gate believes: a record that
// an earlier leader has written stays as it is, and the gate is told of it.
func TestFirstWriteSparesInheritedRecord(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	seq := w.submit("t_1")
	key := w.bus.KV(contract.TaskKey("t_1"))
	rev := w.put(bus.Write{Subject: key, Data: encode(t, contract.TaskRecord{TaskID: "t_1", RunID: "r_1", ThreadID: "th_1", Tenant: contract.DefaultTenant, State: contract.StateCompleted, Attempt: 1, Writer: "an executor", RequestSeq: seq})})
	s := w.service(w.bus, "adm", nil)
	f := w.leader(s)
	var told []gate.Event
	f.inherited = math.MaxUint64
	f.tell = func(_ context.Context, ev gate.Event) { told = append(told, ev) }
	f.look = (&reign{s: s}).bucketEvent
	err := f.write(w.ctx, gate.FirstWrite{TaskID: "t_1", RequestSeq: seq, Record: contract.TaskRecord{TaskID: "t_1", State: contract.StateGranted, Attempt: 1, Slot: 1, RequestSeq: seq}})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := w.bus.Last(w.ctx, w.bus.TaskStream(), key); err != nil || m.Seq != rev {
		t.Errorf("the record was written over: revision %d, %v; want %d", m.Seq, err, rev)
	}
	if len(told) != 2 {
		t.Fatalf("the gate was told %+v", told)
	}
	if ev, ok := told[0].(gate.FirstWritten); !ok || ev.Outcome != gate.Refused {
		t.Errorf("first it was told %+v, want refused", told[0])
	}
	if ev, ok := told[1].(gate.RecordSeen); !ok || ev.Revision != rev || ev.Record.Writer != "an executor" {
		t.Errorf("then it was told %+v, want the record", told[1])
	}
}
