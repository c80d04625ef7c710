package bus_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
)

// pulled is a work queue whose consumer gives nothing back by itself.
type pulled struct {
	*testing.T
	c *bus.Conn
}

func newPulled(t *testing.T, c *bus.Conn, n int) *pulled {
	t.Helper()
	ctx := testContext(t)
	stream, err := c.JS.CreateStream(ctx, jetstream.StreamConfig{Name: "JOBS", Subjects: []string{"jobs.*"}, Retention: jetstream.WorkQueuePolicy})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "c", AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Hour}); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		put(t, c, bus.Write{Subject: fmt.Sprint("jobs.", i)})
	}
	return &pulled{t, c}
}

func (p *pulled) pull(c *bus.Conn) *bus.Puller {
	p.Helper()
	puller, err := c.Pull(testContext(p.T), "JOBS", "c")
	if err != nil {
		p.Fatal(err)
	}
	return puller
}

func (p *pulled) next(from *bus.Puller, room int) bus.Delivery {
	p.Helper()
	m, ok, err := from.Next(testContext(p.T), room, nil)
	if err != nil || !ok {
		p.Fatalf("no message: %v, %v", ok, err)
	}
	return m
}

// out is how many messages were delivered and are not dealt with.
func (p *pulled) out() int {
	p.Helper()
	cons, err := p.c.JS.Consumer(testContext(p.T), "JOBS", "c")
	if err != nil {
		p.Fatal(err)
	}
	return cons.CachedInfo().NumAckPending
}

func (p *pulled) reaches(out int) {
	p.Helper()
	natstest.Eventually(p.T, natstest.Timeout, func() (bool, string) {
		n := p.out()
		return n == out, fmt.Sprintf("%d are delivered, want %d", n, out)
	})
}

// I2, I8: nobody is sent more than there is room for, nor much ahead of what is
// taken; what is sent first is taken first.
func TestPullKnowsItsRoom(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	c := s.Conn("c")
	p := newPulled(t, c, 20)
	puller := p.pull(c)
	defer puller.Close()
	for i, room := range []int{2, 1} {
		if m := p.next(puller, room); m.Subject() != fmt.Sprint("jobs.", i) {
			t.Errorf("message %d is %s", i, m.Subject())
		}
	}
	// No room: whatever is asked now must not be a message.
	full, cancel := context.WithCancel(testContext(t))
	wake := make(chan struct{}, 1)
	wake <- struct{}{}
	if _, ok, err := puller.Next(full, 0, wake); ok || err != nil {
		t.Errorf("woken: %v, %v", ok, err)
	}
	cancel()
	if _, ok, err := puller.Next(full, 0, nil); ok || err != nil {
		t.Errorf("cancelled: %v, %v", ok, err)
	}
	if n := p.out(); n != 2 {
		t.Errorf("%d were delivered into room for 2", n)
	}
	p.next(puller, 100)
	p.reaches(2 + 4)
	for i := range 10 {
		p.next(puller, 100)
		if n := p.out(); n > 2+1+i+1+4 {
			t.Errorf("%d were delivered, %d taken", n, i+4)
		}
	}
}

// I8: what came and was not taken is somebody else's at once when a puller is
// closed.
func TestPullGivesBack(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	c, other := s.Conn("c"), s.Conn("other")
	p := newPulled(t, c, 4)
	puller := p.pull(c)
	taken := p.next(puller, 4)
	p.reaches(4)
	puller.Close()
	second := p.pull(other)
	defer second.Close()
	for i := range 3 {
		m := p.next(second, 3-i)
		meta, err := m.Metadata()
		if err != nil || meta.NumDelivered != 2 || meta.Stream != "JOBS" || meta.Consumer != "c" {
			t.Errorf("delivery %+v, %v", meta, err)
		}
		if err := m.DoubleAck(testContext(t)); err != nil {
			t.Error(err)
		}
	}
	p.reaches(1)
	if err := taken.Ack(); err != nil { // it outlives its puller
		t.Error(err)
	}
	p.reaches(0)
}

// What becomes of a delivery is for the one who has it to say.
func TestDelivery(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	c := s.Conn("c")
	p := newPulled(t, c, 1)
	puller := p.pull(c)
	defer puller.Close()
	for i, deal := range []func(bus.Delivery) error{
		func(d bus.Delivery) error { return errors.Join(d.InProgress(), d.Nak()) },
		func(d bus.Delivery) error { return d.NakWithDelay(time.Millisecond) },
		func(d bus.Delivery) error { return d.TermWithReason("enough") },
	} {
		m := p.next(puller, 1)
		if meta, err := m.Metadata(); err != nil || meta.NumDelivered != uint64(i)+1 || meta.Sequence.Stream != 1 {
			t.Errorf("delivery %d: %+v, %v", i, meta, err)
		}
		if err := deal(m); err != nil {
			t.Error(err)
		}
	}
	p.reaches(0)
}

// F-036: a puller whose questions may be forgotten says so: after a lost connection,
// a consumer that is gone, a server that is silent.
func TestPullIsLost(t *testing.T) {
	t.Parallel()
	lost := func(t *testing.T, p *bus.Puller) {
		t.Helper()
		defer p.Close()
		if _, ok, err := p.Next(testContext(t), 1, nil); ok || !errors.Is(err, bus.ErrPullLost) {
			t.Errorf("next = %v, %v; want ErrPullLost", ok, err)
		}
	}
	t.Run("restart", func(t *testing.T) {
		t.Parallel()
		s := natstest.Start(t, natstest.Listen())
		c := s.Conn("c")
		p := newPulled(t, c, 0)
		puller := p.pull(c)
		s.Kill()
		lost(t, puller)
		s.Restart()
		natstest.Eventually(t, natstest.Timeout, func() (bool, string) {
			_, err := c.Publish(testContext(t), bus.Write{Subject: "jobs.1"})
			return err == nil, fmt.Sprint(err)
		})
		again := p.pull(c)
		defer again.Close()
		p.next(again, 1)
	})
	t.Run("consumer", func(t *testing.T) {
		t.Parallel()
		s := natstest.Start(t)
		c := s.Conn("c")
		p := newPulled(t, c, 0)
		puller := p.pull(c)
		if err := c.JS.DeleteConsumer(testContext(t), "JOBS", "c"); err != nil {
			t.Fatal(err)
		}
		lost(t, puller)
		if _, err := c.Pull(testContext(t), "JOBS", "c"); !errors.Is(err, jetstream.ErrConsumerNotFound) {
			t.Errorf("pull = %v", err)
		}
	})
	t.Run("silence", func(t *testing.T) {
		t.Parallel()
		s := natstest.Start(t, natstest.Listen())
		proxy := s.Proxy()
		c := s.Connect(bus.Config{Name: "c", URL: proxy.URL()})
		puller := newPulled(t, c, 0).pull(c)
		proxy.Freeze(natstest.Down)
		defer proxy.Thaw()
		if _, ok, err := puller.Next(testContext(t), 1, nil); ok || !errors.Is(err, bus.ErrPullLost) {
			t.Errorf("next = %v, %v; want ErrPullLost", ok, err)
		}
		proxy.Cut()
		puller.Close()
	})
}

// What one goroutine sends without waiting is stored in that order.
func TestSendKeepsOrder(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	c := s.Conn("c")
	newPulled(t, c, 0)
	var sent []bus.Sent
	for i := range uint64(500) {
		w, err := c.Send(bus.Write{Subject: fmt.Sprint("jobs.", i), Expect: bus.Seq(i), ExpectSubject: "jobs.*"})
		if err != nil {
			t.Fatal(err)
		}
		sent = append(sent, w)
	}
	for i, w := range sent {
		if ack, err := w.Wait(testContext(t)); err != nil || ack.Seq != uint64(i)+1 {
			t.Fatalf("write %d is at %d, %v", i, ack.Seq, err)
		}
		select {
		case <-w.Done():
		default:
			t.Error("a write that is stored is not done")
		}
	}
}
