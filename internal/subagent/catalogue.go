package subagent

import (
	"slices"
	"sync"
	"sync/atomic"
)

// File is a definition of a Markdown file.
type File struct {
	Custom
	// Path is where it stands, for people.
	Path string
}

// Catalogue holds the registry that is in force, and makes a new one when files
// or managed definitions change. Readers never wait. It is safe for concurrent
// use.
type Catalogue struct {
	now atomic.Pointer[Registry]

	mu  sync.Mutex
	cfg Config
}

// NewCatalogue checks cfg as [NewRegistry] does.
func NewCatalogue(cfg Config) (*Catalogue, error) {
	r, err := NewRegistry(cfg)
	if err != nil {
		return nil, err
	}
	c := &Catalogue{cfg: cfg}
	c.now.Store(r)
	return c, nil
}

// Current is the registry in force. What is to be consistent takes it once.
func (c *Catalogue) Current() *Registry { return c.now.Load() }

// SetFiles replaces the definitions of files.
func (c *Catalogue) SetFiles(files []File) {
	c.change(func(cfg *Config) { cfg.Files = slices.Clone(files) })
}

// SetManaged replaces the definitions of administrators.
func (c *Catalogue) SetManaged(list []Stored) {
	c.change(func(cfg *Config) { cfg.Managed = slices.Clone(list) })
}

func (c *Catalogue) change(f func(*Config)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := c.cfg
	f(&next)
	r, err := NewRegistry(next)
	if err != nil {
		return // the rest was checked before, and these two layers fail nothing
	}
	c.cfg = next
	c.now.Store(r)
}

// Entries is that of the registry in force.
func (c *Catalogue) Entries() []Entry { return c.Current().Entries() }

// Visible is that of the registry in force.
func (c *Catalogue) Visible(allowed []string, shellAllowed bool) []Definition {
	return c.Current().Visible(allowed, shellAllowed)
}
