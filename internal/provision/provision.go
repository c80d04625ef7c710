package provision

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/jsm.go/api"
	"github.com/nats-io/nats.go"
)

// Errors of this package.
var (
	// ErrNoJetStream: the server, or our account on it, has no JetStream.
	ErrNoJetStream = errors.New("JetStream is not enabled")
	// ErrNoQuorum: a cluster has too few servers left to store anything.
	ErrNoQuorum = errors.New("no quorum, nothing can be stored")
	// ErrServerTooOld: the server's JetStream API lacks what an asset needs.
	ErrServerTooOld = errors.New("the server is too old")
	// ErrNotInPlace: an asset exists with settings that the server cannot change
	// on it. Nothing was changed.
	ErrNotInPlace = errors.New("existing assets cannot be changed in place")
	// ErrUnsafe: an asset is missing or has settings with which a service must
	// not work.
	ErrUnsafe = errors.New("streams and buckets are not as they must be")
)

// requestTimeout bounds one request; making a replicated stream takes a while.
const requestTimeout = 10 * time.Second

// maxRounds bounds how often Apply looks again, when others provision as well.
const maxRounds = 4

// Plan compares the assets with the server and returns what differs, streams
// first. It changes nothing. Assets of the server that are not in a are no
// difference.
func Plan(ctx context.Context, nc *nats.Conn, a Assets) ([]Change, error) {
	if err := checkLevel(ctx, nc, a); err != nil {
		return nil, err
	}
	steps, err := plan(ctx, nc, a)
	return changesOf(steps), err
}

// Apply makes the server have the assets and returns what it changed. It may
// run any number of times, also at once from several places. If anything cannot
// be changed in place it changes nothing and returns the plan with
// [ErrNotInPlace].
func Apply(ctx context.Context, nc *nats.Conn, a Assets) ([]Change, error) {
	if err := checkLevel(ctx, nc, a); err != nil {
		return nil, err
	}
	var done []Change
	for range maxRounds {
		steps, err := plan(ctx, nc, a)
		if err != nil {
			return done, err
		}
		if len(steps) == 0 {
			return done, nil
		}
		if err := refuse(steps); err != nil {
			return changesOf(steps), err
		}
		for _, s := range steps {
			err := s.apply(ctx, nc)
			// Somebody else made or changed it at the same time: look again.
			if hasCode(err, codeStreamNameInUse, codeConsumerExists) {
				break
			}
			if err != nil {
				return done, fmt.Errorf("provision %s %s: %w", s.Kind, s.Name, explain(err))
			}
			done = append(done, s.Change)
		}
	}
	steps, err := plan(ctx, nc, a)
	if err == nil && len(steps) > 0 {
		err = fmt.Errorf("provision: still different after %d rounds; does another program provision with other settings? %s", maxRounds, steps[0])
	}
	return done, err
}

// Verify checks the assets for a service that is about to use them. The error
// says what makes work unsafe: something is missing, or has another retention,
// discard policy or flag. What differs otherwise (sizes, ages, numbers) comes
// back as warnings. It needs the rights to see these assets and nothing else.
func Verify(ctx context.Context, nc *nats.Conn, a Assets) (warnings []Change, err error) {
	steps, err := plan(ctx, nc, a)
	if err != nil {
		return nil, err
	}
	var bad []string
	for _, s := range steps {
		if !s.Unsafe() {
			warnings = append(warnings, s.Change)
			continue
		}
		unsafe, rest := s.Change, s.Change
		unsafe.Fields, rest.Fields = nil, nil
		for _, f := range s.Fields {
			if f.Unsafe {
				unsafe.Fields = append(unsafe.Fields, f)
			} else {
				rest.Fields = append(rest.Fields, f)
			}
		}
		bad = append(bad, unsafe.String())
		if !s.Missing && len(rest.Fields) > 0 {
			warnings = append(warnings, rest)
		}
	}
	if len(bad) > 0 {
		return warnings, fmt.Errorf("%w: %s; run `herdgate provision` (with --dry-run to look first)", ErrUnsafe, strings.Join(bad, "; "))
	}
	return warnings, nil
}

// step is a change with what is needed to make it.
type step struct {
	Change
	subject string
	body    any
}

func changesOf(steps []step) []Change {
	var out []Change
	for _, s := range steps {
		out = append(out, s.Change)
	}
	return out
}

func refuse(steps []step) error {
	var bad []string
	for _, s := range steps {
		if !s.InPlace() {
			bad = append(bad, s.String())
		}
	}
	if len(bad) == 0 {
		return nil
	}
	return fmt.Errorf("%w, and nothing was changed: %s; move its messages elsewhere and delete it yourself, or use another nats.prefix", ErrNotInPlace, strings.Join(bad, "; "))
}

func (s step) apply(ctx context.Context, nc *nats.Conn) error {
	var resp struct{ api.JSApiResponse }
	return request(ctx, nc, s.subject, s.body, &resp, &resp.JSApiResponse)
}

func plan(ctx context.Context, nc *nats.Conn, a Assets) ([]step, error) {
	var steps []step
	for _, cfg := range a.Streams {
		s, err := planStream(ctx, nc, cfg)
		if err != nil {
			return nil, fmt.Errorf("look at stream %s: %w", cfg.Name, err)
		}
		steps = append(steps, s...)
	}
	for _, c := range a.Consumers {
		s, err := planConsumer(ctx, nc, c)
		if err != nil {
			return nil, fmt.Errorf("look at consumer %s/%s: %w", c.Stream, c.Config.Durable, err)
		}
		steps = append(steps, s...)
	}
	return steps, nil
}

func planStream(ctx context.Context, nc *nats.Conn, cfg api.StreamConfig) ([]step, error) {
	want, err := toObject(cfg)
	if err != nil {
		return nil, err
	}
	have, err := load(ctx, nc, fmt.Sprintf(api.JSApiStreamInfoT, cfg.Name))
	ch := Change{Kind: KindStream, Name: cfg.Name}
	switch {
	case hasCode(err, codeStreamNotFound):
		ch.Missing, ch.Fields = true, wanted(KindStream, want)
		return []step{{ch, fmt.Sprintf(api.JSApiStreamCreateT, cfg.Name), want}}, nil
	case err != nil:
		return nil, err
	}
	if ch.Fields = compare(KindStream, have, want); len(ch.Fields) == 0 {
		return nil, nil
	}
	return []step{{ch, fmt.Sprintf(api.JSApiStreamUpdateT, cfg.Name), overlay(KindStream, have, want)}}, nil
}

func planConsumer(ctx context.Context, nc *nats.Conn, c Consumer) ([]step, error) {
	want, err := toObject(c.Config)
	if err != nil {
		return nil, err
	}
	subject := fmt.Sprintf(api.JSApiConsumerCreateWithNameT, c.Stream, c.Config.Durable)
	if c.Config.FilterSubject != "" {
		subject = fmt.Sprintf(api.JSApiConsumerCreateExT, c.Stream, c.Config.Durable, c.Config.FilterSubject)
	}
	body := func(cfg object, action string) any {
		return map[string]any{"stream_name": c.Stream, "config": cfg, "action": action}
	}
	have, err := load(ctx, nc, fmt.Sprintf(api.JSApiConsumerInfoT, c.Stream, c.Config.Durable))
	ch := Change{Kind: KindConsumer, Name: c.Stream + "/" + c.Config.Durable}
	switch {
	case hasCode(err, codeConsumerNotFound, codeStreamNotFound):
		ch.Missing, ch.Fields = true, wanted(KindConsumer, want)
		return []step{{ch, subject, body(want, "create")}}, nil
	case err != nil:
		return nil, err
	}
	if ch.Fields = compare(KindConsumer, have, want); len(ch.Fields) == 0 {
		return nil, nil
	}
	return []step{{ch, subject, body(overlay(KindConsumer, have, want), "update")}}, nil
}

// load reads the configuration of a stream or consumer. One whose leader does not
// see enough of the other copies to store anything is an error.
func load(ctx context.Context, nc *nats.Conn, subject string) (object, error) {
	var resp struct {
		api.JSApiResponse
		Config  json.RawMessage  `json:"config"`
		Cluster *api.ClusterInfo `json:"cluster"`
	}
	if err := request(ctx, nc, subject, nil, &resp, &resp.JSApiResponse); err != nil {
		return nil, err
	}
	if err := quorum(resp.Cluster); err != nil {
		return nil, err
	}
	return parseObject(resp.Config)
}

// unseen is for how long a copy must not have been heard of to count as gone. The
// copies talk to each other every second.
const unseen = 5 * time.Second

// quorum says whether the leader sees enough copies to store anything. The leader
// itself steps down only some 20 seconds after it has lost them; until then it
// answers what it is asked, and does not answer what it should store.
func quorum(c *api.ClusterInfo) error {
	if c == nil {
		return nil
	}
	copies, gone := 1, []string(nil)
	for _, p := range c.Replicas {
		if p.Pending {
			continue
		}
		copies++
		if p.Offline || p.Active > unseen {
			gone = append(gone, p.Name)
		}
	}
	if seen := copies - len(gone); seen <= copies/2 {
		return fmt.Errorf("%w: %d of %d copies are needed, and %s did not answer", ErrNoQuorum, copies/2+1, copies, strings.Join(gone, " and "))
	}
	return nil
}

// checkLevel compares what the assets need with what the server offers, so that
// an old server is named as the cause instead of one refused setting.
func checkLevel(ctx context.Context, nc *nats.Conn, a Assets) error {
	var resp struct {
		api.JSApiResponse
		api.JetStreamAccountStats
	}
	if err := request(ctx, nc, api.JSApiAccountInfo, nil, &resp, &resp.JSApiResponse); err != nil {
		return fmt.Errorf("ask for JetStream: %w", err)
	}
	return compareLevel(resp.API.Level, nc.ConnectedServerVersion(), a)
}

func compareLevel(have int, version string, a Assets) error {
	for _, s := range a.Streams {
		if err := requireLevel(s, "stream "+s.Name, have, version); err != nil {
			return err
		}
	}
	for _, c := range a.Consumers {
		if err := requireLevel(c.Config, "consumer "+c.Stream+"/"+c.Config.Durable, have, version); err != nil {
			return err
		}
	}
	return nil
}

func requireLevel(cfg any, what string, have int, version string) error {
	need, err := api.RequiredApiLevel(cfg)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if need > have {
		return fmt.Errorf("%w: %s needs JetStream API level %d, server %s has level %d; update nats-server", ErrServerTooOld, what, need, version, have)
	}
	return nil
}

// Error codes of the server that we act on.
const (
	codeNotEnabledForAccount = 10039
	codeNotEnabled           = 10076
	codeStreamNotFound       = 10059
	codeConsumerNotFound     = 10014
	codeStreamNameInUse      = 10058
	codeConsumerExists       = 10148
	codeReplicasNeedCluster  = 10074
	codeNoStorage            = 10047
	codeNoMemory             = 10028
	codeSubjectsOverlap      = 10065
)

func hasCode(err error, codes ...uint16) bool {
	var e api.ApiError
	if !errors.As(err, &e) {
		return false
	}
	for _, c := range codes {
		if e.ErrCode == c {
			return true
		}
	}
	return false
}

// explain adds to a refusal what a person can do about it.
func explain(err error) error {
	switch {
	case hasCode(err, codeReplicasNeedCluster):
		return fmt.Errorf("%w; nats.replicas above 1 needs a NATS cluster", err)
	case hasCode(err, codeNoStorage, codeNoMemory):
		return fmt.Errorf("%w; the stream reserves its max_bytes: give the server more storage (max_file_store, or the limit of the account)", err)
	case hasCode(err, codeSubjectsOverlap):
		return fmt.Errorf("%w; another stream takes the same subjects: remove it, or use another nats.prefix", err)
	}
	return err
}

func request(ctx context.Context, nc *nats.Conn, subject string, body, resp any, head *api.JSApiResponse) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var data []byte
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		data = b
	}
	msg, err := nc.RequestWithContext(ctx, subject, data)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("%w on server %s; start nats-server with -js", ErrNoJetStream, nc.ConnectedUrlRedacted())
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout):
		return fmt.Errorf("%s: no answer; does this user have the right to publish there, and has the cluster a leader? %w", subject, err)
	case err != nil:
		return fmt.Errorf("%s: %w", subject, err)
	}
	if err := json.Unmarshal(msg.Data, resp); err != nil {
		return fmt.Errorf("%s: the server's answer: %w", subject, err)
	}
	if head.Error == nil {
		return nil
	}
	if hasCode(*head.Error, codeNotEnabled, codeNotEnabledForAccount) {
		return fmt.Errorf("%w on server %s: %w", ErrNoJetStream, nc.ConnectedUrlRedacted(), *head.Error)
	}
	return *head.Error
}
