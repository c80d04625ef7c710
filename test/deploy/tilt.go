// Package deploy checks how Herdgate is started elsewhere: the compose file and
// the Tiltfile must start the services with flags that the programs have, in an
// order that works, and both alike.
package deploy

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"go.starlark.net/starlark"
	"go.starlark.net/starlarkstruct"
	"go.starlark.net/syntax"
)

// keywords are the arguments of Tilt's functions. Tilt refuses an unknown one; a
// stub would let a misspelt one pass.
var keywords = map[string][]string{
	"local_resource": {"name", "cmd", "deps", "trigger_mode", "resource_deps", "ignore", "auto_init", "serve_cmd", "cmd_bat", "serve_cmd_bat", "allow_parallel", "links", "labels", "env", "serve_env", "readiness_probe", "dir", "serve_dir"},
	"probe":          {"initial_delay_secs", "timeout_secs", "period_secs", "success_threshold", "failure_threshold", "exec", "http_get", "tcp_socket"},

	"http_get_action":   {"port", "host", "scheme", "path"},
	"tcp_socket_action": {"port", "host"},
	"exec_action":       {"command"},
	"link":              {"url", "name"},

	"analytics_settings": {"enable"},
	"version_settings":   {"constraint", "check_updates"},
}

// structures are the functions that give a value, which the stub echoes.
var structures = []string{"probe", "http_get_action", "tcp_socket_action", "exec_action", "link"}

// Resource is one local_resource of a Tiltfile.
type Resource struct {
	Name      string
	Cmd       []string // one element when it is a shell line
	ServeCmd  []string
	Deps      []string // other resources that it waits for
	ProbePort int      // 0 without a readiness probe
	ProbePath string   // "" for a probe that only connects
}

// Tiltfile runs a Tiltfile against stubs of Tilt's functions; Tilt itself is not
// needed. A syntax error, an unknown name or keyword, a resource that is defined
// twice and a dependency that does not exist are errors. The environment is
// empty, so that a check does not depend on who runs it.
func Tiltfile(file string) ([]Resource, error) {
	dir, err := filepath.Abs(filepath.Dir(file))
	if err != nil {
		return nil, err
	}
	var found []Resource
	env := starlark.StringDict{
		"config": &starlarkstruct.Module{Name: "config", Members: starlark.StringDict{
			"main_dir":  starlark.String(dir),
			"main_path": starlark.String(filepath.Join(dir, filepath.Base(file))),
		}},
	}
	for name := range keywords {
		env[name] = starlark.NewBuiltin(name, func(_ *starlark.Thread, _ *starlark.Builtin, args starlark.Tuple, kwargs []starlark.Tuple) (starlark.Value, error) {
			named := map[string]starlark.Value{}
			for i, v := range args {
				if i >= len(keywords[name]) {
					return nil, fmt.Errorf("%s: too many arguments", name)
				}
				named[keywords[name][i]] = v
			}
			for _, kv := range kwargs {
				k := string(kv[0].(starlark.String))
				if !slices.Contains(keywords[name], k) {
					return nil, fmt.Errorf("%s: unexpected keyword argument %q", name, k)
				}
				named[k] = kv[1]
			}
			switch {
			case name == "local_resource":
				r, err := resource(named)
				found = append(found, r)
				return starlark.None, err
			case slices.Contains(structures, name):
				dict := starlark.StringDict{}
				for k, v := range named {
					dict[k] = v
				}
				return starlarkstruct.FromStringDict(starlark.String(name), dict), nil
			}
			return starlark.None, nil
		})
	}
	opts := &syntax.FileOptions{TopLevelControl: true, GlobalReassign: true, Set: true, While: true, Recursion: true}
	thread := &starlark.Thread{Name: file, Print: func(*starlark.Thread, string) {}}
	thread.SetMaxExecutionSteps(1_000_000)
	if _, err := starlark.ExecFileOptions(opts, thread, file, nil, env); err != nil {
		return found, err
	}
	return found, graph(found)
}

func resource(named map[string]starlark.Value) (Resource, error) {
	var r Resource
	var err error
	r.Name, _ = starlark.AsString(named["name"])
	if r.Name == "" {
		return r, errors.New("local_resource: it has no name")
	}
	if r.Cmd, err = words(named["cmd"]); err != nil {
		return r, fmt.Errorf("local_resource %s: cmd: %w", r.Name, err)
	}
	if r.ServeCmd, err = words(named["serve_cmd"]); err != nil {
		return r, fmt.Errorf("local_resource %s: serve_cmd: %w", r.Name, err)
	}
	if r.Deps, err = words(named["resource_deps"]); err != nil {
		return r, fmt.Errorf("local_resource %s: resource_deps: %w", r.Name, err)
	}
	if p, ok := named["readiness_probe"].(*starlarkstruct.Struct); ok {
		for _, kind := range []string{"http_get", "tcp_socket"} {
			v, err := p.Attr(kind)
			action, ok := v.(*starlarkstruct.Struct)
			if err != nil || !ok {
				continue
			}
			if port, err := action.Attr("port"); err == nil {
				if err := starlark.AsInt(port, &r.ProbePort); err != nil {
					return r, fmt.Errorf("local_resource %s: port: %w", r.Name, err)
				}
			}
			if path, err := action.Attr("path"); err == nil {
				r.ProbePath, _ = starlark.AsString(path)
			}
		}
	}
	return r, nil
}

// words turns a text, a list of texts or nothing into a list.
func words(v starlark.Value) ([]string, error) {
	switch v := v.(type) {
	case nil, starlark.NoneType:
		return nil, nil
	case starlark.String:
		return []string{string(v)}, nil
	case starlark.Iterable:
		var out []string
		for e := range starlark.Elements(v) {
			s, ok := starlark.AsString(e)
			if !ok {
				return nil, fmt.Errorf("%s is no text", e)
			}
			out = append(out, s)
		}
		return out, nil
	}
	return nil, fmt.Errorf("%s is neither a text nor a list of texts", v)
}

func graph(resources []Resource) error {
	defined := map[string]bool{}
	for _, r := range resources {
		if defined[r.Name] {
			return fmt.Errorf("local_resource %q is defined twice", r.Name)
		}
		defined[r.Name] = true
	}
	var errs []error
	for _, r := range resources {
		for _, d := range r.Deps {
			if !defined[d] {
				errs = append(errs, fmt.Errorf("%s waits for %q, which is not defined", r.Name, d))
			}
		}
	}
	return errors.Join(errs...)
}
