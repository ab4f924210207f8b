package cases

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// damages are what can become of a file that a daemon finds at its start.
var damages = map[string]func(path string) error{
	"empty": func(path string) error { return os.Truncate(path, 0) },
	"cut": func(path string) error {
		return altered(path, func(data []byte) []byte { return data[:len(data)/2] })
	},
	"a byte flipped": func(path string) error {
		return altered(path, func(data []byte) []byte {
			data[len(data)*2/3] ^= 0x10
			return data
		})
	},
	"other text":            func(path string) error { return os.WriteFile(path, []byte("[1, 2"), 0o600) },
	"another shape":         func(path string) error { return os.WriteFile(path, []byte(`{"version":{"a":[]},"record":7}`), 0o600) },
	"a huge file":           func(path string) error { return os.Truncate(path, 1<<40) },
	"deleted":               os.Remove,
	"a directory":           func(path string) error { return errors.Join(os.Remove(path), os.MkdirAll(path+"/x", 0o700)) },
	"a FIFO":                func(path string) error { return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)) },
	"a symlink to a device": func(path string) error { return errors.Join(os.Remove(path), os.Symlink("/dev/zero", path)) },
	"a symlink to nothing":  func(path string) error { return errors.Join(os.Remove(path), os.Symlink("/nowhere", path)) },
	"a later version": func(path string) error {
		return altered(path, func(data []byte) []byte { return bytes.Replace(data, []byte(`"version":1`), []byte(`"version":9`), 1) })
	},
}

func altered(path string, change func([]byte) []byte) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return os.WriteFile(path, change(data), 0o600)
}

// victim is one pod with a container, of which one file is damaged.
type victim struct {
	damage, pod, container string
	config                 *cri.PodSandboxConfig
}

// victims makes a pod for each damage, on the node's network, as that is quick, or
// with one of its own. Every kind has half of the damages, or with
// BERTH_TORTURE=all each.
func (e *env) victims(kind int) (list []*victim) {
	e.Helper()
	network := recordKinds[kind].network
	for i, damage := range slices.Sorted(maps.Keys(damages)) {
		if (i+kind)%2 == 1 && os.Getenv("BERTH_TORTURE") != "all" {
			continue
		}
		v := &victim{damage: damage, config: e.sandbox()}
		v.config.Linux.SecurityContext.NamespaceOptions.Network = network
		v.pod = e.run(v.config)
		v.container = e.startContainer(v.pod, inPod(command("main", "sleep 100000"), v.config), v.config)
		list = append(list, v)
	}
	return list
}

// kinds of files of a pod or container: where they are, and what of the object is
// still there when one of them is damaged.
var recordKinds = []struct {
	name           string
	path           func(e *env, v *victim) string
	network        cri.NamespaceMode
	pod, container bool // they are listed, as before
	named          bool // the log names what was damaged
	killed         bool // the container's init was killed before
}{
	{name: "sandbox.json", path: func(e *env, v *victim) string { return filepath.Join(e.Root(), "sandboxes", v.pod, "sandbox.json") },
		named: true},
	{name: "sandbox.json of a network", path: func(e *env, v *victim) string { return filepath.Join(e.Root(), "sandboxes", v.pod, "sandbox.json") },
		network: cri.NamespaceMode_POD, named: true},
	{name: "container.json", path: func(e *env, v *victim) string {
		return filepath.Join(e.Root(), "containers", v.container, "container.json")
	}, pod: true, named: true},
	{name: "resolv.conf", path: func(e *env, v *victim) string { return filepath.Join(e.Root(), "sandboxes", v.pod, "resolv.conf") },
		pod: true, container: true},
	{name: "config.json", path: func(e *env, v *victim) string {
		return filepath.Join(e.State(), "containers", v.container, "config.json")
	},
		pod: true, container: true},
	{name: "monitor.json", path: func(e *env, v *victim) string {
		return filepath.Join(e.State(), "containers", v.container, "monitor.json")
	},
		pod: true, container: true},
	{name: "exit.json", path: func(e *env, v *victim) string {
		return filepath.Join(e.State(), "containers", v.container, "exit.json")
	},
		pod: true, container: true, killed: true},
	{name: "state.json of runc", path: func(e *env, v *victim) string {
		return filepath.Join(e.State(), "runc", "runc", v.container, "state.json")
	},
		pod: true, container: true},
	{name: "the result of CNI", path: func(e *env, v *victim) string {
		return filepath.Join(e.Root(), "cni", "results", e.Bridge+"-"+v.pod+"-eth0")
	}, network: cri.NamespaceMode_POD, pod: true, container: true},
}

// Files of every kind are damaged in every way while the daemon is away, those of
// one kind at the same time. It starts, says which records it cannot read, has lost
// nothing else, and what is left can be stopped and removed.
func TestDamagedRecords(t *testing.T) {
	e := startFor(t, node.Options{LogLevel: "info"}, 15*60e9)
	e.pull(images.Busybox)
	config := e.sandbox()
	kept := e.run(config)
	running := e.startContainer(kept, command("kept", "sleep 100000"), config)
	for i, kind := range recordKinds {
		e.pod += len(damages) // names are of one pod each, in all kinds
		t.Run(kind.name, func(t *testing.T) {
			e := e.sub(t)
			list := e.victims(i)
			if kind.killed {
				for _, v := range list {
					e.killInit(v.container)
				}
			}
			if err := e.Kill(); err != nil {
				t.Fatal(err)
			}
			for _, v := range list {
				if err := damages[v.damage](kind.path(e, v)); err != nil {
					t.Fatalf("%s: %v", v.damage, err)
				}
			}
			e.relaunched()
			if got := e.exec(running, "echo alive"); got != "alive\n" {
				t.Errorf("the other container says %q", got)
			}
			for _, v := range list {
				e.survives(v, kind.pod, kind.container, kind.killed)
				if kind.named && !e.logNames(v) {
					t.Errorf("%s: the log does not say whose record it is", v.damage)
				}
				e.removePod(v.pod)
			}
			e.onlyLeft(kept, list)
		})
	}
}

// relaunched starts the daemon and waits until it has tidied up.
func (e *env) relaunched() {
	e.Helper()
	if err := e.Launch(e.ctx); err != nil {
		e.Fatal(err)
	}
	if err := e.Tidied(e.ctx); err != nil {
		e.Fatal(err)
	}
}

// killInit ends a container's init behind the daemon's back and waits for the notice.
func (e *env) killInit(id string) {
	e.Helper()
	res, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		e.Fatal(err)
	}
	var info struct{ PID int }
	if err := json.Unmarshal([]byte(res.GetInfo()["info"]), &info); err != nil || info.PID == 0 {
		e.Fatalf("pid of %s: %v", id, err)
	}
	if err := syscall.Kill(info.PID, syscall.SIGKILL); err != nil {
		e.Fatal(err)
	}
	e.exited(id)
}

// survives checks what is listed of a victim.
func (e *env) survives(v *victim, pod, container, killed bool) {
	e.Helper()
	pods, err := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: v.pod}})
	if err != nil {
		e.Fatal(err)
	}
	if listed := len(pods.GetItems()) == 1; listed != pod || pod && pods.GetItems()[0].GetState() != cri.PodSandboxState_SANDBOX_READY {
		e.Errorf("%s: pod %v, want it to be there: %v", v.damage, pods.GetItems(), pod)
	}
	list, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{Id: v.container}})
	if err != nil {
		e.Fatal(err)
	}
	want := cri.ContainerState_CONTAINER_RUNNING
	if killed {
		want = cri.ContainerState_CONTAINER_EXITED
	}
	if listed := len(list.GetContainers()) == 1; listed != container || container && list.GetContainers()[0].GetState() != want {
		e.Errorf("%s: container %v, want it to be there: %v", v.damage, list.GetContainers(), container)
	}
	if !container {
		return
	}
	res, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: v.container, Verbose: true})
	if err != nil {
		e.Errorf("%s: status: %v", v.damage, err)
	}
	if s := res.GetStatus(); killed && s.GetExitCode() != 137 {
		e.Errorf("%s: ended with %d: %s", v.damage, s.GetExitCode(), s.GetMessage())
	}
}

// logNames tells whether a line of the daemon's log names a victim.
func (e *env) logNames(v *victim) bool {
	text := e.LogTail(400)
	return regexp.MustCompile(`level=(error|warning) .*(` + v.pod + `|` + v.container + `)`).MatchString(text)
}

// onlyLeft checks that nothing is left but one pod and its container, in lists and
// on the node.
func (e *env) onlyLeft(kept string, gone []*victim) {
	e.Helper()
	pods, err := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{})
	if err != nil || len(pods.GetItems()) != 1 || pods.GetItems()[0].GetId() != kept {
		e.Errorf("pods %v, %v", pods.GetItems(), err)
	}
	if left := e.leases(); len(left) != 1 {
		e.Errorf("leases %v, want that of the other pod", left)
	}
	for _, dir := range []string{"root/sandboxes", "root/containers", "state/containers", "state/namespaces", "state/sandboxes", "state/runc/runc"} {
		found, err := os.ReadDir(filepath.Join(e.Dir, dir))
		if err != nil || len(found) != 1 {
			e.Errorf("%s has %v, %v; want what is of the other pod", dir, found, err)
		}
	}
	if p := e.Processes(); len(p) != 1 {
		e.Errorf("processes %q, want that of the other container", p)
	}
	for _, v := range gone {
		if groups, _ := filepath.Glob("/sys/fs/cgroup/*/berth/" + v.pod); len(groups) != 0 {
			e.Errorf("%s: cgroups %q are left", v.damage, groups)
		}
	}
}

// resealed changes what a record says, with a checksum that fits.
func resealed(path string, change map[string]any) error {
	return altered(path, func(data []byte) []byte {
		var envelope struct {
			Version int             `json:"version"`
			SHA256  string          `json:"sha256"`
			Record  json.RawMessage `json:"record"`
		}
		var record map[string]any
		if json.Unmarshal(data, &envelope) != nil {
			return nil
		}
		numbers := json.NewDecoder(bytes.NewReader(envelope.Record))
		numbers.UseNumber() // times do not fit a float
		if numbers.Decode(&record) != nil {
			return nil
		}
		for key, value := range change {
			if record[key] = value; value == nil {
				delete(record, key)
			}
		}
		envelope.Record, _ = json.Marshal(record)
		sum := sha256.Sum256(envelope.Record)
		envelope.SHA256 = hex.EncodeToString(sum[:])
		data, _ = json.Marshal(envelope)
		return data
	})
}

// sayings are records that can be read and say odd things, and what becomes of them.
var sayings = map[string]struct {
	kind           string // sandboxes or containers
	change         func(v *victim) map[string]any
	pod, container bool
}{
	"a pod of the future": {"sandboxes", func(*victim) map[string]any {
		return map[string]any{"createdAt": future, "readyAt": future}
	}, true, true},
	"a container of the future": {"containers", func(*victim) map[string]any {
		return map[string]any{"createdAt": future, "madeAt": future, "startedAt": future}
	}, true, true},
	"a container whose pod is gone": {"containers", func(*victim) map[string]any {
		return map[string]any{"sandboxID": strings.Repeat("ab", 32)}
	}, true, false},
	"a pod with another id": {"sandboxes", func(*victim) map[string]any {
		return map[string]any{"id": strings.Repeat("cd", 32)}
	}, false, false},
	"a container with its pod's id": {"containers", func(v *victim) map[string]any {
		return map[string]any{"id": v.pod}
	}, true, false},
	"a pod with another's name": {"sandboxes", func(*victim) map[string]any {
		return map[string]any{"name": "kept"}
	}, true, true},
	"a container of a later berth": {"containers", func(*victim) map[string]any {
		return map[string]any{"news": map[string]any{"a": 1}}
	}, true, true},
}

const future = int64(1) << 61 // the year 2043

// Records whose checksum fits say odd things: the clock has jumped, an object is
// gone, two have one name.
func TestRecordsThatSayOddThings(t *testing.T) {
	e := start(t, node.Options{LogLevel: "info"})
	e.pull(images.Busybox)
	config := e.sandbox()
	kept := e.run(config)
	running := e.startContainer(kept, command("kept", "sleep 100000"), config)
	var list []*victim
	for name := range sayings {
		v := &victim{damage: name, config: e.sandbox()}
		v.config.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
		v.pod = e.run(v.config)
		v.container = e.startContainer(v.pod, inPod(command("main", "sleep 100000"), v.config), v.config)
		list = append(list, v)
	}
	if err := e.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, v := range list {
		saying := sayings[v.damage]
		path := filepath.Join(e.Root(), "sandboxes", v.pod, "sandbox.json")
		if saying.kind == "containers" {
			path = filepath.Join(e.Root(), "containers", v.container, "container.json")
		}
		if err := resealed(path, saying.change(v)); err != nil {
			t.Fatal(err)
		}
	}
	e.relaunched()
	if got := e.exec(running, "echo alive"); got != "alive\n" {
		t.Errorf("the other container says %q", got)
	}
	for _, v := range list {
		e.survives(v, sayings[v.damage].pod, sayings[v.damage].container, false)
		e.removePod(v.pod)
	}
	e.onlyLeft(kept, list)
}

// The records of an image's layers are damaged while a container runs on it: its
// files stay, and the image can be pulled again.
func TestDamagedLayersUnderAContainer(t *testing.T) {
	e := start(t, node.Options{LogLevel: "info"})
	reference := checkedImages(t, 1)[0]
	for _, damage := range []string{"cut", "a FIFO", "deleted"} {
		e.pull(reference)
		config := e.sandbox()
		c := command("main", "sleep 100000")
		c.Image.Image = reference
		pod := e.run(config)
		running := e.startContainer(pod, c, config)
		if err := e.Kill(); err != nil {
			t.Fatal(err)
		}
		files, err := filepath.Glob(filepath.Join(e.Root(), "images", "layers", "*", "layer.json"))
		if err != nil || len(files) < 4 {
			t.Fatalf("records of layers: %q, %v", files, err)
		}
		for _, file := range files[:2] {
			if err := damages[damage](file); err != nil {
				t.Fatal(err)
			}
		}
		e.relaunched()
		e.exec(running, "sleep 0.3; md5sum -c /sum/*")
		e.pull(reference)
		again := command("again", whole)
		again.Image.Image = reference
		if s := e.exited(e.startContainer(pod, again, config)); s.GetExitCode() != 7 {
			t.Errorf("%s: pulled again, the image is not whole: %d", damage, s.GetExitCode())
		}
		e.exec(running, "md5sum -c /sum/*")
		e.removePod(pod)
	}
}
