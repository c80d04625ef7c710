package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/process"
)

// F-092, SKILL-09: a broken skill is told with file, line and what would be right; a
// folder that cannot be read is a failure.
func TestSkills(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(text string, path ...string) {
		t.Helper()
		file := filepath.Join(append([]string{dir}, path...)...)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	look := func(paths ...string) Check {
		d := &doctor{Patient: Patient{Env: &process.Env{Config: config.Config{Skills: config.Skills{Paths: paths}}}, DataDir: filepath.Join(dir, "data")}}
		if d.skills(); len(d.checks) == 0 {
			return Check{}
		}
		return d.checks[0]
	}
	if got := look(); got.Name != "" {
		t.Errorf("without skills: %+v", got)
	}
	public := filepath.Join(dir, "public")
	write("---\nname: a\ndescription: d\n---\n", "public", "a", "SKILL.md")
	if got := look(public); got.Status != OK || got.Detail != "1 skills can be used" {
		t.Errorf("one skill: %+v", got)
	}
	write("---\nname: b\ndescription:\n---\n", "data", "users", "u1", "skills", "b", "SKILL.md")
	if got := look(public); got.Status != Warn || !strings.Contains(got.Detail, "1 skills can be used; ") ||
		!strings.Contains(got.Detail, filepath.Join("users", "u1", "skills", "b", "SKILL.md")+":3: description is null; want a text (left out)") {
		t.Errorf("a broken skill: %+v", got)
	}
	if got := look(filepath.Join(dir, "none")); got.Status != Fail || !strings.Contains(got.Mend, "skills.paths") {
		t.Errorf("no folder: %+v", got)
	}
}
