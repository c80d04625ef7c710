package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/oklog/ulid/v2"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/test/history"
)

var (
	chaosSeed   = flag.Uint64("chaos.seed", 0, "what TestChaos does; 0 is something else each time")
	chaosLength = flag.Duration("chaos.length", 3*time.Second, "how long TestChaos goes on")
)

func newSeed(t *testing.T) uint64 {
	seed := *chaosSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-chaos.seed=%d", seed)
	return seed
}

// I1 to I8, ADM-01, ADM-05, ADM-09, EXEC-03, EXEC-05, CANCEL-05: everything dies, pauses, is cut off
// and comes back as the seed plans it, the server included, while tasks of several
// tenants and threads are submitted and cancelled. Each accepted task ends once, in
// order, with a reason. -chaos.length makes it longer, -chaos.seed does the same again.
func TestChaos(t *testing.T) {
	t.Parallel()
	seed := newSeed(t)
	c := newChaos(t, seed, "", lanes)
	c.run(*chaosLength, 150*time.Millisecond)
	for _, w := range c.wrong {
		t.Error(w)
	}
	t.Log(c.report)
}

// chaos is a fleet with what happens to it.
type chaos struct {
	*Fleet
	*tally
	seed   uint64
	lanes  []lane
	crews  []*crew
	conn   *bus.Conn
	apis   []*client.Client
	heard  *heard
	report string

	accepted map[contract.TaskID]order
	doubtful int                        // submissions without an answer
	refused  map[string]int             // by code
	told     map[contract.TaskID]string // what somebody who cancelled was told about the end
}

const chaosSlots, chaosQueue = 4, 5000

// newChaos starts a fleet; mutant names what is broken in it.
func newChaos(t *testing.T, seed uint64, mutant string, lanes []lane) *chaos {
	lost := []string{"not_started", "always"}[seed%2]
	// All executors share the files, as they do on one machine.
	slower := strings.NewReplacer("echo found-it; pwd", "sleep 0.2; echo found-it", "rules:\n", "rules:\n  - match: \"half a second\"\n    turns: [{ delay_ms: 500, text: \"ok\" }]\n")
	f := NewFleet(t, slower.Replace(script), fmt.Sprintf(`executor: { drain_timeout_seconds: 1, retry_lost: %s }
subagent_runtime: { lease_ttl_seconds: 3, leader_ttl_seconds: 3, max_running: %d, max_queued: %d, queue_timeout_seconds: 900 }
`, lost, chaosSlots, chaosQueue))
	f.mutant = mutant
	c := &chaos{Fleet: f, tally: newTally(t), seed: seed, lanes: lanes, accepted: map[contract.TaskID]order{}, refused: map[string]int{}, told: map[contract.TaskID]string{}}
	c.conn = f.connect(t)
	c.heard = hear(t, c.conn)
	addrs := []string{f.addr, fmt.Sprintf("127.0.0.1:%d", freePort(t))}
	for _, l := range lanes {
		if l.crew == "nats-server" {
			continue
		}
		var flags func(int) []string
		if l.crew == "lead" {
			flags = func(i int) []string { return []string{"--http-addr", addrs[i]} }
		}
		cr := f.crew(c.tally, l.crew, l.procs, flags)
		cr.conn = c.conn
		c.crews = append(c.crews, cr)
	}
	for _, addr := range addrs {
		api, err := client.New("http://"+addr, "", &http.Client{Transport: &http.Transport{}, Timeout: 2 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		c.apis = append(c.apis, api)
	}
	f.ready()
	return c
}

// run lets happen what is planned, waits until all is at rest, and judges.
func (c *chaos) run(length, gap time.Duration) {
	began := time.Now()
	stop := make(chan struct{})
	var work, harm sync.WaitGroup
	work.Go(func() { c.submitAll(stop, gap) })
	for i, cr := range c.crews {
		harm.Go(func() { cr.live(c.lanes[i].planned(c.seed, length), began.Add(length)) })
	}
	harm.Go(func() { c.serve(c.tally, c.lanes[len(c.crews)].planned(c.seed, length), began.Add(length)) })
	harm.Wait()
	lasted := time.Since(began)
	close(stop)
	work.Wait()
	c.settle()
	c.judgeAll(lasted)
}

// submitAll submits tasks as planned, and cancels some, until stop is closed.
func (c *chaos) submitAll(stop <-chan struct{}, gap time.Duration) {
	next := orders(c.seed, gap)
	var all sync.WaitGroup
	defer all.Wait()
	for {
		o := next()
		select {
		case <-stop:
			return
		case <-time.After(o.After):
		}
		// One after the other, so that the order of the queue is that of the plan.
		id, ok := c.submitOne(o)
		if ok && o.Stop != never {
			all.Go(func() { c.cancelOne(id, o) })
		}
	}
}

func (c *chaos) submitOne(o order) (contract.TaskID, bool) {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	var id contract.TaskID
	if o.Lead >= 0 {
		acc, err := c.apis[o.Lead].SubmitTask(ctx, wire.TaskRequest{SubagentType: "general-purpose", Prompt: o.Prompt, ThreadID: o.Thread})
		var e *client.Error
		c.mu.Lock()
		defer c.mu.Unlock()
		switch {
		case errors.As(err, &e):
			c.refused[fmt.Sprint(e.Status, " ", e.Code)]++
			return "", false
		case err != nil:
			c.doubtful++ // it may have been accepted all the same
			return "", false
		}
		c.accepted[acc.TaskID] = o
		return acc.TaskID, true
	}
	name := strings.ToLower(ulid.Make().String())
	req := contract.TaskRequest{
		ContractVersion: contract.Version, TaskID: contract.TaskID("t_" + name), RunID: contract.RunID("r_" + name), ThreadID: contract.ThreadID(o.Thread),
		Tenant: contract.Tenant(o.Tenant), Prompt: o.Prompt, Description: o.Prompt, CreatedAt: time.Now().UTC(), ParentModel: "offline",
		Subagent: contract.Subagent{Name: "general-purpose", MaxTurns: 10, TimeoutSeconds: 60},
		Identity: contract.Identity{UserID: contract.DefaultUser, IsSubagent: true},
	}
	data, err := req.Encode()
	if err != nil {
		c.problem("a request of the test: %v", err)
		return "", false
	}
	id = req.TaskID
	for { // the same again is harmless
		_, err := c.conn.Publish(ctx, bus.Write{Subject: c.conn.Names.TaskRequest(req.Tenant, id), Data: data, MsgID: string(id)})
		switch {
		case err == nil, errors.Is(err, bus.ErrExists):
			c.mu.Lock()
			c.accepted[id] = o
			c.mu.Unlock()
			return id, true
		case ctx.Err() != nil:
			c.problem("a request could not be published for %v: %v", Timeout, err)
			return "", false
		}
		<-time.After(50 * time.Millisecond)
	}
}

// cancelOne cancels a task when it is planned, or a while later: what the test hears
// of a task may be lost with the server.
func (c *chaos) cancelOne(id contract.TaskID, o order) {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	switch o.Stop {
	case begun, ending:
		c.heard.wait(ctx, id, contract.EventTaskStarted, Timeout/2)
	case afterIt:
		c.heard.wait(ctx, id, contract.EventTaskCompleted, Timeout/2)
	}
	<-time.After(o.Wait)
	for ctx.Err() == nil {
		var err error
		if o.Via >= 0 {
			var e *client.Error
			if err = c.apis[o.Via].CancelTask(ctx, id); errors.As(err, &e) && e.Code == "already_finished" {
				c.mu.Lock()
				c.told[id] = e.FinishedStatus
				c.mu.Unlock()
				return
			}
		} else {
			_, err = c.conn.Publish(ctx, bus.Write{Subject: c.conn.KV(contract.CancelKey(id)), Data: []byte(`{}`), TTL: time.Hour})
		}
		if err == nil {
			return
		}
		<-time.After(200 * time.Millisecond)
	}
}

// heard is the events of tasks as they pass by, without any promise.
type heard struct {
	mu      sync.Mutex
	seen    map[contract.EventSubject]bool
	changed chan struct{}
}

func hear(t *testing.T, conn *bus.Conn) *heard {
	h := &heard{seen: map[contract.EventSubject]bool{}, changed: make(chan struct{})}
	_, err := conn.NC.Subscribe(conn.Names.AllEvents(), func(m *nats.Msg) {
		e, err := conn.Names.ParseEvent(m.Subject)
		if err != nil {
			return
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.seen[contract.EventSubject{Task: e.Task, Type: e.Type}] = true
		close(h.changed)
		h.changed = make(chan struct{})
	})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// wait returns when an event was heard, or has not been for too long.
func (h *heard) wait(ctx context.Context, id contract.TaskID, typ contract.EventType, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		h.mu.Lock()
		seen, changed := h.seen[contract.EventSubject{Task: id, Type: typ}], h.changed
		h.mu.Unlock()
		if seen {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// standstill is how long nothing may happen in a queue that is not empty.
const standstill = 30 * time.Second

// settle waits until nothing is under way any more: a request leaves the queue when
// all that belongs to its task is stored.
func (c *chaos) settle() {
	left, since := uint64(0), time.Now()
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		s, err := c.conn.JS.Stream(ctx, c.conn.Names.WorkStream())
		cancel()
		if err == nil {
			n := s.CachedInfo().State.Msgs
			if n == 0 {
				return
			}
			if n != left {
				left, since = n, time.Now()
			}
		}
		if time.Since(since) > standstill {
			c.problem("I8 crash: %d tasks are left in the queue, and for %v nothing has happened; %v", left, standstill, err)
			return
		}
		<-time.After(50 * time.Millisecond)
	}
}

// judgeAll looks for everything that should never have happened, and reports.
func (c *chaos) judgeAll(lasted time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	past, err := history.Read(ctx, c.conn)
	if err != nil {
		c.problem("the event stream cannot be read: %v", err)
		return
	}
	found, err := c.recorder.Check(ctx, invariant.Options{MaxRunning: chaosSlots, MaxStored: chaosSlots + chaosQueue, Settled: true})
	if err != nil {
		c.problem("the history cannot be judged: %v", err)
	}
	for _, v := range found {
		c.problem("%v", v)
	}
	c.sameInStore(past)
	records, err := c.records(ctx)
	if err != nil {
		c.problem("the records cannot be read: %v", err)
		return
	}
	outcomes, again, lost := c.compare(past, records)
	led := 0
	for _, p := range c.crews[0].ever {
		led += strings.Count(p.out.String(), "leading the gate")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "chaos for %v, -chaos.seed=%d, retry_lost %s\n", lasted.Round(time.Second), c.seed, []string{"not_started", "always"}[c.seed%2])
	total := 0
	for _, k := range slices.Sorted(maps.Keys(c.faults)) {
		fmt.Fprintf(&b, "  %4d  %s\n", c.faults[k], k)
		total += c.faults[k]
	}
	fmt.Fprintf(&b, "  %4d  faults in all\n", total)
	fmt.Fprintf(&b, "tasks: %d accepted, %d without an answer, refused %v; %d with events\n", len(c.accepted), c.doubtful, c.refused, len(records))
	for _, k := range slices.Sorted(maps.Keys(outcomes)) {
		fmt.Fprintf(&b, "  %4d  %s\n", outcomes[k], k)
	}
	fmt.Fprintf(&b, "%d fail-overs of the gate, %d attempts lost, %d granted again\n%d events, %d violations", max(0, led-1), lost, again, len(past), len(c.wrong))
	c.report = b.String()
}

// sameInStore compares what the event store holds with the stream.
func (c *chaos) sameInStore(past []contract.EventRecord) {
	const query = `SELECT seq, event_id FROM events ORDER BY seq`
	var rows [][]any
	limit := time.Now().Add(Timeout)
	for {
		if rows = c.rows(c.Fleet.t, query); len(rows) >= len(past) || time.Now().After(limit) {
			break
		}
		<-time.After(50 * time.Millisecond)
	}
	for i := range max(len(rows), len(past)) {
		switch {
		case i >= len(rows):
			c.problem("I6 events: %s: event %s is not in the store", past[i].TaskID, past[i].EventID)
		case i >= len(past):
			c.problem("I6 events: the store has one more: %v", rows[i])
		case rows[i][0] != int64(past[i].Seq) || rows[i][1] != past[i].EventID:
			c.problem("I6 events: the store has %v where the stream has %d %s", rows[i], past[i].Seq, past[i].EventID)
		default:
			continue
		}
		return
	}
}

// records reads the records of all tasks.
func (c *chaos) records(ctx context.Context) (map[contract.TaskID]contract.TaskRecord, error) {
	out := map[contract.TaskID]contract.TaskRecord{}
	whole := errors.New("read")
	err := c.conn.Watch(ctx, bus.Watch{Stream: c.conn.TaskStream(), Subjects: []string{c.conn.KV("task.*")}, LastPerSubject: true}, func(m bus.Message, pending uint64) error {
		rec, err := contract.DecodeTaskRecord(m.Data)
		if err != nil {
			return err
		}
		out[rec.TaskID] = rec
		if pending == 0 {
			return whole
		}
		return nil
	})
	if errors.Is(err, whole) {
		err = nil
	}
	return out, err
}

// compare holds the records against what was told: to all by events, and to those
// who submitted and cancelled.
func (c *chaos) compare(past []contract.EventRecord, records map[contract.TaskID]contract.TaskRecord) (outcomes map[string]int, again, lost int) {
	ends := map[contract.TaskID]string{}
	for _, e := range past {
		if e.EventType != contract.RecordEnd {
			continue
		}
		var end struct {
			Status string `json:"status"`
		}
		if err := json.Unmarshal(e.Content, &end); err != nil {
			c.problem("I6 events: %s: its end cannot be read: %v", e.TaskID, err)
		}
		ends[e.TaskID] = end.Status
	}
	outcomes = map[string]int{}
	for _, id := range slices.Sorted(maps.Keys(records)) {
		rec := records[id]
		key := string(rec.State)
		if rec.ErrorCode != "" {
			key += ", " + string(rec.ErrorCode)
		}
		outcomes[key]++
		again += max(0, rec.Attempt-1)
		lost += rec.Lost
		switch {
		case !rec.State.Terminal():
			c.problem("I8 crash: %s: at rest, its record is %s, attempt %d in slot %d", id, rec.State, rec.Attempt, rec.Slot)
		case ends[id] != string(rec.State):
			c.problem("I4 one end: %s: its record says %s %s, by %s, and its event %q", id, rec.State, rec.Error, rec.Writer, ends[id])
		case rec.State == contract.StateFailed && rec.ErrorCode == contract.ErrInternal && strings.Contains(rec.Error, "crashed executors"):
			// It met executors that were killed, twice.
		case rec.State == contract.StateFailed && rec.ErrorCode != contract.ErrExecutorLost:
			c.problem("%s failed for no reason that there was: %s: %s", id, rec.ErrorCode, rec.Error)
		case rec.State == contract.StateTimedOut:
			c.problem("%s timed out: %s", id, rec.Error)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(c.accepted)) {
		rec, ok := records[id]
		switch {
		case !ok:
			c.problem("I4 one end: %s: it was accepted, and there is no record of it", id)
		case rec.State == contract.StateCancelled && c.accepted[id].Stop == never:
			c.problem("%s was cancelled, and nobody wanted that", id)
		case c.told[id] != "" && c.told[id] != string(rec.State):
			c.problem("CANCEL: %s: who cancelled it was told that it had %s; it is %s", id, c.told[id], rec.State)
		}
	}
	return outcomes, again, lost
}

// F-014, F-020, I4, I6, I8: two leads die, pause, are cut off and leave as planned,
// while runs delegate. Every run that was begun completes, told once, with each of its
// tasks run once and counted once.
func TestLeadChaos(t *testing.T) {
	t.Parallel()
	seed := newSeed(t)
	f := NewFleet(t, strings.ReplaceAll(script, "echo found-it; pwd", "sleep 0.3; echo found-it"),
		"executor: { drain_timeout_seconds: 1 }\nsubagent_runtime: { lease_ttl_seconds: 3, leader_ttl_seconds: 3, max_running: 8 }\n")
	f.service("admission")
	f.service("executor")
	f.service("eventsink")
	y := newTally(t)
	addrs := []string{f.addr, fmt.Sprintf("127.0.0.1:%d", freePort(t))}
	leads := f.crew(y, "lead", 2, func(i int) []string { return []string{"--http-addr", addrs[i]} })
	f.ready()
	var apis []*client.Client
	for _, addr := range addrs {
		api, err := client.New("http://"+addr, "", &http.Client{Transport: &http.Transport{}, Timeout: 5 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		apis = append(apis, api)
	}
	end := time.Now().Add(*chaosLength)
	var work sync.WaitGroup
	work.Go(func() {
		r := rand.New(rand.NewPCG(seed, 2))
		for time.Now().Before(end) {
			// One that gets no answer may have begun all the same.
			_, _ = apis[r.IntN(2)].StartRun(deadline(t), wire.RunRequest{Input: "please delegate"})
			<-time.After(time.Duration(r.IntN(250)) * time.Millisecond)
		}
	})
	l := lane{"lead", 2, 250 * time.Millisecond, []kind{killed, killed, drained, drained, napped, slept, cut, lagged, parted, muted}, nil}
	leads.live(l.planned(seed, *chaosLength), end)
	work.Wait()
	for _, w := range y.wrong {
		t.Error(w)
	}
	f.ready()
	past := f.judge(t, invariant.Options{MaxRunning: 8})
	runs, starts := 0, map[contract.RunID]int{}
	for _, e := range past {
		if e.EventType == contract.RecordStart {
			starts[e.RunID]++
		}
	}
	for _, e := range past {
		if e.EventType != contract.RecordRunStarted {
			continue
		}
		runs++
		var run wire.Run
		eventually(t, func() (bool, string) {
			var err error
			run, err = f.API.GetRun(deadline(t), e.RunID)
			return err == nil && run.Status.Terminal(), fmt.Sprint(err)
		})
		// 2 turns of the lead and 2 of each task: 15 + 25 + 4 × 4. A turn of the
		// lead whose answer died with it is not counted; its tasks are.
		if run.Status != contract.RunCompleted || len(run.Delegations) != 2 || strings.Count(*run.Output, "found-it") != 2 || run.Usage.TotalTokens != 56 || starts[run.RunID] != 2 {
			t.Errorf("%d tasks were started for run %+v", starts[run.RunID], run)
		}
	}
	t.Logf("%d runs; faults %v", runs, y.faults)
	if runs == 0 {
		t.Error("no run was begun")
	}
}
