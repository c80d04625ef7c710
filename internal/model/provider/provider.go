// Package provider is what all models behind HTTP have in common: settings, the
// limits of time and size of one call, and how a failure is explained. Each
// protocol is a package of its own beside it.
package provider

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/model"
)

// Limits and defaults.
const (
	DefaultRequestTimeout = 600 * time.Second
	DefaultIdleTimeout    = 60 * time.Second

	MaxTextBytes = 8 << 20 // of text and arguments together
	MaxCalls     = 256

	maxAnswerBytes = 64 << 20 // of one response body
)

var (
	errIdle    = errors.New("no data within the idle timeout")
	errRequest = errors.New("not finished within the request timeout")
)

// Config describes one model.
type Config struct {
	// Name is the configured name, Model the server's name for it.
	Name, Model string
	// BaseURL is the server's address; empty is the provider's own.
	BaseURL string
	// Key gives the API key; it is asked at every request and may give "", which
	// local servers allow. Nil is "".
	Key func() string
	// KeyEnv is the environment variable that Key reads, for error messages.
	KeyEnv string
	// RequestTimeout bounds one request as a whole, IdleTimeout the time without
	// data in it, comments not counted. Zero takes the defaults.
	RequestTimeout, IdleTimeout time.Duration
	// MaxOutputTokens bounds one answer; 0 leaves it to the provider, or to a
	// default where the protocol demands a number.
	MaxOutputTokens int
}

// Checked returns the settings with their defaults, or what is wrong with them.
func (c Config) Checked(defaultBaseURL string) (Config, error) {
	if c.Model == "" {
		return c, fmt.Errorf("model %q: model is empty; want the provider's name of it", c.Name)
	}
	if c.BaseURL == "" {
		c.BaseURL = defaultBaseURL
	}
	if !strings.HasPrefix(c.BaseURL, "http://") && !strings.HasPrefix(c.BaseURL, "https://") {
		return c, fmt.Errorf("model %q: base_url does not begin with http:// or https://", c.Name)
	}
	if c.RequestTimeout <= 0 {
		c.RequestTimeout = DefaultRequestTimeout
	}
	if c.IdleTimeout <= 0 {
		c.IdleTimeout = DefaultIdleTimeout
	}
	key := c.Key
	c.Key = func() string {
		if key == nil {
			return ""
		}
		return strings.TrimSpace(key()) // a line's end comes along easily
	}
	return c, nil
}

// Source names the model and its server, so that what one of them wants back is
// never sent to another. It tells nothing about the address, which may hold a key.
func (c Config) Source(protocol string) string {
	sum := sha256.Sum256([]byte(c.BaseURL + "\x00" + c.Model))
	return protocol + ":" + hex.EncodeToString(sum[:8])
}

// NewHTTPClient returns a client that bounds what the calls' own limits do not,
// and follows no redirect.
func NewHTTPClient() *http.Client {
	return &http.Client{CheckRedirect: refuseRedirect, Transport: &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		ForceAttemptHTTP2:     true,
		MaxIdleConns:          64,
		MaxIdleConnsPerHost:   64,
		IdleConnTimeout:       60 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ExpectContinueTimeout: time.Second,
	}}
}

// Call makes one call within its limits. ask calls alive for each sign of life.
func (c Config) Call(ctx context.Context, onDelta func(model.Delta), ask func(ctx context.Context, alive func()) (model.Response, error)) (model.Response, error) {
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	deadline := time.AfterFunc(c.RequestTimeout, func() { cancel(errRequest) })
	defer deadline.Stop()
	idle := time.AfterFunc(c.IdleTimeout, func() { cancel(errIdle) })
	defer idle.Stop()

	res, err := ask(inner, func() {
		idle.Reset(c.IdleTimeout)
		onDelta(model.Delta{}) // reasoning and arguments show nothing, but are life
	})
	if err == nil {
		return res, nil
	}
	if ctx.Err() != nil {
		return model.Response{}, context.Cause(ctx)
	}
	if cause := context.Cause(inner); cause != nil {
		return model.Response{}, c.timeout(cause)
	}
	return model.Response{}, c.explain(err)
}

// Invalid is the error for a request that cannot be written.
func Invalid(err error) error {
	return &model.Error{Kind: model.KindPermanent, Code: "invalid_request", Message: err.Error(), Err: err}
}

// Read gives the body of an answer to whole, if the server did not stream, or to
// stream, and closes it. What the body is shows in its first character: servers
// and proxies send wrong content types. An answer that is too long ends with an
// error.
func Read(res *http.Response, alive func(), whole func(io.Reader) error, stream func(*http.Response) error) error {
	body := res.Body
	defer body.Close()
	limited := bufio.NewReader(bound(body))
	first, err := firstByte(limited)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return fmt.Errorf("read the answer: %w", err)
	case first == '{' || first == '[':
		return whole(&lively{limited, alive})
	case first == '<':
		page, err := io.ReadAll(io.LimitReader(limited, maxRefusal))
		if err != nil {
			return fmt.Errorf("read the answer: %w", err)
		}
		return Break("malformed", "the answer is "+words(string(page))+", and no model's; check base_url")
	}
	// Some servers forget the empty line after the last event.
	res.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(limited, strings.NewReader("\n\n")), body}
	res.Header.Set("Content-Type", "text/event-stream")
	err = stream(res)
	if errors.Is(err, bufio.ErrTooLong) {
		return TooLarge()
	}
	return err
}

// firstByte looks at the first character after blanks and a byte order mark.
func firstByte(r *bufio.Reader) (byte, error) {
	for {
		c, err := r.ReadByte()
		if err != nil {
			return 0, err
		}
		if strings.IndexByte(" \t\r\n\xEF\xBB\xBF", c) < 0 {
			return c, r.UnreadByte()
		}
	}
}

// lively calls alive for whatever is read.
type lively struct {
	r     io.Reader
	alive func()
}

func (l *lively) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if n > 0 {
		l.alive()
	}
	return n, err
}

// bound returns r, which ends with an error when it is too long to be an answer.
func bound(r io.Reader) io.Reader { return &boundedBody{r: r, left: maxAnswerBytes} }

// boundedBody ends a body that never ends by itself.
type boundedBody struct {
	r    io.Reader
	left int
}

var errTooLong = errors.New("the answer is larger than 64 MiB")

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errTooLong
	}
	n, err := b.r.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// UsedIDs are the ids of the calls in a conversation.
func UsedIDs(req model.Request) map[string]bool {
	used := map[string]bool{}
	for _, m := range req.Messages {
		for _, c := range m.ToolCalls {
			used[c.ID] = true
		}
	}
	return used
}

// FreeID returns id, or a new one if it is blank or used, and marks it as used (F-100).
func FreeID(id string, used map[string]bool) string {
	if id = Clean(id); strings.TrimSpace(id) == "" || used[id] {
		var b [12]byte
		_, _ = rand.Read(b[:]) // never fails
		id = "call_" + hex.EncodeToString(b[:])
	}
	used[id] = true
	return id
}

// Finish gives a reason to stop in the words of [model.Message].
func Finish(reason string) string {
	switch reason = Clean(reason); reason {
	case "end_turn", "stop_sequence", "pause_turn", "eos":
		return "stop"
	case "tool_use", "function_call":
		return "tool_calls"
	case "max_tokens", "model_context_window_exceeded":
		return "length"
	}
	return reason
}

// LastFinish is the reason to stop after one more was sent, which may be "". That
// an answer was cut stands, whatever a gateway sends after it: a call that is half
// written must not look whole.
func LastFinish(before, next string) string {
	if next == "" || before == "length" {
		return before
	}
	return Finish(next)
}

// Display shows text as it streams in. A piece may end inside a character; the
// rest of it is waited for.
type Display struct {
	OnDelta func(model.Delta)
	tail    string
}

// Add shows the next piece.
func (d *Display) Add(piece string) {
	s := d.tail + piece
	cut := len(s)
	for i := 1; i < utf8.UTFMax && i <= len(s); i++ {
		if c := s[len(s)-i]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRuneInString(s[len(s)-i:]) {
				cut = len(s) - i
			}
			break
		}
	}
	d.tail = s[cut:]
	if cut > 0 {
		d.OnDelta(model.Delta{Text: Clean(s[:cut])})
	}
}

// ReplayArgs gives arguments that a server can parse: broken ones are quoted
// shortly inside an object instead of being sent as they are (F-102, F-104).
func ReplayArgs(args string) string {
	if IsObject(args) {
		return Clean(args)
	}
	if strings.TrimSpace(args) == "" {
		return "{}"
	}
	quote := []rune(Clean(args))
	if len(quote) > 200 {
		quote = append(quote[:200], '…')
	}
	b, _ := json.Marshal(map[string]string{"invalid_arguments": string(quote)}) // a map of strings cannot fail
	return string(b)
}

// ReplayName gives a name that a server accepts.
func ReplayName(name string) string {
	out := strings.Map(func(r rune) rune {
		if r == '_' || r == '-' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return r
		}
		return '_'
	}, name)
	if out == "" {
		return "unnamed_tool"
	}
	return out[:min(len(out), 64)]
}

// IsObject reports whether s is a JSON object.
func IsObject(s string) bool {
	return strings.HasPrefix(strings.TrimLeft(s, " \t\r\n"), "{") && json.Valid([]byte(s))
}

// Clean gives s in valid UTF-8 (F-114).
func Clean(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
