package httpapi

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

// The modes of authentication.
const (
	// AuthNone serves everybody as an administrator of the default tenant. It
	// is for one machine: the server then listens on loopback only.
	AuthNone = "none"
	// AuthTokens wants a bearer token on everything but the probes, the metrics
	// and the OpenAPI document.
	AuthTokens = "tokens"
)

// Token is one entry of http.auth.tokens. The token itself is in the environment.
type Token struct {
	// Name tells the entry apart in errors and logs.
	Name string
	// TokenEnv names the environment variable that holds the token.
	TokenEnv string
	// Tenant is whose data the token opens; empty is the default tenant.
	Tenant contract.Tenant
	UserID string
	// Roles may hold "admin" or "administrator".
	Roles []string
	// Attributes go into the identity of the user's tasks.
	Attributes map[string]string
}

// identity is on whose behalf a request is served.
type identity struct {
	tenant contract.Tenant
	user   string
	role   string
	admin  bool
	// attributes are shared by the requests of a token; nobody changes them.
	attributes map[string]string
}

type identityKey struct{}

// who returns the identity of a request that went through authenticate.
func who(ctx context.Context) identity {
	id, _ := ctx.Value(identityKey{}).(identity)
	return id
}

type credential struct {
	digest [sha256.Size]byte
	id     identity
}

// authenticator knows the credentials; with none every request passes.
type authenticator struct {
	open        bool
	credentials []credential
}

func newAuthenticator(cfg Config) (*authenticator, error) {
	switch cfg.AuthMode {
	case AuthNone, "":
		if err := requireLoopback(cfg.Addr); err != nil {
			return nil, err
		}
		return &authenticator{open: true}, nil
	case AuthTokens:
	default:
		return nil, fmt.Errorf("http.auth.mode is %q; want %s or %s", cfg.AuthMode, AuthNone, AuthTokens)
	}
	if len(cfg.Tokens) == 0 {
		return nil, errors.New("http.auth.tokens is empty: with http.auth.mode tokens nobody could get in")
	}
	a := &authenticator{}
	seen := map[[sha256.Size]byte]string{}
	for i, t := range cfg.Tokens {
		where := fmt.Sprintf("http.auth.tokens[%d] (%s)", i, t.Name)
		secret := strings.TrimSpace(cfg.Getenv(t.TokenEnv))
		if t.TokenEnv == "" || secret == "" {
			return nil, fmt.Errorf("%s: the environment variable %q that should hold the token is not set", where, t.TokenEnv)
		}
		tenant := t.Tenant
		if tenant == "" {
			tenant = contract.DefaultTenant
		}
		if err := tenant.Validate(); err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		digest := sha256.Sum256([]byte(secret))
		if other, twice := seen[digest]; twice {
			return nil, fmt.Errorf("%s: has the same token as %s", where, other)
		}
		seen[digest] = where
		id := identity{tenant: tenant, user: t.UserID, attributes: t.Attributes}
		if err := (contract.Identity{UserID: t.UserID, Attributes: t.Attributes}).Validate(); err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		if len(t.Roles) > 0 {
			id.role = t.Roles[0]
		}
		id.admin = slices.ContainsFunc(t.Roles, func(r string) bool { return r == "admin" || r == "administrator" })
		a.credentials = append(a.credentials, credential{digest: digest, id: id})
	}
	return a, nil
}

// identify returns whose token it is. It compares digests, and all of them, so
// that the time it takes tells nothing about the tokens.
func (a *authenticator) identify(r *http.Request) (identity, bool) {
	if a.open {
		return identity{tenant: contract.DefaultTenant, admin: true}, true
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	digest := sha256.Sum256([]byte(strings.TrimSpace(token)))
	var (
		found identity
		ok    bool
	)
	for _, c := range a.credentials {
		if subtle.ConstantTimeCompare(digest[:], c.digest[:]) == 1 {
			found, ok = c.id, true
		}
	}
	return found, ok && strings.EqualFold(scheme, "Bearer")
}

// openPath reports whether a path is served without an identity.
func openPath(path string) bool { return probePath(path) || strings.HasPrefix(path, "/openapi") }

// probePath reports whether a path is for whoever watches the process.
func probePath(path string) bool {
	return path == "/healthz" || path == "/readyz" || path == "/metrics"
}

// authenticate lets requests through only with an identity.
func (s *Server) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if openPath(r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		id, ok := s.auth.identify(r)
		if !ok {
			w.Header().Set("WWW-Authenticate", `Bearer realm="herdgate"`)
			writeProblem(w, r, newProblem(http.StatusUnauthorized, wire.CodeUnauthorized, "a valid bearer token is needed"))
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), identityKey{}, id)))
	})
}

// guardOrigin keeps web pages of other origins out. Without tokens, a page that
// a user of this machine happens to visit could otherwise start runs: directly,
// or by a host name that it lets point to this machine.
func (s *Server) guardOrigin(next http.Handler) http.Handler {
	cross := http.NewCrossOriginProtection()
	cross.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		writeProblem(w, r, newProblem(http.StatusForbidden, wire.CodeForbidden, "requests from pages of other origins are refused"))
	}))
	next = cross.Handler(next)
	if !s.auth.open {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !localHost(r.Host) {
			writeProblem(w, r, newProblem(http.StatusForbidden, wire.CodeForbidden, "without authentication only 127.0.0.1, [::1] and localhost are served"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func localHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// ErrNotLoopback is returned by [New] when the server would serve other
// machines without authentication.
var ErrNotLoopback = errors.New("without authentication the server may listen on loopback only")

func requireLoopback(addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("http.addr is %q; want host:port, such as 127.0.0.1:8484", addr)
	}
	if host == "" || !localHost(host) {
		return fmt.Errorf("http.addr is %q with http.auth.mode none: %w; use 127.0.0.1, or set http.auth.mode to tokens", addr, ErrNotLoopback)
	}
	return nil
}
