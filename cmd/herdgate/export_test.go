package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

func exported(seq int, run string) string {
	return fmt.Sprintf(`{"seq":%d,"event_id":"e%d","run_id":%q,"task_id":null,"event_type":"run.end"}`, seq, seq, run)
}

// What an export goes on behind: whole events count, half of one behind them is taken
// away, and a file that is none, or of another export, is left as it is to the byte.
func TestOpenExport(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "events.jsonl")
	three, seven := exported(3, "r")+"\n", exported(7, "r")+"\n"
	for name, c := range map[string]struct {
		text, left string
		last       uint64
		err        string
	}{
		"empty":                    {"", "", 0, ""},
		"whole":                    {three + seven, three + seven, 7, ""},
		"half a line":              {three + seven[:9], three, 3, ""},
		"half alone":               {three[:9], "", 0, "events.jsonl:1 is not the next event"},
		"not ours":                 {"hello\n", "", 0, "events.jsonl:1 is not the next event"},
		"one line of somebody's":   {`{"api":"settings"}`, "", 0, "events.jsonl:1 is not the next event"},
		"numbered lines":           {"{\"seq\":3}\n", "", 0, "events.jsonl:1 is not the next event"},
		"out of order":             {seven + seven, "", 0, "events.jsonl:2 is not the next event"},
		"somebody's behind ours":   {three + "hello\n", "", 0, "events.jsonl:2 is not the next event"},
		"an event of another run":  {three + exported(5, "other") + "\n", "", 0, "events.jsonl:2, event 5, does not match the filters"},
		"half, and then a newline": {three + seven[:9] + "\n", "", 0, "events.jsonl:2 is not the next event"},
	} {
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		f, last, err := openExport(path, (&eventFilter{run: "r", types: []string{"run.end"}}).matches)
		if err == nil {
			_, werr := f.WriteString("+")
			if cerr := f.Close(); werr != nil || cerr != nil {
				t.Fatal(werr, cerr)
			}
			c.left += "+"
		}
		if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) || last != c.last {
			t.Errorf("%s: last %d, %v; want %d, %q", name, last, err, c.last, c.err)
		}
		if c.err != "" {
			c.left = c.text
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != c.left {
			t.Errorf("%s: the file holds %q, %v; want %q", name, b, err, c.left)
		}
	}

	// What is no file is refused, and nobody waits for the other end of a pipe; a link
	// stands for what it leads to.
	pipe, link := filepath.Join(dir, "pipe"), filepath.Join(dir, "link")
	if err := errors.Join(syscall.Mkfifo(pipe, 0o600), os.Symlink("target", link)); err != nil {
		t.Fatal(err)
	}
	open := func(path, want string) {
		t.Helper()
		f, _, err := openExport(path, (&eventFilter{}).matches)
		if err == nil {
			err = f.Close()
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	open(dir, "is no ordinary file")
	open(pipe, "is no ordinary file")
	open(filepath.Join(dir, "nowhere", "events.jsonl"), "--file: ")
	open(link, "") // to nothing: that is made
	for text, want := range map[string]string{three: "", three[:9]: "link:1 is not the next event"} {
		if err := os.WriteFile(filepath.Join(dir, "target"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		open(link, want)
		if b, err := os.ReadFile(filepath.Join(dir, "target")); err != nil || string(b) != text {
			t.Errorf("behind the link is %q, %v; want %q", b, err, text)
		}
	}
	open(link+"/", "--file: ")
}

// An export asks for what was chosen, tells each time that retention has overtaken it,
// and says how to go on when it breaks off.
func TestExport(t *testing.T) {
	t.Parallel()
	event := func(seq uint64) contract.EventRecord {
		return contract.EventRecord{Seq: seq, EventID: fmt.Sprint("e", seq), EventType: "subagent.end", CreatedAt: time.Unix(0, 0)}
	}
	pages := []wire.EventPage{
		{Events: []contract.EventRecord{event(11), event(12)}, NextAfterSeq: 12, HasMore: true, PrunedSeq: 10},
		{Events: []contract.EventRecord{event(21)}, NextAfterSeq: 21, HasMore: true, PrunedSeq: 20},
		{Events: []contract.EventRecord{event(22)}, NextAfterSeq: 22, HasMore: true, PrunedSeq: 20},
	}
	var asked []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.Query().Encode())
		if len(asked) > len(pages) {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, `{"status":403,"code":"forbidden","detail":"no more"}`)
			return
		}
		if err := json.NewEncoder(w).Encode(pages[len(asked)-1]); err != nil {
			t.Error(err)
		}
	}))
	defer srv.Close()
	c, err := client.New(srv.URL, "", srv.Client())
	if err != nil {
		t.Fatal(err)
	}
	f := eventFilter{task: "t_1", thread: "it's", types: []string{"subagent.end", " subagent.start"}, allAttempts: true}
	var out, log strings.Builder
	err = (&exporter{c: c, q: f.query(), filters: f.String(), out: &out, log: &log, patience: time.Minute}).run(t.Context(), "")
	want := `the export stopped after 4 events, at seq 22; go on with herdgate events export --task t_1 --thread 'it'\''s' --type subagent.end,subagent.start --all-attempts --after-seq 22: `
	if err == nil || !strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), "no more") {
		t.Errorf("error = %v, want %s…", err, want)
	}
	if log.String() != "the events 1 to 10 are no longer kept\nthe events 13 to 20 are no longer kept\n" {
		t.Errorf("told: %s", log.String())
	}
	if lines := strings.Split(strings.TrimSpace(out.String()), "\n"); len(lines) != 4 || !strings.HasPrefix(lines[3], `{"seq":22,`) {
		t.Errorf("printed %q", lines)
	}
	if len(asked) != 4 || !strings.Contains(asked[3], "after_seq=22") {
		t.Fatalf("asked %q", asked)
	}
	for _, part := range []string{"task_id=t_1", "thread_id=it%27s", "type=subagent.end", "attempts=all"} {
		for _, q := range asked {
			if !strings.Contains(q, part) {
				t.Errorf("%q was not asked for in %q", part, q)
			}
		}
	}
}

// An export to a file survives a connection that breaks, ends when nobody answers any
// more, and the same command goes on behind it: each event is there once. Another
// filter is refused, and the file stays as it is.
func TestExportGoesOn(t *testing.T) {
	t.Parallel()
	const events = 9
	asked := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		after, err := strconv.Atoi(r.URL.Query().Get("after_seq"))
		if err != nil && r.URL.Query().Has("after_seq") {
			t.Error(err)
		}
		page := wire.EventPage{NextAfterSeq: uint64(min(after+2, events)), HasMore: after+2 < events}
		for seq := uint64(after) + 1; seq <= page.NextAfterSeq; seq++ {
			page.Events = append(page.Events, contract.EventRecord{Seq: seq, EventID: fmt.Sprint("e", seq), RunID: "r", EventType: "subagent.step", CreatedAt: time.Unix(0, 0)})
		}
		b, err := json.Marshal(page)
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		if asked++; asked == 4 || asked == 6 {
			_, _ = w.Write(b[:len(b)/2]) // and the connection is closed, because the rest is missing
			return
		}
		_, _ = w.Write(b)
	}))
	defer srv.Close()
	c, err := client.New(srv.URL, "", srv.Client())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "events.jsonl")
	export := func(f eventFilter, patience time.Duration) (log string, err error) {
		var b strings.Builder
		err = (&exporter{c: c, q: f.query(), filters: f.String(), log: &b, patience: patience}).toFile(t.Context(), file, f.matches)
		return b.String(), err
	}
	holds := func(n int) {
		t.Helper()
		b, err := os.ReadFile(file)
		lines := strings.Split(string(b), "\n")
		if err != nil || len(lines) != n+1 {
			t.Fatalf("%v, the file holds %q, want %d events", err, b, n)
		}
		for i, line := range lines[:n] {
			if !strings.HasPrefix(line, fmt.Sprintf(`{"seq":%d,"event_id":"e%d"`, i+1, i+1)) {
				t.Errorf("line %d is %q", i+1, line)
			}
		}
	}
	of := eventFilter{run: "r"}
	if _, err := export(of, 0); err == nil || !strings.HasPrefix(err.Error(), "the export stopped after 6 events, at seq 6; go on with the same command: ") {
		t.Errorf("it ended with %v", err)
	}
	holds(6)
	if _, err := export(eventFilter{run: "other"}, time.Minute); err == nil || !strings.Contains(err.Error(), "events.jsonl:1, event 1, does not match the filters") {
		t.Errorf("another run: %v", err)
	}
	holds(6)
	if log, err := export(of, time.Minute); err != nil || log != "3 events, up to seq 9\n" {
		t.Errorf("going on: %q, %v", log, err)
	}
	holds(events)
	if log, err := export(of, time.Minute); err != nil || log != "0 events, up to seq 9\n" {
		t.Errorf("once more: %q, %v", log, err)
	}
	holds(events)
}
