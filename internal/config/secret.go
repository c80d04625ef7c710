package config

import (
	"fmt"
	"net/url"
	"regexp"
	"strings"
)

// hidden stands where a secret was left out.
const hidden = "(hidden)"

// envRef is a value that names an environment variable.
var envRef = regexp.MustCompile(`^\$([A-Za-z_][A-Za-z0-9_]*)$`)

// Secret is a value that may be secret. Every text form of it is hidden, except
// that of a reference to an environment variable ($NAME) and of nothing.
type Secret string

// Resolve returns the value: for $NAME that of the environment variable, which
// must be set; for $$… the text after the first dollar sign; otherwise the text
// itself. lookup is usually os.LookupEnv.
func (s Secret) Resolve(lookup func(string) (string, bool)) (string, error) {
	if m := envRef.FindStringSubmatch(string(s)); m != nil {
		v, ok := lookup(m[1])
		if !ok {
			return "", fmt.Errorf("environment variable %s is not set", m[1])
		}
		return v, nil
	}
	if strings.HasPrefix(string(s), "$$") {
		return string(s[1:]), nil
	}
	return string(s), nil
}

// String implements fmt.Stringer.
func (s Secret) String() string {
	if s == "" || envRef.MatchString(string(s)) {
		return string(s)
	}
	return hidden
}

// GoString implements fmt.GoStringer.
func (s Secret) GoString() string { return fmt.Sprintf("%q", s.String()) }

// MarshalText implements encoding.TextMarshaler.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalYAML implements yaml.Marshaler.
func (s Secret) MarshalYAML() (any, error) { return s.String(), nil }

// Address is an address that may hold a password. Its text forms leave that
// out; Reveal has all of it.
type Address string

// Reveal returns the address as it was given.
func (a Address) Reveal() string { return string(a) }

// String implements fmt.Stringer.
func (a Address) String() string { return redactAddress(string(a)) }

// GoString implements fmt.GoStringer.
func (a Address) GoString() string { return fmt.Sprintf("%q", a.String()) }

// MarshalText implements encoding.TextMarshaler.
func (a Address) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// MarshalYAML implements yaml.Marshaler.
func (a Address) MarshalYAML() (any, error) { return a.String(), nil }

// dsnSecret finds the secret words of a key=value connection string.
var dsnSecret = regexp.MustCompile(`(?i)\b((?:ssl)?password|passfile|sslkey)\s*=\s*('(?:[^'\\]|\\.)*'?|\S+)`)

// redactAddress takes users, passwords and query values out of addresses,
// several of which may be joined by commas.
func redactAddress(s string) string {
	if !strings.Contains(s, "://") && !strings.Contains(s, "@") {
		return dsnSecret.ReplaceAllString(s, "$1="+hidden)
	}
	// A password may hold commas, so a list is only cut where an address begins.
	var out []string
	for _, part := range splitAddresses(s) {
		out = append(out, redactOne(part))
	}
	return strings.Join(out, ",")
}

var addressStart = regexp.MustCompile(`,\s*[a-zA-Z][a-zA-Z0-9+.-]*://`)

func splitAddresses(s string) []string {
	var parts []string
	from := 0
	for _, at := range addressStart.FindAllStringIndex(s, -1) {
		parts = append(parts, s[from:at[0]])
		from = at[0] + 1
	}
	return append(parts, s[from:])
}

func redactOne(s string) string {
	scheme, rest := "", s
	if i := strings.Index(s, "://"); i >= 0 {
		scheme, rest = s[:i+3], s[i+3:]
	}
	query := ""
	if i := strings.IndexByte(rest, '?'); i >= 0 {
		rest, query = rest[:i], redactQuery(rest[i+1:])
	}
	// Everything up to the last @ is user and password, however it is written.
	if i := strings.LastIndexByte(rest, '@'); i >= 0 {
		rest = hidden + rest[i:]
	}
	return scheme + rest + query
}

// plainParams are query parameters that say nothing secret and help to see what
// is wrong.
var plainParams = map[string]bool{"sslmode": true, "application_name": true, "connect_timeout": true, "pool_max_conns": true, "search_path": true}

func redactQuery(q string) string {
	pairs := strings.Split(q, "&")
	for i, p := range pairs {
		k, v, ok := strings.Cut(p, "=")
		if name, err := url.QueryUnescape(k); ok && v != "" && (err != nil || !plainParams[name]) {
			pairs[i] = k + "=" + hidden
		}
	}
	return "?" + strings.Join(pairs, "&")
}
