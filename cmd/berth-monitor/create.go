package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
	"berth/sandbox/regular"
)

// creation is a container on its way.
type creation struct {
	s   *server
	r   *monitor.Create
	key call
	c   *container

	child   [3]*os.File // the container's ends; closed when create has run
	console *net.UnixListener
}

// create spawns the OCI runtime's create and takes over the init it leaves.
// What the runtime made before a failure is the daemon's to remove.
func (s *server) create(key call, r *monitor.Create) (*monitor.Container, error) {
	if r == nil || r.ID == "" || len(r.Args) == 0 || !filepath.IsAbs(r.Args[0]) || !filepath.IsAbs(r.Bundle) || r.PidFile == "" || r.IO.MaxLine < 1 || r.IO.MaxLine > 1<<20 {
		return nil, errors.New("create: the request is incomplete")
	}
	if err := s.reserve(r.ID); err != nil {
		return nil, err
	}
	k := &creation{s: s, r: r, key: key, c: &container{child: true, pidfd: -1, stdin: -1, buffer: -1}}
	err := errors.New("create: panic in the monitor; see its log")
	guard("create "+r.ID, func() { err = k.run() })
	k.closeChild()
	if err != nil {
		s.settle(r.ID, nil)
		if k.c.log != nil {
			k.c.close()
		}
		return nil, err
	}
	c := k.c
	s.settle(r.ID, c)
	c.start()
	s.tell(c.park)
	s.watch(c)
	s.reaper.release()
	return &c.info, nil
}

// watch waits for the end of an init that is the monitor's child.
func (s *server) watch(c *container) {
	s.reaper.watch(c.info.PID, func(e ended) {
		c.reaped.Store(&e)
		go s.ended(c, e.status, e.at, "")
	})
}

// run does the work; without an error the caller must call reaper.release.
func (k *creation) run() error {
	k.c.info = monitor.Container{Version: monitor.Version, ID: k.r.ID, Bundle: k.r.Bundle, IO: k.r.IO}
	if err := k.openOutput(); err != nil {
		return err
	}
	if err := k.openInput(); err != nil {
		return err
	}
	end, stop, err := k.spawn()
	if err != nil {
		return err
	}
	err = k.await(end, stop)
	if err == nil {
		err = k.leaveCgroup()
	}
	if err == nil {
		err = k.identify()
	}
	if err != nil {
		_ = os.Remove(k.r.PidFile) // a cancelled create may have come that far
		k.s.reaper.release()
	}
	return err
}

// openOutput opens the log and makes the pipes, or listens for the pty.
func (k *creation) openOutput() error {
	t, err := newTape(k.r.IO.MaxLine)
	if err != nil {
		return err
	}
	k.c.log = &logFile{path: k.r.IO.LogPath, tape: t, fd: -1}
	if k.r.IO.LogPath != "" {
		if k.c.log.fd, err = openLog(k.r.IO.LogPath); err != nil {
			return err
		}
		t.set(wordInode, inode(k.c.log.fd))
	}
	if k.r.IO.Terminal {
		_ = os.Remove(k.r.ConsoleSocket)
		k.console, err = net.ListenUnix("unix", &net.UnixAddr{Name: k.r.ConsoleSocket, Net: "unix"})
		if err != nil {
			return fmt.Errorf("listen for the console: %w", err)
		}
		if k.c.buffer, err = bufferPipe(); err != nil {
			return err
		}
		// Nobody else's output must get lost, so the runtime's own goes to a pipe.
		k.child[1], k.child[2], err = os.Pipe()
		if err != nil {
			return fmt.Errorf("make pipe: %w", err)
		}
		return nil
	}
	for i := range k.c.streams {
		if k.c.streams[i], k.child[1+i], err = pipe(k.r.IO.UID, k.r.IO.GID); err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Fstat(rawFD(k.child[1+i]), &st); err != nil {
			return fmt.Errorf("inspect pipe: %w", err)
		}
		k.c.info.Pipes[i] = st.Ino
	}
	return nil
}

func (k *creation) openInput() (err error) {
	if !k.r.IO.Stdin || k.r.IO.Terminal {
		k.child[0], err = os.Open(os.DevNull)
		return err
	}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return fmt.Errorf("make pipe of stdin: %w", err)
	}
	k.child[0], k.c.stdin = os.NewFile(uintptr(p[0]), "stdin"), p[1]
	if err := unix.Fchown(p[0], int(k.r.IO.UID), int(k.r.IO.GID)); err != nil {
		return fmt.Errorf("give stdin to uid %d: %w", k.r.IO.UID, err)
	}
	return nil
}

// spawn starts the create; stop kills it.
func (k *creation) spawn() (end <-chan ended, stop func(), err error) {
	files := k.child[:]
	if k.r.IO.Terminal {
		files = []*os.File{k.child[0], k.child[2], k.child[2]}
	}
	attr := &os.ProcAttr{Dir: k.r.Bundle, Env: os.Environ(), Files: files,
		// A create must not go on when nobody can take over what it makes.
		Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}}
	if k.r.Cgroup != "" {
		cgroup, err := os.Open(k.r.Cgroup)
		if err != nil {
			return nil, nil, fmt.Errorf("open cgroup of a create: %w", err)
		}
		defer cgroup.Close()
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(cgroup.Fd())
	}
	pid, end, err := k.s.reaper.spawn(k.r.Args, attr)
	if err != nil {
		return nil, nil, &monitor.Error{Text: fmt.Sprintf("start %s: %v", k.r.Args[0], err), Command: true, ExitCode: -1}
	}
	return end, func() { _ = unix.Kill(-pid, unix.SIGKILL) }, nil
}

// leaveCgroup takes what create has made out of the cgroup of the command, which
// whoever follows a killed daemon kills. Where version 1 counts, or the container has
// no cgroup of its own, its init is still there.
func (k *creation) leaveCgroup() error {
	if k.r.Cgroup == "" {
		return nil
	}
	own, err := monitor.OwnCgroup()
	if err != nil {
		return err
	}
	return monitor.DissolveCgroup(k.r.Cgroup, own)
}

// await waits for the create's end and, with a pty, for its master.
func (k *creation) await(end <-chan ended, stop func()) error {
	cancelled := make(chan struct{})
	k.s.mu.Lock()
	k.s.cancels[k.key] = func() { stop(); close(cancelled) }
	k.s.mu.Unlock()
	master := make(chan int, 1)
	if k.console != nil {
		go func() { master <- monitor.ReceiveConsole(k.console) }()
	}
	talk := k.listen()
	e := <-end
	k.s.mu.Lock()
	delete(k.s.cancels, k.key)
	k.s.mu.Unlock()
	var tty = -1
	if k.console != nil {
		_ = k.console.SetDeadline(time.Now().Add(time.Second)) // it was sent before create ended
		tty = <-master
		if tty >= 0 {
			k.c.streams[0] = os.NewFile(uintptr(tty), "tty")
		}
	}
	select {
	case <-cancelled:
		talk.end(nil)
		return errors.New("create was cancelled")
	default:
	}
	if code := monitor.Code(e.status); code != 0 {
		return &monitor.Error{Text: fmt.Sprintf("%s ended with code %d", filepath.Base(k.r.Args[0]), code),
			Command: true, ExitCode: int(code), Stderr: k.complaint(talk)}
	}
	talk.end(k.child[:])
	if k.console != nil && tty < 0 {
		return errors.New("the OCI runtime sent no console")
	}
	return nil
}

// complaint is what a failed create wrote to its stderr, which would have
// become the container's.
func (k *creation) complaint(t talk) string {
	f := k.c.streams[1]
	if k.r.IO.Terminal {
		f = k.child[1]
	}
	_ = k.child[2].Close()
	said := t.end(nil)
	if len(said) < 4096 {
		_ = f.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		more, _ := io.ReadAll(io.LimitReader(f, int64(4096-len(said))))
		said = append(said, more...)
	}
	return strings.TrimSpace(string(said[max(0, len(said)-4096):]))
}

// identify learns who the init is and writes monitor.json.
func (k *creation) identify() error {
	data, err := regular.Read(k.r.PidFile, regular.Most)
	if err != nil {
		return fmt.Errorf("read pid file: %w", err)
	}
	_ = os.Remove(k.r.PidFile)
	c := k.c
	if c.info.PID, err = strconv.Atoi(strings.TrimSpace(string(data))); err != nil {
		return fmt.Errorf("parse pid file: %w", err)
	}
	// The init may be dead already; its exit then follows at once.
	if c.info.StartTime, err = monitor.StartTime(c.info.PID); err == nil {
		c.pidfd, err = monitor.OpenPidfd(c.info.PID, c.info.StartTime)
	}
	if err != nil {
		return fmt.Errorf("the init, pid %d, ended before it was started: %w", c.info.PID, err)
	}
	c.info.Cgroups, err = monitor.CgroupsOf(c.info.PID)
	if err != nil && !errors.Is(err, monitor.ErrSharedCgroup) {
		return err
	}
	c.info.OOMKills = c.info.Cgroups.OOMKills()
	return monitor.WriteContainer(c.info)
}

func (k *creation) closeChild() {
	for _, f := range k.child {
		if f != nil {
			_ = f.Close()
		}
	}
	if k.console != nil {
		_ = k.console.Close()
		_ = os.Remove(k.r.ConsoleSocket)
	}
}
