package bus_test

import (
	"context"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
)

// A consumer that the server keeps alive without handing out what is there, here
// because it is paused, is noticed and replaced; nothing is lost.
func TestWatchNoticesAStall(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), natstest.Timeout)
	defer cancel()
	subject := c.KV("stall")
	publish := func() uint64 {
		t.Helper()
		ack, err := c.Publish(ctx, bus.Write{Subject: subject, Data: []byte("x")})
		if err != nil {
			t.Fatal(err)
		}
		return ack.Seq
	}
	first := publish()
	seen := make(chan uint64, 10)
	done := make(chan error, 1)
	go func() {
		done <- c.Watch(ctx, bus.Watch{Stream: c.TaskStream(), Subjects: []string{subject}}, func(m bus.Message, _ uint64) error {
			seen <- m.Seq
			return nil
		})
	}()
	if got := <-seen; got != first {
		t.Fatalf("the first message is %d, want %d", got, first)
	}
	stream, err := c.JS.Stream(ctx, c.TaskStream())
	if err != nil {
		t.Fatal(err)
	}
	paused := 0
	for name := range stream.ConsumerNames(ctx).Name() {
		if _, err := stream.PauseConsumer(ctx, name, time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		paused++
	}
	if paused != 1 {
		t.Fatalf("%d consumers were paused, want that of the watch", paused)
	}
	want := publish()
	select {
	case got := <-seen:
		if got != want {
			t.Errorf("the next message is %d, want %d", got, want)
		}
	case <-ctx.Done():
		t.Error("a watch whose consumer has stalled waits for ever")
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Watch = %v", err)
	}
}
