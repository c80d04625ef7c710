// Package tokens estimates how many tokens a text or a request has.
package tokens

import (
	"strings"
	"sync"

	"github.com/tiktoken-go/tokenizer/codec"

	"github.com/herdgate/herdgate/internal/model"
)

// vocabulary is the tokenizer of a widely used model. Others count a little
// differently; what the provider itself has counted comes first. It is loaded when
// it is needed for the first time.
var vocabulary = sync.OnceValue(codec.NewCl100kBase)

const (
	// messageTokens is what a message costs beside its content.
	messageTokens = 4
	// sampleBytes is how much of each end of a very long text is counted; the rest
	// is taken to be like it.
	sampleBytes = 64 << 10
)

// Of counts the tokens of a text: exactly by the vocabulary, and by its two ends if
// it is very long.
func Of(text string) int {
	if len(text) > 2*sampleBytes {
		head, tail := strings.ToValidUTF8(text[:sampleBytes], ""), strings.ToValidUTF8(text[len(text)-sampleBytes:], "")
		return int(float64(count(head)+count(tail)) * float64(len(text)) / (2 * sampleBytes))
	}
	return count(text)
}

func count(text string) int {
	n, err := vocabulary().Count(text)
	if err != nil { // the pattern that splits words gave up
		return len(text)/3 + 1
	}
	return n
}

// Message is what a message adds to a request. of counts a text, as [Of] does.
func Message(m model.Message, of func(string) int) int {
	n := messageTokens + of(m.Text)
	for _, c := range m.ToolCalls {
		n += messageTokens + of(c.Name) + of(c.Args)
	}
	return n
}

// Tools is what tools add to a request.
func Tools(tools []model.ToolSpec, of func(string) int) int {
	n := 0
	for _, t := range tools {
		n += messageTokens + of(t.Name) + of(t.Description) + of(string(t.Parameters))
	}
	return n
}
