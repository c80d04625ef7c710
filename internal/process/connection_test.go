package process

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
)

// F-036: when the connection of a service is lost, whoever waits for an answer
// on it is let go at once, and readiness says so until it is back.
func TestLostConnection(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, natstest.Listen())
	env := testEnv(t, Options{Stderr: new(bytes.Buffer), NATSURL: s.URL()})
	svc, err := env.Open(t.Context(), "lead", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer svc.Close()
	// Somebody who hears the question and never answers.
	asked := make(chan struct{})
	silent := s.Conn("silent").NC
	if _, err := silent.Subscribe("silence", func(*nats.Msg) { close(asked) }); err != nil {
		t.Fatal(err)
	}
	if err := silent.Flush(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	began := time.Now()
	natstest.Eventually(t, within, func() (bool, string) { return svc.Bus.NC.IsConnected(), "not connected" })
	go func() {
		_, err := svc.Bus.Publish(t.Context(), bus.Write{Subject: "silence"})
		done <- err
	}()
	<-asked
	s.Kill()
	if err := <-done; !errors.Is(err, bus.ErrDoubt) {
		t.Errorf("the write ended with %v, want it in doubt", err)
	}
	if d := time.Since(began); d > bus.WriteTimeout-time.Second {
		t.Errorf("the write waited for %v after the connection was lost", d)
	}
	natstest.Eventually(t, within, func() (bool, string) {
		err := env.Metrics.Probes.Ready()
		return err != nil && strings.Contains(err.Error(), "not connected to NATS"), errText(err)
	})
	s.Restart()
	natstest.Eventually(t, within, func() (bool, string) { err := env.Metrics.Probes.Ready(); return err == nil, errText(err) })
}
