package mcp

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/herdgate/herdgate/internal/tool"
)

// resultOf maps the answer of a server to what a model reads. Text is shown, without
// what is to be hidden; all else is told of in a line.
func resultOf(res *sdk.CallToolResult, maxChars int, hidden *strings.Replacer) tool.Result {
	var parts []string
	shown := false
	for _, c := range res.Content {
		switch c := c.(type) {
		case *sdk.TextContent:
			if c.Text != "" {
				shown = true
				parts = append(parts, c.Text)
			}
		case *sdk.ImageContent:
			parts = append(parts, binary("image", c.MIMEType, len(c.Data)))
		case *sdk.AudioContent:
			parts = append(parts, binary("audio", c.MIMEType, len(c.Data)))
		case *sdk.ResourceLink:
			line := "[resource " + word(c.URI)
			if c.Name != "" {
				line += ", " + word(c.Name)
			}
			if c.MIMEType != "" {
				line += ", " + word(c.MIMEType)
			}
			if c.Size != nil {
				line += fmt.Sprintf(", %d bytes", *c.Size)
			}
			parts = append(parts, line+": a reference, its content was not sent]")
		case *sdk.EmbeddedResource:
			switch r := c.Resource; {
			case r == nil:
				parts = append(parts, "[an empty resource]")
			case r.Blob != nil:
				parts = append(parts, binary("resource "+word(r.URI), r.MIMEType, len(r.Blob)))
			default:
				shown = true
				parts = append(parts, "[resource "+word(r.URI)+"]\n"+r.Text)
			}
		default:
			parts = append(parts, "[content of an unknown kind: it cannot be shown]")
		}
	}
	// Servers are asked to send structured content as text as well; once is enough.
	if res.StructuredContent != nil && !shown {
		if b, err := json.Marshal(res.StructuredContent); err == nil {
			parts = append(parts, string(b))
		}
	}
	// Hidden first: half of a secret would not be known for one.
	text := bounded(clean(hidden.Replace(strings.Join(parts, "\n\n"))), maxChars)
	if strings.TrimSpace(text) == "" {
		text = "(the tool returned nothing)"
		if res.IsError {
			text = "The tool failed and said nothing about it."
		}
	}
	return tool.Result{Text: text, IsError: res.IsError}
}

func binary(what, mime string, bytes int) string {
	if mime != "" {
		what += ", " + word(mime)
	}
	return fmt.Sprintf("[%s, %d bytes: it cannot be shown]", what, bytes)
}

// word is a stranger's text in the middle of one of our lines.
func word(s string) string { return clip(strings.Join(strings.Fields(clean(s)), " "), 300) }

// clean takes out what is no text.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' && r != '\t' && r != '\r' || r == 0x7f {
			return utf8.RuneError
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// bounded keeps two thirds of the limit from the beginning and the rest from the end.
func bounded(s string, limit int) string {
	if len(s) <= limit || utf8.RuneCountInString(s) <= limit {
		return s
	}
	r := []rune(s)
	head := limit * 2 / 3
	return fmt.Sprintf("%s\n[… %d of %d characters are left out here; ask for less at a time …]\n%s", string(r[:head]), len(r)-limit, len(r), string(r[len(r)-(limit-head):]))
}
