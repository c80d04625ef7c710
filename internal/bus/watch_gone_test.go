package bus_test

import (
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
)

// F-184: a watch whose stream is deleted under it says so; it does not wait for
// ever for what cannot come.
func TestWatchOfADeletedStreamGivesUp(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"with a past", "without one"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, c := natstest.New(t)
			ctx := testContext(t)
			if name == "with a past" {
				put(t, c, bus.Write{Subject: c.KV("limits"), Data: []byte("{}")})
			}
			started := make(chan struct{})
			done := make(chan error, 1)
			go func() {
				done <- c.Watch(ctx, bus.Watch{Stream: c.TaskStream(), Subjects: []string{c.KV("limits")}, LastPerSubject: true, OnStart: func(uint64) { close(started) }},
					func(bus.Message, uint64) error { return nil })
			}()
			<-started
			if err := c.JS.DeleteStream(ctx, c.TaskStream()); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if err := <-done; !errors.Is(err, jetstream.ErrStreamNotFound) {
				t.Errorf("Watch = %v, want the stream missing", err)
			}
			t.Logf("noticed after %v", time.Since(began))
		})
	}
}
