// Command subscriber follows Herdgate's events through a durable consumer: stopped or
// killed, it goes on where it was, and tells each event once. It needs nothing of
// Herdgate but the two public packages.
//
//	go run . -out events.log
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// options are the flags.
type options struct {
	url, creds, prefix, tenant, name, out string
	ackWait                               time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.url, "nats", nats.DefaultURL, "NATS servers, joined by commas")
	flag.StringVar(&o.creds, "creds", "", "file with the credentials of a NATS user")
	flag.StringVar(&o.prefix, "prefix", contract.DefaultPrefix, "nats.prefix of the deployment")
	flag.StringVar(&o.tenant, "tenant", "", "events of this tenant only")
	flag.StringVar(&o.name, "name", "subscriber-go", "name of the durable consumer; who has the same shares its events")
	flag.StringVar(&o.out, "out", "", "append the lines to this file too, and repeat none that it has")
	flag.DurationVar(&o.ackWait, "ack-wait", 10*time.Second, "an event that is not acknowledged for so long comes again; used when the consumer is made")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := follow(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "subscriber:", err)
		os.Exit(1)
	}
}

// follow tells events until ctx is done.
func follow(ctx context.Context, o options) error {
	told, err := openLedger(o.out)
	if err != nil {
		return err
	}
	defer told.Close()
	nc, err := connect(o)
	if err != nil {
		return err
	}
	defer nc.Close()
	// The last acknowledgement leaves before the connection does.
	defer func() { _ = nc.FlushTimeout(time.Second) }()
	c, err := consumer(ctx, nc, o)
	if err != nil {
		return err
	}
	// The client asks for more than one at a time; max_ack_pending has the server
	// send them one by one all the same.
	msgs, err := c.Messages(jetstream.PullMaxMessages(50))
	if err != nil {
		return err
	}
	defer msgs.Stop()
	for {
		msg, err := msgs.Next(jetstream.NextContext(ctx))
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, jetstream.ErrNoHeartbeat):
			continue // the server is away; the client connects and asks again by itself
		case err != nil:
			return err
		}
		if err := handle(told, msg); err != nil {
			return err
		}
	}
}

func connect(o options) (*nats.Conn, error) {
	opts := []nats.Option{nats.Name(o.name), nats.MaxReconnects(-1)}
	if o.creds != "" {
		opts = append(opts, nats.UserCredentials(o.creds))
	}
	nc, err := nats.Connect(o.url, opts...)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", o.url, err)
	}
	return nc, nil
}

// consumer finds the durable consumer or makes it. Made with max_ack_pending 1, it has
// the events in their order also after a crash: the next one is sent when the last one
// is acknowledged.
func consumer(ctx context.Context, nc *nats.Conn, o options) (jetstream.Consumer, error) {
	names, err := contract.NewNames(o.prefix)
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c, err := js.Consumer(ctx, names.EventStream(), o.name)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		c, err = js.CreateConsumer(ctx, names.EventStream(), jetstream.ConsumerConfig{
			Durable:       o.name,
			FilterSubject: names.Events(contract.EventSubject{Tenant: contract.Tenant(o.tenant)}),
			DeliverPolicy: jetstream.DeliverAllPolicy,
			AckPolicy:     jetstream.AckExplicitPolicy,
			AckWait:       o.ackWait,
			MaxAckPending: 1,
		})
	}
	if err != nil {
		return nil, fmt.Errorf("consumer %s of stream %s: %w", o.name, names.EventStream(), err)
	}
	return c, nil
}

// handle tells one event and then acknowledges it: killed in between, the event comes
// again and the ledger knows it.
func handle(told *ledger, msg jetstream.Msg) error {
	e, err := envelope.Decode(msg.Data())
	if err != nil {
		// Nobody will ever understand it: say so, and do not have it sent again.
		fmt.Fprintf(os.Stderr, "subscriber: message on %s: %v\n", msg.Subject(), err)
		return acknowledge(msg.Term())
	}
	meta, err := msg.Metadata()
	if err != nil {
		return err
	}
	if !told.Has(e.ID) {
		task := string(e.TaskID)
		if task == "" {
			task = contract.NoTask
		}
		line := fmt.Sprintf("%d %s %s %s %s %d", meta.Sequence.Stream, e.Time.Format("15:04:05.000"), e.Type, e.RunID, task, e.Attempt)
		if err := told.Add(e.ID, line); err != nil {
			return err
		}
	}
	return acknowledge(msg.Ack())
}

// acknowledge forgives what a connection that is away causes: the event comes again.
func acknowledge(err error) error {
	if err == nil || errors.Is(err, nats.ErrConnectionClosed) {
		return err
	}
	fmt.Fprintln(os.Stderr, "subscriber: acknowledge:", err)
	return nil
}
