package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// A control group adds to the supervisor what that cannot do: everything in it is
// killed in one step, however fast it forks; and the program can do that itself if
// an unconfined command has killed the supervisor. It needs a kernel with
// cgroup.kill (5.14) and the right to make groups below our own one, which root and
// services with delegation have; else there is none, and nothing else changes.

// ownCgroup is the folder of this process's control group, or empty.
var ownCgroup = sync.OnceValue(func() string {
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return ""
	}
	return cgroupFolder(string(groups), string(mounts))
})

// cgroupFolder finds where a process's group of version 2 is mounted.
func cgroupFolder(groups, mounts string) string {
	path, found := "", false
	for line := range strings.Lines(groups) {
		if p, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			path, found = p, true
		}
	}
	if !found {
		return ""
	}
	for line := range strings.Lines(mounts) {
		// id parent device root mountpoint options [tags…] - type …
		fields := strings.Fields(line)
		before, after, ok := strings.Cut(line, " - ")
		if !ok || len(fields) < 5 || !strings.HasPrefix(after, "cgroup2 ") || len(strings.Fields(before)) < 5 {
			continue
		}
		if rel, err := filepath.Rel(fields[3], path); err == nil && !strings.HasPrefix(rel, "..") {
			return filepath.Join(fields[4], rel)
		}
	}
	return ""
}

// makeCgroup makes a control group for one command; empty if there can be none.
func makeCgroup(mark string) string {
	own := ownCgroup()
	if own == "" {
		return ""
	}
	dir := filepath.Join(own, "herdgate-"+mark)
	if os.Mkdir(dir, 0o755) != nil {
		return ""
	}
	if _, err := os.Stat(filepath.Join(dir, "cgroup.kill")); err != nil {
		removeCgroup(dir)
		return ""
	}
	return dir
}

// boundCgroup bounds what is in a group, as far as the controllers for that reach
// it. It reports whether the number of processes is bounded.
func boundCgroup(dir string, l Limits) bool {
	if dir == "" {
		return false
	}
	set := func(file string, n uint64) bool {
		f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
		if err != nil {
			return false
		}
		_, err = f.WriteString(strconv.FormatUint(n, 10))
		return errors.Join(err, f.Close()) == nil
	}
	set("memory.max", l.MemoryBytes) // of all together; each is bounded anyway
	return set("pids.max", l.Processes)
}

// killCgroup kills all that is in a group.
func killCgroup(dir string) {
	if dir != "" {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0) // gone is fine
	}
}

// removeCgroup removes a group that is empty.
func removeCgroup(dir string) {
	if dir != "" {
		_ = os.Remove(dir) // gone is fine
	}
}
