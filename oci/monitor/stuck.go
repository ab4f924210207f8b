package monitor

import (
	"fmt"
	"os"
	"strings"
	"time"
)

// stuckPatience is how long every process that is left may hang inside the
// kernel, where SIGKILL has to wait, before nobody waits for it any more.
const stuckPatience = 3 * time.Second

// stuck watches over the processes that SIGKILL leaves.
type stuck struct{ since time.Time }

// look tells whether all have been in uninterruptible sleep at every look for
// longer than stuckPatience.
func (s *stuck) look(pids []int) bool {
	for _, pid := range pids {
		if st, err := readStat(pid); err != nil || st.state != 'D' {
			s.since = time.Time{}
			return false
		}
	}
	if s.since.IsZero() {
		s.since = time.Now()
	}
	return time.Since(s.since) > stuckPatience
}

// left is the error about processes that outlive their SIGKILL.
func left(dir string, pids []int, cause error) error {
	const most = 8
	var said []string
	for _, pid := range pids[:min(most, len(pids))] {
		said = append(said, Whereabouts(pid))
	}
	if len(pids) > most {
		said = append(said, fmt.Sprintf("and %d more", len(pids)-most))
	}
	return fmt.Errorf("kill cgroup %s: still there after SIGKILL: %s: %w", dir, strings.Join(said, ", "), cause)
}

// Place is where a process is.
type Place struct {
	Name    string
	State   string // as ps(1) shows it
	Channel string // the place in the kernel; empty: in none, or not to be told
}

// Look finds out where a process is, without waiting for it. False when it is gone.
func Look(pid int) (Place, bool) {
	st, err := readStat(pid)
	if err != nil {
		return Place{}, false
	}
	p := Place{State: string(st.state)}
	if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err == nil {
		p.Name = strings.TrimSpace(string(name))
	}
	if at, err := os.ReadFile(fmt.Sprintf("/proc/%d/wchan", pid)); err == nil && string(at) != "0" {
		p.Channel = string(at)
	}
	return p, true
}

// Whereabouts says in words what a process hangs in: its name, its state as
// ps(1) shows it, and the place in the kernel, where that can be read.
func Whereabouts(pid int) string {
	text := fmt.Sprintf("pid %d", pid)
	p, ok := Look(pid)
	if !ok {
		return text + ", which is gone"
	}
	if p.Name != "" {
		text += fmt.Sprintf(" (%s)", p.Name)
	}
	text += " in state " + p.State
	if p.Channel != "" {
		text += " at " + p.Channel
	}
	if p.State != "Z" {
		return text
	}
	for _, tid := range Threads(pid) { // one that hangs keeps the dead process's files
		if t, ok := Look(tid); ok && t.State == "D" {
			return text + ", a thread of it in state D at " + t.Channel
		}
	}
	return text
}
