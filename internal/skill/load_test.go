package skill

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/pkg/contract"
)

// put writes a file and the folders that it needs.
func put(t *testing.T, content string, path ...string) string {
	t.Helper()
	file := filepath.Join(path...)
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(content), 0o644)); err != nil {
		t.Fatal(err)
	}
	return file
}

// real is a folder of the test without links in its path.
func real(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func skillFile(name, description string, more ...string) string {
	return header(append([]string{"name: " + name, "description: " + description}, more...)...)
}

func names(list []Skill) string {
	var out []string
	for _, s := range list {
		out = append(out, s.Name)
	}
	return strings.Join(out, " ")
}

func texts(list []Warning) string {
	var out []string
	for _, w := range list {
		out = append(out, w.String())
	}
	return strings.Join(out, "\n")
}

// F-092: one broken skill is told and takes nothing from the others.
func TestLoadBroken(t *testing.T) {
	t.Parallel()
	dir := real(t)
	put(t, skillFile("good", "d"), dir, "good", FileName)
	put(t, skillFile("deep", "d"), dir, "group", "deep", FileName)
	put(t, skillFile("inner", "d"), dir, "good", "inner", FileName) // belongs to good
	put(t, skillFile("buried", "d"), dir, "1", "2", "3", "buried", FileName)
	put(t, skillFile("hidden", "d"), dir, ".git", "hidden", FileName)
	bad := put(t, "---\nname: bad/name\ndescription: d\n---\n", dir, "bad", FileName)
	other := put(t, skillFile("another", "d"), dir, "other", FileName)
	twice := put(t, skillFile("good", "d"), dir, "zz", FileName)
	loose := put(t, skillFile("loose", "d"), dir, FileName)
	c, warnings, err := Loader{Public: []string{dir}}.Load("default", "")
	if err != nil {
		t.Fatal(err)
	}
	if got := names(c.All()); got != "another deep good" {
		t.Errorf("skills are %q", got)
	}
	told := texts(warnings)
	for _, want := range []string{
		bad + `:2: name is "bad/name"; want 1 to 64`, other + ": the skill is called another, its folder other", twice + ": there is a skill good already in",
		loose + ": a skill needs a folder of its own; want " + filepath.Join(dir, "NAME", FileName),
	} {
		if !strings.Contains(told, want) {
			t.Errorf("warnings are\n%s\nwant %s", told, want)
		}
	}
	if len(warnings) != 5 {
		t.Errorf("%d warnings:\n%s", len(warnings), told)
	}
}

// Links that lead out of the folder are refused, those inside work.
func TestLoadLinks(t *testing.T) {
	t.Parallel()
	dir, outside := real(t), real(t)
	put(t, skillFile("secret", "d"), outside, "secret", FileName)
	put(t, skillFile("inside", "d"), dir, "inside", "README.md")
	if err := errors.Join(
		os.Symlink(filepath.Join(outside, "secret"), filepath.Join(dir, "secret")),
		os.Symlink("README.md", filepath.Join(dir, "inside", FileName)),
		os.Symlink("inside", filepath.Join(dir, "again")),
		os.Symlink(".", filepath.Join(dir, "loop")),
		os.Mkdir(filepath.Join(dir, "leaves"), 0o755),
		os.Symlink(filepath.Join(outside, "secret", FileName), filepath.Join(dir, "leaves", FileName)),
	); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(outside, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	c, warnings, err := Loader{Public: []string{link}}.Load("default", "")
	if err != nil {
		t.Fatal(err)
	}
	all := c.All()
	if names(all) != "inside" || all[0].Path != filepath.Join(dir, "inside", FileName) || all[0].file != filepath.Join(dir, "inside", "README.md") {
		t.Errorf("skills are %+v", all)
	}
	if body, err := all[0].Body(); body != "Do it." || err != nil {
		t.Errorf("body %q, %v", body, err)
	}
	told := texts(warnings)
	if len(warnings) != 2 || !strings.Contains(told, "secret: it is a link that leaves "+dir) || !strings.Contains(told, "leaves/SKILL.md: it is a link that leaves the skill's folder") {
		t.Errorf("warnings are\n%s", told)
	}
}

// SKILL-03, SKILL-04, SKILL-05, SKILL-09, CTX-10: whose skills an agent sees.
func TestDisclosed(t *testing.T) {
	t.Parallel()
	public, data := real(t), real(t)
	l := Loader{Public: []string{public}, DataDir: data}
	put(t, skillFile("a", "public"), public, "a", FileName)
	put(t, skillFile("b", "public"), public, "b", FileName)
	put(t, skillFile("off", "public", "enabled: false"), public, "off", FileName)
	put(t, skillFile("a", "of u1"), l.UserDir("default", "u1"), "a", FileName)
	put(t, skillFile("b", "of u1", "enabled: false"), l.UserDir("default", "u1"), "b", FileName)
	put(t, skillFile("c", "of default"), l.UserDir("", ""), "c", FileName)
	put(t, skillFile("c", "of other"), l.UserDir("acme", "u1"), "c", FileName)
	if got, want := l.UserDir("default", "u1"), filepath.Join(data, "users", "u1", "skills"); got != want {
		t.Errorf("folder of u1 is %s, want %s", got, want)
	}
	if got := l.UserDir("default", "../../etc"); filepath.Dir(filepath.Dir(got)) != filepath.Join(data, "users") {
		t.Errorf("a user leaves the folder of users: %s", got)
	}
	for _, tt := range []struct {
		tenant contract.Tenant
		user   string
		list   []string
		want   string
	}{
		{"default", "u1", nil, "a(of u1)"}, // shadows a, and switches b off
		{"default", "", nil, "a(public) b(public) c(of default)"},
		{"default", "default", nil, "a(public) b(public) c(of default)"},
		{"default", "u2", nil, "a(public) b(public)"},
		{"acme", "u1", nil, "a(public) b(public) c(of other)"},
		{"default", "u2", []string{"b", "off", "b", "no"}, "b(public)"},
		{"default", "u2", []string{}, ""},
	} {
		list, warnings, err := l.Disclosed(tt.tenant, tt.user, tt.list)
		var got []string
		for _, s := range list {
			got = append(got, fmt.Sprintf("%s(%s)", s.Name, s.Description))
		}
		if strings.Join(got, " ") != tt.want || err != nil || len(warnings) != 0 {
			t.Errorf("%s/%s with %q sees %q, %v, %v; want %q", tt.tenant, tt.user, tt.list, got, err, warnings, tt.want)
		}
	}

	broken := Loader{Public: []string{filepath.Join(public, "none")}}
	if _, _, err := broken.Disclosed("default", "", nil); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "skills.paths") {
		t.Errorf("a folder that is not there: %v", err)
	}
	if _, _, err := broken.Disclosed("default", "", []string{}); err != nil {
		t.Errorf("no skills, and yet the catalogue was read: %v", err)
	}
	if _, _, err := (Loader{Public: []string{put(t, "", public, "file")}}).Load("default", ""); err == nil {
		t.Error("a file is taken for a folder of skills")
	}
	put(t, "", data, "users", "u3", "skills")
	if _, _, err := l.Load("default", "u3"); err == nil || !strings.Contains(err.Error(), `skills of user "u3"`) {
		t.Errorf("skills of a user that cannot be read: %v", err)
	}
}

func TestLoadBounds(t *testing.T) {
	t.Parallel()
	dir := real(t)
	for i := range MaxSkills + 2 {
		name := fmt.Sprintf("s%03d", i)
		put(t, skillFile(name, "d"), dir, name, FileName)
	}
	c, warnings, err := Loader{Public: []string{dir}}.Load("default", "")
	if err != nil || len(c.All()) != MaxSkills || len(warnings) == 0 || !strings.Contains(warnings[0].Text, "more than 500 skills") {
		t.Errorf("%d skills, %v, %v", len(c.All()), texts(warnings), err)
	}
}
