package sandbox

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Landlock knows paths and TCP ports, but neither UDP nor the sockets of services
// that lie at a path (of a container engine, of a desktop), through which a command
// would leave its place. A filter of system calls knows the kind of every socket
// before there is one. It needs no rights, cannot be taken off, and holds for all
// that the command starts.

// arches are the machines whose system calls the filter knows. Those that reach
// sockets through one common call (386, s390x) are none of them.
var arches = map[string]uint32{
	"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64,
	"riscv64": unix.AUDIT_ARCH_RISCV64, "loong64": unix.AUDIT_ARCH_LOONGARCH64,
}

// x32Bit marks the system calls of a second table of amd64.
const x32Bit = 0x40000000

// unknownCalls are answered as by a kernel without them: io_uring makes sockets past
// the filter; the others reach keys that belong to us, or are for tools that look
// into the kernel.
var unknownCalls = []uint32{
	unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD,
}

// families are the kinds of sockets a command with network may make. The last one
// tells about interfaces and routes.
var families = []uint32{unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}

func filterAvailable() (bool, string) {
	if _, ok := arches[runtime.GOARCH]; !ok {
		return false, "the filter of system calls does not know " + runtime.GOARCH
	}
	action := uint32(unix.SECCOMP_RET_ERRNO)
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_ACTION_AVAIL, 0, uintptr(unsafe.Pointer(&action))); errno != 0 {
		return false, "the kernel has no filter of system calls (seccomp): " + errno.Error()
	}
	return true, ""
}

// Places in the data that the kernel gives to a filter.
const (
	dataCall = 0
	dataArch = 4
	dataArg0 = 16 // its lower half: all machines above put that first
)

// socketFilter makes the filter: no sockets but pairs, with network those of
// families as well.
func socketFilter(arch uint32, network bool) []unix.SockFilter {
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	jump := func(test uint16, k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | test | unix.BPF_K, K: k, Jt: yes, Jf: no}
	}
	give := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	refuse := func(errno unix.Errno) unix.SockFilter { return give(unix.SECCOMP_RET_ERRNO | uint32(errno)) }
	f := []unix.SockFilter{
		load(dataArch),
		jump(unix.BPF_JEQ, arch, 1, 0),
		give(unix.SECCOMP_RET_KILL_PROCESS), // a program for another machine: its calls have other numbers
		load(dataCall),
	}
	if arch == unix.AUDIT_ARCH_X86_64 {
		f = append(f, jump(unix.BPF_JGE, x32Bit, 0, 1), refuse(unix.ENOSYS))
	}
	for _, nr := range unknownCalls {
		f = append(f, jump(unix.BPF_JEQ, nr, 0, 1), refuse(unix.ENOSYS))
	}
	f = append(f, jump(unix.BPF_JEQ, unix.SYS_SOCKET, 1, 0), give(unix.SECCOMP_RET_ALLOW), load(dataArg0))
	if network {
		for _, family := range families {
			f = append(f, jump(unix.BPF_JEQ, family, 0, 1), give(unix.SECCOMP_RET_ALLOW))
		}
	}
	return append(f, refuse(unix.EACCES))
}

// restrictCalls puts the filter on this thread, and so on what it becomes. There
// must be no new privileges already.
func restrictCalls(network bool) error {
	arch, ok := arches[runtime.GOARCH]
	if !ok {
		return errors.New("the filter of system calls does not know " + runtime.GOARCH)
	}
	f := socketFilter(arch, network)
	prog := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0); err != nil {
		return fmt.Errorf("filter of system calls: %w", err)
	}
	runtime.KeepAlive(f)
	return nil
}
