package deploy

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model/script"
)

// CONFIG-01: a file with a fault is refused, so those that we ship have none.
func TestShippedConfigurationsAreValid(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"../../deploy/herdgate.yaml", "../../tilt/herdgate.yaml"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		cfg, faults := config.Check(file, data, nil)
		for _, f := range faults {
			t.Error(f)
		}
		for _, m := range cfg.Models {
			if m.Provider != "script" {
				t.Errorf("%s: model %s needs a provider; what we ship must start offline", file, m.Name)
				continue
			}
			if _, err := script.Load(m.Script); err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
		if len(cfg.Models) == 0 {
			t.Errorf("%s has no model", file)
		}
	}
}

// The examples in the documentation are checked like any other file.
func TestDocumentedConfigurationIsValid(t *testing.T) {
	t.Parallel()
	const file = "../../docs/configuration.md"
	doc, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(doc, -1)
	if len(blocks) == 0 {
		t.Fatal("docs/configuration.md has no example")
	}
	for _, b := range blocks {
		if _, faults := config.Check(file, b[1], nil); len(faults) > 0 {
			t.Errorf("%v in\n%s", faults, b[1])
		}
	}

	// Every scalar key is told, except in sections that nothing acts on yet.
	reserved := []string{"subagent_batches", "tool_search", "mcp", "agent_storage"}
	keys := config.EnvKeys()
	if len(keys) < 40 {
		t.Fatalf("the configuration has %d scalar keys; want at least 40, or nothing is proven", len(keys))
	}
	for _, key := range keys {
		path := strings.Split(strings.ToLower(strings.TrimPrefix(key, "HERDGATE_")), "__")
		if slices.Contains(reserved, path[0]) {
			if !strings.Contains(string(doc), "`"+path[0]+"`") {
				t.Errorf("docs/configuration.md does not name the section %s", path[0])
			}
			continue
		}
		if name := path[len(path)-1]; !regexp.MustCompile("`([a-z_]+\\.)?" + name + "`").Match(doc) {
			t.Errorf("docs/configuration.md does not name %s", strings.Join(path, "."))
		}
	}
}
