package contract

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Identity is on whose behalf a task runs: that of the run it belongs to. It comes from
// whoever was authenticated, never from a model or from baggage.
type Identity struct {
	UserID   string `json:"user_id,omitempty"`
	UserRole string `json:"user_role,omitempty"`
	// OAuthProvider and OAuthID are who vouched for the user, and how it knows it.
	OAuthProvider string `json:"oauth_provider,omitempty"`
	OAuthID       string `json:"oauth_id,omitempty"`
	// ChannelUserID is the user's id where the request came from, such as a chat.
	ChannelUserID string `json:"channel_user_id,omitempty"`
	// IsInternal: the request is a service's own, no user's.
	IsInternal bool `json:"is_internal"`
	// Attributes are what rules of authorisation go by.
	Attributes map[string]string `json:"authz_attributes,omitempty"`
	IsSubagent bool              `json:"is_subagent"`
}

// Limits of an [Identity].
const (
	// MaxIdentityChars bounds each of its texts, in code points.
	MaxIdentityChars = 256
	// MaxAttributes bounds its attributes.
	MaxAttributes = 64
)

// ErrNoIdentity is returned for a request that names nobody.
var ErrNoIdentity = errors.New("the request does not say on whose behalf it runs")

// Validate checks the bounds; the zero value is within them.
func (i Identity) Validate() error {
	var errs []error
	text := func(what, s string) {
		switch n := utf8.RuneCountInString(s); {
		case n > MaxIdentityChars:
			errs = append(errs, fmt.Errorf("identity.%s has %d characters; want at most %d", what, n, MaxIdentityChars))
		case !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl):
			errs = append(errs, fmt.Errorf("identity.%s is %.80q; want text without control characters", what, s))
		}
	}
	text("user_id", i.UserID)
	text("user_role", i.UserRole)
	text("oauth_provider", i.OAuthProvider)
	text("oauth_id", i.OAuthID)
	text("channel_user_id", i.ChannelUserID)
	if n := len(i.Attributes); n > MaxAttributes {
		errs = append(errs, fmt.Errorf("identity.authz_attributes has %d entries; want at most %d", n, MaxAttributes))
	} else {
		for _, name := range slices.Sorted(maps.Keys(i.Attributes)) {
			text("authz_attributes", name)
			text(fmt.Sprintf("authz_attributes[%.40q]", name), i.Attributes[name])
		}
	}
	return errors.Join(errs...)
}

// RequireIdentity returns ErrNoIdentity for a request without a user. Whoever makes
// requests gives those of nobody in particular to [DefaultUser] (CTX-10).
func (r TaskRequest) RequireIdentity() error {
	if r.Identity.UserID == "" {
		return fmt.Errorf("%w: identity.user_id is missing; want a user, or %q for none in particular", ErrNoIdentity, DefaultUser)
	}
	return nil
}
