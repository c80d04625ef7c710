package event

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Truncate cuts text to its first max code points and reports whether it cut.
// A negative max cuts nothing.
func Truncate(text string, max int) (string, bool) {
	if max < 0 || len(text) <= max {
		return text, false
	}
	n := 0
	for i := range text {
		if n == max {
			return text[:i], true
		}
		n++
	}
	return text, false
}

// Sanitize makes text storable everywhere. Bytes that are not UTF-8 (a lone
// surrogate among them) and NUL, which databases refuse although JSON allows
// it, become U+FFFD each, so that a reader sees that something was there.
func Sanitize(text string) string {
	if utf8.ValidString(text) && strings.IndexByte(text, 0) < 0 {
		return text
	}
	var b strings.Builder
	b.Grow(len(text))
	for _, r := range text { // an invalid byte reads as U+FFFD
		if r == 0 {
			r = utf8.RuneError
		}
		b.WriteRune(r)
	}
	return b.String()
}

// SanitizeJSON is [Sanitize] for every string and key inside of a JSON value,
// which must be valid apart from that. A number that is too large for the numbers
// that readers and databases have becomes a text with its digits, because one such
// number makes a whole event unreadable for many. It reports whether it changed
// anything; an honest backslash before "u0000" is text and stays.
func SanitizeJSON(raw json.RawMessage) (json.RawMessage, bool) {
	if !unclean(raw) {
		return raw, false
	}
	v, err := decode(raw)
	if err != nil {
		return raw, false
	}
	return encode(clean(v)), true
}

// unclean reports whether raw holds what Sanitize would replace.
func unclean(raw []byte) bool {
	if !utf8.Valid(raw) {
		return true
	}
	inText := false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case c == '"':
			inText = !inText
			continue
		case !inText && c >= '0' && c <= '9':
			n := numberEnd(raw[i:])
			if tooLarge(string(raw[i : i+n])) {
				return true
			}
			i += n - 1
			continue
		case c != '\\':
			continue
		}
		i++ // the escaped character; "\\" must not make the next one special
		if i >= len(raw) || raw[i] != 'u' {
			continue
		}
		r := hex4(raw[i+1:])
		i += 4
		switch {
		case r == 0:
			return true
		case r >= 0xDC00 && r <= 0xDFFF: // low surrogate without its high one
			return true
		case r >= 0xD800 && r <= 0xDBFF:
			rest := raw[min(i+1, len(raw)):]
			if !bytes.HasPrefix(rest, []byte(`\u`)) {
				return true
			}
			if low := hex4(rest[2:]); low < 0xDC00 || low > 0xDFFF {
				return true
			}
			i += 6
		}
	}
	return false
}

// numberEnd is how long the number at the beginning of b is.
func numberEnd(b []byte) int {
	n := bytes.IndexFunc(b, func(r rune) bool { return !strings.ContainsRune("0123456789.eE+-", r) })
	if n < 0 {
		return len(b)
	}
	return n
}

// tooLarge reports whether a number is beyond what 64-bit floating point holds.
func tooLarge(number string) bool {
	if len(number) <= 300 && !strings.ContainsAny(number, "eE") {
		return false // the quick way for nearly all
	}
	_, err := strconv.ParseFloat(number, 64)
	return errors.Is(err, strconv.ErrRange)
}

// hex4 reads four hexadecimal digits, or returns -1.
func hex4(b []byte) int64 {
	if len(b) < 4 {
		return -1
	}
	n, err := strconv.ParseUint(string(b[:4]), 16, 16)
	if err != nil {
		return -1
	}
	return int64(n)
}

// clean applies Sanitize to every string and key of a decoded value, and makes texts
// of numbers that are too large, in place where it can.
func clean(v any) any {
	switch v := v.(type) {
	case json.Number:
		if tooLarge(v.String()) {
			return v.String()
		}
	case string:
		return Sanitize(v)
	case []any:
		for i := range v {
			v[i] = clean(v[i])
		}
	case map[string]any:
		for k, e := range v {
			e = clean(e)
			if c := Sanitize(k); c != k {
				delete(v, k)
				k = c
			}
			v[k] = e
		}
	}
	return v
}

// decode reads any JSON value and keeps the form of its numbers.
func decode(raw []byte) (any, error) {
	if err := contract.CheckDepth(raw, contract.MaxDepth); err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var v any
	err := d.Decode(&v)
	return v, err
}

// encode is our own JSON encoding: compact, keys sorted, nothing escaped that
// JSON does not ask for. v must come from [decode], so that it cannot fail.
func encode(v any) json.RawMessage {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return json.RawMessage("null")
	}
	return bytes.TrimRight(b.Bytes(), "\n")
}

// contentText flattens the content of a message as providers write it: a
// string as it is, the texts of a list of blocks joined by line breaks (empty
// ones and blocks without text left out), anything else as nothing.
func contentText(content any) string {
	switch content := content.(type) {
	case string:
		return content
	case []any:
		var parts []string
		for _, block := range content {
			text, _ := block.(string)
			if m, ok := block.(map[string]any); ok {
				text, _ = m["text"].(string)
			}
			if text != "" {
				parts = append(parts, text)
			}
		}
		return strings.Join(parts, "\n")
	}
	return ""
}
