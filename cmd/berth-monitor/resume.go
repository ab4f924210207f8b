package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// readState reads and checks what another build has left.
func readState(f *os.File) (state, error) {
	var st state
	data, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<40))
	if err == nil {
		err = json.Unmarshal(data, &st)
	}
	if err != nil {
		return state{}, fmt.Errorf("read the state: %w", err)
	}
	if st.Format < oldestFormat || st.Format > stateFormat {
		return state{}, fmt.Errorf("the state is in format %d, this build takes %d to %d", st.Format, oldestFormat, stateFormat)
	}
	return st, nil
}

// checkState says whether this build could go on from the state that is its stdin,
// for a daemon that speaks these versions.
func checkState(newest, oldest int) error {
	if _, err := monitor.Agree(newest, oldest); err != nil {
		return err
	}
	if _, err := readState(os.Stdin); err != nil {
		return err
	}
	fmt.Println(taken)
	return nil
}

// resume goes on as the process that another build was until now. A container
// that cannot be taken over is left to the daemon, which hands it back.
func resume(socket string, fd int) (*server, error) {
	f := os.NewFile(uintptr(fd), "state")
	st, err := readState(f)
	_ = f.Close()
	if err != nil {
		return nil, err
	}
	st.closeOnExec()
	s := newServer(socket)
	if s.lock, err = monitor.Relock(socket, st.Lock, st.Directory); err != nil {
		return nil, err
	}
	if s.door, err = resumeDoor(socket, st.Listener, st.Door); err != nil {
		return nil, err
	}
	var alive []func()
	for _, saved := range st.Containers {
		guard("take over "+saved.Info.ID, func() { alive = append(alive, s.revive(saved)) })
	}
	s.kills.restore(st.Kills)
	for _, wait := range alive {
		wait()
	}
	return s, nil
}

// closeOnExec: no child of this process may have them.
func (st *state) closeOnExec() {
	for _, fd := range []int{st.Lock, st.Directory, st.Listener} {
		if fd > 0 {
			unix.CloseOnExec(fd)
		}
	}
	for _, c := range st.Containers {
		for _, fd := range c.FDs {
			unix.CloseOnExec(fd)
		}
		for _, v := range c.Sessions {
			for _, fd := range v.Out {
				if fd >= 0 {
					unix.CloseOnExec(fd)
				}
			}
		}
	}
}

// revive goes on with a container, but for its end: for that there is wait.
func (s *server) revive(saved savedContainer) (wait func()) {
	id := saved.Info.ID
	if saved.Info.Exit != nil {
		c := &container{info: saved.Info, exit: saved.Info.Exit, gone: true, pidfd: -1, stdin: -1, buffer: -1}
		c.info.Exit, c.viewers.ended = nil, true
		s.containers[id] = c
		return func() {}
	}
	viewers := map[call]*viewer{}
	for _, v := range saved.Sessions {
		viewers[call{nil, v.ID}] = &viewer{out: v.Out, skipped: v.Skipped, input: v.Input}
	}
	c, err := takeOver(saved.Info, saved.FDs)
	for _, fd := range saved.FDs {
		_ = unix.Close(fd)
	}
	if err != nil {
		log.Printf("take over %s: %v", id, err)
		for _, v := range viewers {
			v.close()
		}
		return func() {}
	}
	c.child = saved.Child
	if len(viewers) > 0 {
		c.viewers.sessions = viewers
	}
	s.settle(id, c)
	c.start()
	if saved.Reaped != nil {
		e := ended{saved.Reaped.Status, saved.Reaped.At}
		c.reaped.Store(&e)
		return func() { go s.ended(c, e.status, e.at, "") }
	}
	if c.child {
		return func() { s.watch(c) }
	}
	return func() { go s.await(c) }
}
