//go:build unix

package system

import (
	"context"
	"flag"
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

// BenchmarkWaiting measures what a long queue costs: admission alone, one slot
// that nobody frees, 20,000 tasks behind it. See [costs] for what it tells.
func BenchmarkWaiting(b *testing.B) {
	for b.Loop() {
		c := waiting(b, 20_000)
		b.ReportMetric(float64(c.goroutines), "goroutines-more")
		b.ReportMetric(millis(c.handover), "handover-ms")
		b.ReportMetric(millis(c.crash), "crash-ms")
		b.ReportMetric(millis(c.expired), "crash-after-expiry-ms")
		b.ReportMetric(millis(quantile(c.cancels, 0.5)), "cancel-p50-ms")
		b.ReportMetric(millis(slices.Max(c.cancels)), "cancel-max-ms")
		b.ReportMetric(c.bytes, "B/waiting")
	}
	b.ReportMetric(0, "ns/op")
}

// fewGoroutines is how many more there may be with a long queue, of server and client.
const fewGoroutines = 50

var scaleWaiting = flag.Int("scale.waiting", 2_000, "how many tasks wait in TestWaiting, at least 1,100")

// ADM-18, I2, I8: what a long queue costs, and that a place in it is told exactly. No
// goroutine is spent on a waiting task; a take-over reads them all within 5 s; and a
// cancellation among them takes no longer than it does in a short queue.
func TestWaiting(t *testing.T) {
	if *scaleWaiting < 1100 {
		t.Fatalf("-scale.waiting is %d; want at least 1100", *scaleWaiting)
	}
	c := waiting(t, *scaleWaiting)
	few, many := quantile(c.fewCancels, 0.5), quantile(c.cancels, 0.5)
	t.Logf("%d waiting: %.0f bytes each, %d goroutines more; the next grant %v after the stop of a leader, %v after the end of its key, for which server and gate took %v of processor time",
		c.waiting, c.bytes, c.goroutines, c.handover.Round(time.Millisecond), c.expired.Round(time.Millisecond), c.cpu.Round(time.Millisecond))
	t.Logf("cancelled: p50 %v, worst %v; with 1,000 waiting p50 %v, worst %v; ratio of p50 %.2f",
		many, slices.Max(c.cancels), few, slices.Max(c.fewCancels), float64(many)/float64(few))
	t.Logf("cancelled right after a take-over: p50 %v, worst %v", quantile(c.lateCancels, 0.5), slices.Max(c.lateCancels))
	t.Logf("place told: p50 %v, worst %v", quantile(c.places, 0.5), slices.Max(c.places))
	if limit := 5 * time.Second; c.handover > limit || c.expired > limit {
		t.Errorf("a take-over with %d waiting took %v, and %v after the end of the key; want at most %v", c.waiting, c.handover, c.expired, limit)
	}
	// Far from what a walk along the queue would cost, and with room for a busy machine.
	if many > 10*few+20*time.Millisecond {
		t.Errorf("a cancellation took %v with %d waiting and %v with 1,000", many, c.waiting, few)
	}
}

// costs is what a queue costs.
type costs struct {
	waiting int
	// bytes of the leader's memory for each that waits, goroutines for all of them.
	bytes      float64
	goroutines int
	// handover is the time from the stop of one leader to the first grant by the
	// next, crash the same for one that goes without a word, with a leader TTL of
	// 3 s; expired begins with the end of its key.
	handover, crash, expired time.Duration
	// cpu is the processor time of the whole process, server included, in crash.
	cpu time.Duration
	// cancels are times until cancellations of waiting tasks were told, fewCancels
	// with 1,000 waiting, lateCancels right after a take-over; places times until a place in the queue was told.
	cancels, fewCancels, lateCancels, places []time.Duration
}

func waiting(t testing.TB, n int) costs {
	const few = 1_000
	c := costs{waiting: n}
	// What a recorder of all that costs is none of ours.
	s := New(t, Options{MaxRunning: 1, MaxQueued: n + 10, Unrecorded: true})
	w := &waitingRun{b: t, System: s, grants: make(chan *nats.Msg, 64), ends: make(chan cancelled, 256), limit: Timeout + time.Duration(n)*time.Millisecond}
	if _, err := s.Bus.NC.ChanSubscribe(s.Bus.Names.TaskGrant(contract.DefaultPool, "*"), w.grants); err != nil {
		t.Fatal(err)
	}
	if err := s.Bus.NC.Flush(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(listen(t, s, []contract.EventType{contract.EventTaskCancelled}, func(e contract.EventSubject, at time.Time) { w.ends <- cancelled{e.Task, at} }))
	first := w.admission("adm-1", w.Opts.LeaderTTL)
	w.queued(0)
	_, without := usage()

	// Of those that are fed first, every 20th is cancelled.
	w.tasks = w.feed(few + 1)
	head := w.granted("")
	w.queued(few)
	w.told(few)
	for i := 20; i <= few; i += 25 {
		c.fewCancels = append(c.fewCancels, w.cancelled(i))
	}
	w.tasks = append(w.tasks, w.feed(n-few+len(c.fewCancels))...)
	w.queued(n)
	w.told(n)
	// Some that have done their work may not be gone yet.
	natstest.Eventually(t, w.limit, func() (bool, string) {
		c.goroutines = runtime.NumGoroutine() - without
		return c.goroutines <= fewGoroutines, fmt.Sprintf("%d tasks that wait cost %d goroutines, want at most %d for all of them", n, c.goroutines, fewGoroutines)
	})
	for i := 1; i < len(w.tasks); i += len(w.tasks) / 40 {
		c.places = append(c.places, w.placed(i))
	}
	step := (n - few) / 40
	for i := range 40 {
		c.cancels = append(c.cancels, w.cancelled(few+1+i*step))
	}
	n -= len(c.cancels)

	// In order: the leader stops and hands the key back to one that stands by. The
	// cancellation frees the slot, which only the next leader can give away.
	second := w.admission("adm-2", w.Opts.LeaderTTL)
	began := time.Now()
	first.Stop()
	s.Cancel(head)
	head = w.granted(head)
	c.handover = time.Since(began)
	w.queued(n - 1)

	// Without a word: the key has to expire first.
	third := w.admission("adm-3", time.Minute)
	expired := w.keyExpires()
	began, c.cpu = time.Now(), cpuTime()
	second.Conn.NC.Close()
	s.Cancel(head)
	w.granted(head)
	opened := time.Now()
	c.cpu = cpuTime() - c.cpu
	c.crash, c.expired = opened.Sub(began), opened.Sub(<-expired)
	second.Stop()
	w.queued(n - 2)

	// A leader that is new may have many to tell that they wait.
	for i := range 40 {
		c.lateCancels = append(c.lateCancels, w.cancelled(few+2+i*step))
	}

	// The server lies in the same process, and its caches come and go. So it goes
	// first; the leader holds on to its view until it may no longer trust its key.
	w.Server.Kill()
	full, _ := usage()
	third.Stop()
	third.Conn.Close()
	empty, _ := usage()
	c.bytes = float64(full-empty) / float64(n)
	return c
}

type waitingRun struct {
	b testing.TB
	*System
	grants chan *nats.Msg
	limit  time.Duration // bounds every wait
	// tasks in the order of the queue; gone are those that were cancelled.
	tasks []contract.TaskID
	gone  []int
	ends  chan cancelled
}

// cancelled is the end of a task that was told.
type cancelled struct {
	task contract.TaskID
	at   time.Time
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
	limit := time.After(w.limit)
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
	limit := time.After(w.limit)
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
	natstest.Eventually(w.b, w.limit, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		st, err := admissionapi.Ask(ctx, w.Bus, admissionapi.StatusRequest{})
		return err == nil && st.Queued == n, fmt.Sprintf("%d tasks wait, want %d; %v", st.Queued, n, err)
	})
}

// told waits until n tasks have been told to wait.
func (w *waitingRun) told(n int) {
	w.b.Helper()
	natstest.Eventually(w.b, w.limit, func() (bool, string) {
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
	case <-time.After(w.limit):
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
	case <-time.After(w.limit):
		w.b.Fatal("the leader key cannot be watched")
	}
	return at
}

// placed asks for the place of the task with index i, which must be told exactly, while
// the first task of all has the slot.
func (w *waitingRun) placed(i int) time.Duration {
	w.b.Helper()
	want := i
	for _, g := range w.gone {
		switch {
		case g == i:
			return 0
		case g < i:
			want--
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), w.limit)
	defer cancel()
	began := time.Now()
	st, err := admissionapi.Ask(ctx, w.Bus, admissionapi.StatusRequest{TaskID: w.tasks[i]})
	took := time.Since(began)
	if err != nil || st.QueuePosition == nil || *st.QueuePosition != want {
		w.b.Fatalf("place of task %d of %d: %+v, %v; want %d", i, len(w.tasks), st.QueuePosition, err, want)
	}
	return took
}

// cancelled cancels the task with index i and waits until its end is told.
func (w *waitingRun) cancelled(i int) time.Duration {
	w.b.Helper()
	id := w.tasks[i]
	w.gone = append(w.gone, i)
	began := time.Now()
	w.Cancel(id)
	for limit := time.After(w.limit); ; {
		select {
		case e := <-w.ends:
			if e.task == id {
				return e.at.Sub(began)
			}
		case <-limit:
			w.b.Fatalf("task %s was not cancelled", id)
		}
	}
}
