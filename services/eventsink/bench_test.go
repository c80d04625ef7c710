package eventsink_test

import (
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/postgres"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// BenchmarkSink measures what the sink stores in a second of 1 KiB events, from a
// stream that is full, and beside it bare inserts of the same rows in the same
// batches, and the bare fetch of the same messages. Everything is in this process,
// but for PostgreSQL; CPU time is that of this process.
//
//	go test -run '^$' -bench Sink -benchtime 50000x ./services/eventsink/
func BenchmarkSink(b *testing.B) {
	rate := map[string]float64{}
	measure := func(b *testing.B, name string, f func()) {
		b.ResetTimer()
		cpu := used(b)
		f()
		b.StopTimer()
		rate[name] = float64(b.N) / b.Elapsed().Seconds()
		b.ReportMetric(rate[name], "events/s")
		b.ReportMetric(float64((used(b)-cpu).Nanoseconds())/float64(b.N)/1000, "cpu-us/event")
		b.ReportMetric(0, "ns/op")
	}
	b.Run("fetch", func(b *testing.B) {
		_, conn := natstest.New(b)
		fill(b, conn, b.N)
		c, err := conn.JS.Consumer(b.Context(), conn.Names.EventStream(), conn.Names.SinkConsumer())
		if err != nil {
			b.Fatal(err)
		}
		measure(b, "fetch", func() {
			n, all := 0, make(chan struct{})
			reading, err := c.Consume(func(m jetstream.Msg) {
				if err := m.Ack(); err != nil {
					b.Error(err)
				}
				if n++; n == b.N {
					close(all)
				}
			}, jetstream.PullMaxMessages(1000))
			if err != nil {
				b.Fatal(err)
			}
			defer reading.Stop()
			select {
			case <-all:
			case <-time.After(10 * within):
				b.Fatal("not everything was delivered")
			}
		})
	})
	for _, kind := range stores {
		b.Run(kind.name, func(b *testing.B) {
			b.Run("inserts", func(b *testing.B) {
				st, err := kind.open(b)(b.Context(), nil)
				if err != nil {
					b.Fatal(err)
				}
				defer st.Close()
				records := rows(b, b.N)
				measure(b, kind.name+"/inserts", func() {
					for i := 0; i < len(records); i += 500 {
						end := min(i+500, len(records))
						if _, err := st.Append(b.Context(), records[i:end], uint64(end)); err != nil {
							b.Fatal(err)
						}
					}
				})
			})
			b.Run("sink", func(b *testing.B) {
				_, conn := natstest.New(b)
				fill(b, conn, b.N)
				open := kind.open(b)
				var s *sink
				measure(b, kind.name+"/sink", func() {
					s = start(b, conn, options{open: open})
					// Signals, no polling, so that measuring costs nothing.
					for seq := uint64(0); seq < uint64(b.N); {
						seq = reached(b, conn, uint64(b.N))
					}
				})
				if n := s.metric("events_stored_total"); int(n) != b.N {
					b.Fatalf("stored %v events, want %d", n, b.N)
				}
				if bare := rate[kind.name+"/inserts"]; bare > 0 {
					b.ReportMetric(rate[kind.name+"/sink"]/bare, "of-inserts")
				}
				if fetch := rate["fetch"]; fetch > 0 {
					b.ReportMetric(rate[kind.name+"/sink"]/fetch, "of-fetch")
				}
				s.stop()
			})
		})
	}
	b.Run("reading", func(b *testing.B) {
		data, subjects := make([][]byte, b.N), make([]string, 50)
		for i := range subjects {
			subjects[i] = benchSubject(benchEvent(i))
		}
		for i := range data {
			var err error
			if data[i], err = envelope.Encode(benchEvent(i)); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(len(data[0])), "bytes/event")
		measure(b, "reading", func() {
			for i, d := range data {
				eventsink.Read(b, subjects[i%len(subjects)], d, uint64(i+1))
			}
		})
	})
}

// stores are what the figures are taken of.
var stores = []struct {
	name string
	open func(t testing.TB) eventsink.OpenFunc
}{
	{"sqlite", func(t testing.TB) eventsink.OpenFunc { return sqlite.Opener(t.TempDir()) }},
	{"postgres", func(t testing.TB) eventsink.OpenFunc { return postgres.Opener(pgtest.Start(t).Database(), false) }},
}

// used is the CPU time of this process.
func used(t testing.TB) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// reached waits until everything up to seq is stored, or for a while, and
// returns how far the sink is.
func reached(b testing.TB, conn *bus.Conn, seq uint64) uint64 {
	b.Helper()
	resp, err := eventapi.List(b.Context(), conn, eventapi.ListRequest{BarrierSeq: seq, Limit: 1})
	if err != nil && !errors.Is(err, eventapi.ErrUnavailable) {
		b.Fatal(err)
	}
	return resp.LastSeq
}

func benchEvent(i int) envelope.Event {
	k := newTask(i % 50)
	return k.event(fmt.Sprintf("bench/%d", i), contract.EventTaskRunning, contract.TaskRunningData{TaskID: k.id, MessageIndex: i, Message: contract.Step{
		Kind: contract.StepAI, Text: fmt.Sprintf("%0500d", i), ToolCalls: []contract.StepCall{{Name: "grep", Args: []byte(`{"pattern":"Deprecated","path":"pkg"}`)}},
	}})
}

func fill(b testing.TB, conn *bus.Conn, n int) { b.Helper(); fillFrom(b, conn, 0, n) }

// fillFrom publishes n events, the first of them with the number from.
func fillFrom(b testing.TB, conn *bus.Conn, from, n int) {
	b.Helper()
	var futures []jetstream.PubAckFuture
	for i := from; i < from+n; i++ {
		ev := benchEvent(i)
		data, err := envelope.Encode(ev)
		if err != nil {
			b.Fatal(err)
		}
		f, err := conn.PublishAsync(bus.Write{Subject: ev.NATSSubject(conn.Names), Data: data})
		if err != nil {
			b.Fatal(err)
		}
		futures = append(futures, f)
	}
	for _, f := range futures {
		select {
		case <-f.Ok():
		case err := <-f.Err():
			b.Fatal(err)
		case <-time.After(within):
			b.Fatal("no answer to a publish")
		}
	}
}

// benchSubject is the subject of an event.
func benchSubject(ev envelope.Event) string {
	return ev.NATSSubject(contract.MustNames(contract.DefaultPrefix))
}

func rows(b *testing.B, n int) []contract.EventRecord {
	b.Helper()
	out := make([]contract.EventRecord, n)
	for i := range out {
		out[i] = eventsink.RecordOf(b, benchEvent(i), uint64(i+1))
	}
	return out
}
