package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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
	rules      []string // of nftables, and with them of iptables
	images     []string // files below the images' directory, not too deep
	fds        int      // of the daemon
	monitorFDs int
	goroutines int
}

// left looks for what a life has left behind, and for what was said that was not
// true.
func (w *world) left(ctx context.Context) error {
	if err := w.Tidied(ctx); err != nil {
		return err
	}
	leaks, err := w.Leaks()
	if err != nil {
		return err
	}
	for end := time.Now().Add(leakcheck.Patience(settle)); ; time.Sleep(20 * time.Millisecond) {
		more, err := w.more()
		if err != nil {
			return err
		}
		if len(more) == 0 || time.Now().After(end) {
			leaks = append(leaks, more...)
			break
		}
	}
	var all []error
	if len(leaks) > 0 {
		all = append(all, fmt.Errorf("left behind: %q", leaks))
	}
	if lies := w.watcher.took(); len(lies) > 0 {
		all = append(all, fmt.Errorf("not true: %q", lies))
	}
	return errors.Join(all...)
}

// more compares the node with its base.
func (w *world) more() ([]string, error) {
	now, err := w.footprint()
	if err != nil {
		return nil, err
	}
	var found []string
	for _, r := range now.rules {
		if !slices.Contains(w.base.rules, r) {
			found = append(found, "rule "+r)
		}
	}
	for _, f := range now.images {
		if !slices.Contains(w.base.images, f) {
			found = append(found, "image file "+f)
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
	leases, err := os.ReadDir(w.leases())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, network := range leases {
		files, err := os.ReadDir(filepath.Join(w.leases(), network.Name()))
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			if net.ParseIP(f.Name()) != nil {
				found = append(found, "lease "+network.Name()+"/"+f.Name())
			}
		}
	}
	return found, nil
}

// settled takes the base: the largest of what is there while nothing goes on.
func (w *world) settled() error {
	for range 20 {
		now, err := w.footprint()
		if err != nil {
			return err
		}
		now.fds, now.monitorFDs = max(now.fds, w.base.fds), max(now.monitorFDs, w.base.monitorFDs)
		now.goroutines = max(now.goroutines, w.base.goroutines)
		w.base = now
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}

func (w *world) footprint() (f footprint, err error) {
	if f.rules, err = rules(); err != nil {
		return f, err
	}
	if f.images, err = filepath.Glob(filepath.Join(w.Root(), "images", "*", "*")); err != nil {
		return f, err
	}
	blobs, err := filepath.Glob(filepath.Join(w.Root(), "images", "blobs", "*", "*"))
	f.images = append(f.images, blobs...)
	if err != nil {
		return f, err
	}
	f.fds, f.monitorFDs = descriptors(w.PID()), descriptors(w.monitor())
	f.goroutines, err = w.goroutines()
	return f, err
}

// descriptors counts those of a process, but for its connections: those are ours.
func descriptors(pid int) int {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0
	}
	n := 0
	for _, e := range entries {
		if target, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && !strings.HasPrefix(target, "socket:") {
			n++
		}
	}
	return n
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
			list = append(list, chain+": "+text)
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
