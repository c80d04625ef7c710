package e2e

import (
	"context"
	"net"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/test/history"
)

// dialer makes a dialer of nats.go of a fleet's.
type dialer func(ctx context.Context, network, addr string) (net.Conn, error)

func (d dialer) Dial(network, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	return d(ctx, network, addr)
}

// connect is a connection of the test to the fleet's server.
func (f *Fleet) connect(t *testing.T) *bus.Conn {
	t.Helper()
	cfg := bus.Config{URL: f.natsURL, Name: "test", Prefix: contract.DefaultPrefix}
	if f.dial != nil {
		cfg.Extra = append(cfg.Extra, nats.SetCustomDialer(dialer(f.dial)))
	}
	conn, err := bus.Connect(deadline(t), cfg, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return conn
}

// record notes everything that the task bucket stores from here on, for [Fleet.judge].
func (f *Fleet) record() {
	f.t.Helper()
	r, err := history.Record(deadline(f.t), f.connect(f.t))
	if err != nil {
		f.t.Fatal(err)
	}
	f.recorder = r
}
