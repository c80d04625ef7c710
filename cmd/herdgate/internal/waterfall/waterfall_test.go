package waterfall

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/charmbracelet/x/ansi"

	"github.com/herdgate/herdgate/pkg/contract"
)

var update = flag.Bool("update", false, "write the golden files")

func golden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if text != string(want) {
		t.Errorf("%s:\n%s\nwant:\n%s", name, text, want)
	}
}

var begin = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// history collects the events of a run.
type history []contract.EventRecord

// add adds an event that came so many milliseconds after the run's begin.
func (h *history) add(ms int, task contract.TaskID, typ string, attempt int, content string) {
	*h = append(*h, contract.EventRecord{
		Seq: uint64(len(*h) + 1), RunID: "r_1", TaskID: task, EventType: typ, Content: json.RawMessage(content),
		Metadata: json.RawMessage(fmt.Sprintf(`{"attempt":%d}`, attempt)), CreatedAt: begin.Add(time.Duration(ms) * time.Millisecond),
	})
}

// family is a run with three sub-agents: one stopped by its turn limit, one that a
// second executor ran again, one cancelled while it waited for its model.
func family() history {
	var h history
	h.add(0, "", "run.started", 0, `{"model_name":"main","input":"x"}`)
	h.add(900, "", "run.message", 0, `{"message":{"kind":"ai","tool_calls":[{"name":"task"},{"name":"task"},{"name":"ls"},{"name":"task"}]}}`)
	h.add(910, "t_1", "subagent.queued", 0, `{"description":"Read the orders","queue_position":0}`)
	h.add(911, "t_1", "subagent.admitted", 1, `{"slot":1}`)
	h.add(912, "t_2", "subagent.queued", 0, `{"description":"Read the workers","queue_position":0}`)
	h.add(913, "t_2", "subagent.admitted", 1, `{"slot":2}`)
	h.add(914, "t_3", "subagent.queued", 0, `{"description":"Read the web client","queue_position":1}`)
	h.add(920, "t_1", "subagent.start", 1, `{"model_name":"small","executor":"ex-1"}`)
	h.add(921, "t_2", "subagent.start", 1, `{"model_name":"small","executor":"ex-2"}`)
	h.add(1900, "t_1", "subagent.step", 1, `{"kind":"ai","tool_calls":[{"name":"grep"},{"name":"grep"},{"name":"ls"}]}`)
	h.add(2000, "t_2", "subagent.step", 1, `{"kind":"ai","tool_calls":[{"name":"bash"}]}`)
	for range 3 {
		h.add(2400, "t_1", "subagent.step", 1, `{"kind":"tool","tool_name":"grep"}`)
	}
	h.add(3400, "t_1", "subagent.step", 1, `{"kind":"ai","tool_calls":[]}`)
	h.add(3401, "t_1", "subagent.end", 1, `{"status":"completed","stop_reason":"turn_capped","usage":{"total_tokens":1400,"cost_usd":0.0042}}`)
	h.add(3402, "t_3", "subagent.admitted", 1, `{"slot":1,"waited_ms":2488}`)
	h.add(3410, "t_3", "subagent.start", 1, `{"model_name":"small","executor":"ex-1"}`)
	h.add(7000, "t_2", "subagent.admitted", 2, `{"slot":2}`)
	h.add(7010, "t_2", "subagent.start", 2, `{"model_name":"small","executor":"ex-1"}`)
	h.add(8500, "t_2", "subagent.step", 2, `{"kind":"ai","tool_calls":[]}`)
	h.add(8501, "t_2", "subagent.end", 2, `{"status":"completed","usage":{"total_tokens":700,"cost_usd":0.002}}`)
	h.add(9000, "t_3", "subagent.end", 1, `{"status":"cancelled","error":"cancelled by the user\nand more"}`)
	for range 4 {
		h.add(9010, "", "run.message", 0, `{"message":{"kind":"tool","tool_name":"task"}}`)
	}
	h.add(10000, "", "run.message", 0, `{"message":{"kind":"ai","tool_calls":[]}}`)
	h.add(10001, "", "run.completed", 0, `{"status":"completed","usage":{"total_tokens":5100,"cost_usd":0.0312}}`)
	return h
}

// Queue wait, attempts, turns, tools, tokens, cost and stop reasons, in a wide and a
// narrow terminal.
func TestRunFromEvents(t *testing.T) {
	t.Parallel()
	chart := FromEvents("r_1", family(), begin.Add(time.Hour))
	chart.TraceID = "0af7651916cd43dd8448eb211c80319c"
	golden(t, "family-120.golden", chart.Draw(120, false))
	golden(t, "family-60.golden", chart.Draw(60, false))
	if strings.ContainsRune(chart.Draw(100, false), '\x1b') || !strings.Contains(chart.Draw(100, true), "\x1b[31m") {
		t.Error("colours are not where they were asked for, and nowhere else")
	}
	if plain := ansi.Strip(chart.Draw(100, true)); plain != chart.Draw(100, false) {
		t.Errorf("with colours other text:\n%s", plain)
	}
}

// What has not ended is drawn up to now, and shows in what it is.
func TestRunOnItsWay(t *testing.T) {
	t.Parallel()
	h := family()
	now := begin.Add(6 * time.Second)
	for i, rec := range h {
		if rec.CreatedAt.After(now) {
			h = h[:i]
			break
		}
	}
	chart := FromEvents("r_1", h, now)
	golden(t, "open.golden", chart.Draw(100, false))
	var waiting history
	waiting.add(0, "t_1", "subagent.queued", 0, `{"subagent_type":"general-purpose","queue_position":7}`)
	chart = FromEvents("r_1", waiting, begin.Add(90*time.Second))
	golden(t, "waiting.golden", chart.Draw(100, false))
}

// Events that are no longer kept, or hold what nobody expects, leave a picture of the rest.
func TestRunWithHoles(t *testing.T) {
	t.Parallel()
	h := family()[13:]
	h[3].Content = json.RawMessage(`{"status":[1]}`)
	h[4].CreatedAt = begin // a clock that is behind
	chart := FromEvents("r_1", h, begin.Add(time.Hour))
	golden(t, "holes.golden", chart.Draw(100, false))
	for n := range family() {
		part := FromEvents("r_1", family()[n:], begin)
		check(t, &part)
	}
	none := FromEvents("r_1", nil, begin)
	check(t, &none)
}

// check draws a chart in all widths and looks whether it fits and is safe.
func check(t *testing.T, c *Chart) {
	t.Helper()
	for _, width := range []int{-1, 0, 1, 40, 41, 57, 80, 132, 1 << 20} {
		limit := min(max(width, MinWidth), MaxWidth)
		if width <= 0 {
			limit = DefaultWidth
		}
		bars := -1
		rows := false
		for line := range strings.Lines(c.Draw(width, false)) {
			rows = rows || line == "\n"
			line, ended := strings.CutSuffix(line, "\n")
			if n := ansi.StringWidth(line); n > limit || !ended {
				t.Errorf("width %d: a line of %d columns, ended %t: %q", width, n, ended, line)
			}
			if i := strings.IndexFunc(line, func(r rune) bool { return unicode.IsControl(r) || r == '\u202e' }); i >= 0 {
				t.Errorf("width %d: a control character in %q", width, line)
			}
			if before, _, ok := strings.Cut(line, " |"); ok && rows {
				if n := ansi.StringWidth(before); bars >= 0 && n != bars {
					t.Errorf("width %d: the bar begins at column %d, others at %d: %q", width, n, bars, line)
				} else {
					bars = n
				}
			}
		}
	}
}

const hostile = "\x1b]0;owned\x07\x1b[2J\n\r\u202eevil\u009b31m 漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字 | end"

// Names come from models, tools and other servers: nothing of them may reach the
// terminal as anything but text, or push the bars out of line.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	text, _ := json.Marshal(hostile)
	var h history
	h.add(0, "", "run.started", 0, fmt.Sprintf(`{"model_name":%s}`, text))
	h.add(10, "", "run.message", 0, fmt.Sprintf(`{"message":{"kind":"ai","tool_calls":[{"name":%s}]}}`, text))
	h.add(20, hostile, "subagent.queued", 0, fmt.Sprintf(`{"description":%s,"queue_position":-1}`, text))
	h.add(30, hostile, "subagent.start", -7, fmt.Sprintf(`{"model_name":%s,"executor":%s}`, text, text))
	h.add(40, hostile, "subagent.end", 1, fmt.Sprintf(`{"status":%s,"stop_reason":%s,"error_code":%s,"error":%s}`, text, text, text, text))
	h.add(50, "", "run.failed", 0, fmt.Sprintf(`{"status":%s,"error":%s,"error_code":%s}`, text, text, text))
	chart := FromEvents(hostile, h, begin)
	chart.TraceID, chart.Notes = hostile, []string{hostile}
	check(t, &chart)
	if out := chart.Draw(200, false); !strings.Contains(out, `\x1b]0;owned\x07`) {
		t.Errorf("the name is not shown with its escapes:\n%s", out)
	}

	spans := []Span{
		{ID: "a", ParentID: "b", Name: hostile, Service: hostile, Start: begin, End: begin.Add(-time.Second), Failed: true, Message: hostile},
		{ID: "b", ParentID: "a", Name: hostile, Start: time.Unix(0, 1<<63-1), End: time.Unix(0, -1<<63)},
		{ID: "b", ParentID: "b", Name: "twice"},
	}
	for n := range 40 {
		spans = append(spans, Span{ID: fmt.Sprint(n + 1), ParentID: fmt.Sprint(n), Name: "deep", Start: begin, End: begin})
	}
	trace := FromSpans(hostile, spans)
	if len(trace.Rows) != len(spans) {
		t.Errorf("%d rows of %d spans", len(trace.Rows), len(spans))
	}
	check(t, &trace)
	if _, err := json.Marshal(trace); err != nil {
		t.Error(err)
	}
}

func TestReadSpansRefuses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		answer, want string
		none         bool
	}{
		{``, "no span", true},
		{`{"result":{"resourceSpans":[]}}`, "no span", true},
		{`{"error":{"httpCode":404,"message":"No traces found"}}`, "No traces found", true},
		{`<html>`, "no OTLP in JSON", false},
		{`{"data":[]}`, `no "result"`, false},
		{`{"result":{"resourceSpans":[{"scopeSpans":[{"spans":[{"startTimeUnixNano":"soon"}]}]}]}}`, "no OTLP in JSON", false},
	} {
		_, err := ReadSpans(strings.NewReader(c.answer))
		if err == nil || !strings.Contains(err.Error(), c.want) || errors.Is(err, ErrNoTrace) != c.none {
			t.Errorf("%s: %v; want %q", c.answer, err, c.want)
		}
	}
}

func FuzzReadSpans(f *testing.F) {
	f.Add(`{"result":{"resourceSpans":[{"resource":{"attributes":[{"key":"service.name","value":{"stringValue":"s"}}]},"scopeSpans":[{"spans":[{"traceId":"1","spanId":"2","parentSpanId":"2","name":"n","startTimeUnixNano":"1","endTimeUnixNano":2,"status":{"code":2}}]}]}]}}`)
	f.Fuzz(func(t *testing.T, answer string) {
		spans, err := ReadSpans(strings.NewReader(answer))
		if err != nil {
			return // refused, and so nothing is drawn
		}
		chart := FromSpans("t", spans)
		check(t, &chart)
	})
}
