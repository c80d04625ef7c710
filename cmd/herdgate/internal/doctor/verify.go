package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/stored"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// Verify says how events are compared with records and store.
type Verify struct {
	// Run, when not empty, leaves out what is not of this run, Since what is older.
	Run   contract.RunID
	Since time.Duration
	// Repair publishes the ends that are missing, from their records.
	Repair bool
	Past
}

// Finding is something that is wrong with the events.
type Finding struct {
	invariant.Violation
	RunID contract.RunID `json:"run_id,omitempty"`
	// Mended: the missing event is stored now. Otherwise Mend says what to do.
	Mended bool   `json:"mended"`
	Mend   string `json:"mend,omitempty"`
}

// Verified is the result of a comparison.
type Verified struct {
	OK bool `json:"ok"`
	History
	RunRecords int       `json:"run_records"`
	Findings   []Finding `json:"findings"`
	// StoreError is why the event store was not compared.
	StoreError string `json:"store_error,omitempty"`
}

// verifyRules are those that are about events.
var verifyRules = []string{invariant.OneEnd, invariant.Fence, invariant.Events, invariant.Contract}

// verifying is one comparison.
type verifying struct {
	Verify
	c   *bus.Conn
	now time.Time
	// What the subjects of the event stream say.
	runOf  map[string]contract.RunID // of each task
	ends   map[string]bool           // tasks and runs with an end
	queued map[string]bool           // tasks whose first event is there
	began  map[string]time.Time      // runs, first event
	tasks  map[contract.TaskID]contract.TaskRecord
	runs   map[contract.RunID]contract.RunRecord
	closed map[contract.RunID]bool // runs that no lead will care for any more
	first  time.Time               // of the stream
}

// VerifyEvents compares the event stream with the records of tasks and runs and with
// the event store. What is only under way is looked at again before it counts.
func VerifyEvents(ctx context.Context, c *bus.Conn, v Verify) (Verified, error) {
	if v.Looks < 1 {
		v.Looks = 4
	}
	if v.Pause <= 0 {
		v.Pause = 750 * time.Millisecond
	}
	reader := stored.NewReader(stored.Config{Bus: c, MaxEvents: v.MaxEvents, MaxRecords: v.MaxRecords, Store: true})
	var state *verifying
	var out Verified
	h, err := judge(ctx, v.Past, func(ctx context.Context) (*History, error) {
		state = &verifying{Verify: v, c: c, now: time.Now()}
		if err := state.records(ctx); err != nil { // before the events: what ends after is told after
			return nil, err
		}
		view, err := reader.Read(ctx)
		if err != nil {
			return nil, err
		}
		if err := state.subjects(ctx); err != nil {
			return nil, err
		}
		out.StoreError = ""
		if view.StoreError != nil {
			out.StoreError = view.StoreError.Error()
		}
		h := &History{Source: "nats", Events: view.Events, Records: view.Records, StoredTo: view.History.StoredTo, Unreadable: view.Unreadable}
		o := invariant.Options{}
		if !view.Whole {
			o.Since = view.Since
			h.Cut = "older events were not read, and tasks and runs that began before are not judged"
		}
		finish(h, &view.History, o)
		h.Violations = slices.DeleteFunc(h.Violations, func(x invariant.Violation) bool {
			_, known := state.tasks[contract.TaskID(x.Subject)]
			missing := known && !state.ends[x.Subject] && state.tasks[contract.TaskID(x.Subject)].State.Terminal()
			return missing || !slices.Contains(verifyRules, x.Rule)
		})
		h.Violations = append(h.Violations, state.missing()...)
		h.Violations = slices.DeleteFunc(h.Violations, func(x invariant.Violation) bool { return !state.wanted(x) })
		return h, nil
	})
	if err != nil {
		return out, err
	}
	out.History, out.RunRecords, out.Findings = *h, len(state.runs), []Finding{}
	out.OK = out.StoreError == ""
	for _, x := range h.Violations {
		f := Finding{Violation: x, RunID: state.runOfSubject(x.Subject)}
		f.Mended, f.Mend = state.mend(ctx, x)
		out.OK = out.OK && f.Mended
		out.Findings = append(out.Findings, f)
	}
	out.Violations = []invariant.Violation{}
	return out, nil
}

// records reads the newest record of each task and run.
func (v *verifying) records(ctx context.Context) error {
	v.tasks, v.runs, v.closed = map[contract.TaskID]contract.TaskRecord{}, map[contract.RunID]contract.RunRecord{}, map[contract.RunID]bool{}
	err := stored.Each(ctx, v.c, bus.Watch{Stream: v.c.TaskStream(), LastPerSubject: true, Subjects: []string{v.c.KV("task.*")}}, func(m bus.Message) error {
		if rec, err := contract.DecodeTaskRecord(m.Data); err == nil && !m.Deleted() {
			v.tasks[rec.TaskID] = invariant.Slim(rec)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("task records: %w", err)
	}
	for _, kind := range []string{contract.RunKey("*"), contract.RunLeaseKey("*")} {
		err := stored.Each(ctx, v.c, bus.Watch{Stream: v.c.RunStream(), LastPerSubject: true, Subjects: []string{v.c.RunKV(kind)}}, func(m bus.Message) error {
			if id, ok := strings.CutPrefix(m.Subject, v.c.RunKV(contract.RunLeaseKey(""))); ok {
				v.closed[contract.RunID(id)] = m.Header.Get("KV-Operation") == "DEL"
				return nil
			}
			if rec, err := contract.DecodeRunRecord(m.Data); err == nil && !m.Deleted() {
				rec.Messages, rec.Output, rec.Input = nil, "", ""
				v.runs[rec.RunID] = rec
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("run records: %w", err)
		}
	}
	return nil
}

// subjects reads what the subjects of all events say.
func (v *verifying) subjects(ctx context.Context) error {
	v.runOf, v.ends, v.queued, v.began, v.first = map[string]contract.RunID{}, map[string]bool{}, map[string]bool{}, map[string]time.Time{}, time.Time{}
	err := stored.Each(ctx, v.c, bus.Watch{Stream: v.c.Names.EventStream(), StartSeq: 1, Subjects: []string{v.c.Names.AllEvents()}, HeadersOnly: true}, func(m bus.Message) error {
		e, err := v.c.Names.ParseEvent(m.Subject)
		if err != nil {
			return nil //nolint:nilerr // not one of ours
		}
		if v.first.IsZero() {
			v.first = m.Time
		}
		id := string(e.Task)
		if id == "" {
			id = string(e.Run)
			if v.began[id].IsZero() {
				v.began[id] = m.Time
			}
		} else {
			v.runOf[id] = e.Run
		}
		v.ends[id] = v.ends[id] || e.Type.Terminal()
		v.queued[id] = v.queued[id] || e.Type == contract.EventTaskQueued
		return nil
	})
	if err != nil {
		return fmt.Errorf("events: %w", err)
	}
	return nil
}

// missing lists records without their last event, and runs without their record.
func (v *verifying) missing() []invariant.Violation {
	var out []invariant.Violation
	add := func(key, id, text string, at time.Time) {
		out = append(out, invariant.Violation{Rule: invariant.OneEnd, Subject: id, Text: text, Proof: []invariant.Evidence{{Source: invariant.FromBucket, What: "record", ID: key, At: at}}})
	}
	// An end that is older than the stream may have been told and be gone.
	kept := func(at *time.Time) bool {
		return at != nil && (v.first.IsZero() || at.After(v.first.Add(-time.Minute)))
	}
	for id, rec := range v.tasks {
		if rec.State.Terminal() && !v.ends[string(id)] && kept(rec.FinishedAt) {
			add(contract.TaskKey(id), string(id), fmt.Sprintf("its record says %s, and no event tells of it", rec.State), *rec.FinishedAt)
		}
	}
	for id, rec := range v.runs {
		if rec.Status.Terminal() && !v.ends[string(id)] && kept(rec.FinishedAt) {
			add(contract.RunKey(id), string(id), fmt.Sprintf("its record says %s, and no event tells of it", rec.Status), *rec.FinishedAt)
		}
	}
	for id, at := range v.began {
		if _, ok := v.runs[contract.RunID(id)]; !ok && !v.ends[id] {
			add(contract.RunKey(contract.RunID(id)), id, "its events have no end, and it has no record", at)
		}
	}
	slices.SortFunc(out, func(a, b invariant.Violation) int { return strings.Compare(a.Subject, b.Subject) })
	return out
}

func (v *verifying) runOfSubject(id string) contract.RunID {
	if rec, ok := v.tasks[contract.TaskID(id)]; ok {
		return rec.RunID
	}
	if run, ok := v.runOf[id]; ok {
		return run
	}
	if _, ok := v.runs[contract.RunID(id)]; ok || !v.began[id].IsZero() {
		return contract.RunID(id)
	}
	return ""
}

// wanted reports whether a finding was asked for.
func (v *verifying) wanted(x invariant.Violation) bool {
	if v.Run != "" && v.runOfSubject(x.Subject) != v.Run {
		return false
	}
	newest := time.Time{}
	for _, p := range x.Proof {
		if p.At.After(newest) {
			newest = p.At
		}
	}
	return v.Since <= 0 || newest.IsZero() || v.now.Sub(newest) <= v.Since
}

// mend stores a missing end, or says what else can be done.
func (v *verifying) mend(ctx context.Context, x invariant.Violation) (bool, string) {
	task, isTask := v.tasks[contract.TaskID(x.Subject)]
	run, isRun := v.runs[contract.RunID(x.Subject)]
	var key string
	switch {
	case strings.Contains(x.Text, "not in the store"), strings.Contains(x.Text, "otherwise than the stream"):
		return false, "what happened is in the stream and can be read there; a new store of the event sink is filled from the stream"
	case strings.Contains(x.Text, "that the stream does not have"):
		return false, "look whether somebody wrote into the database, or took it out of the stream; a newer event sink may also have stored what this program does not know"
	case v.ends[x.Subject], !isTask && !isRun:
		return false, "it cannot be mended from the records: keep the streams as they are and report it"
	case isTask && !task.State.Terminal(), isRun && !run.Status.Terminal():
		return false, "it has not ended; admission, or a lead, goes on with it"
	case isTask && !v.queued[x.Subject]:
		return false, "its first event is missing too, and only its request could tell that; start admission, which tells both if the request is still there"
	case isRun && !v.closed[run.RunID]:
		return false, "start a lead: it tells the messages that are missing, and then the end"
	case !v.Repair:
		return false, "--repair stores it, made from the record"
	case isTask:
		key = v.c.KV(contract.TaskKey(task.TaskID))
	default:
		key = v.c.RunKV(contract.RunKey(run.RunID))
	}
	if err := v.store(ctx, key, isTask); err != nil {
		return false, "it could not be stored: " + err.Error()
	}
	return true, ""
}

// store stores the end that a record tells of. Its id is made from the record, and it
// expects to be the first: whoever else stores it stores the same, and once.
func (v *verifying) store(ctx context.Context, key string, task bool) error {
	stream := v.c.RunStream()
	if task {
		stream = v.c.TaskStream()
	}
	m, err := v.c.Last(ctx, stream, key)
	if err != nil {
		return err
	}
	var ev envelope.Event
	if task {
		rec, derr := contract.DecodeTaskRecord(m.Data)
		if derr != nil {
			return derr
		}
		ev, err = event.Terminal(rec, source(rec.Writer, rec.Executor))
	} else {
		rec, derr := contract.DecodeRunRecord(m.Data)
		if derr != nil {
			return derr
		}
		ev, err = event.RunEnd(rec, "/herdgate/lead/"+rec.Owner)
	}
	if err != nil {
		return err
	}
	w, err := eventwrite.Of(v.c, ev)
	if err != nil {
		return err
	}
	w.Expect = bus.Seq(0)
	if _, err := v.c.Publish(ctx, w); err != nil && !errors.Is(err, bus.ErrConflict) {
		return err
	}
	_, err = v.c.Last(ctx, v.c.Names.EventStream(), w.Subject)
	return err
}

// source is that of a record's writer, an executor or admission.
func source(writer, executor string) string {
	if executor != "" && strings.HasPrefix(writer, executor+"-") {
		return "/herdgate/executor/" + executor
	}
	name, _, _ := strings.Cut(writer, "/")
	if i := strings.LastIndexByte(name, '-'); i > 0 {
		name = name[:i]
	}
	return "/herdgate/admission/" + name
}
