//go:build unix

package system

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission"
)

// benchWaiting is how many tasks wait in BenchmarkWaiting.
const benchWaiting = 20_000

// BenchmarkWaiting measures what a long queue costs: admission alone, one slot
// that nobody frees, 20,000 tasks behind it. It tells the memory and the goroutines
// that they cost the leader, how long a take-over lasts with them — from the stop,
// or the end, of one leader to the first grant by the next, with a leader TTL of
// 3 s — and how long a cancellation among them takes until it is told.
func BenchmarkWaiting(b *testing.B) {
	for b.Loop() {
		waiting(b)
	}
	b.ReportMetric(0, "ns/op")
}

func waiting(b *testing.B) {
	s := New(b, Options{MaxRunning: 1, MaxQueued: benchWaiting + 10})
	w := &waitingRun{b: b, System: s, grants: make(chan *nats.Msg, 64)}
	if _, err := s.Bus.NC.ChanSubscribe(s.Bus.Names.TaskGrant(contract.DefaultPool, "*"), w.grants); err != nil {
		b.Fatal(err)
	}
	if err := s.Bus.NC.Flush(); err != nil {
		b.Fatal(err)
	}
	first := w.admission("adm-1", w.Opts.LeaderTTL)
	w.queued(0)
	_, without := usage()

	tasks := w.feed(benchWaiting + 1)
	head := w.granted("")
	w.queued(benchWaiting)
	w.told(benchWaiting)
	_, with := usage()
	b.ReportMetric(float64(with-without), "goroutines-more")

	// In order: the leader stops and hands the key back to one that stands by. The
	// cancellation frees the slot, which only the next leader can give away.
	second := w.admission("adm-2", w.Opts.LeaderTTL)
	began := time.Now()
	first.Stop()
	s.Cancel(head)
	head = w.granted(head)
	b.ReportMetric(millis(time.Since(began)), "handover-ms")
	w.queued(benchWaiting - 1)

	// Without a word: the key has to expire first.
	third := w.admission("adm-3", time.Minute)
	expired := w.keyExpires()
	began = time.Now()
	second.Conn.NC.Close()
	s.Cancel(head)
	w.granted(head)
	opened := time.Now()
	b.ReportMetric(millis(opened.Sub(began)), "crash-ms")
	b.ReportMetric(millis(opened.Sub(<-expired)), "crash-after-expiry-ms")
	second.Stop()
	w.queued(benchWaiting - 2)

	var took []time.Duration
	for i := range 40 {
		took = append(took, w.cancelled(tasks[500+i*450]))
	}
	b.ReportMetric(millis(quantile(took, 0.5)), "cancel-p50-ms")
	b.ReportMetric(millis(slices.Max(took)), "cancel-max-ms")

	// The server lies in the same process, and its caches come and go. So it goes
	// first; the leader holds on to its view until it may no longer trust its key.
	w.Server.Kill()
	full, _ := usage()
	third.Stop()
	third.Conn.Close()
	empty, _ := usage()
	b.ReportMetric(float64(full-empty)/benchWaiting, "B/waiting")
}

type waitingRun struct {
	b testing.TB
	*System
	grants chan *nats.Msg
}

// usage is the heap in use and the number of goroutines.
func usage() (heap int64, goroutines int) {
	runtime.GC()
	runtime.GC() // what finalizers and pools held
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), runtime.NumGoroutine()
}

// feed stores n requests, in order.
func (w *waitingRun) feed(n int) []contract.TaskID {
	w.b.Helper()
	var ids []contract.TaskID
	var futures []jetstream.PubAckFuture
	for range n {
		req := Request("0s")
		ids = append(ids, req.TaskID)
		data, err := req.Encode()
		if err != nil {
			w.b.Fatal(err)
		}
		f, err := w.Bus.PublishAsync(bus.Write{Subject: w.Bus.Names.TaskRequest(req.Tenant, req.TaskID), Data: data, MsgID: string(req.TaskID)})
		if err != nil {
			w.b.Fatal(err)
		}
		futures = append(futures, f)
	}
	limit := time.After(Timeout)
	for _, f := range futures {
		select {
		case <-f.Ok():
		case err := <-f.Err():
			w.b.Fatal(err)
		case <-limit:
			w.b.Fatal("a request was not acknowledged")
		}
	}
	return ids
}

// granted waits for a grant of another task than before.
func (w *waitingRun) granted(before contract.TaskID) contract.TaskID {
	w.b.Helper()
	limit := time.After(Timeout)
	for {
		select {
		case m := <-w.grants:
			_, id, err := w.Bus.Names.ParseTaskGrant(m.Subject)
			if err != nil {
				w.b.Fatal(err)
			}
			if id != before {
				return id
			}
		case <-limit:
			w.b.Fatal("no grant came")
		}
	}
}

// queued waits until a leader says that n tasks wait.
func (w *waitingRun) queued(n int) {
	w.b.Helper()
	natstest.Eventually(w.b, Timeout, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		st, err := admissionapi.Ask(ctx, w.Bus, admissionapi.StatusRequest{})
		return err == nil && st.Queued == n, fmt.Sprintf("%d tasks wait, want %d; %v", st.Queued, n, err)
	})
}

// told waits until n tasks have been told to wait.
func (w *waitingRun) told(n int) {
	w.b.Helper()
	natstest.Eventually(w.b, Timeout, func() (bool, string) {
		st, err := w.Bus.JS.Stream(context.Background(), w.Bus.Names.EventStream())
		if err != nil {
			return false, err.Error()
		}
		stored := st.CachedInfo().State.Msgs
		return stored > uint64(n), fmt.Sprint("events stored: ", stored)
	})
}

// admission starts an admission process and waits until it stands by, or leads
// when nobody does.
func (w *waitingRun) admission(name string, ttl time.Duration) *Process {
	w.b.Helper()
	conn := w.Server.Conn(name)
	ready := make(chan struct{}, 1)
	svc, err := admission.New(admission.Config{
		Name: name, MaxRunning: w.Opts.MaxRunning, MaxQueued: w.Opts.MaxQueued, QueueTimeout: time.Hour, LeaseTTL: w.Opts.LeaseTTL, LeaderTTL: ttl,
	}, admission.Deps{Bus: conn, Log: w.Opts.Log, Ready: func(_ string, err error) {
		if err == nil {
			select {
			case ready <- struct{}{}:
			default:
			}
		}
	}})
	if err != nil {
		w.b.Fatal(err)
	}
	p := w.run(name, conn, svc.Run)
	select {
	case <-ready:
	case <-time.After(Timeout):
		w.b.Fatalf("%s is not ready", name)
	}
	return p
}

// keyExpires tells when the leader key is seen to have run out.
func (w *waitingRun) keyExpires() <-chan time.Time {
	w.b.Helper()
	at := make(chan time.Time, 1)
	ctx, cancel := context.WithCancel(context.Background())
	begun, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		first := true
		_ = w.Bus.Watch(ctx, bus.Watch{Stream: w.Bus.TaskStream(), Subjects: []string{w.Bus.KV(contract.LeaderKey)}, LastPerSubject: true},
			func(m bus.Message, _ uint64) error {
				if first {
					first = false
					close(begun)
				}
				if m.Deleted() && len(at) == 0 {
					at <- time.Now()
				}
				return nil
			})
	}()
	w.b.Cleanup(func() { cancel(); <-done })
	select {
	case <-begun:
	case <-time.After(Timeout):
		w.b.Fatal("the leader key cannot be watched")
	}
	return at
}

// cancelled cancels a task and waits until its end is told.
func (w *waitingRun) cancelled(id contract.TaskID) time.Duration {
	w.b.Helper()
	told := make(chan time.Time, 1)
	stop := listen(w.b, w.System, []contract.EventType{contract.EventTaskCancelled}, func(e contract.EventSubject, at time.Time) {
		if e.Task == id {
			told <- at
		}
	})
	defer stop()
	began := time.Now()
	w.Cancel(id)
	select {
	case at := <-told:
		return at.Sub(began)
	case <-time.After(Timeout):
		w.b.Fatalf("task %s was not cancelled", id)
	}
	return 0
}
