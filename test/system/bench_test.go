package system

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
)

// BenchmarkIdleDelegation measures an idle system, with a model that takes no
// time: from the publish of a request to its task_started event and to its end,
// beside a bare publish and delivery on the same server in the same run. Figures
// are milliseconds; ratio is started p50 over the bare p50.
func BenchmarkIdleDelegation(b *testing.B) {
	s := New(b, Options{})
	started, ended := watchTypes(b, s)
	s.Admission("adm-1")
	s.Executor("ex-1", 8, time.Second)
	one := func() (time.Duration, time.Duration) {
		req := Request("hello")
		began := time.Now()
		s.Submit(req)
		at := await(b, started, req.TaskID)
		return at.Sub(began), await(b, ended, req.TaskID).Sub(began)
	}
	for range 20 {
		one()
	}
	bare := bareRoundTrips(b, s, max(b.N, 100))
	var toStart, toEnd []time.Duration
	b.ResetTimer()
	for b.Loop() {
		st, en := one()
		toStart, toEnd = append(toStart, st), append(toEnd, en)
	}
	b.StopTimer()
	ms := func(d []time.Duration, p float64) float64 {
		slices.Sort(d)
		return float64(d[int(p*float64(len(d)-1))]) / float64(time.Millisecond)
	}
	b.ReportMetric(ms(toStart, 0.5), "started-p50-ms")
	b.ReportMetric(ms(toStart, 0.99), "started-p99-ms")
	b.ReportMetric(ms(toEnd, 0.5), "ended-p50-ms")
	b.ReportMetric(ms(bare, 0.5), "bare-p50-ms")
	b.ReportMetric(ms(toStart, 0.5)/ms(bare, 0.5), "ratio")
}

type arrival struct {
	id contract.TaskID
	at time.Time
}

// watchTypes tells of started and of terminal events as they arrive.
func watchTypes(b *testing.B, s *System) (started, ended <-chan arrival) {
	st, en := make(chan arrival, 1024), make(chan arrival, 1024)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Bus.Watch(ctx, bus.Watch{Stream: s.Bus.Names.EventStream(), StartSeq: 1, Subjects: []string{s.Bus.Names.AllEvents()}},
			func(m bus.Message, _ uint64) error {
				at := time.Now()
				e, err := s.Bus.Names.ParseEvent(m.Subject)
				if err != nil {
					return err
				}
				switch {
				case e.Type == contract.EventTaskStarted:
					st <- arrival{e.Task, at}
				case e.Type.TaskTerminal():
					en <- arrival{e.Task, at}
				}
				return nil
			})
	}()
	b.Cleanup(func() { cancel(); <-done })
	return st, en
}

func await(b testing.TB, ch <-chan arrival, id contract.TaskID) time.Time {
	for {
		select {
		case a := <-ch:
			if a.id == id {
				return a.at
			}
		case <-time.After(Timeout):
			b.Fatal("no event")
		}
	}
}

// bareRoundTrips measures publish to delivery of messages like our requests.
func bareRoundTrips(b *testing.B, s *System, n int) []time.Duration {
	ctx, cancel := context.WithCancel(context.Background())
	got := make(chan time.Time, 16)
	done := make(chan struct{})
	subject := s.Bus.Names.Dead("bench")
	go func() {
		defer close(done)
		_ = s.Bus.Watch(ctx, bus.Watch{Stream: s.Bus.Names.DeadStream(), StartSeq: 1, Subjects: []string{subject}}, func(bus.Message, uint64) error {
			got <- time.Now()
			return nil
		})
	}()
	defer func() { cancel(); <-done }()
	data, err := Request("hello").Encode()
	if err != nil {
		b.Fatal(err)
	}
	var out []time.Duration
	for range n {
		began := time.Now()
		if _, err := s.Bus.Publish(ctx, bus.Write{Subject: subject, Data: data}); err != nil {
			b.Fatal(err)
		}
		out = append(out, (<-got).Sub(began))
	}
	return out[n/10:]
}
