package system

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
)

// rawStream reads server-sent events as the HTML standard has it, and knows nothing
// of Herdgate: whatever breaks the framing shows up as another event or field.
type rawStream struct {
	t    *testing.T
	resp *http.Response
	text string // read and not yet taken
}

// block is one event of a stream, or one comment.
type block struct {
	id, event, data, comment string
	// fields counts the lines that are neither of these.
	other int
}

// openStream opens a stream of server-sent events; header holds pairs.
func openStream(t *testing.T, addr, path string, header ...string) *rawStream {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	resp, err := send(ctx, http.MethodGet, addr, path, append(header, "Accept", "text/event-stream")...)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); _ = resp.Body.Close() })
	return &rawStream{t: t, resp: resp}
}

func send(ctx context.Context, method, addr, path string, header ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+addr+path, nil)
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(header); i += 2 {
		if header[i+1] != "" {
			req.Header.Set(header[i], header[i+1])
		}
	}
	// Each has a connection of its own, which ends with its body.
	return (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
}

// next returns the next event or comment; false at the end of the stream.
func (r *rawStream) next() (block, bool) {
	r.t.Helper()
	buf := make([]byte, 64<<10)
	for {
		if text, rest, ok := cutBlock(r.text); ok {
			r.text = rest
			return parse(text), true
		}
		n, err := r.resp.Body.Read(buf)
		r.text += string(buf[:n])
		if n == 0 && err == io.EOF {
			return block{}, false
		}
		if n == 0 && err != nil {
			r.t.Fatalf("stream of %s: %v; read and not taken: %.300q", r.resp.Request.URL, err, r.text)
		}
	}
}

// cutBlock takes the text up to an empty line, with each of the three line ends.
func cutBlock(text string) (string, string, bool) {
	best, length := -1, 0
	for _, end := range []string{"\r\n\r\n", "\n\n", "\r\r"} {
		if i := strings.Index(text, end); i >= 0 && (best < 0 || i < best) {
			best, length = i, len(end)
		}
	}
	if best < 0 {
		return "", text, false
	}
	return text[:best], text[best+length:], true
}

func parse(text string) block {
	var b block
	data := []string{}
	for _, line := range strings.Split(strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(text), "\n") {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch name {
		case "":
			b.comment += value
		case "id":
			b.id = value
		case "event":
			b.event = value
		case "data":
			data = append(data, value)
		case "retry":
		default:
			b.other++
		}
	}
	b.data = strings.Join(data, "\n")
	return b
}
