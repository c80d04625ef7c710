package vectors

import (
	"slices"
	"testing"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// door is the admission core with a stand-in for the streams: what the gate asks
// for is done at once, and the request stream has its bound.
type door struct {
	t       *testing.T
	gate    *gate.Gate
	bound   int
	stored  map[contract.TaskID]bool // requests in the stream
	records map[contract.TaskID]contract.TaskRecord
	rev     uint64
	seq     uint64
	now     time.Time
	// expire holds, for each task that will time out, when.
	expire  map[contract.TaskID]time.Time
	granted []contract.TaskID
}

// ADM-02 to ADM-09
func runAdmissionQueue(t *testing.T, c vectorCase) {
	in := into[struct {
		Config struct {
			MaxRunning          *int   `json:"max_running"`
			MaxQueued           *int   `json:"max_queued"`
			Policy              string `json:"policy"`
			QueueTimeoutSeconds int    `json:"queue_timeout_seconds"`
		} `json:"config"`
		Operations [][2]string `json:"operations"`
	}](t, c.inputs)
	maxRunning, maxQueued := 3, 64
	if n := in.Config.MaxRunning; n != nil {
		maxRunning = *n
	}
	if n := in.Config.MaxQueued; n != nil {
		maxQueued = *n
	}
	switch in.Config.Policy {
	case "", "queue":
	case "reject":
		maxQueued = 0
	default:
		t.Fatalf("unknown policy %q", in.Config.Policy)
	}
	d := newDoor(t, maxRunning, maxQueued)
	for i, op := range in.Operations {
		if op[0] == "timeout" {
			d.expire[contract.TaskID(op[1])] = d.now.Add(time.Duration(i+1) * time.Hour)
		}
	}
	outcomes := []string{}
	for _, op := range in.Operations {
		do, ok := map[string]func(contract.TaskID) string{"acquire": d.acquire, "release": d.release, "cancel": d.cancel, "timeout": d.timeout}[op[0]]
		if !ok {
			t.Fatalf("unknown operation %q", op[0])
		}
		outcomes = append(outcomes, do(contract.TaskID(op[1])))
	}
	want := c.object(t, "outcomes", "running", "waiting")
	equal(t, "outcomes", outcomes, want["outcomes"])
	running := into[[]string](t, want["running"])
	slices.Sort(running) // a set: order says nothing
	got := []string{}
	for id := range d.gate.Stats().Slots {
		got = append(got, string(id))
	}
	slices.Sort(got)
	equal(t, "running", got, running)
	waiting := []string{}
	for _, id := range d.gate.Waiting() {
		waiting = append(waiting, string(id))
	}
	equal(t, "waiting", waiting, want["waiting"])
}

func newDoor(t *testing.T, maxRunning, maxQueued int) *door {
	d := &door{
		t: t, bound: maxRunning + maxQueued, stored: map[contract.TaskID]bool{}, records: map[contract.TaskID]contract.TaskRecord{},
		now: time.Unix(1000, 0), expire: map[contract.TaskID]time.Time{},
		gate: gate.New(gate.Config{MaxRunning: maxRunning, LeaseTTL: 15 * time.Second, RetryLost: gate.RetryNotStarted, MaxLost: 2, Retention: 1e6 * time.Hour, MarkerTTL: time.Hour}),
	}
	d.tell(gate.ViewRead{})
	d.tell(gate.WorkRead{})
	return d
}

// tell gives the gate an event and does what it asks for.
func (d *door) tell(ev gate.Event) {
	todo := d.gate.Apply(ev, d.now)
	for len(todo) > 0 {
		a := todo[0]
		todo = todo[1:]
		var answer gate.Event
		switch a := a.(type) {
		case gate.FirstWrite:
			d.rev++
			d.records[a.TaskID] = a.Record
			answer = gate.FirstWritten{TaskID: a.TaskID, Outcome: gate.Stored, Revision: d.rev, Record: a.Record}
			if a.Record.State == contract.StateGranted {
				d.granted = append(d.granted, a.TaskID)
			}
		case gate.MoveRecord:
			d.rev++
			d.records[a.TaskID] = a.Record
			answer = gate.Moved{TaskID: a.TaskID, Outcome: gate.Stored, Revision: d.rev, Record: a.Record}
		case gate.SendGrant:
			answer = gate.GrantSent{TaskID: a.TaskID, Attempt: a.Record.Attempt}
		case gate.StoreTerminalEvent:
			answer = gate.TerminalEventStored{TaskID: a.TaskID}
		case gate.RemoveRequest:
			delete(d.stored, a.TaskID)
			answer = gate.RequestRemoved{TaskID: a.TaskID}
		case gate.TellQueued:
			continue
		default:
			d.t.Fatalf("unexpected action %T", a)
		}
		todo = append(todo, d.gate.Apply(answer, d.now)...)
	}
}

// handed is who was granted a slot by the last operation.
func (d *door) handed(nobody string) string {
	g := d.granted
	d.granted = nil
	switch len(g) {
	case 0:
		return nobody
	case 1:
		return "transfer:" + string(g[0])
	}
	d.t.Fatalf("one slot went to %v", g)
	return ""
}

func (d *door) acquire(id contract.TaskID) string {
	if len(d.stored) >= d.bound {
		return "rejected"
	}
	d.stored[id] = true
	d.seq++
	deadline, expires := d.expire[id]
	if !expires {
		deadline = d.now.Add(1e6 * time.Hour)
	}
	d.tell(gate.RequestStored{Request: gate.Request{Seq: d.seq, TaskID: id, Tenant: "default", Deadline: deadline}})
	if d.handed("") == "" {
		return "queued"
	}
	return "granted"
}

func (d *door) release(id contract.TaskID) string {
	rec, ok := d.records[id]
	if !ok || !rec.State.Live() {
		d.t.Fatalf("release of %s, which holds no slot", id)
	}
	rec.State = contract.StateCompleted
	d.records[id] = rec
	d.rev++
	d.tell(gate.RecordSeen{Revision: d.rev, Record: rec})
	return d.handed("freed")
}

func (d *door) cancel(id contract.TaskID) string {
	d.tell(gate.CancelSeen{TaskID: id})
	return d.handed("ok")
}

// timeout ends the wait of a task. One that has just been handed a slot gives it
// on; in this design only a cancellation does that.
func (d *door) timeout(id contract.TaskID) string {
	if rec, ok := d.records[id]; ok && rec.State.Live() {
		d.tell(gate.CancelSeen{TaskID: id})
		return d.handed("freed")
	}
	d.now = d.expire[id]
	d.tell(gate.Tick{})
	return d.handed("ok")
}
