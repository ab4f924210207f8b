package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/cri-tools/pkg/common"

	"berth/critest/node"
)

// errSilent: a client neither gets an answer nor is told that its session has ended.
var errSilent = errors.New("the session neither goes on nor ends")

// sessions are the clients of a pod that stay connected, one of each kind.
type sessions struct {
	l    *life
	kind map[string]*session
	open map[string]func(context.Context) (*session, error) // by kind, how to connect
	cut  []string                                           // those that ended although their pod went on
}

// session is one client.
type session struct {
	seen   node.Screen
	told   node.Screen       // what the client's library tells nobody but its log
	ended  chan error        // receives the end once
	hangUp func()            // ends it from the client's side; idempotent
	ask    func(n int) error // nil: it speaks unasked
}

func newSessions(l *life) *sessions {
	return &sessions{l: l, kind: map[string]*session{}, open: map[string]func(context.Context) (*session, error){}}
}

// connect is a request that opens a session of a kind and hears something there.
func (s *sessions) connect(kind, name string, open func(context.Context) (*session, error)) request {
	s.open[kind] = open
	return request{name: name, send: func(ctx context.Context) error {
		if old := s.kind[kind]; old != nil {
			old.hangUp()
			delete(s.kind, kind)
		}
		one, err := open(ctx)
		if err != nil {
			return err
		}
		s.kind[kind] = one
		return one.speaks(ctx)
	}}
}

// attach joins a container that logs.
func (s *sessions) attach(name string) request {
	return s.connect("attach", "Attach "+name, func(ctx context.Context) (*session, error) {
		res, err := s.l.w.Runtime().Attach(ctx, &cri.AttachRequest{ContainerId: s.l.ids[name], Stdout: true})
		if err != nil {
			return nil, err
		}
		return dial(res.GetUrl())
	})
}

// exec runs a command that speaks. The one before must be gone with its session.
func (s *sessions) exec(name string) request {
	return s.connect("exec", "Exec "+name, func(ctx context.Context) (*session, error) {
		if err := s.gone(ctx, "exec"); err != nil {
			return nil, err
		}
		res, err := s.l.w.Runtime().Exec(ctx, &cri.ExecRequest{ContainerId: s.l.ids[name], Stdout: true, Cmd: s.endless("exec")})
		if err != nil {
			return nil, err
		}
		return dial(res.GetUrl())
	})
}

// sync is an ExecSync whose command does not end; it says something as long as that runs.
func (s *sessions) sync(name string) request {
	return s.connect("sync", "ExecSync "+name+" without end", func(ctx context.Context) (*session, error) {
		if err := s.gone(ctx, "sync"); err != nil {
			return nil, err
		}
		run, cancel := context.WithCancel(context.Background())
		one := &session{ended: make(chan error, 1), hangUp: cancel}
		one.ask = func(int) error {
			for end := time.Now().Add(patience / 3); s.runs("sync") == ""; time.Sleep(10 * time.Millisecond) {
				if time.Now().After(end) {
					return errSilent
				}
				select {
				case err := <-one.ended:
					one.ended <- err
					return err
				default:
				}
			}
			_, err := one.seen.Write([]byte("it runs\n"))
			return err
		}
		go func() {
			_, err := s.l.w.Runtime().ExecSync(run, &cri.ExecSyncRequest{ContainerId: s.l.ids[name], Cmd: s.endless("sync")})
			one.ended <- err
		}()
		return one, nil
	})
}

// endless is the command of an exec, with what runs looks for.
func (s *sessions) endless(kind string) []string {
	return []string{"sh", "-c", "while :; do echo hi; sleep 0.05; done", kind + "-of-" + s.l.pod}
}

// runs is where in /proc the command of an exec is; empty: there is none.
func (s *sessions) runs(kind string) string {
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err.Error()
	}
	for _, file := range lines {
		if text, _ := os.ReadFile(file); strings.HasSuffix(string(text), "\x00"+kind+"-of-"+s.l.pod+"\x00") {
			return file
		}
	}
	return ""
}

// gone waits until the command of a session that is over runs no more.
func (s *sessions) gone(ctx context.Context, kind string) error {
	for {
		left := s.runs(kind)
		if left == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the command of a session that is over still runs (%s): %w", left, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// dial connects a client, as kubectl is one.
func dial(to string) (*session, error) {
	u, err := url.Parse(to)
	if err != nil {
		return nil, err
	}
	x, err := common.GetExecutor(common.TransportSpdy, u, &rest.TLSClientConfig{Insecure: true})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	one := &session{ended: make(chan error, 1), hangUp: cancel}
	go func() { one.ended <- x.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &one.seen}) }()
	return one, nil
}

// forward connects to a port of the pod that answers with what it is told.
func (s *sessions) forward(port int32) request {
	return s.connect("forward", "PortForward", func(ctx context.Context) (*session, error) {
		res, err := s.l.w.Runtime().PortForward(ctx, &cri.PortForwardRequest{PodSandboxId: s.l.pod, Port: []int32{port}})
		if err != nil {
			return nil, err
		}
		return tunnel(ctx, res.GetUrl(), port)
	})
}

// tunnel is a client like kubectl port-forward with one connection.
func tunnel(ctx context.Context, to string, port int32) (*session, error) {
	u, err := url.Parse(to)
	if err != nil {
		return nil, err
	}
	dialer, err := common.GetDialer(common.TransportSpdy, u, &rest.TLSClientConfig{Insecure: true})
	if err != nil {
		return nil, err
	}
	one, stop, ready := &session{ended: make(chan error, 2)}, make(chan struct{}), make(chan struct{})
	f, err := portforward.NewForStreaming(dialer, []string{fmt.Sprintf("0:%d", port)}, stop, ready, &one.seen, &one.seen)
	if err != nil {
		return nil, err
	}
	var conn net.Conn
	over := false
	one.hangUp = func() {
		if conn != nil {
			_ = conn.Close()
		}
		if !over {
			over = true
			close(stop)
		}
	}
	utilruntime.ErrorHandlers = []utilruntime.ErrorHandler{func(_ context.Context, err error, _ string, _ ...any) {
		fmt.Fprintln(&one.told, err)
	}}
	ended := make(chan error, 1)
	go func() { ended <- f.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-ended:
		return nil, err
	case <-ctx.Done():
		one.hangUp()
		return nil, ctx.Err()
	}
	go func() { one.ended <- <-ended }()
	ports, err := f.GetPorts()
	if err == nil {
		conn, err = net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", ports[0].Local))
	}
	if err != nil {
		one.hangUp()
		return nil, err
	}
	one.ask = func(n int) error { _, err := fmt.Fprintf(conn, "%d\n", n); return err }
	go func() {
		_, err := io.Copy(&one.seen, bufio.NewReader(conn))
		one.ended <- fmt.Errorf("the connection is over: %w", errors.Join(err, io.EOF))
	}()
	return one, nil
}

// speaks waits for something that was not there yet.
func (one *session) speaks(ctx context.Context) error {
	before := len(one.seen.String())
	if one.ask != nil {
		if err := one.ask(before); errors.Is(err, errSilent) {
			return err
		} else if err != nil {
			return fmt.Errorf("the session has ended: %w, saying %q (%s)", err, one.seen.String(), one.told.String())
		}
	}
	for len(one.seen.String()) == before {
		select {
		case err := <-one.ended:
			one.ended <- err
			return fmt.Errorf("the session has ended: %w, saying %q (%s)", errors.Join(err, io.EOF), one.seen.String(), one.told.String())
		case <-ctx.Done():
			return errSilent
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}

// hold wants each session to go on. One that has ended, as its daemon or monitor
// has, is opened again: cut notes it where it was not to be expected.
func (s *sessions) hold(expected bool) request {
	return request{name: "the sessions", send: func(ctx context.Context) error {
		for _, kind := range []string{"attach", "exec", "sync", "forward"} {
			limited, cancel := context.WithTimeout(ctx, patience/3)
			err := s.holdOne(limited, kind, expected)
			cancel()
			if err != nil {
				return fmt.Errorf("%s: %w", kind, err)
			}
		}
		return nil
	}}
}

func (s *sessions) holdOne(ctx context.Context, kind string, expected bool) error {
	err := s.kind[kind].speaks(ctx)
	if errors.Is(err, errSilent) || err == nil {
		return err
	}
	if !expected {
		s.cut = append(s.cut, kind+": "+err.Error())
	}
	s.kind[kind].hangUp()
	one, err := s.open[kind](ctx)
	if err != nil {
		return fmt.Errorf("open it again: %w", err)
	}
	s.kind[kind] = one
	return one.speaks(ctx)
}

// hangUp ends the sessions of a life that went wrong.
func (l *life) hangUp() {
	if l.sessions != nil {
		for _, one := range l.sessions.kind {
			one.hangUp()
		}
	}
}

// over wants sessions of some kinds to have ended by themselves.
func (s *sessions) over(kinds ...string) request {
	return request{name: "the end of the sessions", send: func(ctx context.Context) error {
		for _, kind := range kinds {
			select {
			case <-s.kind[kind].ended:
				s.kind[kind].hangUp()
			case <-ctx.Done():
				return fmt.Errorf("%s goes on without its container: %w", kind, ctx.Err())
			}
		}
		return errors.Join(s.gone(ctx, "exec"), s.gone(ctx, "sync"))
	}}
}
