package telemetry

import (
	"context"
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// Bounds of captured content. The whole of an attribute stays below the limit of
// spans, which would cut a document in its middle.
const (
	maxContentText  = 2 << 10
	maxContentWhole = 12 << 10
	// minSecret is the shortest value of the environment that is looked for; shorter
	// ones stand in ordinary text.
	minSecret = 8
)

// Content puts what models and tools are told and answer into spans: bounded, and
// without what looks like a secret. A nil *Content captures nothing.
type Content struct{ secrets *strings.Replacer }

// NewContent returns a Content that also takes out the values of those variables in
// environ ("NAME=value") whose names sound secret. A nil environ is the process's own.
func NewContent(environ []string) *Content {
	if environ == nil {
		environ = os.Environ()
	}
	var values []string
	for _, kv := range environ {
		if name, value, ok := strings.Cut(kv, "="); ok && len(value) >= minSecret && secretName.MatchString(name) {
			values = append(values, value)
			// As it stands inside a JSON text.
			if quoted, err := json.Marshal(value); err == nil && string(quoted[1:len(quoted)-1]) != value {
				values = append(values, string(quoted[1:len(quoted)-1]))
			}
		}
	}
	// The longest first: one may begin with another.
	slices.SortFunc(values, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, v := range slices.Compact(values) {
		pairs = append(pairs, v, redacted)
	}
	return &Content{secrets: strings.NewReplacer(pairs...)}
}

const redacted = "[redacted]"

var (
	secretName = regexp.MustCompile(`(?i)(key|token|secret|passw|credential|auth|dsn)`)
	// secretText is what secrets of well-known forms look like.
	secretText = regexp.MustCompile(strings.Join([]string{
		`-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)`,
		`\bsk-[A-Za-z0-9_-]{16,}`,
		`\bA(?:KIA|SIA)[0-9A-Z]{16}\b`,
		`\bgh[pousr]_[A-Za-z0-9]{20,}`, `\bgithub_pat_[A-Za-z0-9_]{20,}`, `\bglpat-[A-Za-z0-9_-]{16,}`,
		`\bxox[abeprs]-[A-Za-z0-9-]{10,}`,
		`\bAIza[0-9A-Za-z_-]{35}`,
		`\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`,
	}, "|"))
	// secretAfter is a value that a name or a scheme in front of it gives away.
	secretAfter = regexp.MustCompile(`(?i)(\b(?:bearer|basic)\s+|[\w-]*(?:api[_-]?key|token|secret|passw(?:or)?d|credential)s?\\?["']?\s*[:=]\s*\\?["']?)([^\s"'\\,;&}@]{6,})`)
	secretURL   = regexp.MustCompile(`(://[^\s/:@]*:)[^\s/@]+@`)
)

// redact takes secrets out of s.
func (c *Content) redact(s string) string {
	s = c.secrets.Replace(s)
	s = secretText.ReplaceAllLiteralString(s, redacted)
	s = secretURL.ReplaceAllString(s, "${1}"+redacted+"@")
	return secretAfter.ReplaceAllString(s, "${1}"+redacted)
}

// Text is s without secrets, cut to its bound. What is redacted is a little more
// than what is kept, so that no secret is cut in two at the end and overlooked.
func (c *Content) Text(s string) string {
	const around = 8 << 10
	return cutText(c.redact(cutText(s, maxContentText+around)), maxContentText)
}

func cutText(s string, most int) string {
	if len(s) > most {
		for most > 0 && !utf8.RuneStart(s[most]) {
			most--
		}
		s = s[:most] + "…"
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// Message is a message in the form of the gen_ai conventions.
type Message struct {
	Role         string `json:"role"`
	Parts        []Part `json:"parts"`
	FinishReason string `json:"finish_reason,omitempty"`
}

// Part is a part of a [Message].
type Part struct {
	Type      string `json:"type"`
	Content   string `json:"content,omitempty"`
	ID        string `json:"id,omitempty"`
	Name      string `json:"name,omitempty"`
	Arguments string `json:"arguments,omitempty"`
	Result    string `json:"result,omitempty"`
}

// Messages are the newest of messages as JSON, as many as there is room for.
func (c *Content) Messages(messages []Message) string {
	var kept []json.RawMessage
	size := 2
	for _, m := range slices.Backward(messages) {
		parts := make([]Part, 0, len(m.Parts))
		for _, p := range m.Parts[:min(len(m.Parts), 64)] {
			p.Content, p.Arguments, p.Result = c.Text(p.Content), c.Text(p.Arguments), c.Text(p.Result)
			parts = append(parts, p)
		}
		m.Parts = parts
		data, err := json.Marshal(m)
		if err != nil || size+len(data)+1 > maxContentWhole {
			break
		}
		kept = append(kept, data)
		size += len(data) + 1
	}
	slices.Reverse(kept)
	if kept == nil {
		return "[]"
	}
	data, err := json.Marshal(kept)
	if err != nil {
		return "[]"
	}
	return string(data)
}

type contentKey struct{}

// WithContent returns ctx in which content is captured by c.
func WithContent(ctx context.Context, c *Content) context.Context {
	if c == nil {
		return ctx
	}
	return context.WithValue(ctx, contentKey{}, c)
}

// ContentOf returns what captures content in ctx, or nil.
func ContentOf(ctx context.Context) *Content {
	c, _ := ctx.Value(contentKey{}).(*Content)
	return c
}
