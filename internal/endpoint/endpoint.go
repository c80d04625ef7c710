// Package endpoint has what the request-reply endpoints on NATS have in common:
// how they describe themselves, and how a caller's permissions can bind it to a
// tenant.
package endpoint

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/micro"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/contract/schema"
)

// Keys of the metadata of an endpoint, which $SRV.INFO tells. The schemas are JSON
// Schemas; that of an error is missing where the answer's own has a place for it.
const (
	MetaDescription    = "description"
	MetaRequestSchema  = "request_schema"
	MetaResponseSchema = "response_schema"
	MetaErrorSchema    = "error_schema"
)

// Describe is the option of an endpoint with what it does and the schemas of its
// messages; name is that of its schemas, such as events.list.
func Describe(name, description string) (micro.EndpointOpt, error) {
	meta := map[string]string{MetaDescription: description}
	names := map[string]string{MetaRequestSchema: name + ".request", MetaResponseSchema: name + ".response"}
	if strings.HasPrefix(name, "task.") {
		names[MetaErrorSchema] = "problem"
	}
	for key, name := range names {
		raw, err := schema.Get(name)
		if err != nil {
			return nil, fmt.Errorf("describe an endpoint: %w", err)
		}
		var text bytes.Buffer
		if err := json.Compact(&text, raw); err != nil {
			return nil, fmt.Errorf("describe an endpoint: schema %s: %w", name, err)
		}
		meta[key] = text.String()
	}
	return micro.WithEndpointMetadata(meta), nil
}

// Inboxes are what the reply subject of a request begins with: the inboxes of clients,
// whose prefix may go on as in _INBOX_team, and what a server makes of the inbox of a
// client in another account.
var inboxes = []string{"_INBOX", "_R_."}

// Handler answers requests by handle, but only into an inbox. A reply subject is the
// caller's own choice and no permission of the caller's is asked for it, while the
// answer is published with ours: into the record of a task, for example, if the caller
// names that.
func Handler(log zerolog.Logger, handle func(micro.Request)) micro.Handler {
	return micro.HandlerFunc(func(req micro.Request) {
		if reply := req.Reply(); reply != "" && !isInbox(reply) {
			log.Warn().Str("subject", req.Subject()).Str("reply", reply).Msg("a request was not served: its reply subject is no inbox, and must begin with _INBOX")
			return
		}
		handle(req)
	})
}

func isInbox(reply string) bool {
	for _, prefix := range inboxes {
		if strings.HasPrefix(reply, prefix) {
			return true
		}
	}
	return false
}

// Bound is the subject that has the tenant at its end, of an endpoint whose subject
// is base: NATS permissions for it let a caller speak for that tenant alone. With *
// it is what an endpoint subscribes to.
func Bound(base string, tenant contract.Tenant) string { return base + "." + string(tenant) }

// AnyTenant is Bound for all of them.
const AnyTenant contract.Tenant = "*"

// TenantOf is for whom a request is made that came on subject and says asked, at an
// endpoint whose subject is base. The subject decides, because it is what the
// caller was allowed; a request that says something else is refused. The plain
// subject is for services: its callers are believed.
func TenantOf(base, subject string, asked contract.Tenant) (contract.Tenant, error) {
	token, bound := strings.CutPrefix(subject, base+".")
	if !bound {
		return asked, nil
	}
	tenant := contract.Tenant(token)
	if err := tenant.Validate(); err != nil {
		return "", err
	}
	if asked != "" && asked != tenant {
		return "", fmt.Errorf("the request is for tenant %q and its subject for %q; want the same, or none in the request", asked, tenant)
	}
	return tenant, nil
}
