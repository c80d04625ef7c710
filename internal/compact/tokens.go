package compact

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

// Tokens counts the tokens of a text: exactly by the vocabulary, and by its two
// ends if it is very long.
func Tokens(text string) int {
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

// messageSize is what a message adds to a request, in tokens.
func messageSize(m model.Message) int {
	n := messageTokens + Tokens(m.Text)
	for _, c := range m.ToolCalls {
		n += messageTokens + Tokens(c.Name) + Tokens(c.Args)
	}
	return n
}

func toolsSize(tools []model.ToolSpec) int {
	n := 0
	for _, t := range tools {
		n += messageTokens + Tokens(t.Name) + Tokens(t.Description) + Tokens(string(t.Parameters))
	}
	return n
}

// firstTokens and lastTokens return about the first or last n tokens of a text.
func firstTokens(text string, n int) string { return strings.ToValidUTF8(text[:within(text, n)], "") }

func lastTokens(text string, n int) string {
	return strings.ToValidUTF8(text[len(text)-within(text, n):], "")
}

// within is how many bytes of a text make about n tokens.
func within(text string, n int) int {
	all := Tokens(text)
	if all <= n {
		return len(text)
	}
	return int(float64(len(text)) * float64(max(n, 0)) / float64(all))
}
