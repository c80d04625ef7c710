package natstest

import (
	"bytes"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// Proxy stands between clients and a server with [Listen]. It can lose what the
// server answers, hold what a client sends, and cut lines, each at a moment that
// the test chooses.
type Proxy struct {
	t      testing.TB
	listen net.Listener
	wg     sync.WaitGroup

	mu      sync.Mutex
	lines   []*proxyLine
	changed chan struct{} // closed and replaced whenever a buffer grows
	down    bool
}

// proxyLine is one connection of a client.
type proxyLine struct {
	client, server net.Conn
	// The rest is guarded by Proxy.mu.
	deaf, holding, released bool
	held, answers           bytes.Buffer
}

// Proxy starts a proxy before s; it ends with the test.
func (s *Server) Proxy() *Proxy {
	s.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatalf("natstest: %v", err)
	}
	p := &Proxy{t: s.t, listen: l, changed: make(chan struct{})}
	target := strings.TrimPrefix(s.URL(), "nats://")
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.connect(c, target)
		}
	})
	s.t.Cleanup(p.close)
	return p
}

// URL is where clients connect.
func (p *Proxy) URL() string { return "nats://" + p.listen.Addr().String() }

func (p *Proxy) connect(client net.Conn, target string) {
	server, err := net.DialTimeout("tcp", target, Timeout)
	if err != nil {
		_ = client.Close()
		return
	}
	l := &proxyLine{client: client, server: server}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		_, _ = client.Close(), server.Close()
		return
	}
	p.lines = append(p.lines, l)
	p.wg.Go(func() { p.up(l) })
	p.wg.Go(func() { p.downward(l) })
}

// up carries what a client sends.
func (p *Proxy) up(l *proxyLine) {
	buf := make([]byte, 32<<10)
	for {
		n, err := l.client.Read(buf)
		p.mu.Lock()
		if n > 0 && l.holding {
			p.grow(&l.held, buf[:n])
			n = 0
		}
		keep := l.holding
		p.mu.Unlock()
		if n > 0 {
			if _, werr := l.server.Write(buf[:n]); werr != nil {
				err = werr
			}
		}
		if err != nil {
			_ = l.client.Close()
			if !keep { // else the server must not notice
				_ = l.server.Close()
			}
			return
		}
	}
}

// downward carries what the server sends.
func (p *Proxy) downward(l *proxyLine) {
	buf := make([]byte, 32<<10)
	for {
		n, err := l.server.Read(buf)
		p.mu.Lock()
		deaf := l.deaf
		if l.released {
			p.grow(&l.answers, buf[:n])
		}
		p.mu.Unlock()
		if n > 0 && !deaf {
			_, _ = l.client.Write(buf[:n])
		}
		if err != nil {
			_ = l.client.Close()
			return
		}
	}
}

// grow adds to a buffer of a line and tells so. The caller holds the lock.
func (p *Proxy) grow(b *bytes.Buffer, more []byte) {
	b.Write(more)
	close(p.changed)
	p.changed = make(chan struct{})
}

// LoseAnswers drops what the server sends on the lines that there are now.
func (p *Proxy) LoseAnswers() { p.each(func(l *proxyLine) { l.deaf = true }) }

// Hold keeps back what clients send on the lines that there are now.
func (p *Proxy) Hold() { p.each(func(l *proxyLine) { l.holding = true }) }

// AwaitHeld waits until something with text is held.
func (p *Proxy) AwaitHeld(text string) {
	p.t.Helper()
	p.await("nothing was sent with", text, func(l *proxyLine) []byte { return l.held.Bytes() })
}

func (p *Proxy) await(complaint, text string, of func(*proxyLine) []byte) {
	p.t.Helper()
	limit := time.After(Timeout)
	for {
		p.mu.Lock()
		changed := p.changed
		found := false
		for _, l := range p.lines {
			found = found || bytes.Contains(of(l), []byte(text))
		}
		p.mu.Unlock()
		if found {
			return
		}
		select {
		case <-changed:
		case <-limit:
			p.t.Fatalf("natstest: %s %q", complaint, text)
		}
	}
}

// Cut closes the clients' ends of all lines. What is held stays held, and the
// server does not notice; the next lines are whole.
func (p *Proxy) Cut() { p.each(func(l *proxyLine) { _ = l.client.Close() }) }

// Release sends the server what is held, as if it had been under way, and waits
// until the server has answered it with text.
func (p *Proxy) Release(text string) {
	p.t.Helper()
	p.each(func(l *proxyLine) {
		if l.held.Len() == 0 {
			return
		}
		if _, err := l.server.Write(l.held.Bytes()); err != nil {
			p.t.Errorf("natstest: release: %v", err)
		}
		l.held.Reset()
		l.holding, l.released = false, true
	})
	p.await("the server did not answer", text, func(l *proxyLine) []byte { return l.answers.Bytes() })
}

func (p *Proxy) each(f func(*proxyLine)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.lines {
		f(l)
	}
}

func (p *Proxy) close() {
	_ = p.listen.Close()
	p.mu.Lock()
	p.down = true
	for _, l := range p.lines {
		_, _ = l.client.Close(), l.server.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}
