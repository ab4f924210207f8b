package network

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
)

// TestB55 has one pod whose ADD hangs: readiness, description, planning and the
// set-up of others go on, also while the configuration is rewritten.
func TestB55(t *testing.T) {
	n := newNode(t)
	n.script("bridge", `case "$CNI_ARGS:$CNI_COMMAND" in *K8S_POD_NAME=slow*:ADD) sleep 600;; esac; exec `+realPlugin(t, "bridge"))
	m, err := New(Options{ConfDir: n.conf, BinDirs: []string{n.shims}, CacheDir: n.cache, Timeout: leakcheck.Patience(3 * time.Second)})
	must(t, err)
	n.m.Close()
	n.m = m
	slow := n.pod("slow")
	plan := n.plan(slow)
	done := make(chan error, 1)
	begin := time.Now()
	go func() {
		done <- n.in(func() error { _, err := m.Setup(context.Background(), slow, plan); return err })
	}()
	for i := range 20 {
		at := time.Now()
		if err := m.Ready(); err != nil {
			t.Errorf("Ready while a pod is slow: %v", err)
		}
		m.Describe()
		if took := time.Since(at); took > leakcheck.Patience(100*time.Millisecond) {
			t.Errorf("Ready and Describe took %v", took)
		}
		if i%5 == 0 {
			n.writeConf("10-bt.conflist", n.bridgeConf("bt", "1.0.0", "10.88.7.0/28")+strings.Repeat(" ", i))
			at := time.Now()
			p := n.pod(fmt.Sprint("fast", i))
			n.teardown(p, n.setup(p))
			if took := time.Since(at); took > leakcheck.Patience(time.Second) {
				t.Errorf("another pod took %v", took)
			}
		}
	}
	select {
	case err := <-done:
		t.Fatalf("the slow pod ended before the others: %v", err)
	default:
	}
	err = <-done
	if !errors.Is(err, ErrSetup) || !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrTeardown) {
		t.Errorf("Setup of the slow pod: %v", err)
	}
	if took := time.Since(begin); took > leakcheck.Patience(5*time.Second) {
		t.Errorf("Setup of the slow pod took %v with a deadline of %v", took, leakcheck.Patience(3*time.Second))
	}
	if left := n.leased(); len(left) != 0 {
		t.Errorf("leases %q are left", left)
	}
}

// TestSetupOutlivesItsCaller cancels the caller during ADD: DEL still runs.
func TestSetupOutlivesItsCaller(t *testing.T) {
	n := newNode(t)
	n.script("portmap", "echo portmap $CNI_COMMAND >> "+n.dir+"/calls; test $CNI_COMMAND = DEL || sleep 60")
	p := n.pod("web")
	plan := n.plan(p)
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(500*time.Millisecond, cancel)
	err := n.in(func() error { _, err := n.m.Setup(ctx, p, plan); return err })
	if !errors.Is(err, ErrSetup) || !errors.Is(err, context.Canceled) || errors.Is(err, ErrTeardown) {
		t.Errorf("error %v", err)
	}
	if calls := n.calls(); !strings.HasSuffix(calls, "portmap DEL, bridge DEL, host-local DEL") || len(n.leased()) != 0 {
		t.Errorf("ran %s; leases %q are left", calls, n.leased())
	}
}

// statusManager starts one with a plugin that knows STATUS.
func statusManager(t *testing.T, script string) (m *Manager, plugin string) {
	t.Helper()
	dir, bin := t.TempDir(), t.TempDir()
	plugin = bin + "/fake"
	must(t, writeScript(plugin, script))
	must(t, os.WriteFile(dir+"/10-x.conflist", []byte(strings.Replace(conflist("a"), "1.0.0", "1.1.0", 1)), 0o600))
	m, err := New(Options{ConfDir: dir, BinDirs: []string{bin}, CacheDir: t.TempDir()})
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m, plugin
}

func TestStatusIsAsked(t *testing.T) {
	m, plugin := statusManager(t, `test $CNI_COMMAND = STATUS && exit 0; exit 1`)
	becomes(t, m, "a")
	must(t, writeScript(plugin, `echo '{"code":50,"msg":"the daemon of the plugin is away"}'; exit 1`))
	m.mu.Lock()
	m.status.at = time.Now().Add(-goodStatusAge)
	m.mu.Unlock()
	becomes(t, m, "")
	err := m.Ready()
	if !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), `network "a": STATUS: CNI plugin fake STATUS: the daemon of the plugin is away (code 50)`) {
		t.Errorf("reason: %v", err)
	}
	if _, err := m.Plan(PodNetwork{ID: "x"}); err != nil {
		t.Errorf("Plan leaves it to ADD: %v", err)
	}
	must(t, writeScript(plugin, "exit 0"))
	becomes(t, m, "a")
}

// TestStatusHangs asks a plugin that never answers.
func TestStatusHangs(t *testing.T) {
	m, _ := statusManager(t, "sleep 60")
	begin := time.Now()
	for range 20 {
		if err := m.Ready(); !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), "not answered STATUS yet") {
			t.Errorf("Ready before the first answer: %v", err)
		}
	}
	if took := time.Since(begin); took > leakcheck.Patience(time.Second) {
		t.Errorf("20 answers took %v", took)
	}
	begin = time.Now()
	must(t, m.Close())
	if took := time.Since(begin); took > leakcheck.Patience(3*time.Second) {
		t.Errorf("Close took %v", took)
	}
}

// TestStatusIsCached answers often and asks once.
func TestStatusIsCached(t *testing.T) {
	log := t.TempDir() + "/log"
	m, _ := statusManager(t, "echo x >> "+log)
	becomes(t, m, "a")
	for range 1000 {
		must(t, m.Ready())
	}
	if n := strings.Count(read(t, log), "x"); n != 1 {
		t.Errorf("asked %d times", n)
	}
}
