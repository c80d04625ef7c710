package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// DefaultFile is the file that is read when none is named and it exists.
const DefaultFile = "./herdgate.yaml"

// Options say where a configuration comes from.
type Options struct {
	// File is the configuration file; "" means DefaultFile.
	File string
	// FileExplicit: the user named the file, so it must exist.
	FileExplicit bool
	// Env is the environment as from os.Environ. Nil: no variable is looked at.
	Env []string
}

// Load reads the configuration. Everything that is wrong with it comes in one
// [*Error]; other errors are those of reading the file.
func Load(o Options) (Config, error) {
	file := o.File
	if file == "" {
		file = DefaultFile
	}
	data, err := read(file)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !o.FileExplicit:
		data = nil
	case err != nil:
		return Config{}, err
	}
	cfg, faults := Check(file, data, o.Env)
	if len(faults) > 0 {
		return Config{}, &Error{Faults: faults}
	}
	return cfg, nil
}

// read reads a file, but not more of it than a fault about its size needs.
func read(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	if info.IsDir() {
		return nil, fmt.Errorf("config: %s is a folder; want a file", file)
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("config: %s: %w", file, err)
	}
	return data, nil
}
