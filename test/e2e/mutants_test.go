package e2e

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

var chaosMutants = flag.Bool("chaos.mutants", false, "also build services that are broken on purpose, and show that chaos finds each of them")

// buildMutants builds the services that can be broken.
var buildMutants = sync.OnceValue(func() error {
	for _, name := range mutable {
		cmd := exec.Command("go", "build", "-tags", "herdgate_mutant", "-o", filepath.Join(bin, "mutant", name), "github.com/herdgate/herdgate/services/"+name+"/cmd/"+name)
		if out, err := cmd.CombinedOutput(); err != nil {
			return errors.Join(err, errors.New(string(out)))
		}
	}
	return nil
})

// only are lanes in which nothing happens but kinds at writes, to one crew.
func only(crew string, write string, kinds ...kind) []lane {
	var out []lane
	for _, l := range lanes {
		l.kinds, l.writes = nil, nil
		if l.crew == crew {
			l.kinds, l.writes = kinds, []string{write}
		}
		out = append(out, l)
	}
	return out
}

// What chaos is for: services that break one promise are found, with the rule that
// they break, and the same faults find nothing in services that keep it.
func TestChaosFindsMutants(t *testing.T) {
	t.Parallel()
	if !*chaosMutants {
		t.Skip("takes a minute or two: run with -chaos.mutants, or make chaos-mutants")
	}
	if err := buildMutants(); err != nil {
		t.Fatal(err)
	}
	seed := newSeed(t)
	for _, m := range []struct {
		name  string
		lanes []lane
		// want is the rules that it breaks: one of them has to be named.
		want []string
	}{
		// A grant that arrives when somebody else leads.
		{"skip-fence", only("admission", firstWrite, lateAt), []string{"I1", "I2", "I4", "I5", "I8"}},
		// An executor that dies between the two.
		{"ack-early", only("executor", leaseWrite, fellAt), []string{"I4", "I8"}},
		// A grant that does not arrive, by a leader that goes on.
		{"requeue", only("admission", firstWrite, lostAt), []string{"I2"}},
	} {
		for _, mutant := range []string{"", m.name} {
			name := m.name
			if mutant == "" {
				name = "the real thing, instead of " + name
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				c := newChaos(t, seed, mutant, m.lanes)
				c.run(20*time.Second, 90*time.Millisecond)
				t.Log(c.report)
				named := false
				for i, w := range c.wrong {
					if i < 10 {
						t.Log(w)
					}
					for _, rule := range m.want {
						named = named || strings.HasPrefix(w, rule)
					}
				}
				switch {
				case mutant == "" && len(c.wrong) > 0:
					t.Errorf("%d violations", len(c.wrong))
				case mutant != "" && !named:
					t.Errorf("it was not found: none of %d violations is of %v", len(c.wrong), m.want)
				}
			})
		}
	}
}

// What is deployed has none of it.
func TestNoMutantInReleases(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"admission", "executor", "herdgate"} {
		b, err := os.ReadFile(filepath.Join(bin, name))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(b, []byte("skip-fence")) || bytes.Contains(b, []byte("internal/mutant.")) {
			t.Errorf("%s can be broken on purpose", name)
		}
	}
}
