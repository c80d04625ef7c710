package config

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/herdgate/herdgate/pkg/contract"
)

// KnownTools are the tools a definition may name besides those of MCP servers
// (SERVER__TOOL): what agents are offered, and what only leads have, which may
// still be denied.
func KnownTools() []string {
	return []string{
		"bash", "read_file", "write_file", "str_replace", "ls", "glob", "grep",
		"task", "batch_task", "batch_status", "cancel_batch",
		"ask_clarification", "present_files",
		"web_fetch", "tool_search", "describe_skill", "review_skill_package",
	}
}

// inherit stands for the parent's model.
const inherit = "inherit"

// rules checks what the schema cannot say. A rule is left out when one of the
// values it needs is a fault already.
func (k *checker) rules(c Config) {
	k.natsRules(c.NATS)
	k.httpRules(c.HTTP)
	k.modelRules(c)
	k.subagentRules(c)
	k.runtimeRules(c.SubagentRuntime)
	k.poolRef(c, c.Executor.Pool, p("executor.pool"))
	if _, err := c.Executor.Location(); err != nil {
		k.refuse("must be the name of a time zone, as Europe/Berlin or UTC, or empty", strconv.Quote(c.Executor.TimeZone), p("executor.time_zone"))
	}
	k.batchRules(c.SubagentBatches)
	k.loopRules(c.LoopDetection)
	k.summarizationRules(c.Summarization)
	k.mcpRules(c.MCP)
	k.eventsinkRules(c.Eventsink)
	k.telemetryRules(c.Telemetry)
}

// p splits a path that has no names of the user in it.
func p(path string) []string { return strings.Split(path, ".") }

// refuse makes a fault at the first of paths, in words about that one, at the
// place of the first that the document has. It does nothing when a value that
// the rule needs is a fault already.
func (k *checker) refuse(rule, got string, paths ...[]string) {
	for _, path := range paths {
		if k.isBad(path) {
			return
		}
	}
	var at *yaml.Node
	for _, path := range paths {
		if at = k.tree.at(path); at != nil {
			break
		}
	}
	if at == nil {
		at = k.tree.nearest(paths[0])
	}
	if got != "" && k.tree.at(paths[0]) == nil {
		got += " (the default)"
	}
	k.tree.faults = append(k.tree.faults, k.tree.fault(at, paths[0], rule, got))
}

// atMost checks that one number does not exceed another.
func (k *checker) atMost(a float64, pathA []string, b float64, pathB []string) {
	if a > b {
		k.refuse(fmt.Sprintf("must not exceed %s (%s)", k.tree.path(pathB), plain(b)), plain(a), pathA, pathB)
	}
}

// atLeast checks that one number is not below another.
func (k *checker) atLeast(a float64, pathA []string, b float64, pathB []string) {
	if a < b {
		k.refuse(fmt.Sprintf("must be at least %s (%s)", k.tree.path(pathB), plain(b)), plain(a), pathA, pathB)
	}
}

func (k *checker) natsRules(n NATS) {
	if _, err := contract.NewNames(n.Prefix); err != nil {
		k.refuse("must be 1 to 4 names of A-Z a-z 0-9 _ - joined by dots", strconv.Quote(n.Prefix), p("nats.prefix"))
	}
	if n.URL != "" {
		for _, u := range splitServers(n.URL.Reveal()) {
			if err := checkURL(u, "nats", "tls", "ws", "wss"); err != nil {
				k.refuse("must be server addresses such as nats://host:4222, joined by commas; one "+err.Error(), strconv.Quote(n.URL.String()), p("nats.url"))
				break
			}
		}
		if n.Context != "" {
			k.refuse("must not be set together with nats.url: the context has an address of its own", strconv.Quote(n.Context), p("nats.context"), p("nats.url"))
		}
	}
	if n.CredsFile != "" && n.NKeySeed != "" {
		k.refuse("must not be set together with nats.creds_file", "", p("nats.nkey_seed_file"), p("nats.creds_file"))
	}
	if n.TLS.Cert != "" && n.TLS.Key == "" {
		k.refuse("is required with nats.tls.cert", "", p("nats.tls.key"), p("nats.tls.cert"))
	}
	if n.TLS.Key != "" && n.TLS.Cert == "" {
		k.refuse("is required with nats.tls.key", "", p("nats.tls.cert"), p("nats.tls.key"))
	}
	k.address(n.Embedded.Listen, p("nats.embedded.listen"))
}

// splitServers cuts a list of servers like nats.go does, but not inside of a
// password.
func splitServers(s string) []string {
	if strings.Contains(s, "://") {
		return splitAddresses(s)
	}
	return strings.Split(s, ",")
}

// checkURL checks an address: one of schemes and a host. Without a scheme the
// first is meant, if what follows looks like host:port.
func checkURL(s string, schemes ...string) error {
	s = strings.TrimSpace(s)
	if s == "" {
		return errors.New("is empty")
	}
	if !strings.Contains(s, "://") {
		s = schemes[0] + "://" + s
	}
	u, err := url.Parse(s)
	if err != nil {
		// The parser's error quotes the text, which may hold a password.
		return errors.New("is not an address")
	}
	if !slices.Contains(schemes, u.Scheme) {
		return fmt.Errorf("begins with %s://, not with %s://", u.Scheme, strings.Join(schemes, ":// or "))
	}
	if u.Hostname() == "" {
		return errors.New("has no host")
	}
	if port := u.Port(); port != "" && !validPort(port, false) {
		return errors.New("has a port that is not 1 to 65535")
	}
	return nil
}

func validPort(s string, zero bool) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n <= 65535 && (n > 0 || zero && n == 0)
}

// address checks a host:port to listen on.
func (k *checker) address(addr string, path []string) {
	if addr == "" {
		return
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil || !validPort(port, true) {
		k.refuse("must be host:port (port 0 to 65535)", strconv.Quote(addr), path)
	}
}

func loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return true // another rule says so
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (k *checker) httpRules(h HTTP) {
	k.address(h.Addr, p("http.addr"))
	switch h.Auth.Mode {
	case AuthNone:
		if !loopback(h.Addr) {
			k.refuse("must be a loopback address (127.0.0.1, [::1] or localhost) while http.auth.mode is none", strconv.Quote(h.Addr), p("http.addr"), p("http.auth.mode"))
		}
	case AuthTokens:
		if len(h.Auth.Tokens) == 0 {
			k.refuse("must have at least one element while http.auth.mode is tokens", "", p("http.auth.tokens"), p("http.auth.mode"))
		}
	}
	names, vars := map[string]int{}, map[string]int{}
	for i, t := range h.Auth.Tokens {
		path := join(p("http.auth.tokens"), strconv.Itoa(i))
		k.unique(names, t.Name, i, join(path, "name"), t.Name)
		k.unique(vars, t.TokenEnv, i, join(path, "token_env"), hidden)
	}
}

// unique refuses a value that an earlier element of the same list has.
func (k *checker) unique(seen map[string]int, value string, i int, path []string, got string) {
	if value == "" {
		return
	}
	if first, ok := seen[value]; ok {
		if got != hidden {
			got = strconv.Quote(got)
		}
		k.refuse(fmt.Sprintf("must be unique; element %d has the same", first), got, path)
		return
	}
	seen[value] = i
}

func (k *checker) modelRules(c Config) {
	names := map[string]int{}
	for i, m := range c.Models {
		path := join(p("models"), strconv.Itoa(i))
		k.unique(names, m.Name, i, join(path, "name"), m.Name)
		if m.Name == inherit {
			k.refuse("must not be inherit: that word means the parent's model", strconv.Quote(m.Name), join(path, "name"))
		}
		switch m.Provider {
		case ProviderScript:
			if m.Script == "" {
				k.refuse("is required while provider is script: the file with the rules", "", join(path, "script"), join(path, "provider"))
			}
		case ProviderOpenAI, ProviderAnthropic:
			if m.Model == "" {
				k.refuse("is required: the provider's name of the model", "", join(path, "model"), join(path, "provider"))
			}
			if m.Script != "" {
				k.refuse("must not be set: provider is "+m.Provider+", not script", "", join(path, "script"), join(path, "provider"))
			}
		}
		if m.BaseURL != "" {
			k.httpURL(m.BaseURL, join(path, "base_url"))
		}
	}
	k.modelRef(c, c.Lead.Model, false, p("lead.model"))
	if m := c.Summarization.ModelName; m != nil {
		k.modelRef(c, *m, false, p("summarization.model_name"))
	}
}

func (k *checker) httpURL(s string, path []string) {
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		k.refuse("must begin with http:// or https:// and have a host", strconv.Quote(redactAddress(s)), path)
	case u.User != nil:
		k.refuse("must not hold a user or password; use api_key_env or headers", strconv.Quote(redactAddress(s)), path)
	}
}

// modelRef refuses the name of a model that is not configured. Without any
// configured model the program brings its own, so nothing can be said.
func (k *checker) modelRef(c Config, name string, mayInherit bool, path []string) {
	if name == "" || len(c.Models) == 0 || mayInherit && name == inherit {
		return
	}
	var names []string
	for i, m := range c.Models {
		at := join(p("models"), strconv.Itoa(i), "name")
		if m.Name == name {
			return
		}
		if k.isBad(at) {
			return // it may be the one
		}
		names = append(names, m.Name)
	}
	rule := "must be a name out of models (" + clip(strings.Join(names, ", ")) + ")"
	if mayInherit {
		rule += " or " + inherit
	}
	k.refuse(rule+suggest(name, names), strconv.Quote(clip(name)), path)
}

func (k *checker) subagentRules(c Config) {
	s := c.Subagents
	if b := c.Lead.TokenBudget; b != nil {
		k.budget(*b, p("lead.token_budget"))
	}
	if s.TokenBudget != nil {
		k.budget(*s.TokenBudget, p("subagents.token_budget"))
	}
	for name, o := range s.Agents {
		path := join(p("subagents.agents"), name)
		if o.TokenBudget != nil {
			k.budget(*o.TokenBudget, join(path, "token_budget"))
		}
		if o.Model != nil {
			k.modelRef(c, *o.Model, true, join(path, "model"))
		}
		if o.Pool != nil {
			k.poolRef(c, *o.Pool, join(path, "pool"))
		}
	}
	for name, a := range s.CustomAgents {
		path := join(p("subagents.custom_agents"), name)
		k.modelRef(c, a.Model, true, join(path, "model"))
		k.poolRef(c, a.Pool, join(path, "pool"))
		k.toolNames(c, a.Tools, join(path, "tools"))
		k.toolNames(c, a.DisallowedTools, join(path, "disallowed_tools"))
	}
}

// poolRef refuses a pool that no gate has: its tasks could never run.
func (k *checker) poolRef(c Config, name string, path []string) {
	if _, ok := c.SubagentRuntime.Pools[name]; ok || name == string(contract.DefaultPool) || k.badWithin(p("subagent_runtime.pools")) {
		return
	}
	names := append(slices.Sorted(maps.Keys(c.SubagentRuntime.Pools)), string(contract.DefaultPool))
	k.refuse("must be a name out of subagent_runtime.pools, or default"+suggest(name, names), strconv.Quote(clip(name)), path)
}

func (k *checker) runtimeRules(r SubagentRuntime) {
	k.typeLimits(r.Limits, p("subagent_runtime.limits"))
	for name, pool := range r.Pools {
		path := join(p("subagent_runtime.pools"), name)
		if name == string(contract.DefaultPool) {
			k.refuse("must have another name: the default pool's capacity is subagent_runtime.max_running", "", path)
		}
		k.typeLimits(pool.Limits, join(path, "limits"))
	}
}

func (k *checker) typeLimits(l RuntimeLimits, path []string) {
	for name, n := range l.PerType {
		if n < 1 || n > maxRunning {
			k.refuse(fmt.Sprintf("must be 1 to %d", maxRunning), strconv.Itoa(n), join(join(path, "per_type"), name))
		}
	}
}

// maxRunning is the largest capacity of a pool.
const maxRunning = 64

func (k *checker) budget(b TokenBudget, path []string) {
	k.atLeast(b.HardStopThreshold, join(path, "hard_stop_threshold"), b.WarnThreshold, join(path, "warn_threshold"))
}

// toolNames refuses tools that nobody has: a misspelt denial would allow what
// it was meant to deny.
func (k *checker) toolNames(c Config, names []string, path []string) {
	known := KnownTools()
	for i, name := range names {
		if slices.Contains(known, name) {
			continue
		}
		at := join(path, strconv.Itoa(i))
		if k.badWithin(path) {
			return // the numbers no longer fit
		}
		server, _, isMCP := strings.Cut(name, "__")
		if !isMCP {
			k.refuse("must be a tool ("+strings.Join(known[:7], ", ")+") or SERVER__TOOL of an MCP server"+suggest(name, slices.Clone(known)), strconv.Quote(clip(name)), at)
			continue
		}
		if _, ok := c.MCP.Servers[server]; !ok && !k.isBad(join(p("mcp.servers"), server)) {
			k.refuse("must be a tool of a server in mcp.servers; there is none called "+clip(server), strconv.Quote(clip(name)), at)
		}
	}
}

// badWithin reports whether something below path has a fault.
func (k *checker) badWithin(path []string) bool {
	prefix := strings.Join(path, "\x00") + "\x00"
	for b := range k.bad {
		if strings.HasPrefix(b, prefix) {
			return true
		}
	}
	return false
}

func (k *checker) batchRules(b SubagentBatches) {
	at := func(key string) []string { return p("subagent_batches." + key) }
	k.atMost(float64(b.DefaultMaxLiveItems), at("default_max_live_items"), float64(b.MaxLiveItemsPerBatch), at("max_live_items_per_batch"))
	k.atMost(float64(b.DefaultMaxRunningItems), at("default_max_running_items"), float64(b.MaxRunningItemsPerBatch), at("max_running_items_per_batch"))
	k.atMost(float64(b.DefaultMaxRunningItems), at("default_max_running_items"), float64(b.DefaultMaxLiveItems), at("default_max_live_items"))
	k.atMost(float64(b.ResultPreviewMaxChars), at("result_preview_max_chars"), float64(b.MaxResultChars), at("max_result_chars"))
}

func (k *checker) loopRules(l LoopDetection) {
	at := func(key string) []string { return p("loop_detection." + key) }
	k.atLeast(float64(l.HardLimit), at("hard_limit"), float64(l.WarnThreshold), at("warn_threshold"))
	k.atLeast(float64(l.ToolFreqHardLimit), at("tool_freq_hard_limit"), float64(l.ToolFreqWarn), at("tool_freq_warn"))
	for name, f := range l.ToolFreqOverrides {
		path := join(at("tool_freq_overrides"), name)
		k.atLeast(float64(f.HardLimit), join(path, "hard_limit"), float64(f.Warn), join(path, "warn"))
	}
}

func (k *checker) summarizationRules(s Summarization) {
	k.threshold(s.Keep, p("summarization.keep"))
	for i, t := range s.Trigger {
		k.threshold(t, join(p("summarization.trigger"), strconv.Itoa(i)))
	}
}

func (k *checker) threshold(t Threshold, path []string) {
	value, typ := join(path, "value"), join(path, "type")
	switch t.Type {
	case ThresholdFraction:
		if t.Value <= 0 || t.Value > 1 {
			k.refuse("must be a number above 0 and at most 1 while type is fraction", plain(t.Value), value, typ)
		}
	case ThresholdTokens, ThresholdMessages:
		if t.Value < 1 || t.Value != float64(int64(t.Value)) {
			k.refuse("must be a whole number (at least 1) while type is "+t.Type, plain(t.Value), value, typ)
		}
	}
}

// maxServerName bounds the name of an MCP server, so that there is room for its tools'
// in what providers take.
const maxServerName = 40

func (k *checker) mcpRules(m MCP) {
	for name, s := range m.Servers {
		path := join(p("mcp.servers"), name)
		if len(name) > maxServerName { // SERVER__TOOL has 64
			k.refuse(fmt.Sprintf("must have a name of at most %d characters", maxServerName), strconv.Quote(clip(name)), path)
		}
		command, address := join(path, "command"), join(path, "url")
		switch {
		case s.Command == "" && s.URL == "":
			k.refuse("must have a command or a url", "", path, command, address)
			continue
		case s.Command != "" && s.URL != "":
			k.refuse("must not have both a command and a url", "", path, command, address)
			continue
		case s.Command != "":
			if len(s.Headers) > 0 {
				k.refuse("must not be set with command; they belong to url", "", join(path, "headers"), command)
			}
			if s.Transport != "" && s.Transport != TransportStdio {
				k.refuse("must be stdio with command", strconv.Quote(s.Transport), join(path, "transport"), command)
			}
		default:
			if len(s.Args) > 0 {
				k.refuse("must not be set with url; they belong to command", "", join(path, "args"), address)
			}
			if len(s.Env) > 0 {
				k.refuse("must not be set with url; it belongs to command", "", join(path, "env"), address)
			}
			if s.Transport == TransportStdio {
				k.refuse("must be http or sse with url", strconv.Quote(s.Transport), join(path, "transport"), address)
			}
			k.httpURL(s.URL.Reveal(), address)
		}
		for h, v := range s.Headers {
			if strings.ContainsAny(string(v), "\r\n\x00") {
				k.refuse("must be one line", "", join(path, "headers", h))
			}
		}
	}
}

// libpqEnv are the variables by which PostgreSQL's own tools find a server.
var libpqEnv = regexp.MustCompile(`^(PGHOST|PGSERVICE|PGHOSTADDR)=.`)

func (k *checker) eventsinkRules(e Eventsink) {
	switch e.Store {
	case StorePostgres:
		if e.DSN == "" && !slices.ContainsFunc(k.env, libpqEnv.MatchString) {
			k.refuse("is required while eventsink.store is postgres, unless PGHOST is set", "", p("eventsink.dsn"), p("eventsink.store"))
		}
	case StoreSQLite:
		if e.Replicas == SinksShare {
			k.refuse("must be standby while eventsink.store is sqlite: one process writes to a file", strconv.Quote(e.Replicas), p("eventsink.replicas"), p("eventsink.store"))
		}
		if strings.HasPrefix(string(e.DSN), "postgres://") || strings.HasPrefix(string(e.DSN), "postgresql://") {
			k.refuse("must be a file while eventsink.store is sqlite", strconv.Quote(e.DSN.String()), p("eventsink.dsn"), p("eventsink.store"))
		}
	}
}

func (k *checker) telemetryRules(t Telemetry) {
	if t.OTLPEndpoint != "" {
		shown := strconv.Quote(redactAddress(t.OTLPEndpoint))
		if err := checkURL(t.OTLPEndpoint, "http", "https"); err != nil {
			k.refuse("must be host:port, or http:// or https:// with a host; it "+err.Error(), shown, p("telemetry.otlp_endpoint"))
		} else if strings.Contains(t.OTLPEndpoint, "@") {
			k.refuse("must not hold a user or password; use OTEL_EXPORTER_OTLP_HEADERS", shown, p("telemetry.otlp_endpoint"))
		}
	}
	k.address(t.MetricsAddr, p("telemetry.metrics_addr"))
}
