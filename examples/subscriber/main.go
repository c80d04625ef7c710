// Command subscriber follows Herdgate's events with nothing of it but the two public
// packages, to show how little a subscriber needs:
//
//	go run . nats://127.0.0.1:4222
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/nats-io/nats.go"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: subscriber NATS_URL")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := follow(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "subscriber:", err)
		os.Exit(1)
	}
}

// follow prints a line for each event until ctx is done.
func follow(ctx context.Context, url string) error {
	names, err := contract.NewNames(contract.DefaultPrefix)
	if err != nil {
		return err
	}
	nc, err := nats.Connect(url)
	if err != nil {
		return err
	}
	defer nc.Close()
	sub, err := nc.SubscribeSync(names.AllEvents())
	if err != nil {
		return err
	}
	for {
		msg, err := sub.NextMsgWithContext(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		e, err := envelope.Decode(msg.Data)
		if err != nil {
			// Somebody else's message: say so and go on.
			fmt.Fprintln(os.Stderr, "subscriber:", err)
			continue
		}
		fmt.Println(e.Time.Format("15:04:05.000"), e.Type, e.RunID, e.TaskID)
	}
}
