package executor

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/pkg/contract"
)

// SKILL-03, SKILL-09: folders of skills that cannot be read fail the task before its
// model is asked; a task that is shown none does not look at them.
func TestSkillsThatCannotBeRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.svc.deps.Skills = skill.Loader{Public: []string{filepath.Join(t.TempDir(), "none")}}
	w.begin(w.granted("t_1", 1))()
	rec, _ := w.record("t_1")
	if rec.State != contract.StateFailed || !strings.Contains(rec.Error, "skills.paths") || w.model.asked() != 0 {
		t.Errorf("record = %+v, %d model calls", rec, w.model.asked())
	}
	g := w.granted("t_2", 1)
	g.Request.Subagent.Skills = []string{}
	w.begin(g)()
	if rec, _ := w.record("t_2"); rec.State != contract.StateCompleted {
		t.Errorf("record = %+v", rec)
	}
}
