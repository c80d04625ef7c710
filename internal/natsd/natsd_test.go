package natsd_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/natsd"
	"github.com/herdgate/herdgate/internal/natstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func start(t *testing.T, cfg natsd.Config) *natsd.Server {
	t.Helper()
	s, err := natsd.Start(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func TestInProcessAndStoreOutliveAServer(t *testing.T) {
	t.Parallel()
	ctx, dir := testContext(t), filepath.Join(t.TempDir(), "made", "by", "start")
	s := start(t, natsd.Config{StoreDir: dir, Log: zerolog.Nop()})
	if s.ClientURL() != "" {
		t.Errorf("ClientURL without Listen = %q, want none", s.ClientURL())
	}
	if s.StoreLimit() <= 0 {
		t.Errorf("StoreLimit = %d, want what JetStream may use", s.StoreLimit())
	}
	use := func(s *natsd.Server, f func(jetstream.JetStream) error) {
		t.Helper()
		nc, err := nats.Connect("", nats.InProcessServer(s.InProcess()))
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		if got := nc.MaxPayload(); got != natsd.MaxPayload {
			t.Errorf("MaxPayload = %d, want %d", got, natsd.MaxPayload)
		}
		js, err := jetstream.New(nc)
		if err == nil {
			err = f(js)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	use(s, func(js jetstream.JetStream) error {
		_, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "KEPT", Subjects: []string{"kept"}})
		if err == nil {
			_, err = js.Publish(ctx, "kept", []byte("x"))
		}
		return err
	})
	s.Stop()
	s.Stop() // again is fine

	use(start(t, natsd.Config{StoreDir: dir, Log: zerolog.Nop()}), func(js jetstream.JetStream) error {
		str, err := js.Stream(ctx, "KEPT")
		if err != nil {
			return err
		}
		if n := str.CachedInfo().State.Msgs; n != 1 {
			return fmt.Errorf("%d messages after a restart, want 1", n)
		}
		return nil
	})
}

func TestListenOnAFreePort(t *testing.T) {
	t.Parallel()
	s := start(t, natsd.Config{StoreDir: t.TempDir(), Listen: "127.0.0.1:0", Log: zerolog.Nop()})
	nc, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatalf("connect to %s: %v", s.ClientURL(), err)
	}
	nc.Close()
}

// nats-server itself lets two servers write into one store.
func TestStoreDirectoryIsLocked(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first := start(t, natsd.Config{StoreDir: dir, Log: zerolog.Nop()})
	_, err := natsd.Start(testContext(t), natsd.Config{StoreDir: dir, Log: zerolog.Nop()})
	if !errors.Is(err, natsd.ErrInUse) {
		t.Fatalf("second server on the store: %v, want ErrInUse", err)
	}
	for _, want := range []string{dir, fmt.Sprintf("process %d", os.Getpid()), natsd.LockName} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %q", err, want)
		}
	}
	first.Stop()
	start(t, natsd.Config{StoreDir: dir, Log: zerolog.Nop()})
}

// A lock file that a killed process left behind names a process but holds no lock.
func TestStaleLockFileIsNoLock(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, natsd.LockName), []byte("999999\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, natsd.Config{StoreDir: dir, Log: zerolog.Nop()})
	b, err := os.ReadFile(filepath.Join(dir, natsd.LockName))
	if err != nil || strings.TrimSpace(string(b)) != fmt.Sprint(os.Getpid()) {
		t.Errorf("lock file holds %q (%v), want our process id", b, err)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = busy.Close() })
	blocked := t.TempDir()
	if err := os.WriteFile(filepath.Join(blocked, "jetstream"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		cfg  natsd.Config
		is   error
		says string
	}{
		"no store directory":    {cfg: natsd.Config{}, says: "path is empty"},
		"store is a file":       {cfg: natsd.Config{StoreDir: file}, says: "not a directory"},
		"JetStream cannot live": {cfg: natsd.Config{StoreDir: blocked}, says: "JetStream"},
		"all interfaces":        {cfg: natsd.Config{StoreDir: t.TempDir(), Listen: "0.0.0.0:0"}, is: natsd.ErrRemote, says: "127.0.0.1"},
		"no host":               {cfg: natsd.Config{StoreDir: t.TempDir(), Listen: ":4222"}, is: natsd.ErrRemote},
		"a name":                {cfg: natsd.Config{StoreDir: t.TempDir(), Listen: "example.com:4222"}, is: natsd.ErrRemote},
		"no port":               {cfg: natsd.Config{StoreDir: t.TempDir(), Listen: "127.0.0.1"}, says: "host:port"},
		"port too large":        {cfg: natsd.Config{StoreDir: t.TempDir(), Listen: "127.0.0.1:70000"}, says: "0 to 65535"},
		"port in use":           {cfg: natsd.Config{StoreDir: t.TempDir(), Listen: busy.Addr().String()}, says: "address already in use"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.cfg.Log = zerolog.Nop()
			s, err := natsd.Start(testContext(t), tc.cfg)
			if err == nil {
				s.Stop()
				t.Fatal("Start worked, want a refusal")
			}
			if tc.is != nil && !errors.Is(err, tc.is) {
				t.Errorf("error %q is not %q", err, tc.is)
			}
			if !strings.Contains(err.Error(), tc.says) {
				t.Errorf("error %q does not say %q", err, tc.says)
			}
		})
	}
}

func TestRefusedStartFreesTheStore(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if s, err := natsd.Start(ctx, natsd.Config{StoreDir: dir, Listen: "127.0.0.1:1", Log: zerolog.Nop()}); err == nil {
		s.Stop() // running as root, port 1 is free
	}
	start(t, natsd.Config{StoreDir: dir, Log: zerolog.Nop()})
}

func TestAllowRemote(t *testing.T) {
	t.Parallel()
	start(t, natsd.Config{StoreDir: t.TempDir(), Listen: "0.0.0.0:0", AllowRemote: true, Log: zerolog.Nop()})
}

func TestMessagesGoToTheLog(t *testing.T) {
	t.Parallel()
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	var b natstest.Output
	_, err = natsd.Start(testContext(t), natsd.Config{StoreDir: t.TempDir(), Listen: busy.Addr().String(), Log: zerolog.New(&b)})
	if err == nil {
		t.Fatal("Start on a busy port worked")
	}
	// That this line is reached shows that the server's Fatalf did not exit.
	if out := b.String(); !strings.Contains(out, `"level":"error"`) || !strings.Contains(out, `"component":"nats-server"`) {
		t.Errorf("log %s\nholds no error of the server", out)
	}
}

func TestStartStop(t *testing.T) {
	t.Parallel()
	var wg sync.WaitGroup
	for range 4 {
		dir := t.TempDir()
		wg.Go(func() {
			for range 5 {
				s, err := natsd.Start(testContext(t), natsd.Config{StoreDir: dir, Log: zerolog.Nop()})
				if err != nil {
					t.Error(err)
					return
				}
				s.Stop()
			}
		})
	}
	wg.Wait()
}
