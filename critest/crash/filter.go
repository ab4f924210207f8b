package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// listenerSocket names the socket to which a program that is to be supervised
// hands the listener of its filter, before it becomes the daemon.
const listenerSocket = "BERTH_CRASH_LISTENER"

// changing are the system calls that change something and that Go programs use,
// by number. A write is not among them: a full disk is another test. Of messages
// those count that daemon and monitor send each other.
var changing = map[int32]string{
	unix.SYS_RENAMEAT: "renameat", unix.SYS_RENAMEAT2: "renameat2", unix.SYS_MKDIRAT: "mkdirat", unix.SYS_MKNODAT: "mknodat",
	unix.SYS_UNLINKAT: "unlinkat", unix.SYS_SYMLINKAT: "symlinkat", unix.SYS_LINKAT: "linkat", unix.SYS_OPENAT: "openat",
	unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_FSYNC: "fsync", unix.SYS_FDATASYNC: "fdatasync", unix.SYS_SYNCFS: "syncfs",
	unix.SYS_FCHMODAT: "fchmodat", unix.SYS_FCHOWNAT: "fchownat", unix.SYS_FCHMOD: "fchmod", unix.SYS_FCHOWN: "fchown",
	unix.SYS_MOUNT: "mount", unix.SYS_UMOUNT2: "umount2", unix.SYS_MOVE_MOUNT: "move_mount", unix.SYS_OPEN_TREE: "open_tree",
	unix.SYS_FSOPEN: "fsopen", unix.SYS_FSMOUNT: "fsmount", unix.SYS_MOUNT_SETATTR: "mount_setattr",
	unix.SYS_SETNS: "setns", unix.SYS_UNSHARE: "unshare", unix.SYS_SETHOSTNAME: "sethostname",
	unix.SYS_PIDFD_OPEN: "pidfd_open", unix.SYS_PIDFD_SEND_SIGNAL: "pidfd_send_signal", unix.SYS_PIPE2: "pipe2",
	unix.SYS_MEMFD_CREATE: "memfd_create", unix.SYS_SENDMSG: message,
}

// message is the call that sends one.
const message = "sendmsg"

// pathArgument is where a call has the path that it changes; the directory that a
// relative one begins at is the argument before. No entry: it has no path.
var pathArgument = map[string]int{
	"renameat": 3, "renameat2": 3, "mkdirat": 1, "mknodat": 1, "unlinkat": 1, "symlinkat": 2, "linkat": 3, "openat": 1,
	"fchmodat": 1, "fchownat": 1, "mount": 1, "umount2": 0, "move_mount": 3, "open_tree": 1,
}

// fileArgument is where a call without a path has a descriptor.
var fileArgument = map[string]int{"ftruncate": 0, "fsync": 0, "fdatasync": 0, "syncfs": 0, "fchmod": 0, "fchown": 0}

// beSupervised has the program's own calls of changing, and those of all that it
// starts, wait for whoever listens, and becomes the given program. It returns
// on errors only.
func beSupervised(argv []string) error {
	runtime.LockOSThread() // the filter is the thread's, which execve makes the process's
	fd, err := filterCalls()
	if err != nil {
		return fmt.Errorf("filter system calls: %w", err)
	}
	if err := handOver(fd); err != nil {
		return fmt.Errorf("hand the filter over: %w", err)
	}
	_ = unix.Close(fd)
	if err := os.Unsetenv(listenerSocket); err != nil {
		return err
	}
	return fmt.Errorf("start %s: %w", argv[0], syscall.Exec(argv[0], argv, os.Environ()))
}

// handOver tells the number of the filter's listener and waits until it was taken: to
// send it along would be a call that waits for whoever has it.
func handOver(fd int) error {
	c, err := net.Dial("unix", os.Getenv(listenerSocket))
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := fmt.Fprintln(c, fd); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 1))
	return err
}

// takeOver takes what handOver offers.
func takeOver(c *net.UnixConn) (int, error) {
	var theirs int
	if _, err := fmt.Fscanln(c, &theirs); err != nil {
		return 0, err
	}
	_, pid, err := monitor.NewConn(c).Peer()
	if err != nil {
		return 0, err
	}
	of, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(of)
	fd, err := unix.PidfdGetfd(of, theirs, 0)
	if err == nil {
		_, err = c.Write([]byte{0})
	}
	return fd, err
}

// filterCalls puts a filter on this thread and returns its listener. Of openat
// only calls that may make a file are told.
func filterCalls() (int, error) {
	const number, thirdArgument = 0, 32 // offsets in struct seccomp_data
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	skip := func(code uint16, value uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_K | code, K: value, Jt: yes, Jf: no}
	}
	answer := func(value uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: value} }
	program := []unix.SockFilter{
		load(number), skip(unix.BPF_JEQ, unix.SYS_OPENAT, 0, 4),
		load(thirdArgument), skip(unix.BPF_JSET, unix.O_CREAT, 0, 1), answer(unix.SECCOMP_RET_USER_NOTIF), answer(unix.SECCOMP_RET_ALLOW),
	}
	for nr := range changing {
		if nr != unix.SYS_OPENAT {
			program = append(program, skip(unix.BPF_JEQ, uint32(nr), 0, 1), answer(unix.SECCOMP_RET_USER_NOTIF))
		}
	}
	program = append(program, answer(unix.SECCOMP_RET_ALLOW))
	f := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	// Signals that do not kill must not break a call off that waits, or it comes twice.
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	fd, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&f)))
	if errno != 0 {
		return 0, errno
	}
	return int(fd), nil
}

// notification is struct seccomp_notif.
type notification struct {
	ID    uint64
	PID   uint32 // of the thread
	Flags uint32
	Data  struct {
		Number int32
		Arch   uint32
		IP     uint64
		Args   [6]uint64
	}
}

// response is struct seccomp_notif_resp.
type response struct {
	ID    uint64
	Value int64
	Error int32
	Flags uint32
}

// receive waits for the next call; false when nobody is left who could make one.
func receive(listener int, n *notification) bool {
	for {
		poll := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return false
		}
		if poll[0].Revents&unix.POLLIN == 0 {
			if poll[0].Revents&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0 {
				return false
			}
			continue
		}
		*n = notification{}
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(n)))
		if errno == 0 {
			return true
		}
		if errno != unix.ENOENT && errno != unix.EINTR { // whoever called was killed meanwhile
			return false
		}
	}
}

// respond lets a call go on, or fail with errno.
func respond(listener int, id uint64, errno syscall.Errno) {
	r := response{ID: id, Flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
	if errno != 0 {
		r.Error, r.Flags = -int32(errno), 0
	}
	// ENOENT when the caller was killed meanwhile.
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&r)))
}
