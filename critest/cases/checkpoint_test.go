package cases

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// checkpoints is what the verbose status says of checkpoints; empty when they
// are possible.
func (e *env) checkpoints() string {
	e.Helper()
	reason := ""
	e.eventually("the status tells whether checkpoints are possible", func() bool {
		res, err := e.rt.Status(e.ctx, &cri.StatusRequest{Verbose: true})
		if err != nil {
			e.Fatal(err)
		}
		var all map[string]string
		if json.Unmarshal([]byte(res.GetInfo()["checkpoint"]), &all) != nil {
			return false
		}
		text, known := all["runc"]
		reason = text
		return known
	})
	return reason
}

// TestCheckpointRefusals asks for checkpoints that cannot be: each is refused by
// name, the pod goes on and nothing is written. Where the machine cannot make
// any, the status says so, and so does the error.
func TestCheckpointRefusals(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("main", "sleep 1000"), config)
	idle := e.create(pod, command("idle", "sleep 1000"), config)
	other := e.sandbox()
	stranger := e.startContainer(e.run(other), command("main", "sleep 1000"), other)
	out := t.TempDir()
	taken := filepath.Join(out, "taken")
	if err := os.WriteFile(taken, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	container := func(id, location string, timeout int64) error {
		_, err := e.rt.CheckpointContainer(e.ctx, &cri.CheckpointContainerRequest{ContainerId: id, Location: location, Timeout: timeout})
		return err
	}
	e.refused("an unknown container", container("nope", out+"/a.tar", 0), codes.NotFound, "nope")
	e.refused("a container that does not run", container(idle, out+"/a.tar", 0), codes.FailedPrecondition, idle)
	e.refused("a relative location", container(id, "a.tar", 0), codes.InvalidArgument, "location", "a.tar")
	e.refused("a location without directory", container(id, out+"/no/a.tar", 0), codes.InvalidArgument, "location")
	e.refused("a location that is taken", container(id, taken, 0), codes.AlreadyExists, taken)
	e.refused("a negative timeout", container(id, out+"/a.tar", -1), codes.InvalidArgument, "timeout", "-1")

	empty, full := t.TempDir(), out
	checkpoint := func(r *cri.CheckpointPodRequest) error {
		if r.PodSandboxId == "" {
			r.PodSandboxId = pod
		}
		if r.OutputPath == "" {
			r.OutputPath = empty
		}
		_, err := e.rt.CheckpointPod(e.ctx, r)
		return err
	}
	for what, c := range map[string]struct {
		r     *cri.CheckpointPodRequest
		code  codes.Code
		words string
	}{
		"an unknown pod":         {&cri.CheckpointPodRequest{PodSandboxId: "nope", ContainerIds: []string{id}}, codes.NotFound, "nope"},
		"no containers":          {&cri.CheckpointPodRequest{}, codes.InvalidArgument, "container_ids"},
		"a container twice":      {&cri.CheckpointPodRequest{ContainerIds: []string{id, id}}, codes.InvalidArgument, "container_ids[1]"},
		"another pod's":          {&cri.CheckpointPodRequest{ContainerIds: []string{stranger}}, codes.InvalidArgument, "container_ids[0]"},
		"one that does not run":  {&cri.CheckpointPodRequest{ContainerIds: []string{idle}}, codes.FailedPrecondition, "container_ids[0]"},
		"an option":              {&cri.CheckpointPodRequest{ContainerIds: []string{id}, Options: map[string]string{"fast": "yes"}}, codes.InvalidArgument, `options "fast"`},
		"a directory in use":     {&cri.CheckpointPodRequest{ContainerIds: []string{id}, OutputPath: full}, codes.InvalidArgument, "output_path"},
		"a relative directory":   {&cri.CheckpointPodRequest{ContainerIds: []string{id}, OutputPath: "out"}, codes.InvalidArgument, "output_path"},
		"a missing directory":    {&cri.CheckpointPodRequest{ContainerIds: []string{id}, OutputPath: out + "/no"}, codes.InvalidArgument, "output_path"},
		"a file for a directory": {&cri.CheckpointPodRequest{ContainerIds: []string{id}, OutputPath: taken}, codes.InvalidArgument, "output_path"},
	} {
		e.refused(what, checkpoint(c.r), c.code, c.words)
	}
	_, err := e.rt.CheckpointPod(context.Background(), &cri.CheckpointPodRequest{PodSandboxId: pod, OutputPath: empty, ContainerIds: []string{id}})
	e.refused("a call without deadline", err, codes.InvalidArgument, "deadline")
	if reason := e.checkpoints(); reason != "" {
		e.refused("a checkpoint where there is no CRIU", container(id, out+"/a.tar", 0), codes.Unimplemented, reason)
		e.refused("a pod's checkpoint where there is no CRIU", checkpoint(&cri.CheckpointPodRequest{ContainerIds: []string{id}}), codes.Unimplemented, reason)
	}
	for dir, want := range map[string]int{out: 1, empty: 0} {
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != want {
			t.Errorf("%s has %v (%v), want %d entries", dir, entries, err, want)
		}
	}
	if e.exec(id, "echo -n on") != "on" {
		t.Error("the container does not go on")
	}
}

// TestB47CheckpointImages: an image that says it is a checkpoint is an image. What it
// holds is files of the container, links in it lead nowhere else, and its annotations
// and the names, mounts and devices in it are nobody's.
func TestB47CheckpointImages(t *testing.T) {
	e := start(t, node.Options{})
	secret := filepath.Join(e.Dir, "secret")
	if err := os.WriteFile(secret, []byte("SECRET"), 0o644); err != nil {
		t.Fatal(err)
	}
	busybox := e.pull(images.Busybox)
	spec := `{"ociVersion":"1.0.2","process":{"user":{"uid":0,"gid":0},"args":["cat","/stolen"],"cwd":"/","capabilities":{"bounding":["CAP_SYS_ADMIN"]}},
		"root":{"path":"/"},"mounts":[{"destination":"/stolen","type":"bind","source":"` + secret + `","options":["rbind"]}],
		"annotations":{"io.kubernetes.cri-o.LogPath":"` + secret + `","cdi.k8s.io/x":"vendor.com/device=all"},
		"linux":{"devices":[{"path":"/dev/stolen","type":"c","major":1,"minor":8}]}}`
	config := `{"id":"0","name":"k8s_stolen","rootfsImage":"` + images.Busybox + `","rootfsImageRef":"sha256:0","rootfsImageName":"` + images.Busybox + `"}`
	published, err := images.Image{Layers: []images.Layer{parts.Base, layer(t, images.File("spec.dump", 0o600, spec), images.File("config.dump", 0o600, config),
		images.File("bind.mounts", 0o600, `[{"source":"`+secret+`","destination":"/stolen"}]`), images.Dir("checkpoint", 0o700), images.File("checkpoint/inventory.img", 0o600, "x"),
		images.Symlink("container.log", secret), images.Symlink("stats-dump", "../../../../../../.."+secret), images.Hardlink("rootfs-diff.tar", "spec.dump"))},
		Annotations: map[string]string{
			"io.kubernetes.cri-o.annotations.checkpoint.name": "stolen", "org.criu.checkpoint.container.name": "stolen",
			"org.criu.checkpoint.rootfsImageName": images.Busybox, "cdi.k8s.io/x": "vendor.com/device=all",
		}}.Publish(reg, "cases/b47", "1")
	if err != nil {
		t.Fatal(err)
	}
	name := "docker.io/cases/b47:1"
	e.pull(name)
	sandbox := e.sandbox()
	pod := e.run(sandbox)
	c := command("plain", "cat /container.log /stats-dump 2>/dev/null; ls -d /stolen /dev/stolen 2>/dev/null; grep -c stolen /proc/mounts; cat /spec.dump | head -c 13; echo; cat /proc/1/cmdline | tr '\\0' ' '")
	c.Image.Image = name
	id := e.startContainer(pod, c, sandbox)
	e.exited(id)
	out, log := e.logs(id)
	if !strings.HasPrefix(out, "0\n{\"ociVersion\"\nsh -c ") || log != "" {
		t.Errorf("the container says %q, %q", out, log)
	}
	status := e.status(id)
	if len(status.GetMounts()) != 0 || len(status.GetAnnotations()) != 0 || status.GetMetadata().GetName() != "plain" || status.GetImageId() != published.Config.String() {
		t.Errorf("its status is %v", status)
	}
	if data, err := os.ReadFile(secret); err != nil || string(data) != "SECRET" {
		t.Errorf("the node's file is %q, %v", data, err)
	}
	if img := e.image(images.Busybox); img.GetId() != busybox || len(img.GetRepoTags()) != 1 {
		t.Errorf("the image that the checkpoint names is %v now", img)
	}
	list, err := e.im.ListImages(e.ctx, &cri.ListImagesRequest{})
	if err != nil || len(list.GetImages()) != 2 {
		t.Errorf("images are %v, %v", list.GetImages(), err)
	}
}

// TestB47 restores from checkpoints that somebody made up: what they say of the
// node's files, of mounts and names has no effect, and nothing is left of a pod.
func TestB47(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("{\"version\":1}"), 0o600); err != nil {
		t.Fatal(err)
	}
	write := func(text string) string {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "pod.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	linked := t.TempDir()
	if err := os.Symlink(secret, filepath.Join(linked, "pod.json")); err != nil {
		t.Fatal(err)
	}
	good := `{"version":1,"engineVersion":"x","handler":"runc","namespaces":"network=POD ipc=POD pid=CONTAINER","checkpointedAt":"2026-01-01T00:00:00Z",
		"containers":[{"name":"main","imageID":"sha256:0","process":{"args":[],"env":[],"cwd":"/","uid":0,"gid":0}}]}`
	restore := func(dir string, change func(*cri.RestorePodRequest)) error {
		config := e.sandbox()
		r := &cri.RestorePodRequest{CheckpointPath: dir, Config: config, ContainerConfigs: []*cri.ContainerConfig{command("main", "sleep 1000")}}
		if change != nil {
			change(r)
		}
		ctx, cancel := context.WithTimeout(e.ctx, time.Minute)
		defer cancel()
		_, err := e.rt.RestorePod(ctx, r)
		return err
	}
	e.refused("a symlink for pod.json", restore(linked, nil), codes.InvalidArgument, "checkpoint_path", "symlink")
	e.refused("no checkpoint", restore(t.TempDir(), nil), codes.InvalidArgument, "checkpoint_path", "pod.json")
	e.refused("a relative path", restore("x", nil), codes.InvalidArgument, "checkpoint_path")
	e.refused("mounts in a checkpoint", restore(write(strings.Replace(good, `"name":"main"`, `"name":"main","mounts":["/etc"]`, 1)), nil), codes.InvalidArgument, "mounts")
	e.refused("devices in a checkpoint", restore(write(strings.Replace(good, `"version":1`, `"version":1,"devices":["/dev/sda"]`, 1)), nil), codes.InvalidArgument, "devices")
	e.refused("a later version", restore(write(strings.Replace(good, `"version":1`, `"version":2`, 1)), nil), codes.InvalidArgument, "version")
	e.refused("other containers", restore(write(strings.Replace(good, `"name":"main"`, `"name":"else"`, 1)), nil), codes.InvalidArgument, "container_configs", "else")
	e.refused("another handler", restore(write(strings.Replace(good, `"runc"`, `"kata"`, 1)), nil), codes.InvalidArgument, "runtime_handler", "kata")
	e.refused("other namespaces", restore(write(strings.Replace(good, `network=POD`, `network=NODE`, 1)), nil), codes.InvalidArgument, "namespace_options")
	e.refused("a user namespace", restore(write(good), func(r *cri.RestorePodRequest) {
		r.Config = e.sandbox()
		r.Config.Linux.SecurityContext.NamespaceOptions.UsernsOptions = shifted(200000)
	}), codes.InvalidArgument, "userns_options", "checkpoint")
	e.refused("an option", restore(write(good), func(r *cri.RestorePodRequest) { r.Options = map[string]string{"x": "y"} }), codes.InvalidArgument, `options "x"`)
	e.refused("no containers", restore(write(good), func(r *cri.RestorePodRequest) { r.ContainerConfigs = nil }), codes.InvalidArgument, "container_configs")
	e.refused("a container twice", restore(write(good), func(r *cri.RestorePodRequest) {
		r.ContainerConfigs = append(r.ContainerConfigs, r.ContainerConfigs[0])
	}), codes.InvalidArgument, "container_configs[1]")
	if reason := e.checkpoints(); reason != "" {
		e.refused("a restore where there is no CRIU", restore(write(good), nil), codes.Unimplemented, reason)
	} else {
		e.refused("an image that is not the checkpoint's", restore(write(good), nil), codes.InvalidArgument, "config.image")
	}
	e.empty("refused restores")
	if data, err := os.ReadFile(secret); err != nil || string(data) != "{\"version\":1}" {
		t.Errorf("the node's file is %q, %v", data, err)
	}
}
