package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/oci/monitor"
	"berth/sandbox/leakcheck"
	"berth/sandbox/outside/hung"
)

// Taking over a container waits for nothing, though its log does not answer when it is
// looked for; and who asks for that log is refused.
func TestTakeOverALogThatHangs(t *testing.T) {
	leakcheck.Start(t)
	dir := t.TempDir()
	fs, err := hung.Mount(dir)
	if errors.Is(err, hung.ErrNoFUSE) {
		t.Skipf("skipped: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = fs.Release() })
	started, err := monitor.StartTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, hung.File)
	fs.Hang()
	c, err := takeOver(monitor.Container{ID: "c", Bundle: t.TempDir(), PID: os.Getpid(), StartTime: started, IO: monitor.IO{LogPath: path}}, map[string]int{})
	if err != nil {
		t.Fatal(err)
	}
	s := newServer("")
	if err := s.reserve("c"); err != nil {
		t.Fatal(err)
	}
	s.settle("c", c)
	c.start()
	for end := time.Now().Add(leakcheck.Patience(10 * time.Second)); len(s.stalls()) == 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the log does not hang")
		}
	}
	if said := s.stalls()[0]; !strings.HasPrefix(said, "container c: the log "+path+" has not answered for ") {
		t.Errorf("it is said %q", said)
	}
	if err := c.log.reopen(); err == nil || !strings.Contains(err.Error(), "has not answered") {
		t.Errorf("reopen: %v", err)
	}
	if c.ended() || len(s.all()) != 1 {
		t.Error("the container is not there")
	}
	fs.Go()
	c.pumps.Wait()
	c.close()
	if len(s.stalls()) != 0 || len(s.logs) != 0 {
		t.Errorf("%d logs are kept", len(s.logs))
	}
}
