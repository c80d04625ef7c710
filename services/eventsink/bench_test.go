package eventsink_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// BenchmarkSink measures what the sink stores in a second, from a stream that
// is full of events into SQLite, and beside it bare inserts of the same rows.
//
//	go test -run '^$' -bench Sink -benchtime 20000x ./services/eventsink/
func BenchmarkSink(b *testing.B) {
	b.Run("nats-to-sqlite", func(b *testing.B) {
		_, conn := natstest.New(b)
		fill(b, conn, b.N)
		b.ResetTimer()
		s := start(b, conn, options{open: sqlite.Opener(b.TempDir())})
		// Signals, no polling, so that measuring costs nothing.
		for seq := uint64(0); seq < uint64(b.N); {
			seq = reached(b, conn, uint64(b.N))
		}
		b.StopTimer()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
		if n := s.metric("events_stored_total"); int(n) != b.N {
			b.Fatalf("stored %v events, want %d", n, b.N)
		}
		s.stop()
	})
	b.Run("bare-inserts", func(b *testing.B) {
		st, err := sqlite.Open(b.Context(), b.TempDir(), nil)
		if err != nil {
			b.Fatal(err)
		}
		defer st.Close()
		records := rows(b, b.N)
		b.ResetTimer()
		for i := 0; i < len(records); i += 500 {
			end := min(i+500, len(records))
			if _, err := st.Append(b.Context(), records[i:end], uint64(end)); err != nil {
				b.Fatal(err)
			}
		}
		b.StopTimer()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
	})
}

// reached waits until everything up to seq is stored, or for a while, and
// returns how far the sink is.
func reached(b *testing.B, conn *bus.Conn, seq uint64) uint64 {
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

func fill(b *testing.B, conn *bus.Conn, n int) {
	b.Helper()
	var futures []jetstream.PubAckFuture
	for i := range n {
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

func rows(b *testing.B, n int) []contract.EventRecord {
	b.Helper()
	out := make([]contract.EventRecord, n)
	for i := range out {
		out[i] = eventsink.RecordOf(b, benchEvent(i), uint64(i+1))
	}
	return out
}
