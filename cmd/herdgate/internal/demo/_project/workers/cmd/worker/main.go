// Command worker runs one job and ends.
package main

import (
	"context"
	"fmt"
	"os"

	"example.com/orders/workers/export"
	"example.com/orders/workers/invoice"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: worker invoice|export ORDER...")
		os.Exit(2)
	}
	var err error
	switch ctx := context.Background(); os.Args[1] {
	case "invoice":
		err = invoice.Write(ctx, os.Stdout, os.Args[2])
	case "export":
		err = export.Write(ctx, os.Stdout, os.Args[2:])
	default:
		err = fmt.Errorf("unknown job %q", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
}
