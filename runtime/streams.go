package runtime

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
	"berth/oci/spec"
	"berth/runtime/operation"
	"berth/runtime/streaming"
	"berth/sandbox"
	"berth/sandbox/namespaces"
)

// dialLimit bounds a connection to a port on a pod's loopback.
const dialLimit = 10 * time.Second

// errPodStopped ends what is forwarded to a pod, and creates in it.
var errPodStopped = errors.New("the pod is stopped")

// Exec returns a URL at which a command in a container runs with a client at
// its streams. It ends with its main process, or killed with all that it
// started when the client goes. The URL works once and for a short time.
func (s *Service) Exec(_ context.Context, req *cri.ExecRequest) (*cri.ExecResponse, error) {
	if err := checkCommand(req.GetCmd()); err != nil {
		return nil, err
	}
	w := streaming.Want{Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr(), Terminal: req.GetTty()}
	if err := checkWant(w); err != nil {
		return nil, err
	}
	c, err := s.runningContainer(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	url, err := s.Streams.Exec(w, func(ctx context.Context, streams oci.Streams) (int32, error) {
		var code int32
		err := s.session(ctx, "Exec", c.Name, func(ctx context.Context) (err error) {
			code, err = s.execSession(ctx, c.ID, req, streams)
			return err
		})
		s.sessionOver("exec", "container", c.ID, err)
		return code, err
	})
	if err != nil {
		return nil, err
	}
	return &cri.ExecResponse{Url: url}, nil
}

// checkWant refuses streams that CRI does not allow together.
func checkWant(w streaming.Want) error {
	if w.Terminal && w.Stderr {
		return fmt.Errorf("%w: tty and stderr are both set: a terminal has one output", errInvalid)
	}
	if !w.Stdin && !w.Stdout && !w.Stderr {
		return fmt.Errorf("%w: none of stdin, stdout and stderr is set", errInvalid)
	}
	return nil
}

func (s *Service) execSession(ctx context.Context, id string, req *cri.ExecRequest, streams oci.Streams) (int32, error) {
	c, err := s.runningContainer(id)
	if err != nil {
		return 0, err
	}
	rt, err := s.runtimeOf(c)
	if err != nil {
		return 0, err
	}
	base, err := oci.ReadProcess(s.bundleDir(id))
	if err != nil {
		return 0, err
	}
	process := spec.ExecProcess(base, req.GetCmd())
	if req.GetTty() {
		process = spec.ExecTerminal(base, req.GetCmd())
	}
	code, err := rt.ExecSession(ctx, id, oci.SessionRequest{Process: process, Root: s.rootOf(c), Streams: streams})
	if err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", id, err)
	}
	return code, nil
}

// session lists a streaming session among the operations; it may last as long as
// its client likes.
func (s *Service) session(ctx context.Context, verb, object string, f func(context.Context) error) error {
	r := operation.Request{Verb: verb, Object: object, Quiet: operation.Endless}
	return s.operations.Track(ctx, r, func(ctx context.Context, op *operation.Operation) error {
		op.Step("streaming session")
		return f(ctx)
	})
}

// sessionOver says, to those who debug, how a session ended.
func (s *Service) sessionOver(kind, key, id string, err error) {
	log := s.Log.WithFields(logrus.Fields{"session": kind, key: id})
	if err != nil {
		log = log.WithError(err)
	}
	log.Debug("streaming session is over")
}

// Attach returns a URL at which a client joins the streams of a running
// container, also of one that an earlier daemon started.
func (s *Service) Attach(_ context.Context, req *cri.AttachRequest) (*cri.AttachResponse, error) {
	w := streaming.Want{Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr(), Terminal: req.GetTty()}
	if err := checkWant(w); err != nil {
		return nil, err
	}
	c, err := s.runningContainer(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	if tty := c.Config.Message.GetTty(); tty != w.Terminal {
		return nil, fmt.Errorf("%w: tty is %v, but container %s was made with tty %v", errInvalid, w.Terminal, c.ID, tty)
	}
	url, err := s.Streams.Attach(w, func(ctx context.Context, streams oci.Streams) (int32, error) {
		err := s.session(ctx, "Attach", c.Name, func(ctx context.Context) error { return s.attachSession(ctx, c.ID, streams) })
		s.sessionOver("attach", "container", c.ID, err)
		return 0, err
	})
	if err != nil {
		return nil, err
	}
	return &cri.AttachResponse{Url: url}, nil
}

func (s *Service) attachSession(ctx context.Context, id string, streams oci.Streams) error {
	c, err := s.runningContainer(id)
	if err != nil {
		return err
	}
	rt, err := s.runtimeOf(c)
	if err != nil {
		return err
	}
	return rt.Attach(ctx, id, streams)
}

// PortForward returns a URL at which a client reaches TCP ports on a pod's
// loopback, IPv4 first, then IPv6; of a pod in the host's network, on the
// host's. It ends when the pod stops.
func (s *Service) PortForward(_ context.Context, req *cri.PortForwardRequest) (*cri.PortForwardResponse, error) {
	ports := make([]uint16, 0, len(req.GetPort()))
	for _, p := range req.GetPort() {
		if p < 1 || p > 65535 {
			return nil, fmt.Errorf("%w: port %d is outside 1 to 65535", errInvalid, p)
		}
		ports = append(ports, uint16(p))
	}
	sb, err := s.findSandbox(req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	alive := s.podLife.of(sb.ID)
	// Only now: a stop that marks the pod after this finds the life to end.
	if _, err := s.readySandbox(sb.ID); err != nil {
		s.podLife.end(sb.ID)
		return nil, err
	}
	url, err := s.Streams.Forward(alive, ports, func(ctx context.Context, port uint16) (c net.Conn, err error) {
		r := operation.Request{Verb: "PortForward", Object: sb.Name}
		err = s.operations.Track(ctx, r, func(ctx context.Context, op *operation.Operation) (err error) {
			op.Step("connect to the port")
			c, err = s.dialPod(ctx, sb, port)
			return err
		})
		s.sessionOver("port-forward", "sandbox", sb.ID, err)
		return c, err
	})
	if err != nil {
		return nil, err
	}
	return &cri.PortForwardResponse{Url: url}, nil
}

// dialPod connects to a port on a pod's loopback.
func (s *Service) dialPod(ctx context.Context, sb *sandbox.Sandbox, port uint16) (c net.Conn, err error) {
	dial := func() error {
		d := net.Dialer{Timeout: dialLimit}
		var errs []error
		for _, host := range []string{"127.0.0.1", "::1"} {
			if c, err = d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(port)))); err == nil {
				return nil
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	if _, err := s.readySandbox(sb.ID); err != nil {
		return nil, err
	}
	if sb.Namespaces().GetNetwork() == cri.NamespaceMode_NODE {
		err = dial()
	} else {
		err = namespaces.Enter(namespaces.Path(s.namespaceDir(sb.ID), "net"), dial)
	}
	if err != nil {
		return nil, fmt.Errorf("connect to pod sandbox %s: %w", sb.ID, err)
	}
	return c, nil
}

// podLife has a context for each pod that something is forwarded to or a container
// was made in. A socket in a pod's network namespace would keep that alive, a create
// that hangs would hold the stop up.
type podLife struct {
	mu   sync.Mutex
	pods map[string]life // guarded by mu
}

type life struct {
	ctx context.Context
	end context.CancelCauseFunc
}

// of returns the context of a pod, which ends by end.
func (p *podLife) of(id string) context.Context {
	p.mu.Lock()
	defer p.mu.Unlock()
	l, ok := p.pods[id]
	if !ok {
		l.ctx, l.end = context.WithCancelCause(context.Background())
		p.pods[id] = l
	}
	return l.ctx
}

// end ends what is forwarded to a pod, and creates in it. Idempotent.
func (p *podLife) end(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l, ok := p.pods[id]; ok {
		l.end(errPodStopped)
		delete(p.pods, id)
	}
}
