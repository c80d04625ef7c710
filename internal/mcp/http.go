package mcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"time"
)

// maxReplies is how many answers of ours a server may have to take at a time.
const maxReplies = 16

// httpClient is for one server at base. Its headers go there and nowhere else: what
// leads to another host is refused. Our answers to its requests end with life.
func httpClient(life context.Context, base *url.URL, header http.Header, dropped func(string)) (*http.Client, *http.Transport) {
	t := &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout:    10 * time.Second,
		MaxIdleConnsPerHost:    8,
		IdleConnTimeout:        90 * time.Second,
		ForceAttemptHTTP2:      true,
		MaxResponseHeaderBytes: 64 << 10,
	}
	return &http.Client{
		Transport: &bound{next: t, base: base, header: header, dropped: dropped, life: life, replies: make(chan struct{}, maxReplies)},
		CheckRedirect: func(req *http.Request, via []*http.Request) error {
			if len(via) > 3 {
				return errors.New("the server redirects more than 3 times")
			}
			return sameHost(base, req.URL)
		},
	}, t
}

func sameHost(base, u *url.URL) error {
	if u.Scheme != base.Scheme || u.Host != base.Host {
		return fmt.Errorf("the server sends us to another host, %s://%s, which gets nothing from us", u.Scheme, u.Host)
	}
	return nil
}

// bound sets the headers of a server and bounds and mends what it answers.
type bound struct {
	next   http.RoundTripper
	base   *url.URL
	header http.Header
	// dropped is told of tools that are left out of a list.
	dropped func(string)
	life    context.Context //nolint:containedctx // the connection's lifetime
	replies chan struct{}   // one for each answer under way
}

// RoundTrip implements http.RoundTripper.
func (b *bound) RoundTrip(req *http.Request) (*http.Response, error) {
	if err := sameHost(b.base, req.URL); err != nil {
		if req.Body != nil {
			_ = req.Body.Close() // it is in memory
		}
		return nil, err
	}
	req = req.Clone(req.Context())
	for name, values := range b.header {
		req.Header[name] = values
	}
	done := func() {}
	if unbound(req) {
		var err error
		if req, done, err = b.limit(req); err != nil {
			return nil, err
		}
	}
	resp, err := b.next.RoundTrip(req)
	if err != nil {
		done()
		return nil, err
	}
	resp.Body = &ending{ReadCloser: resp.Body, done: done}
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch {
	case resp.StatusCode < 200 || resp.StatusCode > 299:
		resp.Body = &limited{ReadCloser: resp.Body, left: 64 << 10}
	case kind == "application/json":
		resp.Body = &jsonBody{src: resp.Body, dropped: b.dropped}
		resp.ContentLength = -1
		resp.Header.Del("Content-Length")
	case kind == "text/event-stream":
		resp.Body = &eventBody{src: resp.Body, r: bufio.NewReaderSize(resp.Body, 64<<10), dropped: b.dropped}
		resp.ContentLength = -1
	default:
		resp.Body = &limited{ReadCloser: resp.Body, left: 64 << 10}
	}
	return resp, nil
}

// unbound reports whether nobody waits for a request who would give it up: the SDK sends
// answers to what a server asks, and the end of a session, without a limit of time.
func unbound(req *http.Request) bool {
	if req.Method == http.MethodDelete {
		return true
	}
	if req.Method != http.MethodPost || req.GetBody == nil {
		return false
	}
	body, err := req.GetBody()
	if err != nil {
		return false
	}
	defer body.Close()
	var msg struct {
		Method string `json:"method"`
	}
	return json.NewDecoder(body).Decode(&msg) == nil && msg.Method == ""
}

// limit bounds such a request, and how many there are: a server that asks without end
// and takes no answer would have all our connections.
func (b *bound) limit(req *http.Request) (*http.Request, func(), error) {
	reply := req.Method == http.MethodPost
	if reply {
		select {
		case b.replies <- struct{}{}:
		default:
			_ = req.Body.Close() // it is in memory
			return nil, nil, fmt.Errorf("the server asks and does not take the answers: %d are left", maxReplies)
		}
	}
	ctx, cancel := context.WithTimeoutCause(req.Context(), replyTimeout, fmt.Errorf("the server did not answer within %v", replyTimeout))
	if reply { // the end of a session is sent when life is over
		stop := context.AfterFunc(b.life, cancel)
		context.AfterFunc(ctx, func() {
			stop()
			<-b.replies
		})
	}
	return req.WithContext(ctx), cancel, nil
}

// ending is a body that tells of its end.
type ending struct {
	io.ReadCloser
	done func()
}

func (e *ending) Close() error {
	defer e.done()
	return e.ReadCloser.Close()
}

// limited ends after so many bytes.
type limited struct {
	io.ReadCloser
	left int
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, io.EOF
	}
	n, err := l.ReadCloser.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}

// jsonBody is a body of one message.
type jsonBody struct {
	src     io.ReadCloser
	dropped func(string)
	read    bool
	rest    bytes.Reader
}

func (j *jsonBody) Read(p []byte) (int, error) {
	if !j.read {
		raw, err := io.ReadAll(io.LimitReader(j.src, maxMessage+1))
		if err != nil {
			return 0, err
		}
		j.read = true
		if len(raw) > maxMessage {
			raw, err = failure(raw[:idWindow], fmt.Sprintf("the server's answer is longer than %d bytes and was not read", maxMessage))
		} else {
			raw, err = mend(raw, j.dropped)
		}
		if err != nil {
			return 0, err
		}
		j.rest.Reset(raw)
	}
	return j.rest.Read(p)
}

func (j *jsonBody) Close() error { return j.src.Close() }

// eventBody is a stream of events, each of whose data lines is a message.
type eventBody struct {
	src     io.ReadCloser
	r       *bufio.Reader
	dropped func(string)
	rest    []byte
	err     error
}

func (e *eventBody) Read(p []byte) (int, error) {
	for len(e.rest) == 0 {
		if e.err != nil {
			return 0, e.err
		}
		var line []byte
		var long bool
		line, long, e.err = readLine(e.r, maxMessage, idWindow)
		e.rest = e.mend(line, long)
	}
	n := copy(p, e.rest)
	e.rest = e.rest[n:]
	return n, nil
}

func (e *eventBody) mend(line []byte, long bool) []byte {
	data, isData := bytes.CutPrefix(line, []byte("data:"))
	var raw []byte
	var err error
	switch {
	case isData && long:
		raw, err = failure(data, fmt.Sprintf("the server's answer is longer than %d bytes and was not read", maxMessage))
	case long:
		err = errNoMessage
	case isData && bytes.HasSuffix(line, []byte("\n")):
		raw, err = mend(bytes.TrimSpace(data), e.dropped)
		if errors.Is(err, errNoMessage) {
			return line // a part of a message, or an address
		}
	default:
		return line
	}
	if err != nil {
		e.err = fmt.Errorf("the server's stream cannot be read: %w", err)
		return nil
	}
	return append(append([]byte("data: "), raw...), '\n')
}

func (e *eventBody) Close() error { return e.src.Close() }
