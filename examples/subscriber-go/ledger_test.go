package main

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// What an earlier life has told is known, and a line that it could not finish is not.
func TestLedger(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events.log")
	first, err := openLedger(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Add("a.1", "1 task_queued"); err != nil {
		t.Fatal(err)
	}
	if _, err := first.file.WriteString("2 task_admitted a.2"); err != nil { // killed before the line's end
		t.Fatal(err)
	}
	first.Close()
	second, err := openLedger(path)
	if err != nil {
		t.Fatal(err)
	}
	if !second.Has("a.1") || second.Has("a.2") {
		t.Errorf("known: a.1 %v, a.2 %v; want the first only", second.Has("a.1"), second.Has("a.2"))
	}
	if err := second.Add("a.2", "2 task_admitted"); err != nil {
		t.Fatal(err)
	}
	second.Close()
	got, err := os.ReadFile(path)
	if want := "1 task_queued a.1\n2 task_admitted a.2\n"; err != nil || string(got) != want {
		t.Errorf("the file has %q, %v; want %q", got, err, want)
	}
}

// Memory does not grow with the events.
func TestLedgerForgets(t *testing.T) {
	l, err := openLedger("")
	if err != nil {
		t.Fatal(err)
	}
	for i := range remembered + 10 {
		l.remember(strconv.Itoa(i))
	}
	if len(l.ids) != remembered || l.Has("9") || !l.Has("10") {
		t.Errorf("%d ids, 9 known %v, 10 known %v; want %d, the oldest forgotten", len(l.ids), l.Has("9"), l.Has("10"), remembered)
	}
}
