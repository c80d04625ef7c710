package event

import (
	"fmt"
	"strings"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// Complete takes what an event leaves out of its ids from the subject it came on,
// and refuses one that says something else than its subject. The server checks who
// may publish on which subject, but nobody checks what an event says of itself; an
// event that names another tenant than its subject must be shown to nobody. The store
// and the feeds share it, so that both have the same events.
func Complete(ev *envelope.Event, at contract.EventSubject) error {
	if ev.Tenant == "" {
		ev.Tenant = at.Tenant
	}
	if ev.RunID == "" {
		ev.RunID = at.Run
	}
	if ev.TaskID == "" {
		ev.TaskID = at.Task
	}
	if ev.ThreadID == "" && contract.ThreadID(at.Thread).Token() == at.Thread {
		ev.ThreadID = contract.ThreadID(at.Thread)
	}
	var diff []string
	check := func(name, have, want string) {
		if have != want {
			if len(have) > 80 {
				have = strings.ToValidUTF8(have[:80], "") + "…"
			}
			diff = append(diff, fmt.Sprintf("%s is %q on the subject and %q in the event", name, want, have))
		}
	}
	check("tenant", string(ev.Tenant), string(at.Tenant))
	check("thread", ev.ThreadID.Token(), at.Thread)
	check("run", string(ev.RunID), string(at.Run))
	check("task", string(ev.TaskID), string(at.Task))
	check("type", string(ev.Type), string(at.Type))
	if len(diff) > 0 {
		return fmt.Errorf("%w: %s", envelope.ErrInvalid, strings.Join(diff, "; "))
	}
	return nil
}
