package doctor

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/stored"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Past says how the history is judged.
type Past struct {
	// MaxEvents bounds how many events are held at once, and MaxRecords how many
	// records; 0 takes the default of package stored.
	MaxEvents, MaxRecords int
	// ClockSkew is how far the clocks of the machines may be apart.
	ClockSkew time.Duration
	// Looks is how often a violation must be seen before it is one, and Pause the
	// time between; 0 takes 4 and 750 ms.
	Looks int
	Pause time.Duration
}

// History is what was read, and what is wrong with it.
type History struct {
	// Source is nats when the streams were read, or lead when only the events were,
	// through the lead's HTTP API.
	Source string `json:"source"`
	Events int    `json:"events"`
	Tasks  int    `json:"tasks"`
	Runs   int    `json:"runs"`
	// From and To are the times of the first and the last event.
	From *time.Time `json:"from"`
	To   *time.Time `json:"to"`
	// Cut says what was left out; empty when everything was read.
	Cut     string `json:"cut,omitempty"`
	Records int    `json:"records"`
	Grants  int    `json:"grants"`
	Waiting int    `json:"waiting"`
	Running int    `json:"running"`
	// StoredTo is the event up to which the event store was compared; 0 when it was not.
	StoredTo   uint64                `json:"stored_to"`
	Unreadable []string              `json:"unreadable,omitempty"`
	Violations []invariant.Violation `json:"violations"`
}

// DefaultEvents is how many events are held at once unless [Past] says otherwise.
const DefaultEvents = stored.DefaultEvents

// maxLookTime bounds one look at the history.
const maxLookTime = 2 * time.Minute

// history reads what is stored and judges it.
func (d *doctor) history(ctx context.Context) *History {
	p := *d.Past
	if p.Looks < 1 {
		p.Looks = 4
	}
	if p.Pause <= 0 {
		p.Pause = 750 * time.Millisecond
	}
	read := d.throughLead(p)
	if d.conn != nil {
		read = d.throughNATS(p)
	}
	bounded, cancel := d.refused.until(ctx)
	h, err := judge(bounded, p, read)
	cancel()
	if err != nil {
		if detail, mend := d.refused.of(); detail != "" {
			d.say(Fail, "history", "it cannot be read: "+detail, mend)
			return nil
		}
		d.say(Fail, "history", "it cannot be read: "+err.Error(), "start NATS or a lead, and see that this user may read the streams; --max-events reads less")
		return nil
	}
	detail := fmt.Sprintf("%d events of %d tasks and %d runs", h.Events, h.Tasks, h.Runs)
	if h.From != nil {
		detail += fmt.Sprintf(" from %s to %s", h.From.UTC().Format(time.RFC3339), h.To.UTC().Format(time.RFC3339))
	}
	if h.Source == "nats" {
		detail += fmt.Sprintf(", %d records, %d grants, %d running, %d waiting", h.Records, h.Grants, h.Running, h.Waiting)
		if h.StoredTo > 0 {
			detail += fmt.Sprintf(", the event store up to %d", h.StoredTo)
		} else {
			detail += ", without the event store"
		}
	} else {
		detail += ", through the lead"
	}
	if h.Cut != "" {
		detail += "; " + h.Cut
	}
	switch n := len(h.Violations); {
	case n > 0:
		d.say(Fail, "history", fmt.Sprintf("%d violations in %s", n, detail), "what is told below should never happen: keep the streams as they are and report it")
	case len(h.Unreadable) > 0:
		d.say(Warn, "history", fmt.Sprintf("no violation in %s; some messages cannot be read: %s", detail, strings.Join(h.Unreadable, "; ")), "see who publishes them; the dead letters may have the reason")
	default:
		d.say(OK, "history", "no violation in "+detail, "")
	}
	return h
}

// look reads once and judges what is there.
type look func(context.Context) (*History, error)

// judge looks until there is no violation, at most as often as p says. What is
// under way while it is read looks like one, and is gone at the next look; one that
// stays is one.
func judge(ctx context.Context, p Past, read look) (*History, error) {
	var suspects map[string]bool
	for n := 1; ; n++ {
		bounded, cancel := context.WithTimeout(ctx, maxLookTime)
		h, err := read(bounded)
		cancel()
		if err != nil {
			return nil, err
		}
		h.Violations = slices.DeleteFunc(h.Violations, func(v invariant.Violation) bool { return suspects != nil && !suspects[fingerprint(v)] })
		if len(h.Violations) == 0 || n == p.Looks {
			return h, nil
		}
		suspects = map[string]bool{}
		for _, v := range h.Violations {
			suspects[fingerprint(v)] = true
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(p.Pause):
		}
	}
}

// fingerprint tells violations apart by what proves them: texts may count on.
func fingerprint(v invariant.Violation) string {
	var b strings.Builder
	b.WriteString(v.Rule + "\x00" + v.Subject)
	for _, e := range v.Proof {
		fmt.Fprintf(&b, "\x00%s#%d", e.Source, e.Seq)
	}
	return b.String()
}

// throughNATS reads the streams themselves, which is the surest: nothing that any
// service makes of them comes between.
func (d *doctor) throughNATS(p Past) look {
	reader := stored.NewReader(stored.Config{Bus: d.conn, MaxEvents: p.MaxEvents, MaxRecords: p.MaxRecords, Store: true})
	return func(ctx context.Context) (*History, error) {
		v, err := reader.Read(ctx)
		if err != nil {
			return nil, err
		}
		h := &History{
			Source: "nats", Events: v.Events, Records: v.Records, Grants: v.Grants, Waiting: v.Waiting, Running: v.Live,
			StoredTo: v.History.StoredTo, Unreadable: v.Unreadable,
		}
		o := d.options(p)
		if l := v.Limits; l != nil {
			o.MaxRunning, o.LimitsSince = l.MaxRunning, v.LimitsSince.Add(p.ClockSkew)
			o.MaxStored = l.Capacity() + l.MaxQueued
			for name, n := range l.Pools {
				o.Pools[name] = invariant.Pool{MaxRunning: n, Limits: o.Pools[name].Limits}
			}
		}
		if v.Led {
			run := d.Env.Config.SubagentRuntime
			o.MovedWithin = time.Duration(run.LeaseTTLSeconds+run.LeaderTTLSeconds)*time.Second + 10*time.Second
		}
		if !v.Whole {
			o.Since = v.Since
			h.Cut = "older events were not read, and tasks and runs that began before are not judged"
			if v.StoreError != nil {
				h.Cut += " (the event store: " + v.StoreError.Error() + ")"
			}
		}
		if v.CutRecords {
			h.Cut = strings.TrimPrefix(h.Cut+"; there are more records than were read", "; ")
		}
		finish(h, &v.History, o)
		return h, nil
	}
}

// throughLead reads the events alone: the embedded server does not listen.
func (d *doctor) throughLead(p Past) look {
	if p.MaxEvents < 1 {
		p.MaxEvents = DefaultEvents
	}
	var past invariant.History
	var after uint64
	o := d.options(p)
	cut := ""
	began := false
	return func(ctx context.Context) (*History, error) {
		if !began {
			last, err := d.lastEvent(ctx)
			if err != nil {
				return nil, err
			}
			if n := uint64(p.MaxEvents); last > n { //nolint:gosec // positive
				after = last - n
				cut = "older events were not read, and tasks and runs that began before are not judged"
			}
			began = true
		}
		for {
			page, err := d.Client.ListEvents(ctx, client.EventQuery{Limit: wire.MaxEvents}, after)
			if err != nil {
				return nil, err
			}
			for _, e := range page.Events {
				past.Event(e)
				if cut != "" && o.Since.IsZero() {
					o.Since = e.CreatedAt
				}
			}
			if !page.HasMore || page.NextAfterSeq <= after || len(page.Events) == 0 {
				break
			}
			after = page.NextAfterSeq
		}
		// How many may run at once, and since when, is not told here: of the capacity
		// it only shows when two tasks had one slot.
		h := &History{Source: "lead", Events: past.Len(), Cut: cut}
		finish(h, &past, o)
		return h, nil
	}
}

// lastEvent is where the events end, or a little after: the API tells what comes
// after a number, so that the end is enclosed step by step.
func (d *doctor) lastEvent(ctx context.Context) (uint64, error) {
	after := func(seq uint64) (uint64, error) {
		page, err := d.Client.ListEvents(ctx, client.EventQuery{Limit: 1}, seq)
		if err != nil || len(page.Events) == 0 {
			return 0, err
		}
		return page.Events[0].Seq, nil
	}
	there, err := after(0)
	if there == 0 {
		return 0, err
	}
	gone := 2 * there // nothing comes after it, in the end
	for {
		next, err := after(gone)
		if err != nil {
			return 0, err
		}
		if next == 0 {
			break
		}
		there, gone = next, 2*next
	}
	for gone-there > 1 {
		mid := there + (gone-there)/2
		next, err := after(mid)
		switch {
		case err != nil:
			return 0, err
		case next == 0:
			gone = mid
		default:
			there = next
		}
	}
	return gone, nil
}

// keys are the keys that the configuration limits. By how much is not looked at: it
// may have been another number when the tasks were granted.
func keys(l config.RuntimeLimits) invariant.Limits {
	some := func(n int) int {
		if n > 0 {
			return math.MaxInt
		}
		return 0
	}
	out := invariant.Limits{PerTenant: some(l.PerTenant), PerThread: some(l.PerThread), PerType: map[string]int{}}
	for name, n := range l.PerType {
		out.PerType[name] = some(n)
	}
	return out
}

// options are what the configuration says.
func (d *doctor) options(p Past) invariant.Options {
	run := d.Env.Config.SubagentRuntime
	o := invariant.Options{ClockSkew: p.ClockSkew, Limits: keys(run.Limits), Pools: map[contract.Pool]invariant.Pool{}}
	for name, pool := range run.Pools {
		o.Pools[contract.Pool(name)] = invariant.Pool{Limits: keys(pool.Limits)}
	}
	return o
}

// finish judges and counts.
func finish(h *History, past *invariant.History, o invariant.Options) {
	h.Tasks, h.Runs = past.Tasks()
	if from, to := past.Span(); !from.IsZero() {
		h.From, h.To = &from, &to
	}
	h.Violations = past.Check(o)
	if h.Violations == nil {
		h.Violations = []invariant.Violation{}
	}
}
