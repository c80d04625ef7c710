package tool_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// CTX-05, CTX-01: a thread has one workspace: the same each time it is opened, beneath
// the root whatever the thread is called, and nobody else's.
func TestThreadDir(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	seen := map[string]string{}
	for _, tenant := range []contract.Tenant{"default", "acme"} {
		for _, thread := range []contract.ThreadID{"a", "A", "a/b", "a_b", "..", "../default/a", "a b", "ä", "*", ">", "a.b", contract.ThreadID(strings.Repeat("x", 512)), contract.ThreadID(strings.Repeat("x", 511) + "y")} {
			dir := tool.ThreadDir(root, tenant, thread)
			if again := tool.ThreadDir(root, tenant, thread); again != dir {
				t.Errorf("%s of %s: %s, and then %s", thread, tenant, dir, again)
			}
			if rel, err := filepath.Rel(filepath.Join(root, string(tenant)), dir); err != nil || !filepath.IsLocal(rel) || strings.Contains(rel, "/") {
				t.Errorf("%s of %s lies in %s", thread, tenant, dir)
			}
			who := string(tenant) + " " + string(thread)
			if other, taken := seen[dir]; taken {
				t.Errorf("%q and %q share %s", who, other, dir)
			}
			seen[dir] = who
			for range 2 {
				ws, err := tool.NewWorkspace(dir)
				if err != nil {
					t.Fatal(err)
				}
				if err := ws.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	}
}
