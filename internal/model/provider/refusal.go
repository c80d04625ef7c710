package provider

import (
	"fmt"
	"html"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"

	"github.com/tidwall/gjson"
)

// maxRefusal bounds what is read of a refusal, in bytes.
const maxRefusal = 64 << 10

// Status is the error for an answer with an error's status.
type Status struct {
	Code int
	// Type and Name are the provider's words for the kind of error.
	Type, Name string
	Message    string
	Header     http.Header
}

func (s *Status) Error() string {
	return strings.TrimSpace(fmt.Sprintf("status %d %s", s.Code, http.StatusText(s.Code)))
}

// Refusals is a middleware for both providers' libraries. It reads a refusal by
// itself, and not more than a little of it: the libraries read all that a server
// sends, and know only their own vendor's form of it, while gateways, proxies and
// local servers have others.
func Refusals(req *http.Request, next func(*http.Request) (*http.Response, error)) (*http.Response, error) {
	res, err := next(req)
	if err != nil || res.StatusCode < 400 {
		return res, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxRefusal))
	s := readRefusal(res.StatusCode, body)
	if err != nil && s.Message == "" {
		s.Message = "the rest of the answer could not be read: " + err.Error()
	}
	s.Header = res.Header
	return nil, s
}

// readRefusal finds the words in a body: an object "error" (both vendors), also
// within a list, a text in its place, "message" or "detail", or else the text as
// it is.
func readRefusal(code int, body []byte) *Status {
	s := &Status{Code: code}
	if !gjson.ValidBytes(body) {
		s.Message = words(string(body))
		return s
	}
	v := gjson.ParseBytes(body)
	if v.IsArray() {
		v = v.Get("0")
	}
	e := v.Get("error")
	if !e.IsObject() {
		e = v
	}
	s.Type, s.Name = e.Get("type").String(), e.Get("code").String()
	if code := e.Get("details.error_code"); s.Name == "" && code.Type == gjson.String {
		s.Name = code.Str
	}
	for _, at := range []gjson.Result{e.Get("message"), v.Get("error"), v.Get("message"), v.Get("detail"), v} {
		if at.Exists() && at.Type != gjson.Null && !(at.IsObject() && at.Raw != v.Raw) && at.String() != "" {
			s.Message = at.String()
			return s
		}
	}
	return s
}

var titleForm = regexp.MustCompile(`(?is)<title[^>]*>(.{0,300}?)</title>`)

// words gives a text in one line, and of a web page the title alone.
func words(text string) string {
	text = strings.TrimSpace(text)
	if strings.HasPrefix(text, "<") {
		title := ""
		if m := titleForm.FindStringSubmatch(text); m != nil {
			title = strings.Join(strings.Fields(html.UnescapeString(m[1])), " ")
		}
		if title == "" {
			return "a web page without a title"
		}
		return fmt.Sprintf("a web page with the title %q", title)
	}
	return strings.Join(strings.Fields(text), " ")
}

// redirected is the error for a redirect. None is followed: it would take the
// conversation, and with it a key, to a server that nobody has configured.
type redirected struct{ to string }

func (r *redirected) Error() string {
	return fmt.Sprintf("the server redirects to %s, which is not followed; if that is right, write it into base_url", r.to)
}

func refuseRedirect(req *http.Request, _ []*http.Request) error {
	return &redirected{to: place(req.URL)}
}

// place is an address without what may be secret in it.
func place(u *url.URL) string {
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}
