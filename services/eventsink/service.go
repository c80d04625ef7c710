package eventsink

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/pause"
)

// CheckName is the name under which the sink reports its readiness.
const CheckName = "eventsink"

// Config is how the sink batches. The zero value takes the defaults.
type Config struct {
	// BatchSize is the most events in one transaction, 1 to 10000; the consumer's
	// limit on unacknowledged messages bounds it as well. Default 500.
	// Raise it when the database is far away.
	BatchSize int
	// FlushInterval is the longest that an event waits for its batch to fill.
	// Default 100 ms. The last event of a task or run does not wait.
	FlushInterval time.Duration
	// DrainTimeout bounds how long a stopping sink tries to store the batch it
	// has open. Default 5 s. What it cannot store is delivered again later.
	DrainTimeout time.Duration
	// Shared: several sinks store at the same time, in a store that allows it,
	// and each takes a part of the events. Else one stores and the others stand by.
	Shared bool
	// Retention is how long stored events are kept; 0 is for ever.
	Retention time.Duration
	// HouseInterval is how often the sink notes how far it is and deletes what is
	// older than Retention. Default 1 h.
	HouseInterval time.Duration
}

// Limits of Config.
const (
	maxBatchSize  = 10_000
	maxBatchBytes = 8 << 20  // a batch is written when it has this size
	maxHeldBytes  = 32 << 20 // all that is read and not yet acknowledged
	maxPullBytes  = 16 << 20 // all that is asked for
)

// settled is how long a session must have lasted for its end to be news.
const settled = 10 * time.Second

func (c Config) withDefaults() Config {
	if c.BatchSize == 0 {
		c.BatchSize = 500
	}
	if c.FlushInterval == 0 {
		c.FlushInterval = 100 * time.Millisecond
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = 5 * time.Second
	}
	if c.HouseInterval == 0 {
		c.HouseInterval = time.Hour
	}
	return c
}

// Validate checks a configuration whose defaults are filled in.
func (c Config) Validate() error {
	var errs []error
	if c.BatchSize < 1 || c.BatchSize > maxBatchSize {
		errs = append(errs, fmt.Errorf("eventsink.batch_size: must be 1 to %d, got %d", maxBatchSize, c.BatchSize))
	}
	if c.FlushInterval < 0 {
		errs = append(errs, fmt.Errorf("eventsink.flush_interval_ms: must be above 0, got %v", c.FlushInterval))
	}
	if c.DrainTimeout < 0 {
		errs = append(errs, fmt.Errorf("eventsink drain timeout: must be above 0, got %v", c.DrainTimeout))
	}
	if c.Retention < 0 || c.HouseInterval < 0 {
		errs = append(errs, fmt.Errorf("eventsink retention: must not be below 0, got %v every %v", c.Retention, c.HouseInterval))
	}
	return errors.Join(errs...)
}

// Deps is what the sink works with. Bus and Open are needed.
type Deps struct {
	Bus  *bus.Conn
	Open OpenFunc
	Log  zerolog.Logger
	// Ready is told when the sink begins or ceases to be able to do its work;
	// nil is good. A sink that stands by for another one is good.
	Ready func(name string, err error)
	// Ask gets what looks at the store when somebody wants to know whether the
	// sink is ready, and nil when the store is closed.
	Ask func(name string, check func(context.Context) error)
	// Registerer takes the sink's metrics while Run runs.
	Registerer prometheus.Registerer
	// TracerProvider takes the sink's spans.
	TracerProvider trace.TracerProvider
}

// Service is the event sink.
type Service struct {
	cfg     Config
	bus     *bus.Conn
	open    OpenFunc
	log     zerolog.Logger
	ready   func(string, error)
	ask     func(string, func(context.Context) error)
	reg     prometheus.Registerer
	tracer  trace.Tracer
	metrics *metrics

	progress progress
	consumer atomic.Pointer[jetstream.Consumer]

	mu       sync.Mutex
	reported bool
	state    error
}

var errStarting = errors.New("starting")

// New returns a sink. It does nothing before Run.
func New(cfg Config, deps Deps) (*Service, error) {
	cfg = cfg.withDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	if deps.Bus == nil || deps.Open == nil {
		return nil, errors.New("eventsink: Deps.Bus and Deps.Open must be set")
	}
	if deps.Ready == nil {
		deps.Ready = func(string, error) {}
	}
	if deps.Ask == nil {
		deps.Ask = func(string, func(context.Context) error) {}
	}
	if deps.Registerer == nil {
		deps.Registerer = prometheus.NewRegistry()
	}
	if deps.TracerProvider == nil {
		deps.TracerProvider = noop.NewTracerProvider()
	}
	s := &Service{
		cfg: cfg, bus: deps.Bus, open: deps.Open, log: deps.Log, ready: deps.Ready, ask: deps.Ask, reg: deps.Registerer,
		tracer: deps.TracerProvider.Tracer("github.com/herdgate/herdgate/services/eventsink"),
	}
	s.metrics = newMetrics(s.lag)
	return s, nil
}

// Run stores events until ctx is done; then it writes the batch it has open,
// acknowledges it and returns nil. It returns an error only if it could not
// begin at all. Run is called once.
func (s *Service) Run(ctx context.Context) error {
	for _, c := range s.metrics.all() {
		if err := s.reg.Register(c); err != nil {
			return fmt.Errorf("eventsink: metrics: %w", err)
		}
		defer s.reg.Unregister(c)
	}
	work, release := outlive(ctx, s.cfg.DrainTimeout)
	defer release()
	s.setReady(errStarting)

	for ctx.Err() == nil {
		st, err := s.openStore(ctx)
		if err != nil {
			break // ctx is done
		}
		if err := s.use(ctx, work, st); err != nil {
			return err
		}
	}
	return nil
}

// use stores events in st until ctx is done or the store is lost to another sink.
func (s *Service) use(ctx, work context.Context, st Store) error {
	s.ask(CheckName, st.Check)
	serve, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	api := newAPI(s.bus, st, s.cfg.Shared, &s.progress, s.log)
	if s.cfg.Shared {
		deaf, err := s.hear()
		if err != nil {
			return errors.Join(err, st.Close())
		}
		defer deaf()
	}
	var house sync.WaitGroup
	house.Go(func() { s.keepHouse(serve, st) })
	retry := newBackOff()
	var quiet quiet
	for lost := false; ctx.Err() == nil && !lost; {
		start := time.Now()
		began, err := s.session(ctx, work, serve, st, api)
		if ctx.Err() != nil {
			if began && err != nil {
				s.log.Warn().Err(err).Msg("the last batch was not stored")
			}
			break
		}
		if time.Since(start) > settled {
			retry.Reset()
			quiet.reset()
		}
		lost = errors.Is(err, ErrLost)
		if !began || !s.bus.NC.IsConnected() || errors.Is(err, errStopped) || lost {
			s.setReady(err)
		}
		wait := retry.NextBackOff()
		s.metrics.restarts.Inc()
		if quiet.speak() {
			s.log.Warn().Err(err).Dur("again_in", wait).Msg("reading the event stream was interrupted")
		}
		s.await(ctx, wait)
	}
	end()
	house.Wait()
	api.stop()
	s.ask(CheckName, nil)
	if err := st.Close(); err != nil {
		return fmt.Errorf("eventsink: close the store: %w", err)
	}
	return nil
}

// openStore opens the store, however long that takes. It fails only when ctx is
// done.
func (s *Service) openStore(ctx context.Context) (Store, error) {
	retry := newBackOff()
	var quiet quiet
	for {
		st, err := s.open(ctx, func() {
			s.log.Info().Msg("standing by: another process writes to this database")
			s.setReady(nil)
		})
		if err == nil {
			return st, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		s.setReady(err)
		if quiet.speak() {
			s.log.Error().Err(err).Msg("the event store cannot be opened; trying again")
		}
		if pause.For(ctx, retry.NextBackOff()) != nil {
			return nil, ctx.Err()
		}
	}
}

// await waits for d, or less when the connection comes back.
func (s *Service) await(ctx context.Context, d time.Duration) {
	var back chan nats.Status
	if !s.bus.NC.IsConnected() {
		back = s.bus.NC.StatusChanged(nats.CONNECTED)
		defer s.bus.NC.RemoveStatusListener(back)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-back:
	case <-t.C:
	}
}

// setReady reports a change of readiness.
func (s *Service) setReady(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	same := s.reported && (err == nil) == (s.state == nil) && (err == nil || err.Error() == s.state.Error())
	s.reported, s.state = true, err
	if !same {
		s.ready(CheckName, err)
	}
}

// lag asks how many events wait to be stored and how old the oldest of them is.
// It is called when metrics are read.
func (s *Service) lag() (events float64, seconds float64, ok bool) {
	c := s.consumer.Load()
	if c == nil || !s.bus.NC.IsConnected() {
		return 0, 0, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	info, err := (*c).Info(ctx)
	if err != nil {
		s.log.Debug().Err(err).Msg("consumer info for metrics")
		return 0, 0, false
	}
	events = float64(info.NumPending) + float64(info.NumAckPending)
	if events == 0 {
		return 0, 0, true
	}
	oldest, err := s.bus.JS.Stream(ctx, s.bus.Names.EventStream())
	if err != nil {
		s.log.Debug().Err(err).Msg("event stream for metrics")
		return events, 0, true
	}
	m, err := oldest.GetMsg(ctx, info.AckFloor.Stream+1, jetstream.WithGetMsgSubject(s.bus.Names.AllEvents()))
	if err != nil {
		return events, 0, true // it was stored, or has left the stream, meanwhile
	}
	return events, max(0, time.Since(m.Time).Seconds()), true
}

// outlive returns a context that ends d after ctx does.
func outlive(ctx context.Context, d time.Duration) (context.Context, func()) {
	out, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var mu sync.Mutex
	var timer *time.Timer
	stop := context.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		timer = time.AfterFunc(d, cancel)
	})
	return out, func() {
		stop()
		mu.Lock()
		defer mu.Unlock()
		if timer != nil {
			timer.Stop()
		}
		cancel()
	}
}

func newBackOff() *backoff.ExponentialBackOff {
	return pause.Growing(50*time.Millisecond, 3*time.Second)
}

// quiet lets one of many equal log lines through per period.
type quiet struct{ next time.Time }

func (q *quiet) reset() { q.next = time.Time{} }

func (q *quiet) speak() bool {
	now := time.Now()
	if now.Before(q.next) {
		return false
	}
	q.next = now.Add(30 * time.Second)
	return true
}

// progress is how far the stream has been processed, for whoever waits for it.
type progress struct {
	mu      sync.Mutex
	seq     uint64
	changed chan struct{}
}

// advance moves the progress on and wakes everybody who waits.
func (p *progress) advance(seq uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if seq <= p.seq {
		return
	}
	p.seq = seq
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

func (p *progress) current() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seq
}

// wait waits until the progress has reached seq or ctx is done.
func (p *progress) wait(ctx context.Context, seq uint64) bool {
	for {
		p.mu.Lock()
		if p.seq >= seq {
			p.mu.Unlock()
			return true
		}
		if p.changed == nil {
			p.changed = make(chan struct{})
		}
		changed := p.changed
		p.mu.Unlock()
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}
