package gate

import (
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
)

// history is what the world's task bucket has stored, for the checker that judges
// the histories of real systems as well.
func (w *world) history() invariant.History {
	var h invariant.History
	for _, r := range w.reigns {
		h.Bucket = append(h.Bucket, invariant.Revision{Seq: r.rev, Key: contract.LeaderKey})
	}
	for _, c := range w.log {
		r := invariant.Revision{Seq: c.seq}
		switch ev := c.ev.(type) {
		case RecordSeen:
			r.Key, r.Record = contract.TaskKey(ev.Record.TaskID), ev.Record
		case RecordPurged:
			r.Key, r.Deleted = contract.TaskKey(ev.TaskID), true
		case LeaseSeen:
			r.Key = contract.LeaseKey(ev.TaskID)
		case LeaseExpired:
			r.Key, r.Deleted = contract.LeaseKey(ev.TaskID), true
		case CancelSeen:
			r.Key = contract.CancelKey(ev.TaskID)
		}
		h.Bucket = append(h.Bucket, r)
	}
	return h
}

// judged checks the history so far. Nothing that was wrong after any step is put
// right by a later one, so that it need not be asked after each.
func (w *world) judged() {
	h := w.history()
	o := invariant.Options{MaxRunning: w.cfg.MaxRunning, Limits: invariant.Limits(w.cfg.Limits), Pools: map[contract.Pool]invariant.Pool{}}
	for name, p := range w.cfg.Pools {
		o.Pools[name] = invariant.Pool{MaxRunning: p.MaxRunning, Limits: invariant.Limits(p.Limits)}
	}
	for _, v := range h.Check(o) {
		w.t.Fatal(v)
	}
}
