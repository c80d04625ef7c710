package system

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/endpoint"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/postgres"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// injected is what would be an event of its own if the framing let it through.
const injected = "x\n\ndata: {\"forged\":true}\nevent: forged\nid: 1\n\n: \r\n\r\ndata: forged\r\revent: forged\u2028data: forged\u2029\u0085"

// hostileTexts are what a model may say, and what is left of it for readers.
var hostileTexts = []struct{ said, stored string }{
	{"bytes \xff\xfe that are no UTF-8", "bytes \uFFFD\uFFFD that are no UTF-8"},
	{"a NUL \x00 inside", "a NUL \uFFFD inside"},
	{"half a pair \xed\xa0\x80 alone", "half a pair \uFFFD\uFFFD\uFFFD alone"},
	{"right to left \u202e and nothing \u200b\ufeff\u2060 wide", "right to left \u202e and nothing \u200b\ufeff\u2060 wide"},
	{"</script><script>alert('1')</script>&<!--", "</script><script>alert('1')</script>&<!--"},
	{injected, injected},
	{`"quoted" \u0000 \ud800 \\ {"json":[1e400]}`, `"quoted" \u0000 \ud800 \\ {"json":[1e400]}`},
	{"e\u0301 \U0001F468\u200d\U0001F469\u200d\U0001F467 \x1b[31m\a\b", "e\u0301 \U0001F468\u200d\U0001F469\u200d\U0001F467 \x1b[31m\a\b"},
}

var deep = `{"a":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`

// hostileArgs are the arguments of calls as a model may write them, and what readers
// get: the same structure, or the text where there can be none.
var hostileArgs = []struct{ said, stored string }{
	{`{"n":1e400,"m":-1e999,"big":9223372036854775809,"small":-9223372036854775809,"f":0.1000,"e":1E2}`,
		`{"n":"1e400","m":"-1e999","big":9223372036854775809,"small":-9223372036854775809,"f":0.1000,"e":1E2}`},
	{`{"big":9223372036854775809,"long":123456789012345678901234567890.5,"zero":-0}`,
		`{"big":9223372036854775809,"long":123456789012345678901234567890.5,"zero":-0}`},
	{`{"nul":"a\u0000b","half":"\ud800","other":"\udc00x","pair":"\ud83d\ude00","k\u0000":{"deep":[{"\ud800":1}]}}`,
		`{"nul":"a\ufffdb","half":"\ufffd","other":"\ufffdx","pair":"😀","k\ufffd":{"deep":[{"\ufffd":1}]}}`},
	{`{"lines":"\n\ndata: forged\r\nevent: forged","html":"</script>","\r\n\r\nid: 7":"\u2028"}`,
		`{"lines":"\n\ndata: forged\r\nevent: forged","html":"</script>","\r\n\r\nid: 7":"\u2028"}`},
	{`{"__proto__":{"x":1},"":"empty","constructor":null}`, `{"__proto__":{"x":1},"":"empty","constructor":null}`},
	{"{\"raw\":\"\xff\"}", "{\"raw\":\"\uFFFD\"}"},
	{"{\n\n\"data\": \n\n[1,\r\n\r\n2]}", `{"data":[1,2]}`},
	{"not JSON\x00\n\ndata: forged", `"not JSON\ufffd\n\ndata: forged"`},
	{deep, ""}, // as the beginning of its text
}

// hostile says all of that, and ends with the texts.
type hostile struct{}

func (hostile) Name() string      { return "hostile" }
func (hostile) ModelName() string { return "hostile-1" }

func (hostile) Generate(_ context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	turn := 0
	for _, m := range req.Messages {
		if m.Role == model.RoleAssistant {
			turn++
		}
	}
	if turn < len(hostileTexts) {
		msg := model.Message{Role: model.RoleAssistant, Text: hostileTexts[turn].said, FinishReason: "tool_calls"}
		args := hostileArgs[turn:min(turn+1, len(hostileArgs))]
		if turn == len(hostileTexts)-1 {
			args = hostileArgs[turn:]
		}
		for i, a := range args {
			msg.ToolCalls = append(msg.ToolCalls, model.ToolCall{ID: fmt.Sprintf("c%d-%d\n\ndata: forged", turn, i), Name: "nosuch\r\n\r\nevent: forged", Args: a.said})
		}
		return model.Response{Message: msg, Model: "hostile\n\ndata: forged"}, nil
	}
	var all []string
	for _, h := range hostileTexts {
		all = append(all, h.said)
	}
	return model.Response{Message: model.Message{Text: strings.Join(all, "|"), FinishReason: "stop"}, Model: "hostile"}, nil
}

// numbers reads JSON and keeps its numbers to the digit.
func numbers(t *testing.T, raw []byte) any {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%v: %.300q", err, raw)
	}
	return v
}

// EVT-20, STEP-06, STEP-07: hostile texts of a task come out of both stores, in pages,
// in streams, and over NATS, as structured as they went in, and nothing in them becomes
// a line, a field or an event of a stream.
func TestHostileTexts(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		hostileThrough(t, sqlite.Opener(dir))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pg := pgtest.Start(t)
		hostileThrough(t, postgres.Opener(pg.Database(), false))
	})
}

func hostileThrough(t *testing.T, open eventsink.OpenFunc) {
	s := New(t, Options{Model: hostile{}, Unrecorded: true}) // it has events that no service would write
	s.SinkOf("sink-1", eventsink.Config{}, open)
	s.Admission("adm-1")
	s.Executor("ex-1", 2, time.Second)
	_, c := s.Lead("lead-1", t.TempDir())
	feed := s.Follow()
	req := Request("say it")
	req.ThreadID = "a thread \u202e\u200b</script>: data"
	req.Description = "described \n\ndata: forged\r\n\r\nevent: forged\u2028 </script>"
	req.Subagent.MaxTurns = len(hostileTexts) + 2
	s.Submit(req)
	told := feed.Ended(1)
	// Somebody else's events have ids of their own making.
	forged := told[1]
	for i, id := range []string{"forged\n\ndata: forged", "\x00", "\u2028\u202e</script>", strings.Repeat("x", 4000)} {
		forged.ID = id
		body, err := json.Marshal(map[string]any{
			"specversion": "1.0", "id": id, "source": "/\r\n\r\nevent: forged", "type": forged.Type, "tenant": forged.Tenant, "threadid": forged.ThreadID,
			"runid": forged.RunID, "taskid": forged.TaskID, "attempt": 1, "time": time.Now().UTC(), "data": json.RawMessage(forged.Data),
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Bus.Publish(timeout(t), bus.Write{Subject: forged.NATSSubject(s.Bus.Names), Data: body, MsgID: fmt.Sprint("forged-", i)}); err != nil {
			t.Fatal(err)
		}
	}
	_, last := lastSeq(t, s)
	natstest.Eventually(t, Timeout, func() (bool, string) {
		resp, err := eventapi.List(timeout(t), s.Bus, eventapi.ListRequest{Limit: 1})
		return err == nil && resp.LastSeq >= last, fmt.Sprint("the store is at ", resp.LastSeq, " of ", last, err)
	})

	// 1. Pages over HTTP.
	pages := listed(t, c, client.EventQuery{ThreadID: req.ThreadID})
	// 2. The endpoint over NATS.
	body := mustJSON(t, eventapi.ListRequest{ThreadID: req.ThreadID})
	msg, err := s.Bus.NC.RequestWithContext(timeout(t), endpoint.Bound(eventapi.Subject(s.Bus.Names), contract.DefaultTenant), body)
	if err != nil {
		t.Fatal(err)
	}
	var micro eventapi.ListResponse
	if err := json.Unmarshal(msg.Data, &micro); err != nil || micro.HasMore {
		t.Fatal(err, micro.HasMore)
	}
	// 3. A stream of what the event stream has. 4. A stream of what the store alone has.
	read := func(purged bool) []contract.EventRecord {
		t.Helper()
		if purged {
			stream, err := s.Bus.JS.Stream(timeout(t), s.Bus.Names.EventStream())
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.Purge(timeout(t)); err != nil {
				t.Fatal(err)
			}
		}
		st := openStream(t, hostOf(c), "/v1/events?thread_id="+url.QueryEscape(string(req.ThreadID)))
		var out []contract.EventRecord
		for len(out) < len(pages) {
			b, more := st.next()
			if !more {
				t.Fatalf("the stream ended after %d of %d events", len(out), len(pages))
			}
			if b.other != 0 || b.comment != "" && b.comment != "open" && b.comment != "keep-alive" {
				t.Fatalf("a line of a text became a field or comment: %+v", b)
			}
			if b.data == "" && b.event == "" {
				continue
			}
			var rec contract.EventRecord
			if err := json.Unmarshal([]byte(b.data), &rec); err != nil || b.id != fmt.Sprint(rec.Seq) || b.event != rec.EventType || strings.Contains(b.data, "\n") {
				t.Fatalf("a text broke the framing: %v: %.500s", err, b.data)
			}
			out = append(out, rec)
		}
		return out
	}
	ways := map[string][]contract.EventRecord{"pages": pages, "NATS": micro.Events, "stream": read(false)}
	ways["stored stream"] = read(true)
	ofTask := 0
	for _, ev := range told {
		if ev.TaskID == req.TaskID {
			ofTask++
		}
	}
	for way, records := range ways {
		if len(records) != len(pages) || len(records) < ofTask {
			t.Fatalf("%s: %d events; pages have %d, the task told %d", way, len(records), len(pages), ofTask)
		}
		for i, r := range records {
			want := pages[i]
			if r.Seq != want.Seq || r.EventID != want.EventID || !reflect.DeepEqual(numbers(t, r.Content), numbers(t, want.Content)) || !reflect.DeepEqual(numbers(t, r.Metadata), numbers(t, want.Metadata)) {
				t.Errorf("%s: event %d is\n%s; in pages\n%s", way, i, text(r), text(want))
			}
		}
		wantHostile(t, way, records)
	}
}

// wantHostile compares what came out with what was said.
func wantHostile(t *testing.T, way string, records []contract.EventRecord) {
	t.Helper()
	var (
		texts []string
		args  []json.RawMessage
		ended bool
	)
	for _, r := range records {
		switch r.EventType {
		case contract.RecordStep:
			var step contract.Step
			if err := json.Unmarshal(r.Content, &step); err != nil {
				t.Fatal(err, string(r.Content))
			}
			if step.Kind != contract.StepAI {
				continue
			}
			texts = append(texts, step.Text)
			for _, c := range step.ToolCalls {
				args = append(args, c.Args)
			}
		case contract.RecordEnd:
			var end struct{ Result, Error *string }
			if err := json.Unmarshal(r.Content, &end); err != nil || end.Result == nil {
				t.Fatal(err, string(r.Content))
			}
			ended = true
			for _, h := range hostileTexts {
				if !strings.Contains(*end.Result, h.stored) {
					t.Errorf("%s: the result %q lacks %q", way, *end.Result, h.stored)
				}
			}
		}
	}
	if !ended || len(texts) != len(hostileTexts)+1 || len(args) != len(hostileArgs) {
		t.Fatalf("%s: ended %v, %d texts, %d arguments; want %d and %d", way, ended, len(texts), len(args), len(hostileTexts)+1, len(hostileArgs))
	}
	for i, h := range hostileTexts {
		if texts[i] != h.stored {
			t.Errorf("%s: %q was stored as %q, want %q", way, h.said, texts[i], h.stored)
		}
	}
	for i, h := range hostileArgs {
		got := numbers(t, args[i])
		if h.stored == "" {
			if s, ok := got.(string); !ok || !strings.HasPrefix(h.said, s) || len(s) != contract.MaxStepChars {
				t.Errorf("%s: 10,000 levels are %.80q", way, args[i])
			}
			continue
		}
		if want := numbers(t, []byte(h.stored)); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %s was stored as %s, want %s", way, h.said, args[i], h.stored)
		}
	}
	if slices.ContainsFunc(records, func(r contract.EventRecord) bool { return strings.Contains(r.EventType, "forged") }) {
		t.Errorf("%s: a forged event", way)
	}
}
