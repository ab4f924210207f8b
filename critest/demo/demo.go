package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"berth/critest/node"
	"berth/critest/registry"
)

// demo is what the steps hand on to each other.
type demo struct {
	out       io.Writer
	registry  *registry.Registry
	node      *node.Node
	imageID   string
	pod       string
	container string
	ip        string
}

func (d *demo) say(text string) { fmt.Fprintf(d.out, "\n%s\n", text) }

// step runs one step and prints what it showed and how long it took.
func (d *demo) step(what string, do func() (shown string, err error)) error {
	begin := time.Now()
	shown, err := do()
	took := float64(time.Since(begin).Microseconds()) / 1000
	if err != nil {
		fmt.Fprintf(d.out, "  WRONG  %s (%.0f ms)\n", what, took)
		return fmt.Errorf("%s: %w", what, err)
	}
	fmt.Fprintf(d.out, "  ok     %s (%.0f ms)\n", what, took)
	for line := range strings.Lines(shown) {
		fmt.Fprintf(d.out, "           %s\n", strings.TrimRight(line, "\n"))
	}
	return nil
}

// crictl runs crictl and returns its trimmed output.
func (d *demo) crictl(ctx context.Context, args ...string) (string, error) {
	out, err := d.node.Crictl(ctx, args...)
	return strings.TrimSpace(out), err
}

// file writes a configuration for crictl and returns its path.
func (d *demo) file(name string, content any) (string, error) {
	path := filepath.Join(d.node.Dir, name)
	data, err := json.Marshal(content)
	if err != nil {
		return "", fmt.Errorf("encode %s: %w", name, err)
	}
	return path, os.WriteFile(path, data, 0o600)
}

type object map[string]any

// birth pulls the image and makes pod and container.
func (d *demo) birth(ctx context.Context) error {
	d.say("A pod is born, driven by crictl.")
	err := d.step("crictl pull "+reference, func() (string, error) {
		if _, err := d.crictl(ctx, "pull", reference); err != nil {
			return "", err
		}
		id, err := d.crictl(ctx, "inspecti", "-o", "go-template", "--template", "{{.status.id}}", reference)
		if err == nil && id != d.imageID {
			err = fmt.Errorf("the image's id is %s, want its config digest %s", id, d.imageID)
		}
		return "fetched, checked and unpacked in one pass; its id is its config's digest", err
	})
	if err != nil {
		return err
	}
	pod, err := d.file("pod.json", object{
		"metadata":      object{"name": "hello", "namespace": "demo", "uid": "demo-1", "attempt": 0},
		"hostname":      "hello",
		"log_directory": d.node.LogDir(),
		"linux":         object{"security_context": object{"namespace_options": object{"pid": 1}}}, // 1: each container its own
	})
	if err != nil {
		return err
	}
	err = d.step("crictl runp: the sandbox", func() (string, error) {
		if d.pod, err = d.crictl(ctx, "runp", pod); err != nil {
			return "", err
		}
		return d.inspectPod(ctx)
	})
	if err != nil {
		return err
	}
	return d.makeContainer(ctx, pod)
}

// inspectPod reads the pod's address and the steps of its birth.
func (d *demo) inspectPod(ctx context.Context) (string, error) {
	text, err := d.crictl(ctx, "inspectp", "-o", "json", d.pod)
	if err != nil {
		return "", err
	}
	var answer struct {
		Status struct {
			State   string
			Network struct{ IP string }
		}
		Info struct {
			Steps []struct {
				Name string
				NS   int64
			}
		}
	}
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		return "", fmt.Errorf("read crictl inspectp: %w", err)
	}
	d.ip = answer.Status.Network.IP
	if answer.Status.State != "SANDBOX_READY" || d.ip == "" || len(answer.Info.Steps) == 0 {
		return "", fmt.Errorf("the pod is %s with address %q and %d steps, want SANDBOX_READY, an address and its steps",
			answer.Status.State, d.ip, len(answer.Info.Steps))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "ready at %s; its birth, step by step:\n", d.ip)
	for _, s := range answer.Info.Steps {
		fmt.Fprintf(&b, "  %-24s %7.2f ms\n", s.Name, float64(s.NS)/1e6)
	}
	processes := d.node.Processes()
	fmt.Fprintf(&b, "no pause image and no pause process: the pod has %d processes", len(processes))
	if len(processes) != 0 {
		return "", fmt.Errorf("an empty pod has processes: %v", processes)
	}
	return b.String(), nil
}

// makeContainer creates and starts the web server.
func (d *demo) makeContainer(ctx context.Context, pod string) error {
	config, err := d.file("container.json", object{
		"metadata": object{"name": "web", "attempt": 0},
		"image":    object{"image": reference},
		"log_path": "web.log",
		"linux": object{
			"resources":        object{"memory_limit_in_bytes": 64 << 20, "cpu_shares": 512},
			"security_context": object{"namespace_options": object{"pid": 1}},
		},
	})
	if err != nil {
		return err
	}
	err = d.step("crictl create: rootfs, bundle and a container that waits", func() (string, error) {
		d.container, err = d.crictl(ctx, "create", d.pod, config, pod)
		return "", err
	})
	if err != nil {
		return err
	}
	return d.step("crictl start: its program runs", func() (string, error) {
		if _, err := d.crictl(ctx, "start", d.container); err != nil {
			return "", err
		}
		return "", d.wantState(ctx, "CONTAINER_RUNNING")
	})
}

// wantState checks what crictl says about the container.
func (d *demo) wantState(ctx context.Context, want string) error {
	state, err := d.crictl(ctx, "inspect", "-o", "go-template", "--template", "{{.status.state}}", d.container)
	if err == nil && state != want {
		err = fmt.Errorf("the container is %s, want %s", state, want)
	}
	return err
}

// life asks the running container for what it should give.
func (d *demo) life(ctx context.Context) error {
	d.say("The pod at work.")
	if err := d.step("GET http://"+d.ip+"/ from this host", func() (string, error) { return d.get(ctx) }); err != nil {
		return err
	}
	err := d.step("crictl logs", func() (string, error) {
		logs, err := d.crictl(ctx, "logs", d.container)
		if err == nil && !strings.Contains(logs, "httpd: GET /") {
			err = fmt.Errorf("the log lacks the request: %q", logs)
		}
		return logs, err
	})
	if err != nil {
		return err
	}
	return d.step("crictl exec -s: a command inside", func() (string, error) {
		out, err := d.crictl(ctx, "exec", "-s", d.container, "sh", "-c", "echo $(hostname) has $(ls /proc | grep -c '^[0-9]') processes, this one among them; exit 0")
		if err == nil && !strings.HasPrefix(out, "hello has ") {
			err = fmt.Errorf("the command said %q", out)
		}
		return out, err
	})
}

// get fetches the web server's page; it may need a moment to listen.
func (d *demo) get(ctx context.Context) (string, error) {
	client := http.Client{Timeout: 2 * time.Second}
	for attempt := 0; ; attempt++ {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+d.ip+"/", nil)
		if err != nil {
			return "", fmt.Errorf("make a request: %w", err)
		}
		res, err := client.Do(req)
		if err != nil {
			if attempt < 50 && ctx.Err() == nil {
				time.Sleep(20 * time.Millisecond)
				continue
			}
			return "", err
		}
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err == nil && (res.StatusCode != http.StatusOK || !strings.Contains(string(body), "in pod hello")) {
			err = fmt.Errorf("status %s, body %q", res.Status, body)
		}
		return string(body), err
	}
}

// outlive kills the daemon and starts it again under the running pod.
func (d *demo) outlive(ctx context.Context) error {
	d.say("The daemon is killed, the pod is not.")
	err := d.step("kill -9 the daemon, ask the pod again", func() (string, error) {
		if err := d.node.Kill(); err != nil {
			return "", err
		}
		return d.get(ctx)
	})
	if err != nil {
		return err
	}
	return d.step("start the daemon again", func() (string, error) {
		if err := d.node.Launch(ctx); err != nil {
			return "", err
		}
		if err := d.wantState(ctx, "CONTAINER_RUNNING"); err != nil {
			return "", err
		}
		ip, err := d.crictl(ctx, "inspectp", "-o", "go-template", "--template", "{{.status.network.ip}}", d.pod)
		if err == nil && ip != d.ip {
			err = fmt.Errorf("the pod's address is %q, was %q", ip, d.ip)
		}
		return "it found the running container and the pod's address again", err
	})
}

// death stops and removes what birth made.
func (d *demo) death(ctx context.Context) error {
	d.say("The end.")
	steps := []struct {
		what string
		args []string
	}{
		{"crictl stop: SIGTERM, and its processes are gone", []string{"stop", "--timeout", "10", d.container}},
		{"crictl rm: rootfs and bundle are gone", []string{"rm", d.container}},
		{"crictl stopp: network and namespaces are given back", []string{"stopp", d.pod}},
		{"crictl rmp: the record goes last", []string{"rmp", d.pod}},
	}
	for _, s := range steps {
		err := d.step(s.what, func() (string, error) {
			if _, err := d.crictl(ctx, s.args...); err != nil {
				return "", err
			}
			if s.args[0] == "stop" {
				return "", d.wantState(ctx, "CONTAINER_EXITED")
			}
			return "", nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
