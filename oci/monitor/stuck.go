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

// Whereabouts says in words what a process hangs in: its name, its state as
// ps(1) shows it, and the place in the kernel, where that can be read.
func Whereabouts(pid int) string {
	text := fmt.Sprintf("pid %d", pid)
	st, err := readStat(pid)
	if err != nil {
		return text + ", which is gone"
	}
	if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err == nil {
		text += fmt.Sprintf(" (%s)", strings.TrimSpace(string(name)))
	}
	text += fmt.Sprintf(" in state %c", st.state)
	// "0" stands for "not in the kernel, or not to be told".
	if at, err := os.ReadFile(fmt.Sprintf("/proc/%d/wchan", pid)); err == nil && len(at) > 0 && string(at) != "0" {
		text += " at " + string(at)
	}
	return text
}
