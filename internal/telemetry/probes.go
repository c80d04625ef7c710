package telemetry

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"unicode/utf8"
)

// maxReason bounds the text of a failing check, in bytes: errors may quote
// what a server has sent.
const maxReason = 500

// errUnchecked is the state of a check before its first result.
var errUnchecked = errors.New("not checked yet")

// Probes are the named checks that decide whether a process is ready. It is
// safe for concurrent use.
type Probes struct {
	mu     sync.Mutex
	checks map[string]error
}

// NewProbes returns probes whose named checks fail until [Probes.Set] is called
// for each: a service is not ready because nobody has looked yet.
func NewProbes(names ...string) *Probes {
	p := &Probes{checks: make(map[string]error, len(names))}
	for _, n := range names {
		p.checks[n] = errUnchecked
	}
	return p
}

// Set records the newest result of a check: nil is good. The text of err is
// shown to whoever asks, so it must not hold secrets.
func (p *Probes) Set(name string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.checks[name] = err
}

// Remove forgets a check.
func (p *Probes) Remove(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.checks, name)
}

// Ready returns nil if no check is failing, otherwise an error that names every
// failing check with its reason.
func (p *Probes) Ready() error {
	checks := p.snapshot()
	var failing []error
	for _, name := range slices.Sorted(maps.Keys(checks)) {
		if err := checks[name]; err != nil {
			failing = append(failing, fmt.Errorf("%s: %w", name, err))
		}
	}
	return errors.Join(failing...)
}

func (p *Probes) snapshot() map[string]error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.checks)
}

// report is the body of /readyz.
type report struct {
	Status string            `json:"status"`
	Checks map[string]string `json:"checks"`
}

// ServeReady answers whether the process is ready: 200, or 503 with the reason
// of each failing check.
func (p *Probes) ServeReady(w http.ResponseWriter, r *http.Request) {
	rep, code := report{Status: "ready", Checks: map[string]string{}}, http.StatusOK
	for name, err := range p.snapshot() {
		rep.Checks[name] = "ok"
		if err != nil {
			rep.Status, code = "unavailable", http.StatusServiceUnavailable
			rep.Checks[name] = clip(err.Error())
		}
	}
	writeJSON(w, r, code, rep)
}

// ServeHealth answers that the process is alive, whatever its checks say:
// restarting it would not bring a database back.
func (p *Probes) ServeHealth(w http.ResponseWriter, r *http.Request) {
	writeJSON(w, r, http.StatusOK, report{Status: "alive", Checks: map[string]string{}})
}

func writeJSON(w http.ResponseWriter, r *http.Request, code int, rep report) {
	body, err := json.Marshal(rep)
	if err != nil { // strings only: cannot happen
		http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	if r.Method != http.MethodHead {
		_, _ = w.Write(append(body, '\n')) // the client has left: nothing to do
	}
}

func clip(s string) string {
	if len(s) <= maxReason {
		return s
	}
	cut := maxReason
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}
