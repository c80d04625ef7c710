package openai

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	sdk "github.com/openai/openai-go/v3"

	"github.com/herdgate/herdgate/internal/model"
)

// maxDetail bounds what is quoted of a provider's error, in characters.
const maxDetail = 500

func (m *Model) timeout(cause error) *model.Error {
	limit := m.cfg.RequestTimeout
	if errors.Is(cause, errIdle) {
		limit = m.cfg.IdleTimeout
	}
	return &model.Error{Kind: model.KindTransient, Code: "timeout", Message: fmt.Sprintf("%v (%v)", cause, limit), Err: cause}
}

// explain turns what went wrong into what a caller should do about it.
func (m *Model) explain(err error) *model.Error {
	e := &model.Error{Kind: model.KindTransient, Code: "disconnected"}
	var status *sdk.Error
	var half *broken
	var inside *providerError
	switch {
	case errors.As(err, &status):
		m.explainStatus(e, status)
		return e
	case errors.As(err, &half):
		e.Code, e.Message = half.code, m.scrub(half.text)
		if half.code == "too_large" {
			e.Kind = model.KindPermanent
		}
	case errors.As(err, &inside):
		e.Code, e.Message = "provider_error", m.scrub("the provider reported an error in its answer: "+inside.message)
		switch {
		case strings.Contains(inside.kind, "invalid_request") || strings.Contains(inside.kind, "authentication"):
			e.Kind = model.KindPermanent
		case strings.Contains(inside.kind, "rate_limit") || strings.Contains(inside.code, "rate_limit"):
			e.Code = "rate_limited"
		}
	case errors.Is(err, errTooLong):
		e.Kind, e.Code, e.Message = model.KindPermanent, "too_large", errTooLong.Error()
	default:
		// The text of a transport error names the address, and an address may
		// carry a key of its own.
		e.Message = m.scrub(err.Error())
	}
	return e
}

func (m *Model) explainStatus(e *model.Error, status *sdk.Error) {
	code := status.StatusCode
	e.RetryAfter = retryAfter(status.Response, time.Now())
	switch {
	case code == http.StatusTooManyRequests && (status.Code == "insufficient_quota" || status.Type == "insufficient_quota"):
		e.Kind, e.Code = model.KindPermanent, "quota_exhausted"
	case code == http.StatusTooManyRequests:
		e.Code = "rate_limited"
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		e.Kind, e.Code = model.KindPermanent, "unauthorized"
	case code == http.StatusNotFound:
		e.Kind, e.Code = model.KindPermanent, "not_found"
	case code == http.StatusRequestTimeout || code == http.StatusConflict || code >= 500:
		e.Code = "http_" + strconv.Itoa(code)
	default:
		e.Kind, e.Code = model.KindPermanent, "http_"+strconv.Itoa(code)
	}
	detail := status.Message
	if detail == "" {
		detail = strings.TrimSpace(status.RawJSON())
	}
	e.Message = m.scrub(fmt.Sprintf("status %d %s: %s", code, http.StatusText(code), detail))
}

// scrub bounds a text and takes the key out of it.
func (m *Model) scrub(s string) string {
	if key := m.cfg.Key(); key != "" {
		s = strings.ReplaceAll(s, key, "[key]")
	}
	if u := m.cfg.BaseURL; strings.ContainsAny(u, "@?") {
		s = strings.ReplaceAll(s, u, "[base_url]")
	}
	if r := []rune(clean(s)); len(r) > maxDetail {
		return string(r[:maxDetail]) + "…"
	}
	return clean(s)
}

// retryAfter reads what the provider asks for: seconds or a date. Rubbish, the
// past and negative values are 0; more than a day is a day. What is made of it
// is the caller's choice (F-122).
func retryAfter(res *http.Response, now time.Time) time.Duration {
	if res == nil {
		return 0
	}
	const limit = 24 * time.Hour
	if v := strings.TrimSpace(res.Header.Get("Retry-After-Ms")); v != "" {
		if ms, err := strconv.ParseFloat(v, 64); err == nil && ms > 0 {
			return time.Duration(math.Min(ms, float64(limit.Milliseconds()))) * time.Millisecond
		}
	}
	v := strings.TrimSpace(res.Header.Get("Retry-After"))
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
