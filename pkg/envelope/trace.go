package envelope

import "strings"

// Carrier moves W3C trace context in and out of message headers. It has the
// three methods of OpenTelemetry's propagation.TextMapCarrier; nats.Header
// converts to it.
type Carrier map[string][]string

// Get returns the first value of key, or "".
func (c Carrier) Get(key string) string {
	if v := c[key]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// Set replaces the values of key. Values that cannot stand in a header, because
// a line break would begin a header of its own, are left out.
func (c Carrier) Set(key, value string) {
	if strings.ContainsAny(key+value, "\r\n\x00") {
		return
	}
	c[key] = []string{value}
}

// Keys returns the names that are set.
func (c Carrier) Keys() []string {
	keys := make([]string, 0, len(c))
	for k := range c {
		keys = append(keys, k)
	}
	return keys
}

// ValidTraceParent reports whether s is a traceparent that W3C Trace Context
// (section 3.2) allows us to take over: version 00 exactly, or a later one that
// begins like it.
func ValidTraceParent(s string) bool {
	const front = len("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	if len(s) < front || len(s) > 512 || s[2] != '-' || s[35] != '-' || s[52] != '-' {
		return false
	}
	if !lowerHex(s[:2]) || !lowerHex(s[3:35]) || !lowerHex(s[36:52]) || !lowerHex(s[53:55]) || s[:2] == "ff" {
		return false
	}
	if s[3:35] == strings.Repeat("0", 32) || s[36:52] == strings.Repeat("0", 16) {
		return false
	}
	if s[:2] == "00" {
		return len(s) == front
	}
	return len(s) == front || s[front] == '-'
}

// MaxTraceState bounds a tracestate that we pass on, in bytes.
const MaxTraceState = 512

// ValidTraceState reports whether s can be passed on beside a traceparent: at
// most [MaxTraceState] printable ASCII characters, which is all that W3C Trace
// Context allows in it. Its entries are their vendors' business.
func ValidTraceState(s string) bool {
	if s == "" || len(s) > MaxTraceState {
		return false
	}
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

func lowerHex(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
