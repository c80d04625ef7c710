package telemetry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	// maxReason bounds the text of a failing check, in bytes: errors may quote
	// what a server has sent.
	maxReason = 500
	// checkTimeout bounds a check that is made when somebody asks, and
	// checkFresh is how long its result is good for the next who asks.
	checkTimeout = 2 * time.Second
	checkFresh   = 500 * time.Millisecond
)

// errUnchecked is the state of a check before its first result.
var errUnchecked = errors.New("not checked yet")

// Probes are the named checks that decide whether a process is ready. It is
// safe for concurrent use.
type Probes struct {
	mu     sync.Mutex
	checks map[string]error
	asked  map[string]*asked
}

// asked is a check that is made when somebody asks.
type asked struct {
	check func(context.Context) error

	mu   sync.Mutex
	at   time.Time
	last error
}

// result makes the check, or returns the last result if that is fresh. Who asks
// meanwhile waits for the same check.
func (a *asked) result() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.at.IsZero() && time.Since(a.at) < checkFresh {
		return a.last
	}
	// Not under the context of the request: a caller that hangs up must not
	// leave a failure behind for the next one.
	ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
	defer cancel()
	a.last = a.check(ctx)
	a.at = time.Now()
	return a.last
}

// NewProbes returns probes whose named checks fail until [Probes.Set] is called
// for each: a service is not ready because nobody has looked yet.
func NewProbes(names ...string) *Probes {
	p := &Probes{checks: make(map[string]error, len(names)), asked: map[string]*asked{}}
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

// Ask adds a look at the thing itself to the named check: whenever somebody
// wants to know and the newest result of [Probes.Set] is good, check is called
// as well. What is idle finds its faults only this way. The check gets a few
// seconds and must heed its context; nil takes it away. It is not called any
// more after the call that takes it away has returned.
func (p *Probes) Ask(name string, check func(context.Context) error) {
	p.mu.Lock()
	old := p.asked[name]
	delete(p.asked, name)
	if check != nil {
		p.asked[name] = &asked{check: check}
	}
	p.mu.Unlock()
	if old != nil {
		old.mu.Lock() // wait for the one that is being made
		old.check = func(context.Context) error { return nil }
		old.mu.Unlock()
	}
}

// Remove forgets a check.
func (p *Probes) Remove(name string) {
	p.Ask(name, nil)
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.checks, name)
}

// Ready returns nil if no check is failing, otherwise an error that names every
// failing check with its reason.
func (p *Probes) Ready() error {
	checks := p.results()
	var failing []error
	for _, name := range slices.Sorted(maps.Keys(checks)) {
		if err := checks[name]; err != nil {
			failing = append(failing, fmt.Errorf("%s: %w", name, err))
		}
	}
	return errors.Join(failing...)
}

// results returns the state of every check; those that are to be made now are
// made side by side.
func (p *Probes) results() map[string]error {
	p.mu.Lock()
	checks := maps.Clone(p.checks)
	asked := maps.Clone(p.asked)
	p.mu.Unlock()
	var (
		mu sync.Mutex
		wg sync.WaitGroup
	)
	for name, err := range checks { // before any result is written into it
		if err != nil {
			delete(asked, name) // known to be bad
		}
	}
	for name, a := range asked {
		wg.Go(func() {
			err := a.result()
			mu.Lock()
			defer mu.Unlock()
			checks[name] = err
		})
	}
	wg.Wait()
	return checks
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
	for name, err := range p.results() {
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
