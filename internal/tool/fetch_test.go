package tool

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// site serves pages, and web_fetch with the options.
func site(t *testing.T, o FetchOptions, h http.HandlerFunc) (base string, get func(args map[string]any) Result) {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	tl := webFetch(o, 2000)
	return srv.URL, func(args map[string]any) Result {
		t.Helper()
		j, err := json.Marshal(args)
		if err != nil {
			t.Fatal(err)
		}
		res, err := tl.Call(t.Context(), Call{Args: j})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
}

// Pages come as text, whatever their characters and however they are sent.
func TestFetchText(t *testing.T) {
	t.Parallel()
	pages := map[string]struct{ kind, body, want string }{
		"/html": {"text/html; charset=utf-8", `<html><head><title>T</title><style>p{}</style><script>alert(1)</script></head><body><h1>Größe</h1><p>One <b>two</b> <a href="/x">link</a></p><ul><li>a<li>b</ul></body></html>`,
			"# Größe\n\nOne **two** [link](BASE/x)\n\n- a\n- b"},
		"/latin":  {"text/html; charset=iso-8859-1", "<p>Gr\xf6\xdfe</p>", "Größe"},
		"/meta":   {"text/html", "<meta charset=windows-1251><p>\xcf\xf0\xe8</p>", "При"},
		"/plain":  {"text/plain", "a < b & c\n", "a < b & c\n"},
		"/utf8":   {"text/plain", "déjà", "déjà"},
		"/utf16":  {"text/plain", "\xff\xfeh\x00i\x00", "hi"},
		"/json":   {"application/ld+json", `{"a":1}`, `{"a":1}`},
		"/none":   {"", "<!doctype html><p>hello</p>", "hello"},
		"/stream": {"application/octet-stream", "just text", "just text"},
		"/bad":    {"text/plain; charset=utf-8", "a\xffb\x00c", "a\uFFFDb␀c"},
		"/empty":  {"text/html", "", "(the page holds no text)"},
	}
	base, get := site(t, FetchOptions{AllowPrivate: true}, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/moved" {
			http.Redirect(w, r, "/plain", http.StatusFound)
			return
		}
		p := pages[r.URL.Path]
		w.Header()["Content-Type"] = nil
		if p.kind != "" {
			w.Header().Set("Content-Type", p.kind)
		}
		_, _ = w.Write([]byte(p.body))
	})
	for path, p := range pages {
		res := get(map[string]any{"url": base + path})
		if want := base + path + "\n\n" + strings.ReplaceAll(p.want, "BASE", base); res.IsError || res.Text != want {
			t.Errorf("%s = %q, error %v; want %q", path, res.Text, res.IsError, want)
		}
	}
	if res := get(map[string]any{"url": base + "/moved"}); !strings.HasPrefix(res.Text, base+"/plain\n") {
		t.Errorf("a page that moved is %q", res.Text)
	}
}

// Everything about a fetch is bounded, and what cannot be had is told in a few
// words.
func TestFetchBounds(t *testing.T) {
	t.Parallel()
	var long strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&long, "line %d é\n", i)
	}
	base, get := site(t, FetchOptions{AllowPrivate: true}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		switch r.URL.Path {
		case "/loop":
			http.Redirect(w, r, "/loop", http.StatusFound)
		case "/file":
			http.Redirect(w, r, "file:///etc/passwd", http.StatusFound)
		case "/missing":
			http.Error(w, "nothing here", http.StatusNotFound)
		case "/image":
			w.Header().Set("Content-Type", "image/png")
			_, _ = w.Write([]byte("\x89PNG"))
		case "/raw":
			w.Header().Set("Content-Type", "application/octet-stream")
			_, _ = w.Write([]byte("\x00\x01\x02"))
		case "/bomb": // 64 MiB when it is unpacked
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			for range 64 {
				_, _ = z.Write(make([]byte, 1<<20))
			}
			_ = z.Close()
		case "/deep":
			w.Header().Set("Content-Type", "text/html")
			_, _ = w.Write([]byte(strings.Repeat("<div>", 200_000)))
		case "/long":
			_, _ = w.Write([]byte(long.String()))
		}
	})
	for path, want := range map[string]string{
		"/loop": "redirects more than 5 times", "/file": "want https:// or http://", "/missing": "answered 404 Not Found\nnothing here", "/image": "it is no text (image/png, 4 bytes)",
		"/raw": "it is no text (application/octet-stream",
	} {
		if res := get(map[string]any{"url": base + path}); !res.IsError || !strings.Contains(res.Text, want) {
			t.Errorf("%s = %q, error %v; want an error with %q", path, res.Text, res.IsError, want)
		}
	}
	for address, want := range map[string]string{
		"": "url is missing", "example.org": "want https:// or http://", "ftp://example.org/": "want https:// or http://", "file:///etc/passwd": "want https:// or http://",
		"http:///x": "names no host", "https://u:geheim@example.org/": "leave them out", "http://[::1": "is no address", "http://x/" + strings.Repeat("y", 5000): "want at most 4096",
	} {
		if res := get(map[string]any{"url": address}); !res.IsError || !strings.Contains(res.Text, want) || strings.Contains(res.Text, "geheim") {
			t.Errorf("%.60q = %q; want an error with %q", address, res.Text, want)
		}
	}
	if res := get(map[string]any{"url": base + "/bomb", "start_char": 2<<20 - 10}); res.IsError || !strings.Contains(res.Text, "larger than 2 MiB") {
		t.Errorf("a large page is %q", res.Text)
	}
	get(map[string]any{"url": base + "/deep"}) // it ends, whatever it says

	slow, getSlow := site(t, FetchOptions{AllowPrivate: true, Timeout: 100 * time.Millisecond}, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	if res := getSlow(map[string]any{"url": slow}); !res.IsError || !strings.Contains(res.Text, "did not answer within 100ms") {
		t.Errorf("a slow page is %q", res.Text)
	}

	// Following the hints gives the page (F-086).
	var got strings.Builder
	for char, n := 1, 0; char > 0 && n < 100; n++ {
		res := get(map[string]any{"url": base + "/long", "start_char": char})
		if res.IsError {
			t.Fatal(res.Text)
		}
		_, body, _ := strings.Cut(res.Text, "\n\n")
		at := strings.LastIndex(body, "\n(characters ")
		char = 0
		if at >= 0 {
			var from, to, of int
			if _, err := fmt.Sscanf(body[at+1:], "(characters %d to %d of %d are shown; go on with start_char=%d)", &from, &to, &of, &char); err != nil {
				t.Fatal(err)
			}
			body = body[:at]
		}
		got.WriteString(body)
	}
	if got.String() != long.String() {
		t.Errorf("the parts give %d bytes, want %d", got.Len(), long.Len())
	}
}

// ISO-01: private networks and the machine itself are refused where the connection
// is made: by number, by name, and after a redirect.
func TestFetchPrivate(t *testing.T) {
	t.Parallel()
	asked := 0
	base, get := site(t, FetchOptions{}, func(http.ResponseWriter, *http.Request) { asked++ })
	port := base[strings.LastIndexByte(base, ':'):]
	for _, host := range []string{"127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "169.254.169.254", "10.0.0.1", "[fd00::1]"} {
		if res := get(map[string]any{"url": "http://" + host + port + "/"}); !res.IsError || !strings.Contains(res.Text, "inside a private network or this machine") {
			// A machine without IPv6 has no way there at all.
			if !strings.HasPrefix(host, "[") || !res.IsError {
				t.Errorf("%s = %q, error %v", host, res.Text, res.IsError)
			}
		}
	}
	if asked > 0 {
		t.Errorf("the server was asked %d times", asked)
	}
	for s, want := range map[string]bool{
		"8.8.8.8": true, "93.184.216.34": true, "2606:4700::1111": true, "172.32.0.1": true,
		"127.0.0.1": false, "127.9.9.9": false, "10.1.2.3": false, "172.16.0.1": false, "192.168.0.1": false, "169.254.169.254": false, "100.64.0.1": false,
		"0.0.0.0": false, "255.255.255.255": false, "224.0.0.1": false, "198.18.0.1": false, "240.0.0.1": false,
		"::1": false, "::": false, "fe80::1": false, "fe80::1%eth0": false, "fc00::1": false, "ff02::1": false, "::ffff:10.0.0.1": false, "3fff::1": false, "::ffff:8.8.8.8": true,
		"64:ff9b::7f00:1": false, "2002:7f00:1::": false, "2001:0:1::1": false, "fec0::1": false, "::127.0.0.1": false,
	} {
		if got := public(netip.MustParseAddr(s)); got != want {
			t.Errorf("public(%s) = %v, want %v", s, got, want)
		}
	}
}

// CANCEL-01: a fetch ends with its call. It is no tool on files, so that it runs
// beside others, and it is there only when it is allowed.
func TestFetchIsCancelled(t *testing.T) {
	t.Parallel()
	began := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
	}))
	defer srv.Close()
	ws, err := NewWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer ws.Close()
	find := func(o Options) Tool {
		for _, tl := range Tools(ws, o) {
			if tl.Spec().Name == WebFetchName {
				return tl
			}
		}
		return nil
	}
	if find(Options{}) != nil {
		t.Error("web_fetch is offered though it is not allowed")
	}
	tl := find(Options{Fetch: &FetchOptions{AllowPrivate: true}})
	if tl == nil {
		t.Fatal("web_fetch is not offered")
	}
	if _, ok := tl.(OnFiles); ok {
		t.Error("web_fetch is a tool on files")
	}
	stop := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := tl.Call(ctx, Call{Args: json.RawMessage(fmt.Sprintf(`{"url":%q}`, srv.URL))})
		done <- err
	}()
	<-began
	cancel(stop)
	select {
	case err := <-done:
		if !errors.Is(err, stop) {
			t.Errorf("error = %v, want the cause", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the fetch does not end")
	}
}

// A page that is made to cost much, costs no more than the time of the fetch: what the
// parser and the writer take for it grows with the square of its length.
func TestHostilePages(t *testing.T) {
	t.Parallel()
	var bodies strings.Builder
	for i := range 150_000 {
		fmt.Fprintf(&bodies, "<body a%d>", i)
	}
	base, get := site(t, FetchOptions{AllowPrivate: true, Timeout: time.Second}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		page := strings.Repeat("_*[", 600_000)
		if r.URL.Path == "/bodies" {
			page = bodies.String()
		}
		_, _ = w.Write([]byte(page))
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		get(map[string]any{"url": base + "/marks"}) // fine, or too late on a slow machine
		if res := get(map[string]any{"url": base + "/bodies"}); !res.IsError || !strings.Contains(res.Text, "within 1s") {
			t.Errorf("a page with %d bodies: %.200q, error %v", 150_000, res.Text, res.IsError)
		}
	}()
	select {
	case <-done:
	case <-time.After(40 * time.Second):
		t.Fatal("a page holds the tool up")
	}
}

// A page that would become a tree of too many nodes, or takes too much memory on the
// way to one, is refused.
func TestTangledPage(t *testing.T) {
	t.Parallel()
	page := strings.Repeat("<p><b><i>x", 10_000)
	for _, c := range []struct {
		nodes int
		grows uint64 // with each look at it
		want  error
	}{
		{maxPageNodes, 0, nil},
		{1000, 0, errTangled},
		{maxPageNodes, maxPageHeap / 4, errTangled},
	} {
		heap := uint64(0)
		_, err := parseHTML(t.Context(), page, c.nodes, func() uint64 { heap += c.grows; return heap })
		if !errors.Is(err, c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	if _, err := parseHTML(stopped, page, maxPageNodes, heapInUse); !errors.Is(err, context.Canceled) {
		t.Errorf("after the stop: %v", err)
	}
	if n := heapInUse(); n == 0 {
		t.Error("the runtime does not tell how much memory is in use")
	}
}
