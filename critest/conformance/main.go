// Command conformance runs critest 1.37 against a berth node of its own,
// offline, and prints what passed, failed, was skipped or is excluded, and why.
//
// It owns which specs are in scope (scope.go). The specs themselves are
// cri-tools', built as a test binary by `make deps` from ./suite.
//
// It exits 0 only when no spec failed, none skipped itself beyond the allow-list
// and nothing was left behind on the machine.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/onsi/ginkgo/v2/types"

	"berth/critest/node"
)

func main() {
	focus := flag.String("focus", "", "run only specs that match this regular expression")
	procs := flag.Int("procs", 3, "specs run at once")
	report := flag.String("report", "", "also keep ginkgo's JSON report in this file")
	websocket := flag.Bool("websocket", false, "let the streaming specs speak WebSocket instead of SPDY")
	verbose := flag.Bool("v", false, "show critest's own output")
	driver := flag.String("cgroup-driver", "cgroupfs", "of the daemon: cgroupfs or systemd")
	flag.Parse()
	if err := node.Isolate(); err != nil {
		fmt.Fprintln(os.Stderr, "critest:", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, suite{focus: *focus, procs: *procs, report: *report, websocket: *websocket, driver: *driver, verbose: *verbose}); err != nil {
		fmt.Fprintln(os.Stderr, "critest:", err)
		os.Exit(1)
	}
}

// errSpecs: the table has the details.
var errSpecs = errors.New("conformance is not complete")

// suite is one run of the test binary.
type suite struct {
	focus, report, digest, driver string
	procs                         int
	websocket, verbose            bool
}

func run(ctx context.Context, s suite) (err error) {
	begin := time.Now()
	stock, err := node.OpenStock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stock.Close()) }()
	s.digest = stock.Digest
	n, err := node.Start(ctx, node.Options{Mirror: stock.Addr(), CgroupDriver: s.driver})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close(context.WithoutCancel(ctx))) }()
	fmt.Printf("critest 1.37.0 against berth at %s, %d at once, registry on %s\n", n.Socket, s.procs, stock.Addr())
	reports, err := s.execute(ctx, n)
	if err != nil {
		return err
	}
	res := judge(reports, s.focus != "")
	res.print(os.Stdout)
	fmt.Printf("\n%.0f seconds in all\n", time.Since(begin).Seconds())
	if !res.ok() {
		if keep := os.Getenv("BERTH_KEEP_LOG"); keep != "" {
			err = n.CopyLog(keep)
		}
		return errors.Join(errSpecs, err)
	}
	return nil
}

// execute runs the binary under ginkgo's command and reads its report. A
// failing spec is no error here.
func (s suite) execute(ctx context.Context, n *node.Node) ([]types.Report, error) {
	endpoint := "unix://" + n.Socket
	args := []string{"run", fmt.Sprintf("--procs=%d", s.procs), "--no-color", "--silence-skips", "--timeout=30m",
		"--json-report=report.json", "--output-dir=" + n.Dir, "--skip=" + skipFlag()}
	if s.focus != "" {
		args = append(args, "--focus="+s.focus)
	}
	args = append(args, filepath.Join(n.Deps, "bin", "critest.test"), "--",
		"-runtime-endpoint="+endpoint, "-image-endpoint="+endpoint, "-digest-image="+s.digest,
		"-config="+filepath.Join(n.Dir, "crictl.yaml"), "-nri-socket="+n.NRISocket())
	if s.websocket {
		args = append(args, "-websocket-exec", "-websocket-attach", "-websocket-portforward")
	}
	cmd := exec.CommandContext(ctx, filepath.Join(n.Deps, "bin", "ginkgo"), args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+n.LogDir())
	path, err := withSudo(n.Dir)
	if err != nil {
		return nil, err
	}
	cmd.Env = append(cmd.Env, "PATH="+path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	log, err := os.Create(filepath.Join(n.Dir, "critest.log"))
	if err != nil {
		return nil, fmt.Errorf("make critest's log: %w", err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if s.verbose {
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	}
	runErr := cmd.Run()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("run critest: %w", ctx.Err())
	}
	data, err := os.ReadFile(filepath.Join(n.Dir, "report.json"))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read critest's report: %w", err), runErr)
	}
	if s.report != "" {
		if err := os.WriteFile(s.report, data, 0o644); err != nil {
			return nil, fmt.Errorf("keep critest's report: %w", err)
		}
	}
	var reports []types.Report
	if err := json.Unmarshal(data, &reports); err != nil {
		return nil, fmt.Errorf("decode critest's report: %w", err)
	}
	return reports, nil
}

// withSudo is a PATH with a sudo, which the AppArmor specs load their profiles
// through. As root on a machine without, a script does.
func withSudo(dir string) (string, error) {
	path := os.Getenv("PATH")
	if _, err := exec.LookPath("sudo"); err == nil {
		return path, nil
	}
	dir = filepath.Join(dir, "sudo")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make a folder for sudo: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "sudo"), []byte("#!/bin/sh\nexec \"$@\"\n"), 0o755); err != nil {
		return "", fmt.Errorf("write a sudo: %w", err)
	}
	return path + ":" + dir, nil
}
