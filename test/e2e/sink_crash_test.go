package e2e

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// perCrash is how many events are under way at each crash; they are one batch, or two
// where sinks share them.
const perCrash = 50

// rig is a NATS server with event sinks, whose database the test can hold up at a
// point that it chooses. The sinks are the real programs: nothing in them helps.
type rig struct {
	*Fleet
	t     *testing.T
	conn  *bus.Conn
	pg    *pgtest.Server // nil with SQLite
	dsn   string
	share bool
	proxy *natstest.Proxy // of the sinks that run
	sinks []*Proc
	made  int // sinks
	last  uint64
}

func newRig(t *testing.T, store, replicas string) *rig {
	t.Helper()
	f := NewFleet(t, script)
	g := &rig{Fleet: f, t: t, share: replicas == "share"}
	if store == "postgres" {
		g.pg = pgtest.Start(t)
		g.dsn = g.pg.Database()
	}
	g.conn = f.connect(t)
	// Who is killed with events in its hands must not keep them for half a minute.
	c, err := g.conn.JS.Consumer(deadline(t), g.conn.Names.EventStream(), g.conn.Names.SinkConsumer())
	if err != nil {
		t.Fatal(err)
	}
	cfg := c.CachedInfo().Config
	cfg.AckWait = time.Second
	if _, err := g.conn.JS.UpdateConsumer(deadline(t), g.conn.Names.EventStream(), cfg); err != nil {
		t.Fatal(err)
	}
	g.start()
	if g.pg != nil {
		// Whoever inserts waits while the gate is closed: before the first row of a
		// batch, or at the row that it names.
		g.sql(`CREATE TABLE gate (begin_at boolean NOT NULL DEFAULT false, row_at bigint NOT NULL DEFAULT 0); INSERT INTO gate DEFAULT VALUES;
CREATE FUNCTION hold_begin() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN WHILE (SELECT begin_at FROM gate) LOOP PERFORM pg_sleep(0.01); END LOOP; RETURN NULL; END $$;
CREATE FUNCTION hold_row() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN WHILE (SELECT row_at FROM gate) = NEW.seq LOOP PERFORM pg_sleep(0.01); END LOOP; RETURN NEW; END $$;
CREATE TRIGGER hold_begin BEFORE INSERT ON events FOR EACH STATEMENT EXECUTE FUNCTION hold_begin();
CREATE TRIGGER hold_row BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION hold_row()`)
	}
	return g
}

// start starts the sinks that a deployment has: one on SQLite, else two.
func (g *rig) start() {
	g.t.Helper()
	g.proxy = natstest.NewProxy(g.t, g.natsURL)
	n := 1
	if g.pg != nil {
		n = 2
	}
	g.sinks = nil
	for range n {
		g.made++
		text := fmt.Sprintf("nats: { url: %q }\nmodels: [{ name: offline, provider: script, script: script.yaml }]\n", g.natsURL)
		store := "batch_size: 50, flush_interval_ms: 300"
		if g.pg != nil {
			store += fmt.Sprintf(", store: postgres, dsn: %q", g.dsn)
		}
		if g.share {
			store += ", replicas: share"
		}
		config := g.write(fmt.Sprintf("sink-%d.yaml", g.made), text+"eventsink: { "+store+" }\n")
		g.sinks = append(g.sinks, g.service("eventsink", "--config", config, "--nats-url", g.proxy.URL()))
	}
	g.list(0)
}

// kill ends all sinks at once, with kill -9, and what they had still under way.
func (g *rig) kill() {
	for _, s := range g.sinks {
		_ = s.cmd.Process.Kill()
	}
	for _, s := range g.sinks {
		<-s.done
	}
	g.proxy.Refuse()
	g.proxy.Thaw()
}

func (g *rig) sql(statements string) string { return g.pg.SQL("db1", statements) }

// publish puts events into the stream.
func (g *rig) publish(n int) {
	g.t.Helper()
	ctx := deadline(g.t)
	for range n {
		i := int(g.last) + 1
		id := contract.TaskID(fmt.Sprint("task-", i%7))
		ev, err := envelope.New(contract.EventTaskRunning, contract.TaskRunningData{TaskID: id, MessageIndex: i, Message: contract.Step{Kind: contract.StepAI, Text: fmt.Sprint("step ", i)}})
		if err != nil {
			g.t.Fatal(err)
		}
		ev.ID, ev.Source, ev.Subject, ev.Time = fmt.Sprint("event-", i), "/herdgate/test/1", string(id), time.Unix(1_800_000_000, 0)
		ev.Tenant, ev.ThreadID, ev.RunID, ev.TaskID = "default", "thread", "run", id
		data, err := envelope.Encode(ev)
		if err != nil {
			g.t.Fatal(err)
		}
		ack, err := g.conn.Publish(ctx, bus.Write{Subject: ev.NATSSubject(g.conn.Names), Data: data, Header: nats.Header{}})
		if err != nil {
			g.t.Fatal(err)
		}
		g.last = ack.Seq
	}
}

// list reads everything up to seq as a reader does who pages by cursor, when it is
// stored.
func (g *rig) list(seq uint64) []contract.EventRecord {
	g.t.Helper()
	var all []contract.EventRecord
	eventually(g.t, func() (bool, string) {
		all = nil
		req := eventapi.ListRequest{BarrierSeq: seq, Limit: 37}
		for {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			resp, err := eventapi.List(ctx, g.conn, req)
			cancel()
			if err != nil || resp.LastSeq < seq {
				return false, fmt.Sprintf("events up to %d of %d are stored, %v", resp.LastSeq, seq, err)
			}
			all = append(all, resp.Events...)
			if !resp.HasMore {
				return true, ""
			}
			req.AfterSeq = resp.NextAfterSeq
		}
	})
	return all
}

// same compares the store with the stream itself: all is there, in order, once.
func (g *rig) same() {
	g.t.Helper()
	got, want := g.list(g.last), g.streamed(g.t, g.connect(g.t))
	if len(got) != len(want) {
		g.t.Errorf("%d events are stored, the stream has %d", len(got), len(want))
	}
	for i := range min(len(got), len(want)) {
		if got[i].Seq != want[i].Seq || got[i].EventID != want[i].EventID {
			g.t.Errorf("event %d of the store is %s at %d, of the stream %s at %d", i, got[i].EventID, got[i].Seq, want[i].EventID, want[i].Seq)
			break
		}
	}
	count := ""
	if g.pg != nil {
		count = g.sql("SELECT count(*), count(DISTINCT event_id) FROM events")
	} else {
		row := g.rows(g.t, "SELECT count(*), count(DISTINCT event_id) FROM events")[0]
		count = fmt.Sprintf("%v|%v", row...)
	}
	if expect := fmt.Sprintf("%d|%d", len(want), len(want)); count != expect {
		g.t.Errorf("the table has %s rows and ids, want %s", count, expect)
	}
}

// fetched waits until all that was published is in the hands of sinks.
func (g *rig) fetched() {
	g.t.Helper()
	c, err := g.conn.JS.Consumer(deadline(g.t), g.conn.Names.EventStream(), g.conn.Names.SinkConsumer())
	if err != nil {
		g.t.Fatal(err)
	}
	eventually(g.t, func() (bool, string) {
		info, err := c.Info(deadline(g.t))
		if err != nil {
			return false, err.Error()
		}
		return info.NumPending == 0 && info.NumAckPending > 0, fmt.Sprintf("%d are to be delivered, %d to be acknowledged", info.NumPending, info.NumAckPending)
	})
}

// busy waits until a sink's statement is held up in PostgreSQL.
func (g *rig) busy() {
	g.t.Helper()
	eventually(g.t, func() (bool, string) {
		n := g.sql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'herdgate-eventsink' AND wait_event = 'PgSleep'")
		return n != "0", "nobody writes"
	})
}

// file opens the SQLite file beside the sink.
func (g *rig) file() *sql.DB {
	g.t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(g.dir, "data", "events.db")+"?_txlock=immediate")
	if err != nil {
		g.t.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	g.t.Cleanup(func() { _ = db.Close() })
	return db
}

func (g *rig) exec(db *sql.DB, statements ...string) {
	g.t.Helper()
	for _, s := range statements {
		eventually(g.t, func() (bool, string) {
			_, err := db.ExecContext(deadline(g.t), s)
			return err == nil, fmt.Sprint(s, ": ", err)
		})
	}
}

// held publishes a batch of which no row gets into the database before release is
// called. With PostgreSQL the statement is on the server then, where it outlives
// the sink that has sent it.
func (g *rig) held() (release func()) {
	g.t.Helper()
	if g.pg != nil {
		g.sql("UPDATE gate SET begin_at = true")
		g.publish(perCrash)
		g.busy()
		return func() { g.sql("UPDATE gate SET begin_at = false") }
	}
	db := g.file()
	tx, err := db.BeginTx(deadline(g.t), nil)
	if err != nil {
		g.t.Fatal(err)
	}
	g.publish(perCrash)
	g.fetched()
	return func() {
		if err := tx.Rollback(); err != nil {
			g.t.Error(err)
		}
	}
}

// inside publishes a batch that gets stuck at its middle row, within the
// transaction. undo lets those go on who come later.
func (g *rig) inside() (undo func()) {
	g.t.Helper()
	row := g.last + perCrash/2
	if g.pg != nil {
		g.sql(fmt.Sprint("UPDATE gate SET row_at = ", row))
		g.publish(perCrash)
		g.busy()
		return func() {
			// The server does so itself when it misses the client.
			g.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'herdgate-eventsink' AND wait_event = 'PgSleep'")
			g.sql("UPDATE gate SET row_at = 0")
		}
	}
	db := g.file()
	g.exec(db, `CREATE VIEW endless AS WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n`,
		fmt.Sprintf(`CREATE TRIGGER hold BEFORE INSERT ON events WHEN NEW.seq = %d BEGIN SELECT count(*) FROM endless; END`, row))
	g.publish(perCrash)
	g.fetched()
	eventually(g.t, func() (bool, string) {
		tx, err := db.BeginTx(deadline(g.t), nil)
		if err == nil {
			_ = tx.Rollback()
		}
		return err != nil && strings.Contains(err.Error(), "locked"), fmt.Sprint("nobody writes, ", err)
	})
	return func() { g.exec(db, "DROP TRIGGER hold", "DROP VIEW endless") }
}

// acknowledging publishes a batch and returns when it is stored and the
// acknowledgement whose subject holds text is about to be sent.
func (g *rig) acknowledging(text string) {
	g.t.Helper()
	hit := g.proxy.FreezeAt(text)
	g.publish(perCrash)
	select {
	case <-hit:
	case <-time.After(Timeout):
		g.t.Fatalf("nobody acknowledged %s", text)
	}
}

// I6, I8, I11, EVT-14, EVT-15, EVT-18, F-158: the crash matrix of the sink, over the
// real programs. After each crash the store holds what the stream holds, in its
// order, and nothing twice.
func TestSinkCrashMatrix(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, store, replicas string }{
		{"sqlite", "sqlite", "standby"}, {"postgres, one stands by", "postgres", "standby"}, {"postgres, two share", "postgres", "share"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, c.store, c.replicas)
			crash := func(name string, happen func()) {
				t.Helper()
				begin, events := time.Now(), g.last
				happen()
				g.publish(10) // what comes later stays behind what was interrupted
				g.same()
				t.Logf("%s: %d events, %v", name, g.last-events, time.Since(begin).Round(time.Millisecond))
				if t.Failed() {
					t.Fatalf("after a crash %s", name)
				}
			}
			acks := "$JS.ACK." + g.conn.Names.EventStream() + "." + g.conn.Names.SinkConsumer() + "."
			crash("after the fetch", func() {
				release := g.held()
				g.kill()
				release()
				g.start()
			})
			crash("in the transaction", func() {
				undo := g.inside()
				g.kill()
				undo()
				g.start()
			})
			crash("after the commit", func() {
				g.acknowledging(acks)
				g.kill()
				g.start()
			})
			crash("among the acknowledgements", func() {
				g.acknowledging(fmt.Sprintf("%s1.%d.", acks, g.last+perCrash/2))
				g.kill()
				g.start()
			})
			crash("of NATS, in the middle of a batch", func() {
				release := g.held()
				g.nats.Kill()
				g.startNATS()
				release()
				eventually(t, func() (bool, string) { return g.conn.NC.IsConnected(), "not connected to NATS" })
			})
			if g.pg == nil {
				return
			}
			crash("of PostgreSQL, in the middle of a batch", func() {
				_ = g.inside()
				g.pg.Stop("immediate")
				g.pg.Up()
				g.sql("UPDATE gate SET row_at = 0")
			})
			crash("of PostgreSQL, while it is away for a while", func() {
				g.pg.Stop("immediate")
				g.publish(perCrash)
				g.fetched()
				g.pg.Up()
			})
			crash("of one of the two", func() {
				undo := g.inside()
				g.sinks[0].Kill()
				undo()
			})
		})
	}
}

// I6, I11, EVT-22: the producer's line of the matrix. The executor dies by kill -9
// when the record says that the task has ended and the event does not yet; the
// event comes nevertheless, once and with the id that the executor would have given it.
func TestProducerKilledBeforeItsEvent(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, quick)
	f.service("admission")
	f.service("eventsink")
	f.service("lead")
	proxy := natstest.NewProxy(t, f.natsURL)
	ex := f.service("executor", "--name", "ex-1", "--nats-url", proxy.URL())
	f.ready()
	whole := f.submit(t, "short").TaskID
	f.outcome(t, whole)
	hit := proxy.FreezeAt("." + string(contract.EventTaskCompleted) + " ")
	cut := f.submit(t, "short").TaskID
	select {
	case <-hit:
	case <-time.After(Timeout):
		t.Fatal("the executor sent no end")
	}
	ex.Kill()
	proxy.Refuse()
	if task := f.outcome(t, cut); task.Status != contract.TaskCompleted {
		t.Errorf("the record says %s, want that the task is completed", task.Status)
	}
	past := f.judge(t, invariant.Options{MaxRunning: 3})
	end := func(id contract.TaskID) string {
		all := of(past, id)
		if len(all) != 5 || all[4].EventType != contract.RecordEnd {
			t.Fatalf("%d events of %s, want 5 and the end as the last one", len(all), id)
		}
		return strings.ReplaceAll(all[4].EventID, string(id), "TASK")
	}
	if end(cut) != end(whole) {
		t.Errorf("the end that was made up for has the id %s, want %s", end(cut), end(whole))
	}
}
