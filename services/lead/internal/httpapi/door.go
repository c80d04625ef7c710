package httpapi

import (
	"context"
	"errors"
	"fmt"
	stdlog "log"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/client/wire"
)

// Door is where a lead listens. It opens before there is a [Server], because
// whoever asks a lead that waits for NATS shall get an answer with the reason,
// and not find nobody. A Server that gets the door in its [Deps] serves behind
// it.
type Door struct {
	srv     *http.Server
	addr    net.Addr
	handler atomic.Pointer[http.Handler]
	served  chan error
}

// OpenDoor listens where cfg says. Until a Server takes over, health, readiness
// and metrics come from probes, and everything else is told that the service is
// unavailable, with why as the reason. Close must follow.
func OpenDoor(ctx context.Context, cfg Config, probes http.Handler, why func() error, log zerolog.Logger) (*Door, error) {
	cfg = cfg.withDefaults()
	if _, err := newAuthenticator(cfg); err != nil {
		return nil, err
	}
	closed := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if probes != nil && probePath(r.URL.Path) {
			probes.ServeHTTP(w, r)
			return
		}
		p := newProblem(http.StatusServiceUnavailable, wire.CodeUnavailable, "the lead is starting")
		if why != nil {
			if err := why(); err != nil {
				p = newProblem(p.Status, p.Code, p.Detail+": "+strings.ReplaceAll(err.Error(), "\n", "; "))
			}
		}
		w.Header().Set("Retry-After", fmt.Sprint(retryUnavailable))
		writeProblem(w, r, p)
	})
	return openDoor(ctx, cfg.Addr, closed, log)
}

func openDoor(ctx context.Context, addr string, handler http.Handler, log zerolog.Logger) (*Door, error) {
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("http.addr %s: %w", addr, err)
	}
	d := &Door{addr: ln.Addr(), served: make(chan error, 1)}
	d.handler.Store(&handler)
	d.srv = &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*d.handler.Load()).ServeHTTP(w, r) }),
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       120 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          stdlog.New(logWriter{log}, "", 0),
	}
	go func() {
		err := d.srv.Serve(ln)
		if errors.Is(err, http.ErrServerClosed) {
			err = nil
		}
		d.served <- err
		close(d.served)
	}()
	return d, nil
}

// Close cuts off what is left and returns when nothing is served any more. It
// may be called again.
func (d *Door) Close() {
	_ = d.srv.Close()
	<-d.served //nolint:errcheck // it says that the server was closed
}
