package runc

import (
	"context"
	"testing"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"

	"berth/oci"
)

func (b *box) exec(timeout time.Duration, script string) (oci.ExecResult, error) {
	return b.n.runtime.Exec(context.Background(), b.id, oci.ExecRequest{Timeout: timeout, Limit: 1 << 20,
		Process: &rspec.Process{Args: []string{"/bin/sh", "-c", script}, Env: []string{"PATH=/usr/bin:/bin"}, Cwd: "/"}})
}

func TestLifeOfAContainer(t *testing.T) {
	n := newNode(t)
	b := n.box("echo out; echo err >&2; printf tail; exit 7").run()
	x := b.exit()
	if x.Code != 7 || x.OOMKilled || x.Unknown != "" || time.Since(x.At) > time.Minute {
		t.Errorf("exit = %+v", x)
	}
	if got := b.output("stdout"); got != "out\ntail" {
		t.Errorf("stdout = %q", got)
	}
	if got := b.output("stderr"); got != "err\n" {
		t.Errorf("stderr = %q", got)
	}
}

func TestExecInAContainer(t *testing.T) {
	n := newNode(t)
	b := n.box("exec sleep 1000").run()
	r, err := b.exec(0, "echo hi; echo no >&2; exit 3")
	if err != nil || string(r.Stdout) != "hi\n" || string(r.Stderr) != "no\n" || r.ExitCode != 3 || r.Truncated {
		t.Fatalf("exec = %+v, %v", r, err)
	}
	for range 10 {
		at := time.Now()
		if _, err := b.exec(0, "true"); err != nil {
			t.Fatal(err)
		}
		t.Log(time.Since(at))
	}
}
