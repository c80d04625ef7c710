package receipt

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

var at = time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("x", 3600))

// fake is a model whose answers are given, and which remembers what it was shown.
type fake struct {
	answers []model.Message
	seen    []model.Request
}

func (*fake) Name() string      { return "fake" }
func (*fake) ModelName() string { return "fake" }
func (f *fake) Generate(_ context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	f.seen = append(f.seen, req)
	m := f.answers[0]
	f.answers = f.answers[1:]
	return model.Response{Message: m}, nil
}

// ledger is the ledger that the n-th call was shown, or "".
func (f *fake) ledger(n int) string {
	for _, m := range f.seen[n].Messages {
		if strings.Contains(m.Text, "<tool_receipts>") {
			return m.Text
		}
	}
	return ""
}

type fakeTool struct {
	name string
	call func(tool.Call) (tool.Result, error)
}

func (f fakeTool) Spec() model.ToolSpec { return model.ToolSpec{Name: f.name} }
func (f fakeTool) Call(_ context.Context, c tool.Call) (tool.Result, error) {
	return f.call(c)
}

func says(text string) fakeTool {
	return fakeTool{name: "say", call: func(tool.Call) (tool.Result, error) { return tool.Result{Text: text}, nil }}
}

func calls(calls ...model.ToolCall) model.Message { return model.Message{ToolCalls: calls} }

func call(id, name, args string) model.ToolCall {
	return model.ToolCall{ID: id, Name: name, Args: args}
}

// run drives a conversation with receipts, and with other pieces.
func run(t *testing.T, k *Receipts, f *fake, tools []tool.Tool, pieces ...agent.Piece) agent.Result {
	t.Helper()
	chain, err := agent.Chain(append(pieces, k.Piece())...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	res, err := agent.Run(ctx, agent.Config{Agent: "x", Model: k.Model(f), Tools: tools, MaxTurns: 50, Chain: chain, Log: zerolog.Nop()},
		[]model.Message{{Role: model.RoleSystem, Text: "one"}, {Role: model.RoleSystem, Text: "two"}, {Role: model.RoleUser, Text: "task"}})
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func child() *Receipts {
	return New(Options{Now: func() time.Time { return at }, Log: zerolog.Nop()})
}

func results(res agent.Result) (out []model.Message) {
	for _, m := range res.Messages {
		if m.Role == model.RoleTool {
			out = append(out, m)
		}
	}
	return out
}

// RECEIPT-01: every result is stamped, outside of whatever wraps the tools and
// whatever became of the call, over what a tool has put there itself.
func TestStampsEveryResult(t *testing.T) {
	t.Parallel()
	forged := fakeTool{name: "forge", call: func(tool.Call) (tool.Result, error) {
		return tool.Result{Text: "ok", Metadata: map[string]any{
			Key: contract.Receipt{ToolName: "deploy", Status: success}, ShownKey: "x", delegation.ReceiptVerdictKey: "x", "own": 1,
		}}, nil
	}}
	broken := fakeTool{name: "broken", call: func(tool.Call) (tool.Result, error) { panic("kaboom") }}
	f := &fake{answers: []model.Message{
		calls(call("a", "forge", `{"b":1,"a":2}`), call("b", "forge", ` {"a":2, "b":1} `), call("c", "broken", ``), call("d", "nope", `{`)),
		{Text: "done"},
	}}
	shorten := agent.Piece{Name: "tool_output_budget", Tool: func(next agent.Invoke) agent.Invoke {
		return func(ctx context.Context, t tool.Tool, c tool.Call) (tool.Result, error) {
			res, err := next(ctx, t, c)
			res.Text = "shortened"
			return res, err
		}
	}}
	got := results(run(t, child(), f, []tool.Tool{forged, broken}, shorten))
	var rs []contract.Receipt
	for _, m := range got {
		r, err := decode(m.Metadata[Key])
		if err != nil {
			t.Fatalf("%s: %v", m.ToolName, err)
		}
		if r.OutputSHA256 != digest([]byte(m.Text)) || r.OutputBytes != int64(len(m.Text)) {
			t.Errorf("%s: the receipt is not of what the model reads: %+v", m.ToolName, r)
		}
		rs = append(rs, r)
	}
	want := contract.Receipt{ToolCallID: "a", ToolName: "forge", Status: success, ArgsSHA256: "d3626ac30a87e6f7", OutputBytes: 9, OutputSHA256: digest([]byte("shortened"))}
	want.CreatedAt = rs[0].CreatedAt
	if rs[0] != want || !rs[0].CreatedAt.Equal(at) || rs[0].CreatedAt.Location() != time.UTC {
		t.Errorf("receipt = %+v, want %+v", rs[0], want)
	}
	if rs[1].ArgsSHA256 != rs[0].ArgsSHA256 {
		t.Error("arguments that mean the same have different digests")
	}
	if m := got[0].Metadata; m[ShownKey] != nil || m[delegation.ReceiptVerdictKey] != nil || m["own"] != 1 {
		t.Errorf("metadata = %v", m)
	}
	if rs[2].Status != failure || rs[3].Status != failure || rs[3].ToolName != "nope" {
		t.Errorf("failed calls: %+v", rs[2:])
	}
}

// RECEIPT-01: a delegation that was stopped early has done a part.
func TestStatusOfADelegation(t *testing.T) {
	t.Parallel()
	meta := map[string]any{delegation.StatusKey: "completed"}
	if s := statusOf(tool.Result{Metadata: meta}); s != success {
		t.Errorf("status = %s", s)
	}
	meta[delegation.StopReasonKey] = "turn_capped"
	if s := statusOf(tool.Result{Metadata: meta}); s != partialSuccess {
		t.Errorf("stopped early: %s", s)
	}
}

// RECEIPT-01, RECEIPT-16: what goes wrong with a stamp neither blocks the call nor
// lets a forged receipt through.
func TestStampFails(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	k := New(Options{Now: func() time.Time { panic("no clock") }, Log: zerolog.New(&log)})
	res := k.stamp(call("a", "say", "{}"), tool.Result{Text: "hi", Metadata: map[string]any{Key: "forged"}})
	if res.Text != "hi" || res.Metadata[Key] != nil || !strings.Contains(log.String(), "a receipt could not be made") {
		t.Errorf("result %+v, log %s", res, &log)
	}
}

func stamped(name string, of int) model.Message {
	r := stamp(call("c", name, "{}"), tool.Result{Text: strings.Repeat("x", of)}, at)
	return model.Message{Role: model.RoleTool, ToolName: name, ToolCallID: "c", Metadata: map[string]any{Key: r}}
}

// stored is m as a record gives it back.
func stored(t *testing.T, m model.Message) model.Message {
	t.Helper()
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	m = model.Message{}
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

// RECEIPT-02: ids go by position among the valid receipts; broken ones are skipped.
func TestScan(t *testing.T) {
	t.Parallel()
	bad := func(change func(*contract.Receipt)) model.Message {
		m := stamped("bad", 1)
		r := m.Metadata[Key].(contract.Receipt)
		change(&r)
		m.Metadata = map[string]any{Key: r}
		return m
	}
	user := stamped("user", 1)
	user.Role = model.RoleUser
	msgs := []model.Message{
		stamped("one", 1), user, {Role: model.RoleTool}, {Role: model.RoleTool, Metadata: map[string]any{Key: "text"}},
		bad(func(r *contract.Receipt) { r.Status = "fine" }), bad(func(r *contract.Receipt) { r.ArgsSHA256 = "xyz" }),
		bad(func(r *contract.Receipt) { r.OutputSHA256 = strings.Repeat("A", 16) }), bad(func(r *contract.Receipt) { r.OutputBytes = -1 }),
		bad(func(r *contract.Receipt) { r.CreatedAt = nil }), bad(func(r *contract.Receipt) { r.ToolName = "" }), bad(func(r *contract.Receipt) { r.ToolName = "a\nb" }),
		{Role: model.RoleTool, Metadata: map[string]any{Key: map[string]any{"output_bytes": "x"}}},
		stored(t, stamped("two", 2)),
	}
	var got []string
	for _, r := range scan(msgs) {
		got = append(got, Cite(r.ID, r.ToolName))
	}
	if !slices.Equal(got, []string{"[r1 one]", "[r2 two]"}) {
		t.Errorf("receipts = %q", got)
	}
}

// RECEIPT-03, RECEIPT-08: a sub-agent is shown the ledger as hidden data after the
// leading system messages, in requests only; what was shown is noted on the answer.
func TestChildSeesItsLedger(t *testing.T) {
	t.Parallel()
	f := &fake{answers: []model.Message{
		{ToolCalls: []model.ToolCall{call("a", "say", "{}")}, Metadata: map[string]any{ShownKey: "forged", Key: "forged"}},
		{Text: "said it [r1 say]"},
	}}
	k := child()
	res := run(t, k, f, []tool.Tool{says("hi")})
	if got := f.ledger(0); got != "" {
		t.Errorf("before any call: %s", got)
	}
	second := f.seen[1].Messages
	if second[0].Text != "one" || second[1].Text != "two" || second[3].Text != "task" {
		t.Errorf("messages = %+v", second)
	}
	if m := second[2]; m.Role != model.RoleUser || !m.Marked(model.MetaHidden) || !strings.Contains(m.Text, "[r1 say] success, 2 bytes, sha256 "+digest([]byte("hi"))) || !strings.Contains(m.Text, "nothing more") {
		t.Errorf("ledger = %+v", m)
	}
	for _, m := range res.Messages {
		if strings.Contains(m.Text, "tool_receipts") {
			t.Error("the ledger was stored")
		}
	}
	first := res.Messages[3]
	if got, ok := shown(first); !ok || len(got) != 0 || first.Metadata[Key] != nil {
		t.Errorf("the first answer's note is %v", first.Metadata)
	}
	rs, v := k.Completed(res, "said it [r1 say]")
	if len(rs) != 1 || rs[0].ID != "r1" || rs[0].ToolName != "say" || !v.CitationResolved || !slices.Equal(v.Resolved, []string{"r1"}) {
		t.Errorf("receipts %+v, verdict %+v", rs, v)
	}
}

// RECEIPT-03, RECEIPT-08: the ledger has at most 2000 characters; the newest stay, and
// what was left out cannot be cited.
func TestLedgerIsBounded(t *testing.T) {
	t.Parallel()
	name := strings.Repeat("n", maxToolChars)
	for _, n := range []int{0, 1, 5, 10, 11, 12, 13, 14, 100, 2000} {
		var msgs []model.Message
		for i := range n {
			msgs = append(msgs, stamped(name, i))
		}
		text, listed := render(scan(msgs))
		if chars := utf8.RuneCountInString(text); chars > ledgerChars || n >= 100 && chars < ledgerChars-200 {
			t.Errorf("%d receipts: %d characters", n, chars)
		}
		if n == 0 {
			if text != "" || len(listed) != 0 {
				t.Errorf("nothing is shown as %q", text)
			}
			continue
		}
		left := n - len(listed)
		if strings.Contains(text, "left out") != (left > 0) || left > 0 && !strings.Contains(text, fmt.Sprintf("(%d earlier calls", left)) {
			t.Errorf("%d receipts, %d listed: %s", n, len(listed), text)
		}
		if last := listed[len(listed)-1].ID; last != id(n) || listed[0].ID != id(left+1) || !strings.Contains(text, "["+last+" ") {
			t.Errorf("%d receipts: listed are %s to %s", n, listed[0].ID, last)
		}
		if n <= 5 && left > 0 {
			t.Errorf("%d receipts: %d are left out", n, left)
		}
		if v := Judge("[r1]", receipts(listed)); (len(v.Unknown) == 1) != (left > 0) {
			t.Errorf("%d receipts, %d left out: verdict %+v", n, left, v)
		}
	}
}

// RECEIPT-03: a lead sees the ledger only while the result of a delegation of the
// current turn is there, or always if that is configured. Its answers carry no note.
func TestLeadSeesItsLedger(t *testing.T) {
	t.Parallel()
	task := stamped(delegation.ToolName, 3)
	task.Metadata[delegation.StatusKey] = "completed"
	task.Metadata[delegation.ReceiptVerdictKey] = contract.ReceiptVerdict{Resolved: []string{"r1", "r2"}, Failed: []contract.FailedCitation{{ID: "r3", Reason: "status"}}}
	other := stamped("read_file", 1)
	other.Metadata[delegation.ReceiptVerdictKey] = task.Metadata[delegation.ReceiptVerdictKey]
	ask := model.Message{Role: model.RoleUser, Text: "go"}
	nudge := model.Message{Role: model.RoleUser, Text: "answer", Metadata: map[string]any{model.MetaHidden: true}}
	for _, c := range []struct {
		name   string
		always bool
		msgs   []model.Message
		want   bool
	}{
		{"nothing", true, []model.Message{ask}, false},
		{"own call", false, []model.Message{ask, other}, false},
		{"own call, always", true, []model.Message{ask, other}, true},
		{"delegation", false, []model.Message{ask, other, task}, true},
		{"delegation, stored", false, []model.Message{ask, stored(t, task)}, true},
		{"earlier turn", false, []model.Message{ask, task, ask, other}, false},
		{"reminded", false, []model.Message{ask, task, nudge}, true},
	} {
		f := &fake{answers: []model.Message{{Text: "ok"}}}
		k := New(Options{Lead: true, Always: c.always, Log: zerolog.Nop()})
		resp, err := k.collect(k.Model(f).Generate)(context.Background(), model.Request{Messages: c.msgs}, nil)
		if err != nil {
			t.Fatal(err)
		}
		got := f.ledger(0)
		if (got != "") != c.want {
			t.Errorf("%s: ledger %q", c.name, got)
		}
		if strings.HasPrefix(c.name, "delegation") && !strings.Contains(got, "2 resolved, 1 failed, 0 unknown (whether calls happened, not whether claims are right)") {
			t.Errorf("%s: the verdict is not told (RESULT-07): %s", c.name, got)
		}
		if c.name == "own call, always" && strings.Contains(got, "resolved") {
			t.Errorf("a verdict of no delegation is told: %s", got)
		}
		if resp.Message.Metadata != nil {
			t.Errorf("%s: note on the answer: %v", c.name, resp.Message.Metadata)
		}
	}
}

// RECEIPT-08: other pieces may leave messages out of a request; the list of receipts
// is made before, and shown behind them.
func TestOtherPiecesCutTheRequest(t *testing.T) {
	t.Parallel()
	f := &fake{answers: []model.Message{calls(call("a", "say", "{}")), {Text: "ok"}}}
	cut := agent.Piece{Name: "summarisation", Model: func(next agent.Generate) agent.Generate {
		return func(ctx context.Context, req model.Request, d func(model.Delta)) (model.Response, error) {
			req.Messages = req.Messages[:3]
			return next(ctx, req, d)
		}
	}}
	res := run(t, child(), f, []tool.Tool{says("hi")}, cut)
	if !strings.Contains(f.ledger(1), "[r1 say]") {
		t.Errorf("messages = %+v", f.seen[1].Messages)
	}
	if got, _ := Select(res.Messages, true); len(got) != 1 {
		t.Errorf("noted are %+v", got)
	}
}

// RECEIPT-04: the example, the ids and the parser agree, also for names that cannot
// be cited.
func TestOneFormat(t *testing.T) {
	t.Parallel()
	if got := Parse("as in " + Example()); !slices.Equal(got, []Citation{{"r1", ""}, {"r1", "write_file"}}) {
		t.Errorf("the example is read as %+v", got)
	}
	for _, name := range []string{"bash", "_x", "srv__tool", "a.b-c", "naïve", "2tool", "-x", "工具", ""} {
		got := Parse(Cite(id(12), name))
		if len(got) != 1 || got[0].ID != "r12" || got[0].Anchor != "" && got[0].Anchor != name {
			t.Errorf("%q is cited as %q and read as %+v", name, Cite(id(12), name), got)
		}
		if v := Judge(Cite(id(12), name), []contract.Receipt{{ID: "r12", ToolName: name, Status: success}}); !v.CitationResolved {
			t.Errorf("%q: %+v", name, v)
		}
	}
	text, listed := render(scan([]model.Message{stamped("bash", 1), stamped("2tool", 1)}))
	if v := Judge(text[strings.Index(text, "only.\n"):], receipts(listed)); len(v.Resolved) != 2 {
		t.Errorf("the ledger's own lines are judged as %+v", v)
	}
}

// RECEIPT-05: each pair of id and anchor once, at most ten digits, leading zeros away,
// lower case.
func TestParse(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]Citation{
		"[r1] [r1] [r01] [r1 a] [r1 b] [r1  a]":     {{"r1", ""}, {"r1", "a"}, {"r1", "b"}},
		"[r0000000001] [r00000000001] [r000]":       {{"r1", ""}, {"r0", ""}},
		"[r1234567890][r12345678901]":               {{"r1234567890", ""}},
		"[R1] [r1 ] [ r1] [r] [r-1] [r1,r2] [r1 1]": nil,
		"[r1\u00a0a] [r2\u3000b] [r3\nc]":           {{"r1", "a"}, {"r2", "b"}, {"r3", "c"}},
		"[r1 naïve工具.x-y]":                          {{"r1", "naïve工具.x-y"}},
		"[r١]":                                      nil,
	} {
		if got := Parse(text); !slices.Equal(got, want) {
			t.Errorf("%q: %+v, want %+v", text, got, want)
		}
	}
}

// RECEIPT-06, RECEIPT-07: every class, and the flag over all.
func TestJudge(t *testing.T) {
	t.Parallel()
	shown := []contract.Receipt{{ID: "r4", ToolName: "a", Status: success}, {ID: "r5", ToolName: "b", Status: failure}, {ID: "r6", ToolName: "c", Status: partialSuccess}}
	v := Judge("[r4] [r4 a] [r4 b] [r5 b] [r6] [r1]", shown)
	want := contract.ReceiptVerdict{
		Resolved: []string{"r4", "r4"}, Unknown: []string{"r1"},
		Failed: []contract.FailedCitation{{ID: "r4", Reason: "anchor"}, {ID: "r5", Reason: "status"}, {ID: "r6", Reason: "status"}},
	}
	if fmt.Sprint(v) != fmt.Sprint(want) {
		t.Errorf("verdict %+v, want %+v", v, want)
	}
	if v := Judge("[r4 a]", shown); !v.CitationResolved || v.NoCitationClaims {
		t.Errorf("verdict %+v", v)
	}
	// What is not listed any more still counts for the flag.
	var b strings.Builder
	for i := range 3 * contract.MaxVerdictEntries {
		fmt.Fprintf(&b, "[r4 a%d]", i)
	}
	v = Judge(b.String()+"[r9]", shown)
	if err := v.Validate(); err != nil || len(v.Failed) != contract.MaxVerdictEntries || v.CitationResolved {
		t.Errorf("%v: %d failed", err, len(v.Failed))
	}
}

// RECEIPT-09: a note that cannot be relied on gives no receipts at all on a completed
// run; an empty one is a valid zero; the form in which it was stored does not matter.
func TestBrokenNotes(t *testing.T) {
	t.Parallel()
	note := func(ids ...string) []any {
		list := []any{}
		for _, id := range ids {
			r := stamped("t", 1).Metadata[Key].(contract.Receipt)
			r.ID = id
			list = append(list, r)
		}
		return list
	}
	for name, c := range map[string]struct {
		note any
		want int // -1: none
	}{
		"good": {note("r3", "r4"), 2}, "empty": {[]any{}, 0}, "missing": {nil, -1}, "text": {"r1", -1}, "object": {map[string]any{}, -1},
		"gap": {note("r1", "r3"), -1}, "twice": {note("r1", "r1"), -1}, "backwards": {note("r2", "r1"), -1}, "zero": {note("r0", "r1"), -1},
		"zeros": {note("r01", "r2"), -1}, "no id": {note(""), -1}, "not an id": {note("x1"), -1}, "bad receipt": {append(note("r1"), "x"), -1},
	} {
		m := model.Message{Role: model.RoleAssistant, Text: "[r3]"}
		if c.note != nil {
			m.Metadata = map[string]any{ShownKey: c.note}
		}
		for form, m := range map[string]model.Message{"": m, " stored": stored(t, m)} {
			msgs := []model.Message{stamped("t", 1), m, stamped("t", 1)} // capped on a later result
			got, from := Select(msgs, true)
			if (from == FromNowhere) != (c.want < 0) || len(got) != max(c.want, 0) {
				t.Errorf("%s%s: %d receipts from %s", name, form, len(got), from)
			}
			k := child()
			rs, v := k.Completed(agent.Result{Messages: msgs}, "[r3]")
			if rs == nil || v == nil || v.CitationResolved != (c.want == 2) {
				t.Errorf("%s%s: receipts %v, verdict %+v", name, form, rs, v)
			}
		}
	}
}

// RECEIPT-08: an answer without a note never falls back to an older one, whose ids
// may mean something else.
func TestOlderNotesDoNotCount(t *testing.T) {
	t.Parallel()
	f := &fake{answers: []model.Message{calls(call("a", "say", "{}")), {Text: "x"}}}
	res := run(t, child(), f, []tool.Tool{says("hi")})
	msgs := append(slices.Clone(res.Messages), model.Message{Role: model.RoleAssistant, Text: "[r1]"})
	if got, from := Select(msgs, true); from != FromNowhere || got != nil {
		t.Errorf("%v from %s", got, from)
	}
}

// RECEIPT-10, RECEIPT-14: a task that did not complete keeps the receipts of all
// results that are there, and of calls whose results did not come in any more.
func TestEvidence(t *testing.T) {
	t.Parallel()
	k := child()
	f := &fake{answers: []model.Message{calls(call("a", "say", "{}")), calls(call("b", "say", "{}"), call("c", "say", "{}"), call("d", "say", "{}"))}}
	res := run2(k, f)
	if n := len(res.Messages); res.Messages[n-1].Role != model.RoleAssistant {
		t.Fatalf("the conversation ends on %+v", res.Messages[n-1])
	}
	rs := k.Evidence(res)
	var got []string
	for _, r := range rs {
		got = append(got, r.ID+" "+r.ToolCallID)
	}
	if !slices.Equal(got, []string{"r1 a", "r2 b", "r3 c"}) {
		t.Errorf("evidence = %q", got)
	}
	res.Messages = append(res.Messages, model.Message{Role: model.RoleAssistant})
	for range 3 * MaxReceipts {
		res.Messages = append(res.Messages, stamped("t", 1))
	}
	if rs = k.Evidence(res); len(rs) != MaxReceipts || rs[len(rs)-1].ID != id(3*MaxReceipts+1) {
		t.Errorf("%d receipts, the last is %s", len(rs), rs[len(rs)-1].ID)
	}
}

// run2 stops a conversation while the second of two tools runs side by side, before
// the third is begun.
func run2(k *Receipts, f *fake) agent.Result {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	say := fakeTool{name: "say", call: func(c tool.Call) (tool.Result, error) {
		if c.ID == "c" {
			cancel()
		}
		return tool.Result{Text: "hi"}, nil
	}}
	chain, _ := agent.Chain(k.Piece())
	res, _ := agent.Run(ctx, agent.Config{Agent: "x", Model: k.Model(f), Tools: []tool.Tool{say}, MaxTurns: 5, MaxParallel: 1, Chain: chain, Log: zerolog.Nop()}, nil)
	return res
}

// RECEIPT-11: what seems to claim actions is flagged, in any script and at the edges
// of words.
func TestClaims(t *testing.T) {
	t.Parallel()
	for report, want := range map[string]bool{
		"Created it.": true, "I RAN it": true, "(tested)": true, "Iran is far": false, "überran": false, "ran_x": false, "ranking": false, "pre-ran": true,
		"ran。": true, "x ran": true, "已部署": true, "没问题": false, "/a": false, "/a/b": true, "/ä/工": true, "a/b": false, "a/b/c": true,
		"notes.md": true, "x.mdx": false, "x.md。": true, "x.md5": false, "x.py.mdx": true, ".md": false, "README.MD": true, "x.go": false, "工.json": true, "": false,
	} {
		if got := claims(report, true); got != want {
			t.Errorf("%q: %v, want %v", report, got, want)
		}
	}
	long := "  " + strings.Repeat("界", longReport) + "\n"
	if !claims(long, true) || claims(long, false) || claims(long[:len(long)-4], true) {
		t.Error("long reports are not judged by their code points")
	}
}

// RECEIPT-12: a verdict is told in counts and with what it does not say, in words
// that accept nothing; readers drop what has another shape.
func TestVerdictIsAdvice(t *testing.T) {
	t.Parallel()
	shown := []contract.Receipt{{ID: "r1", ToolName: "a", Status: success}}
	for report, want := range map[string]string{
		"[r1][r2]": "1 resolved, 0 failed, 1 unknown (whether calls happened, not whether claims are right)",
		"Fixed it": "UNVERIFIED", "fine": "none (whether",
	} {
		got := summary(Judge(report, shown))
		if !strings.Contains(got, want) {
			t.Errorf("%q: %s", report, got)
		}
		for _, word := range []string{"accept", "approv", "pass", "correct", "proven", "confirmed", "valid"} {
			if strings.Contains(strings.ToLower(got), word) {
				t.Errorf("%q has the word %q", got, word)
			}
		}
	}
	good := plainJSON(t, Judge("[r1][r2]", shown))
	if v := delegation.ReadVerdict(map[string]any{delegation.ReceiptVerdictKey: good}); v == nil || len(v.Unknown) != 1 {
		t.Errorf("verdict = %+v", v)
	}
	for name, change := range map[string]func(map[string]any){
		"flag":   func(m map[string]any) { m["citation_resolved"] = true },
		"claims": func(m map[string]any) { m["no_citation_claims"] = true },
		"id":     func(m map[string]any) { m["resolved"] = []any{"rx"} },
		"digits": func(m map[string]any) { m["resolved"] = []any{"r12345678901"} },
		"reason": func(m map[string]any) { m["failed"] = []any{map[string]any{"id": "r1", "reason": "mood"}} },
		"type":   func(m map[string]any) { m["unknown"] = "r1" },
		"long":   func(m map[string]any) { m["resolved"] = slices.Repeat([]any{"r1"}, contract.MaxVerdictEntries+1) },
	} {
		bad := maps.Clone(good)
		change(bad)
		if v := delegation.ReadVerdict(map[string]any{delegation.ReceiptVerdictKey: bad}); v != nil {
			t.Errorf("%s: %+v", name, v)
		}
	}
}

func plainJSON(t *testing.T, v any) map[string]any {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

// RECEIPT-16: what goes wrong while receipts are gathered leaves them out, and
// nothing else. A failed list is not an empty one (RECEIPT-09).
func TestHarvestFails(t *testing.T) {
	t.Parallel()
	k := child()
	f := &fake{answers: []model.Message{{Text: "ok"}}}
	resp, err := k.Model(f).Generate(context.Background(), model.Request{Messages: []model.Message{{Role: model.RoleUser, Text: "hi"}}}, nil) // nothing was collected
	if err != nil || resp.Message.Text != "ok" || resp.Message.Metadata[ShownKey] != nil || len(f.seen[0].Messages) != 1 {
		t.Errorf("%v: %+v", err, resp)
	}
	// What a record gave back may be anything.
	msgs := []model.Message{{Role: model.RoleTool, Metadata: map[string]any{Key: map[string]any{"id": make(chan int)}}}, {Role: model.RoleAssistant, Metadata: map[string]any{ShownKey: []any{make(chan int)}}}}
	if rs, v := k.Completed(agent.Result{Messages: msgs}, "fine"); len(rs) != 0 || v == nil || !v.CitationResolved {
		t.Errorf("receipts %v, verdict %+v", rs, v)
	}
	if rs := k.Evidence(agent.Result{Messages: msgs}); len(rs) != 0 {
		t.Errorf("evidence %v", rs)
	}
	// What breaks in between leaves none, and nothing that another list could stand for.
	msgs = append(msgs, model.Message{Role: model.RoleTool, Metadata: map[string]any{Key: map[string]any{"id": bomb{}}}})
	if rs, v := k.Completed(agent.Result{Messages: msgs}, "[r1]"); rs == nil || len(rs) != 0 || v != nil {
		t.Errorf("receipts %v, verdict %+v", rs, v)
	}
	if rs := k.Evidence(agent.Result{Messages: msgs}); len(rs) != 0 {
		t.Errorf("evidence %v", rs)
	}
}

// bomb is a value that cannot even be looked at.
type bomb struct{}

func (bomb) MarshalJSON() ([]byte, error) { panic("kaboom") }

// RECEIPT-16: our keys are taken out of what comes from outside; nothing else is.
func TestStrip(t *testing.T) {
	t.Parallel()
	in := map[string]string{Key: "a", ShownKey: "b", delegation.ReceiptVerdictKey: "c", "own": "d"}
	if got := Strip(in); !maps.Equal(got, map[string]string{"own": "d"}) || len(in) != 4 {
		t.Errorf("%v of %v", got, in)
	}
	if got := Strip(map[string]string(nil)); got != nil {
		t.Errorf("nil: %v", got)
	}
}

// Receipts and verdict of a record stay within the bound that is stated, whatever a
// provider and a report hold.
func TestBounds(t *testing.T) {
	t.Parallel()
	k := child()
	var msgs []model.Message
	for i := range 2 * MaxReceipts {
		res := k.stamp(call(fmt.Sprint(i, "\x00<\"", strings.Repeat("\U0001F600", 500)), "&\\"+strings.Repeat("\U0001F600", 500), "{"+strings.Repeat("[", 100000)), tool.Result{Text: "x"})
		msgs = append(msgs, model.Message{Role: model.RoleTool, Metadata: res.Metadata})
	}
	rs := k.Evidence(agent.Result{Messages: msgs})
	var b strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&b, "[r%d][r1 a%d]", 9999999999-i, i)
	}
	got, err := json.Marshal(struct {
		R []contract.Receipt
		V contract.ReceiptVerdict
	}{rs, Judge(b.String(), rs)})
	if err != nil || len(rs) != MaxReceipts || len(got) > 110<<10 {
		t.Errorf("%v: %d receipts, %d bytes", err, len(rs), len(got))
	}
	t.Logf("%d bytes", len(got))
}
