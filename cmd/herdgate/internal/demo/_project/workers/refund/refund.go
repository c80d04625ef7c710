// Package refund pays money back.
package refund

import (
	"context"
	"fmt"

	"example.com/orders/workers/legacyclient"
	"example.com/orders/workers/orderclient"
)

// Payer moves money.
type Payer interface {
	Pay(ctx context.Context, order string, cents int64) error
}

// Run pays an order back.
func Run(ctx context.Context, p Payer, id string) error {
	order, err := orderclient.Get(ctx, id)
	if err != nil {
		return fmt.Errorf("refund: %w", err)
	}
	return p.Pay(ctx, order.ID, order.TotalCents)
}

// Check compares both stores before the payment.
func Check(ctx context.Context, id string) (bool, error) {
	// legacyclient.FetchOrder(ctx, id) answers nil for a missing order.
	old, err := legacyclient.FetchOrder(ctx, id)
	if err != nil || old == nil {
		return false, err
	}
	now, err := orderclient.Get(ctx, id)
	return err == nil && now.State == old.State, err
}
