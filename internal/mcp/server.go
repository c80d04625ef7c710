package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/tool"
)

// legacyVersion is the protocol version that we begin with: every server knows how to
// be initialised, and some do not answer at all to what they do not know.
const legacyVersion = "2025-11-25"

// keptEnv are the variables of ours that a server gets beside its own.
var keptEnv = []string{"PATH", "HOME", "LANG", "TMPDIR", "TZ", "USER", "SystemRoot"}

// minKeyPath is how long a path is at least that can hold a key.
const minKeyPath = 16

var errClosed = errors.New("the service is ending")

// server is one MCP server.
type server struct {
	m    *Manager
	name string
	cfg  config.MCPServer
	log  zerolog.Logger

	mu         sync.Mutex
	conn       *conn
	connecting chan struct{} // closed when the attempt under way is over
	closed     bool
	lastErr    error
	failures   int
	retryAt    time.Time
	// tools is the last list; known says that there was one.
	tools []Tool
	known bool
	// told are the warnings that were given.
	told map[string]bool
	// secrets are the values that are hidden: in logs and messages all of them, in
	// results those that come from our environment.
	inLogs, inResults *strings.Replacer
}

// conn is one connection to a server.
type conn struct {
	session *sdk.ClientSession
	idle    func()
	since   time.Time
	worked  bool          // a call was answered
	gone    chan struct{} // closed when the connection is
}

func newServer(m *Manager, name string, cfg config.MCPServer) *server {
	return &server{m: m, name: name, cfg: cfg, log: m.cfg.Log.With().Str("mcp_server", name).Logger(), told: map[string]bool{}, inLogs: strings.NewReplacer(), inResults: strings.NewReplacer()}
}

// hide takes secrets out of what is logged or told.
func (s *server) hide(text string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inLogs.Replace(text)
}

// warn tells something about a server once.
func (s *server) warn(text string) {
	text = s.hide(text)
	s.mu.Lock()
	first := !s.told[text] && len(s.told) < 10*maxToolsServer
	if first {
		s.told[text] = true
	}
	s.mu.Unlock()
	if first {
		s.log.Warn().Msg(text)
	}
}

// dropped tells of a tool that its own list leaves unreadable.
func (s *server) dropped(what string) {
	s.warn(fmt.Sprintf("a tool of the MCP server %s is left out: %s", s.name, what))
}

// session returns a connection, made now if there is none. The attempt to make one is
// not bound to ctx: others wait for it as well (F-130).
func (s *server) session(ctx context.Context) (*conn, error) {
	for {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return nil, errClosed
		}
		if c := s.conn; c != nil {
			select {
			case <-c.gone:
				s.lostLocked(c, errors.New("it has ended or closed the connection"))
			default:
				s.mu.Unlock()
				return c, nil
			}
		}
		if s.connecting == nil {
			if wait := time.Until(s.retryAt); wait > 0 {
				err := fmt.Errorf("%w (tried again in %d s at the earliest)", s.lastErr, int(wait.Seconds())+1)
				s.mu.Unlock()
				return nil, err
			}
			s.connecting = make(chan struct{})
			s.m.wg.Go(s.attempt)
		}
		over := s.connecting
		s.mu.Unlock()
		select {
		case <-over:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// attempt makes a connection.
func (s *server) attempt() {
	c, err := s.connect()
	if err != nil {
		err = errors.New(clip(s.hide(err.Error()), 500))
		s.log.Warn().Err(err).Msg("an MCP server cannot be reached")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.connecting)
	s.connecting = nil
	if err != nil {
		s.failedLocked(err)
		return
	}
	s.conn = c
	if s.closed {
		return // close waits for us and ends it
	}
	s.log.Info().Msg("connected to an MCP server")
}

// failedLocked sets when the next attempt may be made.
func (s *server) failedLocked(err error) {
	pause := s.m.cfg.FirstPause << min(s.failures, 16)
	s.failures++
	s.lastErr, s.retryAt = err, time.Now().Add(min(pause, s.m.cfg.LastPause))
}

// lostLocked takes note that a connection is gone. One that was of use is made again at
// once; one that was not has failed.
func (s *server) lostLocked(c *conn, err error) {
	if s.conn != c {
		return
	}
	s.conn = nil
	if c.worked || time.Since(c.since) > s.m.cfg.LastPause {
		s.failures, s.retryAt, s.lastErr = 0, time.Time{}, err
	} else {
		s.failedLocked(err)
	}
	s.log.Warn().AnErr("reason", err).Msg("the connection to an MCP server is lost")
	s.m.wg.Go(func() { c.end() })
}

func (c *conn) end() {
	_ = c.session.Close() // it is of no more use
	c.idle()
}

// connect makes one attempt.
func (s *server) connect() (*conn, error) {
	ctx, cancel := context.WithTimeout(s.m.ctx, s.m.cfg.ConnectTimeout)
	defer cancel()
	session, idle, err := s.dial(ctx, legacyVersion)
	var refused *jsonrpc.Error
	if errors.As(err, &refused) && ctx.Err() == nil {
		idle()
		session, idle, err = s.dial(ctx, "")
	}
	if err != nil {
		idle()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return nil, fmt.Errorf("it did not answer within %v of its start", s.m.cfg.ConnectTimeout)
		}
		return nil, err
	}
	c := &conn{session: session, idle: idle, since: time.Now(), gone: make(chan struct{})}
	s.m.wg.Go(func() {
		_ = session.Wait() // how it ended does not matter
		close(c.gone)
	})
	return c, nil
}

func (s *server) dial(ctx context.Context, version string) (*sdk.ClientSession, func(), error) {
	transport, idle, err := s.transport()
	if err != nil {
		return nil, func() {}, err
	}
	// We have no roots, do no sampling and ask nobody anything.
	client := sdk.NewClient(&sdk.Implementation{Name: "herdgate", Version: "1"}, &sdk.ClientOptions{
		Capabilities: &sdk.ClientCapabilities{}, MultiRoundTrip: &sdk.MultiRoundTripOptions{Disabled: true},
		// The list is read again for each task; hearing of a change is enough for
		// servers that ask whether anybody listens.
		ToolListChangedHandler: func(context.Context, *sdk.ToolListChangedRequest) {
			s.log.Debug().Msg("an MCP server has changed its list of tools")
		},
	})
	life, end := context.WithCancel(s.m.ctx)
	kept := &closer{Transport: transport, life: life, end: end}
	session, err := client.Connect(ctx, kept, &sdk.ClientSessionOptions{ProtocolVersion: version})
	over := func() { end(); idle() }
	if err != nil {
		kept.close() // not all failures of the SDK do
		return nil, over, err
	}
	return session, over, nil
}

// closer remembers the connection that a transport has made, and keeps its life apart
// from the time limit of making it: some transports tie the two (F-130).
type closer struct {
	sdk.Transport
	life context.Context //nolint:containedctx // the connection's lifetime
	end  context.CancelFunc
	conn sdk.Connection
}

// Connect implements sdk.Transport.
func (c *closer) Connect(ctx context.Context) (sdk.Connection, error) {
	stop := context.AfterFunc(ctx, c.end)
	defer stop()
	conn, err := c.Transport.Connect(c.life)
	c.conn = conn
	return conn, err
}

func (c *closer) close() {
	if c.conn != nil {
		_ = c.conn.Close() // it is of no more use
	}
}

// transport is how the server is reached. Values of env and headers are read here, so
// that a variable that is missing is told as what is wrong with this server alone.
func (s *server) transport() (sdk.Transport, func(), error) {
	env, err := s.resolve("env", s.cfg.Env)
	if err != nil {
		return nil, nil, err
	}
	headers, err := s.resolve("headers", s.cfg.Headers)
	if err != nil {
		return nil, nil, err
	}
	if s.cfg.Command != "" {
		var vars []string
		for _, name := range keptEnv {
			if v, ok := os.LookupEnv(name); ok {
				if _, set := env[name]; !set {
					vars = append(vars, name+"="+v)
				}
			}
		}
		for name, v := range env {
			vars = append(vars, name+"="+v)
		}
		return &process{argv: append([]string{s.cfg.Command}, s.cfg.Args...), env: vars, grace: s.m.cfg.Grace, log: s.log, hide: s.hide, dropped: s.dropped}, func() {}, nil
	}
	base, err := url.Parse(s.cfg.URL.Reveal())
	if err != nil {
		return nil, nil, errors.New("its url cannot be read")
	}
	header := http.Header{}
	for name, v := range headers {
		header.Set(name, v)
	}
	if base.User != nil { // it would be told in every error
		password, _ := base.User.Password()
		auth := &http.Request{Header: header}
		if header.Get("Authorization") == "" {
			auth.SetBasicAuth(base.User.Username(), password)
		}
		base.User = nil
	}
	client, t := httpClient(s.m.ctx, base, header, s.dropped)
	if s.cfg.Transport == config.TransportSSE {
		return &sdk.SSEClientTransport{Endpoint: base.String(), HTTPClient: client}, t.CloseIdleConnections, nil
	}
	return &sdk.StreamableClientTransport{Endpoint: base.String(), HTTPClient: client}, t.CloseIdleConnections, nil
}

// resolve reads the values of a section and has them hidden from then on.
func (s *server) resolve(section string, values map[string]config.Secret) (map[string]string, error) {
	out := make(map[string]string, len(values))
	var logs, results []string
	for name, secret := range values {
		v, err := secret.Resolve(s.m.cfg.Lookup)
		if err != nil {
			return nil, fmt.Errorf("%s.%s: %w", section, name, err)
		}
		if strings.ContainsAny(v, "\r\n\x00") && section == "headers" || strings.ContainsRune(v, 0) {
			return nil, fmt.Errorf("%s.%s: the value is not one line", section, name)
		}
		out[name] = v
		hidden := []string{v}
		if _, token, ok := strings.Cut(v, " "); ok && section == "headers" { // Bearer TOKEN
			hidden = append(hidden, token)
		}
		for _, h := range hidden {
			if len(h) >= 4 {
				logs = append(logs, h)
			}
			if len(h) >= 8 && (section == "headers" || strings.HasPrefix(string(secret), "$") && !strings.HasPrefix(string(secret), "$$")) {
				results = append(results, h)
			}
		}
	}
	logs = append(logs, s.place()...)
	if len(logs) > 0 {
		s.mu.Lock()
		s.inLogs, s.inResults = hiding(logs), hiding(results)
		s.mu.Unlock()
	}
	return out, nil
}

// hiding replaces texts; of two that begin alike it takes the longer one.
func hiding(texts []string) *strings.Replacer {
	slices.SortFunc(texts, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, t := range texts {
		pairs = append(pairs, t, "(hidden)")
	}
	return strings.NewReplacer(pairs...)
}

// place is what follows the host in the server's address: a query or a path may hold
// a key. A path that is too short for one is told.
func (s *server) place() []string {
	u, err := url.Parse(s.cfg.URL.Reveal())
	if err != nil {
		return nil
	}
	var out []string
	if u.RawQuery != "" {
		out = append(out, u.RawQuery)
	}
	for _, path := range []string{u.EscapedPath(), u.Path} {
		if len(path) >= minKeyPath {
			out = append(out, path)
		}
	}
	return out
}

func (s *server) close() {
	s.mu.Lock()
	s.closed = true
	over := s.connecting
	s.mu.Unlock()
	s.m.stop() // ends an attempt under way
	if over != nil {
		<-over
	}
	s.mu.Lock()
	c := s.conn
	s.conn = nil
	s.mu.Unlock()
	if c != nil {
		c.end()
	}
}

// list asks for the server's tools. They are asked for each time: a notice of a change
// can get lost (F-138).
func (s *server) list(ctx context.Context) ([]Tool, error) {
	c, err := s.session(ctx)
	if err == nil {
		var specs []*sdk.Tool
		if specs, err = s.fetch(ctx, c); err == nil {
			tools := s.accept(specs)
			s.mu.Lock()
			s.tools, s.known = tools, true
			s.mu.Unlock()
			return tools, nil
		}
		err = errors.New(clip(s.hide(err.Error()), 500))
		if ctx.Err() == nil {
			s.mu.Lock()
			s.lostLocked(c, err)
			s.mu.Unlock()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known {
		return s.tools, nil
	}
	return nil, err
}

// fetch reads all pages of the list, and no more than there can be.
func (s *server) fetch(ctx context.Context, c *conn) ([]*sdk.Tool, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, defaultListTimeout, fmt.Errorf("it did not list its tools within %v", defaultListTimeout))
	defer cancel()
	var out []*sdk.Tool
	params := &sdk.ListToolsParams{}
	for page := 1; ; page++ {
		res, err := c.session.ListTools(ctx, params)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			return nil, fmt.Errorf("its tools cannot be listed: %w", err)
		}
		for _, t := range res.Tools {
			out = append(out, slim(t))
		}
		switch {
		case res.NextCursor == "":
			return out, nil
		case page == maxPages || len(out) > maxToolsServer:
			s.warn(fmt.Sprintf("the MCP server %s lists more than %d tools; the rest is left out", s.name, min(len(out), maxToolsServer)))
			return out, nil
		}
		params = &sdk.ListToolsParams{Cursor: res.NextCursor}
	}
}

// slim keeps of a tool what is looked at, and of that no more than is taken: there are
// many pages, and each may be as large as a message.
func slim(t *sdk.Tool) *sdk.Tool {
	out := &sdk.Tool{Name: cutBytes(t.Name, maxToolNameText+1), Title: cutBytes(t.Title, 4*maxDescription), Description: cutBytes(t.Description, 4*maxDescription)}
	if raw, err := json.Marshal(t.InputSchema); err != nil {
		return out
	} else if len(raw) > maxSchemaBytes {
		out.InputSchema = tooLarge(len(raw))
	} else {
		out.InputSchema = json.RawMessage(raw)
	}
	return out
}

// tooLarge stands for a schema of so many bytes.
type tooLarge int

// cutBytes copies the beginning of a text, so that the rest can go.
func cutBytes(s string, n int) string { return strings.Clone(s[:min(len(s), n)]) }

// accept makes tools of what a server lists, in the order of their names. What cannot
// be offered is told and left out, and nothing else (F-134).
func (s *server) accept(specs []*sdk.Tool) []Tool {
	slices.SortStableFunc(specs, func(a, b *sdk.Tool) int { return strings.Compare(a.Name, b.Name) })
	if len(specs) > maxToolsServer {
		s.warn(fmt.Sprintf("the MCP server %s lists %d tools; those beyond %d are left out", s.name, len(specs), maxToolsServer))
		specs = specs[:maxToolsServer]
	}
	taken := map[string]string{}
	out := make([]Tool, 0, len(specs))
	for _, spec := range specs {
		left := func(why string) {
			s.warn(fmt.Sprintf("the tool %q of the MCP server %s is left out: %s", clip(clean(spec.Name), 80), s.name, why))
		}
		if spec.Name == "" || len(spec.Name) > maxToolNameText {
			left(fmt.Sprintf("its name is empty or longer than %d bytes", maxToolNameText))
			continue
		}
		raw, _ := spec.InputSchema.(json.RawMessage)
		raw, err := checkSchema(raw)
		if n, large := spec.InputSchema.(tooLarge); large {
			err = fmt.Errorf("its inputSchema has %d bytes; want at most %d", n, maxSchemaBytes)
		}
		if err != nil {
			left(err.Error())
			continue
		}
		name := ToolName(s.name, spec.Name)
		if other, ok := taken[name]; ok {
			left(fmt.Sprintf("it would be offered as %s, as %q is", name, clip(clean(other), 80)))
			continue
		}
		taken[name] = spec.Name
		description := strings.TrimSpace(spec.Description)
		if description == "" {
			description = spec.Title
		}
		out = append(out, &remote{s: s, name: spec.Name, spec: model.ToolSpec{
			Name: name, Description: prompt.Defuse(clip(clean(description), maxDescription)), Parameters: raw,
		}})
	}
	slices.SortFunc(out, func(a, b Tool) int { return strings.Compare(a.Spec().Name, b.Spec().Name) })
	return out
}

// remote is one tool of a server.
type remote struct {
	s    *server
	name string // as the server calls it
	spec model.ToolSpec
}

// Spec implements tool.Tool.
func (r *remote) Spec() model.ToolSpec { return r.spec }

// Server implements Tool.
func (r *remote) Server() string { return r.s.name }

// Routing implements Tool.
func (r *remote) Routing() *config.Routing { return r.s.cfg.Routing }

// Call implements tool.Tool.
func (r *remote) Call(ctx context.Context, call tool.Call) (tool.Result, error) {
	return r.s.call(ctx, r.name, call.Args)
}

// call calls a tool. A server that is not there is told to the model: the run goes on
// without it.
func (s *server) call(ctx context.Context, name string, args json.RawMessage) (tool.Result, error) {
	limit := s.m.cfg.CallTimeout
	bound, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for again := true; ; again = false {
		c, err := s.session(bound)
		if ctx.Err() != nil {
			return tool.Result{}, context.Cause(ctx)
		}
		if err != nil {
			return s.absent(err), nil
		}
		res, err := c.session.CallTool(bound, &sdk.CallToolParams{Name: name, Arguments: args})
		if err == nil {
			s.mu.Lock()
			c.worked = true
			hidden := s.inResults
			s.mu.Unlock()
			if len(res.InputRequests) > 0 {
				return tool.Failure(fmt.Sprintf("The MCP server %s asks for input of a person before it goes on with the call; there is nobody to ask.", s.name)), nil
			}
			return resultOf(res, s.m.cfg.OutputMaxChars, hidden), nil
		}
		var answer *jsonrpc.Error
		switch {
		case ctx.Err() != nil:
			return tool.Result{}, context.Cause(ctx)
		case bound.Err() != nil:
			return tool.Failure(fmt.Sprintf("The MCP server %s did not answer within %v. The call was cancelled; it is not known whether it had an effect.", s.name, limit)), nil
		case errors.Is(err, sdk.ErrSessionMissing):
			// It has forgotten us, and has not run the call.
			s.drop(c, errors.New("it does not know the session any more"))
			if again {
				continue
			}
			return s.absent(err), nil
		case errors.As(err, &answer) && !errors.Is(err, sdk.ErrConnectionClosed):
			return tool.Failure(s.hide(fmt.Sprintf("The MCP server %s refused the call: %s (code %d).", s.name, clip(clean(answer.Message), 1000), answer.Code))), nil
		}
		s.drop(c, errors.New(clip(s.hide(err.Error()), 300)))
		return tool.Failure(s.hide(fmt.Sprintf("The MCP server %s was lost while this call ran: %s. It is not known whether the call had an effect. The server is started again with the next call; check before you repeat this one.", s.name, clip(clean(err.Error()), 300)))), nil
	}
}

// absent tells that a server is not there.
func (s *server) absent(err error) tool.Result {
	return tool.Failure(fmt.Sprintf("The MCP server %s is not available, so that none of its tools can be used now: %s. Go on without it, and say in your answer what you could not do.", s.name, s.hide(clip(clean(err.Error()), 500))))
}

// drop gives up a connection.
func (s *server) drop(c *conn, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lostLocked(c, err)
}
