package sandbox

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
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
	// What bitCalls look for, these have in memory, where no filter can look. Programs
	// go on with the older calls.
	unix.SYS_OPENAT2, unix.SYS_CLONE3,
}

// sharedCalls reach memory, queues and semaphores by number: those that others of the
// same user have, and those that stay when all processes are gone. A command that is
// set apart has its own.
var sharedCalls = []uint32{unix.SYS_SHMGET, unix.SYS_SHMAT, unix.SYS_MSGGET, unix.SYS_SEMGET, unix.SYS_MQ_OPEN, unix.SYS_MQ_UNLINK}

// bitCall is a call one of whose arguments may not hold some bits.
type bitCall struct {
	nr, arg, bits uint32
	// flags is the argument that says whether the call makes a file at all; 0: it does,
	// or there is no such question.
	flags uint32
}

// bitCalls may not make a file that runs with the rights of its owner or group: with
// those of the executor's user, whoever starts it outside. Nor may they make a user
// namespace, in which the command is root before a kernel that knows it as nobody.
var bitCalls = []bitCall{
	{unix.SYS_FCHMOD, 1, ownersBits, 0}, {unix.SYS_FCHMODAT, 2, ownersBits, 0}, {unix.SYS_FCHMODAT2, 2, ownersBits, 0},
	{unix.SYS_MKNODAT, 2, ownersBits, 0}, {unix.SYS_OPENAT, 3, ownersBits, 2},
	{unix.SYS_CLONE, 0, unix.CLONE_NEWUSER, 0}, {unix.SYS_UNSHARE, 0, unix.CLONE_NEWUSER, 0},
}

// bitCallsAMD64 are older calls that only amd64 has: open, creat, chmod, mknod.
var bitCallsAMD64 = []bitCall{{2, 2, ownersBits, 1}, {85, 1, ownersBits, 0}, {90, 1, ownersBits, 0}, {133, 1, ownersBits, 0}}

const (
	ownersBits = unix.S_ISUID | unix.S_ISGID
	makesFile  = unix.O_CREAT | unix.O_TMPFILE&^unix.O_DIRECTORY
)

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

// callFilter makes the filter: no sockets but pairs, with network those of families as
// well; nothing shared with others unless the command is set apart.
func callFilter(arch uint32, network, apart bool) []unix.SockFilter {
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
	unknown, calls := unknownCalls, bitCalls
	if !apart {
		unknown = slices.Concat(unknown, sharedCalls)
	}
	if arch == unix.AUDIT_ARCH_X86_64 {
		calls = slices.Concat(calls, bitCallsAMD64)
	}
	for _, nr := range unknown {
		f = append(f, jump(unix.BPF_JEQ, nr, 0, 1), refuse(unix.ENOSYS))
	}
	for _, c := range calls {
		steps := []unix.SockFilter{
			load(dataArg0 + 8*c.arg), jump(unix.BPF_JSET, c.bits, 0, 1), refuse(unix.EPERM), give(unix.SECCOMP_RET_ALLOW),
		}
		if c.flags != 0 {
			steps = append([]unix.SockFilter{load(dataArg0 + 8*c.flags), jump(unix.BPF_JSET, makesFile, 0, 3)}, steps...)
		}
		f = append(append(f, jump(unix.BPF_JEQ, c.nr, 0, uint8(len(steps)))), steps...)
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
func restrictCalls(network, apart bool) error {
	arch, ok := arches[runtime.GOARCH]
	if !ok {
		return errors.New("the filter of system calls does not know " + runtime.GOARCH)
	}
	f := callFilter(arch, network, apart)
	prog := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0); err != nil {
		return fmt.Errorf("filter of system calls: %w", err)
	}
	runtime.KeepAlive(f)
	return nil
}
