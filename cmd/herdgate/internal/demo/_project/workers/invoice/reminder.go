package invoice

import (
	"context"

	"example.com/orders/workers/legacyclient"
)

// Due lists the orders that still wait for their payment.
func Due(ctx context.Context, ids []string) ([]string, error) {
	var due []string
	for _, id := range ids {
		if o, err := legacyclient.FetchOrder(ctx, id); err != nil {
			return nil, err
		} else if o != nil && o.State == "unpaid" {
			due = append(due, id)
		}
	}
	return due, nil
}
