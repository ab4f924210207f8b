package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// patience bounds one request, its repetitions and the daemon's restart.
var patience = leakcheck.Patience(90 * time.Second)

// pluginTime is the daemon's deadline for one chain of plugins.
var pluginTime = leakcheck.Patience(10 * time.Second)

// world is the node on which the pods live, with all that can go wrong on it.
type world struct {
	*node.Node
	dir     string // of the test's own files
	stock   *node.Stock
	steps   *steps
	calls   *calls // nil: nobody supervises system calls
	parts   *parts
	watcher *watcher
	base    footprint
	serial  int // of the life, for names
	// rebooted: the daemon of this life starts in another boot, see Launch.
	rebooted      bool
	noCheckpoints string // why there are none here; empty: they are possible
	stop          context.CancelFunc
	watched       chan struct{} // closed when the watchers have ended
}

// begin makes a world; end ends it. Supervised, its daemon's system calls wait for
// the test.
func begin(ctx context.Context, stock *node.Stock, supervised bool) (w *world, err error) {
	w = &world{stock: stock, watched: make(chan struct{})}
	if w.dir, err = os.MkdirTemp("", "berth-crash-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.end(context.WithoutCancel(ctx)))
		}
	}()
	if w.steps, err = hear(w.dir); err != nil {
		return w, err
	}
	deps, err := node.Deps()
	if err != nil {
		return w, err
	}
	if w.parts, err = standBefore(filepath.Join(w.dir, "parts"), deps); err != nil {
		return w, err
	}
	o := node.Options{Mirror: stock.Addr(), LogLevel: "info", Runc: filepath.Join(w.parts.dir, "runc"), Plugins: filepath.Join(w.parts.dir, "cni"),
		RootSize: "64m", StateSize: "64m", Settings: w.settings()}
	if supervised {
		if w.calls, err = superviseCalls(w.dir, w.steps); err != nil {
			return w, err
		}
		o.Wrap = []string{"/proc/self/exe", superviseVerb}
		if o.Wrap[0], err = os.Executable(); err != nil {
			return w, err
		}
	}
	if w.Node, err = node.Start(ctx, o); err != nil {
		return w, err
	}
	if err := w.writeNetworks(); err != nil {
		return w, err
	}
	if _, err := w.Crictl(ctx, "pull", images.Busybox); err != nil {
		return w, err
	}
	if w.noCheckpoints, err = w.checkpoints(ctx); err != nil {
		return w, err
	}
	w.watch(ctx)
	return w, nil
}

// watch starts the watchers, until end.
func (w *world) watch(ctx context.Context) {
	ctx, w.stop = context.WithCancel(ctx)
	w.watcher = watch(w.Runtime(), w.State())
	go func() {
		defer close(w.watched)
		done := make(chan struct{})
		go func() { defer close(done); w.watcher.follow(ctx) }()
		w.watcher.run(ctx)
		<-done
	}()
}

// end closes the node and removes all that belongs to the world.
func (w *world) end(ctx context.Context) error {
	var err error
	if w.stop != nil {
		w.stop()
		<-w.watched
	}
	if w.Node != nil {
		err = w.Close(ctx)
		w.dropBridges()
	}
	if w.steps != nil {
		err = errors.Join(err, w.steps.close())
	}
	if w.calls != nil {
		err = errors.Join(err, w.calls.listener.Close())
	}
	return errors.Join(err, os.RemoveAll(w.dir))
}

// settings of the daemon: two handlers with networks of their own.
func (w *world) settings() map[string]string {
	s := map[string]string{"metrics": `address = "127.0.0.1:0"`, "cni": fmt.Sprintf("timeout = %q", pluginTime),
		"image": fmt.Sprintf("preload_dir = %q", w.preloads())}
	for _, name := range networks {
		s["runtime.handlers."+name] = fmt.Sprintf("path = %q\ncni_conf_dir = %q", filepath.Join(w.parts.dir, "runc"), w.network(name))
	}
	return s
}

// networks are those beside the node's ordinary one, by the handler that uses them.
var networks = []string{"iptables", "portless"}

func (w *world) network(name string) string { return filepath.Join(w.dir, "net-"+name) }

func (w *world) leases() string { return filepath.Join(w.dir, "leases") }

func bridgeOf(i int) string { return fmt.Sprintf("bc%d-%d", os.Getpid(), i) }

// writeNetworks makes their configurations, which the daemon follows.
func (w *world) writeNetworks() error {
	for i, name := range networks {
		portmap := ""
		if name == "iptables" {
			portmap = `, {"type": "portmap", "backend": "iptables", "capabilities": {"portMappings": true}}`
		}
		text := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "crash-%[1]s", "plugins": [
  {"type": "bridge", "bridge": %[2]q, "isGateway": true, "ipMasq": true, "ipMasqBackend": %[5]q, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": %[3]q, "ranges": [[{"subnet": "10.87.%[4]d.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}%[6]s
]}`, name, bridgeOf(i), w.leases(), i, map[bool]string{true: "iptables", false: "nftables"}[portmap != ""], portmap)
		err := os.MkdirAll(w.network(name), 0o700)
		if err == nil {
			err = os.WriteFile(filepath.Join(w.network(name), "10.conflist"), []byte(text), 0o600)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// crash lives a life in which the point's fault happens.
func (w *world) crash(ctx context.Context, p point) error {
	l := w.life(p.life)
	for i, request := range l.requests {
		limited, cancel := context.WithTimeout(ctx, patience)
		var err error
		if i == p.request {
			err = w.crashIn(limited, request, p.fault)
		} else {
			err = w.repeat(limited, request.send, request)
		}
		cancel()
		if err != nil {
			l.hangUp()
			w.clear(ctx)
			return fmt.Errorf("%s: %w", request.name, err)
		}
	}
	if l.sessions != nil && p.suite != failStep {
		l.sessions.cut = nil // whoever was killed, or could not go on, had them
	}
	return errors.Join(l.whole(), w.left(ctx))
}

// errUnreached: the life went on, but the point was not in it.
var errUnreached = errors.New("was not reached")

// crashIn sends a request during which the fault happens, and again until it
// succeeds.
func (w *world) crashIn(ctx context.Context, r request, f fault) error {
	if err := f.arm(w); err != nil {
		return err
	}
	limited, cancel := limit(ctx, f)
	err := r.send(limited)
	cancel()
	wrong := w.halfMade(ctx, r, err)
	reached, ferr := f.release(w)
	if ferr != nil {
		return ferr
	}
	if !reached {
		return fmt.Errorf("%v %w (%v)", f, errUnreached, err)
	}
	if !w.running() {
		wrong = nil
		if err := w.relaunch(ctx); err != nil {
			return err
		}
	}
	if wrong = errors.Join(wrong, f.answer(err)); wrong != nil {
		return wrong
	}
	if err == nil {
		return nil
	}
	return w.repeat(ctx, r.send, r)
}

// halfMade looks whether a list has what a failed request did not make.
func (w *world) halfMade(ctx context.Context, r request, failed error) error {
	if failed == nil {
		return nil
	}
	switch {
	case r.name == "RunPodSandbox":
		res, err := w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{
			State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}}})
		if err == nil && len(res.GetItems()) > 0 {
			return fmt.Errorf("a pod is ready whose request failed: %w", failed)
		}
	case strings.HasPrefix(r.name, "CreateContainer "):
		res, err := w.Runtime().ListContainers(ctx, &cri.ListContainersRequest{})
		name := strings.TrimPrefix(r.name, "CreateContainer ")
		if err == nil && slices.ContainsFunc(res.GetContainers(), func(c *cri.Container) bool { return c.GetMetadata().GetName() == name }) {
			return fmt.Errorf("container %s is listed, though its request failed: %w", name, failed)
		}
	}
	return nil
}

// repeat sends a request until it succeeds, as the kubelet does.
func (w *world) repeat(ctx context.Context, send func(context.Context) error, r request) error {
	for {
		err := send(ctx)
		if err == nil || ctx.Err() != nil || !transient(err) && (r.again == nil || !done(err)) {
			return err
		}
		if r.again != nil {
			send = r.again
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// monitor is the pid of the node's monitor, 0 when there is none.
func (w *world) monitor() int {
	for _, pid := range w.Monitors() {
		return pid
	}
	return 0
}

// checkpoints is why the lives of this world make none, as far as the node says.
func (w *world) checkpoints(ctx context.Context) (string, error) {
	if w.calls != nil {
		return "CRIU dumps no process whose system calls are supervised", nil
	}
	for {
		res, err := w.Runtime().Status(ctx, &cri.StatusRequest{Verbose: true})
		if err != nil {
			return "", err
		}
		var reasons map[string]string
		if err := json.Unmarshal([]byte(res.GetInfo()["checkpoint"]), &reasons); err == nil {
			return reasons["runc"], nil
		}
		select { // the daemon asks CRIU when it has started
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// running tells whether the daemon lives.
func (w *world) running() bool {
	_, lives := alive(w.PID())
	return lives
}

// await waits for the end of a daemon that was killed.
func (w *world) await(killed bool) error {
	if !killed {
		return nil
	}
	return w.Kill()
}

// clear removes what a life that went wrong has left, for the next one.
func (w *world) clear(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_ = w.relaunch(limited)
	for id := range w.watcher.open() {
		w.watcher.mayGo(id)
	}
	_ = w.RemoveAll(limited)
	_ = os.RemoveAll(w.preloads())
	_ = os.Remove(filepath.Join(w.dir, "thing.tar"))
	_ = os.Remove(filepath.Join(w.dir, "thing.tar.partial"))
	_, _ = w.Images().RemoveImage(limited, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: thing}})
	if w.rebooted {
		w.rebooted = false
		_ = w.relaunch(limited)
	}
	for seen := w.watcher.looked(); limited.Err() == nil && w.watcher.looked() < seen+2; { // one look was under way
		time.Sleep(between)
	}
	_ = w.watcher.took()
}

// relaunch starts the daemon again, whether it was killed or still runs.
func (w *world) relaunch(ctx context.Context) error {
	if err := w.Kill(); err != nil {
		return err
	}
	return w.Launch(ctx)
}
