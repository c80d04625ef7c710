// Package invoice renders invoices.
package invoice

import (
	"context"
	"fmt"
	"io"

	"example.com/orders/workers/legacyclient"
)

// Write writes the invoice of an order.
func Write(ctx context.Context, w io.Writer, id string) error {
	order, err := legacyclient.FetchOrder(ctx, id)
	if err != nil {
		return fmt.Errorf("invoice: %w", err)
	}
	if order == nil {
		return fmt.Errorf("invoice: no order %s", id)
	}
	_, err = fmt.Fprintf(w, "Invoice %s: %.2f EUR\n", order.ID, order.Total)
	return err
}
