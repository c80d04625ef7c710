package telemetry

import (
	"encoding/json"
	"strings"
	"testing"
)

// Captured content holds no secret: neither what has the form of one, nor the value of
// a variable that sounds like one.
func TestContentIsRedacted(t *testing.T) {
	t.Parallel()
	c := NewContent([]string{"MY_API_KEY=plain-word-value", "PASSWORD_OF_X=with \"quotes\" in it", "HOME=/home/someone", "TOKEN=short"})
	for text, hidden := range map[string]string{
		"the key is plain-word-value.":                          "plain-word-value",
		`{"a":"with \"quotes\" in it"}`:                         "quotes",
		"sk-ant-api03-abcdefghijklmnop and more":                "abcdefghijklmnop",
		"AKIAIOSFODNN7EXAMPLE":                                  "IOSFODNN7",
		"ghp_abcdefghijklmnopqrstuvwxyz0123456789":              "abcdefghij",
		"Authorization: Bearer abc.def-ghi/jkl":                 "def-ghi",
		`{"api_key": "0123456789abcdef"}`:                       "0123456789",
		`{\"password\": \"hunter2hunter2\"}`:                    "hunter2",
		"postgres://user:pa55word@host:5432/db":                 "pa55word",
		"-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQE":      "MIIEow",
		"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl": "eyJzdWI",
	} {
		if got := c.Text(text); strings.Contains(got, hidden) || !strings.Contains(got, redacted) {
			t.Errorf("Text(%q) = %q", text, got)
		}
	}
	for _, text := range []string{"look into /home/someone and be short", "http://localhost:8080/a/path", "a token is a word", "the keyboard: fine"} {
		if got := c.Text(text); got != text {
			t.Errorf("Text(%q) = %q, want it as it is", text, got)
		}
	}
}

// What is captured of a long conversation stays valid JSON below the limit of spans:
// its newest messages, each cut.
func TestContentIsBounded(t *testing.T) {
	t.Parallel()
	c := NewContent([]string{})
	var all []Message
	for range 50 {
		all = append(all, Message{Role: "user", Parts: []Part{{Type: "text", Content: strings.Repeat("é", 5000)}}})
	}
	all = append(all, Message{Role: "user", Parts: []Part{{Type: "text", Content: "the last"}}})
	got := c.Messages(all)
	var back []Message
	if err := json.Unmarshal([]byte(got), &back); err != nil || len(got) > maxAttributeChars {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	if n := len(back); n < 2 || n == len(all) || back[n-1].Parts[0].Content != "the last" || len(back[0].Parts[0].Content) > maxContentText+3 {
		t.Errorf("%d messages are kept, the last is %q", n, back[n-1].Parts[0].Content)
	}
	// A secret across the cut is not left in half.
	if got := c.Text(strings.Repeat("x", maxContentText-12) + " sk-abcdefghijklmnopqrstuvwxyz"); strings.Contains(got, "sk-abc") {
		t.Errorf("half a secret is left: %q", got[len(got)-40:])
	}
	if c := ContentOf(WithContent(t.Context(), nil)); c != nil {
		t.Error("nothing asked for content, and it is captured")
	}
}
