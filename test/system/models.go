package system

import (
	"context"
	"strings"
	"sync"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/pkg/contract"
)

// taskOf is the newest message as it was before it was framed.
func taskOf(req model.Request) string {
	return prompt.Unframe(req.Messages[len(req.Messages)-1].Text)
}

// Echo answers at once with the prompt.
type Echo struct{}

// Name implements model.Model.
func (Echo) Name() string { return "echo" }

// ModelName implements model.Model.
func (Echo) ModelName() string { return "echo-1" }

// Generate implements model.Model.
func (Echo) Generate(_ context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	last := taskOf(req)
	return model.Response{Message: model.Message{Text: "done: " + last, FinishReason: "stop"}, Model: "echo-1", Usage: &contract.Usage{InputTokens: 3, OutputTokens: 2, TotalTokens: 5}}, nil
}

// Held answers prompts that begin with "hold" only when they are let go.
type Held struct {
	mu   sync.Mutex
	open map[string]chan struct{}
	all  bool
}

// NewHeld returns a model that holds.
func NewHeld() *Held { return &Held{open: map[string]chan struct{}{}} }

// Name implements model.Model.
func (*Held) Name() string { return "held" }

// ModelName implements model.Model.
func (*Held) ModelName() string { return "held-1" }

func (h *Held) gate(prompt string) chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	ch := h.open[prompt]
	if ch == nil {
		ch = make(chan struct{})
		if h.all {
			close(ch)
		}
		h.open[prompt] = ch
	}
	return ch
}

// LetGo lets the task with this prompt end.
func (h *Held) LetGo(prompt string) {
	ch := h.gate(prompt)
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-ch:
	default:
		close(ch)
	}
}

// LetAllGo lets every task end, now and later.
func (h *Held) LetAllGo() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = true
	for _, ch := range h.open {
		select {
		case <-ch:
		default:
			close(ch)
		}
	}
}

// Generate implements model.Model.
func (h *Held) Generate(ctx context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	prompt := taskOf(req)
	if strings.HasPrefix(prompt, "hold") {
		select {
		case <-h.gate(prompt):
		case <-ctx.Done():
			return model.Response{}, context.Cause(ctx)
		}
	}
	return model.Response{Message: model.Message{Text: "done: " + prompt, FinishReason: "stop"}, Model: "held-1"}, nil
}
