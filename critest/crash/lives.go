package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
)

// lives are the kinds of lives, by name. Together they send every request of
// changers and reach every step of operations. The first takes away the tables that
// plugins never remove, and the next ones make them again: they are in the base.
var lives = []struct {
	name string
	make func(*life)
	from string // the first request that has points; empty: the first of all
}{
	{"reboot", rebootLife, restarts + " in another boot"},
	{"bridge", bridgeLife, ""},
	{"host", hostLife, ""},
	{"iptables", iptablesLife, ""},
	{"mapped", mappedLife, ""},
	{"image", imageLife, ""},
	{"half", halfLife, restarts + " with half made"},
	{"sessions", sessionsLife, "Attach main"},
	{checkpoints, checkpointLife, "CheckpointContainer frozen"},
}

// checkpoints is the life that needs CRIU. It dumps no process whose system calls are
// supervised.
const checkpoints = "checkpoint"

// life begins a life of a kind.
func (w *world) life(kind string) *life {
	w.serial++
	l := &life{w: w, ids: map[string]string{}, attempts: map[string]uint32{}}
	for _, k := range lives {
		if k.name == kind {
			k.make(l)
		}
	}
	return l
}

// pod is the configuration that all pods have.
func (l *life) podConfig(name string) *cri.PodSandboxConfig {
	name = fmt.Sprintf("%s%d", name, l.w.serial)
	return &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "crash", Uid: name}, Hostname: name,
		LogDirectory: filepath.Join(l.w.LogDir(), name),
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}}},
	}
}

// bridgeLife is an ordinary pod: a network with a host port, a container that runs
// and logs, one that never starts, and one that ends by itself, as init containers do.
func bridgeLife(l *life) {
	l.config = l.podConfig("bridge")
	l.config.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 18080}}
	l.config.Linux.Sysctls = map[string]string{"net.ipv4.ip_local_port_range": "20000 30000"}
	l.requests = []request{
		l.run(), l.create("short", "exit 7"), l.start("short", "exit 7"), l.ended("short", 7),
		l.create("main", logs), l.start("main", logs), l.speaks("main"), l.create("idle", "true"),
		l.update("main"), l.exec("main"), l.restart(""), l.remove("short"), l.stop("main"), l.stopPod(), l.removePod(),
	}
}

// hostLife is a pod in the host's network and with a shared PID namespace, so it
// has a pause process; all else that one can do to a running pod is done to it.
func hostLife(l *life) {
	l.config = l.podConfig("host")
	l.config.Annotations = map[string]string{hostNetwork: "true"}
	o := l.config.Linux.SecurityContext.NamespaceOptions
	o.Network, o.Pid = cri.NamespaceMode_NODE, cri.NamespaceMode_POD
	l.requests = []request{
		l.run(), l.create("main", logs), l.start("main", logs), l.speaks("main"), l.updatePod(), l.reopen("main"), l.session("main"), l.attach("main"),
		l.forward(), l.restart(""), l.stop("main"), l.stopPod(), l.removePod(),
	}
}

// iptablesLife is a pod whose plugins write iptables rules. It is removed while it
// runs.
func iptablesLife(l *life) {
	l.config, l.handler = l.podConfig("iptables"), "iptables"
	l.config.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 18081}}
	l.requests = []request{l.run(), l.create("main", logs), l.start("main", logs), l.speaks("main"), l.restart(""), l.stopPod(), l.removePod()}
}

// mappedLife is a pod with a user namespace, host ports that no plugin maps, and an
// image as a volume. It is removed while it runs.
func mappedLife(l *life) {
	l.config, l.handler = l.podConfig("mapped"), "portless"
	l.config.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 18082}}
	l.config.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &cri.UserNamespace{Mode: cri.NamespaceMode_POD,
		Uids: []*cri.IDMapping{{HostId: 200000, Length: 65536}}, Gids: []*cri.IDMapping{{HostId: 200000, Length: 65536}}}
	l.mounts = []*cri.Mount{{ContainerPath: "/image", Readonly: true, Image: &cri.ImageSpec{Image: images.Busybox}}}
	l.requests = []request{l.run(), l.create("first", logs), l.start("first", logs), l.exec("first"), l.remove("first"),
		l.create("main", logs), l.start("main", logs), l.speaks("main"), l.restart(""), l.removePod()}
}

// halfLife is a pod that runs while a daemon dies that makes another pod, and a
// container of this one.
func halfLife(l *life) {
	l.config = l.podConfig("half")
	l.requests = []request{l.run(), l.create("main", logs), l.start("main", logs), l.speaks("main"), l.halfMake(), l.restart("with half made"),
		l.removeOthers(), l.stopPod(), l.removePod()}
}

// rebootLife is a pod that a reboot ends.
func rebootLife(l *life) {
	l.config, l.handler = l.podConfig("reboot"), "iptables"
	l.config.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 18083}}
	l.requests = []request{l.run(), l.create("main", logs), l.start("main", logs), l.speaks("main"), l.reboot(), l.restart("in another boot"),
		l.ends("main"), l.remove("main"), l.stopPod(), l.removePod(), l.bootEnds()}
}

// sessionsLife is a pod to which clients are connected, whatever happens.
func sessionsLife(l *life) {
	l.config = l.podConfig("sessions")
	const server = "nc -ll -p 80 -e cat"
	l.sessions = newSessions(l)
	s := l.sessions
	stay := s.hold(false)
	l.requests = []request{l.run(), l.create("main", logs), l.start("main", logs), l.speaks("main"), l.create("server", server), l.start("server", server),
		s.attach("main"), s.exec("main"), s.sync("main"), s.forward(80), stay, l.update("main"), stay, l.exec("main"), stay, l.reopen("main"), stay,
		l.restart(""), s.hold(true), l.stop("main"), s.over("attach", "exec", "sync"), l.stopPod(), s.over("forward"), l.removePod()}
}

// thing is the image that comes and goes.
const thing = "docker.io/crash/thing:1"

// publish puts it into the registry.
func publish(w *world) error {
	var layers []images.Layer
	for _, name := range []string{"first", "second"} {
		layer, err := images.NewLayer(images.Gzip, images.Dir(name, 0o755), images.File(name+"/file", 0o644, strings.Repeat(name, 1000)))
		if err != nil {
			return err
		}
		layers = append(layers, layer)
	}
	_, err := images.Image{Layers: layers}.Publish(w.stock.Registry, "crash/thing", "1")
	return err
}

// imageLife is an image that is pulled, pinned, exported, removed, preloaded by a
// start, removed, imported, checked and removed again by the operator.
func imageLife(l *life) {
	archive := filepath.Join(l.w.dir, "thing.tar")
	remove := l.operator("remove", thing)
	remove.again = func(ctx context.Context) error {
		res, err := l.w.Images().ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: thing}})
		if err == nil && res.GetImage() != nil {
			err = remove.send(ctx)
		}
		return err
	}
	export := l.operator("export", thing, archive)
	export.again = func(ctx context.Context) error {
		for _, file := range []string{archive, archive + ".partial"} { // of which the error tells the operator
			if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		return export.send(ctx)
	}
	l.requests = []request{
		{name: "UpdateRuntimeConfig", send: func(ctx context.Context) error {
			_, err := l.w.Runtime().UpdateRuntimeConfig(ctx, &cri.UpdateRuntimeConfigRequest{RuntimeConfig: &cri.RuntimeConfig{
				NetworkConfig: &cri.NetworkConfig{PodCidr: "10.89.0.0/24"}}})
			return err
		}},
		{name: "PullImage", send: func(ctx context.Context) error {
			_, err := l.w.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: thing}})
			return err
		}},
		l.operator("pin", thing), export, l.operator("unpin", thing),
		{name: "RemoveImage", send: func(ctx context.Context) error {
			_, err := l.w.Images().RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: thing}})
			return err
		}},
		l.preload(archive), l.restartPreloaded(), l.unload(), remove, l.operator("import", archive), l.operator("check", "--repair"), remove,
		{name: "the archive's end", send: func(context.Context) error { return os.Remove(archive) }},
	}
}

// operator runs a verb of berth image.
func (l *life) operator(args ...string) request {
	return request{name: "image " + args[0], send: func(ctx context.Context) error {
		argv := append([]string{"image", "--socket", l.w.Socket}, args...)
		out, err := exec.CommandContext(ctx, filepath.Join(l.w.Bin, "berth"), argv...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("berth image %s: %w: %s", args[0], err, out)
		}
		return nil
	}}
}
