package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// stateFormat is of what one build hands to the next. It changes when an older
// build would misunderstand; fields that it does not know it passes over. A build
// takes the formats from oldestFormat to its own.
const (
	stateFormat  = 1
	oldestFormat = 1
)

// state is what a monitor hands to the build that it becomes, as JSON in a memfd.
// Descriptors are numbers: they survive execve.
type state struct {
	Format     int               `json:"format"`
	Lock       int               `json:"lock"`
	Directory  int               `json:"directory,omitempty"` // the lock of the socket's directory
	Listener   int               `json:"listener"`
	Door       place             `json:"door"` // of the socket's file
	Containers []savedContainer  `json:"containers"`
	Kills      map[string]uint64 `json:"kills,omitempty"` // see parentKills.strange, by directory
}

type savedContainer struct {
	Info     monitor.Container `json:"info"`
	FDs      map[string]int    `json:"fds,omitempty"` // by the names that parking has for them
	Child    bool              `json:"child,omitempty"`
	Reaped   *savedEnd         `json:"reaped,omitempty"` // its end is being recorded
	Sessions []savedViewer     `json:"sessions,omitempty"`
}

type savedEnd struct {
	Status unix.WaitStatus `json:"status"`
	At     time.Time       `json:"at"`
}

type savedViewer struct {
	ID      uint64   `json:"id"`
	Out     [2]int   `json:"out"`
	Skipped [2]int64 `json:"skipped"`
	Input   bool     `json:"input,omitempty"`
}

// taken is what a build says that could take over a state.
const taken = "berth-monitor: this state can be taken over"

// checkLimit is how long another build may take to look at the state.
const checkLimit = 10 * time.Second

// makePatience is how long a renewal waits for containers that are being made.
const makePatience = 5 * time.Second

var errRenewing = errors.New("the monitor is being renewed")

// renew becomes another build in place and returns only with an error, after
// which everything goes on as before. Nothing stops for it: like kill -9, execve
// may come at any instant, for all that was read is in the tapes. What only this
// process knows is in the state.
func (s *server) renew(m *monitor.Message) error {
	binary := m.Binary
	if !filepath.IsAbs(binary) {
		return fmt.Errorf("renew: %q is no absolute path", binary)
	}
	if err := s.hold(); err != nil {
		return err
	}
	defer s.goOn()
	draft, fds, err := s.save()
	if err != nil {
		return err
	}
	err = s.try([]string{binary, "--check-state", "--newest", strconv.Itoa(m.Version), "--oldest", strconv.Itoa(m.Oldest)}, draft)
	closeAll(append(fds, draft))
	if err == nil {
		err = s.hanging()
	}
	if err != nil {
		return fmt.Errorf("renew: %w", err)
	}
	s.reaper.mu.Lock() // no end is waited for any more but by the next build
	defer s.reaper.mu.Unlock()
	file, fds, err := s.save()
	if err != nil {
		return err
	}
	defer closeAll(append(fds, file))
	for _, fd := range append(fds, file) {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
			return fmt.Errorf("renew: keep descriptor %d: %w", fd, err)
		}
	}
	err = unix.Exec(binary, []string{binary, "--socket", s.socket, "--resume", strconv.Itoa(file)}, os.Environ())
	return fmt.Errorf("renew: execute %s: %w", binary, err)
}

// hold lets nothing begin that a renewal would break off, and waits for what a
// daemon that is gone has begun.
func (s *server) hold() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.renewing {
		return errRenewing
	}
	s.renewing = true
	for end := time.Now().Add(makePatience); ; {
		id, made := s.unmade()
		if made {
			return nil
		}
		if time.Now().After(end) {
			s.renewing = false
			return fmt.Errorf("renew: container %s is being made", id)
		}
		s.mu.Unlock()
		time.Sleep(5 * time.Millisecond)
		s.mu.Lock()
	}
}

// unmade is a container on its way, if there is one. The caller holds s.mu.
func (s *server) unmade() (id string, none bool) {
	for id, c := range s.containers {
		if c == nil {
			return id, false
		}
	}
	return "", true
}

func (s *server) goOn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.renewing = false
}

// save writes the state to a memfd. It and the duplicates that it speaks of
// belong to the caller.
func (s *server) save() (file int, fds []int, err error) {
	st := state{Format: stateFormat, Kills: s.kills.save()}
	keep := func(fd int) int {
		if dup := duplicate(fd); dup >= 0 {
			fds = append(fds, dup)
			return dup
		}
		return -1
	}
	defer func() {
		if err != nil {
			closeAll(fds)
		}
	}()
	st.Lock, st.Directory = keep(rawFD(s.lock.File)), keep(rawFD(s.lock.Directory))
	st.Listener, st.Door = s.door.save(keep)
	for _, c := range s.all() {
		info, names, dups := c.duplicates()
		fds = append(fds, dups...)
		saved := savedContainer{Info: info, Child: c.child, FDs: map[string]int{}}
		for i, name := range names {
			saved.FDs[name] = dups[i]
		}
		if e := c.reaped.Load(); e != nil {
			saved.Reaped = &savedEnd{e.status, e.at}
		}
		saved.Sessions = c.viewers.save(keep)
		st.Containers = append(st.Containers, saved)
	}
	data, err := json.Marshal(st)
	if err != nil {
		return -1, nil, fmt.Errorf("encode the state: %w", err)
	}
	if file, err = unix.MemfdCreate("berth-state", unix.MFD_CLOEXEC); err != nil {
		return -1, nil, fmt.Errorf("make memfd for the state: %w", err)
	}
	for off := 0; off < len(data); {
		n, werr := unix.Pwrite(file, data[off:], int64(off))
		if werr != nil {
			_ = unix.Close(file)
			return -1, nil, fmt.Errorf("write the state: %w", werr)
		}
		off += n
	}
	return file, fds, nil
}

// save makes duplicates of the viewers' sockets with keep.
func (vs *viewers) save(keep func(int) int) (all []savedViewer) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for k, v := range vs.sessions {
		all = append(all, savedViewer{ID: k.id, Out: [2]int{keep(v.out[0]), keep(v.out[1])}, Skipped: v.skipped, Input: v.input})
	}
	return all
}

// try lets another build read the state and say whether it can go on from it.
func (s *server) try(argv []string, file int) error {
	answer, err := unix.MemfdCreate("berth-answer", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make memfd for an answer: %w", err)
	}
	out := os.NewFile(uintptr(answer), "answer")
	defer out.Close()
	in, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", file)) // with a position of its own
	if err != nil {
		return fmt.Errorf("open the state: %w", err)
	}
	defer in.Close()
	// It must not stay behind when this process is killed meanwhile.
	attr := &os.ProcAttr{Dir: "/", Files: []*os.File{in, out, out}, Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}}
	pid, end, err := s.reaper.spawn(argv, attr)
	if err != nil {
		return fmt.Errorf("start %s: %w", argv[0], err)
	}
	defer s.reaper.release()
	var e ended
	late := false
	select {
	case e = <-end:
	case <-time.After(checkLimit):
		late = true
		where := monitor.Whereabouts(pid)
		_ = unix.Kill(-pid, unix.SIGKILL)
		select {
		case e = <-end:
		case <-time.After(hangPatience):
			return fmt.Errorf("%s, run to say whether it can take over, hangs in the kernel: %s", argv[0], where)
		}
	}
	said := make([]byte, 2048)
	n, _ := out.ReadAt(said, 0)
	text := strings.ToValidUTF8(string(bytes.TrimSpace(said[:n])), "?")
	if late {
		return fmt.Errorf("%s has not said within %s whether it can take over: %q", argv[0], checkLimit, text)
	}
	if code := monitor.Code(e.status); code != 0 || text != taken {
		return fmt.Errorf("%s cannot take over (exit code %d): %s", argv[0], code, text)
	}
	return nil
}
