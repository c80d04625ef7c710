package admission

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// lines is a log that is read while it is written.
type lines struct{ natstest.Output }

// with returns the lines that hold all of parts.
func (l *lines) with(parts ...string) (found []string) {
next:
	for line := range strings.Lines(l.String()) {
		for _, p := range parts {
			if !strings.Contains(line, p) {
				continue next
			}
		}
		found = append(found, line)
	}
	return found
}

// counted returns the stuck deliveries of a registry as "stream consumer kind" → n.
func counted(t testing.TB, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		if f.GetName() != "herdgate_admission_stuck_deliveries_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			l := map[string]string{}
			for _, p := range m.GetLabel() {
				l[p.GetName()] = p.GetValue()
			}
			got[l["stream"]+" "+l["consumer"]+" "+l["kind"]] = m.GetCounter().GetValue()
		}
	}
	return got
}

func (w *world) logged(name string, reg prometheus.Registerer, log *lines) *Service {
	w.Helper()
	s, err := New(Config{Name: name, MaxRunning: 1, MaxQueued: 64, LeaseTTL: 3 * time.Second, LeaderTTL: 3 * time.Second}, Deps{Bus: w.bus, Registerer: reg, Log: zerolog.New(log)})
	if err != nil {
		w.Fatal(err)
	}
	return s
}

// stick makes one delivery of each kind stuck, for real.
func (w *world) stick(suffix string) {
	w.Helper()
	for _, name := range []string{"once", "term"} {
		cfg := jetstream.ConsumerConfig{Durable: name + suffix, AckPolicy: jetstream.AckExplicitPolicy, AckWait: 30 * time.Second, FilterSubject: w.bus.Names.AllEvents()}
		if name == "once" {
			cfg.MaxDeliver, cfg.AckWait = 1, 100*time.Millisecond
		}
		cons, err := w.bus.JS.CreateConsumer(w.ctx, w.bus.Names.EventStream(), cfg)
		if err != nil {
			w.Fatal(err)
		}
		msg, err := cons.Next(jetstream.FetchMaxWait(patience))
		if err != nil {
			w.Fatal(err)
		}
		if name == "term" {
			if err := msg.TermWithReason("poison"); err != nil {
				w.Fatal(err)
			}
		}
	}
}

// advised waits until the stream of advisories holds n.
func (w *world) advised(n uint64) {
	w.Helper()
	natstest.Eventually(w, patience, func() (bool, string) {
		info, err := w.bus.JS.Stream(w.ctx, w.bus.Names.AdvisoryStream())
		if err != nil {
			return false, err.Error()
		}
		return info.CachedInfo().State.LastSeq == n, fmt.Sprintf("%d advisories, want %d", info.CachedInfo().State.LastSeq, n)
	})
}

// F-058: a delivery that JetStream gave up, and one that a consumer ended, are
// counted and logged once by the leader, from its reign's start on; what cannot be
// read does no harm.
func TestStuckDeliveriesAreSeen(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.put(bus.Write{Subject: w.bus.Names.Event(contract.EventSubject{Tenant: "default", Thread: "x", Run: "r", Type: "t"})})
	w.stick("-before")
	w.advised(2)

	reg, log := prometheus.NewRegistry(), &lines{}
	w.run(w.logged("adm", reg, log))
	w.status("adm")
	natstest.Eventually(t, patience, func() (bool, string) {
		info, err := w.bus.JS.Stream(w.ctx, w.bus.Names.AdvisoryStream())
		return err == nil && info.CachedInfo().State.Consumers == 1, "the leader does not read the advisories"
	})
	subject := "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES." + w.bus.Names.EventStream() + ".x"
	w.put(bus.Write{Subject: subject, Data: []byte(`{"type":`)})
	w.put(bus.Write{Subject: subject, Data: []byte(`{"type":"io.nats.jetstream.advisory.v1.something_new"}`)})
	w.stick("-now")

	want := map[string]float64{"HG_EVENTS once-now max_deliveries": 1, "HG_EVENTS term-now msg_terminated": 1}
	natstest.Eventually(t, patience, func() (bool, string) {
		got := counted(t, reg)
		return fmt.Sprint(got) == fmt.Sprint(want), fmt.Sprintf("counted %v, want %v", got, want)
	})
	for _, parts := range [][]string{
		{`"kind":"max_deliveries"`, `"stream":"HG_EVENTS"`, `"consumer":"once-now"`, `"seq":1`, `"deliveries":1`},
		{`"kind":"msg_terminated"`, `"consumer":"term-now"`, `"reason":"poison"`},
		{"cannot be read"},
	} {
		if found := log.with(parts...); len(found) != 1 {
			t.Errorf("lines with %q: %q, want one", parts, found)
		}
	}
	if found := log.with("-before"); len(found) > 0 {
		t.Errorf("what was before the reign is told: %q", found)
	}
}

// F-058: the gate leads although nobody has made the stream of advisories.
func TestNoAdvisories(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	if err := w.bus.JS.DeleteStream(w.ctx, w.bus.Names.AdvisoryStream()); err != nil {
		t.Fatal(err)
	}
	log := &lines{}
	w.run(w.logged("adm", nil, log))
	w.submit("t_1")
	w.reaches("t_1", contract.StateGranted)
	natstest.Eventually(t, patience, func() (bool, string) {
		return len(log.with("herdgate provision", "HG_ADVISORIES")) == 1, "the log does not say what is missing"
	})
	if found := log.with("standing by"); len(found) > 0 {
		t.Errorf("the reign ended: %q", found)
	}
}

// A consumer's name is anybody's to choose, so the metric has a bound.
func TestStuckSeriesAreBounded(t *testing.T) {
	t.Parallel()
	d := newStuckDeliveries()
	reg := prometheus.NewRegistry()
	reg.MustRegister(d.total)
	for i := range maxStuckSeries + 10 {
		for range 2 {
			d.count(stuck{kind: stuckTerminated, stream: "S", consumer: fmt.Sprint("c", i)})
		}
	}
	got := counted(t, reg)
	if len(got) != maxStuckSeries+1 || got["S other msg_terminated"] != 20 || got["S c0 msg_terminated"] != 2 {
		t.Errorf("%d series, other %v", len(got), got["S other msg_terminated"])
	}
}
