package cases

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/cri-tools/pkg/common"

	"berth/critest/images"
	"berth/critest/node"
)

// transports that clients may choose from.
var transports = []string{common.TransportSpdy, common.TransportWebsocket}

// terminal is a client's, whose size is told when it changes.
type terminal chan remotecommand.TerminalSize

func (q terminal) Next() *remotecommand.TerminalSize {
	size, ok := <-q
	if !ok {
		return nil
	}
	return &size
}

// session is a client of an exec or attach, as kubectl is one.
type session struct {
	e        *env
	in       *io.PipeWriter
	out, err node.Screen
	size     terminal
	hangUp   context.CancelFunc
	ended    chan error
}

// dial connects a client to a streaming URL.
func (e *env) dial(transport, to string, stdin, tty bool) *session {
	e.Helper()
	u, err := url.Parse(to)
	if err != nil {
		e.Fatal(err)
	}
	x, err := common.GetExecutor(transport, u, &rest.TLSClientConfig{Insecure: true})
	if err != nil {
		e.Fatal(err)
	}
	s := &session{e: e, ended: make(chan error, 1), size: make(terminal, 1)}
	o := remotecommand.StreamOptions{Stdout: &s.out, Stderr: &s.err, Tty: tty}
	if tty {
		o.Stderr, o.TerminalSizeQueue = nil, s.size
	}
	if stdin {
		var r *io.PipeReader
		r, s.in = io.Pipe()
		o.Stdin = r
	}
	ctx, cancel := context.WithCancel(e.ctx)
	s.hangUp = cancel
	e.Cleanup(func() { cancel(); close(s.size) })
	go func() { s.ended <- x.StreamWithContext(ctx, o) }()
	return s
}

// execURL asks for an exec.
func (e *env) execURL(id string, stdin, tty bool, cmd ...string) string {
	e.Helper()
	res, err := e.rt.Exec(e.ctx, &cri.ExecRequest{ContainerId: id, Cmd: cmd, Stdin: stdin, Stdout: true, Stderr: !tty, Tty: tty})
	if err != nil {
		e.Fatalf("exec %q: %v", cmd, err)
	}
	return res.GetUrl()
}

func (e *env) attachURL(id string, stdin, tty bool) string {
	e.Helper()
	res, err := e.rt.Attach(e.ctx, &cri.AttachRequest{ContainerId: id, Stdin: stdin, Stdout: true, Stderr: !tty, Tty: tty})
	if err != nil {
		e.Fatalf("attach: %v", err)
	}
	return res.GetUrl()
}

func (s *session) types(text string) {
	s.e.Helper()
	if _, err := io.WriteString(s.in, text); err != nil {
		s.e.Errorf("type %q: %v", text, err)
	}
}

func (s *session) sees(text string) {
	s.e.Helper()
	for end := time.Now().Add(20 * time.Second); !strings.Contains(s.out.String(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) || len(s.ended) > 0 && !strings.Contains(s.out.String(), text) {
			s.e.Fatalf("the client does not see %q but %q and %q", text, s.out.String(), s.err.String())
		}
	}
}

func (s *session) end() error {
	s.e.Helper()
	select {
	case err := <-s.ended:
		return err
	case <-time.After(30 * time.Second):
		s.e.Fatalf("the session goes on; the client saw %q and %q", s.out.String(), s.err.String())
		return nil
	}
}

// code is the exit code that a client learns; -1 when the session failed.
func code(err error) int {
	var exit interface{ ExitStatus() int }
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitStatus()
	default:
		return -1
	}
}

// idle runs a container that does nothing.
func (e *env) idle() string {
	e.Helper()
	e.pull(images.Busybox)
	config := e.sandbox()
	return e.startContainer(e.run(config), command("main", "sleep 100000"), config)
}

// interactive runs a container that answers what it reads.
func (e *env) interactive(name string, once, tty bool) string {
	e.Helper()
	e.pull(images.Busybox)
	config := e.sandbox()
	c := command(name, "while read -r l; do echo got $l; echo bad $l >&2; done; echo over; sleep 100000")
	c.Stdin, c.StdinOnce, c.Tty = true, once, tty
	return e.startContainer(e.run(config), c, config)
}

func TestExecStreams(t *testing.T) {
	e := start(t, node.Options{})
	id := e.idle()
	for _, transport := range transports {
		s := e.dial(transport, e.execURL(id, true, false, "sh", "-c", "cat; echo no >&2; exit 7"), true, false)
		s.types("hello ")
		s.sees("hello")
		s.types("world")
		_ = s.in.Close() // the end of input reaches the command
		if err := s.end(); code(err) != 7 || s.out.String() != "hello world" || s.err.String() != "no\n" {
			t.Errorf("%s: %v, %q, %q", transport, err, s.out.String(), s.err.String())
		}
		s = e.dial(transport, e.execURL(id, false, false, "sh", "-c", "dd if=/dev/zero bs=1M count=30 2>/dev/null"), false, false)
		if err := s.end(); err != nil || len(s.out.String()) != 30<<20 {
			t.Errorf("%s: %d bytes of 30 MiB, %v", transport, len(s.out.String()), err)
		}
		s = e.dial(transport, e.execURL(id, false, false, "/no/such"), false, false)
		if err := s.end(); code(err) != -1 || !strings.Contains(err.Error(), "/no/such") {
			t.Errorf("%s: a missing program: %v", transport, err)
		}
	}
}

func TestExecTerminal(t *testing.T) {
	e := start(t, node.Options{})
	id := e.idle()
	for _, transport := range transports {
		s := e.dial(transport, e.execURL(id, true, true, "sh"), true, true)
		s.size <- remotecommand.TerminalSize{Width: 101, Height: 37}
		s.types("while [ \"$(stty size)\" != '37 101' ]; do sleep 0.05; done; echo first $TERM $((6*7))\n")
		s.sees("first xterm 42")
		s.size <- remotecommand.TerminalSize{Width: 80, Height: 24}
		s.types("while [ \"$(stty size)\" != '24 80' ]; do sleep 0.05; done; echo second $((7*8))\n")
		s.sees("second 56")
		s.types("exit 9\n")
		if err := s.end(); code(err) != 9 {
			t.Errorf("%s: %v, want code 9", transport, err)
		}
		// A program asks for the size once, as it begins.
		for range 5 {
			s := e.dial(transport, e.execURL(id, false, true, "stty", "size"), false, true)
			s.size <- remotecommand.TerminalSize{Width: 101, Height: 37}
			if err := s.end(); err != nil || s.out.String() != "37 101\r\n" {
				t.Errorf("%s: the first size is %q (%v), want 37 101", transport, s.out.String(), err)
			}
		}
	}
}

// processes of a container, by their command lines.
func (e *env) processes(id string) string {
	e.Helper()
	return e.exec(id, "for p in /proc/[0-9]*; do tr '\\0' ' ' 2>/dev/null <$p/cmdline; echo; done; true")
}

// The client goes away: nothing of its command stays, and its container does.
func TestExecEndsWithItsClient(t *testing.T) {
	e := start(t, node.Options{})
	id := e.idle()
	for _, transport := range transports {
		for _, tty := range []bool{false, true} {
			s := e.dial(transport, e.execURL(id, true, tty, "sh", "-c", "trap '' HUP TERM; sleep 9991 & setsid sleep 9992 & echo begun; sleep 9993"), true, tty)
			s.sees("begun")
			s.hangUp()
			e.eventually("the command's processes are gone", func() bool { return !strings.Contains(e.processes(id), "sleep 999") })
		}
	}
	// The daemon stops: its sessions end, with their processes.
	s := e.dial(common.TransportSpdy, e.execURL(id, true, false, "sh", "-c", "echo begun; exec sleep 9994"), true, false)
	s.sees("begun")
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	if err := s.end(); err == nil || !strings.Contains(err.Error(), "stopping") {
		t.Errorf("the session of a daemon that stops: %v, want that it says so", err)
	}
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	if left := e.processes(id); strings.Contains(left, "sleep 9994") {
		t.Errorf("after the daemon's end these are left: %s", left)
	}
	// The daemon is killed: the next one ends what it finds.
	s = e.dial(common.TransportSpdy, e.execURL(id, true, false, "sh", "-c", "echo begun; exec sleep 9995"), true, false)
	s.sees("begun")
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = s.end() // well or not: the client cannot know
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
	if left := e.processes(id); strings.Contains(left, "sleep 9995") {
		t.Errorf("after the killed daemon's successor came these are left: %s", left)
	}
	if s := e.status(id); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the container is %s, want running", s.GetState())
	}
}

func TestAttachStreams(t *testing.T) {
	e := start(t, node.Options{})
	for _, transport := range transports {
		id := e.interactive(transport, false, false)
		s := e.dial(transport, e.attachURL(id, true, false), true, false)
		s.types("one\n")
		s.sees("got one\n")
		e.eventually("stderr is apart", func() bool { return s.err.String() == "bad one\n" })
		s.hangUp() // detach
		if err := s.end(); err == nil {
			t.Errorf("%s: a client that hangs up ends well", transport)
		}
		// A daemon that starts anew, and one that was killed, and a killed monitor.
		for name, crash := range map[string]func() error{"restart": e.Terminate, "kill": e.Kill, "monitor": e.killMonitor} {
			cut := e.dial(transport, e.attachURL(id, true, false), true, false)
			cut.types("cut\n")
			cut.sees("got cut\n")
			if err := crash(); err != nil {
				t.Fatal(err)
			}
			if name != "monitor" {
				if err := e.Launch(e.ctx); err != nil {
					t.Fatal(err)
				}
			}
			// Over SPDY this client takes a connection that breaks for the end.
			if err := cut.end(); err == nil && (name != "kill" || transport != common.TransportSpdy) {
				t.Errorf("%s, %s: a session that was cut off ends well", transport, name)
			}
			s := e.dial(transport, e.attachURL(id, true, false), true, false)
			s.types(name + "\n")
			s.sees("got " + name + "\n")
			if got := s.out.String(); got != "got "+name+"\n" {
				t.Errorf("%s, %s: the client sees %q", transport, name, got)
			}
			s.hangUp()
			_ = s.end()
		}
		last := e.dial(transport, e.attachURL(id, false, false), false, false)
		e.stopContainer(id)
		if err := last.end(); err != nil {
			t.Errorf("%s: the container ended: %v", transport, err)
		}
		if out, _ := e.logs(id); strings.Count(out, "got ") != 7 {
			t.Errorf("%s: the log has %q", transport, out)
		}
	}
}

// killMonitor kills the node's monitor.
func (e *env) killMonitor() error {
	for _, pid := range e.Monitors() {
		return syscall.Kill(pid, syscall.SIGKILL)
	}
	return errors.New("no monitor runs")
}

func (e *env) stopContainer(id string) {
	e.Helper()
	if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id}); err != nil {
		e.Errorf("stop container %s: %v", id, err)
	}
}

func TestAttachStdinOnce(t *testing.T) {
	e := start(t, node.Options{})
	for _, transport := range transports {
		for name, end := range map[string]func(*session){"hangs up": func(s *session) { s.hangUp() }, "closes its input": func(s *session) { _ = s.in.Close() }} {
			id := e.interactive("once", true, false)
			s := e.dial(transport, e.attachURL(id, true, false), true, false)
			s.types("one\n")
			s.sees("got one\n")
			end(s)
			e.said(id, "got one\nover\n")
			if s := e.status(id); s.GetState() != cri.ContainerState_CONTAINER_RUNNING {
				t.Errorf("%s, the client %s: the container is %s, want running", transport, name, s.GetState())
			}
			e.stopContainer(id)
		}
	}
}

func TestAttachTerminal(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	c := command("tty", "trap 'stty size' WINCH; echo ready; while :; do read -r l && echo got $l; done")
	c.Stdin, c.Tty = true, true
	id := e.startContainer(e.run(config), c, config)
	e.eventually("it is ready", func() bool { out, _ := e.logs(id); return strings.Contains(out, "ready") })
	for i, transport := range transports {
		s := e.dial(transport, e.attachURL(id, true, true), true, true)
		s.size <- remotecommand.TerminalSize{Width: uint16(100 + i), Height: 30}
		s.types("hello\n")
		s.sees("got hello")
		e.eventually("the size reaches the process", func() bool { s.types("\n"); return strings.Contains(s.out.String(), fmt.Sprint("30 ", 100+i)) })
		s.hangUp()
		_ = s.end()
	}
}

// What CRI does not allow is refused before there is a URL.
func TestStreamRefusals(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	running := e.startContainer(pod, command("running", "sleep 1000"), config)
	created := e.create(pod, command("created", "sleep 1000"), config)
	ended := e.startContainer(pod, command("ended", "true"), config)
	e.exited(ended)
	stopped := e.run(e.sandbox())
	if _, err := e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: stopped}); err != nil {
		t.Fatal(err)
	}
	sh := []string{"sh"}
	for name, c := range map[string]struct {
		req   *cri.ExecRequest
		code  codes.Code
		words string
	}{
		"no command":        {&cri.ExecRequest{ContainerId: running, Stdout: true}, codes.InvalidArgument, "cmd"},
		"no stream":         {&cri.ExecRequest{ContainerId: running, Cmd: sh}, codes.InvalidArgument, "stdout"},
		"tty and stderr":    {&cri.ExecRequest{ContainerId: running, Cmd: sh, Stdout: true, Stderr: true, Tty: true}, codes.InvalidArgument, "stderr"},
		"unknown container": {&cri.ExecRequest{ContainerId: "nope", Cmd: sh, Stdout: true}, codes.NotFound, "nope"},
		"no container":      {&cri.ExecRequest{Cmd: sh, Stdout: true}, codes.NotFound, ""},
		"created container": {&cri.ExecRequest{ContainerId: created, Cmd: sh, Stdout: true}, codes.FailedPrecondition, "CREATED"},
		"ended container":   {&cri.ExecRequest{ContainerId: ended, Cmd: sh, Stdout: true}, codes.FailedPrecondition, "EXITED"},
	} {
		_, err := e.rt.Exec(e.ctx, c.req)
		e.refused("exec: "+name, err, c.code, c.words)
		if len(c.req.GetCmd()) == 0 {
			continue
		}
		a := &cri.AttachRequest{ContainerId: c.req.GetContainerId(), Stdout: c.req.GetStdout(), Stderr: c.req.GetStderr(), Tty: c.req.GetTty()}
		_, err = e.rt.Attach(e.ctx, a)
		e.refused("attach: "+name, err, c.code, c.words)
	}
	_, err := e.rt.Attach(e.ctx, &cri.AttachRequest{ContainerId: running, Stdout: true, Tty: true})
	e.refused("attach with a terminal to a container without", err, codes.InvalidArgument, "tty")
	for name, c := range map[string]struct {
		req   *cri.PortForwardRequest
		code  codes.Code
		words string
	}{
		"unknown pod": {&cri.PortForwardRequest{PodSandboxId: "nope"}, codes.NotFound, "nope"},
		"stopped pod": {&cri.PortForwardRequest{PodSandboxId: stopped}, codes.FailedPrecondition, "not ready"},
		"port 0":      {&cri.PortForwardRequest{PodSandboxId: pod, Port: []int32{80, 0}}, codes.InvalidArgument, "port 0"},
		"port 65536":  {&cri.PortForwardRequest{PodSandboxId: pod, Port: []int32{65536}}, codes.InvalidArgument, "65536"},
	} {
		_, err := e.rt.PortForward(e.ctx, c.req)
		e.refused("port-forward: "+name, err, c.code, c.words)
	}
	// A container that ends between the call and the dial.
	to := e.attachURL(running, false, false)
	e.stopContainer(running)
	if err := e.dial(common.TransportSpdy, to, false, false).end(); err == nil || !strings.Contains(err.Error(), "EXITED") {
		t.Errorf("attach to a container that has ended since: %v", err)
	}
}

// A streaming address of the operator's, over TLS.
func TestStreamsOverTLS(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writeCertificate(t, cert, key)
	l, err := net.Listen("tcp", "[::1]:0") // a port that is free
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	_ = l.Close()
	e := start(t, node.Options{Settings: map[string]string{"streaming": fmt.Sprintf("address = \"::1\"\nport = %d\ntls_cert = %q\ntls_key = %q", port, cert, key)}})
	id := e.idle()
	to := e.execURL(id, false, false, "echo", "hi")
	if !strings.HasPrefix(to, fmt.Sprintf("https://[::1]:%d/", port)) {
		t.Errorf("URL %s, want https at ::1, port %d", to, port)
	}
	for _, transport := range transports {
		s := e.dial(transport, e.execURL(id, false, false, "echo", "hi"), false, false)
		if err := s.end(); err != nil || s.out.String() != "hi\n" {
			t.Errorf("%s: %v, %q", transport, err, s.out.String())
		}
	}
	if err := os.WriteFile(cert, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := e.Terminate(); err != nil {
		t.Fatal(err)
	}
	if err := e.Launch(e.ctx); err == nil || !strings.Contains(err.Error(), "streaming.tls_cert") {
		t.Errorf("a broken certificate: %v, want a refusal that names the key", err)
	}
	writeCertificate(t, cert, key)
	if err := e.Launch(e.ctx); err != nil {
		t.Fatal(err)
	}
}
