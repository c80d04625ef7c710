package tokens

import (
	"context"
	"fmt"
	"hash/maphash"
	"sync"

	"github.com/herdgate/herdgate/internal/model"
)

// Limit returns m, which then refuses a request that is larger than it reads, as
// a provider would; some servers cut such a request instead and say nothing. The
// size is an estimate: only what is more than a tenth above most is refused, and
// what is closer is for the server to judge.
func Limit(m model.Model, most int) model.Model {
	return &limited{Model: m, most: most, seed: maphash.MakeSeed(), sizes: map[uint64]int{}}
}

// maxSizes bounds the texts whose size is remembered.
const maxSizes = 1 << 14

type limited struct {
	model.Model
	most int
	seed maphash.Seed

	mu sync.Mutex
	// sizes are those of texts by their hash: a conversation is sent again and
	// again, and is counted once.
	sizes map[uint64]int
}

func (l *limited) Generate(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	if bytes(req) > l.most { // a token has one byte at least
		n := Tools(req.Tools, l.of)
		for _, m := range req.Messages {
			n += Message(m, l.of)
		}
		if n > l.most+l.most/10 {
			return model.Response{}, &model.Error{Kind: model.KindPermanent, Code: "context_length_exceeded", Message: fmt.Sprintf(
				"the conversation has about %d tokens, and model %q reads %d (max_input_tokens); nothing was sent", n, l.Name(), l.most)}
		}
	}
	return l.Model.Generate(ctx, req, onDelta)
}

func (l *limited) of(text string) int {
	if len(text) < 64 {
		return Of(text)
	}
	key := maphash.String(l.seed, text)
	l.mu.Lock()
	n, ok := l.sizes[key]
	l.mu.Unlock()
	if ok {
		return n
	}
	n = Of(text)
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.sizes) >= maxSizes {
		clear(l.sizes)
	}
	l.sizes[key] = n
	return n
}

func bytes(req model.Request) int {
	n := 0
	for _, t := range req.Tools {
		n += len(t.Name) + len(t.Description) + len(t.Parameters) + messageTokens
	}
	for _, m := range req.Messages {
		n += len(m.Text) + messageTokens
		for _, c := range m.ToolCalls {
			n += len(c.Name) + len(c.Args) + messageTokens
		}
	}
	return n
}
