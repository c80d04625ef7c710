package bus_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
)

var errEnough = errors.New("enough")

// watchAll collects data until enough says so.
func watchAll(t *testing.T, c *bus.Conn, w bus.Watch, enough func(m bus.Message, pending uint64) bool) []bus.Message {
	t.Helper()
	var got []bus.Message
	err := c.Watch(testContext(t), w, func(m bus.Message, pending uint64) error {
		got = append(got, m)
		if enough(m, pending) {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		t.Fatalf("Watch = %v after %d messages; want the error of its function", err, len(got))
	}
	return got
}

func caughtUp(_ bus.Message, pending uint64) bool { return pending == 0 }

func TestWatchKinds(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	for i := range 3 {
		for _, task := range []string{"a", "b"} {
			put(t, c, bus.Write{Subject: c.KV("task." + task), Data: fmt.Append(nil, task, i)})
		}
		put(t, c, bus.Write{Subject: event(c, "t1", fmt.Sprint("step", i)), Data: []byte("body")})
	}
	text := func(ms []bus.Message) string {
		var s []string
		for _, m := range ms {
			s = append(s, string(m.Data))
		}
		return strings.Join(s, " ")
	}
	last := watchAll(t, c, bus.Watch{Stream: c.TaskStream(), Subjects: []string{c.KV("task.*")}, LastPerSubject: true}, caughtUp)
	if got := text(last); got != "a2 b2" {
		t.Errorf("last per subject = %q, want a2 b2", got)
	}
	all := watchAll(t, c, bus.Watch{Stream: c.Names.EventStream(), Subjects: []string{c.Names.AllEvents()}, StartSeq: 2, HeadersOnly: true}, caughtUp)
	if len(all) != 2 || all[0].Seq != 2 || len(all[0].Data) != 0 || all[0].Header.Get("Nats-Msg-Size") != "4" {
		t.Errorf("headers from sequence 2 on = %+v; want two without a body", all)
	}
}

func TestWatchTellsWhatIsThere(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	for _, n := range []uint64{0, 2} {
		ctx, cancel := context.WithCancel(testContext(t))
		var pending []uint64
		err := c.Watch(ctx, bus.Watch{Stream: c.TaskStream(), Subjects: []string{c.KV("task.*")}, OnStart: func(p uint64) {
			pending = append(pending, p)
			cancel()
		}}, func(bus.Message, uint64) error { return nil })
		cancel()
		if err != nil {
			t.Errorf("Watch whose context is done = %v, want nil", err)
		}
		if len(pending) != 1 || pending[0] != n {
			t.Errorf("OnStart got %v, want once %d", pending, n)
		}
		put(t, c, bus.Write{Subject: c.KV("task.a")})
		put(t, c, bus.Write{Subject: c.KV("task.b")})
	}
}

// Whoever begins at a sequence is told what is there also when the first try to read
// found no connection.
func TestWatchTellsWhatIsThereLate(t *testing.T) {
	t.Parallel()
	s, direct := natstest.New(t, natstest.Listen())
	proxy := s.Proxy()
	c := s.Connect(bus.Config{Name: "far", URL: proxy.URL()})
	proxy.Refuse()
	proxy.Cut()
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) { return !c.NC.IsConnected(), "still connected" })
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	told := make(chan uint64, 8)
	done := make(chan error, 1)
	go func() {
		done <- c.Watch(ctx, bus.Watch{Stream: direct.TaskStream(), Subjects: []string{direct.KV("task.*")}, StartSeq: 1, OnStart: func(n uint64) { told <- n }},
			func(bus.Message, uint64) error { return nil })
	}()
	<-time.After(200 * time.Millisecond) // time for a try that fails
	proxy.Accept()
	select {
	case n := <-told:
		if n != 0 {
			t.Errorf("OnStart got %d, want 0", n)
		}
	case <-time.After(natstest.Timeout):
		t.Error("OnStart was never called")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestWatchOfAnAbsentStreamGivesUp(t *testing.T) {
	t.Parallel()
	c := natstest.Start(t).Conn("test")
	err := c.Watch(testContext(t), bus.Watch{Stream: c.TaskStream()}, func(bus.Message, uint64) error { return nil })
	if !errors.Is(err, jetstream.ErrStreamNotFound) || !strings.Contains(err.Error(), "herdgate provision") {
		t.Errorf("Watch = %v, want ErrStreamNotFound and what to do", err)
	}
}

// A watch goes on over a restart of the server, without a gap and without
// telling anything twice.
func TestWatchBridgesARestart(t *testing.T) {
	t.Parallel()
	s, c := natstest.New(t)
	const total = 30
	seen := make(chan bus.Message, total)
	result := make(chan error, 1)
	ctx := testContext(t)
	go func() {
		result <- c.Watch(ctx, bus.Watch{Stream: c.Names.EventStream(), Subjects: []string{c.Names.AllEvents()}, LastPerSubject: true}, func(m bus.Message, _ uint64) error {
			seen <- m
			if m.Seq == total {
				return errEnough
			}
			return nil
		})
	}()
	write := func(from, to int) {
		for i := from; i < to; i++ {
			put(t, c, bus.Write{Subject: event(c, "t1", fmt.Sprint("step", i))})
		}
	}
	write(0, 10)
	for i := range 10 {
		select {
		case m := <-seen:
			if m.Seq != uint64(i+1) {
				t.Fatalf("message %d has sequence %d", i+1, m.Seq)
			}
		case <-ctx.Done():
			t.Fatal("nothing came")
		}
	}
	s.Restart()
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) { return c.NC.IsConnected(), "not connected again" })
	write(10, total)
	if err := <-result; !errors.Is(err, errEnough) {
		t.Fatal(err)
	}
	for i := 10; i < total; i++ {
		if m := <-seen; m.Seq != uint64(i+1) {
			t.Errorf("message %d has sequence %d; want no gap and no repetition", i+1, m.Seq)
		}
	}
}
