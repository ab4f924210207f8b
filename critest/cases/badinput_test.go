package cases

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
)

// A sandbox request that cannot be meant is refused by field and value, and
// leaves nothing.
func TestBadInputOfSandboxes(t *testing.T) {
	e := start(t, node.Options{})
	options := func(c *cri.PodSandboxConfig) *cri.NamespaceOption { return c.Linux.SecurityContext.NamespaceOptions }
	for name, c := range map[string]struct {
		change func(*cri.RunPodSandboxRequest)
		words  []string
	}{
		"unknown handler":     {func(r *cri.RunPodSandboxRequest) { r.RuntimeHandler = "kata" }, []string{"kata"}},
		"no config":           {func(r *cri.RunPodSandboxRequest) { r.Config = nil }, []string{"config"}},
		"no metadata":         {func(r *cri.RunPodSandboxRequest) { r.Config.Metadata = nil }, []string{"metadata"}},
		"no name":             {func(r *cri.RunPodSandboxRequest) { r.Config.Metadata.Name = "" }, []string{"metadata.name"}},
		"no namespace":        {func(r *cri.RunPodSandboxRequest) { r.Config.Metadata.Namespace = "" }, []string{"metadata.namespace"}},
		"no uid":              {func(r *cri.RunPodSandboxRequest) { r.Config.Metadata.Uid = "" }, []string{"metadata.uid"}},
		"relative log folder": {func(r *cri.RunPodSandboxRequest) { r.Config.LogDirectory = "logs" }, []string{"log_directory", `"logs"`}},
		"network CONTAINER": {func(r *cri.RunPodSandboxRequest) { options(r.Config).Network = cri.NamespaceMode_CONTAINER },
			[]string{"network", "CONTAINER"}},
		"network TARGET": {func(r *cri.RunPodSandboxRequest) { options(r.Config).Network = cri.NamespaceMode_TARGET }, []string{"network", "TARGET"}},
		"ipc CONTAINER":  {func(r *cri.RunPodSandboxRequest) { options(r.Config).Ipc = cri.NamespaceMode_CONTAINER }, []string{"ipc", "CONTAINER"}},
		"pid TARGET":     {func(r *cri.RunPodSandboxRequest) { options(r.Config).Pid = cri.NamespaceMode_TARGET }, []string{"pid", "TARGET"}},
		"group without user": {func(r *cri.RunPodSandboxRequest) {
			r.Config.Linux.SecurityContext.RunAsGroup = &cri.Int64Value{Value: 77}
		}, []string{"run_as_group", "77"}},
		"long hostname": {func(r *cri.RunPodSandboxRequest) { r.Config.Hostname = strings.Repeat("h", 65) }, []string{"hostname"}},
		"unknown sysctl": {func(r *cri.RunPodSandboxRequest) {
			r.Config.Linux.Sysctls = map[string]string{"kernel.core_pattern": "|/x"}
		}, []string{"kernel.core_pattern"}},
		"sysctl climbing": {func(r *cri.RunPodSandboxRequest) {
			r.Config.Linux.Sysctls = map[string]string{"net.ipv4/../../kernel/core_pattern": "x"}
		}, []string{"core_pattern"}},
		"net sysctl on the host's network": {func(r *cri.RunPodSandboxRequest) {
			options(r.Config).Network = cri.NamespaceMode_NODE
			r.Config.Linux.Sysctls = map[string]string{"net.ipv4.ip_forward": "0"}
		}, []string{"net.ipv4.ip_forward"}},
		"value the kernel refuses": {func(r *cri.RunPodSandboxRequest) {
			r.Config.Linux.Sysctls = map[string]string{"net.ipv4.ip_forward": "not a number"}
		}, []string{"net.ipv4.ip_forward", "not a number"}},
		"relative cgroup parent": {func(r *cri.RunPodSandboxRequest) { r.Config.Linux.CgroupParent = "kubepods/x" }, []string{"cgroup_parent", "kubepods/x"}},
		"systemd cgroup parent":  {func(r *cri.RunPodSandboxRequest) { r.Config.Linux.CgroupParent = "kubepods.slice" }, []string{"cgroup_parent", "kubepods.slice"}},
	} {
		req := &cri.RunPodSandboxRequest{Config: e.sandbox()}
		c.change(req)
		_, err := e.rt.RunPodSandbox(e.ctx, req)
		e.refused(name, err, codes.InvalidArgument, c.words...)
		e.empty(name)
	}
	if left := e.leases(); len(left) != 0 {
		t.Errorf("leases %v are left", left)
	}
}

// A container request that cannot be meant, likewise.
func TestBadInputOfContainers(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	broken := filepath.Join(e.Dir, "broken-link")
	if err := os.Symlink("/no/such/place", broken); err != nil {
		t.Fatal(err)
	}
	security := func(c *cri.ContainerConfig) *cri.LinuxContainerSecurityContext { return c.Linux.SecurityContext }
	type test struct {
		change func(*cri.ContainerConfig)
		code   codes.Code
		words  []string
	}
	for name, c := range map[string]test{
		"no metadata":    {func(c *cri.ContainerConfig) { c.Metadata = nil }, codes.InvalidArgument, []string{"metadata"}},
		"no name":        {func(c *cri.ContainerConfig) { c.Metadata.Name = "" }, codes.InvalidArgument, []string{"metadata.name"}},
		"no image":       {func(c *cri.ContainerConfig) { c.Image = nil }, codes.InvalidArgument, []string{"image"}},
		"unknown image":  {func(c *cri.ContainerConfig) { c.Image.Image = "docker.io/cases/nowhere:1" }, codes.NotFound, []string{"docker.io/cases/nowhere:1"}},
		"odd reference":  {func(c *cri.ContainerConfig) { c.Image.Image = "UPPER CASE!" }, codes.InvalidArgument, []string{"UPPER CASE!"}},
		"log path climb": {func(c *cri.ContainerConfig) { c.LogPath = "../../x.log" }, codes.InvalidArgument, []string{"log_path", "../../x.log"}},
		"broken link": {func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{HostPath: broken, ContainerPath: "/m"}}
		}, codes.InvalidArgument, []string{"host_path", broken}},
		"relative mount target": {func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{HostPath: "/tmp", ContainerPath: "m"}}
		}, codes.InvalidArgument, []string{"container_path", `"m"`}},
		"missing device": {func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{{HostPath: "/dev/no-such", ContainerPath: "/dev/x", Permissions: "rwm"}}
		}, codes.InvalidArgument, []string{"/dev/no-such"}},
		"unknown user":       {func(c *cri.ContainerConfig) { security(c).RunAsUsername = "nobody-here" }, codes.InvalidArgument, []string{"nobody-here"}},
		"group without user": {func(c *cri.ContainerConfig) { security(c).RunAsGroup = &cri.Int64Value{Value: 77} }, codes.InvalidArgument, []string{"run_as_group"}},
		"user too large":     {func(c *cri.ContainerConfig) { security(c).RunAsUser = &cri.Int64Value{Value: 1 << 33} }, codes.InvalidArgument, []string{"run_as_user", fmt.Sprint(1 << 33)}},
		"unknown capability": {func(c *cri.ContainerConfig) {
			security(c).Capabilities = &cri.Capability{AddCapabilities: []string{"FLY"}}
		}, codes.InvalidArgument, []string{"FLY"}},
		"seccomp profile missing": {func(c *cri.ContainerConfig) {
			security(c).Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/no/such.json"}
		}, codes.InvalidArgument, []string{"/no/such.json"}},
		"privileged in a plain pod": {func(c *cri.ContainerConfig) { security(c).Privileged = true }, codes.InvalidArgument, []string{"privileged"}},
		"target that is not there": {func(c *cri.ContainerConfig) {
			security(c).NamespaceOptions = &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET, TargetId: "0123abcd"}
		}, codes.NotFound, []string{"0123abcd"}},
	} {
		config2 := command("bad", "true")
		c.change(config2)
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: config2, SandboxConfig: config})
		e.refused(name, err, c.code, c.words...)
		list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
		if err != nil || len(list.GetContainers()) != 0 {
			t.Errorf("%s: containers %v, error %v; want none", name, list.GetContainers(), err)
		}
	}
	_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: "0123abcd", Config: command("x", "true"), SandboxConfig: config})
	e.refused("unknown sandbox", err, codes.NotFound, "0123abcd")
	e.failedStart(pod, config)
}

// failedStart checks a container whose program is not there: it is made, does
// not start, and stays to say why.
func (e *env) failedStart(pod string, config *cri.PodSandboxConfig) {
	e.Helper()
	c := command("nothing", "true")
	c.Command = []string{"/no/such/program"}
	created, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
	if err != nil {
		if !strings.Contains(err.Error(), "/no/such/program") {
			e.Errorf("create with a missing program: the error does not name it: %v", err)
		}
		return
	}
	_, err = e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: created.GetContainerId()})
	if err == nil || !strings.Contains(err.Error(), "/no/such/program") {
		e.Errorf("start of a missing program: %v; want an error that names it", err)
	}
	s := e.status(created.GetContainerId())
	if s.GetState() != cri.ContainerState_CONTAINER_EXITED || s.GetExitCode() != 128 || s.GetReason() != "StartError" || !strings.Contains(s.GetMessage(), "/no/such/program") {
		e.Errorf("after a failed start: %s, %d, %q, %q; want exited, 128, StartError and a message", s.GetState(), s.GetExitCode(), s.GetReason(), s.GetMessage())
	}
}

// What is not there: NotFound where the kubelet relies on it, success where
// stopping and removing are idempotent.
func TestUnknownIDs(t *testing.T) {
	e := start(t, node.Options{})
	const id = "deadbeef"
	_, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})
	e.refused("PodSandboxStatus", err, codes.NotFound, id)
	_, err = e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: id})
	e.refused("ContainerStatus", err, codes.NotFound, id)
	_, err = e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id})
	e.refused("StartContainer", err, codes.NotFound, id)
	_, err = e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}})
	e.refused("ExecSync", err, codes.NotFound, id)
	_, err = e.rt.UpdateContainerResources(e.ctx, &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: &cri.LinuxContainerResources{}})
	e.refused("UpdateContainerResources", err, codes.NotFound, id)
	_, err = e.rt.ReopenContainerLog(e.ctx, &cri.ReopenContainerLogRequest{ContainerId: id})
	e.refused("ReopenContainerLog", err, codes.NotFound, id)
	_, err = e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id})
	e.gone("StopContainer", err)
	_, err = e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: id})
	e.gone("RemoveContainer", err)
	_, err = e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: id})
	e.gone("StopPodSandbox", err)
	_, err = e.rt.RemovePodSandbox(e.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id})
	e.gone("RemovePodSandbox", err)
	_, err = e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: "docker.io/cases/nowhere:1"}})
	e.gone("RemoveImage", err)
	if img := e.image("docker.io/cases/nowhere:1"); img != nil {
		t.Errorf("ImageStatus of an absent image: %v, want none", img)
	}
}

// gone checks an idempotent call about something that is not there.
func (e *env) gone(what string, err error) {
	e.Helper()
	if err != nil {
		e.Errorf("%s of something gone: %v, want success", what, err)
	}
}

// The same request twice gives the same object; crictl agrees on what is there.
func TestRepeatedRequestsAndCrictl(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod, again := e.run(config), e.run(config)
	if pod != again {
		t.Errorf("the same pod run twice: %s and %s", pod, again)
	}
	c := command("once", "sleep 1000")
	id, second := e.create(pod, c, config), e.create(pod, c, config)
	if id != second {
		t.Errorf("the same container made twice: %s and %s", id, second)
	}
	for _, q := range []struct {
		args []string
		want string
	}{
		{[]string{"pods", "-q"}, pod}, {[]string{"ps", "-a", "-q"}, id},
		{[]string{"images", "-o", "json"}, images.Busybox}, {[]string{"info"}, "RuntimeReady"}, {[]string{"version"}, "RuntimeApiVersion"},
	} {
		out, err := e.Crictl(e.ctx, q.args...)
		if err != nil || !strings.Contains(out, q.want) {
			t.Errorf("crictl %v: %v; it says %q, which lacks %q", q.args, err, out, q.want)
		}
	}
}

// Images that are broken or hostile are refused whole: nothing is listed or kept.
func TestBadInputOfImages(t *testing.T) {
	e := start(t, node.Options{})
	good := publish(t, "cases/bad", "good", ispec.ImageConfig{})
	body := string(good.Body)
	other := digest.FromString("another layer")
	reg.PutBlobAs(other, parts.Base.Blob) // bytes that are not what their digest says
	noTar := reg.PutBlob([]byte("this is no archive at all, not even a short one"))
	base := digest.FromBytes(parts.Base.Blob)
	put := func(tag, mediaType, body string) { reg.PutManifest("cases/bad", tag, mediaType, []byte(body)) }
	put("not-json", ispec.MediaTypeImageManifest, "{ this is no json")
	put("empty", ispec.MediaTypeImageManifest, "")
	put("no-config", ispec.MediaTypeImageManifest, `{"schemaVersion":2,"layers":[]}`)
	put("oversized", ispec.MediaTypeImageManifest, body[:len(body)-1]+`,"annotations":{"x":"`+strings.Repeat("y", 8<<20)+`"}}`)
	put("strange-type", "text/html", "<html>sign in first</html>")
	put("wrong-blob", good.Type, strings.ReplaceAll(body, base.String(), other.String()))
	put("no-tar", good.Type, strings.ReplaceAll(strings.ReplaceAll(body, base.String(), noTar.String()), fmt.Sprint(len(parts.Base.Blob)), "47"))
	put("missing-blob", good.Type, strings.ReplaceAll(body, base.String(), digest.FromString("nowhere").String()))
	put("wrong-config", good.Type, strings.ReplaceAll(body, good.Config.String(), noTar.String()))
	for _, tag := range []string{"not-json", "empty", "no-config", "oversized", "strange-type", "wrong-blob", "no-tar", "missing-blob", "wrong-config", "no-such-tag"} {
		_, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "docker.io/cases/bad:" + tag}})
		e.pullRefused(tag, err)
	}
	cutLayer := layer(t, images.File("cut", 0o644, strings.Repeat("cut short ", 50_000)))
	publish(t, "cases/bad", "cut", ispec.ImageConfig{}, cutLayer)
	reg.PutBlobAs(digest.FromBytes(cutLayer.Blob), cutLayer.Blob[:len(cutLayer.Blob)/2])
	_, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "docker.io/cases/bad:cut"}})
	e.pullRefused("truncated blob", err)
	t.Run("garbled", func(t *testing.T) {
		defer reg.Script(registry.Fault{Path: base.String(), Garbage: 64})()
		_, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "docker.io/cases/bad:good"}})
		e.pullRefused("garbled blob", err)
	})
	e.refusedReferences()
	if id := e.pull("docker.io/cases/bad:good"); id != good.Config.String() {
		t.Errorf("the good image has id %s afterwards, want %s", id, good.Config)
	}
}

// refusedReferences pulls what is no reference.
func (e *env) refusedReferences() {
	e.Helper()
	for _, reference := range []string{"", "UPPER/Case:1", "a b", "docker.io/cases/bad@sha256:12", "http://docker.io/x", "docker.io/cases/bad:" + strings.Repeat("t", 129)} {
		_, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: reference}})
		e.refused(fmt.Sprintf("reference %.40q", reference), err, codes.InvalidArgument)
	}
}

// pullRefused checks that a pull failed with a message that names the image,
// and that nothing of it is listed or kept.
func (e *env) pullRefused(what string, err error) {
	e.Helper()
	if err == nil {
		e.Errorf("%s: the pull succeeded", what)
		return
	}
	if c := status.Code(err); c == codes.Internal || c == codes.OK || len(err.Error()) > 4096 {
		e.Errorf("%s: code %s, %d bytes of message: %.500v", what, c, len(err.Error()), err)
	}
	if !strings.Contains(err.Error(), "cases/bad") {
		e.Errorf("%s: the message does not name the image: %v", what, err)
	}
	list, lerr := e.im.ListImages(e.ctx, &cri.ListImagesRequest{})
	if lerr != nil || len(list.GetImages()) != 0 {
		e.Errorf("%s: images %v, error %v; want none", what, list.GetImages(), lerr)
	}
	if left := e.staged(); len(left) != 0 {
		e.Errorf("%s: left in the store: %v", what, left)
	}
}

// staged lists what lies in the image store's staging folder.
func (e *env) staged() []string {
	entries, err := os.ReadDir(filepath.Join(e.Root(), "images", "staging"))
	if err != nil {
		return nil // made when it is first needed
	}
	var names []string
	for _, s := range entries {
		names = append(names, s.Name())
	}
	return names
}

// A disk that is full fails the pull with ResourceExhausted and keeps nothing;
// everything else goes on, and what fits is pulled afterwards.
func TestFullDisk(t *testing.T) {
	noise := make([]byte, 20<<20)
	for i := range noise {
		noise[i] = byte(i * 7 >> 3)
	}
	many := []images.Entry{images.Dir("many", 0o755)}
	for i := range 3000 {
		many = append(many, images.File(fmt.Sprintf("many/%d", i), 0o644, ""))
	}
	for name, c := range map[string]struct {
		size  string
		layer images.Layer
	}{
		"bytes":  {"16m", layer(t, images.Entry{Header: images.File("big", 0o644, "").Header, Data: bytes.Clone(noise)})},
		"inodes": {"64m,nr_inodes=1500", layer(t, many...)},
	} {
		t.Run(name, func(t *testing.T) {
			publish(t, "cases/full", name, ispec.ImageConfig{}, c.layer)
			e := start(t, node.Options{RootSize: c.size})
			e.pull(images.Busybox)
			config := e.sandbox()
			pod := e.run(config)
			id := e.startContainer(pod, command("main", "sleep 1000"), config)
			_, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "docker.io/cases/full:" + name}})
			e.refused("pull onto a full disk", err, codes.ResourceExhausted, "cases/full")
			if list, err := e.im.ListImages(e.ctx, &cri.ListImagesRequest{}); err != nil || len(list.GetImages()) != 1 {
				t.Errorf("images %v, error %v; want busybox alone", list.GetImages(), err)
			}
			if left := e.staged(); len(left) != 0 {
				t.Errorf("left in staging: %v", left)
			}
			if out := e.exec(id, "echo alive"); out != "alive\n" {
				t.Errorf("the running container says %q", out)
			}
			e.removePod(pod)
			e.run(e.sandbox())
		})
	}
}
