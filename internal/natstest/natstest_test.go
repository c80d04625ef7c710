package natstest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNewIsProvisioned(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), natstest.Timeout)
	defer cancel()
	ack, err := c.Publish(ctx, bus.Write{Subject: c.KV("limits"), Data: []byte("x")})
	if err != nil || ack.Seq != 1 {
		t.Fatalf("first write to the task bucket: sequence %d, %v; want 1, nil", ack.Seq, err)
	}
}

// What was stored before a restart is there after it, and both kinds of
// connections find the new server by themselves.
func TestRestartKeepsStoreAndConnections(t *testing.T) {
	t.Parallel()
	s, in := natstest.New(t, natstest.Listen())
	tcp := s.Connect(bus.Config{Name: "tcp", URL: s.URL()})
	ctx, cancel := context.WithTimeout(t.Context(), natstest.Timeout)
	defer cancel()
	if _, err := in.Publish(ctx, bus.Write{Subject: in.KV("limits"), Data: []byte("before")}); err != nil {
		t.Fatal(err)
	}
	url := s.URL()

	s.Kill()
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) {
		return !in.NC.IsConnected() && !tcp.NC.IsConnected(), "a connection still believes in the server"
	})
	s.Restart()

	if s.URL() != url {
		t.Errorf("URL after restart = %s, want %s", s.URL(), url)
	}
	for name, c := range map[string]*bus.Conn{"in process": in, "tcp": tcp} {
		natstest.Eventually(t, natstest.Timeout, func() (bool, string) {
			m, err := c.Last(ctx, c.TaskStream(), c.KV("limits"))
			if err != nil && !errors.Is(err, bus.ErrDoubt) {
				t.Fatalf("%s: %v", name, err)
			}
			return err == nil && string(m.Data) == "before", name + ": the stored value is not back"
		})
	}
}

type failer struct {
	testing.TB
	failed bool
}

func (f *failer) Helper()               {}
func (f *failer) Fatalf(string, ...any) { f.failed = true; panic(f) }

func TestEventuallyGivesUp(t *testing.T) {
	t.Parallel()
	f := &failer{TB: t}
	func() {
		defer func() { _ = recover() }()
		natstest.Eventually(f, 20*time.Millisecond, func() (bool, string) { return false, "never" })
	}()
	if !f.failed {
		t.Error("Eventually returned although the condition never held")
	}
}

// A frozen proxy looks like a cut network: nothing passes, nothing is closed, a
// new line gets no greeting, and what was sent meanwhile arrives late.
func TestProxyFreezes(t *testing.T) {
	t.Parallel()
	s, direct := natstest.New(t, natstest.Listen())
	proxy := s.Proxy()
	far := s.Connect(bus.Config{Name: "far", URL: proxy.URL()})
	ctx, cancel := context.WithTimeout(t.Context(), natstest.Timeout)
	defer cancel()
	proxy.Freeze(natstest.Both)
	brief, stop := context.WithTimeout(ctx, 200*time.Millisecond)
	defer stop()
	if _, err := far.Publish(brief, bus.Write{Subject: far.KV("limits"), Data: []byte("late")}); !errors.Is(err, bus.ErrDoubt) {
		t.Errorf("a write over a frozen line: %v; want doubt", err)
	}
	if _, err := direct.Last(ctx, direct.TaskStream(), direct.KV("limits")); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("the write arrived while the line was frozen: %v", err)
	}
	if !far.NC.IsConnected() {
		t.Error("the line was closed")
	}
	fresh, stop := context.WithTimeout(ctx, 200*time.Millisecond)
	defer stop()
	if c, err := bus.Connect(fresh, s.BusConfig(bus.Config{Name: "new", URL: proxy.URL()}), zerolog.Nop()); err == nil {
		c.Close()
		t.Error("a new line was greeted")
	}
	proxy.Thaw()
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) {
		m, err := direct.Last(ctx, direct.TaskStream(), direct.KV("limits"))
		return err == nil && string(m.Data) == "late", "what was sent meanwhile did not arrive"
	})
}
