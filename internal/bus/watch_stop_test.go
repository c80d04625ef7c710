package bus_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
)

// Watches that are ended while their consumers are being replaced after a silence
// end, and none goes on with the new one. There are many, ended one after the other,
// because the moment is a short one.
func TestWatchEndsDuringASilence(t *testing.T) {
	t.Parallel()
	const n = 200
	s, direct := natstest.New(t, natstest.Listen())
	proxy := s.Proxy()
	far := s.Connect(bus.Config{Name: "far", URL: proxy.URL()})
	put(t, direct, bus.Write{Subject: direct.KV("limits"), Data: []byte("{}")})
	thawed := make(chan struct{})
	var read, running sync.WaitGroup
	read.Add(n)
	for i := range n {
		ctx, end := context.WithCancel(testContext(t))
		running.Go(func() {
			<-thawed
			<-time.After(time.Duration(i) * 100 * time.Microsecond)
			end()
		})
		running.Go(func() {
			if err := far.Watch(ctx, bus.Watch{Stream: far.TaskStream(), Subjects: []string{far.KV("limits")}, LastPerSubject: true},
				func(bus.Message, uint64) error { read.Done(); return nil }); err != nil {
				t.Errorf("Watch = %v", err)
			}
		})
	}
	read.Wait()
	proxy.Freeze(natstest.Both)
	sent := far.NC.Stats().OutMsgs
	// Two missing heartbeats later each asks for another consumer.
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) {
		asked := far.NC.Stats().OutMsgs - sent
		return asked >= n, fmt.Sprintf("%d of %d have noticed the silence", asked, n)
	})
	proxy.Thaw()
	close(thawed)
	done := make(chan struct{})
	go func() { running.Wait(); close(done) }()
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) {
		select {
		case <-done:
			return true, ""
		default:
			return false, "a watch goes on although it was ended"
		}
	})
}
