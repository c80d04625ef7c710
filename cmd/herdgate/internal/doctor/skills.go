package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/pkg/contract"
)

// maxToldSkills bounds the broken skills that are told.
const maxToldSkills = 10

// skills looks for skills that are left out or odd: those for everybody, and those of
// users on this data directory.
func (d *doctor) skills() {
	l := skill.Loader{Public: d.Env.Config.Skills.Paths, DataDir: d.DataDir}
	all, warnings, err := skill.Loader{Public: l.Public}.Load(contract.DefaultTenant, "")
	if err != nil {
		d.say(Fail, "skills", err.Error()+"; every task that may use skills fails",
			"correct skills.paths, or the rights of the folder; executors and leads on other machines need it as well")
		return
	}
	count := len(all.All())
	for _, pattern := range []string{"users/*/skills", "tenants/*/users/*/skills"} {
		dirs, _ := filepath.Glob(filepath.Join(d.DataDir, filepath.FromSlash(pattern))) // the pattern is valid
		for _, dir := range dirs {
			if info, err := os.Stat(dir); err == nil && !info.IsDir() {
				warnings = append(warnings, skill.Warning{File: dir, Text: "it is no folder; every task of this user that may use skills fails", Broken: true})
				continue
			}
			own, told, err := skill.Loader{Public: []string{dir}}.Load(contract.DefaultTenant, "")
			if warnings = append(warnings, told...); err != nil {
				warnings = append(warnings, skill.Warning{File: dir, Text: err.Error(), Broken: true})
				continue
			}
			count += len(own.All())
		}
	}
	if count == 0 && len(warnings) == 0 {
		return // nothing to say to those who use none
	}
	detail := fmt.Sprintf("%d skills can be used", count)
	if len(warnings) == 0 {
		d.say(OK, "skills", detail, "")
		return
	}
	var list []string
	for _, w := range warnings {
		text := w.String()
		if w.Broken {
			text += " (left out)"
		}
		list = append(list, text)
	}
	if n := len(list); n > maxToldSkills {
		list = append(list[:maxToldSkills], fmt.Sprintf("and %d more", n-maxToldSkills))
	}
	d.say(Warn, "skills", detail+"; "+strings.Join(list, "; "), "correct these files; docs/skills.md says what they hold")
}
