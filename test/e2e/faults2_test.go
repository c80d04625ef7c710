package e2e

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
)

// I4, I7, CANCEL-02, CANCEL-04, F-048: a hundred tasks, cancelled at random
// moments, some of them twice at once. Each ends once; who was told that it is
// cancelled does not see it complete later, and who was told that it had ended
// sees that end.
func TestCancelAtRandom(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, strings.ReplaceAll(script, "delay_ms: 30", "delay_ms: 60"), "subagent_runtime: { max_running: 8, max_queued: 200 }\n")
	f.All()
	type answer struct{ finished contract.TaskStatus } // "" is accepted
	const n = 100
	ids := f.submitAll(t, n, "short")
	answers := make([][]answer, n)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, id := range ids {
		for range 1 + i%2 {
			// The times spread over what the hundred take.
			d := time.Duration(rand.Int64N(int64(1500 * time.Millisecond)))
			wg.Go(func() {
				<-time.After(d)
				err := f.API.CancelTask(deadline(t), id)
				var e *client.Error
				switch {
				case err == nil:
					mu.Lock()
					answers[i] = append(answers[i], answer{})
					mu.Unlock()
				case errors.As(err, &e) && e.Code == "already_finished" && e.FinishedStatus != "":
					mu.Lock()
					answers[i] = append(answers[i], answer{contract.TaskStatus(e.FinishedStatus)})
					mu.Unlock()
				default:
					t.Errorf("cancel %s: %v", id, err)
				}
			})
		}
	}
	wg.Wait()
	count := map[contract.TaskStatus]int{}
	for i, id := range ids {
		task := f.outcome(t, id)
		count[task.Status]++
		if task.Status != contract.TaskCompleted && task.Status != contract.TaskCancelled {
			t.Errorf("%s: %s %v", id, task.Status, task.Error)
		}
		for _, a := range answers[i] {
			if a.finished != "" && a.finished != task.Status {
				t.Errorf("%s: a caller was told %s, it is %s", id, a.finished, task.Status)
			}
		}
	}
	t.Logf("outcomes: %v", count)
	if count[contract.TaskCompleted] == 0 || count[contract.TaskCancelled] == 0 {
		t.Errorf("outcomes: %v; the test wants both", count)
	}
	for _, e := range f.judge(t, invariant.Options{MaxRunning: 8}) {
		if e.EventType == contract.RecordEnd && !strings.Contains(string(e.Content), `"status":"`+string(f.task(t, e.TaskID).Status)+`"`) {
			t.Errorf("%s: event %s, record %s", e.TaskID, e.Content, f.task(t, e.TaskID).Status)
		}
	}
}

// F-156: somebody else holds the database's write lock for longer than SQLite
// waits. Nothing is lost, nothing doubled, what is stored can be read meanwhile.
func TestDatabaseLocked(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "")
	f.All()
	first := f.submit(t, "short").TaskID
	f.outcome(t, first)
	eventually(t, func() (bool, string) {
		n := len(f.all(t, client.EventQuery{TaskID: first}))
		return n == 5, fmt.Sprint(n, " events")
	})
	db, err := sql.Open("sqlite", "file:"+filepath.Join(f.dir, "data", "events.db")+"?_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	tx, err := db.BeginTx(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	ids := f.submitAll(t, 30, "short")
	held := time.After(7 * time.Second)
	if n := f.outcomes(t, ids); n[contract.TaskCompleted] != len(ids) {
		t.Errorf("outcomes: %v; the tasks do not need the database", n)
	}
	// has_more says that the store does not have everything yet.
	if page, err := f.API.ListEvents(deadline(t), client.EventQuery{TaskID: first}, 0); err != nil || len(page.Events) != 5 || !page.HasMore {
		t.Errorf("while the database is locked, %d events can be read, more %v, %v; want 5 and more", len(page.Events), page.HasMore, err)
	}
	<-held
	if err := tx.Rollback(); err != nil {
		t.Error(err)
	}
	f.judge(t, invariant.Options{MaxRunning: 3})
}

// F-162: the disk of the database is full, and later has room again. The sink
// says so, the system works on, and nothing is missing in the end.
func TestDatabaseDiskFull(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "")
	disk := f.dataDir("small")
	if err := os.Mkdir(disk, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("none", disk, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount a small disk: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(disk, syscall.MNT_DETACH) })
	f.service("admission")
	f.service("executor")
	f.service("lead")
	probes := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	sink := f.service("eventsink", "--data-dir", disk, "--metrics-addr", probes)
	f.ready()
	f.outcome(t, f.submit(t, "short").TaskID)
	filler := filepath.Join(disk, "filler")
	if err := os.WriteFile(filler, make([]byte, 2<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("fill the disk: %v", err)
	}
	ids := f.submitAll(t, 40, "short")
	if n := f.outcomes(t, ids); n[contract.TaskCompleted] != len(ids) {
		t.Errorf("outcomes: %v; the tasks do not need the database", n)
	}
	eventually(t, func() (bool, string) {
		resp, err := http.Get("http://" + probes + "/readyz") //nolint:noctx // a probe
		if err != nil {
			return false, err.Error()
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode == http.StatusServiceUnavailable && strings.Contains(string(b), "full"), string(b)
	})
	if n := strings.Count(sink.out.String(), "\n"); n > 200 {
		t.Errorf("the sink wrote %d log lines", n)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	conn := f.connect(t)
	eventually(t, func() (bool, string) {
		want, got := len(f.streamed(t, conn)), len(f.all(t, client.EventQuery{}))
		return want == got && want == 5*41, fmt.Sprintf("%d events in the stream, %d in the store", want, got)
	})
	for _, v := range invariant.Check(f.all(t, client.EventQuery{}), invariant.Options{MaxRunning: 3, Settled: true}) {
		t.Error(v)
	}
	sink.Stop()
}

// F-026, F-150: readers that open a feed and never read it cost nobody else
// anything, and the lead drops them or holds a bounded amount for them.
func TestReadersThatDoNotRead(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, strings.ReplaceAll(script, `text: "ok"`, `text: "`+strings.Repeat("word ", 1500)+`"`), "subagent_runtime: { max_running: 8, max_queued: 500 }\n")
	lead, _, _, _ := f.All()
	for range 20 {
		conn, err := net.Dial("tcp", f.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.(*net.TCPConn).SetReadBuffer(4096); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "GET /v1/events HTTP/1.1\r\nHost: %s\r\nAccept: text/event-stream\r\n\r\n", f.addr)
		if line, err := bufio.NewReaderSize(conn, 16).ReadString('\n'); err != nil || !strings.Contains(line, "200") {
			t.Fatalf("%q %v", line, err)
		}
	}
	ids := f.submitAll(t, 200, "short")
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.outcomes(t, ids)
	}()
	for busy := true; busy; {
		select {
		case <-done:
			busy = false
		case <-time.After(200 * time.Millisecond):
		}
		for _, path := range []string{"/healthz", "/v1/tasks?limit=1", "/v1/admission"} {
			began := time.Now()
			resp, err := http.Get("http://" + f.addr + path) //nolint:noctx // a probe
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if d := time.Since(began); resp.StatusCode != http.StatusOK || d > time.Second {
				t.Errorf("%s: %d after %v", path, resp.StatusCode, d)
			}
		}
	}
	if mb := rss(t, lead.cmd.Process.Pid); mb > 500 {
		t.Errorf("the lead has %d MB", mb)
	}
	f.judge(t, invariant.Options{MaxRunning: 8})
	// They do not keep it from leaving, either.
	lead.Stop()
}

// rss is the resident memory of a process in MB.
func rss(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	var size, resident int
	if _, err := fmt.Sscan(string(b), &size, &resident); err != nil {
		t.Fatal(err)
	}
	return resident * os.Getpagesize() >> 20
}

// EXEC-06, TOOL-07, STATUS-05, F-114, F-116, F-120, F-122: model servers that are
// silent, slow or lie. Every task ends, with a reason where it failed, and its
// slot is free.
func TestModelsThatLie(t *testing.T) {
	t.Parallel()
	sse := func(w http.ResponseWriter, chunks ...string) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, c := range chunks {
			fmt.Fprintf(w, "data: %s\n\n", c)
		}
		w.(http.Flusher).Flush()
	}
	piece := func(delta, reason string) string {
		if reason != "" {
			reason = `"` + reason + `"`
		} else {
			reason = "null"
		}
		return `{"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":` + delta + `,"finish_reason":` + reason + `}]}`
	}
	good := func(w http.ResponseWriter) { Say(w, "done") }
	cases := []struct {
		name   string
		status contract.TaskStatus
		says   string // in result or error
		answer func(q Question, w http.ResponseWriter, r *http.Request)
	}{
		{"silent", contract.TaskFailed, "idle", func(_ Question, _ http.ResponseWriter, r *http.Request) { Hold(r, time.Minute) }},
		{"silent in the middle", contract.TaskFailed, "idle", func(_ Question, w http.ResponseWriter, r *http.Request) {
			sse(w, piece(`{"content":"half"}`, ""))
			Hold(r, time.Minute)
		}},
		{"slow", contract.TaskCompleted, "one two three", func(_ Question, w http.ResponseWriter, r *http.Request) {
			for _, word := range []string{"one ", "two ", "three"} {
				Hold(r, 600*time.Millisecond)
				sse(w, piece(`{"content":"`+word+`"}`, ""))
			}
			sse(w, piece(`{}`, "stop"), "[DONE]")
		}},
		{"unknown tool", contract.TaskCompleted, "done", func(q Question, w http.ResponseWriter, _ *http.Request) {
			if q.Turn == 0 {
				Say(w, "", [2]string{"launch_rocket", `{}`}, [2]string{"task", `{"prompt":"x"}`})
				return
			}
			good(w)
		}},
		{"broken arguments", contract.TaskCompleted, "done", func(q Question, w http.ResponseWriter, _ *http.Request) {
			if q.Turn == 0 {
				Say(w, "", [2]string{"bash", `{"command": "echo`}, [2]string{"bash", `[]`}, [2]string{"bash", `{"command": 7}`}, [2]string{"", `null`})
				return
			}
			good(w)
		}},
		{"wrong usage", contract.TaskCompleted, "done", func(_ Question, w http.ResponseWriter, _ *http.Request) {
			sse(w, piece(`{"content":"done"}`, "stop"), `{"id":"c","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":-5,"completion_tokens":9223372036854775807,"total_tokens":1e400}}`, "[DONE]")
		}},
		{"usage of another type", contract.TaskCompleted, "done", func(_ Question, w http.ResponseWriter, _ *http.Request) {
			sse(w, piece(`{"content":"done"}`, "stop"), `{"id":"c","object":"chat.completion.chunk","choices":[],"usage":"plenty"}`, "[DONE]")
		}},
		{"busy at first", contract.TaskCompleted, "done", func(q Question, w http.ResponseWriter, _ *http.Request) {
			if q.Nth == 1 {
				w.Header().Set("Retry-After", "1")
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			good(w)
		}},
		{"busy for ever", contract.TaskFailed, "", func(_ Question, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusTooManyRequests)
		}},
		{"gone in the middle", contract.TaskCompleted, "done", func(q Question, w http.ResponseWriter, _ *http.Request) {
			if q.Nth == 1 {
				sse(w, piece(`{"content":"half of an answer"}`, ""))
				panic(http.ErrAbortHandler)
			}
			good(w)
		}},
		{"a page of HTML", contract.TaskFailed, "", func(_ Question, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, "<html>portal</html>")
		}},
		// STATUS-04: an empty answer is a completed task with a text that says so.
		{"nothing", contract.TaskCompleted, "without a final text", func(_ Question, w http.ResponseWriter, _ *http.Request) { Say(w, "") }},
	}
	byName := map[string]func(q Question, w http.ResponseWriter, r *http.Request){}
	for _, c := range cases {
		byName[c.name] = c.answer
	}
	brain := NewBrain(t, func(q Question, w http.ResponseWriter, r *http.Request) {
		if a := byName[q.Task]; a != nil {
			a(q, w, r)
			return
		}
		http.Error(w, "unexpected task "+q.Task, http.StatusBadRequest)
	})
	f := NewFleet(t, script, "models: [{ name: main, provider: openai, model: brain-1, base_url: \""+brain.URL+"\", idle_timeout_seconds: 1, request_timeout_seconds: 10, max_retries: 1 }]\n",
		"subagent_runtime: { max_running: 16 }\nexecutor: { max_tasks: 16 }\n")
	f.All()
	ids := map[string]contract.TaskID{}
	for _, c := range cases {
		ids[c.name] = f.submit(t, c.name).TaskID
	}
	for _, c := range cases {
		task := f.outcome(t, ids[c.name])
		text := ""
		if task.Result != nil {
			text += *task.Result
		}
		if task.Error != nil {
			text += *task.Error
		}
		if task.Status != c.status || !strings.Contains(text, c.says) || text == "" {
			t.Errorf("%s: %s %q %s; want %s with %q", c.name, task.Status, text, task.ErrorCode, c.status, c.says)
		}
		if task.Status == contract.TaskFailed && task.ErrorCode != contract.ErrLLM {
			t.Errorf("%s: error code %s, want llm_error", c.name, task.ErrorCode)
		}
		if u := task.Usage; u != nil && (u.InputTokens < 0 || u.OutputTokens < 0 || u.TotalTokens < 0) {
			t.Errorf("%s: usage %+v", c.name, u)
		}
	}
	if st, err := f.API.Admission(deadline(t)); err != nil || st.Running != 0 {
		t.Errorf("slots in use at the end: %+v, %v", st, err)
	}
	f.judge(t, invariant.Options{MaxRunning: 16})
}

// F-140: prompts of every size get an answer: what is promised to fit runs, also
// where JSON makes it longer, and what does not fit is refused at the door with
// the limit.
func TestLargePrompts(t *testing.T) {
	t.Parallel()
	f := NewFleet(t, script, "")
	f.All()
	for name, c := range map[string]struct {
		prompt string
		fits   bool
	}{
		"at the limit":            {"short" + strings.Repeat("a", contract.MaxPromptBytes-5), true},
		"one more":                {"short" + strings.Repeat("a", contract.MaxPromptBytes-4), false},
		"quotes at the limit":     {"short" + strings.Repeat("\"", contract.MaxPromptBytes-5), false},
		"control characters":      {"short" + strings.Repeat("\x01", 40_000), true},
		"angle brackets":          {"short" + strings.Repeat("<", 40_000), true},
		"more than a message has": {"short" + strings.Repeat("a", 2<<20), false},
		"more than a body has":    {"short" + strings.Repeat("a", 40<<20), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			acc, err := f.API.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: c.prompt})
			var e *client.Error
			switch {
			case c.fits && err == nil:
				if task := f.outcome(t, acc.TaskID); task.Status != contract.TaskCompleted {
					t.Errorf("%s %v", task.Status, task.Error)
				}
			case !c.fits && errors.As(err, &e) && (e.Status == 413 || e.Status == 400 || e.Status == 422) && (e.Code == "payload_too_large" || e.Code == "invalid_request") && e.Detail != "":
				t.Logf("refused: %v", err)
			default:
				t.Errorf("answer: %v; fits: %v", err, c.fits)
			}
		})
	}
}
