package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"berth/sandbox/leakcheck"
)

// settle is how long what was removed may take to be gone.
const settle = 15 * time.Second

// footprint is what a node without pods has.
type footprint struct {
	things     map[string]bool // processes, files, rules of nftables and with them of iptables, leases, plugins' cgroups
	fds        int             // of the daemon
	monitorFDs int
	goroutines int
}

// left looks for what a life has left behind, and for what was said that was not
// true.
func (w *world) left(ctx context.Context) error {
	if err := w.Tidied(ctx); err != nil {
		return err
	}
	var all []error
	for end := time.Now().Add(leakcheck.Patience(settle)); ; time.Sleep(20 * time.Millisecond) {
		leaks, err := w.leaks()
		if err != nil {
			return err
		}
		if len(leaks) > 0 && time.Now().Before(end) {
			continue
		}
		if len(leaks) > 0 {
			all = append(all, fmt.Errorf("left behind: %q", leaks))
		}
		break
	}
	if lies := w.watcher.took(); len(lies) > 0 {
		all = append(all, fmt.Errorf("not true: %q", lies))
	}
	return errors.Join(all...)
}

// leaks compares the node with its base and with what it was before its first daemon.
func (w *world) leaks() ([]string, error) {
	found, err := w.LeaksNow()
	if err != nil {
		return nil, err
	}
	now, err := w.footprint()
	if err != nil {
		return nil, err
	}
	for thing := range now.things {
		if !w.base.things[thing] {
			found = append(found, thing)
		}
	}
	for _, c := range []struct {
		what      string
		now, base int
	}{{"descriptors of the daemon", now.fds, w.base.fds}, {"descriptors of the monitor", now.monitorFDs, w.base.monitorFDs}, {"goroutines", now.goroutines, w.base.goroutines}} {
		if c.now > c.base {
			found = append(found, fmt.Sprintf("%d %s, there were %d", c.now, c.what, c.base))
		}
	}
	return found, nil
}

// settled takes the base: the largest of what is there, or was, while nothing goes on.
func (w *world) settled() error {
	for range 20 {
		now, err := w.footprint()
		if err != nil {
			return err
		}
		now.fds, now.monitorFDs = max(now.fds, w.base.fds), max(now.monitorFDs, w.base.monitorFDs)
		now.goroutines = max(now.goroutines, w.base.goroutines)
		maps.Copy(now.things, w.base.things)
		w.base = now
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}

func (w *world) footprint() (f footprint, err error) {
	list, err := rules()
	if err != nil {
		return f, err
	}
	f.things = map[string]bool{}
	for _, look := range []func() []string{w.processes, w.files, w.addresses, w.pluginCgroups} {
		list = append(list, look()...)
	}
	for _, thing := range list {
		f.things[thing] = true
	}
	f.fds, f.monitorFDs = descriptors(w.PID())-lookerFDs*len(w.lookers()), descriptors(w.monitor())
	if slices.Contains(children(w.PID()), w.monitor()) { // it was started by this daemon, not found
		f.fds -= monitorFDs
	}
	f.goroutines, err = w.goroutines()
	return f, err
}

// The daemon keeps some processes for its next looks at files of others, see package
// outside: how many, and how many descriptors of its own it has for its children.
const (
	maxLookers = 2
	lookerFDs  = 3
	monitorFDs = 1 // of a monitor that it has started: the handle it waits by
)

// lookers are those processes.
func (w *world) lookers() []int {
	return slices.DeleteFunc(children(w.PID()), func(pid int) bool {
		args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		return err != nil || !bytes.HasSuffix(args, []byte("\x00look\x00"))
	})
}

func children(of int) []int {
	var list []int
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", of))
	for _, file := range tasks {
		text, _ := os.ReadFile(file)
		for _, word := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(word); err == nil {
				list = append(list, pid)
			}
		}
	}
	return list
}

// processes are those of the test's network namespace, in which runc and plugins run
// too, but for test, daemon and monitor.
func (w *world) processes() []string {
	known := map[string]bool{strconv.Itoa(os.Getpid()): true}
	for _, pid := range w.Daemons() {
		known[strconv.Itoa(pid)] = true
	}
	for i, pid := range w.lookers() {
		known[strconv.Itoa(pid)] = i < maxLookers
	}
	own, err := os.Readlink("/proc/self/ns/net")
	links, globErr := filepath.Glob("/proc/[0-9]*/ns/net")
	if err = errors.Join(err, globErr); err != nil {
		return []string{"processes cannot be listed: " + err.Error()}
	}
	var list []string
	for _, link := range links {
		pid := strings.Split(link, "/")[2]
		if target, err := os.Readlink(link); err != nil || target != own || known[pid] {
			continue
		}
		command, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		list = append(list, fmt.Sprintf("process %s %q", pid, bytes.ReplaceAll(command, []byte{0}, []byte{' '})))
	}
	return list
}

// files are all below root and state, of images not what is deep within.
func (w *world) files() []string {
	var list []string
	images := filepath.Join(w.Root(), "images")
	for _, dir := range []string{w.Root(), w.State()} {
		_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return nil // it is gone by now
			}
			list = append(list, "file "+path)
			if in, ok := strings.CutPrefix(path, images+"/"); ok && e.IsDir() && strings.Count(in, "/") > 0 && !strings.HasPrefix(in, "blobs/") {
				return fs.SkipDir
			}
			return nil
		})
	}
	return list
}

// addresses are leases of the networks beside the ordinary one.
func (w *world) addresses() []string {
	files, err := filepath.Glob(filepath.Join(w.leases(), "*", "*"))
	if err != nil {
		return []string{"leases cannot be listed: " + err.Error()}
	}
	var list []string
	for _, f := range files {
		if net.ParseIP(filepath.Base(f)) != nil {
			list = append(list, "lease "+f)
		}
	}
	return list
}

// pluginCgroups are those in which CNI plugins were held.
func (w *world) pluginCgroups() []string {
	held, err := os.ReadFile(filepath.Join(w.State(), "leash"))
	if err != nil {
		return []string{"cgroups of plugins cannot be listed: " + err.Error()}
	}
	dirs, err := filepath.Glob(filepath.Join(string(held), "*", "cgroup.procs"))
	if err != nil {
		return []string{"cgroups of plugins cannot be listed: " + err.Error()}
	}
	var list []string
	for _, d := range dirs {
		list = append(list, "cgroup "+filepath.Dir(d))
	}
	return list
}

// descriptors counts those of a process, also its connections: those of the test end
// with their requests.
func descriptors(pid int) int {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return 0
	}
	return len(entries)
}

// counters are what differs in a rule while it is there.
var counters = regexp.MustCompile(`counter packets \d+ bytes \d+ `)

// rules are the lines of all rules of the network namespace, with their chains.
func rules() ([]string, error) {
	out, err := exec.Command("nft", "list", "ruleset").Output()
	if err != nil {
		return nil, fmt.Errorf("list rules: %w", err)
	}
	var list []string
	chain := ""
	for line := range bytes.Lines(out) {
		text := counters.ReplaceAllString(strings.TrimSpace(string(line)), "")
		if strings.HasPrefix(text, "table ") || strings.HasPrefix(text, "chain ") {
			chain = strings.TrimSuffix(text, " {")
		}
		if text != "" && text != "}" {
			list = append(list, "rule "+chain+": "+text)
		}
	}
	return list, nil
}

var (
	metricsAddress = regexp.MustCompile(`msg="serving metrics" address="(\S+)"`)
	goroutines     = regexp.MustCompile(`(?m)^go_goroutines (\d+)$`)
)

// goroutines asks the daemon's metrics.
func (w *world) goroutines() (int, error) {
	log, err := os.ReadFile(filepath.Join(w.Dir, "berth.log"))
	if err != nil {
		return 0, err
	}
	said := metricsAddress.FindAllSubmatch(log, -1)
	if said == nil {
		return 0, errors.New("the log does not tell the address of the metrics")
	}
	client := http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	reply, err := client.Get("http://" + string(said[len(said)-1][1]) + "/metrics")
	if err != nil {
		return 0, err
	}
	defer reply.Body.Close()
	body, err := io.ReadAll(reply.Body)
	if err != nil {
		return 0, err
	}
	found := goroutines.FindSubmatch(body)
	if found == nil {
		return 0, errors.New("the metrics do not tell the goroutines")
	}
	return strconv.Atoi(string(found[1]))
}

// dropBridges removes the bridges of the networks, which plugins leave.
func (w *world) dropBridges() {
	for i := range networks {
		_ = exec.Command("ip", "link", "del", bridgeOf(i)).Run() // absent when no pod was there
	}
}
