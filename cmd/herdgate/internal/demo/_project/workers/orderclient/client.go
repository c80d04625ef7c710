// Package orderclient talks to the order store, second generation.
package orderclient

import (
	"context"
	"errors"
)

// ErrNotFound is returned for an order that does not exist.
var ErrNotFound = errors.New("order not found")

// Order is an order; amounts are in cents.
type Order struct {
	ID         string
	State      string
	TotalCents int64
}

// Store is where orders come from.
type Store interface {
	Get(ctx context.Context, id string) (Order, error)
}

// Get returns an order from the store in ctx.
func Get(ctx context.Context, id string) (Order, error) {
	store, ok := ctx.Value(storeKey{}).(Store)
	if !ok {
		return Order{}, errors.New("orderclient: no store in the context")
	}
	return store.Get(ctx, id)
}

type storeKey struct{}

// With returns a context that carries the store.
func With(ctx context.Context, s Store) context.Context {
	return context.WithValue(ctx, storeKey{}, s)
}
