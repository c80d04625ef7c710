package deploy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/herdgate/herdgate/internal/process"
)

const (
	composeFile = "../../deploy/compose.yaml"
	tiltFile    = "../../tilt/Tiltfile"
)

var services = []string{"admission", "eventsink", "executor", "lead"}

// Flags of the verbs of herdgate that are used here. Every one takes a value.
var verbFlags = map[string][]string{
	"up":        {"--config", "--data-dir", "--services", "--nats-url", "--nats-listen", "--http-addr", "--metrics-addr", "--log-level", "--log-format"},
	"provision": {"--config", "--data-dir", "--nats-url", "--log-level", "--log-format", "--output"},
}

func project(t *testing.T) *types.Project {
	t.Helper()
	p, err := Compose(t.Context(), composeFile, "LEAD_API_TOKEN=test")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func resources(t *testing.T) map[string]Resource {
	t.Helper()
	list, err := Tiltfile(tiltFile)
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]Resource{}
	for _, r := range list {
		byName[r.Name] = r
	}
	return byName
}

// commands returns every command line of Herdgate in the compose file and the
// Tiltfile, the program's name first, without its folder.
func commands(t *testing.T) [][]string {
	t.Helper()
	var all [][]string
	add := func(argv []string) {
		argv = slices.Clone(argv)
		argv[0] = filepath.Base(argv[0])
		all = append(all, argv)
	}
	for _, s := range project(t).Services {
		if s.Image == "herdgate" {
			add(s.Command)
		}
	}
	for _, r := range resources(t) {
		for _, argv := range [][]string{r.Cmd, r.ServeCmd} {
			if len(argv) > 1 {
				add(argv)
			}
		}
	}
	slices.SortFunc(all, slices.Compare)
	return all
}

// checkCommand says what is wrong with a command line of Herdgate. Those of the
// services are parsed with the programs' own flags.
func checkCommand(argv []string) error {
	args := argv[1:]
	if slices.Contains(services, argv[0]) {
		cmd := process.Command(argv[0], "", nil)
		if err := cmd.ParseFlags(args); err != nil {
			return err
		}
		return cmd.ValidateArgs(cmd.Flags().Args())
	}
	if argv[0] != "herdgate" || len(args) == 0 || verbFlags[args[0]] == nil {
		return errors.New("neither a service nor a verb that is known here")
	}
	known := verbFlags[args[0]]
	for args = args[1:]; len(args) > 0; args = args[2:] {
		if !slices.Contains(known, args[0]) {
			return errors.New("unknown flag " + args[0])
		}
		if len(args) == 1 || strings.HasPrefix(args[1], "--") {
			return errors.New(args[0] + " has no value")
		}
	}
	return nil
}

// ARCH-07: each role is started alone and talks to the others over NATS only.
func TestCommandLinesAreKnown(t *testing.T) {
	t.Parallel()
	all := commands(t)
	if want := 2*(len(services)+1) + 1; len(all) != want {
		t.Errorf("found %d command lines, want %d: four services and provision in each file, the embedded server in one", len(all), want)
	}
	for _, argv := range all {
		if err := checkCommand(argv); err != nil {
			t.Errorf("%s: %v", strings.Join(argv, " "), err)
		}
	}
}

func TestCheckCommandRefuses(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		"leader --config x",
		"herdgate",
		"herdgate deploy --config x",
		"lead --nats-utl x",
		"lead --config",
		"herdgate up --servces lead",
		"herdgate up --services",
		"herdgate up --services --data-dir x",
		"lead x",
	} {
		if checkCommand(strings.Fields(line)) == nil {
			t.Errorf("%q is accepted", line)
		}
	}
}

func TestCompose(t *testing.T) {
	t.Parallel()
	p := project(t)
	want := append([]string{"nats", "provision"}, services...)
	slices.Sort(want)
	if got := p.ServiceNames(); !slices.Equal(got, want) {
		t.Fatalf("services are %v, want %v", got, want)
	}
	for _, name := range services {
		s := p.Services[name]
		if s.Command[0] != name {
			t.Errorf("%s runs %q", name, s.Command[0])
		}
		if d := s.DependsOn["provision"]; d.Condition != types.ServiceConditionCompletedSuccessfully {
			t.Errorf("%s starts before provisioning has ended (%q)", name, d.Condition)
		}
		if s.HealthCheck == nil || !strings.HasSuffix(s.HealthCheck.Test[len(s.HealthCheck.Test)-1], "/readyz") {
			t.Errorf("%s is not watched through /readyz", name)
		} else if url := s.HealthCheck.Test[len(s.HealthCheck.Test)-1]; !strings.Contains(url, port(t, s.Command)) {
			t.Errorf("%s is watched at %s but listens at %s", name, url, port(t, s.Command))
		}
		if len(s.Ports) > 0 != (name == "lead") {
			t.Errorf("%s publishes %d ports; only the lead is reached from outside", name, len(s.Ports))
		}
	}
	if d := p.Services["provision"].DependsOn["nats"]; d.Condition != types.ServiceConditionHealthy {
		t.Errorf("provision starts before NATS is healthy (%q)", d.Condition)
	}
	if p.Services["nats"].HealthCheck == nil {
		t.Error("nats has no health check")
	}
	if lead := p.Services["lead"].Ports; len(lead) != 1 || lead[0].HostIP != "127.0.0.1" || lead[0].Target != 8484 {
		t.Errorf("the lead publishes %+v, want 8484 on loopback", lead)
	}
	for _, s := range p.Services {
		for _, v := range s.Volumes {
			if v.Type == types.VolumeTypeBind {
				if _, err := os.Stat(v.Source); err != nil {
					t.Errorf("%s mounts a file that is not there: %v", s.Name, err)
				}
			}
		}
	}
}

func TestComposeAsksForAToken(t *testing.T) {
	t.Parallel()
	if _, err := Compose(t.Context(), composeFile); err == nil || !strings.Contains(err.Error(), "LEAD_API_TOKEN") {
		t.Errorf("without a token: %v, want an error that names LEAD_API_TOKEN", err)
	}
}

func TestComposeRefuses(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"unknown key":        "name: x\nservices:\n  a: {image: a, enviroment: {}}\n",
		"unknown dependency": "name: x\nservices:\n  a: {image: a, depends_on: [b]}\n",
	} {
		file := filepath.Join(t.TempDir(), "compose.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Compose(t.Context(), file); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

func TestTiltfile(t *testing.T) {
	t.Parallel()
	got := resources(t)
	if len(got) != len(services)+3 {
		t.Errorf("the Tiltfile has %d resources, want %d", len(got), len(services)+3)
	}
	for name, deps := range map[string]string{"build": "", "nats": "build", "provision": "nats"} {
		if have := strings.Join(got[name].Deps, " "); have != deps {
			t.Errorf("%s waits for %q, want %q", name, have, deps)
		}
	}
	ports := map[int]string{}
	for _, name := range services {
		r, ok := got[name]
		if !ok {
			t.Errorf("no resource %s", name)
			continue
		}
		if r.ServeCmd[0] != "bin/"+name {
			t.Errorf("%s runs %q", name, r.ServeCmd[0])
		}
		if !slices.Equal(r.Deps, []string{"provision"}) {
			t.Errorf("%s waits for %v, want provision", name, r.Deps)
		}
		if r.ProbePath != "/readyz" || port(t, r.ServeCmd) != fmt.Sprintf(":%d", r.ProbePort) {
			t.Errorf("%s listens at %s but is watched at %d%s", name, port(t, r.ServeCmd), r.ProbePort, r.ProbePath)
		}
		if other, taken := ports[r.ProbePort]; taken {
			t.Errorf("%s and %s share port %d", name, other, r.ProbePort)
		}
		ports[r.ProbePort] = name
	}
	if nats := got["nats"]; nats.ProbePort != 4222 || nats.ProbePath != "" {
		t.Errorf("nats is watched at %d%s, want a connection to 4222", nats.ProbePort, nats.ProbePath)
	}
}

func TestTiltfileRefuses(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"syntax":             "local_resource('a'",
		"unknown function":   "local_thing('a')",
		"unknown keyword":    "local_resource('a', serve_comd='x')",
		"unknown dependency": "local_resource('a', serve_cmd='x', resource_deps=['b'])",
		"defined twice":      "local_resource('a', serve_cmd='x')\nlocal_resource('a', serve_cmd='y')",
		"no name":            "local_resource(serve_cmd='x')",
		"command of numbers": "local_resource('a', serve_cmd=[1])",
		"endless":            "x = 0\nwhile True:\n  x += 1\n",
	} {
		file := filepath.Join(t.TempDir(), "Tiltfile")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Tiltfile(file); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

// The services are started alike wherever they run: the same flags, apart from
// where they listen and how they write their log.
func TestBothStartTheServicesAlike(t *testing.T) {
	t.Parallel()
	p, r := project(t), resources(t)
	for _, name := range services {
		compose, tilt := flags(p.Services[name].Command), flags(r[name].ServeCmd)
		tilt = slices.DeleteFunc(tilt, func(f string) bool { return f == "--log-format" })
		if !slices.Equal(compose, tilt) {
			t.Errorf("%s: compose gives %v, tilt %v", name, compose, tilt)
		}
	}
}

func flags(argv []string) []string {
	var out []string
	for _, a := range argv {
		if strings.HasPrefix(a, "--") {
			out = append(out, a)
		}
	}
	slices.Sort(out)
	return out
}

// port returns ":8484" for a command that listens at 127.0.0.1:8484.
func port(t *testing.T, argv []string) string {
	t.Helper()
	for i, a := range argv[:len(argv)-1] {
		if a == "--http-addr" || a == "--metrics-addr" {
			if at := strings.LastIndex(argv[i+1], ":"); at >= 0 {
				return argv[i+1][at:]
			}
		}
	}
	t.Errorf("%v listens nowhere", argv)
	return ""
}
