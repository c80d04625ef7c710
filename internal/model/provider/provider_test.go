package provider

import (
	"net/http"
	"testing"
	"time"
)

// F-122
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for in, want := range map[string]time.Duration{
		"": 0, "0": 0, "-5": 0, "abc": 0, "NaN": 0, "99999999": 24 * time.Hour, "1e9": 24 * time.Hour, "Inf": 24 * time.Hour, "2.5": 2500 * time.Millisecond,
		"Thu, 01 Jan 1998 00:00:00 GMT": 0, "Fri, 31 Dec 2199 23:59:59 GMT": 24 * time.Hour, "Fri, 02 Jan 2026 03:04:15 GMT": 10 * time.Second,
	} {
		if got := retryAfter(http.Header{"Retry-After": {in}}, now); got != want {
			t.Errorf("retryAfter(%q) = %v, want %v", in, got, want)
		}
	}
}
