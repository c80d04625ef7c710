package bus_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/pkg/contract"
)

// What a replicated stream does differently. The servers share two cores with
// everything else, so the facts are asked of one cluster in one test.
func TestFactsOfACluster(t *testing.T) {
	t.Parallel()
	servers := natstest.Cluster(t, 3)
	servers[0].Provision(provision.Config{MaxRunning: 3, MaxQueued: 64, Replicas: 3})
	var conns []*bus.Conn
	for i, s := range servers {
		conns = append(conns, s.Conn(fmt.Sprint("test-", i)))
	}
	c, ctx := conns[0], testContext(t)

	// First writer wins, exactly one. A loser that was in flight beside the
	// winner gets a code of its own; both codes are conflicts.
	var racing atomic.Int64
	natstest.Eventually(t, 20*time.Second, func() (bool, string) {
		key := c.KV("task." + bus.RandomToken(4))
		var won atomic.Int64
		var wg sync.WaitGroup
		for i := range 24 {
			wg.Go(func() {
				_, err := conns[i%3].Publish(ctx, bus.Write{Subject: key, Expect: bus.Seq(0)})
				switch {
				case err == nil:
					won.Add(1)
				case !errors.Is(err, bus.ErrConflict):
					t.Error(err)
				case bus.Racing(err):
					racing.Add(1)
				}
			})
		}
		wg.Wait()
		if won.Load() != 1 {
			t.Errorf("%d writers won, want 1", won.Load())
		}
		return racing.Load() > 0, "no loser was told that it raced"
	})

	// The bound is exact, and so is "one per subject".
	var accepted, full, exists atomic.Int64
	var wg sync.WaitGroup
	for i := range 80 {
		for range 2 {
			wg.Go(func() {
				_, err := conns[i%3].Publish(ctx, bus.Write{Subject: c.Names.TaskRequest("default", contract.TaskID(fmt.Sprint("t", i)))})
				switch {
				case err == nil:
					accepted.Add(1)
				case errors.Is(err, bus.ErrFull):
					full.Add(1)
				case errors.Is(err, bus.ErrExists):
					exists.Add(1)
				default:
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	if accepted.Load() != 67 || full.Load()+exists.Load() != 93 {
		t.Errorf("of 80 requests, each sent twice, %d were accepted, %d found it full, %d found themselves; want 67 and 93 others", accepted.Load(), full.Load(), exists.Load())
	}

	// The leader's fence and the event chain hold as on one server.
	leader := c.KV(contract.LeaderKey)
	first := put(t, c, bus.Write{Subject: leader, TTL: time.Minute, Expect: bus.Seq(0)})
	second := put(t, conns[1], bus.Write{Subject: leader, TTL: time.Minute, Expect: bus.Seq(first)})
	refused(t, conns[2], "deposed leader", bus.Write{Subject: c.KV("task.t1"), Expect: bus.Seq(first), ExpectSubject: leader}, bus.ErrConflict)
	put(t, conns[1], bus.Write{Subject: c.KV("task.t1"), Expect: bus.Seq(second), ExpectSubject: leader})

	scope := c.Names.TaskEvents("default", "th", "r1", "t1")
	started := put(t, c, bus.Write{Subject: event(c, "t1", "task_started"), Expect: bus.Seq(0), ExpectSubject: scope})
	put(t, conns[1], bus.Write{Subject: event(c, "t1", "task_running"), Expect: bus.Seq(started), ExpectSubject: scope})
	refused(t, conns[2], "stale step", bus.Write{Subject: event(c, "t1", "task_cancelled"), Expect: bus.Seq(started), ExpectSubject: scope}, bus.ErrConflict)
}
