package e2e

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/pkg/contract"
)

// I6, EVT-17: `herdgate events --follow` outlives the lead that it reads from: killed
// while tasks run and while nothing answers, it comes to the store's list, each event
// once and in order.
func TestFollowOverLeadRestart(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "")
	lead, _, _, _ := f.All()
	l := &live{Fleet: f}
	p := l.begin(follower{argv: []string{filepath.Join(bin, "herdgate"), "events", "--follow", "--config", f.config, "--server", "http://" + f.addr}})
	told := func() []contract.EventRecord {
		var out []contract.EventRecord
		for line := range strings.Lines(p.out.String()) {
			var rec contract.EventRecord
			if !strings.HasSuffix(line, "\n") {
				break // still being written
			}
			if err := json.Unmarshal([]byte(line), &rec); err != nil {
				t.Fatalf("%v: %q", err, line)
			}
			out = append(out, rec)
		}
		return out
	}
	tells := func(n int) {
		t.Helper()
		eventually(t, func() (bool, string) {
			got := len(told())
			return got >= n, fmt.Sprintf("told are %d events of %d\n%s", got, n, p.errout.String())
		})
	}
	var tasks []contract.TaskID
	submit := func(n int, prompt string) {
		for range n {
			tasks = append(tasks, f.submit(t, prompt).TaskID)
		}
	}
	ends := func() {
		t.Helper()
		eventually(t, func() (bool, string) {
			n := f.rows(t, `SELECT count(*) FROM events WHERE event_type = ?`, contract.RecordEnd)[0][0]
			return n == int64(len(tasks)), fmt.Sprintf("%v of %d ends are stored", n, len(tasks))
		})
	}

	submit(3, "two seconds")
	tells(4)
	lead.Kill()
	ends() // with no lead
	lead = f.service("lead")
	f.ready()
	before := len(told())
	submit(12, "short")
	tells(before + 6)
	lead.Kill() // most likely in the middle of an answer
	f.service("lead")
	f.ready()
	submit(3, "short")
	ends()

	stored := f.all(t, client.EventQuery{})
	tells(len(stored))
	key := func(recs []contract.EventRecord) []string {
		var out []string
		for _, r := range recs {
			out = append(out, fmt.Sprintf("%d %s %s %s", r.Seq, r.EventID, r.EventType, r.Content))
		}
		return out
	}
	if got, want := key(told()), key(stored); !slices.Equal(got, want) {
		t.Errorf("it told %d events, stored are %d, and they are not the same in the same order\n%q\n%q", len(got), len(want), got, want)
	}
	if n := strings.Count(p.errout.String(), "the connection broke, trying again"); n < 2 {
		t.Errorf("two leads were killed, and it told of %d breaks:\n%s", n, p.errout.String())
	}
}
