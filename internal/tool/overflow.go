package tool

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"
)

const (
	// outputDir is where output goes that is too long for a result.
	outputDir    = ".tool-output"
	outputPrefix = "bash-"
	outputSuffix = ".txt"
	// maxOverflowBytes is what read_file still takes.
	maxOverflowBytes = maxReadBytes
	// What is kept of such files; beyond it the oldest go. A workspace that is kept in
	// NATS has room for them beside the work.
	maxOutputs      = 100
	maxOutputsBytes = 2 * maxOverflowBytes
	outputAge       = 7 * 24 * time.Hour
)

// overflow is the file of an output that is too long for a result, byte by byte as
// it came. It is made by the first write. That it could not be written is no fault
// of the command; the result says so.
type overflow struct {
	w     *Workspace
	begun bool
	name  string
	f     *os.File
	bytes int64
	cut   bool
	err   error
}

func (o *overflow) write(p []byte) {
	if !o.begun {
		o.begun = true
		o.open()
	}
	if o.err != nil || o.f == nil {
		return
	}
	if room := maxOverflowBytes - o.bytes; int64(len(p)) > room {
		o.cut, p = true, p[:room]
	}
	n, err := o.f.Write(p)
	o.bytes += int64(n)
	o.err = err
}

func (o *overflow) open() {
	if err := o.w.root.Mkdir(outputDir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		o.err = err
		return
	}
	var id [6]byte
	_, _ = rand.Read(id[:]) // never fails
	o.name = path.Join(outputDir, outputPrefix+hex.EncodeToString(id[:])+outputSuffix)
	o.f, o.err = o.w.root.OpenFile(o.name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
}

// close ends the file, removes it unless it is to be kept, and says where it is.
func (o *overflow) close(keep bool) string {
	if o.f != nil {
		if err := o.f.Close(); o.err == nil {
			o.err = err
		}
		if !keep || o.err != nil {
			_ = o.w.root.Remove(o.name) // a rest does no harm
		} else {
			o.w.pruneOutputs(o.name)
		}
	}
	switch {
	case !keep:
		return ""
	case o.err != nil:
		return fmt.Sprintf("(the full output could not be kept: %v)", o.w.explain(outputDir, o.err))
	case o.cut:
		return fmt.Sprintf("(the first %d bytes of the output are in %s)", o.bytes, o.name)
	}
	return fmt.Sprintf("(the full output is in %s, %d bytes)", o.name, o.bytes)
}

// pruneOutputs removes the oldest files of output that are beyond the bounds, but not
// the one that was just made, and nothing that is not ours.
func (w *Workspace) pruneOutputs(newest string) {
	entries, err := fs.ReadDir(w.FS(), outputDir)
	if err != nil {
		return
	}
	var old []fs.FileInfo
	count, bytes := 1, int64(0)
	if info, err := w.root.Lstat(newest); err == nil {
		bytes = info.Size()
	}
	for _, e := range entries {
		name := e.Name()
		if !e.Type().IsRegular() || !strings.HasPrefix(name, outputPrefix) || !strings.HasSuffix(name, outputSuffix) || path.Join(outputDir, name) == newest {
			continue
		}
		if info, err := e.Info(); err == nil {
			old = append(old, info)
		}
	}
	slices.SortFunc(old, func(a, b fs.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	limit := time.Now().Add(-outputAge)
	for _, info := range old {
		count++
		bytes += info.Size()
		if count > maxOutputs || bytes > maxOutputsBytes || info.ModTime().Before(limit) {
			_ = w.root.Remove(path.Join(outputDir, info.Name())) // the next one tries again
		}
	}
}
