package outside

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// process is a child that serves looks.
type process struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *os.File
	reply *json.Decoder
	since time.Time // idle since
}

// take gives an idle process, or a new one.
func (l *Looker) take() (*process, error) {
	l.mu.Lock()
	if n := len(l.idle); n > 0 {
		p := l.idle[n-1]
		l.idle = l.idle[:n-1]
		l.mu.Unlock()
		return p, nil
	}
	l.mu.Unlock()
	return start(l.o.Command)
}

func start(command []string) (*process, error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir, cmd.Stderr = "/", os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the terminal's signals are for the daemon
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("look outside: %w", err)
	}
	out, theirs, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("look outside: %w", err)
	}
	defer theirs.Close()
	cmd.Stdout = theirs
	if err := cmd.Start(); err != nil {
		_ = out.Close()
		return nil, fmt.Errorf("look outside: %w", err)
	}
	return &process{cmd: cmd, in: in, out: out, reply: json.NewDecoder(out)}, nil
}

// put keeps a process for the next look, for a while.
func (l *Looker) put(p *process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.idle) >= maxIdle {
		go p.end()
		return
	}
	p.since = time.Now()
	l.idle = append(l.idle, p)
	time.AfterFunc(idleFor, l.expire)
}

func (l *Looker) expire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.idle) > 0 && time.Since(l.idle[0].since) >= idleFor {
		go l.idle[0].end()
		l.idle = l.idle[1:]
	}
}

// ask has the process answer. After an error it is of no more use.
func (p *process) ask(ctx context.Context, q question) (a reply, err error) {
	stop := context.AfterFunc(ctx, func() { _ = p.out.SetReadDeadline(time.Unix(1, 0)) })
	if err := json.NewEncoder(p.in).Encode(q.request); err != nil {
		stop()
		return a, fmt.Errorf("look outside: %w", err)
	}
	for {
		a = reply{}
		if err = p.reply.Decode(&a); err != nil || !a.Alive {
			break
		}
		q.alive()
	}
	if !stop() && err == nil {
		err = ctx.Err() // it came in the last instant, and the deadline is set for good
	}
	if errors.Is(err, io.EOF) {
		err = errors.New("its process has ended")
	}
	if err != nil {
		return a, fmt.Errorf("look outside at %s: %w", q.Path, err)
	}
	return a, nil
}

// end lets an idle process end by itself.
func (p *process) end() {
	_ = p.in.Close()
	_ = p.cmd.Wait()
	_ = p.out.Close()
}

// kill returns when the kernel has let the process go.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	p.end()
}
