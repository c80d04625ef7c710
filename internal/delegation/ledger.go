package delegation

import (
	"slices"

	"github.com/herdgate/herdgate/pkg/contract"
)

// MaxLedger is how many delegations a ledger holds; the oldest fall out (LEDGER-08).
const MaxLedger = 50

// Merge returns the ledger with updates taken into it, by task id (LEDGER-05 to 08).
// Entries stay in the order in which they were first seen, and keep the time at which
// they were, and their run if the update names none. One that has ended never goes
// back to being in progress. Updates without an id are left out. Neither argument is
// changed.
func Merge(ledger, updates []contract.Delegation) []contract.Delegation {
	out := slices.Clone(ledger)
	at := make(map[contract.TaskID]int, len(out)+len(updates))
	for i, e := range out {
		at[e.TaskID] = i
	}
	for _, e := range updates {
		i, known := at[e.TaskID]
		switch {
		case e.TaskID == "":
		case !known:
			at[e.TaskID] = len(out)
			out = append(out, e)
		case e.Status == contract.DelegationInProgress && out[i].Status != contract.DelegationInProgress:
		default:
			e.CreatedAt = out[i].CreatedAt
			if e.RunID == "" {
				e.RunID = out[i].RunID
			}
			out[i] = e
		}
	}
	return out[max(0, len(out)-MaxLedger):]
}
