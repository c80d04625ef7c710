package bus

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Config says where NATS is and who we are.
type Config struct {
	// URL lists the servers, joined by commas. It is not used with InProcess.
	URL string
	// Name appears in the server's connection list and makes the inbox prefix,
	// so that permissions can tell services apart.
	Name      string
	Prefix    string
	CredsFile string
	NKeySeed  string // file with an nkey seed
	TLS       TLS
	// InProcess connects without a network.
	InProcess nats.InProcessConnProvider
	// Extra options, for contexts of the nats tool.
	Extra []nats.Option
}

// TLS names the files of a TLS connection.
type TLS struct{ CA, Cert, Key string }

// Connect returns a connection. It waits for the first server to answer until
// ctx is done, and reconnects for ever after.
func Connect(ctx context.Context, cfg Config, log zerolog.Logger) (*Conn, error) {
	names, err := contract.NewNames(cfg.Prefix)
	if err != nil {
		return nil, err
	}
	line, calls := newLine(), newCalls()
	opts := []nats.Option{
		nats.Name(cfg.Name),
		nats.CustomInboxPrefix("_INBOX_" + inboxToken(cfg.Name)),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(200 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 200*time.Millisecond),
		nats.Timeout(3 * time.Second),
		nats.PingInterval(10 * time.Second),
		nats.MaxPingsOutstanding(2),
		// No write of ours waits in the client: a stale compare-and-set that is
		// sent after a reconnect could undo what happened meanwhile.
		nats.ReconnectBufSize(-1),
		nats.DrainTimeout(5 * time.Second),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			ev := log.Warn().Err(err)
			if sub != nil {
				ev = ev.Str("subject", sub.Subject)
			}
			ev.Msg("nats: asynchronous error")
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			line.cut()
			calls.cut()
			if err != nil {
				log.Warn().Err(err).Msg("nats: disconnected")
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			log.Info().Str("url", nc.ConnectedUrlRedacted()).Msg("nats: connected again")
		}),
		nats.LameDuckModeHandler(func(nc *nats.Conn) {
			log.Info().Str("url", nc.ConnectedUrlRedacted()).Msg("nats: server is about to leave")
		}),
	}
	if cfg.InProcess != nil {
		opts = append(opts, nats.InProcessServer(cfg.InProcess))
	}
	if cfg.CredsFile != "" {
		opts = append(opts, nats.UserCredentials(cfg.CredsFile))
	}
	if cfg.NKeySeed != "" {
		opt, err := nats.NkeyOptionFromSeed(cfg.NKeySeed)
		if err != nil {
			return nil, fmt.Errorf("nats.nkey_seed_file: %w", err)
		}
		opts = append(opts, opt)
	}
	if cfg.TLS != (TLS{}) {
		t, err := tlsConfig(cfg.TLS)
		if err != nil {
			return nil, err
		}
		opts = append(opts, nats.Secure(t))
	}
	opts = append(opts, cfg.Extra...)

	nc, err := nats.Connect(cfg.URL, opts...)
	if err != nil {
		return nil, fmt.Errorf("nats: connect to %s: %w", Redact(cfg.URL), err)
	}
	if err := waitConnected(ctx, nc); err != nil {
		nc.Close()
		return nil, fmt.Errorf("nats: connect to %s: %w; is a server running there? `herdgate up` starts one", Redact(cfg.URL), err)
	}
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(WriteTimeout), jetstream.WithPublishAsyncMaxPending(4096), jetstream.WithPublishAsyncTimeout(WriteTimeout))
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("nats: jetstream: %w", err)
	}
	if err := calls.listen(nc); err != nil {
		nc.Close()
		return nil, fmt.Errorf("nats: subscribe to answers: %w", err)
	}
	return &Conn{NC: nc, JS: js, Names: names, line: line, calls: calls}, nil
}

// Close waits until what was sent has left, at most a few seconds, and closes.
func (c *Conn) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if c.NC.IsConnected() {
		_ = c.NC.FlushWithContext(ctx)
	}
	c.NC.Close()
}

func waitConnected(ctx context.Context, nc *nats.Conn) error {
	status := nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	defer nc.RemoveStatusListener(status)
	for {
		if nc.IsConnected() {
			return nil
		}
		if nc.IsClosed() {
			return errors.Join(nats.ErrConnectionClosed, nc.LastError())
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), nc.LastError())
		case <-status:
		}
	}
}

func tlsConfig(t TLS) (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, fmt.Errorf("nats.tls.ca: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("nats.tls.ca: %s holds no certificate in PEM form", t.CA)
		}
	}
	if (t.Cert == "") != (t.Key == "") {
		return nil, errors.New("nats.tls: cert and key belong together; one of them is missing")
	}
	if t.Cert != "" {
		pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, fmt.Errorf("nats.tls: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}

// Redact takes user and password out of server URLs, for logs and errors.
func Redact(urls string) string {
	list := strings.Split(urls, ",")
	for i, u := range list {
		if at := strings.LastIndexByte(u, '@'); at >= 0 {
			scheme := ""
			if s := strings.Index(u, "://"); s >= 0 && s < at {
				scheme = u[:s+3]
			}
			list[i] = scheme + "…@" + u[at+1:]
		}
	}
	return strings.Join(list, ",")
}

func inboxToken(name string) string {
	var b strings.Builder
	for _, r := range name {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_' {
			b.WriteRune(r)
		}
	}
	if b.Len() == 0 {
		return "herdgate"
	}
	return b.String()
}

func containsFold(s, sub string) bool {
	return strings.Contains(strings.ToLower(s), strings.ToLower(sub))
}

// Writer makes names for writes: process, incarnation and a counter. No two
// writes of any process, restarted or not, share one.
type Writer struct {
	id string
	n  atomic.Uint64
}

// NewWriter returns a source of writer names for a process called name.
func NewWriter(name string) *Writer { return &Writer{id: name + "-" + RandomToken(6)} }

// ID is the process with its incarnation.
func (w *Writer) ID() string { return w.id }

// Next returns a name that was never used before.
func (w *Writer) Next() string { return fmt.Sprintf("%s/%d", w.id, w.n.Add(1)) }

// RandomToken returns 2n random characters of a subject token.
func RandomToken(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails, see crypto/rand
	return hex.EncodeToString(b)
}
