package cases

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// info is a verbose reply's JSON.
func info(t *testing.T, reply map[string]string) map[string]any {
	t.Helper()
	var out map[string]any
	if err := json.Unmarshal([]byte(reply["info"]), &out); err != nil {
		t.Fatalf("info %q: %v", reply["info"], err)
	}
	return out
}

// put writes a file of the test's.
func put(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

func TestMountOptions(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	res, err := e.rt.Status(e.ctx, &cri.StatusRequest{})
	if err != nil || !res.GetFeatures().GetMountOptions() || !res.GetFeatures().GetSupplementalGroupsPolicy() {
		t.Errorf("features %v, %v", res.GetFeatures(), err)
	}
	config := e.sandbox()
	pod := e.run(config)
	put(t, filepath.Join(e.Dir, "share/run"), "#!/bin/sh\necho ran\n", 0o755)
	with := func(name string, options ...string) *cri.ContainerConfig {
		c := command(name, "grep ' /share ' /proc/self/mounts; /share/run")
		c.Mounts = []*cri.Mount{{HostPath: filepath.Join(e.Dir, "share"), ContainerPath: "/share", MountOptions: options}}
		return c
	}
	if out := e.output(pod, with("plain"), config); !strings.HasSuffix(out, "ran\n") {
		t.Errorf("without options: %q", out)
	}
	all := e.startContainer(pod, with("all", "noexec", "nodev", "nosuid"), config)
	s := e.exited(all)
	out, text := e.logs(all)
	if s.GetExitCode() != 126 || !strings.Contains(text, "Permission denied") {
		t.Errorf("noexec: exit code %d, %q", s.GetExitCode(), text)
	}
	for _, o := range []string{"noexec", "nodev", "nosuid"} {
		if !strings.Contains(out, o) {
			t.Errorf("the mount has no %s: %s", o, out)
		}
	}
	if m := s.GetMounts(); len(m) != 1 || !slices.Equal(m[0].GetMountOptions(), []string{"noexec", "nodev", "nosuid"}) {
		t.Errorf("the status shows %v", m)
	}
	for _, o := range []string{"exec", "suid", "bind", "noexec,dev", ""} {
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: with("bad", o), SandboxConfig: config})
		e.refused("option "+o, err, codes.InvalidArgument, "mounts[0].mount_options", o)
	}
}

// The capability sets of a process, as /proc shows them.
const showCaps = "grep Cap /proc/self/status; grep NoNewPrivs /proc/self/status"

func TestAmbientCapabilities(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	const bind = 1 << 10 // CAP_NET_BIND_SERVICE
	sets := func(name string, uid int64, nnp bool, caps *cri.Capability) map[string]uint64 {
		c := command(name, showCaps)
		c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: uid}
		c.Linux.SecurityContext.NoNewPrivs = nnp
		c.Linux.SecurityContext.Capabilities = caps
		out := map[string]uint64{}
		for line := range strings.Lines(e.output(pod, c, config)) {
			var set string
			var bits uint64
			if _, err := fmt.Sscanf(strings.Replace(line, ":", "", 1), "%s %x", &set, &bits); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			out[set] = bits
		}
		return out
	}
	for _, nnp := range []bool{false, true} {
		got := sets(fmt.Sprintf("user-%v", nnp), 1000, nnp, &cri.Capability{AddAmbientCapabilities: []string{"NET_BIND_SERVICE"}, DropCapabilities: []string{"ALL"}})
		for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
			if got[set] != bind {
				t.Errorf("no_new_privs %v: %s is %x, want %x", nnp, set, got[set], bind)
			}
		}
		if got["NoNewPrivs"] == 1 != nnp {
			t.Errorf("NoNewPrivs is %d", got["NoNewPrivs"])
		}
	}
	// Added to the other list only, a user without root's id does not have it.
	if got := sets("added", 1000, false, &cri.Capability{AddCapabilities: []string{"NET_BIND_SERVICE"}, DropCapabilities: []string{"ALL"}}); got["CapEff"] != 0 || got["CapAmb"] != 0 || got["CapInh"] != 0 || got["CapBnd"] != bind {
		t.Errorf("added but not ambient: %x", got)
	}
	// Dropping takes it out of all sets.
	if got := sets("dropped", 1000, false, &cri.Capability{AddAmbientCapabilities: []string{"NET_BIND_SERVICE"}, DropCapabilities: []string{"NET_BIND_SERVICE"}}); got["CapAmb"]|got["CapBnd"]&bind != 0 {
		t.Errorf("dropped by name: %x", got)
	}
	if got := sets("root", 0, false, &cri.Capability{AddAmbientCapabilities: []string{"CAP_NET_BIND_SERVICE"}}); got["CapAmb"] != bind || got["CapEff"]&bind == 0 {
		t.Errorf("as root: %x", got)
	}
	c := command("bad", showCaps)
	c.Linux.SecurityContext.Capabilities = &cri.Capability{AddAmbientCapabilities: []string{"NET_BIND"}}
	_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
	e.refused("unknown capability", err, codes.InvalidArgument, "add_ambient_capabilities", "NET_BIND")
}

// The request's stop signal beats the image's, is the one that arrives, and is
// told by the status.
func TestStopSignals(t *testing.T) {
	e := start(t, node.Options{})
	image := images.Image{Config: ispec.ImageConfig{StopSignal: "SIGRTMIN+3"}, Layers: []images.Layer{parts.Base}}
	if _, err := image.Publish(reg, "cases/stopsignal", "1"); err != nil {
		t.Fatal(err)
	}
	const busy = "docker.io/cases/stopsignal:1"
	e.pull(busy)
	config := e.sandbox()
	pod := e.run(config)
	for i, tc := range []struct {
		asked, told cri.Signal
		number      int
	}{
		{cri.Signal_SIGNAL_RUNTIME_DEFAULT, cri.Signal_SIGNAL_SIGRTMINPLUS3, 37},
		{cri.Signal_SIGNAL_SIGUSR1, cri.Signal_SIGNAL_SIGUSR1, 10},
		{cri.Signal_SIGNAL_SIGRTMAXMINUS14, cri.Signal_SIGNAL_SIGRTMAXMINUS14, 50},
		{cri.Signal_SIGNAL_SIGRTMAX, cri.Signal_SIGNAL_SIGRTMAX, 64},
	} {
		c := command(fmt.Sprintf("c%d", i), fmt.Sprintf("trap 'exit 9' %d; echo ready; while :; do sleep 0.05; done", tc.number))
		c.Image = &cri.ImageSpec{Image: busy}
		c.StopSignal = tc.asked
		id := e.startContainer(pod, c, config)
		e.said(id, "ready\n")
		if got := e.status(id).GetStopSignal(); got != tc.told {
			t.Errorf("asked for %v: the status tells %v, want %v", tc.asked, got, tc.told)
		}
		if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 30}); err != nil {
			t.Error(err)
		}
		if s := e.exited(id); s.GetExitCode() != 9 {
			t.Errorf("asked for %v: exit code %d; signal %d did not arrive", tc.asked, s.GetExitCode(), tc.number)
		}
	}
}

const radio = `{"cdiVersion":"0.6.0","kind":"vendor.test/radio","containerEdits":{"env":["RADIO=on"]},"devices":[
 {"name":"null","containerEdits":{"deviceNodes":[{"path":"/dev/radio","hostPath":"/dev/null"}]}},
 {"name":"files","containerEdits":{"mounts":[{"hostPath":%q,"containerPath":"/radio","options":["rbind","ro"]}]}}]}`

func TestCDIDevices(t *testing.T) {
	dirs := t.TempDir()
	e := start(t, node.Options{Settings: map[string]string{"runtime": fmt.Sprintf("cdi_dirs = [%q, %q]", dirs+"/one", dirs+"/two")}})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	asking := func(name string, devices ...string) *cri.ContainerConfig {
		c := command(name, `echo "$RADIO"; ls /radio; ls -l /dev/radio; echo x > /dev/radio`)
		for _, d := range devices {
			c.CDIDevices = append(c.CDIDevices, &cri.CDIDevice{Name: d})
		}
		return c
	}
	create := func(c *cri.ContainerConfig) error {
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		return err
	}
	e.refused("no file yet", create(asking("early", "vendor.test/radio=null")), codes.InvalidArgument, "vendor.test/radio=null", dirs+"/one", dirs+"/two")
	e.refused("no name", create(asking("odd", "vendor.test/radio")), codes.InvalidArgument, "CDI_devices[0].name", "vendor.test/radio")
	put(t, dirs+"/files/hello", "", 0o644)
	put(t, dirs+"/two/radio.json", fmt.Sprintf(radio, dirs+"/files"), 0o644)
	put(t, dirs+"/two/bad.json", "{", 0o644)
	want := "on\nhello\n"
	if out := e.output(pod, asking("field", "vendor.test/radio=null", "vendor.test/radio=files"), config); !strings.HasPrefix(out, want) || !strings.Contains(out, "1,   3") {
		t.Errorf("named in the field: %q", out)
	}
	c := asking("annotation", "vendor.test/radio=null")
	c.Annotations = map[string]string{"cdi.k8s.io/vendor.test_radio": "vendor.test/radio=files"}
	if out := e.output(pod, c, config); !strings.HasPrefix(out, want) {
		t.Errorf("named by annotation: %q", out)
	}
	e.refused("an unknown one", create(asking("unknown", "vendor.test/radio=null", "vendor.test/radio=loud")), codes.InvalidArgument,
		"vendor.test/radio=loud", "bad.json")
	c = asking("pod's", "vendor.test/radio=null")
	c.Annotations = map[string]string{"cdi.k8s.io/x": "nonsense"}
	e.refused("a bad annotation", create(c), codes.InvalidArgument, "annotations[cdi.k8s.io/x]", "nonsense")
	e.removePod(pod)
	e.empty("removal")
}

// The status shows a container as it was asked for and as it came out; the
// verbose one has the keys that node tools look for.
func TestContainerStatusFields(t *testing.T) {
	e := start(t, node.Options{})
	id := e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	c := command("full", "sleep 100")
	c.Image = &cri.ImageSpec{Image: id, UserSpecifiedImage: images.Busybox}
	c.Labels, c.Annotations = map[string]string{"l": "1"}, map[string]string{"a": "2"}
	c.Mounts = []*cri.Mount{{HostPath: e.Dir, ContainerPath: "/mnt", Readonly: true, Propagation: cri.MountPropagation_PROPAGATION_PRIVATE}}
	c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 64 << 20, OomScoreAdj: 500}
	c.Linux.SecurityContext.RunAsUser, c.Linux.SecurityContext.RunAsGroup = &cri.Int64Value{Value: 1000}, &cri.Int64Value{Value: 2000}
	c.Linux.SecurityContext.SupplementalGroups = []int64{3000}
	ctr := e.startContainer(pod, c, config)
	res, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: ctr, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	s := res.GetStatus()
	if s.GetImageId() != id || s.GetImage().GetImage() != images.Busybox || !strings.Contains(s.GetImageRef(), "@sha256:") {
		t.Errorf("image %v, ref %q, id %q; want %s", s.GetImage(), s.GetImageRef(), s.GetImageId(), id)
	}
	if !proto.Equal(s.GetMounts()[0], c.Mounts[0]) || !proto.Equal(s.GetResources().GetLinux(), c.Linux.Resources) {
		t.Errorf("mounts %v, resources %v", s.GetMounts(), s.GetResources())
	}
	if u := s.GetUser().GetLinux(); u.GetUid() != 1000 || u.GetGid() != 2000 || !slices.Contains(u.GetSupplementalGroups(), 3000) {
		t.Errorf("user %v", u)
	}
	if s.GetStopSignal() != cri.Signal_SIGNAL_SIGTERM || s.GetLabels()["l"] != "1" || s.GetAnnotations()["a"] != "2" || s.GetLogPath() == "" {
		t.Errorf("status %v", s)
	}
	if s.GetStartedAt() < s.GetCreatedAt() || s.GetCreatedAt() == 0 || s.GetFinishedAt() != 0 {
		t.Errorf("times %d %d %d", s.GetCreatedAt(), s.GetStartedAt(), s.GetFinishedAt())
	}
	i := info(t, res.GetInfo())
	sp, _ := i["runtimeSpec"].(map[string]any)
	if pid, _ := i["pid"].(float64); pid < 2 || i["sandboxID"] != pod || sp["process"] == nil || sp["linux"] == nil {
		t.Errorf("verbose: pid %v, sandboxID %v, runtimeSpec with %d keys", i["pid"], i["sandboxID"], len(sp))
	}
	reply, err := e.rt.UpdateContainerResources(e.ctx, &cri.UpdateContainerResourcesRequest{ContainerId: ctr, Linux: &cri.LinuxContainerResources{CpuShares: 256}})
	if err != nil {
		t.Fatal(reply, err)
	}
	if r := e.status(ctr).GetResources().GetLinux(); r.GetCpuShares() != 256 || r.GetMemoryLimitInBytes() != 64<<20 {
		t.Errorf("resources after an update: %v", r)
	}
}

// A pod without pause has no process, but tools find its namespaces.
func TestPodStatusInfo(t *testing.T) {
	e := start(t, node.Options{})
	for _, mode := range []cri.NamespaceMode{cri.NamespaceMode_CONTAINER, cri.NamespaceMode_POD} {
		pod := e.run(pidMode(e.sandbox(), mode))
		res, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod, Verbose: true})
		if err != nil {
			t.Fatal(err)
		}
		i := info(t, res.GetInfo())
		pid, _ := i["pid"].(float64)
		if (pid > 1) != (mode == cri.NamespaceMode_POD) {
			t.Errorf("mode %v: pid %v", mode, i["pid"])
		}
		var sp struct {
			Linux struct{ Namespaces []struct{ Type, Path string } }
		}
		raw, err := json.Marshal(i["runtimeSpec"])
		if err == nil {
			err = json.Unmarshal(raw, &sp)
		}
		if err != nil {
			t.Fatal(err)
		}
		found := ""
		for _, ns := range sp.Linux.Namespaces {
			if ns.Type == "network" {
				found = ns.Path
			}
		}
		if _, err := os.Stat(found); err != nil || found != i["netns"] {
			t.Errorf("mode %v: network namespace %q of %v: %v", mode, found, i["netns"], err)
		}
	}
}
