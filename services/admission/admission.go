// Package admission is the gate: one leader of several processes lets task
// requests through in the order in which they were stored, never more than
// max_running at once.
//
// The decision lives in package gate and is pure. This package is the shell
// around it: it campaigns for the leader key, reads the request stream and the
// task bucket into a gate, and turns the gate's actions into writes. The protocol
// — who writes what, expecting what — is docs/admission.md.
//
// States: standby → leading → standby … A standby is ready: it can take over at
// any moment. A leader that loses its key, or cannot renew it in time by its own
// clock, forgets everything and stands by.
//
// What always holds: first writes of records carry the leader key's revision, so
// that a deposed leader's grant is refused by the server; all fenced writes and
// the renewals of the key share one goroutine, one in flight; everything else
// expects the record's own revision or is idempotent.
package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// Config is what an admission process is started with. The limits are frozen
// for its life (ADM-02).
type Config struct {
	// Name of the process; it appears in the leader key and in events.
	Name string
	// MaxRunning is how many tasks may hold a slot: 1 to 64 in a configuration
	// file, not bounded here.
	MaxRunning int
	// Limits are those of the default pool; Pools are the other pools.
	Limits gate.Limits
	Pools  map[contract.Pool]gate.Pool
	// MaxQueued is how many may wait beside them. The request stream enforces
	// it; it is here to be told to others.
	MaxQueued int
	// Policy is "queue" or "reject"; it is the stream's bound as well.
	Policy       string
	QueueTimeout time.Duration
	// LeaseTTL and LeaderTTL are whole seconds, at least 1.
	LeaseTTL  time.Duration
	LeaderTTL time.Duration
	// RetryLost is executor.retry_lost.
	RetryLost gate.RetryLost
	// MaxLost is how many attempts of a task may be lost under RetryAlways; 0
	// means 2.
	MaxLost int
	// Retention is how long terminal records are kept; 0 means 24 h.
	Retention time.Duration
	// CancelGrace is how long a running attempt may take to obey a cancellation
	// before its record is marked; 0 means 2 s.
	CancelGrace time.Duration
}

func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.QueueTimeout, 300*time.Second)
	def(&c.LeaseTTL, 15*time.Second)
	def(&c.LeaderTTL, 10*time.Second)
	def(&c.Retention, 24*time.Hour)
	def(&c.CancelGrace, 2*time.Second)
	if c.MaxRunning == 0 {
		c.MaxRunning = 3
	}
	if c.Policy == "" {
		c.Policy = "queue"
	}
	if c.RetryLost == "" {
		c.RetryLost = gate.RetryNotStarted
	}
	return c
}

// Validate names the first setting that cannot work.
func (c Config) Validate() error {
	switch {
	case c.Name == "":
		return errors.New("admission: name is empty")
	case c.MaxRunning < 1:
		return fmt.Errorf("admission: subagent_runtime.max_running must be at least 1, got %d", c.MaxRunning)
	case c.MaxQueued < 0:
		return fmt.Errorf("admission: subagent_runtime.max_queued must be at least 0, got %d", c.MaxQueued)
	case c.Policy != "queue" && c.Policy != "reject":
		return fmt.Errorf("admission: subagent_runtime.admission_policy must be queue or reject, got %q", c.Policy)
	}
	for name, p := range c.Pools {
		if err := name.Validate(); err != nil || name == contract.DefaultPool {
			return fmt.Errorf("admission: subagent_runtime.pools: %q cannot be the name of a further pool", name)
		}
		if p.MaxRunning < 1 {
			return fmt.Errorf("admission: subagent_runtime.pools.%s.max_running must be at least 1, got %d", name, p.MaxRunning)
		}
	}
	for name, ttl := range map[string]time.Duration{"lease_ttl_seconds": c.LeaseTTL, "leader_ttl_seconds": c.LeaderTTL} {
		if ttl < time.Second || ttl%time.Second != 0 {
			return fmt.Errorf("admission: subagent_runtime.%s must be whole seconds, at least 1, got %v", name, ttl)
		}
	}
	switch c.RetryLost {
	case gate.RetryAlways, gate.RetryNever, gate.RetryNotStarted:
	default:
		return fmt.Errorf("admission: executor.retry_lost must be not_started, never or always, got %q", c.RetryLost)
	}
	return nil
}

// Deps is what the service needs from outside. Bus is required.
type Deps struct {
	Bus            *bus.Conn
	Now            func() time.Time
	Log            zerolog.Logger
	TracerProvider trace.TracerProvider
	Registerer     prometheus.Registerer
	// Ready is told of the service's readiness; nil ignores it.
	Ready func(check string, err error)
}

// Service is one admission process.
type Service struct {
	cfg     Config
	bus     *bus.Conn
	now     func() time.Time
	log     zerolog.Logger
	tracer  trace.Tracer
	ready   func(string, error)
	writer  *bus.Writer
	metrics *metrics
	crashes crashes
	// turn is an executor's, see executorsTurn.
	turn time.Duration
	// probe, in tests, is told what is about to be done for a task.
	probe func(step string, id contract.TaskID)
}

// New returns a service; [Service.Run] starts it.
func New(cfg Config, deps Deps) (*Service, error) {
	cfg = cfg.withDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Service{
		cfg: cfg, bus: deps.Bus, now: deps.Now, log: deps.Log, ready: deps.Ready,
		writer: bus.NewWriter(cfg.Name), turn: executorsTurn,
	}
	if s.now == nil {
		s.now = time.Now
	}
	s.metrics = newMetrics(deps.Registerer, s.now())
	if s.ready == nil {
		s.ready = func(string, error) {}
	}
	tp := deps.TracerProvider
	if tp == nil {
		tp = noop.NewTracerProvider()
	}
	s.tracer = tp.Tracer("herdgate/admission")
	return s, nil
}

// ID is the process with its incarnation, as it stands in the leader key.
func (s *Service) ID() string { return s.writer.ID() }

// pools are the pools of the gate, the default pool first.
func (s *Service) pools() []contract.Pool {
	return append([]contract.Pool{contract.DefaultPool}, slices.Sorted(maps.Keys(s.cfg.Pools))...)
}

// Run campaigns and leads until ctx is done, then hands the leader key back and
// returns nil.
func (s *Service) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		won, err := s.campaign(ctx)
		if ctx.Err() != nil {
			break
		}
		if err != nil {
			s.ready("admission", err)
			s.log.Error().Err(err).Msg("cannot campaign for the gate; trying again")
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			continue
		}
		s.log.Info().Uint64("epoch", won.rev).Msg("leading the gate")
		s.metrics.takeovers.Inc()
		began := s.now()
		err = s.reign(ctx, won)
		s.metrics.observe(nil)
		if ctx.Err() != nil {
			break
		}
		s.log.Warn().AnErr("reason", err).Msg("no longer leading the gate; standing by")
		if !errors.Is(err, errDeposed) {
			s.ready("admission", err)
		}
		if s.now().Sub(began) < time.Second {
			// A reign that cannot last must not be begun again and again at once.
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
	s.ready("admission", errors.New("stopping"))
	return nil
}

// crown is a won leader key.
type crown struct {
	rev  uint64
	sent time.Time // before the write was sent: what the clock counts from
	// offset is the server's clock minus ours.
	offset time.Duration
}

// campaign waits until the leader key is free and wins it (protocol W3).
func (s *Service) campaign(ctx context.Context) (crown, error) {
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The watch only wakes; what the key says is read from the stream's leader.
	wake := make(chan struct{}, 1)
	failed := make(chan error, 1)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		failed <- s.bus.Watch(wctx, bus.Watch{Stream: s.bus.TaskStream(), Subjects: []string{s.bus.KV(contract.LeaderKey)}, LastPerSubject: true},
			func(m bus.Message, _ uint64) error {
				if m.Deleted() {
					select {
					case wake <- struct{}{}:
					default:
					}
				}
				return nil
			})
	}()
	defer func() { cancel(); <-watched }()
	var seen holding
	for {
		key, ok, err := s.try(ctx)
		if err != nil {
			return crown{}, err
		}
		if ok {
			return key, nil
		}
		s.ready("admission", seen.stuck(key.rev, s.now(), s.cfg.LeaderTTL))
		select {
		case <-ctx.Done():
			return crown{}, ctx.Err()
		case err := <-failed:
			return crown{}, err
		case <-wake:
		// The watch may miss an expiry (a bucket without markers, a gap), so a
		// standby looks by itself as well.
		case <-time.After(s.cfg.LeaderTTL + time.Duration(rand.Int64N(int64(500*time.Millisecond)))):
		}
	}
}

// holding is the revision at which somebody holds the leader key, and since when a
// standby has seen it.
type holding struct {
	rev   uint64
	since time.Time
}

// stuck notes the revision that is seen now, and says whether it has stood for
// longer than it can: a key is renewed or it expires. When it does neither, the
// server answers but does not store, and no standby could take over.
func (h *holding) stuck(rev uint64, now time.Time, ttl time.Duration) error {
	if rev != h.rev {
		h.rev, h.since = rev, now
	}
	if d := now.Sub(h.since); d > 2*ttl {
		return fmt.Errorf("the leader key is neither renewed nor expires, for %v now, although it lives for %v: NATS does not store; see the log of nats-server", d.Round(time.Second), ttl)
	}
	return nil
}

// try takes the leader key if it is free. False: it is not, or somebody else was
// faster; the revision is the one at which it is held.
func (s *Service) try(ctx context.Context) (crown, bool, error) {
	key := s.bus.KV(contract.LeaderKey)
	last, err := s.bus.Last(ctx, s.bus.TaskStream(), key)
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return crown{}, false, err
	}
	if err == nil && !last.Deleted() {
		return crown{rev: last.Seq}, false, nil
	}
	writer := s.writer.Next()
	sent := s.now()
	ack, err := s.bus.Publish(ctx, s.leaderWrite(writer, last.Seq))
	if err != nil {
		if !errors.Is(err, bus.ErrConflict) && !errors.Is(err, bus.ErrDoubt) {
			return crown{}, false, err
		}
	}
	// Read back in every case: after a doubt it decides, and it tells the
	// server's clock.
	now, rerr := s.bus.Last(ctx, s.bus.TaskStream(), key)
	if rerr != nil {
		return crown{}, false, rerr
	}
	v, derr := contract.Decode[contract.Leader](now.Data)
	if now.Deleted() || derr != nil || v.Writer != writer {
		if errors.Is(err, bus.ErrDoubt) && now.Seq == last.Seq {
			// The key is free, and the server answers but does not store: a standby that
			// cannot take over is not ready.
			return crown{}, false, err
		}
		return crown{rev: now.Seq}, false, nil
	}
	if err == nil && ack.Seq != now.Seq {
		return crown{rev: now.Seq}, false, nil
	}
	return crown{rev: now.Seq, sent: sent, offset: now.Time.Sub(sent)}, true, nil
}

func (s *Service) leaderWrite(writer string, expect uint64) bus.Write {
	data, _ := json.Marshal(contract.Leader{Holder: s.writer.ID(), Writer: writer}) // two strings: cannot fail
	return bus.Write{Subject: s.bus.KV(contract.LeaderKey), Data: data, TTL: s.cfg.LeaderTTL, Expect: bus.Seq(expect)}
}

func (s *Service) source() string { return "/herdgate/admission/" + s.cfg.Name }
