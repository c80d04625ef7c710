package agent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

var nameOfProviders = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// trouble is one conversation in which everything goes wrong that can: it lives
// several times, and each life is cut off or capped somewhere.
type trouble struct {
	t    *testing.T
	seed uint64

	mu       sync.Mutex
	r        *rand.Rand
	stop     func()
	steps    int // until the life is cancelled
	ran      map[string]bool
	told     map[string]bool
	spent    *contract.Usage
	now      []model.Message // the conversation that the next request is made of
	requests int
	cuts     int
}

// n is a random number below limit.
func (x *trouble) n(limit int) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.r.IntN(limit)
}

// step cancels the life when its time has come.
func (x *trouble) step() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.steps--; x.steps == 0 {
		x.stop()
	}
}

func (x *trouble) spend(u *contract.Usage) *contract.Usage {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.spent = x.spent.Add(u)
	return u
}

func (*trouble) Name() string      { return "fake" }
func (*trouble) ModelName() string { return "fake-1" }

// Generate refuses what a strict provider refuses, and answers anything.
func (x *trouble) Generate(ctx context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	x.requests++
	if why := unpaired(req.Messages); why != "" {
		x.t.Errorf("seed %d, request %d: %s", x.seed, x.requests, why)
	}
	if want := Repair(x.now); !reflect.DeepEqual(req.Messages, want) {
		x.t.Errorf("seed %d, request %d is not of the conversation as it is:\n%+v\nwant\n%+v", x.seed, x.requests, req.Messages, want)
	}
	for _, m := range req.Messages {
		for _, c := range m.ToolCalls {
			if args, err := ParseArgs(c.Args); err != nil || string(args) != c.Args || !nameOfProviders.MatchString(c.Name) {
				x.t.Errorf("seed %d, request %d: call %+v", x.seed, x.requests, c)
			}
		}
	}
	x.step()
	var used *contract.Usage
	if x.n(3) > 0 {
		used = x.spend(&contract.Usage{InputTokens: 10, OutputTokens: int64(x.n(5)), TotalTokens: 20})
	}
	if len(req.Messages) > 14+x.n(20) {
		return model.Response{Usage: used}, &model.Error{Kind: model.KindPermanent, Code: "context_length_exceeded", Message: "too long"}
	}
	msg := model.Message{Text: []string{"", " \n", "so far"}[x.n(3)], FinishReason: "tool_calls"}
	switch x.n(12) {
	case 0:
		return model.Response{Usage: used}, &model.Error{Kind: model.KindTransient, Code: "http_500", Message: "down"}
	case 1:
		msg.FinishReason = "stop"
		return model.Response{Message: msg, Usage: used}, nil
	case 2:
		msg.FinishReason = "length"
	}
	for range x.n(4) {
		c := model.ToolCall{
			ID:   []string{"", " ", "same", fmt.Sprint("c", x.n(50)), "call_3_1"}[x.n(5)],
			Name: []string{"good", "good", "fails", "panics", "writes", "", "no such.tool!", " good "}[x.n(8)],
			Args: []string{"", "{}", `{"a":1}`, "null", "[]", `{"a":`, "{} {}"}[x.n(7)],
		}
		if msg.FinishReason == "length" {
			c.Args = `{"cut":true}`
		}
		msg.ToolCalls = append(msg.ToolCalls, c)
	}
	return model.Response{Message: msg, Usage: used}, nil
}

// before shortens the conversation at times.
func (x *trouble) before(ctx context.Context, now State) (Change, error) {
	c, err := x.shorten(ctx, now)
	if x.now = now.Messages; c.Messages != nil {
		x.now = c.Messages
	}
	return c, err
}

// shorten is a compaction that keeps some of the newest steps.
func (x *trouble) shorten(ctx context.Context, now State) (Change, error) {
	if !now.Refused && x.n(6) > 0 {
		return Change{}, nil
	}
	x.step() // a summary takes its time
	if ctx.Err() != nil {
		return Change{}, context.Cause(ctx)
	}
	used := x.spend(&contract.Usage{InputTokens: 3, OutputTokens: 1, TotalTokens: 4})
	start := 1 + x.n(len(now.Messages))
	for start < len(now.Messages) && now.Messages[start].Role == model.RoleTool {
		start++
	}
	return Change{Messages: append(now.Messages[:1:1], now.Messages[start:]...), Usage: used}, nil
}

func (x *trouble) tool(name string) *fakeTool {
	return &fakeTool{name, func(_ context.Context, c tool.Call) (tool.Result, error) {
		x.step()
		x.mu.Lock()
		again := x.ran[c.ID]
		x.ran[c.ID] = true
		x.mu.Unlock()
		if again || strings.Contains(string(c.Args), "cut") {
			x.t.Errorf("seed %d: call %s ran again, or was half a call: %s", x.seed, c.ID, c.Args)
		}
		switch name {
		case "fails":
			return tool.Result{}, errNo
		case "panics":
			panic("oh")
		}
		return tool.Result{Text: c.ID}, nil
	}}
}

// live drives the conversation once, from where it is.
func (x *trouble) live(messages []model.Message, gone Gone) Result {
	ctx, stop := context.WithCancelCause(limit(x.t))
	defer stop(nil)
	x.stop, x.steps, x.ran, x.told, x.spent = func() { stop(errNo) }, 1+x.n(25), map[string]bool{}, map[string]bool{}, nil
	res, err := Run(ctx, Config{
		Model: x, MaxTurns: 1 + x.n(12), MaxParallel: 1 + x.n(3), Gone: gone,
		Tools: []tool.Tool{x.tool("good"), x.tool("fails"), x.tool("panics"), onFiles{x.tool("writes"), true}},
		Chain: []Piece{{Name: "summarisation", BeforeModel: x.before}},
		OnMessage: func(_ context.Context, m model.Message, _ *contract.Usage, _ string) error {
			if x.told[m.ID] {
				x.t.Errorf("seed %d: message %s is told again", x.seed, m.ID)
			}
			x.told[m.ID] = true
			return nil
		},
	}, messages)
	if err != nil {
		if !errors.Is(err, errNo) {
			x.t.Errorf("seed %d: %v", x.seed, err)
		}
		x.cuts++
	}
	if got, want := res.Usage, x.spent; (got == nil) != (want == nil) || got != nil && (got.InputTokens != want.InputTokens || got.TotalTokens != want.TotalTokens) {
		x.t.Errorf("seed %d: used %+v, want %+v", x.seed, got, want)
	}
	return res
}

// F-020, F-070, F-100, F-106, EXEC-02, TOOL-07, USAGE-01, CANCEL-01: whatever happened
// before, in this life or an earlier one — a cap or a cancellation while calls were
// open, results lost with a process, cut replies, empty and repeated ids, failed and
// panicking tools, a shortened history — every request is one that a strict provider
// takes, nothing runs twice or by halves, and what was spent adds up.
func TestAnyTrouble(t *testing.T) {
	t.Parallel()
	requests, cuts := 0, 0
	for seed := range uint64(250) {
		x := &trouble{t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 7))} //nolint:gosec // the same cases each time
		messages, gone := append(user("go"), model.Message{ID: "m1", Role: model.RoleUser, Text: "now"}), Gone{}
		for range 5 {
			res := x.live(messages, gone)
			messages, gone = res.Messages, res.Gone
			// What a process had not stored is lost with it.
			for x.n(3) == 0 && messages[len(messages)-1].Role == model.RoleTool {
				messages = messages[:len(messages)-1]
			}
			if x.n(2) == 0 {
				messages = append(messages[:len(messages):len(messages)], model.Message{ID: fmt.Sprint("u", len(messages)), Role: model.RoleUser, Text: "and?"})
			}
		}
		requests, cuts = requests+x.requests, cuts+x.cuts
	}
	t.Logf("%d requests, %d lives were cut off", requests, cuts)
	if requests < 2000 || cuts < 200 {
		t.Errorf("only %d requests and %d lives cut off: the test tries too little", requests, cuts)
	}
}
