package natstest_test

import (
	"context"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
)

func TestProxyFreezesAtAWrite(t *testing.T) {
	t.Parallel()
	s, direct := natstest.New(t, natstest.Listen())
	p := s.Proxy()
	c := s.Connect(bus.Config{Name: "behind", URL: p.URL()})
	ctx, cancel := context.WithTimeout(t.Context(), natstest.Timeout)
	defer cancel()
	hit := p.FreezeAt("task.second")
	if _, err := c.Publish(ctx, bus.Write{Subject: c.KV("task.first"), Data: []byte("1")}); err != nil {
		t.Fatalf("a write before the one that is waited for: %v", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := c.Publish(ctx, bus.Write{Subject: c.KV("task.second"), Data: []byte("2")})
		done <- err
	}()
	select {
	case <-hit:
	case <-ctx.Done():
		t.Fatal("nothing was frozen")
	}
	if m, err := direct.Last(ctx, direct.TaskStream(), direct.KV("task.second")); err == nil {
		t.Fatalf("a frozen write was stored: %+v", m)
	}
	p.Thaw()
	if err := <-done; err != nil {
		t.Fatalf("the write after the thaw: %v", err)
	}
}

// What was frozen is lost with its line when the proxy refuses, and the client
// finds its way back when it accepts again.
func TestProxyRefuses(t *testing.T) {
	t.Parallel()
	s, direct := natstest.New(t, natstest.Listen())
	p := s.Proxy()
	c := s.Connect(bus.Config{Name: "behind", URL: p.URL()})
	ctx, cancel := context.WithTimeout(t.Context(), natstest.Timeout)
	defer cancel()
	p.Freeze(natstest.Both)
	short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
	defer stop()
	if _, err := c.Publish(short, bus.Write{Subject: c.KV("task.lost"), Data: []byte("1")}); err == nil {
		t.Fatal("a frozen line acknowledged a write")
	}
	p.Refuse()
	p.Thaw()
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) { return !c.NC.IsConnected(), "still connected" })
	p.Accept()
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) {
		_, err := c.Publish(ctx, bus.Write{Subject: c.KV("task.next"), Data: []byte("2")})
		return err == nil, "not connected again"
	})
	if m, err := direct.Last(ctx, direct.TaskStream(), direct.KV("task.lost")); err == nil {
		t.Fatalf("what was frozen when the line was cut was stored: %+v", m)
	}
}
