package provider

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/herdgate/herdgate/internal/model"
)

// maxDetail bounds what is quoted of a provider's error, in characters.
const maxDetail = 500

// Broken is an answer that is not whole.
type Broken struct{ Code, Text string }

func (b *Broken) Error() string { return b.Text }

// Break returns an answer's end that came too early.
func Break(code, text string) error { return &Broken{Code: code, Text: text} }

// TooLarge is the error for an answer beyond the limits of this package.
func TooLarge() error {
	return Break("too_large", fmt.Sprintf("the answer has more than %d bytes or %d calls", MaxTextBytes, MaxCalls))
}

// StreamError is an error object inside an answer of status 200 (F-116).
type StreamError struct{ Type, Code, Message string }

func (e *StreamError) Error() string { return e.Message }

func (c Config) timeout(cause error) *model.Error {
	limit := c.RequestTimeout
	if errors.Is(cause, errIdle) {
		limit = c.IdleTimeout
	}
	return &model.Error{Kind: model.KindTransient, Code: "timeout", Message: fmt.Sprintf("%v (%v)", cause, limit), Err: cause}
}

// explain turns what went wrong into what a caller should do about it.
func (c Config) explain(err error) *model.Error {
	e := &model.Error{Kind: model.KindTransient, Code: "disconnected"}
	var refused *Status
	var half *Broken
	var inside *StreamError
	var away *redirected
	switch {
	case errors.As(err, &refused):
		c.explainStatus(e, refused)
	case errors.As(err, &away):
		e.Kind, e.Code, e.Message = model.KindPermanent, "redirected", c.scrub(away.Error())
	case errors.As(err, &half):
		e.Code, e.Message = half.Code, c.scrub(half.Text)
		if half.Code == "too_large" {
			e.Kind = model.KindPermanent
		}
	case errors.As(err, &inside):
		e.Code, e.Message = "provider_error", c.scrub("the provider reported an error in its answer: "+inside.Message)
		switch {
		case tooLong(inside.Type, inside.Code):
			e.Kind, e.Code = model.KindPermanent, codeTooLong
		case strings.Contains(inside.Type, "invalid_request") || strings.Contains(inside.Type, "authentication") ||
			strings.Contains(inside.Type, "permission") || strings.Contains(inside.Type, "billing"):
			e.Kind = model.KindPermanent
		case strings.Contains(inside.Type, "rate_limit") || strings.Contains(inside.Code, "rate_limit"):
			e.Code = "rate_limited"
		case strings.Contains(inside.Type, "overloaded"):
			e.Code = "overloaded"
		}
	case errors.Is(err, errTooLong):
		e.Kind, e.Code, e.Message = model.KindPermanent, "too_large", errTooLong.Error()
	default:
		// The text of a transport error names the address, and an address may
		// carry a key of its own.
		e.Message = c.scrub(err.Error())
	}
	return e
}

func (c Config) explainStatus(e *model.Error, s *Status) {
	e.RetryAfter = retryAfter(s.Header, time.Now())
	hint := ""
	spent := func(word string) bool {
		return strings.Contains(s.Type, word) || strings.Contains(s.Name, word)
	}
	switch {
	case s.Code == http.StatusTooManyRequests && (spent("insufficient_quota") || spent("spend_limit")):
		e.Kind, e.Code = model.KindPermanent, "quota_exhausted"
	case s.Code == http.StatusTooManyRequests:
		e.Code = "rate_limited"
	case s.Code == http.StatusUnauthorized || s.Code == http.StatusForbidden:
		e.Kind, e.Code, hint = model.KindPermanent, "unauthorized", c.keyHint()
	case s.Code == http.StatusNotFound:
		e.Kind, e.Code = model.KindPermanent, "not_found"
		hint = fmt.Sprintf("asked was %s for the model %q; check base_url and model", c.place(), c.Model)
	case s.Code == http.StatusRequestEntityTooLarge || tooLong(s.Type, s.Name):
		e.Kind, e.Code = model.KindPermanent, codeTooLong
	case s.Code == 529:
		e.Code = "overloaded"
	case s.Code == http.StatusRequestTimeout || s.Code == http.StatusConflict || s.Code >= 500:
		e.Code = "http_" + strconv.Itoa(s.Code)
	default:
		e.Kind, e.Code = model.KindPermanent, "http_"+strconv.Itoa(s.Code)
	}
	e.Message = c.scrub(strings.TrimSuffix(s.Error()+": "+s.Message, ": "))
	if hint != "" {
		e.Message += " (" + hint + ")"
	}
}

// codeTooLong is the code for a conversation that is larger than the model reads;
// see [model.TooLong].
const codeTooLong = "context_length_exceeded"

// tooLong reports whether a provider's words for the kind of error mean that.
func tooLong(words ...string) bool {
	for _, w := range words {
		switch w {
		case codeTooLong, "request_too_large", "exceed_context_size_error":
			return true
		}
	}
	return false
}

var envForm = regexp.MustCompile(`^[A-Z][A-Z0-9_]*$`)

// keyHint says where the key came from. What does not look like the name of a
// variable may be a key that was written in its place, and is not repeated.
func (c Config) keyHint() string {
	from := "the environment variable that api_key_env names"
	if envForm.MatchString(c.KeyEnv) {
		from = "the environment variable " + c.KeyEnv
	}
	switch {
	case c.Key() != "":
		return "the key came from " + from + "; check it, and that it may use the model " + strconv.Quote(c.Model)
	case c.KeyEnv != "":
		return from + " is empty or not set, so that no key was sent"
	}
	return "no key was sent, because the model has no api_key_env"
}

// place is the configured address without what may be secret in it.
func (c Config) place() string {
	u, err := url.Parse(c.BaseURL)
	if err != nil {
		return "base_url"
	}
	return place(u)
}

// scrub bounds a text and takes the key out of it.
func (c Config) scrub(s string) string {
	if key := c.Key(); key != "" {
		s = strings.ReplaceAll(s, key, "[key]")
	}
	if u := c.BaseURL; strings.ContainsAny(u, "@?") {
		s = strings.ReplaceAll(s, u, "[base_url]")
	}
	if r := []rune(Clean(s)); len(r) > maxDetail {
		return string(r[:maxDetail]) + "…"
	}
	return Clean(s)
}

// retryAfter reads what the provider asks for: seconds or a date. Rubbish, the
// past and negative values are 0; more than a day is a day. What is made of it
// is the caller's choice (F-122).
func retryAfter(header http.Header, now time.Time) time.Duration {
	const limit = 24 * time.Hour
	if v := strings.TrimSpace(header.Get("Retry-After-Ms")); v != "" {
		if ms, err := strconv.ParseFloat(v, 64); err == nil && ms > 0 {
			return time.Duration(math.Min(ms, float64(limit.Milliseconds()))) * time.Millisecond
		}
	}
	v := strings.TrimSpace(header.Get("Retry-After"))
	if s, err := strconv.ParseFloat(v, 64); err == nil {
		if !(s > 0) { // also NaN
			return 0
		}
		return time.Duration(math.Min(s, limit.Seconds()) * float64(time.Second))
	}
	if at, err := http.ParseTime(v); err == nil {
		return min(max(at.Sub(now), 0), limit)
	}
	return 0
}
