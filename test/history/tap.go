package history

import (
	"bytes"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// Exchange is one request of a client, from when it was sent until its answer had
// come. It is what the client itself can know of its place in time.
type Exchange struct {
	Client  string
	Subject string
	Header  nats.Header
	Data    []byte
	// Call and Return are times since the tap began.
	Call, Return time.Duration
	// Answer is empty when none has come.
	Answer   []byte
	Answered bool
}

// Tap notes the requests that clients make and the answers that they get, on the
// wire: whatever way a service takes to write, it passes here.
type Tap struct {
	began time.Time
	keep  func(subject string) bool

	mu        sync.Mutex
	exchanges []*Exchange
	traps     map[string]trap          // by client
	held      map[string]chan struct{} // by client; closed when it may send again
}

type trap struct {
	at  func(Exchange) bool
	hit chan struct{}
}

// NewTap returns a tap that notes requests to the subjects that keep selects.
func NewTap(keep func(subject string) bool) *Tap { return &Tap{began: time.Now(), keep: keep} }

// Client is a way to server on which everything of the client called name is noted.
func (t *Tap) Client(name string, server nats.InProcessConnProvider) nats.InProcessConnProvider {
	return tapped{t, name, server}
}

// Exchanges returns what was noted so far.
func (t *Tap) Exchanges() []Exchange {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]Exchange, len(t.exchanges))
	for i, x := range t.exchanges {
		out[i] = *x
	}
	return out
}

// HoldAt keeps back what a client sends, from the first exchange on that at selects,
// as a network does that has stopped. The channel is closed when that has happened.
// Release sends it; the client hears nothing of either.
func (t *Tap) HoldAt(client string, at func(Exchange) bool) <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.traps == nil {
		t.traps, t.held = map[string]trap{}, map[string]chan struct{}{}
	}
	hit := make(chan struct{})
	t.traps[client] = trap{at, hit}
	return hit
}

// Release ends a [Tap.HoldAt].
func (t *Tap) Release(client string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.held[client]; c != nil {
		close(c)
		delete(t.held, client)
	}
}

// Now is the time of the tap.
func (t *Tap) Now() time.Duration { return time.Since(t.began) }

type tapped struct {
	tap    *Tap
	name   string
	server nats.InProcessConnProvider
}

func (p tapped) InProcessConn() (net.Conn, error) {
	c, err := p.server.InProcessConn()
	if err != nil {
		return nil, err
	}
	l := &tapLine{Conn: c, tap: p.tap, name: p.name, open: map[string]*Exchange{}, closed: make(chan struct{})}
	l.up.each, l.down.each = l.sent, l.came
	return l, nil
}

// tapLine is one connection.
type tapLine struct {
	net.Conn
	tap      *Tap
	name     string
	up, down protocol
	open     map[string]*Exchange // by the subject of the answer; guarded by tap.mu
	close    sync.Once
	closed   chan struct{}
}

// Write notes before the server can have it.
func (l *tapLine) Write(b []byte) (int, error) {
	l.up.feed(b)
	l.tap.mu.Lock()
	held := l.tap.held[l.name]
	l.tap.mu.Unlock()
	if held != nil {
		select {
		case <-held:
		case <-l.closed:
		}
	}
	return l.Conn.Write(b)
}

// Close ends the wait of what is held back.
func (l *tapLine) Close() error {
	l.close.Do(func() { close(l.closed) })
	return l.Conn.Close()
}

// Read notes when the client is about to have it.
func (l *tapLine) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	l.down.feed(b[:n])
	return n, err
}

func (l *tapLine) sent(m wireMessage) {
	if m.reply == "" || !l.tap.keep(m.subject) {
		return
	}
	x := &Exchange{Client: l.name, Subject: m.subject, Header: m.header(), Data: m.body(), Call: l.tap.Now()}
	l.tap.mu.Lock()
	defer l.tap.mu.Unlock()
	l.open[m.reply] = x
	l.tap.exchanges = append(l.tap.exchanges, x)
	if trap, ok := l.tap.traps[l.name]; ok && trap.at(*x) {
		delete(l.tap.traps, l.name)
		l.tap.held[l.name] = make(chan struct{})
		close(trap.hit)
	}
}

func (l *tapLine) came(m wireMessage) {
	l.tap.mu.Lock()
	defer l.tap.mu.Unlock()
	x := l.open[m.subject]
	if x == nil {
		return
	}
	delete(l.open, m.subject)
	x.Answer, x.Answered, x.Return = m.body(), true, l.tap.Now()
}

// wireMessage is a message of the NATS client protocol.
type wireMessage struct {
	subject, reply string
	head           int // bytes of the header
	payload        []byte
}

func (m wireMessage) body() []byte { return slices.Clone(m.payload[m.head:]) }

func (m wireMessage) header() nats.Header {
	if m.head == 0 {
		return nil
	}
	h, _ := nats.DecodeHeadersMsg(m.payload[:m.head])
	return h
}

// protocol takes one direction of a connection apart. It reads PUB, HPUB, MSG and
// HMSG and passes over everything else.
type protocol struct {
	buf  []byte
	each func(wireMessage)
}

func (p *protocol) feed(b []byte) {
	p.buf = append(p.buf, b...)
	rest := p.buf
	for {
		n := p.next(rest)
		if n == 0 {
			break
		}
		rest = rest[n:]
	}
	p.buf = append(p.buf[:0], rest...)
}

// next takes one line, with its payload, and returns its length; 0 when not all of
// it has come.
func (p *protocol) next(b []byte) int {
	end := bytes.Index(b, []byte("\r\n"))
	if end < 0 {
		return 0
	}
	f := bytes.Fields(b[:end])
	if len(f) == 0 {
		return end + 2
	}
	// <verb> <subject> [<subscription>] [<reply>] [<header size>] <size>
	sizes, id := 0, 0
	switch string(bytes.ToUpper(f[0])) {
	case "PUB":
		sizes = 1
	case "HPUB":
		sizes = 2
	case "MSG":
		sizes, id = 1, 1
	case "HMSG":
		sizes, id = 2, 1
	default:
		return end + 2
	}
	names := f[1 : len(f)-sizes]
	size, _ := strconv.Atoi(string(f[len(f)-1]))
	if len(b) < end+2+size+2 {
		return 0
	}
	m := wireMessage{subject: string(names[0]), payload: b[end+2 : end+2+size]}
	if len(names) == 2+id {
		m.reply = string(names[1+id])
	}
	if sizes == 2 {
		m.head, _ = strconv.Atoi(string(f[len(f)-2]))
	}
	p.each(m)
	return end + 2 + size + 2
}
