// Package doctor looks for what keeps a deployment from working and says how to
// mend it. It changes nothing.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/stack"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/open"
	"github.com/herdgate/herdgate/internal/natsd"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/services/eventsink/postgres"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// Status is the result of one check.
type Status string

// The results.
const (
	OK Status = "ok"
	// Warn: it works, or may work, but somebody should know.
	Warn Status = "warn"
	Fail Status = "fail"
)

// Check is one thing that was looked at.
type Check struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"`
	// Mend says what to do; empty when all is well.
	Mend string `json:"mend,omitempty"`
}

// Report is everything that was looked at.
type Report struct {
	OK     bool    `json:"ok"`
	Checks []Check `json:"checks"`
	// History is there when it was asked for and could be read.
	History *History `json:"history,omitempty"`
}

// Patient is what is looked at.
type Patient struct {
	Env *process.Env
	// DataDir as the command line names it; it need not exist.
	DataDir string
	// Client asks the lead at Server.
	Client *client.Client
	Server string
	// Getenv is os.Getenv unless a test has its own.
	Getenv func(string) string
	// Timeout bounds each look at something that may not answer; default 5 s.
	Timeout time.Duration
	// Past, when not nil, has the history judged.
	Past *Past
}

// Examine makes all checks, one after the other, each with a deadline.
func Examine(ctx context.Context, p Patient) Report {
	if p.Getenv == nil {
		p.Getenv = os.Getenv
	}
	if p.Timeout <= 0 {
		p.Timeout = 5 * time.Second
	}
	d := &doctor{Patient: p}
	d.nats(ctx)
	d.dataDir()
	d.skills()
	d.eventStore(ctx)
	d.models(ctx)
	d.mcp(ctx)
	d.sandbox()
	d.tracing(ctx)
	d.lead(ctx)
	r := Report{}
	if p.Past != nil {
		r.History = d.history(ctx)
	}
	if d.conn != nil {
		d.conn.Close()
	}
	r.OK, r.Checks = !slices.ContainsFunc(d.checks, func(c Check) bool { return c.Status == Fail }), d.checks
	return r
}

type doctor struct {
	Patient
	conn   *bus.Conn
	checks []Check
	// refused is what the server has refused conn. eventsRefused: the event sink cannot
	// be asked.
	refused       refusals
	eventsRefused bool
}

func (d *doctor) say(status Status, name, detail, mend string) {
	d.checks = append(d.checks, Check{Name: name, Status: status, Detail: detail, Mend: mend})
}

// nats looks at the server and at our streams on it.
func (d *doctor) nats(ctx context.Context) {
	env := d.Env
	if stack.Embedded(env) {
		switch holder, running := d.embedded(); {
		case running && env.Config.NATS.Embedded.Listen == "":
			d.say(OK, "nats", "the embedded server is running in "+holder+"; it does not listen, so it is not looked into from here", "")
			return
		case !running:
			d.say(Warn, "nats", "no server is configured and no embedded one is running on this data directory",
				"start `herdgate up`, or set nats.url to a server of your own")
			return
		}
	}
	cfg, err := env.BusConfig("doctor")
	if err == nil && stack.Embedded(env) {
		cfg.URL = "nats://" + env.Config.NATS.Embedded.Listen
	}
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, d.Timeout)
		heard := cfg
		heard.Extra = slices.Concat(cfg.Extra, d.refused.options())
		d.conn, err = bus.Connect(ctx, heard, env.Log)
		cancel()
	}
	if err != nil {
		d.say(Fail, "nats", err.Error(), "start the server, correct nats.url, or check credentials (nats.creds_file, nats.nkey_seed_file, nats.tls)")
		return
	}
	nc := d.conn.NC
	rtt, err := nc.RTT()
	if err != nil {
		d.say(Fail, "nats", "connected, but it does not answer: "+err.Error(), "look at the server's log")
		return
	}
	d.say(OK, "nats", fmt.Sprintf("server %s at %s answers in %s", nc.ConnectedServerVersion(), nc.ConnectedUrlRedacted(), rtt.Round(10*time.Microsecond)), "")
	assets, err := env.Assets()
	if err != nil {
		d.say(Fail, "jetstream", err.Error(), "correct nats.prefix")
		return
	}
	if d.rights(ctx, cfg, assets) {
		d.assets(ctx, assets)
	}
}

// embedded reports whether a process holds the embedded server's store.
func (d *doctor) embedded() (holder string, running bool) {
	dir := d.Env.Config.NATS.Embedded.StoreDir
	if dir == "" {
		dir = filepath.Join(d.DataDir, "nats")
	}
	path := filepath.Join(dir, natsd.LockName)
	if _, err := os.Stat(path); err != nil {
		return "", false
	}
	// The lock is taken for a moment, in a form that others may share.
	lock := flock.New(path, flock.SetFlag(os.O_RDONLY))
	free, err := lock.TryRLock()
	if err == nil && free {
		_ = lock.Close()
		return "", false
	}
	holder = "another process"
	if b, err := os.ReadFile(path); err == nil {
		if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			holder = fmt.Sprintf("process %d", pid)
		}
	}
	return holder, true
}

func (d *doctor) assets(ctx context.Context, assets provision.Assets) {
	ctx, cancel := context.WithTimeout(ctx, 2*d.Timeout)
	defer cancel()
	changes, err := provision.Plan(ctx, d.conn.NC, assets)
	switch {
	case errors.Is(err, provision.ErrNoJetStream):
		d.say(Fail, "jetstream", err.Error(), "enable JetStream on the server and for this account")
		return
	case errors.Is(err, provision.ErrServerTooOld):
		d.say(Fail, "jetstream", err.Error(), "update nats-server")
		return
	case err != nil:
		d.say(Fail, "jetstream", err.Error(), "look at the server's log")
		return
	}
	d.say(OK, "jetstream", "enabled, and recent enough for what is needed", "")
	if len(changes) == 0 {
		d.say(OK, "streams", fmt.Sprintf("%d streams and %d consumers are as they should be", len(assets.Streams), len(assets.Consumers)), "")
		return
	}
	status, mend := Warn, "`herdgate provision` brings them in line (--dry-run to look first)"
	var list []string
	for _, c := range changes {
		if c.Unsafe() {
			status = Fail
		}
		if !c.InPlace() {
			mend = "this cannot be changed in place: move its messages elsewhere and delete it, or use another nats.prefix"
		}
		list = append(list, c.String())
	}
	const shown = 5
	if n := len(list); n > shown {
		list = append(list[:shown], fmt.Sprintf("and %d more", n-shown))
	}
	d.say(status, "streams", strings.Join(list, "; "), mend)
}

func (d *doctor) dataDir() {
	dir := d.DataDir
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		d.say(OK, "data directory", dir+" is not there yet; it is made when it is needed", "")
		return
	case err != nil:
		d.say(Fail, "data directory", err.Error(), "correct the rights of the folders above, or choose another one with --data-dir")
		return
	case !info.IsDir():
		d.say(Fail, "data directory", dir+" is no folder", "move it away, or choose another one with --data-dir")
		return
	}
	f, err := os.CreateTemp(dir, ".doctor-*")
	if err != nil {
		d.say(Fail, "data directory", "it cannot be written: "+err.Error(), "give this user the right to write there, or choose another one with --data-dir")
		return
	}
	_, werr := f.WriteString("herdgate doctor\n")
	err = errors.Join(werr, f.Sync(), f.Close(), os.Remove(f.Name()))
	if err != nil {
		d.say(Fail, "data directory", "it cannot be written: "+err.Error(), "is the disk full?")
		return
	}
	d.say(OK, "data directory", dir+" can be written", "")
}

// sqliteHeader begins every SQLite file.
const sqliteHeader = "SQLite format 3\x00"

func (d *doctor) eventStore(ctx context.Context) {
	switch {
	case d.conn == nil:
	case d.eventsRefused:
		d.say(Warn, "event sink", "this user may not ask it, or not have its answer", "see nats rights")
	default:
		ctx, cancel := context.WithTimeout(ctx, d.Timeout)
		resp, err := eventapi.List(ctx, d.conn, eventapi.ListRequest{Limit: 1})
		cancel()
		if err == nil {
			d.say(OK, "event sink", fmt.Sprintf("answers; events up to %d are stored", resp.LastSeq), "")
		} else {
			d.say(Warn, "event sink", err.Error(), "start one: `herdgate eventsink`, or `herdgate up`")
		}
	}
	cfg := d.Env.Config.Eventsink
	if cfg.Store == config.StorePostgres {
		ctx, cancel := context.WithTimeout(ctx, d.Timeout)
		defer cancel()
		if found, err := postgres.Probe(ctx, cfg.DSN.Reveal()); err != nil {
			d.say(Fail, "event store", err.Error(), "correct eventsink.dsn, or the database's settings")
		} else {
			d.say(OK, "event store", found, "")
		}
		return
	}
	path := sqlite.Path(d.DataDir, cfg.DSN.Reveal())
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		d.say(OK, "event store", path+" is not there yet; the event sink makes it", "")
		return
	}
	if err != nil {
		d.say(Fail, "event store", err.Error(), "give this user the right to read it")
		return
	}
	defer f.Close()
	head := make([]byte, len(sqliteHeader))
	// An empty file is a database that nothing was written to.
	if n, err := io.ReadFull(f, head); n > 0 && (err != nil || string(head) != sqliteHeader) {
		d.say(Fail, "event store", path+" is no SQLite database", "move it away; a new one is filled from the event stream as far as that is kept")
		return
	}
	d.say(OK, "event store", path+" can be read", "")
}

func (d *doctor) models(ctx context.Context) {
	models := d.Env.Config.Models
	if len(models) == 0 {
		d.say(Warn, "models", "none is configured; `herdgate up` answers with a built-in offline model, the services alone do not start",
			"add one under models in herdgate.yaml; `herdgate demo` needs none")
		return
	}
	for _, m := range models {
		name := "model " + m.Name
		switch {
		case !slices.Contains(open.Providers(), m.Provider):
			d.say(Fail, name, fmt.Sprintf("provider %q is not available in this version", m.Provider), "use one of "+strings.Join(open.Providers(), ", "))
		case m.APIKeyEnv != "" && d.Getenv(m.APIKeyEnv) == "":
			d.say(Fail, name, "the environment variable "+m.APIKeyEnv+" is empty or not set here", "set it to the key, for every lead and executor")
		case m.Provider == config.ProviderScript:
			if _, err := open.Open([]open.Spec{{Name: m.Name, Provider: m.Provider, Script: m.Script}}); err != nil {
				d.say(Fail, name, err.Error(), "correct the script")
				continue
			}
			d.say(OK, name, "offline, from "+m.Script, "")
		case m.APIKeyEnv == "" && m.BaseURL == "":
			d.say(Warn, name, "it has no key, and the provider's own address asks for one", "set api_key_env, or base_url to a server that needs none")
		default:
			d.model(ctx, name, m)
		}
	}
}

// model asks a provider for one model and has nothing generated.
func (d *doctor) model(ctx context.Context, name string, m config.Model) {
	place := "the provider's own address"
	if m.BaseURL != "" {
		place = bus.Redact(m.BaseURL)
	}
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	known, err := open.Probe(ctx, open.Spec{Name: m.Name, Provider: m.Provider, Model: m.Model, BaseURL: m.BaseURL, APIKeyEnv: m.APIKeyEnv}, d.Getenv(m.APIKeyEnv))
	var failed *model.Error
	switch {
	case err == nil && known:
		d.say(OK, name, fmt.Sprintf("%s at %s is there; nothing was generated", m.Model, place), "")
	case err == nil:
		d.say(OK, name, fmt.Sprintf("%s answers; it does not tell which models it has, so that the name %s was not checked", place, m.Model), "")
	case !errors.As(err, &failed):
		d.say(Fail, name, err.Error(), "correct the model's settings")
	case failed.Code == "unauthorized":
		d.say(Fail, name, failed.Message, "set the right key, for every lead and executor")
	case failed.Code == "not_found":
		d.say(Fail, name, failed.Message, "correct model, or make it available there")
	case failed.Code == "disconnected":
		d.say(Fail, name, place+" cannot be reached: "+failed.Message, "correct base_url, or see that the server runs and the network lets us through")
	case failed.Kind == model.KindTransient:
		d.say(Warn, name, place+" has trouble: "+failed.Message, "try again later; calls are repeated max_retries times")
	default:
		d.say(Fail, name, failed.Message, "correct base_url and model")
	}
}

func (d *doctor) sandbox() {
	w := d.Env.Config.Workspace
	switch {
	case w.Sandbox == config.SandboxNone && w.AllowHostBash:
		d.say(Warn, "sandbox", "off, and commands of models run on the bare host (workspace.allow_host_bash)", "set workspace.sandbox to landlock")
	case w.Sandbox == config.SandboxNone:
		d.say(OK, "sandbox", "off; no commands are run for models", "")
	default:
		ok, reason := sandbox.Available()
		has, gaps := sandbox.Protection()
		d.protection(ok, reason, has, gaps)
	}
}

// protection says what commands are confined by on this machine, or that they are not.
func (d *doctor) protection(ok bool, reason, has string, gaps []string) {
	const need = "run executors on Linux 5.13 or newer with Landlock and seccomp"
	switch {
	case !ok && d.Env.Config.Workspace.AllowHostBash:
		d.say(Warn, "sandbox", "commands of models run on the bare host (workspace.allow_host_bash): "+reason, need)
	case !ok:
		d.say(Warn, "sandbox", "an executor here runs no commands for models: "+reason, need)
	case len(gaps) > 0:
		d.say(Warn, "sandbox", "commands are confined ("+has+"), but "+strings.Join(gaps, "; and "), "use a newer kernel for executors")
	default:
		d.say(OK, "sandbox", "commands are confined: "+has+"; no network, unless the sub-agent has network: true", "")
	}
}

func (d *doctor) tracing(ctx context.Context) {
	raw := string(d.Env.Config.Telemetry.OTLPEndpoint)
	if raw == "" {
		d.say(OK, "tracing", "off; telemetry.otlp_endpoint turns it on", "")
		return
	}
	endpoint, err := telemetry.ParseEndpoint(raw)
	if err != nil {
		d.say(Fail, "tracing", err.Error(), "correct telemetry.otlp_endpoint")
		return
	}
	u, err := url.Parse(endpoint)
	if err != nil {
		d.say(Fail, "tracing", "telemetry.otlp_endpoint is no address", "want host:4318 or http://host:4318")
		return
	}
	addr := u.Host
	if u.Port() == "" {
		addr = net.JoinHostPort(u.Hostname(), map[string]string{"https": "443"}[u.Scheme])
		if u.Scheme != "https" {
			addr = net.JoinHostPort(u.Hostname(), "80")
		}
	}
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		d.say(Warn, "tracing", "the collector cannot be reached: "+err.Error(), "start it, or correct telemetry.otlp_endpoint; spans are dropped meanwhile")
		return
	}
	_ = conn.Close()
	d.say(OK, "tracing", "the collector at "+addr+" can be reached", "")
}

func (d *doctor) lead(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	err := d.Client.Ready(ctx)
	var api *client.Error
	switch {
	case err == nil:
		d.say(OK, "lead", d.Server+" is ready", "")
	case errors.Is(err, syscall.ECONNREFUSED):
		d.say(Warn, "lead", "nobody answers at "+d.Server, "start `herdgate up` or `herdgate lead`; --server names another address")
	case errors.As(err, &api) && api.Status == 503:
		d.say(Fail, "lead", d.Server+" is not ready: "+api.Detail, "mend what it names")
	default:
		d.say(Fail, "lead", err.Error(), "is --server the address of a lead?")
	}
}
