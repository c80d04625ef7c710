package provider

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/herdgate/herdgate/internal/model"
)

// maxNamed is how many models of a server an error names.
const maxNamed = 10

// Probe asks a server for the model, at the address of its list of models, and has
// nothing generated. It reports whether the server knows the model: false without
// an error means that it does not tell. A failure is a *model.Error.
func (c Config) Probe(ctx context.Context, list string, header http.Header) (bool, error) {
	client := NewHTTPClient()
	defer client.CloseIdleConnections()
	one, err := c.get(ctx, client, list+"/"+url.PathEscape(c.Model), header)
	if err == nil && gjson.Get(one, "id").Exists() {
		return true, nil
	}
	if err != nil && !absent(err) {
		return false, c.explain(err)
	}
	all, err := c.get(ctx, client, list, header)
	switch {
	case err != nil && absent(err):
		return false, nil
	case err != nil:
		return false, c.explain(err)
	}
	var names []string
	for _, m := range gjson.Get(all, "data.#.id").Array() {
		names = append(names, m.String())
	}
	switch {
	case slices.Contains(names, c.Model):
		return true, nil
	case len(names) == 0:
		return false, nil
	}
	some := strings.Join(names[:min(len(names), maxNamed)], ", ")
	if len(names) > maxNamed {
		some += ", …"
	}
	return false, &model.Error{Kind: model.KindPermanent, Code: "not_found", Message: c.scrub(fmt.Sprintf("%s has no model %q; it has %s", c.place(), c.Model, some))}
}

// absent reports whether a server does not have what was asked for.
func absent(err error) bool {
	var s *Status
	return errors.As(err, &s) && (s.Code == http.StatusNotFound || s.Code == http.StatusMethodNotAllowed || s.Code == http.StatusNotImplemented)
}

func (c Config) get(ctx context.Context, client *http.Client, address string, header http.Header) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return "", err
	}
	req.Header = header.Clone()
	res, err := Refusals(req, client.Do)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 4<<20))
	return string(body), err
}
