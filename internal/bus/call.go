package bus

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// calls are the requests of one connection that have no answer yet. Answers to all
// of them come to one subscription. A connection that is lost ends them: the answer
// cannot come any more. Without that every request that is under way when a server
// restarts would wait for its whole time, and with it a lease that has to be
// renewed.
type calls struct {
	prefix string // of the subjects that answers come to

	mu   sync.Mutex
	last uint64
	open map[string]*call
}

// call is one request. done is closed when msg or err is there.
type call struct {
	of   *calls
	key  string
	done chan struct{}
	msg  *nats.Msg
	err  error
}

func newCalls() *calls { return &calls{open: map[string]*call{}} }

// listen begins to take answers.
func (c *calls) listen(nc *nats.Conn) error {
	c.prefix = nc.NewInbox() + "."
	_, err := nc.Subscribe(c.prefix+"*", func(m *nats.Msg) {
		if call := c.take(strings.TrimPrefix(m.Subject, c.prefix)); call != nil {
			call.msg = m
			if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
				call.err = nats.ErrNoResponders
			}
			close(call.done)
		}
	})
	return err
}

// send sends msg, whose answer is the call's.
func (c *calls) send(nc *nats.Conn, msg *nats.Msg) (*call, error) {
	call := &call{of: c, done: make(chan struct{})}
	c.mu.Lock()
	c.last++
	call.key = strconv.FormatUint(c.last, 36)
	c.open[call.key] = call
	c.mu.Unlock()
	msg.Reply = c.prefix + call.key
	if err := nc.PublishMsg(msg); err != nil {
		c.take(call.key)
		return nil, err
	}
	return call, nil
}

func (c *calls) take(key string) *call {
	c.mu.Lock()
	defer c.mu.Unlock()
	call := c.open[key]
	delete(c.open, key)
	return call
}

// cut ends the calls on the connection that was lost. What is asked from here on is
// asked on the next one, or refused at once while there is none.
func (c *calls) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, call := range c.open {
		delete(c.open, key)
		call.err = errCut
		close(call.done)
	}
}

// wait waits for the answer, at most [WriteTimeout].
func (c *call) wait(ctx context.Context) (*nats.Msg, error) {
	limit := time.NewTimer(WriteTimeout)
	defer limit.Stop()
	var err error
	select {
	case <-c.done:
		return c.msg, c.err
	case <-ctx.Done():
		err = ctx.Err()
	case <-limit.C:
		err = nats.ErrTimeout
	}
	if c.of.take(c.key) == nil {
		// It came in this moment.
		<-c.done
		return c.msg, c.err
	}
	return nil, err
}
