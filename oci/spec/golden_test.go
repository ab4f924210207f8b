package spec

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

var update = flag.Bool("update", false, "rewrite the specifications in testdata")

// golden is a file of testdata: the input's difference from base, and what
// came of it. `go test ./oci/spec -update` rewrites the last two fields.
type golden struct {
	About      string          `json:"about"`
	Pause      bool            `json:"pause,omitempty"`
	Config     json.RawMessage `json:"config,omitempty"`
	Sandbox    json.RawMessage `json:"sandbox,omitempty"`
	Image      json.RawMessage `json:"image,omitempty"`
	Host       json.RawMessage `json:"host,omitempty"`
	Resolved   json.RawMessage `json:"resolved,omitempty"`
	Namespaces json.RawMessage `json:"namespaces,omitempty"`
	Files      json.RawMessage `json:"files,omitempty"`
	Options    json.RawMessage `json:"options,omitempty"`
	Hostname   string          `json:"hostname,omitempty"`
	Profile    json.RawMessage `json:"profile,omitempty"`

	Spec     *rspec.Spec `json:"spec"`
	Warnings []string    `json:"warnings,omitempty"`
}

// base is a container that asks for nothing, on a host that can do everything.
func base() ContainerInput {
	return ContainerInput{
		ID: "c0ffee", SandboxID: "5a4d", Rootfs: "/run/berth/containers/c0ffee/rootfs", CgroupsPath: "/kubepods/pod1/c0ffee",
		Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: "web"},
			Image:    &cri.ImageSpec{Image: "sha256:1234", UserSpecifiedImage: "registry.test/web:1"},
		},
		Sandbox: &cri.PodSandboxConfig{
			Metadata: &cri.PodSandboxMetadata{Name: "pod", Namespace: "default", Uid: "u-1"},
			Hostname: "pod",
		},
		Image: &ispec.Image{Config: ispec.ImageConfig{Entrypoint: []string{"/entry"}, Cmd: []string{"serve"}}},
		Host: Host{
			Capabilities: allCapabilities, CanLowerOOM: true, SeccompSupported: true, Arch: "amd64",
			Kernel: Kernel{6, 1}, SwapControl: true, HugetlbControl: true,
		},
		Namespaces: Namespaces{Net: "/ns/net", IPC: "/ns/ipc", UTS: "/ns/uts", PID: "/proc/42/ns/pid"},
		Files:      Files{Hosts: "/pod/hosts", Hostname: "/pod/hostname", ResolvConf: "/pod/resolv.conf", Shm: "/pod/shm"},
	}
}

// sources lets each mount's source be its host path, as if none were a symlink.
func sources(c *cri.ContainerConfig) []string {
	var list []string
	for _, m := range c.GetMounts() {
		list = append(list, m.GetHostPath())
	}
	return list
}

func (g *golden) input(t *testing.T) ContainerInput {
	t.Helper()
	in := base()
	fields := []struct {
		from json.RawMessage
		to   any
	}{
		{g.Config, in.Config}, {g.Sandbox, in.Sandbox}, {g.Image, &in.Image.Config}, {g.Host, &in.Host}, {g.Resolved, &in.Resolved},
		{g.Namespaces, &in.Namespaces}, {g.Files, &in.Files}, {g.Options, &in.Options},
	}
	for _, f := range fields {
		if len(f.from) == 0 {
			continue
		}
		var err error
		switch to := f.to.(type) {
		case proto.Message:
			err = mergeProto(f.from, to)
		default:
			d := json.NewDecoder(bytes.NewReader(f.from))
			d.DisallowUnknownFields()
			err = d.Decode(to)
		}
		if err != nil {
			t.Fatalf("read input %s: %v", f.from, err)
		}
	}
	in.Hostname = g.Hostname
	in.Resolved.SeccompProfile = g.Profile
	if in.Resolved.MountSources == nil {
		in.Resolved.MountSources = sources(in.Config)
	}
	return in
}

func (g *golden) run(t *testing.T) (*rspec.Spec, []string) {
	t.Helper()
	in := g.input(t)
	if g.Pause {
		spec, err := Pause(PauseInput{
			ID: in.SandboxID, Sandbox: in.Sandbox, Host: in.Host, Options: in.Options, Namespaces: in.Namespaces,
			CgroupsPath: "/kubepods/pod1/5a4d", Rootfs: "/run/berth/pause", SeccompProfile: g.Profile,
		})
		if err != nil {
			t.Fatal(err)
		}
		return spec, nil
	}
	spec, warnings, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	return spec, warnings
}

func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.json")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 25 {
		t.Fatalf("%d golden files; some are lost", len(files))
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json"), func(t *testing.T) {
			before, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			g := &golden{}
			d := json.NewDecoder(bytes.NewReader(before))
			d.DisallowUnknownFields()
			if err := d.Decode(g); err != nil {
				t.Fatal(err)
			}
			g.Spec, g.Warnings = g.run(t)
			after, err := encode(g)
			if err != nil {
				t.Fatal(err)
			}
			if *update {
				if err := os.WriteFile(file, after, 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if !bytes.Equal(before, after) {
				t.Errorf("%s: %s\n(if this is right: go test ./oci/spec -update)", g.About, firstDifference(before, after))
			}
		})
	}
}

// mergeProto merges JSON over a message; what the JSON does not name stays.
func mergeProto(from json.RawMessage, to proto.Message) error {
	more := to.ProtoReflect().New().Interface()
	if err := protojson.Unmarshal(from, more); err != nil {
		return err
	}
	proto.Merge(to, more)
	return nil
}

func encode(g *golden) ([]byte, error) {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(g)
	return out.Bytes(), err
}

// firstDifference shows the first line that differs, with its number.
func firstDifference(before, after []byte) string {
	want, got := strings.Split(string(before), "\n"), strings.Split(string(after), "\n")
	for i := range max(len(want), len(got)) {
		w, g := "(end)", "(end)"
		if i < len(want) {
			w = want[i]
		}
		if i < len(got) {
			g = got[i]
		}
		if w != g {
			return "line " + strconv.Itoa(i+1) + "\n  golden: " + w + "\n  now:    " + g
		}
	}
	return "equal"
}
