package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// remembered is how many ids are kept in memory. A repeat follows the first within
// ten thousands of events; a database has a unique key instead.
const remembered = 100_000

// ledger prints lines and remembers the ids of their events. With a file, line and id
// are written at once, so that a crash can not tell them apart.
type ledger struct {
	file *os.File // nil without one
	ids  map[string]bool
	ring []string // the ids, the oldest at next once it is full
	next int
}

// openLedger reads the lines of an earlier life; an empty path is no file.
func openLedger(path string) (*ledger, error) {
	l := &ledger{ids: map[string]bool{}}
	if path == "" {
		return l, nil
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	l.file = f
	if err := l.read(); err != nil {
		return nil, errors.Join(fmt.Errorf("read %s: %w", path, err), f.Close())
	}
	return l, nil
}

// read notes the last field of each line, and cuts off a last line that is not whole:
// its event was not acknowledged.
func (l *ledger) read() error {
	b, err := io.ReadAll(l.file)
	if err != nil {
		return err
	}
	whole := bytes.LastIndexByte(b, '\n') + 1
	for line := range strings.Lines(string(b[:whole])) {
		if fields := strings.Fields(line); len(fields) > 0 {
			l.remember(fields[len(fields)-1])
		}
	}
	if err := l.file.Truncate(int64(whole)); err != nil {
		return err
	}
	_, err = l.file.Seek(int64(whole), io.SeekStart)
	return err
}

// Has says whether the event was told before.
func (l *ledger) Has(id string) bool { return l.ids[id] }

// Add tells an event: to the file, safely, and then to whoever looks on.
func (l *ledger) Add(id, line string) error {
	line += " " + id + "\n"
	if l.file != nil {
		if _, err := l.file.WriteString(line); err != nil {
			return err
		}
		if err := l.file.Sync(); err != nil {
			return err
		}
	}
	l.remember(id)
	_, err := os.Stdout.WriteString(line)
	return err
}

func (l *ledger) remember(id string) {
	if len(l.ring) < remembered {
		l.ring = append(l.ring, id)
	} else {
		delete(l.ids, l.ring[l.next])
		l.ring[l.next] = id
		l.next = (l.next + 1) % remembered
	}
	l.ids[id] = true
}

// Close closes the file.
func (l *ledger) Close() {
	if l.file != nil {
		_ = l.file.Close()
	}
}
