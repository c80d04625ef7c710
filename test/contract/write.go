package contract

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
)

// The folders that are written to, below the top folder.
const (
	schemaDir   = "pkg/contract/schema"
	goldenDir   = "pkg/contract/testdata/v1"
	releasedDir = schemaDir + "/released"
)

var releaseName = regexp.MustCompile(`^v1\.[0-9]+$`)

// Files makes all generated files, by their path below the top folder.
func Files(root string) (map[string][]byte, error) {
	out := map[string][]byte{}
	schemas, err := Schemas(root)
	if err != nil {
		return nil, err
	}
	for name, b := range schemas {
		out[schemaDir+"/v1/"+name+".json"] = b
	}
	goldens, err := Goldens()
	if err != nil {
		return nil, err
	}
	for _, g := range goldens {
		if !g.Kept() {
			continue
		}
		path := goldenDir + "/" + g.Name + "." + g.Variant + ".json"
		if out[path], err = g.File(); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	if out[schemaDir+"/vocabulary.json"], err = Vocabulary(); err != nil {
		return nil, err
	}
	out[schemaDir+"/asyncapi.yaml"], err = AsyncAPI()
	return out, err
}

// Write writes all generated files and removes those that are not made any more.
// A release name keeps today's schemas as those of that version as well; released
// schemas are never written again.
func Write(root, release string) error {
	files, err := Files(root)
	if err != nil {
		return err
	}
	if release != "" {
		if !releaseName.MatchString(release) {
			return fmt.Errorf("release %q; want v1.0, v1.1 and so on", release)
		}
		if _, err := os.Stat(filepath.Join(root, releasedDir, release)); err == nil {
			return fmt.Errorf("%s is released already; what was promised is not written again", release)
		}
		schemas, err := Schemas(root)
		if err != nil {
			return err
		}
		for name, b := range schemas {
			files[releasedDir+"/"+release+"/"+name+".json"] = b
		}
	}
	for path, b := range files {
		full := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			return err
		}
		if old, err := os.ReadFile(full); err == nil && string(old) == string(b) {
			continue
		}
		if err := os.WriteFile(full, b, 0o644); err != nil {
			return err
		}
	}
	stale, err := Stale(root, files)
	for _, path := range stale {
		if err := os.Remove(filepath.Join(root, path)); err != nil {
			return err
		}
	}
	return err
}

// Stale lists the files in the generated folders that are not among files.
func Stale(root string, files map[string][]byte) ([]string, error) {
	var out []string
	for _, dir := range []string{schemaDir + "/v1", goldenDir} {
		entries, err := os.ReadDir(filepath.Join(root, dir))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if path := dir + "/" + e.Name(); files[path] == nil {
				out = append(out, path)
			}
		}
	}
	return out, nil
}

// Released reads the schemas of every released version, by version and name.
func Released(root string) (map[string]map[string][]byte, error) {
	out := map[string]map[string][]byte{}
	dir := os.DirFS(filepath.Join(root, releasedDir))
	return out, fs.WalkDir(dir, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := fs.ReadFile(dir, path)
		version, name := filepath.Split(path)
		version = filepath.Clean(version)
		if out[version] == nil {
			out[version] = map[string][]byte{}
		}
		out[version][name[:len(name)-len(filepath.Ext(name))]] = b
		return err
	})
}
