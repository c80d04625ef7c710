package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// crew is processes of one kind, each behind a line of its own to the server, that
// faults happen to.
type crew struct {
	f     *Fleet
	kind  string
	procs []*Proc
	ever  []*Proc // those that are gone, too
	lines []*natstest.Proxy
	flags func(i int) []string
	tally *tally
	// conn tells who leads the gate.
	conn *bus.Conn
}

// tally is what happened in a run of chaos.
type tally struct {
	t      *testing.T
	mu     sync.Mutex
	faults map[string]int
	wrong  []string
}

func newTally(t *testing.T) *tally { return &tally{t: t, faults: map[string]int{}} }

// problem notes something that should never have happened.
func (y *tally) problem(format string, args ...any) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.wrong = append(y.wrong, fmt.Sprintf(format, args...))
}

func (y *tally) count(f fault, struck bool) {
	y.mu.Lock()
	defer y.mu.Unlock()
	name := f.Crew + " " + string(f.Kind)
	if !struck {
		name += ": none came"
	}
	y.faults[name]++
}

func (f *Fleet) crew(y *tally, kind string, n int, flags func(i int) []string) *crew {
	c := &crew{f: f, kind: kind, flags: flags, tally: y}
	for i := range n {
		c.lines = append(c.lines, natstest.NewProxy(f.t, f.natsURL))
		c.procs = append(c.procs, c.start(i))
	}
	return c
}

func (c *crew) start(i int) *Proc {
	flags := []string{"--nats-url", c.lines[i].URL(), "--name", fmt.Sprintf("%s-%d", c.kind, i)}
	if c.flags != nil {
		flags = append(flags, c.flags(i)...)
	}
	p := c.f.service(c.kind, flags...)
	c.ever = append(c.ever, p)
	return p
}

// live lets planned faults happen, one after the other. Those for which there is no
// time left, because others took longer than planned, do not happen.
func (c *crew) live(faults []fault, end time.Time) {
	for _, f := range faults {
		if !time.Now().Add(f.After).Before(end) {
			return
		}
		<-time.After(f.After)
		struck := c.suffer(f)
		c.tally.count(f, struck)
	}
}

// suffer lets one fault happen and puts things right again. It is false when the
// write at which the fault should strike did not come.
func (c *crew) suffer(f fault) bool {
	i := f.Proc
	if f.Leader {
		i = c.leader(i)
	}
	p, line := c.procs[i], c.lines[i]
	select {
	case <-p.done:
		c.tally.problem("%s ended by itself: %v", p.name, p.err)
		c.procs[i] = c.start(i)
		return true
	default:
	}
	switch f.Kind {
	case killed:
		p.Kill()
		c.procs[i] = c.start(i)
	case napped, slept:
		p.Pause()
		<-time.After(f.For)
		p.Resume()
	case drained:
		p.signal(syscall.SIGTERM)
		select {
		case <-p.done:
		case <-time.After(20 * time.Second):
			c.tally.problem("%s did not stop within 20 s of SIGTERM", p.name)
			p.Kill()
		}
		// Before it listens for signals, the signal itself ends it.
		if p.err != nil && p.err.Error() != "signal: terminated" && p.err.Error() != "signal: killed" {
			c.tally.problem("%s ended with %v after SIGTERM", p.name, p.err)
		}
		c.procs[i] = c.start(i)
	case cut:
		line.Refuse()
		<-time.After(f.For)
		line.Accept()
	case lagged, parted:
		line.Freeze(natstest.Both)
		<-time.After(f.For)
		line.Thaw()
	case muted:
		line.Freeze(natstest.Up)
		<-time.After(f.For)
		line.Thaw()
	default:
		return c.strike(f, i)
	}
	return true
}

// strike lets a fault happen in the middle of a write.
func (c *crew) strike(f fault, i int) bool {
	p, line := c.procs[i], c.lines[i]
	select {
	case <-line.FreezeAt(f.Write):
	case <-time.After(2 * time.Second):
		line.Thaw()
		return false
	}
	switch f.Kind {
	case fellAt, sentAt:
		p.Kill()
		if f.Kind == fellAt {
			line.Refuse()
		}
		line.Thaw()
		line.Accept()
		c.procs[i] = c.start(i)
	case lostAt:
		line.Refuse()
		line.Thaw()
		<-time.After(f.For)
		line.Accept()
	case lateAt:
		<-time.After(f.For)
		line.Thaw()
	}
	return true
}

// leader is the place of the process that leads the gate, or i when that is not to
// be found out.
func (c *crew) leader(i int) int {
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	last, err := c.conn.Last(ctx, c.conn.TaskStream(), c.conn.KV(contract.LeaderKey))
	if err != nil || last.Deleted() {
		return i
	}
	v, err := contract.Decode[contract.Leader](last.Data)
	if err != nil {
		return i
	}
	for n := range c.procs {
		if strings.HasPrefix(v.Holder, fmt.Sprintf("%s-%d-", c.kind, n)) {
			return n
		}
	}
	return i
}

// serve lets planned faults happen to the server.
func (f *Fleet) serve(y *tally, faults []fault, end time.Time) {
	for _, x := range faults {
		if !time.Now().Add(x.After).Before(end) {
			return
		}
		<-time.After(x.After)
		switch x.Kind {
		case crashed:
			f.nats.Kill()
			<-time.After(x.For)
			f.startNATS()
		default: // connections stay, answers are late
			f.nats.Pause()
			<-time.After(x.For)
			f.nats.Resume()
		}
		y.count(x, true)
	}
}
