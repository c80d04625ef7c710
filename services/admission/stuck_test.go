package admission

import (
	"testing"
	"time"
)

// F-040: a standby that sees a leader key which neither moves nor expires says that
// it could not take over; one that sees it renewed does not.
func TestLeaderKeyStuck(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	now := time.Unix(1_000_000, 0)
	var seen holding
	for _, look := range []struct {
		after time.Duration
		rev   uint64
		stuck bool
	}{
		{0, 7, false},
		{ttl, 7, false},
		{ttl, 7, false}, // it may expire in this moment
		{1, 7, true},
		{ttl, 7, true},
		{ttl, 8, false},
		{2*ttl + 1, 9, false}, // this process slept
	} {
		now = now.Add(look.after)
		if err := seen.stuck(look.rev, now, ttl); (err != nil) != look.stuck {
			t.Errorf("revision %d at %v: %v; want stuck %v", look.rev, now, err, look.stuck)
		}
	}
}
