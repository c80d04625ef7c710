package tool

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
)

const (
	// outputDir is where output goes that is too long for a result.
	outputDir = ".tool-output"
	// maxOverflowBytes is what read_file still takes.
	maxOverflowBytes = maxReadBytes
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
	o.name = path.Join(outputDir, "bash-"+hex.EncodeToString(id[:])+".txt")
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
