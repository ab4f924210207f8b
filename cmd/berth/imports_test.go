package main

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// rooms says which of berth's packages each package may import: the design's
// star, in which leaves do not know each other. A pattern ending in /... covers
// what lies below, the package itself included. Tests may use more.
var rooms = map[string][]string{
	"berth/cmd/berth":               {"berth/..."},
	"berth/cmd/berth-monitor":       {"berth/oci/monitor", "berth/sandbox/outside", "berth/sandbox/regular"},
	"berth/runtime":                 {"berth/sandbox/...", "berth/image/...", "berth/oci/...", "berth/network/...", "berth/runtime/..."},
	"berth/runtime/admin":           {},
	"berth/runtime/apparmor":        {},
	"berth/runtime/cdi":             {"berth/oci/spec"},
	"berth/runtime/config":          {"berth/sandbox/regular"},
	"berth/runtime/exporter":        {},
	"berth/runtime/nri":             {},
	"berth/runtime/operation":       {},
	"berth/runtime/resolve":         {"berth/oci/spec", "berth/sandbox/outside", "berth/sandbox/regular"},
	"berth/runtime/selinux":         {"berth/oci/spec"},
	"berth/runtime/stats":           {},
	"berth/runtime/metrics":         {"berth/runtime/stats"},
	"berth/runtime/streaming":       {"berth/oci"},
	"berth/sandbox":                 {"berth/sandbox/regular"},
	"berth/sandbox/namespaces":      {},
	"berth/sandbox/outside":         {"berth/sandbox/regular"},
	"berth/sandbox/outside/hung":    {},
	"berth/sandbox/regular":         {},
	"berth/sandbox/regular/keypair": {"berth/sandbox/regular"},
	"berth/sandbox/leakcheck":       {},
	"berth/image":                   {"berth/image/...", "berth/sandbox/regular"},
	"berth/image/content":           {"berth/image/layer", "berth/sandbox/regular"},
	"berth/image/fetch":             {},
	"berth/image/policy":            {"berth/sandbox/regular"},
	"berth/image/layer":             {},
	"berth/image/registries":        {"berth/sandbox/regular/..."},
	"berth/image/rootfs":            {"berth/image/layer"},
	"berth/oci":                     {"berth/sandbox/regular"},
	"berth/oci/spec":                {},
	"berth/oci/leash":               {"berth/oci/monitor", "berth/sandbox/regular"},
	"berth/oci/checkpoint":          {"berth/sandbox/regular"},
	"berth/oci/runc":                {"berth/oci", "berth/oci/leash", "berth/oci/monitor", "berth/sandbox/regular"},
	"berth/oci/monitor":             {"berth/sandbox/regular"},
	"berth/network":                 {"berth/sandbox/namespaces", "berth/sandbox/regular"},
	"berth/network/hostport":        {},
}

// reserved says which packages alone may import a foreign one.
var reserved = map[string][]string{
	"google.golang.org/grpc":                          {"berth/runtime", "berth/runtime/admin", "berth/cmd/berth"},
	"k8s.io/cri-api/pkg/apis/runtime/v1":              {"berth/runtime", "berth/runtime/nri", "berth/runtime/resolve", "berth/runtime/selinux", "berth/runtime/metrics", "berth/sandbox", "berth/oci/spec", "berth/network"},
	"github.com/containernetworking/cni/libcni":       {"berth/network"},
	"github.com/containerd/nri/pkg/adaptation":        {"berth/runtime/nri"},
	"go.podman.io/image/v5/copy":                      {"berth/image"},
	"github.com/opencontainers/runtime-spec/specs-go": {"berth/runtime", "berth/runtime/nri", "berth/runtime/cdi", "berth/runtime/resolve", "berth/oci", "berth/oci/spec", "berth/oci/runc", "berth/cmd/berth"},
}

type listed struct {
	ImportPath string
	Imports    []string
}

func list(t *testing.T) []listed {
	t.Helper()
	out, err := exec.Command("go", "list", "-tags", "containers_image_openpgp", "-json=ImportPath,Imports", "berth/...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []listed
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p listed
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

func covers(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		if below, ok := strings.CutSuffix(p, "/..."); ok {
			return path == below || strings.HasPrefix(path, below+"/")
		}
		return path == p
	})
}

func TestImportDirections(t *testing.T) {
	seen := 0
	for _, p := range list(t) {
		allowed, ok := rooms[p.ImportPath]
		if !ok {
			t.Errorf("%s is in no room of the design", p.ImportPath)
		}
		seen++
		for _, i := range p.Imports {
			if strings.HasPrefix(i, "berth/") && !covers(allowed, i) {
				t.Errorf("%s imports %s, which its room may not", p.ImportPath, i)
			}
			if users, ok := reserved[i]; ok && !slices.Contains(users, p.ImportPath) {
				t.Errorf("%s imports %s, which is reserved for %v", p.ImportPath, i, users)
			}
		}
	}
	if seen < 10 {
		t.Errorf("go list found %d packages", seen)
	}
}

// The monitor stays small: nothing but the standard library and x/sys.
func TestMonitorLinksNothingElse(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "berth/cmd/berth-monitor").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for _, p := range strings.Fields(string(out)) {
		if !strings.HasPrefix(p, "berth/") && !strings.HasPrefix(p, "golang.org/x/sys/") {
			t.Errorf("berth-monitor links %s", p)
		}
	}
}
