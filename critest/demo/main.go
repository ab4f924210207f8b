// Command demo shows a pod's life on berth: it builds an image on the spot,
// serves it from a registry in this process, starts a daemon in a temporary
// place and drives it with the real crictl, saying what each step showed.
//
// It runs in network and IPC namespaces of its own, so nothing else on the
// machine is touched, and it exits 0 only when every step was right and nothing
// is left behind. Ctrl-C and SIGTERM end it early and as cleanly.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
)

// limit is far above what a demo takes; something hangs when it is reached.
const limit = 2 * time.Minute

// reference is the demo's image; docker.io is answered by the local registry.
const reference = "docker.io/berth/hello:1"

func main() {
	if err := node.Isolate(); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := run(ctx, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo: not as it should be:", err)
		os.Exit(1)
	}
}

// run is the whole demo. Whatever happens, the node is closed and checked.
func run(ctx context.Context, out io.Writer) (err error) {
	begin := time.Now()
	reg, err := registry.Start()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reg.Close()) }()
	d := &demo{out: out, registry: reg}
	defer func() {
		if d.node != nil {
			err = errors.Join(err, d.finish(ctx, err == nil))
		}
		if err == nil {
			fmt.Fprintf(out, "\nAll of it was as it should be, in %.1f s.\n", time.Since(begin).Seconds())
		}
	}()
	for _, part := range []func(context.Context) error{d.prepare, d.birth, d.life, d.outlive, d.death} {
		if err := part(ctx); err != nil {
			return errors.Join(ctx.Err(), err)
		}
	}
	return nil
}

// finish closes the node, which removes what an interrupted demo left and looks
// for leaks.
func (d *demo) finish(ctx context.Context, wasRight bool) error {
	interrupted := ctx.Err() != nil
	ctx = context.WithoutCancel(ctx)
	if interrupted {
		d.say("Interrupted: cleaning up.")
		return d.node.Close(ctx)
	}
	if !wasRight {
		fmt.Fprintf(d.out, "\nThe daemon's log ends with:\n%s\n\nCleaning up.\n", d.node.LogTail(15))
		return d.node.Close(ctx)
	}
	return d.step("look for anything left behind", func() (string, error) {
		return "no process, mount, namespace, cgroup, address, link or file of the pod is left", d.node.Close(ctx)
	})
}

// prepare makes the image and starts the daemon.
func (d *demo) prepare(ctx context.Context) error {
	d.say("First, what the pod needs.")
	err := d.step("build an image from Debian's busybox and a Go web server", func() (string, error) {
		deps, err := node.Deps()
		if err != nil {
			return "", err
		}
		parts, err := images.Load(deps)
		if err != nil {
			return "", err
		}
		web, err := parts.Program("usr/sbin/httpd", 0o755)
		if err != nil {
			return "", err
		}
		image := images.Image{Layers: []images.Layer{parts.Base, web}, Config: ispec.ImageConfig{
			Entrypoint: []string{"/usr/sbin/httpd"}, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"},
		}}
		done, err := image.Publish(d.registry, "berth/hello", "1")
		d.imageID = done.Config.String()
		size := len(parts.Base.Blob) + len(web.Blob)
		return fmt.Sprintf("2 layers, %.1f MB, served by a registry on %s", float64(size)/1e6, d.registry.Addr()), err
	})
	if err != nil {
		return err
	}
	return d.step("start berth beside whatever runs here", func() (string, error) {
		d.node, err = node.Start(ctx, node.Options{Mirror: d.registry.Addr()})
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("it answers on %s and says that runtime and network are ready", d.node.Socket), nil
	})
}
