package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/cri-tools/pkg/common"

	"berth/critest/node"
)

// errBroken: a streaming session ended before its time. The kubelet's clients
// open another.
var errBroken = errors.New("the session broke off")

// stream connects a client, whose protocol is one of two.
func stream(ctx context.Context, transport int, to string, o remotecommand.StreamOptions) error {
	u, err := url.Parse(to)
	if err != nil {
		return err
	}
	x, err := common.GetExecutor([]string{common.TransportSpdy, common.TransportWebsocket}[transport], u, &rest.TLSClientConfig{Insecure: true})
	if err != nil {
		return err
	}
	return x.StreamWithContext(ctx, o)
}

// exec runs a command that repeats its stdin and ends with a code.
func (l *life) exec(ctx context.Context, b *box, transport, code, size int) error {
	return l.request(ctx, "Exec", func(ctx context.Context) error {
		res, err := l.rt.Exec(ctx, &cri.ExecRequest{ContainerId: b.id, Stdin: true, Stdout: true, Stderr: true,
			Cmd: []string{"sh", "-c", fmt.Sprintf("cat; echo no >&2; exit %d", code)}})
		if err != nil {
			return err
		}
		var out, errs bytes.Buffer
		said := bytes.Repeat([]byte("y"), size)
		err = stream(ctx, transport, res.GetUrl(), remotecommand.StreamOptions{Stdin: bytes.NewReader(said), Stdout: &out, Stderr: &errs})
		var exit interface{ ExitStatus() int }
		switch {
		case err != nil && !errors.As(err, &exit):
			return fmt.Errorf("%w: %w", errBroken, err)
		case err == nil && code != 0, err != nil && exit.ExitStatus() != code:
			return fmt.Errorf("%w: it ended with %v, want code %d", errBroken, err, code)
		case !bytes.Equal(out.Bytes(), said) || errs.String() != "no\n":
			return fmt.Errorf("%w: it said %d bytes and %q, want %d and no", errBroken, out.Len(), errs.String(), size)
		}
		return nil
	})
}

// attach opens a session, sees the container speak, and leaves. What reads its
// stdin must answer.
func (l *life) attach(ctx context.Context, b *box, transport int) error {
	return l.request(ctx, "Attach", func(ctx context.Context) error {
		res, err := l.rt.Attach(ctx, &cri.AttachRequest{ContainerId: b.id, Stdin: b.kind == cat, Stdout: true, Stderr: true})
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		seen := &node.Screen{}
		o, want := remotecommand.StreamOptions{Stdout: seen, Stderr: seen}, "\n"
		if b.kind == cat {
			word := fmt.Sprintf("word%d", time.Now().UnixNano())
			r, in := io.Pipe()
			defer in.Close()
			go func() { _, _ = io.WriteString(in, word+"\n") }() // it fails when the session does, which is told below
			o.Stdin, want = r, "got "+word
		}
		ended := make(chan error, 1)
		go func() { ended <- stream(ctx, transport, res.GetUrl(), o) }()
		if b.kind == stubborn {
			return nil // says nothing any more; the session is left as it is
		}
		for end := time.Now().Add(time.Minute); !strings.Contains(seen.String(), want); time.Sleep(10 * time.Millisecond) {
			select {
			case err := <-ended:
				return fmt.Errorf("%w: %w", errBroken, errors.Join(err, ctx.Err()))
			default:
			}
			if time.Now().After(end) {
				return fmt.Errorf("%w: %s says nothing to who attached", errBroken, b.name)
			}
		}
		return nil
	})
}

// vanish opens a session and leaves at once.
func (l *life) vanish(ctx context.Context, b *box) error {
	return l.request(ctx, "Attach and go", func(ctx context.Context) error {
		res, err := l.rt.Attach(ctx, &cri.AttachRequest{ContainerId: b.id, Stdout: true, Stderr: true})
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
		defer cancel()
		_ = stream(ctx, 0, res.GetUrl(), remotecommand.StreamOptions{Stdout: io.Discard, Stderr: io.Discard}) // its end is the point
		return nil
	})
}
