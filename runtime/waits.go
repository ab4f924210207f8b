package runtime

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"berth/oci/monitor"
	"berth/runtime/admin"
)

// Bounds of what is told of an operation's processes.
const (
	maxWaits      = 16
	maxWaitDepth  = 5
	maxStack      = 12
	waitsPatience = time.Second // reading /proc hangs where a process's memory is locked
)

// looking bounds the looks at /proc that hang: each holds a thread.
var looking = make(chan struct{}, 4)

// waitsFor finds what runs for objects: commands and plugins are children of the
// daemon or of the monitor and name the object they are for. init are containers'
// first processes by pid, with a name. Nothing when /proc does not answer in time.
func waitsFor(parents []int, ids []string, inits map[int]string) []admin.WhyWait {
	select {
	case looking <- struct{}{}:
	default:
		return nil
	}
	found := make(chan []admin.WhyWait, 1)
	go func() {
		defer func() { <-looking }()
		var list []admin.WhyWait
		for _, parent := range parents {
			for _, pid := range monitor.Children(parent) {
				if what := purpose(pid, ids); what != "" {
					list = withChildren(list, pid, parent, what, maxWaitDepth)
				}
			}
		}
		for pid, what := range inits {
			list = withChildren(list, pid, 0, what, 0)
		}
		found <- list
	}()
	select {
	case list := <-found:
		return list
	case <-time.After(waitsPatience):
		return nil
	}
}

// purpose says what a child does for one of the objects, or nothing.
func purpose(pid int, ids []string) string {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || len(line) == 0 {
		return ""
	}
	args := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
	if slices.Contains(ids, args[len(args)-1]) {
		return commandText(args)
	}
	environ, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	verb, id := "", ""
	for v := range bytes.SplitSeq(environ, []byte{0}) {
		if text, ok := strings.CutPrefix(string(v), "CNI_COMMAND="); ok {
			verb = text
		}
		if text, ok := strings.CutPrefix(string(v), "CNI_CONTAINERID="); ok {
			id = text
		}
	}
	if !slices.Contains(ids, id) {
		return ""
	}
	name := args[0]
	if len(args) > 1 && filepath.IsAbs(args[len(args)-1]) {
		name = args[len(args)-1] // a script's interpreter comes first
	}
	return "CNI plugin " + filepath.Base(name) + " " + verb
}

// commandText is the OCI runtime's name and verb.
func commandText(args []string) string {
	for _, verb := range []string{"create", "start", "exec", "update", "delete", "checkpoint", "restore", "kill"} {
		if i := slices.Index(args, verb); i > 0 {
			name := args[0]
			for _, a := range args[1:i] {
				if strings.HasPrefix(a, "-") {
					break
				}
				name = a // a script's interpreter comes first
			}
			return filepath.Base(name) + " " + verb
		}
	}
	return filepath.Base(args[0])
}

func withChildren(list []admin.WhyWait, pid, parent int, what string, depth int) []admin.WhyWait {
	if len(list) >= maxWaits {
		return list
	}
	p, ok := lookAt(pid, parent, what)
	if !ok {
		return list
	}
	list = append(list, p)
	if depth > 0 {
		for _, child := range monitor.Children(pid) {
			list = withChildren(list, child, pid, "", depth-1)
		}
	}
	return list
}

// lookAt reads where a process is, from files that never wait for it.
func lookAt(pid, parent int, what string) (admin.WhyWait, bool) {
	at, ok := monitor.Look(pid)
	if !ok {
		return admin.WhyWait{}, false
	}
	if what == "" {
		what = at.Name
	}
	p := admin.WhyWait{PID: pid, Parent: parent, What: what, State: at.State, Channel: at.Channel}
	if data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stack", pid)); err == nil {
		for line := range strings.Lines(string(data)) {
			if _, text, ok := strings.Cut(strings.TrimSpace(line), "] "); ok && len(p.Stack) < maxStack {
				p.Stack = append(p.Stack, text)
			}
		}
	}
	return p, true
}

// waitsText says it in one line.
func waitsText(list []admin.WhyWait) string {
	var parts []string
	for _, p := range list {
		if p.PID == 0 {
			parts = append(parts, p.What)
			continue
		}
		text := fmt.Sprintf("%s (pid %d, state %s", p.What, p.PID, p.State)
		if p.Channel != "" {
			text += " at " + p.Channel
		}
		parts = append(parts, text+")")
	}
	return strings.Join(parts, ", ")
}
