package bus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestConnectGivesUpWithAHint(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close() // nobody listens there now
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	var log bytes.Buffer
	begin := time.Now()
	_, err = bus.Connect(ctx, bus.Config{URL: "nats://me:hunter2@" + addr, Name: "x", Prefix: contract.DefaultPrefix}, zerolog.New(&log))
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Connect = %v, want the deadline", err)
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("Connect took %v, want about 300ms", d)
	}
	if !strings.Contains(err.Error(), addr) || !strings.Contains(err.Error(), "herdgate up") {
		t.Errorf("error %q names neither the address nor a way out", err)
	}
	if strings.Contains(err.Error()+log.String(), "hunter2") {
		t.Errorf("the password is in %q or in the log %q", err, log.String())
	}
}

// A service may be started before its server.
func TestConnectWaitsForTheServer(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, natstest.Listen())
	url := s.URL()
	s.Kill()
	type result struct {
		c   *bus.Conn
		err error
	}
	done := make(chan result, 1)
	ctx := testContext(t)
	go func() {
		c, err := bus.Connect(ctx, bus.Config{URL: url, Name: "early", Prefix: contract.DefaultPrefix}, zerolog.Nop())
		done <- result{c, err}
	}()
	s.Restart()
	r := <-done
	if r.err != nil {
		t.Fatal(r.err)
	}
	r.c.Close()
}

func TestConnectRefusals(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	dir := t.TempDir()
	junk := filepath.Join(dir, "junk.pem")
	if err := os.WriteFile(junk, []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		cfg  bus.Config
		says string
	}{
		"prefix":          {bus.Config{Prefix: "a b"}, "prefix"},
		"CA missing":      {bus.Config{TLS: bus.TLS{CA: filepath.Join(dir, "none")}}, "nats.tls.ca"},
		"CA is junk":      {bus.Config{TLS: bus.TLS{CA: junk}}, "no certificate in PEM form"},
		"key alone":       {bus.Config{TLS: bus.TLS{Key: junk}}, "cert and key belong together"},
		"pair is junk":    {bus.Config{TLS: bus.TLS{Cert: junk, Key: junk}}, "nats.tls"},
		"no nkey seed":    {bus.Config{NKeySeed: junk}, "nats.nkey_seed_file"},
		"no credentials":  {bus.Config{CredsFile: filepath.Join(dir, "none")}, "none"},
		"broken address":  {bus.Config{URL: "nats://[::1"}, "connect to"},
		"several servers": {bus.Config{URL: "nats://u:pw@127.0.0.1:1,nats://u:pw@127.0.0.1:1"}, "nats://…@127.0.0.1:1,nats://…@127.0.0.1:1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			tc.cfg.Name = "x"
			c, err := bus.Connect(ctx, s.BusConfig(tc.cfg), zerolog.Nop())
			if err == nil {
				c.Close()
				t.Fatal("Connect worked, want a refusal")
			}
			if !strings.Contains(err.Error(), tc.says) {
				t.Errorf("error %q does not say %q", err, tc.says)
			}
		})
	}
}

// Permissions tell services apart by their inbox.
func TestInboxCarriesTheName(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	for name, want := range map[string]string{"lead": "_INBOX_lead.", "exe c.u>t*or": "_INBOX_executor.", "…": "_INBOX_herdgate."} {
		c := s.Conn(name)
		if got := c.NC.NewInbox(); !strings.HasPrefix(got, want) {
			t.Errorf("inbox of %q = %q, want prefix %q", name, got, want)
		}
	}
}

func TestCloseFlushes(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	a, b := s.Conn("a"), s.Conn("b")
	got := make(chan *nats.Msg, 1)
	if _, err := b.NC.ChanSubscribe("x", got); err != nil {
		t.Fatal(err)
	}
	if err := b.NC.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := a.NC.Publish("x", nil); err != nil {
		t.Fatal(err)
	}
	a.Close()
	a.Close() // again is fine
	select {
	case <-got:
	case <-testContext(t).Done():
		t.Error("what was published before Close did not arrive")
	}
}

// F-036, F-060: whoever waits for an answer when the connection breaks is told at
// once that none will come. A lease has no time to wait for longer.
func TestLostConnectionEndsWaits(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, natstest.Listen())
	c := s.Conn("x")
	asked := make(chan *nats.Msg, 1)
	// Somebody takes the write and does not answer.
	if _, err := c.NC.ChanSubscribe("silent", asked); err != nil {
		t.Fatal(err)
	}
	answer := make(chan error, 1)
	go func() {
		_, err := c.Publish(context.Background(), bus.Write{Subject: "silent"})
		answer <- err
	}()
	<-asked
	s.Kill()
	begin := time.Now()
	if err := <-answer; !errors.Is(err, bus.ErrDoubt) {
		t.Errorf("the wait ended with %v, want ErrDoubt", err)
	}
	if d := time.Since(begin); d > bus.WriteTimeout/2 {
		t.Errorf("it waited for %v after the connection was lost", d)
	}
	// The next connection is not cut by the loss of the last one.
	s.Restart()
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) {
		_, err := c.Publish(context.Background(), bus.Write{Subject: "nobody.listens"})
		return errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrNoStreamResponse), fmt.Sprint(err)
	})
}
