package admission

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// hears counts what is sent on subject from now on.
func (w *world) hears(subject string) (count func() int) {
	w.Helper()
	sub, err := w.bus.NC.SubscribeSync(subject)
	if err == nil {
		err = w.bus.NC.Flush()
	}
	if err != nil {
		w.Fatal(err)
	}
	return func() int {
		w.Helper()
		if err := w.bus.NC.Flush(); err != nil {
			w.Fatal(err)
		}
		n, _, err := sub.Pending()
		if err != nil {
			w.Fatal(err)
		}
		return n
	}
}

// done waits until no request is left.
func (w *world) done() {
	w.Helper()
	natstest.Eventually(w, patience, func() (bool, string) { n := w.queue(); return n == 0, fmt.Sprint(n, " requests are left") })
}

// ended writes the end of a granted task as an executor does, and returns the write
// of its event.
func (w *world) ended(id string) (end func(), told bus.Write) {
	w.Helper()
	rec := w.reaches(id, contract.StateGranted)
	_, rev := w.record(id)
	now := time.Now().UTC()
	rec.State, rec.Executor, rec.Writer, rec.StartedAt, rec.FinishedAt, rec.Result = contract.StateCompleted, "ex-1", "ex-1-0a/1", &now, &now, "done"
	ev, err := event.Terminal(rec, "/herdgate/executor/ex-1")
	if err != nil {
		w.Fatal(err)
	}
	if told, err = eventwrite.Of(w.bus, ev); err != nil {
		w.Fatal(err)
	}
	told.Expect = bus.Seq(0)
	return func() {
		w.put(bus.Write{Subject: w.bus.KV(contract.TaskKey(contract.TaskID(id))), Data: encode(w, rec), Expect: bus.Seq(rev)})
	}, told
}

// Protocol W15, W16, I4: the gate leaves the terminal event to the executor, and asks
// nobody when it comes; where none comes it tells in its place. There is one event in
// each case, also for those who listen without the stream.
func TestExecutorTellsOfItsEnd(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		asks bool
		do   func(w *world, end func(), told bus.Write)
	}{
		{"after the record", false, func(w *world, end func(), told bus.Write) { end(); w.put(told) }},
		{"and is heard before it", false, func(w *world, end func(), told bus.Write) { w.put(told); end() }},
		{"never", true, func(_ *world, end func(), _ bus.Write) { end() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			s := w.service(w.srv.Conn("adm-1"), "adm-1", nil)
			if !c.asks {
				s.turn = time.Hour
			}
			w.run(s)
			// From here on the leader reads along.
			w.submit("t_0")
			end, told := w.ended("t_0")
			w.put(told)
			end()
			w.done()

			w.submit("t_1")
			end, told = w.ended("t_1")
			w.granted("t_1")
			heard := w.hears(told.Subject)
			asked := w.hears("$JS.API.STREAM.MSG.GET." + w.bus.Names.EventStream())
			c.do(w, end, told)
			w.done()
			if n := heard(); n != 1 {
				t.Errorf("%d events were heard, want 1", n)
			}
			if n := asked(); (n > 0) != c.asks {
				t.Errorf("the event was asked for %d times", n)
			}
			m, err := w.bus.Last(w.ctx, w.bus.Names.EventStream(), told.Subject)
			if err != nil || string(m.Data) != string(told.Data) {
				t.Errorf("stored: %s, %v; want %s", m.Data, err, told.Data)
			}
		})
	}
}

// A leader that takes over finds ends whose events came before it, and such that
// nobody has told.
func TestEndsOfEarlierReigns(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	stop := w.run(w.service(w.srv.Conn("adm-1"), "adm-1", nil))
	w.submit("t_1")
	end, told := w.ended("t_1")
	w.granted("t_1")
	stop()
	end()
	w.put(told)
	stop = w.run(w.service(w.srv.Conn("adm-2"), "adm-2", nil))
	w.done()
	w.submit("t_2")
	end, late := w.ended("t_2")
	w.granted("t_2")
	stop()
	end()
	heard := w.hears(late.Subject)
	asked := w.hears("$JS.API.STREAM.MSG.GET." + w.bus.Names.EventStream())
	third := w.service(w.srv.Conn("adm-3"), "adm-3", nil)
	third.turn = time.Hour
	w.run(third)
	natstest.Eventually(t, patience, func() (bool, string) { return asked() > 0, "nobody looks for the event" })
	w.put(late)
	w.done()
	if n := heard(); n != 1 {
		t.Errorf("%d events were heard, want 1", n)
	}
	for _, e := range []bus.Write{told, late} {
		if m, err := w.bus.Last(w.ctx, w.bus.Names.EventStream(), e.Subject); err != nil || string(m.Data) != string(e.Data) {
			t.Errorf("stored: %s, %v", m.Data, err)
		}
	}
}

// What the loop remembers of events is bounded, and each turn is over once.
func TestEnds(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	a := func(id string) gate.StoreTerminalEvent { return gate.StoreTerminalEvent{TaskID: contract.TaskID(id)} }
	e := ends{turn: time.Second}
	if _, awaited := e.saw("one"); awaited {
		t.Error("an event was awaited that nobody asked for")
	}
	if !e.expect("one", a("t_1"), now) {
		t.Error("an event that was seen is waited for")
	}
	if !e.next().IsZero() {
		t.Errorf("a turn is over at %v", e.next())
	}
	if e.expect("two", a("t_2"), now) || e.expect("three", a("t_3"), now.Add(time.Millisecond)) {
		t.Error("events were seen that were not")
	}
	if got, awaited := e.saw("two"); !awaited || got.TaskID != "t_2" {
		t.Errorf("saw = %+v, %v", got, awaited)
	}
	at := now.Add(time.Millisecond + time.Second)
	if !e.next().Equal(at) || len(e.overdue(at.Add(-1))) != 0 {
		t.Errorf("the next turn is over at %v, want %v", e.next(), at)
	}
	if late := e.overdue(at); len(late) != 1 || late[0].TaskID != "t_3" {
		t.Errorf("overdue: %+v", late)
	}
	if late := e.overdue(at.Add(time.Hour)); len(late) != 0 || !e.next().IsZero() || len(e.waiting) != 0 || len(e.turns) != 0 {
		t.Errorf("left: %+v, %+v", late, e)
	}
	for i := range 2 * maxEndsSeen {
		e.saw(fmt.Sprint(i))
	}
	if len(e.seen) != maxEndsSeen || len(e.order) != maxEndsSeen {
		t.Errorf("%d events are remembered in %d places", len(e.seen), len(e.order))
	}
	if e.expect(fmt.Sprint(0), a("t_4"), now) || !e.expect(fmt.Sprint(2*maxEndsSeen-1), a("t_5"), now) {
		t.Error("it is not the oldest that are forgotten")
	}
}

// ADM-13: a task that waits is told so once, not again with its grant.
func TestQueuedIsToldOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	queued := w.hears(w.bus.Names.Events(contract.EventSubject{Type: contract.EventTaskQueued}))
	w.run(w.service(w.srv.Conn("adm-1"), "adm-1", nil))
	w.status("adm-1")
	w.submit("t_1")
	end, told := w.ended("t_1")
	w.submit("t_2")
	natstest.Eventually(t, patience, func() (bool, string) { n := queued(); return n == 2, fmt.Sprint(n, " events") })
	end()
	w.put(told)
	w.reaches("t_2", contract.StateGranted)
	w.granted("t_2")
	if n := queued(); n != 2 {
		t.Errorf("%d queued events for two tasks", n)
	}
}

// I2, ADM-05, ADM-16: grants whose messages are on their way when the line breaks are
// told all the same, in the order of the requests.
func TestGrantsOverBrokenLines(t *testing.T) {
	t.Parallel()
	const n = 40
	w := newWorld(t, n, natstest.Listen())
	proxy := w.srv.Proxy()
	s, err := New(Config{Name: "adm-1", MaxRunning: n, MaxQueued: 64, LeaderTTL: 10 * time.Second}, Deps{Bus: w.srv.Connect(bus.Config{Name: "adm-1", URL: proxy.URL()})})
	if err != nil {
		t.Fatal(err)
	}
	w.run(s)
	w.status("adm-1")
	var want []string
	for i := range n {
		id := fmt.Sprint("t_", i)
		want = append(want, id)
		// A few messages that are lost, whatever is under way behind them as well.
		broken := map[int]string{5: ".t_5.task_queued", 15: ".t_15.task_admitted", 25: "task.grant.default.t_25"}[i]
		if broken == "" {
			w.submit(id)
			continue
		}
		hit := proxy.FreezeAt(broken)
		w.submit(id)
		select {
		case <-hit:
		case <-time.After(patience):
			t.Fatalf("nothing was sent on %s", broken)
		}
		proxy.Cut()
		proxy.Thaw()
	}
	var admitted []string
	for _, id := range want {
		w.granted(contract.TaskID(id))
	}
	stream, err := w.bus.JS.Stream(w.ctx, w.bus.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	queued := map[contract.TaskID]int{}
	for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
		m, err := w.bus.Get(w.ctx, w.bus.Names.EventStream(), seq)
		if err != nil {
			t.Fatal(err)
		}
		switch e, err := w.bus.Names.ParseEvent(m.Subject); {
		case err != nil:
			t.Error(err)
		case e.Type == contract.EventTaskQueued:
			queued[e.Task]++
		case e.Type == contract.EventTaskAdmitted:
			admitted = append(admitted, string(e.Task))
		}
	}
	if strings.Join(admitted, " ") != strings.Join(want, " ") {
		t.Errorf("admitted %v", admitted)
	}
	for _, id := range want {
		if queued[contract.TaskID(id)] != 1 {
			t.Errorf("%s was told to be queued %d times", id, queued[contract.TaskID(id)])
		}
	}
}
