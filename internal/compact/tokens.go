package compact

import (
	"strings"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/tokens"
)

// Tokens counts the tokens of a text; see [tokens.Of].
func Tokens(text string) int { return tokens.Of(text) }

// messageSize is what a message adds to a request, in tokens.
func messageSize(m model.Message) int { return tokens.Message(m, tokens.Of) }

func toolsSize(specs []model.ToolSpec) int { return tokens.Tools(specs, tokens.Of) }

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
