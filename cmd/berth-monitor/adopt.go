package main

import (
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// reapPatience is how long an adopted init's parent may take to reap it; only
// then the kernel tells its status.
const reapPatience = 3 * time.Second

// adopt takes over a container of a monitor that died, with the descriptors
// that were parked, and finds the others again as far as it can.
func (s *server) adopt(conn *monitor.Conn, info *monitor.Container, fds map[string]int) error {
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	if info == nil || info.ID == "" || !filepath.IsAbs(info.Bundle) || info.PID < 1 {
		return fmt.Errorf("adopt: the request is incomplete")
	}
	if err := s.reserve(info.ID); err != nil {
		return err
	}
	c, err := takeOver(*info, fds)
	s.settle(info.ID, c)
	if err != nil {
		return fmt.Errorf("adopt %s: %w", info.ID, err)
	}
	c.start()
	if err := c.park(conn); err != nil {
		log.Print(err)
	}
	go s.await(c)
	return nil
}

// takeOver makes a container of another process's description and descriptors.
// What it takes of fds is missing there afterwards.
func takeOver(info monitor.Container, fds map[string]int) (*container, error) {
	c := &container{info: info, stdin: -1, buffer: -1, pidfd: -1}
	c.info.Exit = nil
	if c.info.IO.MaxLine < 1 {
		c.info.IO.MaxLine = 16384
	}
	if err := c.takeOver(fds); err != nil {
		if c.log != nil {
			c.close()
		}
		return nil, err
	}
	return c, nil
}

// take removes a descriptor from fds; -1 when it is not there.
func take(fds map[string]int, name string) int {
	fd, ok := fds[name]
	if !ok {
		return -1
	}
	delete(fds, name)
	return fd
}

func (c *container) takeOver(fds map[string]int) (err error) {
	if c.pidfd = take(fds, monitor.FDPid); c.pidfd < 0 {
		if c.pidfd, err = monitor.OpenPidfd(c.info.PID, c.info.StartTime); err != nil {
			return err
		}
	}
	c.stdin = take(fds, monitor.FDStdin)
	if c.buffer = take(fds, monitor.FDBuffer); c.buffer < 0 && c.info.IO.Terminal {
		if c.buffer, err = bufferPipe(); err != nil {
			return err
		}
	}
	if err := c.takeOverLog(take(fds, monitor.FDTape), take(fds, monitor.FDLog)); err != nil {
		return err
	}
	names := [2]string{monitor.FDStdout, monitor.FDStderr}
	if c.info.IO.Terminal {
		names[0] = monitor.FDTTY
	}
	for i, name := range names {
		fd := take(fds, name)
		if fd < 0 && !c.info.IO.Terminal && c.info.Pipes[i] != 0 {
			fd = c.findPipe(c.info.Pipes[i])
		}
		if fd >= 0 {
			_ = unix.SetNonblock(fd, true)
			c.streams[i] = os.NewFile(uintptr(fd), name)
		}
	}
	return nil
}

// takeOverLog goes on with the log. The parked file is right unless the log
// was reopened just before the monitor died; the journal names the right one.
func (c *container) takeOverLog(tapeFD, logFD int) error {
	path := c.info.IO.LogPath
	var t *tape
	var err error
	lost := tapeFD < 0
	if !lost {
		if t, err = openTape(tapeFD, c.info.IO.MaxLine); err != nil {
			log.Printf("adopt %s: %v", c.info.ID, err)
			lost = true
		}
	}
	if lost {
		if t, err = newTape(c.info.IO.MaxLine); err != nil {
			return err
		}
	}
	c.log = &logFile{path: path, tape: t, fd: logFD, inherited: true, lost: lost}
	c.log.dropped.Store(t.get(wordDropped))
	return nil
}

// rightFile makes the parked file, or the one at the path, the log's, whole again where
// the tape is lost. The caller holds l.mu.
func (l *logFile) rightFile() {
	if l.fd < 0 || !l.lost && inode(l.fd) != l.tape.get(wordInode) {
		fd, err := openLog(l.path)
		if err != nil {
			// The daemon's folder went away: go on without a log, say so.
			log.Printf("take over a log: %v", err)
			return
		}
		if l.lost {
			l.tape.set(wordInode, inode(fd))
		}
		if old := l.use(fd); old >= 0 {
			_ = unix.Close(old)
		}
	}
	if l.lost {
		trim(l.fd, l.path)
	}
}

// findPipe opens the read side of a pipe that the container's processes hold;
// -1 when none does.
func (c *container) findPipe(ino uint64) int {
	pids := []int{c.info.PID}
	if dir := c.info.Cgroups.Kill(); dir != "" {
		more, _ := monitor.Processes(dir)
		pids = append(pids, more...)
	}
	for _, pid := range pids {
		dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			if target, err := os.Readlink(path); err != nil || target != fmt.Sprintf("pipe:[%d]", ino) {
				continue
			}
			if fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0); err == nil {
				return fd
			}
		}
	}
	return -1
}

// await waits for the end of an init that is not the monitor's child.
func (s *server) await(c *container) {
	guard("wait for "+c.info.ID, func() {
		dup, err := unix.FcntlInt(uintptr(c.pidfd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			log.Printf("wait for %s: %v", c.info.ID, err)
			return
		}
		_ = unix.SetNonblock(dup, true)
		f := os.NewFile(uintptr(dup), "pidfd")
		defer f.Close()
		raw, err := f.SyscallConn()
		if err == nil {
			err = raw.Read(func(fd uintptr) bool { return pidfdEnded(int(fd)) })
		}
		if err != nil {
			log.Printf("wait for %s: %v", c.info.ID, err)
			return
		}
		at := time.Now()
		for time.Since(at) < reapPatience {
			if status, ok := monitor.PidfdStatus(dup); ok {
				s.ended(c, status, at, "")
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
		s.ended(c, 0, at, "the monitor that was its parent was killed, and this kernel does not tell its status (Linux 6.15 and later do)")
	})
}
