package cases

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// crictl is a command of the operator's tool.
func (e *env) crictl(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(e.ctx, filepath.Join(e.Deps, "bin", "crictl"), append([]string{"--config", filepath.Join(e.Dir, "crictl.yaml")}, args...)...)
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// keyboard is a terminal with a person before it.
type keyboard struct {
	e      *env
	master *os.File
	seen   node.Screen
	cmd    *exec.Cmd
	ended  chan error
}

// atTerminal starts a command with a terminal of its own.
func (e *env) atTerminal(cmd *exec.Cmd) *keyboard {
	e.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		e.Fatal(err)
	}
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		e.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		e.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		e.Fatal(err)
	}
	k := &keyboard{e: e, master: master, cmd: cmd, ended: make(chan error, 1)}
	k.size(80, 24)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		e.Fatal(err)
	}
	_ = slave.Close()
	go func() { _, _ = io.Copy(&k.seen, master) }()
	go func() { k.ended <- cmd.Wait() }()
	e.Cleanup(func() { _ = cmd.Process.Kill(); _ = master.Close() })
	return k
}

func (k *keyboard) size(columns, rows uint16) {
	if err := unix.IoctlSetWinsize(int(k.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows}); err != nil {
		k.e.Fatal(err)
	}
}

func (k *keyboard) types(text string) {
	k.e.Helper()
	if _, err := io.WriteString(k.master, text); err != nil {
		k.e.Fatal(err)
	}
}

func (k *keyboard) sees(text string) {
	k.e.Helper()
	for end := time.Now().Add(20 * time.Second); !strings.Contains(k.seen.String(), text); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			k.e.Fatalf("the terminal does not show %q but %q", text, k.seen.String())
		}
	}
}

func (k *keyboard) end() int {
	k.e.Helper()
	select {
	case <-k.ended:
		return k.cmd.ProcessState.ExitCode()
	case <-time.After(30 * time.Second):
		k.e.Fatalf("the command goes on; the terminal shows %q", k.seen.String())
		return -1
	}
}

// A person at a terminal: crictl exec -it and crictl attach behave as a shell
// of one's own, with both transports.
func TestCrictlAtATerminal(t *testing.T) {
	e := start(t, node.Options{})
	id := e.idle()
	config := e.sandbox()
	c := command("tty", "trap 'stty size' WINCH; echo ready; while :; do read -r l && echo got $l; done")
	c.Stdin, c.Tty = true, true
	shell := e.startContainer(e.run(config), c, config)
	e.eventually("it is ready", func() bool { out, _ := e.logs(shell); return strings.Contains(out, "ready") })
	for _, transport := range transports {
		k := e.atTerminal(e.crictl("exec", "-it", "--transport", transport, id, "sh"))
		k.types("echo $((6*7)) $(tty)\n")
		k.sees("42 /dev/pts/")
		k.size(133, 44)
		k.types("while [ \"$(stty size)\" != '44 133' ]; do sleep 0.05; done; echo re''sized\n")
		k.sees("resized")
		k.types("sleep 9995\n")
		e.eventually("it sleeps", func() bool { return strings.Contains(e.processes(id), "sleep 9995") })
		k.types("\x03")
		e.eventually("it is interrupted", func() bool { return !strings.Contains(e.processes(id), "sleep 9995") })
		k.types("echo ba''ck; exit 7\n")
		k.sees("back")
		if code := k.end(); code == 0 {
			t.Errorf("%s: crictl exec ends with 0 after exit 7", transport)
		}
		k = e.atTerminal(e.crictl("exec", "-it", "--transport", transport, id, "/nope"))
		k.sees("/nope")
		if code := k.end(); code == 0 {
			t.Errorf("%s: exec of a missing program ends with 0", transport)
		}
		k = e.atTerminal(e.crictl("attach", "-it", "--transport", transport, shell))
		k.types("hello\n")
		k.sees("got hello")
		k.types("\x10\x11") // ctrl-p ctrl-q, crictl's way to detach
		_ = k.cmd.Process.Signal(syscall.SIGTERM)
		_ = k.end()
		if s := e.status(shell); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
			t.Errorf("%s: the container is %s after a detach, want running", transport, s.GetState())
		}
	}
}

// crictl in a script: streams apart, input to its end, output whole.
func TestCrictlInAScript(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("main", "sleep 100000"), config)
	for _, transport := range transports {
		cmd := e.crictl("exec", "-i", "--transport", transport, id, "sh", "-c", "wc -c; echo no >&2")
		var stdout, stderr bytes.Buffer
		cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(make([]byte, 3<<20)), &stdout, &stderr
		if err := cmd.Run(); err != nil || strings.TrimSpace(stdout.String()) != fmt.Sprint(3<<20) || stderr.String() != "no\n" {
			t.Errorf("%s: %v, %q, %q", transport, err, stdout.String(), stderr.String())
		}
		c := command("once"+transport, "cat; echo over; sleep 100000")
		c.Stdin, c.StdinOnce = true, true
		once := e.startContainer(pod, c, config)
		cmd = e.crictl("attach", "-i", "--transport", transport, once)
		r, w := io.Pipe()
		var got node.Screen
		cmd.Stdin, cmd.Stdout = r, &got
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(w, "hello\n")
		e.said(once, "hello\n")
		_ = w.Close()
		e.said(once, "hello\nover\n")
		e.eventually("the client sees it", func() bool { return got.String() == "hello\nover\n" })
		e.stopContainer(once)
		_ = cmd.Wait()
	}
}

func TestCrictlPortForward(t *testing.T) {
	e := start(t, node.Options{})
	pod := e.run(e.sandbox())
	l := e.listenIn(pod, "[::1]:0")
	go serve(l, answer)
	for _, transport := range transports {
		cmd := e.crictl("port-forward", "--transport", transport, pod, fmt.Sprintf("0:%d", l.Addr().(*net.TCPAddr).Port))
		var said node.Screen
		cmd.Stdout, cmd.Stderr = &said, &said
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		local := regexp.MustCompile(`127\.0\.0\.1:(\d+) ->`)
		e.eventually("crictl forwards", func() bool { return local.MatchString(said.String()) })
		var port uint16
		_, _ = fmt.Sscan(local.FindStringSubmatch(said.String())[1], &port)
		e.ask(port, 1<<20)
		e.ask(port, 5)
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	}
}
