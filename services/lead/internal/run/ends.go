package run

import (
	"context"
	"errors"
	"sync"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
)

// ends hears of the ends of a run's tasks: one consumer of the run's terminal
// task events, begun when the first call waits, for all calls that do.
type ends struct {
	d  *drive
	wg sync.WaitGroup

	mu      sync.Mutex
	begun   bool
	err     error // why nothing is heard any more
	waiting map[contract.TaskID]chan struct{}
}

func newEnds(d *drive) *ends {
	return &ends{d: d, waiting: map[contract.TaskID]chan struct{}{}}
}

// of returns a channel that is closed once the task's terminal event was seen,
// or once nothing can be heard any more; then failed tells why.
func (s *ends) of(id contract.TaskID) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.begun {
		s.begun = true
		s.wg.Go(s.listen)
	}
	ch := s.channel(id)
	if s.err != nil {
		closeOnce(ch)
	}
	return ch
}

// failed returns why nothing is heard any more, or nil.
func (s *ends) failed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// join waits for the consumer, after the drive's life has ended.
func (s *ends) join() { s.wg.Wait() }

// channel returns the task's channel. Caller must hold mu.
func (s *ends) channel(id contract.TaskID) chan struct{} {
	ch := s.waiting[id]
	if ch == nil {
		ch = make(chan struct{})
		s.waiting[id] = ch
	}
	return ch
}

func (s *ends) listen() {
	d := s.d
	names, rec := d.e.c.Names, d.snapshot()
	var subjects []string
	for _, t := range contract.EventTypes() {
		if t.TaskTerminal() {
			subjects = append(subjects, names.Events(contract.EventSubject{Tenant: rec.Tenant, Thread: rec.ThreadID.Token(), Run: d.id, Type: t}))
		}
	}
	// The bodies stay where they are: the result comes from the record.
	err := d.e.c.Watch(d.life, bus.Watch{Stream: names.EventStream(), Subjects: subjects, StartSeq: max(d.started, 1), HeadersOnly: true},
		func(m bus.Message, _ uint64) error {
			ev, err := names.ParseEvent(m.Subject)
			if err != nil {
				return nil // not one of ours
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			closeOnce(s.channel(ev.Task))
			return nil
		})
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err = err; s.err == nil {
		s.err = errors.Join(context.Cause(d.life), errStopped)
	}
	for _, ch := range s.waiting {
		closeOnce(ch)
	}
}

var errStopped = errors.New("the run is not driven here any more")

func closeOnce(ch chan struct{}) {
	select {
	case <-ch:
	default:
		close(ch)
	}
}
