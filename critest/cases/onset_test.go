package cases

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// A start that waits says so in the log, for nobody can ask: which step it is at and,
// where that is the monitor, where that is. It goes on when the monitor does.
func TestSlowStartIsTold(t *testing.T) {
	e := start(t, node.Options{LogLevel: "info"})
	pod := e.run(e.sandbox()) // the monitor has something to live for
	monitor := e.Monitors()[0]
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(monitor, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(monitor, syscall.SIGCONT) }()
	ctx, cancel := context.WithTimeout(e.ctx, leakcheck.Patience(time.Minute))
	defer cancel()
	started := make(chan error, 1)
	go func() { started <- e.Launch(ctx) }()
	for told := false; !told; time.Sleep(50 * time.Millisecond) {
		log, err := os.ReadFile(filepath.Join(e.Dir, "berth.log"))
		if err != nil || ctx.Err() != nil {
			t.Fatalf("the log does not tell what the start waits for: %v", err)
		}
		_, text, _ := strings.Cut(string(log), "berth starts")
		_, text, again := strings.Cut(text, "berth starts")
		told = again && strings.Contains(text, "the start takes long") && strings.Contains(text, `step="find or start the monitor"`) &&
			strings.Contains(text, "no monitor takes requests for 10s") && strings.Contains(text, "(berth-monitor) in state T")
	}
	if err := syscall.Kill(monitor, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	e.removePod(pod)
	e.empty("the start")
}

// What the configuration names is asked about before the first line of the log; that
// too is told, and the refusal has the path.
func TestHungConfigurationIsTold(t *testing.T) {
	certs := t.TempDir()
	h := &hungFiles{env: start(t, node.Options{Settings: map[string]string{
		"runtime": `host_path_timeout = "4s"`, "image": fmt.Sprintf("certs_dir = %q", certs)}})}
	if err := h.Terminate(); err != nil {
		t.Fatal(err)
	}
	h.while(certs, func() {
		if err := h.Launch(h.ctx); err == nil {
			t.Error("the daemon has started")
		}
		for _, want := range []string{`step="read and check the configuration"`, "path " + certs + " does not answer"} {
			if !strings.Contains(h.logged(), want) {
				t.Errorf("the log does not say %q: %s", want, h.LogTail(5))
			}
		}
	})
	if err := h.Launch(h.ctx); err != nil {
		t.Fatal(err)
	}
}
