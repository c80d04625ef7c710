package bus

import (
	"context"
	"errors"
	"testing"

	"github.com/nats-io/nats.go"
)

// A question that nobody answers, or that its asker gives up, leaves nothing behind.
func TestCallsAreForgotten(t *testing.T) {
	t.Parallel()
	c := newCalls()
	open := func() *call {
		k := &call{of: c, key: "1", done: make(chan struct{})}
		c.open[k.key] = k
		return k
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := open().wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	k := open()
	c.cut()
	if _, err := k.wait(context.Background()); !errors.Is(Classify(err), ErrDoubt) {
		t.Errorf("the line is cut: %v", err)
	}
	if _, err := c.send(nil, &nats.Msg{Subject: "x"}); err == nil {
		t.Error("sent without a connection")
	}
	if len(c.open) != 0 {
		t.Errorf("%d calls are left open", len(c.open))
	}
}

// What a puller has asked for and the server has dropped is asked for again.
func TestPullStatus(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		code, left string
		asked      int
		lost       bool
	}{
		{"100", "", 4, false},
		{"408", "3", 1, false},
		{"404", "9", 0, false},
		{"408", "", 4, true},
		{"409", "", 4, true},
		{"503", "", 4, true},
	} {
		p := &Puller{asked: 4}
		m := nats.NewMsg("x")
		m.Header.Set("Status", c.code)
		m.Header.Set("Nats-Pending-Messages", c.left)
		if err := p.status(m); errors.Is(err, ErrPullLost) != c.lost || p.asked != c.asked {
			t.Errorf("status %s: %v, %d asked for; want lost %v, %d", c.code, err, p.asked, c.lost, c.asked)
		}
	}
}
