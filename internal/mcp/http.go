package mcp

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/rs/zerolog"
)

// httpClient is for one server at base. Its headers go there and nowhere else: what
// leads to another host is refused.
func httpClient(base *url.URL, header http.Header, log zerolog.Logger) (*http.Client, *http.Transport) {
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
		Transport: &bound{next: t, base: base, header: header, log: log},
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
	log    zerolog.Logger
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
	resp, err := b.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	dropped := func(what string) { b.log.Warn().Msg("a tool of an MCP server is left out: " + what) }
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch {
	case resp.StatusCode < 200 || resp.StatusCode > 299:
		resp.Body = &limited{ReadCloser: resp.Body, left: 64 << 10}
	case kind == "application/json":
		resp.Body = &jsonBody{src: resp.Body, dropped: dropped}
		resp.ContentLength = -1
		resp.Header.Del("Content-Length")
	case kind == "text/event-stream":
		resp.Body = &eventBody{src: resp.Body, r: bufio.NewReaderSize(resp.Body, 64<<10), dropped: dropped}
		resp.ContentLength = -1
	default:
		resp.Body = &limited{ReadCloser: resp.Body, left: 64 << 10}
	}
	return resp, nil
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
