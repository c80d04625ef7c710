package skill

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Bounds of a catalogue.
const (
	// MaxSkills bounds the skills of one folder of skills.
	MaxSkills = 500
	// MaxDepth is how deep beneath such a folder a skill may lie.
	MaxDepth   = 3
	maxFolders = 5000
)

// Skill is one skill of a catalogue.
type Skill struct {
	Name, Description string
	// AllowedTools: nil declares nothing, empty declares no tool.
	AllowedTools []string
	Enabled      bool
	// User: it is the user's own.
	User bool
	// Dir is its folder, Path the SKILL.md in it; no part of Dir is a link.
	Dir, Path string
	// file is the file behind Path, with links followed.
	file string
}

// Body reads what the skill says how to do.
func (s Skill) Body() (string, error) {
	b, _, err := readFile(s.Dir)
	if err != nil {
		return "", err
	}
	p, _, err := Parse(b)
	if err != nil {
		return "", fmt.Errorf("%s: %w", s.Path, err)
	}
	return p.Body, nil
}

// Catalogue is the skills of one user: the public ones, and in place of those with
// the same name the user's own. A loaded one is sorted by name.
type Catalogue struct{ skills []Skill }

// NewCatalogue returns a catalogue of skills in their order.
func NewCatalogue(skills ...Skill) *Catalogue { return &Catalogue{skills: slices.Clone(skills)} }

// All returns all skills, those that are not enabled as well.
func (c *Catalogue) All() []Skill { return slices.Clone(c.skills) }

// Select returns the enabled skills of a list, each once and in the catalogue's order;
// nil stands for all (SKILL-03).
func (c *Catalogue) Select(list []string) []Skill {
	var out []Skill
	for _, s := range c.skills {
		if s.Enabled && (list == nil || slices.Contains(list, s.Name)) {
			out = append(out, s)
		}
	}
	return out
}

// Loader reads catalogues. It is immutable and safe for concurrent use.
type Loader struct {
	// Public are folders of skills for everybody; a name belongs to the first that has it.
	Public []string
	// DataDir holds users' own skills, see [Loader.UserDir]; empty: there are none.
	DataDir string
}

// UserDir is the folder of a user's own skills; empty if there can be none.
func (l Loader) UserDir(tenant contract.Tenant, user string) string {
	if l.DataDir == "" {
		return ""
	}
	if user == "" {
		user = contract.DefaultUser
	}
	dir := l.DataDir
	if tenant != "" && tenant != contract.DefaultTenant {
		dir = filepath.Join(dir, "tenants", string(tenant)) // tenants share nothing
	}
	return filepath.Join(dir, "users", contract.ThreadID(user).Token(), "skills")
}

// Disclosed returns the skills that an agent with the list is shown (SKILL-03). An
// empty list does not touch the catalogue.
func (l Loader) Disclosed(tenant contract.Tenant, user string, list []string) ([]Skill, []Warning, error) {
	if list != nil && len(list) == 0 {
		return nil, nil, nil
	}
	c, warnings, err := l.Load(tenant, user)
	if err != nil {
		return nil, warnings, err
	}
	return c.Select(list), warnings, nil
}

// Load reads the catalogue of a user (SKILL-04, SKILL-05). A broken skill is a
// warning; an error means that a folder of skills cannot be read. A user need not
// have one; a public one that does not exist is an error.
func (l Loader) Load(tenant contract.Tenant, user string) (*Catalogue, []Warning, error) {
	var c Catalogue
	var warnings []Warning
	add := func(found []Skill) {
		for _, s := range found {
			if i := slices.IndexFunc(c.skills, func(o Skill) bool { return o.Name == s.Name }); i >= 0 {
				if other := c.skills[i]; other.User == s.User {
					warnings = append(warnings, Warning{File: s.Path, Text: fmt.Sprintf("there is a skill %s already in %s; this one is left out", s.Name, other.Dir), Broken: true})
				}
				continue
			}
			c.skills = append(c.skills, s)
		}
	}
	if dir := l.UserDir(tenant, user); dir != "" {
		found, told, err := readRoot(dir)
		warnings = append(warnings, told...)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, warnings, fmt.Errorf("skills of user %q: %w", cmp.Or(user, contract.DefaultUser), err)
		}
		for i := range found {
			found[i].User = true
		}
		add(found)
	}
	for _, dir := range l.Public {
		found, told, err := readRoot(dir)
		warnings = append(warnings, told...)
		if err != nil {
			return nil, warnings, fmt.Errorf("skills.paths: %w", err)
		}
		add(found)
	}
	slices.SortFunc(c.skills, func(a, b Skill) int { return strings.Compare(a.Name, b.Name) })
	return &c, warnings, nil
}

// root is a folder of skills that is being read.
type root struct {
	dir      string // with links followed
	found    []Skill
	warnings []Warning
	visited  map[string]bool
}

// readRoot reads all skills beneath dir.
func readRoot(dir string) ([]Skill, []Warning, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, nil, err
	}
	real, err := filepath.EvalSymlinks(abs)
	if err != nil {
		return nil, nil, err
	}
	r := &root{dir: real, visited: map[string]bool{}}
	if err := r.walk(real, 0); err != nil {
		return nil, r.warnings, err
	}
	return r.found, r.warnings, nil
}

func (r *root) warn(file string, line int, broken bool, format string, args ...any) {
	r.warnings = append(r.warnings, Warning{File: file, Line: line, Text: fmt.Sprintf(format, args...), Broken: broken})
}

// walk looks for skills in dir and beneath. Only the folder of skills itself must
// be readable.
func (r *root) walk(dir string, depth int) error {
	if r.visited[dir] || len(r.visited) >= maxFolders {
		return nil
	}
	r.visited[dir] = true
	entries, err := os.ReadDir(dir)
	if err != nil {
		if depth == 0 {
			return err
		}
		r.warn(dir, 0, true, "the folder cannot be read: %v", cause(err))
		return nil
	}
	if depth > 0 && slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() == FileName }) {
		r.add(dir)
		return nil
	}
	for _, e := range entries {
		sub := filepath.Join(dir, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), "."):
			continue
		case e.Type()&fs.ModeSymlink != 0:
			target, err := filepath.EvalSymlinks(sub)
			info, serr := os.Stat(sub)
			if err != nil || serr != nil || !info.IsDir() {
				continue // to a file, or to nowhere: no skill
			}
			if !beneath(r.dir, target) {
				r.warn(sub, 0, true, "it is a link that leaves %s, and is not followed; copy the skill, or add the folder it lies in to skills.paths", r.dir)
				continue
			}
			sub = target
		case !e.IsDir():
			if depth == 0 && e.Name() == FileName {
				r.warn(sub, 0, true, "a skill needs a folder of its own; want %s", filepath.Join(dir, "NAME", FileName))
			}
			continue
		}
		if depth+1 > MaxDepth {
			continue
		}
		if err := r.walk(sub, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// add reads the skill in dir.
func (r *root) add(dir string) {
	path := filepath.Join(dir, FileName)
	if len(r.found) >= MaxSkills {
		if len(r.found) == MaxSkills {
			r.warn(path, 0, true, "there are more than %d skills in %s; this one and those behind it are left out", MaxSkills, r.dir)
		}
		r.visited[dir] = true
		return
	}
	b, file, err := readFile(dir)
	if err != nil {
		r.warn(path, 0, true, "%v", err)
		return
	}
	p, warnings, err := Parse(b)
	for _, w := range warnings {
		w.File = path
		r.warnings = append(r.warnings, w)
	}
	if err != nil {
		r.warn(path, lineOf(err), true, "%v", err)
		return
	}
	if base := filepath.Base(dir); base != p.Name {
		r.warn(path, 0, false, "the skill is called %s, its folder %s; give both the same name", p.Name, base)
	}
	if i := slices.IndexFunc(r.found, func(s Skill) bool { return s.Name == p.Name }); i >= 0 {
		r.warn(path, 0, true, "there is a skill %s already in %s; this one is left out", p.Name, r.found[i].Dir)
		return
	}
	r.found = append(r.found, Skill{
		Name: p.Name, Description: p.Description, AllowedTools: p.AllowedTools, Enabled: p.Enabled, Dir: dir, Path: path, file: file,
	})
}

// readFile reads the SKILL.md of a folder, and says which file that is. It may be a
// link, but not one that leaves the folder.
func readFile(dir string) (content []byte, file string, err error) {
	in, err := os.OpenRoot(dir)
	if err != nil {
		return nil, "", err
	}
	defer in.Close()
	info, err := in.Stat(FileName)
	switch {
	case err != nil && strings.Contains(err.Error(), "escapes"):
		return nil, "", errors.New("it is a link that leaves the skill's folder; put the file itself there")
	case err != nil:
		return nil, "", cause(err)
	case !info.Mode().IsRegular():
		return nil, "", errors.New("it is no regular file")
	}
	f, err := in.Open(FileName)
	if err != nil {
		return nil, "", cause(err)
	}
	defer f.Close()
	if content, err = io.ReadAll(io.LimitReader(f, MaxFileBytes+1)); err != nil {
		return nil, "", cause(err)
	}
	if file, err = filepath.EvalSymlinks(filepath.Join(dir, FileName)); err != nil {
		return nil, "", cause(err)
	}
	return content, file, nil
}

// cause is an error without the path, which the warning names.
func cause(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

func beneath(dir, p string) bool {
	rel, err := filepath.Rel(dir, p)
	return err == nil && filepath.IsLocal(rel)
}
