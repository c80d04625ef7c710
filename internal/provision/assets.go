// Package provision declares the streams, buckets and consumers of a
// deployment, compares them with a server, and creates or updates them.
//
// It deletes and recreates nothing: what the server cannot change in place is
// reported and left to a person. Settings that it does not manage (placement,
// compression, republish, metadata and the like) stay as an operator made them.
//
// Services create nothing themselves; they call [Verify] when they start.
package provision

import (
	"maps"
	"slices"
	"time"

	"github.com/nats-io/jsm.go/api"

	"github.com/herdgate/herdgate/pkg/contract"
)

// grantMaxWaiting is how many questions for grants may be open at once: a few for
// each executor of a pool.
const grantMaxWaiting = 8192

// Limits of the assets that no configuration key changes.
const (
	// DedupeWindow is how long a stream knows the id of a message.
	DedupeWindow = 2 * time.Minute
	// MarkerTTL is how long the marker of an expired key stays. It is far above
	// the time that a take-over needs, so that a new leader still sees it.
	MarkerTTL = 5 * time.Minute
	// GrantAckWait is how long an executor may hold a grant before it claims it.
	GrantAckWait = 10 * time.Second
	// SinkAckWait is how long the sink may take to store a batch.
	SinkAckWait = 30 * time.Second
	// SinkMaxAckPending is how many events the sink may hold unacknowledged.
	SinkMaxAckPending = 5000

	headerRoom     = 8 << 10 // trace context, message id, expectations
	maxGrants      = 100_000
	deadMaxAge     = 30 * 24 * time.Hour
	deadMaxBytes   = 256 << 20
	advisoryMaxAge = 7 * 24 * time.Hour
	// A blob is found through its task's record alone, which is kept for a day
	// after the task's end.
	blobMaxAge      = 7 * 24 * time.Hour
	advisoryMaxByte = 64 << 20
)

// PolicyReject is the admission policy under which nothing waits.
const PolicyReject = "reject"

// Defaults for zero values of [Config].
const (
	DefaultMaxRunning  = 3
	DefaultEventMaxAge = 7 * 24 * time.Hour
	// The server reserves it, so it must fit on a small volume.
	DefaultEventMaxBytes = 1 << 30
)

// Config is what the assets depend on.
type Config struct {
	// Names of the deployment; the zero value takes [contract.DefaultPrefix].
	Names contract.Names
	// Replicas of every stream, 1 (default) to 5. More than one needs a cluster.
	Replicas int
	// MaxRunning and MaxQueued bound the queue together: a request stays in it
	// until its task has ended. MaxRunning 0 takes [DefaultMaxRunning];
	// MaxQueued 0 means that nothing waits.
	MaxRunning, MaxQueued int
	// Pools are the pools besides the default one, with what each may run at
	// once. Each has a consumer of its own for its executors.
	Pools map[contract.Pool]int
	// AdmissionPolicy is "queue" (default) or [PolicyReject], which bounds the
	// queue by MaxRunning alone.
	AdmissionPolicy string
	// EventMaxAge and EventMaxBytes bound the stored events, whichever is
	// reached first; the oldest go. 0 takes the default. The server reserves
	// EventMaxBytes, so they must fit into its storage limit.
	EventMaxAge   time.Duration
	EventMaxBytes int64
	// MemoryStorage keeps everything in memory. For tests and trials: a restart
	// of the server loses all of it.
	MemoryStorage bool
}

func (c Config) withDefaults() Config {
	if c.Names.Prefix() == "" {
		c.Names = contract.MustNames(contract.DefaultPrefix)
	}
	if c.Replicas < 1 {
		c.Replicas = 1
	}
	if c.MaxRunning < 1 {
		c.MaxRunning = DefaultMaxRunning
	}
	if c.MaxQueued < 0 || c.AdmissionPolicy == PolicyReject {
		c.MaxQueued = 0
	}
	if c.EventMaxAge <= 0 {
		c.EventMaxAge = DefaultEventMaxAge
	}
	if c.EventMaxBytes <= 0 {
		c.EventMaxBytes = DefaultEventMaxBytes
	}
	return c
}

// Assets is a set of streams and consumers. Buckets and object stores are the
// streams behind them.
type Assets struct {
	Streams   []api.StreamConfig
	Consumers []Consumer
}

// Consumer is a durable consumer of a stream.
type Consumer struct {
	Stream string
	Config api.ConsumerConfig
}

// Only returns the assets of the named streams with their consumers. A service
// verifies those that it uses, because it may have no right to look at others.
func (a Assets) Only(streams ...string) Assets {
	var b Assets
	for _, s := range a.Streams {
		if slices.Contains(streams, s.Name) {
			b.Streams = append(b.Streams, s)
		}
	}
	for _, c := range a.Consumers {
		if slices.Contains(streams, c.Stream) {
			b.Consumers = append(b.Consumers, c)
		}
	}
	return b
}

// ObjectStream is the stream behind an object store.
func ObjectStream(store string) string { return "OBJ_" + store }

// Desired returns every asset of a deployment.
func Desired(cfg Config) Assets {
	cfg = cfg.withDefaults()
	n := cfg.Names

	work := stream(cfg, n.WorkStream(), n.TaskRequests())
	work.Description = "Bounded queue of task requests; a request leaves when its task has ended."
	work.Retention = api.LimitsPolicy
	work.Discard = api.DiscardNew
	work.MaxMsgs = int64(cfg.MaxRunning + cfg.MaxQueued)
	pools := []contract.Pool{contract.DefaultPool}
	for _, name := range slices.Sorted(maps.Keys(cfg.Pools)) {
		pools = append(pools, name)
		work.MaxMsgs += int64(cfg.Pools[name])
	}
	work.MaxMsgsPer = 1
	work.DiscardNewPer = true
	work.MaxMsgSize = contract.MaxRequestBytes + headerRoom

	grants := stream(cfg, n.GrantStream(), n.TaskGrants(""))
	grants.Description = "Grants for executors."
	grants.Retention = api.WorkQueuePolicy
	grants.Discard = api.DiscardNew
	grants.MaxMsgs = maxGrants
	grants.MaxMsgSize = contract.MaxGrantBytes + headerRoom

	events := stream(cfg, n.EventStream(), n.AllEvents())
	events.Description = "All events."
	events.MaxAge = cfg.EventMaxAge
	events.MaxBytes = cfg.EventMaxBytes
	events.Duplicates = min(DedupeWindow, cfg.EventMaxAge)

	dead := stream(cfg, n.DeadStream(), n.AllDead())
	dead.Description = "What could not be processed, with the reason."
	dead.MaxAge = deadMaxAge
	dead.MaxBytes = min(deadMaxBytes, cfg.EventMaxBytes)

	blobs := stream(cfg, ObjectStream(n.BlobStore()), "$O."+n.BlobStore()+".C.>", "$O."+n.BlobStore()+".M.>")
	blobs.Description = "Payloads and results that are too large for a message."
	blobs.Discard = api.DiscardNew
	blobs.MaxAge = blobMaxAge
	blobs.RollupAllowed = true

	streams := []api.StreamConfig{
		work,
		bucket(cfg, n.TaskBucket(), "Task records, leases, cancellations, the admission leader and its limits."),
		bucket(cfg, n.RunBucket(), "Runs of lead agents."),
		grants, events, dead, blobs,
		bucket(cfg, n.AgentBucket(), "Definitions of sub-agents that administrators made."),
	}

	var advisories []string
	for _, s := range streams {
		advisories = append(advisories,
			"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES."+s.Name+".>",
			"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED."+s.Name+".>")
	}
	adv := stream(cfg, n.AdvisoryStream(), advisories...)
	adv.Description = "What JetStream says about deliveries that got stuck."
	adv.MaxAge = advisoryMaxAge
	adv.MaxBytes = min(advisoryMaxByte, cfg.EventMaxBytes)
	streams = append(streams, adv)

	var consumers []Consumer
	for _, pool := range pools {
		consumers = append(consumers, Consumer{Stream: n.GrantStream(), Config: api.ConsumerConfig{
			Durable:       n.GrantConsumer(pool),
			Name:          n.GrantConsumer(pool),
			Description:   "Executors of a pool share it.",
			DeliverPolicy: api.DeliverAll,
			ReplayPolicy:  api.ReplayInstant,
			FilterSubject: n.TaskGrants(pool),
			AckPolicy:     api.AckExplicit,
			AckWait:       GrantAckWait,
			MaxDeliver:    -1,
			MaxAckPending: -1,
			MaxWaiting:    grantMaxWaiting,
			MemoryStorage: cfg.MemoryStorage,
		}})
	}
	return Assets{
		Streams: streams,
		Consumers: append(consumers, Consumer{Stream: n.EventStream(), Config: api.ConsumerConfig{
			Durable:       n.SinkConsumer(),
			Name:          n.SinkConsumer(),
			Description:   "The event sink.",
			DeliverPolicy: api.DeliverAll,
			ReplayPolicy:  api.ReplayInstant,
			FilterSubject: n.AllEvents(),
			AckPolicy:     api.AckExplicit,
			AckWait:       SinkAckWait,
			MaxDeliver:    -1,
			MaxAckPending: SinkMaxAckPending,
			MemoryStorage: cfg.MemoryStorage,
		}}),
	}
}

// stream returns what all our streams share. Every limit is said, also where
// it is the server's default, so that drift can be told from silence.
func stream(cfg Config, name string, subjects ...string) api.StreamConfig {
	storage := api.FileStorage
	if cfg.MemoryStorage {
		storage = api.MemoryStorage
	}
	return api.StreamConfig{
		Name:         name,
		Subjects:     subjects,
		Retention:    api.LimitsPolicy,
		Discard:      api.DiscardOld,
		Storage:      storage,
		Replicas:     cfg.Replicas,
		MaxConsumers: -1,
		MaxMsgs:      -1,
		MaxMsgsPer:   -1,
		MaxBytes:     -1,
		MaxMsgSize:   -1,
		Duplicates:   DedupeWindow,
		AllowDirect:  true,
	}
}

// bucket returns the stream behind a key-value bucket: made by hand, because
// only so all of its settings can be declared and compared.
func bucket(cfg Config, name, description string) api.StreamConfig {
	s := stream(cfg, contract.KVStream(name), contract.KVSubject(name, ">"))
	s.Description = description
	s.MaxMsgsPer = 1
	s.Discard = api.DiscardNew
	s.RollupAllowed = true
	s.DenyDelete = true
	s.AllowMsgTTL = true
	s.SubjectDeleteMarkerTTL = MarkerTTL
	return s
}
