//go:build faults

package operation

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// faults is the directory by which a crash test speaks to a daemon that was
// built for it. Each step that is reached is written to the file trace, a line
// each. The file arm, one line of VERB/STEP and a pid, has that step kill a process
// once; a tab stands between the two. PID 0 is the daemon itself.
var faults = os.Getenv("BERTH_FAULTS")

func reached(verb, step string) {
	if faults == "" {
		return
	}
	point := verb + "/" + step
	if f, err := os.OpenFile(filepath.Join(faults, "trace"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600); err == nil {
		_, _ = f.WriteString(point + "\n")
		_ = f.Close()
	}
	arm := filepath.Join(faults, "arm")
	text, err := os.ReadFile(arm)
	if err != nil {
		return
	}
	armed, pid, ok := strings.Cut(strings.TrimSpace(string(text)), "\t")
	if !ok || armed != point || os.Remove(arm) != nil {
		return
	}
	victim := 0
	if _, err := fmt.Sscan(pid, &victim); err != nil {
		return
	}
	if victim == 0 {
		victim = os.Getpid()
	}
	_ = syscall.Kill(victim, syscall.SIGKILL)
	if victim == os.Getpid() {
		select {} // until the kernel has done it
	}
}
