package e2e

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// EVT-15: PostgreSQL that has no connection left, and one that takes no writes: the
// sink keeps the events, /readyz says what is wrong, and once it is over everything is
// stored once without anybody's doing.
func TestPostgresRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		begin, end []string
		says       string
	}{
		"read only": {
			begin: []string{"ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()"},
			end:   []string{"ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()"},
			says:  "takes no writes now",
		},
		"no connection left": {
			begin: []string{"ALTER ROLE sink CONNECTION LIMIT 0", "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'sink'"},
			end:   []string{"ALTER ROLE sink CONNECTION LIMIT -1"},
			says:  "out of room or connections",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, "postgres", "")
			g.publish(20)
			g.same()
			g.kill()
			// Limits do not hold for superusers.
			g.sql("CREATE ROLE sink LOGIN; GRANT ALL ON SCHEMA public TO sink; GRANT ALL ON ALL TABLES IN SCHEMA public TO sink")
			g.dsn = g.pg.DSN("db1", "sink")
			probes := fmt.Sprintf("127.0.0.1:%d", freePort(t))
			config := g.write("refused.yaml", fmt.Sprintf("nats: { url: %q }\nmodels: [{ name: offline, provider: script, script: script.yaml }]\neventsink: { batch_size: 50, store: postgres, dsn: %q }\n", g.natsURL, g.dsn))
			g.service("eventsink", "--config", config, "--metrics-addr", probes)
			g.publish(20)
			g.same()
			for _, statement := range c.begin { // ALTER SYSTEM wants to be alone
				g.sql(statement)
			}
			g.publish(100)
			readyz(t, probes, http.StatusServiceUnavailable, c.says)
			g.publish(20)
			for _, statement := range c.end {
				g.sql(statement)
			}
			g.same()
			readyz(t, probes, http.StatusOK, "")
		})
	}
}

// readyz waits until a service answers so.
func readyz(t *testing.T, addr string, status int, says string) {
	t.Helper()
	eventually(t, func() (bool, string) {
		resp, err := http.Get("http://" + addr + "/readyz") //nolint:noctx // a probe
		if err != nil {
			return false, err.Error()
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode == status && strings.Contains(string(b), says), fmt.Sprintf("/readyz is %d %s", resp.StatusCode, b)
	})
}

// F-158: two sinks on one database that both write, and 1,000 events from four
// connections at the same time: each is stored once, under the sequence of the stream.
func TestTwoSinksFourPublishers(t *testing.T) {
	t.Parallel()
	g := newRig(t, "postgres", "share")
	const publishers, each = 4, 250
	var mu sync.Mutex
	want := map[uint64]string{}
	var all sync.WaitGroup
	for p := range publishers {
		conn := g.connect(t)
		all.Go(func() {
			var futures []jetstream.PubAckFuture
			name := func(i int) string { return fmt.Sprintf("publisher-%d/%d", p, i) }
			for i := range each {
				id := contract.TaskID(fmt.Sprint("task-", i%7))
				ev, err := envelope.New(contract.EventTaskRunning, contract.TaskRunningData{TaskID: id, MessageIndex: i + 1, Message: contract.Step{Kind: contract.StepAI, Text: "step"}})
				if err != nil {
					t.Error(err)
					return
				}
				ev.ID, ev.Source, ev.Subject, ev.Time = name(i), "/herdgate/test/1", string(id), time.Unix(1_800_000_000, 0)
				ev.Tenant, ev.ThreadID, ev.RunID, ev.TaskID = "default", "thread", "run", id
				data, err := envelope.Encode(ev)
				if err != nil {
					t.Error(err)
					return
				}
				f, err := conn.PublishAsync(bus.Write{Subject: ev.NATSSubject(conn.Names), Data: data, Header: nats.Header{}})
				if err != nil {
					t.Error(err)
					return
				}
				futures = append(futures, f)
			}
			for i, f := range futures {
				select {
				case ack := <-f.Ok():
					mu.Lock()
					want[ack.Sequence] = name(i)
					mu.Unlock()
				case err := <-f.Err():
					t.Error(err)
				case <-deadline(t).Done():
					t.Error("no answer to a publish")
					return
				}
			}
		})
	}
	all.Wait()
	got := g.list(publishers * each)
	if len(got) != publishers*each || len(want) != len(got) {
		t.Fatalf("%d events are stored, %d were published, want %d", len(got), len(want), publishers*each)
	}
	var seqs []uint64
	for _, e := range got {
		if want[e.Seq] != e.EventID {
			t.Fatalf("event %q is stored at %d, where the stream has %q", e.EventID, e.Seq, want[e.Seq])
		}
		seqs = append(seqs, e.Seq)
	}
	if !slices.IsSorted(seqs) || len(slices.Compact(seqs)) != len(got) {
		t.Errorf("sequences do not rise strictly: %v", seqs)
	}
}
