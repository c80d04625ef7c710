package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
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
	if _, _, err := openExport(dir, nil); err == nil || !strings.Contains(err.Error(), "no ordinary file") {
		t.Errorf("a folder: %v", err)
	}
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
