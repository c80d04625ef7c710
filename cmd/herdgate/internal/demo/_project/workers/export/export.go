// Package export writes the nightly file for the warehouse.
package export

import (
	"context"
	"encoding/csv"
	"io"
	"strconv"

	"example.com/orders/workers/legacyclient"
)

// Write writes one line for each order.
func Write(ctx context.Context, w io.Writer, ids []string) error {
	out := csv.NewWriter(w)
	for _, id := range ids {
		o, err := legacyclient.FetchOrder(ctx, id)
		if err != nil {
			return err
		}
		if o == nil {
			continue
		}
		if err := out.Write([]string{o.ID, o.State, strconv.FormatFloat(o.Total, 'f', 2, 64)}); err != nil {
			return err
		}
	}
	out.Flush()
	return out.Error()
}
