// Package legacyclient talks to the old order store.
//
// Deprecated: use package orderclient. legacyclient.FetchOrder(ctx, id) becomes
// orderclient.Get(ctx, id), see docs/migration.md.
package legacyclient

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
)

const baseURL = "http://order-store.internal/v1"

// Order is an order of the old store.
type Order struct {
	ID    string  `json:"id"`
	State string  `json:"state"`
	Total float64 `json:"total"`
}

// FetchOrder returns an order, or nil if there is none.
func FetchOrder(ctx context.Context, id string) (*Order, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, baseURL+"/orders/"+id, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNotFound {
		return nil, nil
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("order %s: %s", id, resp.Status)
	}
	var o Order
	return &o, json.NewDecoder(resp.Body).Decode(&o)
}
