package runtime

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
)

type entry struct{ name, link, body string }

func tarOf(t *testing.T, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Linkname: e.link, Size: int64(len(e.body)), Mode: 0o755, Typeflag: tar.TypeReg}
		switch {
		case e.link != "":
			h.Typeflag = tar.TypeSymlink
		case strings.HasSuffix(e.name, "/"):
			h.Typeflag = tar.TypeDir
		}
		must(t, w.WriteHeader(h))
		_, err := w.Write([]byte(e.body))
		must(t, err)
	}
	must(t, w.Close())
	return b.Bytes()
}

// importImage takes in an image without programs: containers of the tests
// mount the machine's /usr.
func (n *node) importImage(name string) string {
	n.t.Helper()
	layer := tarOf(n.t, entry{name: "etc/"}, entry{name: "tmp/"}, entry{name: "usr/"}, entry{name: "bin", link: "usr/bin"},
		entry{name: "lib", link: "usr/lib"}, entry{name: "lib64", link: "usr/lib64"}, entry{name: "name", body: name},
		entry{name: "etc/passwd", body: "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n"})
	sum := sha256.Sum256(layer)
	config, err := json.Marshal(map[string]any{"architecture": "amd64", "os": "linux", "config": map[string]any{"Env": []string{"PATH=/usr/bin"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(sum[:])}}})
	must(n.t, err)
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "Layers": []string{"layer.tar"}, "RepoTags": []string{"localhost/" + name + ":1"}}})
	must(n.t, err)
	path := filepath.Join(n.dir, name+".tar")
	must(n.t, os.WriteFile(path, tarOf(n.t, entry{name: "config.json", body: string(config)}, entry{name: "layer.tar", body: string(layer)},
		entry{name: "manifest.json", body: string(manifest)}), 0o600))
	names, err := n.Images.Import(n.t.Context(), image.ImportRequest{File: path})
	must(n.t, err)
	return names[0]
}

// hostPod asks for a pod on the host's network.
func (n *node) hostPod(name string) *cri.RunPodSandboxRequest {
	r := n.bridgePod(name)
	r.Config.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	return r
}

// bridgePod asks for a pod with a network of its own.
func (n *node) bridgePod(name string) *cri.RunPodSandboxRequest {
	return &cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Namespace: "default", Uid: "uid-" + name},
		LogDirectory: filepath.Join(n.dir, "logs", name),
		Linux: &cri.LinuxPodSandboxConfig{CgroupParent: n.parent, SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}}},
	}}
}

// sharedPIDs asks for a PID namespace of the pod, with a pause container.
func sharedPIDs(r *cri.RunPodSandboxRequest) *cri.RunPodSandboxRequest {
	nsOptions(r).Pid = cri.NamespaceMode_POD
	return r
}

func (n *node) runPod(r *cri.RunPodSandboxRequest) string {
	n.t.Helper()
	reply, err := n.RunPodSandbox(n.t.Context(), r)
	must(n.t, err)
	return reply.GetPodSandboxId()
}

// container asks for a container of pod that runs a shell script.
func (n *node) container(pod, name, script string) *cri.CreateContainerRequest {
	sb, err := n.Records.Sandboxes.Get(pod)
	must(n.t, err)
	ns := sb.Namespaces()
	return &cri.CreateContainerRequest{PodSandboxId: pod, SandboxConfig: sb.Config.Message, Config: &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: n.image}, LogPath: name + ".log",
		Command: []string{"/bin/sh", "-c", script},
		Mounts: []*cri.Mount{{HostPath: "/usr", ContainerPath: "/usr", Readonly: true},
			{HostPath: n.dir + "/share", ContainerPath: "/share"}},
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Network: ns.GetNetwork(), Pid: ns.GetPid(), Ipc: ns.GetIpc(), UsernsOptions: ns.GetUsernsOptions()}}},
	}}
}

func (n *node) create(r *cri.CreateContainerRequest) string {
	n.t.Helper()
	reply, err := n.CreateContainer(n.t.Context(), r)
	must(n.t, err)
	return reply.GetContainerId()
}

func (n *node) start(id string) {
	n.t.Helper()
	_, err := n.StartContainer(n.t.Context(), &cri.StartContainerRequest{ContainerId: id})
	must(n.t, err)
}

// forever sleeps until it is killed; SIGTERM ends it with code 7.
const forever = "trap 'exit 7' TERM; while :; do sleep 0.05; done"

// stubborn ignores SIGTERM.
const stubborn = "trap '' TERM; echo ready > /share/ready; while :; do sleep 0.05; done"

// runContainer creates and starts a container in pod.
func (n *node) runContainer(pod, name, script string) string {
	n.t.Helper()
	id := n.create(n.container(pod, name, script))
	n.start(id)
	return id
}

func (n *node) removePod(id string) {
	n.t.Helper()
	_, err := n.RemovePodSandbox(context.Background(), &cri.RemovePodSandboxRequest{PodSandboxId: id})
	if err != nil {
		n.t.Errorf("remove pod: %v", err)
	}
}

func (n *node) status(id string) *cri.ContainerStatus {
	n.t.Helper()
	reply, err := n.ContainerStatus(n.t.Context(), &cri.ContainerStatusRequest{ContainerId: id})
	must(n.t, err)
	return reply.GetStatus()
}

// exited waits for a container's end.
func (n *node) exited(id string) *cri.ContainerStatus {
	n.t.Helper()
	eventually(n.t, "exit of "+id, func() bool { return n.status(id).GetState() == cri.ContainerState_CONTAINER_EXITED })
	return n.status(id)
}

func (n *node) podState(id string) cri.PodSandboxState {
	n.t.Helper()
	reply, err := n.PodSandboxStatus(n.t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: id})
	must(n.t, err)
	return reply.GetStatus().GetState()
}

// pods lists the ids of the pods that callers see; containers those of theirs.
func (n *node) pods() []string {
	n.t.Helper()
	reply, err := n.ListPodSandbox(n.t.Context(), &cri.ListPodSandboxRequest{})
	must(n.t, err)
	var ids []string
	for _, sb := range reply.GetItems() {
		ids = append(ids, sb.GetId())
	}
	return ids
}

func (n *node) containers() []string {
	n.t.Helper()
	reply, err := n.ListContainers(n.t.Context(), &cri.ListContainersRequest{})
	must(n.t, err)
	var ids []string
	for _, c := range reply.GetContainers() {
		ids = append(ids, c.GetId())
	}
	return ids
}

// exec runs a script in a container and returns what it wrote.
func (n *node) exec(id, script string) string {
	n.t.Helper()
	reply, err := n.ExecSync(n.t.Context(), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"/bin/sh", "-c", script}})
	must(n.t, err)
	return strings.TrimSpace(string(reply.GetStdout()))
}

// refused checks an error's code and that it says all words.
func (n *node) refused(what string, err error, code codes.Code, words ...string) {
	n.t.Helper()
	if err == nil {
		n.t.Errorf("%s: no error", what)
		return
	}
	if got := status.Code(statusOf(err)); got != code {
		n.t.Errorf("%s: code %v, want %v: %v", what, got, code, err)
	}
	missing := slices.DeleteFunc(slices.Clone(words), func(w string) bool { return strings.Contains(err.Error(), w) })
	if len(missing) > 0 {
		n.t.Errorf("%s: the error does not say %q: %v", what, missing, err)
	}
}

// readOnly makes a directory one that cannot be written to.
func (n *node) readOnly(sub string) (undo func()) {
	n.t.Helper()
	dir := filepath.Join(n.dir, sub)
	must(n.t, mountReadOnly(dir))
	return func() {
		if err := unmount(dir); err != nil {
			n.t.Errorf("unmount %s: %v", sub, err)
		}
	}
}

func (n *node) shareFile(name string) string { return filepath.Join(n.dir, "share", name) }

func (n *node) waitFile(name string) {
	n.t.Helper()
	eventually(n.t, "the file "+name, func() bool { _, err := os.Stat(n.shareFile(name)); return err == nil })
}

func (n *node) waitCalls(verb string, more int) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("%d runs of %s", more, verb), func() bool { return n.calls(verb) >= more })
}
