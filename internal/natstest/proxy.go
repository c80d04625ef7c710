package natstest

import (
	"bytes"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// Proxy stands between clients and a server. It can lose what the server answers,
// hold what a client sends, freeze and cut lines, each at a moment that the test
// chooses.
type Proxy struct {
	t      testing.TB
	listen net.Listener
	target string
	wg     sync.WaitGroup

	mu      sync.Mutex
	lines   []*proxyLine
	changed chan struct{} // closed and replaced whenever a buffer grows
	down    bool
	refused bool
	thawed  chan struct{} // closed when nothing is frozen
	frozen  Direction
	trap    *trap
}

// Direction is what a frozen proxy does not carry.
type Direction int

// What a client sends, what the server sends, and both.
const (
	Up Direction = 1 << iota
	Down
	Both = Up | Down
)

// trap freezes what clients send from the write with text on.
type trap struct {
	text []byte
	hit  chan struct{}
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
	return NewProxy(s.t, s.URL())
}

// NewProxy starts a proxy before the server at url, which may come and go; it ends
// with the test.
func NewProxy(t testing.TB, url string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("natstest: %v", err)
	}
	p := &Proxy{t: t, listen: l, target: strings.TrimPrefix(url, "nats://"), changed: make(chan struct{}), thawed: make(chan struct{})}
	close(p.thawed)
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.connect(c)
		}
	})
	t.Cleanup(p.close)
	return p
}

// URL is where clients connect.
func (p *Proxy) URL() string { return "nats://" + p.listen.Addr().String() }

func (p *Proxy) connect(client net.Conn) {
	server, err := net.DialTimeout("tcp", p.target, Timeout)
	if err != nil {
		_ = client.Close()
		return
	}
	l := &proxyLine{client: client, server: server}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down || p.refused {
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
		send := buf[:n]
		if before, ok := p.sprung(send); ok {
			if _, werr := l.server.Write(send[:before]); werr != nil {
				err = werr
			}
			send = send[before:]
		}
		p.passable(Up)
		if n > 0 {
			if _, werr := l.server.Write(send); werr != nil {
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
		p.passable(Down)
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

// Freeze stops forwarding, on the lines that there are and on new ones, and closes
// none: neither side notices.
func (p *Proxy) Freeze(d Direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.freeze(d)
}

// freeze is Freeze; the caller holds the lock.
func (p *Proxy) freeze(d Direction) {
	if p.frozen == 0 {
		p.thawed = make(chan struct{})
	}
	p.frozen |= d
}

// FreezeAt freezes what clients send from their next write on whose subject holds
// text: what they sent before it has gone, the write itself has not. The channel is
// closed when that has happened. [Proxy.Thaw] ends it in any case.
func (p *Proxy) FreezeAt(text string) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trap = &trap{text: []byte(text), hit: make(chan struct{})}
	return p.trap.hit
}

// sprung looks for the write that a trap waits for; it returns how much of b lies
// before it.
func (p *Proxy) sprung(b []byte) (int, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.trap == nil {
		return 0, false
	}
	at := bytes.Index(b, p.trap.text)
	if at < 0 {
		return 0, false
	}
	close(p.trap.hit)
	p.trap = nil
	p.freeze(Up)
	if line := bytes.LastIndex(b[:at], []byte("\r\n")); line >= 0 {
		return line + 2, true
	}
	return 0, true
}

// Thaw lets everything go on, what was frozen first.
func (p *Proxy) Thaw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trap = nil
	if p.frozen != 0 {
		p.frozen = 0
		close(p.thawed)
	}
}

// passable waits while d is frozen.
func (p *Proxy) passable(d Direction) {
	for {
		p.mu.Lock()
		frozen, thawed := p.frozen&d != 0, p.thawed
		p.mu.Unlock()
		if !frozen {
			return
		}
		<-thawed
	}
}

// Refuse cuts all lines on both ends, with what is frozen in them, and refuses new
// ones until [Proxy.Accept].
func (p *Proxy) Refuse() {
	p.each(func(l *proxyLine) { _, _ = l.client.Close(), l.server.Close() })
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = true
}

// Accept takes new lines again.
func (p *Proxy) Accept() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = false
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
	p.Thaw()
	p.mu.Lock()
	p.down = true
	for _, l := range p.lines {
		_, _ = l.client.Close(), l.server.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}
