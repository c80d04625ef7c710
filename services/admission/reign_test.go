package admission

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// ADM-18: the leader alone answers for the gate, and its successor after it;
// without a leader nobody does.
func TestStatusIsTheLeaders(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	subject := admissionapi.Subject(w.bus.Names)
	if _, err := w.bus.NC.RequestWithContext(w.ctx, subject, nil); !errors.Is(err, nats.ErrNoResponders) {
		t.Fatalf("without a gate: %v", err)
	}
	stop := w.run(w.service(w.srv.Conn("adm-1"), "adm-1", nil))
	w.status("adm-1")
	second := w.service(w.srv.Conn("adm-2"), "adm-2", nil)
	waits := make(chan struct{}, 64)
	second.ready = func(_ string, err error) {
		if err == nil {
			waits <- struct{}{}
		}
	}
	w.run(second)
	<-waits // it stands by
	if n := responders(w); n != 1 {
		t.Errorf("%d processes answer", n)
	}
	w.submit("t_1")
	w.reaches("t_1", contract.StateGranted)
	w.submit("t_2")
	natstest.Eventually(t, patience, func() (bool, string) {
		st, err := admissionapi.Ask(w.ctx, w.bus, admissionapi.StatusRequest{TaskID: "t_2"})
		return err == nil && st.Running == 1 && st.Queued == 1 && st.QueuePosition != nil && *st.QueuePosition == 1 && st.OldestQueuedAt != nil &&
			len(st.Slots) == 1 && st.Slots[0].TaskID == "t_1" && st.Slots[0].ExpiresAt == nil, fmt.Sprintf("status %+v, %v", st, err)
	})
	msg, err := w.bus.NC.RequestWithContext(w.ctx, subject, []byte("{"))
	if err != nil || msg.Header.Get("Nats-Service-Error-Code") != "400" {
		t.Errorf("answer to half an object: %v, %v", msg, err)
	}
	stop()
	// It answers from the moment on when it leads; what it holds it reads then.
	natstest.Eventually(t, patience, func() (bool, string) {
		st := w.status("adm-2")
		return st.Running == 1 && st.Queued == 1, fmt.Sprintf("the successor's status = %+v", st)
	})
	if n := responders(w); n != 1 {
		t.Errorf("%d processes answer after the hand-over", n)
	}
}

// responders counts who offers the service.
func responders(w *world) int {
	w.Helper()
	inbox := w.bus.NC.NewInbox()
	sub, err := w.bus.NC.SubscribeSync(inbox)
	if err != nil {
		w.Fatal(err)
	}
	defer sub.Unsubscribe()
	if err := w.bus.NC.PublishRequest("$SRV.PING.herdgate-admission", inbox, nil); err != nil {
		w.Fatal(err)
	}
	if _, err := sub.NextMsgWithContext(w.ctx); err != nil {
		w.Fatal(err)
	}
	// What else there is has been sent before the answer to this.
	if _, err := w.bus.NC.RequestWithContext(w.ctx, admissionapi.Subject(w.bus.Names), nil); err != nil {
		w.Fatal(err)
	}
	n, _, err := sub.Pending()
	if err != nil {
		w.Fatal(err)
	}
	return n + 1
}

// CONFIG-09: the limits are written when they differ from what is there, not at
// every take-over.
func TestLimitsKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	key := w.bus.KV(contract.LimitsKey)
	r := &reign{s: w.service(w.bus, "adm-1", nil)}
	var seqs []uint64
	publish := func() contract.AdmissionLimits {
		t.Helper()
		if err := r.publishLimits(w.ctx); err != nil {
			t.Fatal(err)
		}
		m, err := w.bus.Last(w.ctx, w.bus.TaskStream(), key)
		if err != nil {
			t.Fatal(err)
		}
		seqs = append(seqs, m.Seq)
		l, err := contract.Decode[contract.AdmissionLimits](m.Data)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	publish()
	publish()
	r.s.cfg.MaxRunning = 7
	if l := publish(); !reflect.DeepEqual(l, contract.AdmissionLimits{MaxRunning: 7, MaxQueued: 64, AdmissionPolicy: "queue", QueueTimeoutSeconds: 300}) {
		t.Errorf("limits = %+v", l)
	}
	if seqs[0] != seqs[1] || seqs[1] == seqs[2] {
		t.Errorf("written at %v, want two writes", seqs)
	}
}

// ADM-18: the gauges follow the gate to rest, also when it comes to rest within
// a moment, and a standby has none.
func TestGauges(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	reg := prometheus.NewRegistry()
	stop := w.run(w.service(w.srv.Conn("adm-1"), "adm-1", reg))
	gauges := func(leader, slots, queue float64) {
		t.Helper()
		natstest.Eventually(t, patience, func() (bool, string) {
			got := map[string]float64{}
			families, err := reg.Gather()
			for _, f := range families {
				if g := f.GetMetric()[0].GetGauge(); g != nil {
					got[strings.TrimPrefix(f.GetName(), "herdgate_admission_")] = g.GetValue()
				}
			}
			return err == nil && got["leader"] == leader && got["slots_in_use"] == slots && got["queue_length"] == queue, fmt.Sprintf("%v, want %v, %v, %v", got, leader, slots, queue)
		})
	}
	gauges(1, 0, 0)
	for i := range 4 {
		w.submit(fmt.Sprint("t_", i))
	}
	w.reaches("t_0", contract.StateGranted)
	gauges(1, 1, 3)
	for i := range 4 {
		w.put(bus.Write{Subject: w.bus.KV(contract.CancelKey(contract.TaskID(fmt.Sprint("t_", i)))), Data: []byte("{}")})
	}
	gauges(1, 0, 0)
	w.submit("t_9")
	gauges(1, 1, 0)
	stop()
	gauges(0, 0, 0)
}

// F-184: the streams are deleted under a leader. It notices, says what to do, and
// leads again once they are back.
func TestStreamIsDeleted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	s := w.service(w.srv.Conn("adm-1"), "adm-1", nil)
	reasons := make(chan error, 64)
	s.ready = func(_ string, err error) {
		select {
		case reasons <- err:
		default:
		}
	}
	w.run(s)
	w.submit("t_1")
	w.reaches("t_1", contract.StateGranted)
	if err := w.bus.JS.DeleteStream(w.ctx, w.bus.Names.WorkStream()); err != nil {
		t.Fatal(err)
	}
	for deadline := time.After(patience); ; {
		select {
		case err := <-reasons:
			if err == nil || !strings.Contains(err.Error(), "herdgate provision") {
				continue
			}
		case <-deadline:
			t.Fatal("readiness says nothing of the missing stream")
		}
		break
	}
	w.srv.Provision(provision.Config{MaxRunning: 1, MaxQueued: 64})
	// Its request is gone with the stream: a live task without one cannot be.
	if rec := w.reaches("t_1", contract.StateFailed); rec.ErrorCode != contract.ErrInternal {
		t.Errorf("record = %+v", rec)
	}
	w.submit("t_2")
	w.reaches("t_2", contract.StateGranted)
}

// I4: a grant whose request has gone is not told as sent: that would begin a
// second write beside the one that ends the task.
func TestGrantOfAGoneRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	s := w.service(w.bus, "adm-1", nil)
	r := &reign{s: s, bodies: newBodies(w.bus, nil), events: make(chan gate.Event, 8)}
	r.perform(w.ctx, gate.SendGrant{TaskID: "t_1", RequestSeq: 999, Record: contract.TaskRecord{TaskID: "t_1", Attempt: 1}})
	if ev := <-r.events; ev != (gate.RequestRemoved{TaskID: "t_1"}) || len(r.events) != 0 {
		t.Errorf("told %+v and %d more", ev, len(r.events))
	}
}

// A gate opens also when the newest requests were removed just before they would have
// been read, so that no message is the last one.
func TestPastEndsWithoutALastMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	s := w.service(w.bus, "adm-1", nil)
	w.submit("t_1")
	r := &reign{s: s, events: make(chan gate.Event, 8)}
	r.past.read = make(chan struct{})
	done := make(chan error, 1)
	go func() { done <- r.awaitPast(w.ctx) }()
	select {
	case ev := <-r.events:
		t.Fatalf("told %+v while a request was still to be read", ev)
	case <-time.After(1500 * time.Millisecond):
	}
	last, err := w.bus.Last(w.ctx, w.bus.Names.WorkStream(), w.bus.Names.TaskRequests())
	if err != nil {
		t.Fatal(err)
	}
	if err := w.bus.DeleteMsg(w.ctx, w.bus.Names.WorkStream(), last.Seq); err != nil {
		t.Fatal(err)
	}
	select {
	case ev := <-r.events:
		if ev != (gate.WorkRead{}) {
			t.Errorf("told %+v", ev)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the gate waits for a request that is gone")
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Protocol W3: a key that somebody holds is left alone; a free one is won by one.
func TestTry(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a, b := w.service(w.bus, "adm-1", nil), w.service(w.bus, "adm-2", nil)
	won, ok, err := a.try(w.ctx)
	if err != nil || !ok || won.rev == 0 {
		t.Fatalf("try = %+v, %v, %v", won, ok, err)
	}
	for _, s := range []*Service{a, b} { // a name alone is no claim
		if _, ok, err := s.try(w.ctx); ok || err != nil {
			t.Errorf("a held key was won: %v", err)
		}
	}
	f := &fence{s: a, rev: won.rev}
	f.abdicate()
	if next, ok, err := b.try(w.ctx); err != nil || !ok || next.rev <= won.rev {
		t.Errorf("try = %+v, %v, %v", next, ok, err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	cancel()
	// The answer may have been there all the same: the key is held.
	if _, ok, err := b.try(ctx); ok {
		t.Errorf("try without time = %v, %v", ok, err)
	}
}

// The cache of requests is bounded by bytes and forgets what has left.
func TestBodiesAreBounded(t *testing.T) {
	t.Parallel()
	b := newBodies(nil, nil)
	b.limit = 1000
	for seq := uint64(1); seq <= 5000; seq++ {
		b.put(body{seq: seq, size: 100})
		b.put(body{seq: seq, size: 100})
		if seq%2 == 0 {
			b.forget(seq)
		}
	}
	if len(b.bySeq) > 10 || b.bytes != 100*len(b.bySeq) || len(b.order) > 2*len(b.bySeq)+1024 {
		t.Errorf("%d bodies, %d bytes, %d in order", len(b.bySeq), b.bytes, len(b.order))
	}
	if _, there := b.bySeq[4999]; !there {
		t.Error("the newest is not there")
	}
}
