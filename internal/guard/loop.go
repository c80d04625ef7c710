package guard

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Verdict is what a guard makes of an answer.
type Verdict string

// The verdicts. Those of the loop guard say which of its layers spoke.
const (
	VerdictNone     Verdict = ""
	VerdictWarn     Verdict = "warn"
	VerdictStop     Verdict = "stop"
	VerdictWarnSame Verdict = "warn_same"
	VerdictStopSame Verdict = "stop_same"
	VerdictWarnFreq Verdict = "warn_freq"
	VerdictStopFreq Verdict = "stop_freq"
)

// Loop is the guard against repetition. Its first layer counts how often the very
// same set of calls came within the last answers that had calls; a set whose
// results change from time to time, like a poll, gets somewhere and is not counted
// together. The second counts how often one tool was called at all (GUARD-04,
// GUARD-08).
type Loop struct {
	cfg        config.LoopDetection
	freqWindow int

	sets       []set // of the latest answers with calls
	warned     map[digest]bool
	tools      []string // of the latest calls
	warnedTool map[string]bool

	queue warnings
	reason

	// mu guards results: tools run side by side.
	mu      sync.Mutex
	results map[string]digest // of the newest set, by call id
}

type digest [sha256.Size]byte

// set is the calls of one answer.
type set struct {
	hash   digest
	calls  []signed
	result digest // zero while it is not known
}

type signed struct {
	key digest
	id  string
}

// NewLoop returns a guard for one execution.
func NewLoop(cfg config.LoopDetection) *Loop {
	window := max(cfg.WindowSize, cfg.ToolFreqHardLimit)
	for _, o := range cfg.ToolFreqOverrides {
		window = max(window, o.HardLimit) // GUARD-09
	}
	return &Loop{cfg: cfg, freqWindow: window, warned: map[digest]bool{}, warnedTool: map[string]bool{}, results: map[string]digest{}}
}

// Piece implements Guard.
func (l *Loop) Piece() agent.Piece {
	return agent.Piece{Name: "loop_guard", Model: l.queue.deliver, Tool: l.watch, AfterModel: func(_ context.Context, m model.Message) model.Message {
		return l.judge(m)
	}}
}

// judge observes an answer and does what follows from it.
func (l *Loop) judge(m model.Message) model.Message {
	verdict, name, times := l.observe(m)
	notice := loopNotice
	switch verdict {
	case VerdictWarnSame:
		l.queue.add(loopWarning(times))
		return m
	case VerdictWarnFreq:
		l.queue.add(freqWarning(name, times))
		return m
	case VerdictStopFreq:
		notice = freqNotice
	case VerdictStopSame:
	default:
		return m
	}
	l.stop = Stop{Reason: contract.StopLoopCapped, NoText: blank(m.Text)}
	return strip(m, notice)
}

// Observe takes an answer into account and says what it makes of it.
func (l *Loop) Observe(m model.Message) Verdict {
	v, _, _ := l.observe(m)
	return v
}

func (l *Loop) observe(m model.Message) (v Verdict, name string, times int) {
	if m.Role != model.RoleAssistant || len(m.ToolCalls) == 0 {
		return VerdictNone, "", 0 // neither counted nor an interruption (GUARD-10)
	}
	l.settle()
	s := newSet(m.ToolCalls)
	times = l.repeated(s) + 1
	l.sets = tail(append(l.sets, s), l.cfg.WindowSize)
	// A set that has left the window may be warned of again (GUARD-06).
	for h := range l.warned {
		if !slices.ContainsFunc(l.sets, func(s set) bool { return s.hash == h }) {
			delete(l.warned, h)
		}
	}
	switch {
	case times >= l.cfg.HardLimit:
		return VerdictStopSame, "", times
	case times >= l.cfg.WarnThreshold && !l.warned[s.hash]:
		l.warned[s.hash] = true
		return VerdictWarnSame, "", times // this answer does not count below (GUARD-08)
	}
	return l.often(m.ToolCalls)
}

// repeated counts the sets of the window, once the coming one has its place, that
// are like s and had the result that such a set had last.
func (l *Loop) repeated(s set) int {
	n := 0
	var last *set
	seen := tail(l.sets, l.cfg.WindowSize-1)
	for i := len(seen) - 1; i >= 0; i-- {
		if seen[i].hash != s.hash {
			continue
		}
		if last == nil {
			last = &seen[i]
		}
		if seen[i].result == last.result {
			n++
		}
	}
	return n
}

// often counts the calls by tool.
func (l *Loop) often(calls []model.ToolCall) (v Verdict, name string, times int) {
	for _, c := range calls {
		if c.Name != "" {
			l.tools = append(l.tools, c.Name)
		}
	}
	l.tools = tail(l.tools, l.freqWindow)
	counts := map[string]int{}
	for _, t := range l.tools {
		counts[t]++
	}
	for t := range l.warnedTool {
		if warn, _ := l.limits(t); counts[t] < warn {
			delete(l.warnedTool, t)
		}
	}
	for _, c := range calls {
		if _, hard := l.limits(c.Name); counts[c.Name] >= hard {
			return VerdictStopFreq, c.Name, counts[c.Name]
		}
	}
	for _, c := range calls {
		if warn, _ := l.limits(c.Name); counts[c.Name] >= warn && !l.warnedTool[c.Name] {
			l.warnedTool[c.Name] = true
			return VerdictWarnFreq, c.Name, counts[c.Name]
		}
	}
	return VerdictNone, "", 0
}

// limits are those of one tool (GUARD-09).
func (l *Loop) limits(name string) (warn, hard int) {
	if o, ok := l.cfg.ToolFreqOverrides[name]; ok {
		return o.Warn, o.HardLimit
	}
	return l.cfg.ToolFreqWarn, l.cfg.ToolFreqHardLimit
}

// watch is middleware that keeps what calls gave.
func (l *Loop) watch(next agent.Invoke) agent.Invoke {
	return func(ctx context.Context, t tool.Tool, call tool.Call) (tool.Result, error) {
		res, err := next(ctx, t, call)
		if err == nil {
			l.gave(call.ID, res.Text)
		}
		return res, err
	}
}

func (l *Loop) gave(id, text string) {
	d := sha256.Sum256([]byte(text))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.results[id] = d
}

// settle writes the results that came since into the newest set.
func (l *Loop) settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.sets); n > 0 && len(l.results) > 0 {
		h := sha256.New()
		// In the order of the calls' keys, so that the order in the answer does not matter.
		for _, c := range l.sets[n-1].calls {
			d := l.results[c.id]
			h.Write(d[:])
		}
		l.sets[n-1].result = digest(h.Sum(nil))
	}
	clear(l.results)
}

// Replay implements Guard. Warnings that an earlier process has shown are not
// shown again.
func (l *Loop) Replay(messages []model.Message, _ *contract.Usage) {
	for _, m := range messages {
		if m.Role == model.RoleTool {
			l.gave(m.ToolCallID, m.Text)
		}
		if m.Role == model.RoleAssistant && len(m.ToolCalls) > 0 {
			l.queue = nil
			if v, name, times := l.observe(m); v == VerdictWarnSame {
				l.queue.add(loopWarning(times))
			} else if v == VerdictWarnFreq {
				l.queue.add(freqWarning(name, times))
			}
		}
	}
}

// tail returns the last n of s.
func tail[T any](s []T, n int) []T { return s[max(0, len(s)-max(n, 0)):] }

func newSet(calls []model.ToolCall) set {
	s := set{calls: make([]signed, len(calls))}
	for i, c := range calls {
		s.calls[i] = signed{key: signature(c), id: c.ID}
	}
	slices.SortFunc(s.calls, func(a, b signed) int { return slices.Compare(a.key[:], b.key[:]) })
	h := sha256.New()
	for _, c := range s.calls {
		h.Write(c.key[:])
	}
	s.hash = digest(h.Sum(nil))
	return s
}

// salient are the arguments that tell what a call is about; others are noise next
// to them (GUARD-05).
var salient = []string{"path", "url", "query", "command", "pattern", "glob", "cmd"}

// signature is equal for calls that count as the same.
func signature(c model.ToolCall) digest {
	var what []byte
	args, ok := decodeArgs(c.Args)
	switch {
	case !ok:
		what = []byte("text:" + c.Args)
	case c.Name == "read_file":
		what = []byte(readKey(args))
	case c.Name == "write_file", c.Name == "str_replace":
		what = canonical(args)
	default:
		telling := map[string]any{}
		for _, key := range salient {
			if v := args[key]; v != nil {
				telling[key] = v
			}
		}
		if len(telling) == 0 {
			telling = args
		}
		what = canonical(telling)
	}
	h := sha256.New()
	var n [8]byte
	binary.BigEndian.PutUint64(n[:], uint64(len(c.Name)))
	h.Write(n[:])
	h.Write([]byte(c.Name))
	h.Write(what)
	return digest(h.Sum(nil))
}

// decodeArgs reads the arguments of a call; nothing at all and null are an empty
// object.
func decodeArgs(s string) (map[string]any, bool) {
	s = strings.TrimSpace(s)
	if s == "" || s == "null" {
		return map[string]any{}, true
	}
	b, err := agent.ParseArgs(s)
	if err != nil {
		return nil, false
	}
	d := json.NewDecoder(strings.NewReader(string(b)))
	d.UseNumber()
	var m map[string]any
	if err := d.Decode(&m); err != nil {
		return nil, false
	}
	return m, true
}

// canonical is JSON with sorted keys.
func canonical(m map[string]any) []byte {
	b, err := json.Marshal(m)
	if err != nil {
		return []byte(fmt.Sprint(m)) // cannot happen with what came out of JSON
	}
	return b
}

// readLines is how many lines of a file count as one place.
const readLines = 200

// readKey is what a read_file is about: the file, and where in it.
func readKey(args map[string]any) string {
	name := ""
	for _, key := range []string{"path", "file_path", "filename", "file"} { // as the tool takes them
		if s, ok := args[key].(string); ok {
			name = s
			break
		}
	}
	first := line(args["start_line"], 1)
	last := line(args["end_line"], first)
	first, last = max(min(first, last), 1), max(first, last, 1)
	return fmt.Sprintf("%d-%d:%s", (first-1)/readLines, (last-1)/readLines, name)
}

// line reads a number as models write them.
func line(v any, missing int) int {
	s := fmt.Sprint(v)
	if f, err := strconv.ParseFloat(strings.TrimSpace(s), 64); err == nil && f > -1e9 && f < 1e9 {
		return int(f)
	}
	return missing
}
