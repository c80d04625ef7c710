package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/test/history"
)

// Pause stops a process without its noticing: SIGSTOP. Resume lets it go on.
func (p *Proc) Pause()  { p.signal(syscall.SIGSTOP) }
func (p *Proc) Resume() { p.signal(syscall.SIGCONT) }

func (p *Proc) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("%s to %s: %v", s, p.name, err)
	}
}

// streamed reads the event stream itself, whatever any service makes of it.
func (f *Fleet) streamed(t *testing.T, conn *bus.Conn) []contract.EventRecord {
	t.Helper()
	out, err := history.Read(deadline(t), conn)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// judge waits until the history is settled and the store holds it whole, and
// checks what must hold always: in the stream, and in what the store made of it.
// It returns the history.
func (f *Fleet) judge(t *testing.T, o invariant.Options) []contract.EventRecord {
	t.Helper()
	o.Settled = true
	conn := f.connect(t)
	var past []contract.EventRecord
	eventually(t, func() (bool, string) {
		past = f.streamed(t, conn)
		for _, v := range invariant.Check(past, o) {
			if v.Rule == invariant.OneEnd && strings.Contains(v.Text, "no end") {
				return false, v.String()
			}
		}
		stored := f.all(t, client.EventQuery{})
		if len(stored) != len(past) {
			return false, fmt.Sprintf("%d events in the stream, %d in the store", len(past), len(stored))
		}
		return true, ""
	})
	found := invariant.Check(past, o)
	if f.recorder != nil {
		var err error
		if found, err = f.recorder.Check(deadline(t), o); err != nil {
			t.Errorf("the history cannot be judged: %v", err)
		}
	}
	for _, v := range found {
		t.Error(v)
	}
	for i, e := range f.all(t, client.EventQuery{}) {
		if h := past[i]; e.Seq != h.Seq || e.EventID != h.EventID || e.EventType != h.EventType {
			t.Errorf("the store has %s %s as number %d, the stream has %s %s as %d", e.EventType, e.EventID, e.Seq, h.EventType, h.EventID, h.Seq)
			break
		}
	}
	if n := f.rows(t, `SELECT count(*) - count(DISTINCT event_id) FROM events`)[0][0]; n != int64(0) {
		t.Errorf("%v events are doubled in the database", n)
	}
	return past
}

// of selects the events of one task.
func of(past []contract.EventRecord, id contract.TaskID) []contract.EventRecord {
	var out []contract.EventRecord
	for _, e := range past {
		if e.TaskID == id {
			out = append(out, e)
		}
	}
	return out
}

// Brain is a model server that speaks the OpenAI protocol, so that what is asked
// of a model can be counted and held back.
type Brain struct {
	URL string

	mu    sync.Mutex
	asked map[string]int
}

// Question is one request to a Brain.
type Question struct {
	// Task is the first message of the user, Turn how often the model has
	// answered before, Nth counts the questions with the same task and turn from 1.
	Task      string
	Turn, Nth int
	// Body is the request itself.
	Body []byte
}

// NewBrain serves answer, which writes the response.
func NewBrain(t *testing.T, answer func(q Question, w http.ResponseWriter, r *http.Request)) *Brain {
	t.Helper()
	b := &Brain{asked: map[string]int{}}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var req struct {
			Messages []struct {
				Role    string          `json:"role"`
				Content json.RawMessage `json:"content"`
			} `json:"messages"`
		}
		body, err := io.ReadAll(io.LimitReader(r.Body, 16<<20))
		if err == nil {
			err = json.Unmarshal(body, &req)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		q := Question{Body: body}
		for _, m := range req.Messages {
			switch {
			case m.Role == "assistant":
				q.Turn++
			case m.Role == "user" && q.Turn == 0:
				// A sub-agent's task is framed, which tells it from what the program adds.
				var text string
				_ = json.Unmarshal(m.Content, &text)
				if strings.HasPrefix(text, "<") {
					continue // a block of the program
				}
				if task := prompt.Unframe(text); q.Task == "" || task != text {
					q.Task = task
				}
			}
		}
		b.mu.Lock()
		key := fmt.Sprint(q.Task, "#", q.Turn)
		b.asked[key]++
		q.Nth = b.asked[key]
		b.mu.Unlock()
		answer(q, w, r)
	}))
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	b.URL = srv.URL + "/v1"
	return b
}

// Asked is how often a task's turn was asked for.
func (b *Brain) Asked(task string, turn int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.asked[fmt.Sprint(task, "#", turn)]
}

// Say answers with text and calls, each a name and arguments.
func Say(w http.ResponseWriter, text string, calls ...[2]string) {
	type function struct {
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
	}
	msg := map[string]any{"role": "assistant", "content": text}
	reason := "stop"
	var list []any
	for i, c := range calls {
		list = append(list, map[string]any{"id": fmt.Sprint("call_", i), "type": "function", "function": function{c[0], c[1]}})
	}
	if list != nil {
		msg["tool_calls"], reason = list, "tool_calls"
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{
		"id": "c", "object": "chat.completion", "model": "brain-1",
		"choices": []any{map[string]any{"index": 0, "message": msg, "finish_reason": reason}},
		"usage":   map[string]any{"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
	})
}

// Hold answers nothing until the caller has gone, or d is over.
func Hold(r *http.Request, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-r.Context().Done():
	case <-t.C:
	}
}

// dataDir is a data directory of its own.
func (f *Fleet) dataDir(name string) string { return filepath.Join(f.dir, name) }
