package cases

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

const bootIDFile = "/proc/sys/kernel/random/boot_id"

// inBoot calls start with another boot's id than the node's, which a daemon reads as
// it starts. The id does not stay: what covers a part of /proc keeps containers with
// a user namespace from mounting theirs.
func inBoot(t *testing.T, start func()) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "boot_id")
	id, err := os.ReadFile("/proc/sys/kernel/random/uuid")
	if err == nil {
		err = os.WriteFile(file, id, 0o444)
	}
	if err == nil {
		err = syscall.Mount(file, bootIDFile, "", syscall.MS_BIND, "")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Unmount(bootIDFile, syscall.MNT_DETACH) }()
	start()
}

// reboot does to the node what a reboot does, with the daemon's next start:
// processes, mounts, namespaces, links, packet filter and cgroups are gone, and so
// is the state directory; the boot has another id.
func (e *env) reboot(pods []string) {
	e.Helper()
	if err := e.LoseState(); err != nil {
		e.Fatal(err)
	}
	_ = exec.Command("ip", "link", "del", e.Bridge).Run() // absent when no pod had a network
	if out, err := exec.Command("nft", "flush", "ruleset").CombinedOutput(); err != nil {
		e.Fatalf("flush the packet filter: %v: %s", err, out)
	}
	for _, pod := range pods {
		dirs, err := filepath.Glob("/sys/fs/cgroup/*/berth/" + pod)
		if err != nil {
			e.Fatal(err)
		}
		for _, dir := range dirs {
			_ = exec.Command("find", dir, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+").Run()
		}
	}
	inBoot(e.T, func() {
		if err := e.Launch(e.ctx); err != nil {
			e.Fatal(err)
		}
	})
}

// kind is one kind of pod before a reboot.
type kind struct {
	config     *cri.PodSandboxConfig
	pod        string
	containers map[string]string // ids, by name
}

// kinds makes one pod of every kind; each has a container "main" that runs.
func (e *env) kinds() map[string]*kind {
	e.Helper()
	e.volume()
	all := map[string]*kind{}
	for _, name := range []string{"host", "bridge", "ports", "shared", "mapped", "volumes", "stopped", "init"} {
		k := &kind{config: e.sandbox(), containers: map[string]string{}}
		options := k.config.Linux.SecurityContext.NamespaceOptions
		switch name {
		case "host":
			options.Network = cri.NamespaceMode_NODE
		case "ports":
			k.config.PortMappings = []*cri.PortMapping{{ContainerPort: 80, HostPort: 18088}}
		case "shared":
			options.Pid = cri.NamespaceMode_POD
		case "mapped":
			options.UsernsOptions = shifted(300000)
		}
		all[name] = k
		e.bringUp(name, k)
	}
	if _, err := e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: all["stopped"].pod}); err != nil {
		e.Fatal(err)
	}
	return all
}

// bringUp runs a pod of a kind with its containers.
func (e *env) bringUp(name string, k *kind) {
	e.Helper()
	main := command("main", "echo before "+name+"; sleep 100000")
	if name == "volumes" {
		main.Mounts = []*cri.Mount{imageMount("/volume", volumeImage, "")}
	}
	k.pod = e.run(k.config)
	if name == "init" {
		for n, code := range map[string]int32{"done": 0, "failed": 3} {
			k.containers[n] = e.startContainer(k.pod, inPod(command(n, fmt.Sprintf("echo %s; exit %d", n, code)), k.config), k.config)
			if s := e.exited(k.containers[n]); s.GetExitCode() != code {
				e.Errorf("%s ended with %d", n, s.GetExitCode())
			}
		}
		k.containers["created"] = e.create(k.pod, inPod(command("created", "true"), k.config), k.config)
	}
	k.containers["main"] = e.startContainer(k.pod, inPod(main, k.config), k.config)
	e.said(k.containers["main"], "before "+name+"\n")
}

// B49 and more: after a reboot every pod is NotReady and every container EXITED, the
// addresses are given back, logs and images are there, and all of it can be stopped,
// removed and run again.
func TestReboot(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	all := e.kinds()
	var pods []string
	for _, k := range all {
		pods = append(pods, k.pod)
	}
	e.durable()
	requests := reg.Requests()
	for range 2 { // a second reboot finds what the first has left
		e.reboot(pods)
		e.allEnded(all)
		if err := e.Tidied(e.ctx); err != nil {
			t.Fatal(err)
		}
		e.allEnded(all)
		if left := e.leases(); len(left) != 0 {
			t.Errorf("leases %v are left", left)
		}
		var begin struct {
			Trouble     int
			Troubles    []string
			Quarantined []string
		}
		if e.info("restore", &begin); begin.Trouble != 0 || len(begin.Quarantined) != 0 {
			t.Errorf("the start tells of %+v", begin)
		}
	}
	for name, k := range all { // as the kubelet does: the same pod, its next attempt
		old := k.pod
		k.config.Metadata.Attempt++
		k.config.LogDirectory += "-next" // the kubelet numbers the files
		e.bringUp(name, k)
		e.removePod(old)
	}
	if got := reg.Requests(); len(got) != len(requests) {
		t.Errorf("images were asked for again: %v", got[len(requests):])
	}
	if got := len(e.leases()); got != len(all)-1 {
		t.Errorf("%d leases, want one for each pod that is not on the node's network", got)
	}
}

// durable waits until every layer is surely on the disk: what is not goes with a
// reboot, which may have been a power cut.
func (e *env) durable() {
	e.Helper()
	e.eventually("layers are durable", func() bool {
		files, err := filepath.Glob(filepath.Join(e.Root(), "images", "layers", "*", "layer.json"))
		return err == nil && len(files) > 0 && !slices.ContainsFunc(files, func(f string) bool {
			data, err := os.ReadFile(f)
			return err != nil || !strings.Contains(string(data), `"durable":true`)
		})
	})
}

// allEnded checks what lists and statuses say after a reboot.
func (e *env) allEnded(all map[string]*kind) {
	e.Helper()
	pods, err := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{})
	if err != nil || len(pods.GetItems()) != len(all) {
		e.Fatalf("%d pods are listed (%v), want %d", len(pods.GetItems()), err, len(all))
	}
	for _, p := range pods.GetItems() {
		if p.GetState() != cri.PodSandboxState_SANDBOX_NOTREADY {
			e.Errorf("pod %s is %s", p.GetMetadata().GetName(), p.GetState())
		}
	}
	for name, k := range all {
		for n, id := range k.containers {
			s := e.status(id)
			if s.GetState() != cri.ContainerState_CONTAINER_EXITED || s.GetFinishedAt() < s.GetStartedAt() || s.GetFinishedAt() == 0 {
				e.Errorf("%s, %s: %v", name, n, s)
			}
			code, text := int32(255), "the node was restarted"
			switch {
			case n == "done":
				code, text = 0, ""
			case n == "failed":
				code, text = 3, ""
			case name == "stopped":
				code, text = 137, ""
			}
			if s.GetExitCode() != code || !strings.Contains(s.GetMessage(), text) || (code == 255) != (s.GetReason() == "Unknown") {
				e.Errorf("%s, %s: code %d, reason %q, message %q", name, n, s.GetExitCode(), s.GetReason(), s.GetMessage())
			}
			if n == "main" {
				if out, _ := e.logs(id); out != "before "+name+"\n" {
					e.Errorf("%s: the log has %q", name, out)
				}
			}
		}
	}
}
