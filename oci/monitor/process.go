package monitor

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// stat is what berth reads of /proc/<pid>/stat.
type stat struct {
	state     byte
	ppid      int
	session   int
	startTime uint64
}

func readStat(pid int) (stat, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, err
	}
	end := bytes.LastIndexByte(data, ')')
	f := strings.Fields(string(data[end+1:]))
	if end < 0 || len(f) < 20 {
		return stat{}, fmt.Errorf("parse /proc/%d/stat: %q", pid, data)
	}
	s := stat{state: f[0][0]}
	s.ppid, _ = strconv.Atoi(f[1])
	s.session, _ = strconv.Atoi(f[3])
	s.startTime, err = strconv.ParseUint(f[19], 10, 64)
	return s, err
}

// StartTime reads when a process began, in clock ticks since boot. A zombie
// still has one; os.ErrNotExist when there is no such process.
func StartTime(pid int) (uint64, error) {
	s, err := readStat(pid)
	return s.startTime, err
}

// State is a process's or thread's state, as ps(1) shows it, and its parent; not ok
// when it is gone.
func State(pid int) (state string, parent int, ok bool) {
	s, err := readStat(pid)
	return string(s.state), s.ppid, err == nil
}

// Children are the pids of a process's children, zombies too; none when it is gone.
// It needs CONFIG_PROC_CHILDREN, which every distribution's kernel has.
func Children(pid int) (pids []int) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		data, _ := os.ReadFile(f)
		for _, text := range strings.Fields(string(data)) {
			if child, err := strconv.Atoi(text); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

// Threads are the thread ids of a process; none when it is gone.
func Threads(pid int) (tids []int) {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, e := range entries {
		if tid, err := strconv.Atoi(e.Name()); err == nil {
			tids = append(tids, tid)
		}
	}
	return tids
}

// OpenPidfd opens a pidfd of the process that has pid and startTime. With any
// other process, or none, it is unix.ESRCH.
func OpenPidfd(pid int, startTime uint64) (int, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return -1, fmt.Errorf("open pidfd of %d: %w", pid, err)
	}
	unix.CloseOnExec(fd)
	// The pidfd pins the process, so what stat says afterwards is about it or
	// about nothing.
	if t, err := StartTime(pid); err != nil || t != startTime || unix.PidfdSendSignal(fd, 0, nil, 0) == unix.ESRCH && !readable(fd) {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("open pidfd of %d: %w", pid, unix.ESRCH)
	}
	return fd, nil
}

// Ended tells whether the process that had pid and startTime has ended; whoever
// waits for it may not know yet.
func Ended(pid int, startTime uint64) bool {
	fd, err := OpenPidfd(pid, startTime)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	return readable(fd)
}

// readable polls without waiting. For a pidfd: the process has ended.
func readable(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1
}

// PidfdStatus asks the kernel how the process of a pidfd ended. It knows once
// the process was reaped, whoever did that; Linux 6.15 and later.
func PidfdStatus(fd int) (unix.WaitStatus, bool) {
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	if err := unix.IoctlPidfdInfo(fd, &info); err != nil || info.Mask&unix.PIDFD_INFO_EXIT == 0 {
		return 0, false
	}
	return unix.WaitStatus(info.Exit_code), true
}

// Code turns a wait status into CRI's exit code.
func Code(s unix.WaitStatus) int32 {
	if s.Signaled() {
		return 128 + int32(s.Signal())
	}
	return int32(s.ExitStatus())
}
