package e2e

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// What chaos does is planned before it begins, from the seed alone: the same seed
// plans the same. When exactly a fault meets what is under way is up to the machine.

// kind is a kind of fault.
type kind string

const (
	killed   kind = "killed"                    // kill -9, and started again
	drained  kind = "stopped in order"          // SIGTERM, and started again
	napped   kind = "paused, shorter than TTLs" // SIGSTOP, SIGCONT
	slept    kind = "paused, longer than TTLs"
	cut      kind = "line cut"              // closed, and refused for a while
	lagged   kind = "line frozen, shorter"  // nothing gets through, nothing is closed
	parted   kind = "line frozen, longer"   // longer than the TTLs
	muted    kind = "line mute, longer"     // hears, and is not heard until it is over
	fellAt   kind = "killed at a write"     // which was under way, and is lost
	sentAt   kind = "killed after a write"  // which arrives when its sender is dead
	lostAt   kind = "line cut at a write"   // which is lost
	lateAt   kind = "write late by a TTL"   // what was sent arrives when it is out of date
	crashed  kind = "server killed"         // and started again on what it had stored
	hiccuped kind = "server paused"         // answers are late
	hung     kind = "server paused, longer" // longer than the TTLs
)

// fault is one planned fault.
type fault struct {
	After time.Duration // the one before it in its lane
	Kind  kind
	Crew  string
	// Proc of the crew. Leader means whoever leads the gate then, instead.
	Proc   int
	Leader bool
	For    time.Duration
	// Write is what the subject of the write begins with at which it strikes.
	Write string
}

func (f fault) String() string {
	who := fmt.Sprintf("%s %d", f.Crew, f.Proc)
	if f.Leader {
		who = f.Crew + " leader"
	}
	s := fmt.Sprintf("%s: %s for %v", who, f.Kind, f.For)
	if f.Write != "" {
		s += " at " + f.Write
	}
	return s
}

// The writes at which chaos strikes, as they begin on the wire.
const (
	firstWrite = "PUB $KV.HG_TASKS.task."
	leaseWrite = "PUB $KV.HG_TASKS.lease."
	leaderKey  = "PUB $KV.HG_TASKS.leader"
	grantWrite = "PUB hg.v1.task.grant."
	eventWrite = "PUB hg.v1.event."
	request    = "PUB hg.v1.task.request."
	removal    = "PUB $JS.API.STREAM.MSG.DELETE."
	ack        = "PUB $JS.ACK."
)

// lane is what happens to one crew: one fault after another, beside those of other
// lanes. Faults come in shuffled rounds, so that each kind comes once a round.
type lane struct {
	crew  string
	procs int
	gap   time.Duration // between two faults, on average
	kinds []kind
	// writes are those at which it may be struck.
	writes []string
}

var lanes = []lane{
	{"admission", 3, 900 * time.Millisecond, []kind{killed, drained, napped, slept, cut, lagged, parted, muted, muted, fellAt, sentAt, lostAt, lostAt, lateAt},
		[]string{firstWrite, firstWrite, leaderKey, grantWrite, eventWrite, removal}},
	{"executor", 3, 700 * time.Millisecond, []kind{killed, drained, napped, slept, cut, lagged, parted, muted, fellAt, fellAt, sentAt, lostAt, lateAt},
		[]string{leaseWrite, firstWrite, eventWrite}},
	{"eventsink", 1, 1500 * time.Millisecond, []kind{killed, drained, napped, slept, cut, lagged, parted, fellAt, lostAt}, []string{ack}},
	{"lead", 2, 1200 * time.Millisecond, []kind{killed, drained, napped, slept, cut, lagged, parted, muted, fellAt, sentAt, lostAt}, []string{request}},
	{"nats-server", 1, 9 * time.Second, []kind{crashed, hiccuped, hung}, nil},
}

// lasts is how long a kind of fault lasts, at least and at most. Leases and the
// leader's key live 3 s.
func (k kind) lasts() (from, to time.Duration) {
	const ms = time.Millisecond
	switch k {
	case napped, lagged, hiccuped:
		return 50 * ms, 2000 * ms
	case slept, parted, muted, lateAt:
		return 3500 * ms, 5500 * ms
	case hung:
		return 3200 * ms, 4200 * ms
	case cut, crashed:
		return 50 * ms, 2500 * ms
	case lostAt:
		return 50 * ms, 1500 * ms
	}
	return 0, 0
}

func (k kind) strikes() bool { return slices.Contains([]kind{fellAt, sentAt, lostAt, lateAt}, k) }

// planned returns the faults of a lane up to the length of the whole.
func (l lane) planned(seed uint64, length time.Duration) []fault {
	h := fnv.New64a()
	h.Write([]byte(l.crew))
	r := rand.New(rand.NewPCG(seed, h.Sum64()))
	var out []fault
	var deck []kind
	if len(l.kinds) == 0 {
		return nil
	}
	for at := time.Duration(0); ; {
		if len(deck) == 0 {
			deck = slices.Clone(l.kinds)
			r.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		}
		f := fault{After: upTo(r, 2*l.gap), Kind: deck[0], Crew: l.crew, Proc: r.IntN(l.procs), Leader: l.crew == "admission" && (r.IntN(4) > 0 || deck[0].strikes())}
		deck = deck[1:]
		from, to := f.Kind.lasts()
		f.For = from + upTo(r, to-from)
		if f.Kind.strikes() {
			f.Write = l.writes[r.IntN(len(l.writes))]
		}
		if at += f.After + f.For; at > length && len(out) > 0 {
			return out
		}
		out = append(out, f)
	}
}

func upTo(r *rand.Rand, d time.Duration) time.Duration {
	return time.Duration(r.Int64N(int64(d)+1)) / time.Millisecond * time.Millisecond
}

// order is one planned task.
type order struct {
	After  time.Duration // the one before it
	Tenant string
	Thread string
	Prompt string
	// Lead takes it, or nobody does and it is published; only the default tenant
	// has leads.
	Lead int
	// Stop is when it is cancelled.
	Stop stop
	// Wait goes by between that and the cancellation, Via is the lead that cancels.
	Wait time.Duration
	Via  int
}

type stop string

// When a task is cancelled.
const (
	never   stop = "never"
	queued  stop = "at once"
	begun   stop = "running"
	ending  stop = "racing the end"
	afterIt stop = "after the end"
)

// work is what the tasks of chaos do; the last part of a prompt is what the script
// goes by.
var work = map[string]time.Duration{"short": 30 * time.Millisecond, "a note": 250 * time.Millisecond, "half a second": 500 * time.Millisecond, "two seconds": 2 * time.Second}

// orders plans tasks; it goes on for ever.
func orders(seed uint64, gap time.Duration) func() order {
	r := rand.New(rand.NewPCG(seed, 2))
	prompts := []string{"short", "a note", "short", "two seconds", "a note", "short", "half a second", "two seconds"}
	tenants := []string{"default", "default", "default", "acme", "globex"}
	return func() order {
		o := order{
			After: upTo(r, 2*gap), Tenant: tenants[r.IntN(len(tenants))], Thread: fmt.Sprint("th_", r.IntN(6)),
			Prompt: prompts[r.IntN(len(prompts))], Lead: r.IntN(3) - 1, Stop: never, Via: r.IntN(3) - 1,
		}
		if o.Tenant != "default" {
			o.Lead, o.Via = -1, -1
		}
		switch r.IntN(16) {
		case 0:
			o.Stop = queued
		case 1:
			o.Stop, o.Wait = begun, upTo(r, work[o.Prompt]/2)
		case 2:
			o.Stop, o.Wait = ending, max(0, work[o.Prompt]-50*time.Millisecond+upTo(r, 100*time.Millisecond))
		case 3:
			if r.IntN(3) == 0 {
				o.Stop = afterIt
			}
		}
		return o
	}
}

func TestChaosPlan(t *testing.T) {
	t.Parallel()
	all := func(seed uint64) string {
		var b strings.Builder
		for _, l := range lanes {
			for _, f := range l.planned(seed, time.Minute) {
				fmt.Fprintln(&b, f.After, f)
			}
		}
		next := orders(seed, time.Second)
		for range 100 {
			fmt.Fprintln(&b, next())
		}
		return b.String()
	}
	first, again, other := all(1), all(1), all(2)
	if first != again {
		t.Error("the same seed planned something else")
	}
	if first == other {
		t.Error("two seeds planned the same")
	}
	// A minute or two are enough for every kind.
	for seed := range uint64(20) {
		plan := ""
		for _, l := range lanes {
			for _, f := range l.planned(seed, 80*time.Second) {
				plan += f.String() + "\n"
			}
		}
		for _, l := range lanes {
			for _, k := range l.kinds {
				if !strings.Contains(plan, string(k)) {
					t.Errorf("seed %d: %s: no %q in 80 s", seed, l.crew, k)
				}
			}
		}
	}
}
