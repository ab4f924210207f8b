package cases

import (
	"context"
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
