package main

import (
	"encoding/binary"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const source = "../../runtime"

// Every RPC is in one of the two lists, and none that is not.
func TestEveryRPCIsInTheTable(t *testing.T) {
	have := map[string][]string{adminService: adminMethods(t)}
	for _, d := range []grpc.ServiceDesc{cri.RuntimeService_ServiceDesc, cri.ImageService_ServiceDesc} {
		for _, m := range d.Methods {
			have[d.ServiceName+"/"] = append(have[d.ServiceName+"/"], m.MethodName)
		}
		for _, s := range d.Streams {
			have[d.ServiceName+"/"] = append(have[d.ServiceName+"/"], s.StreamName)
		}
	}
	for _, service := range []string{runtimeService, imageService, adminService} {
		listed := append(slices.Clone(readers[service]), changers[service]...)
		slices.Sort(listed)
		slices.Sort(have[service])
		if !slices.Equal(listed, have[service]) {
			t.Errorf("%s has the methods\n%q, the table\n%q", service, have[service], listed)
		}
	}
}

// adminMethods are the operator's verbs, as the daemon serves them.
func adminMethods(t *testing.T) []string {
	text, err := os.ReadFile(filepath.Join(source, "admin.go"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, found := range regexp.MustCompile(`admin\.Serve\(admin\.(\w+),`).FindAllSubmatch(text, -1) {
		names = append(names, string(found[1]))
	}
	return names
}

// Every step that the source names is in the table, so that a life must reach it
// (see complete), and the table has no other.
func TestEveryStepIsInTheTable(t *testing.T) {
	named := stepsInSource(t)
	known := map[string]bool{}
	for step := range seldom {
		known[step] = true
	}
	for verb, steps := range operations {
		for _, step := range steps {
			known[step] = true
			if named[step] == "" {
				t.Errorf("the table has the step %q of %s, which the source does not name", step, verb)
			}
		}
	}
	for step, where := range named {
		if !known[step] {
			t.Errorf("%s: the step %q is not in the table of critest/crash: add it, and a life that reaches it", where, step)
		}
	}
}

// stepsInSource finds the arguments of all calls of Step, with where they are.
func stepsInSource(t *testing.T) map[string]string {
	files, err := filepath.Glob(filepath.Join(source, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no source: %v", err)
	}
	named, set := map[string]string{}, token.NewFileSet()
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) != 1 {
				return true
			}
			if f, ok := call.Fun.(*ast.SelectorExpr); !ok || f.Sel.Name != "Step" {
				return true
			}
			literal, ok := call.Args[0].(*ast.BasicLit)
			if !ok {
				t.Errorf("%s: a step whose name is no literal", set.Position(call.Pos()))
				return true
			}
			name, err := strconv.Unquote(literal.Value)
			if err != nil {
				t.Fatal(err)
			}
			named[name] = set.Position(call.Pos()).String()
			return true
		})
	}
	return named
}

func TestSampleHasItsShareOfEachSuite(t *testing.T) {
	var points []point
	for i := range 100 {
		suite := killDaemon
		if i >= 90 {
			suite = failStep
		}
		points = append(points, point{suite: suite, request: i, fault: &killAt{victim: suite, step: strconv.Itoa(i)}})
	}
	var of []string
	for _, p := range choose(points, 4, "") {
		of = append(of, p.suite+" "+strconv.Itoa(p.request))
	}
	if got := strings.Join(of, ", "); got != "daemon 0, daemon 45, fail 90, fail 95" {
		t.Errorf("a sample of 4 is %s", got)
	}
	if got := choose(points, 0, "killed at 9[0-9]$"); len(got) != 10 {
		t.Errorf("%d points match, want 10", len(got))
	}
	if got := choose(points[:91], 20, ""); len(got) != 11 {
		t.Errorf("a sample of 20 with one point in a suite has %d", len(got))
	}
}

func TestPathsAreTheSameInEachLife(t *testing.T) {
	id := strings.Repeat("0a", 32)
	for path, want := range map[string]string{
		"/tmp/berth-123/root/containers/" + id + "/container.json.tmp":    "root/containers/ID/container.json.tmp",
		"/tmp/berth-9/root/trash/" + id + "/work":                         "root/trash/X/work",
		"/tmp/berth-9/root/images/trash/dn8ooctaizei":                     "root/images/trash/X",
		"/tmp/berth-9/state/containers/" + id + "/exec-18ece02ca5d-2.pid": "state/containers/ID/exec-X",
		"/tmp/berth-9/root/images/.new-2837465519":                        "root/images/.new-N",
		"/sys/fs/cgroup/freezer/berth/" + id + "/" + id + "/cgroup.kill":  "/sys/fs/cgroup/freezer/berth/ID/ID/cgroup.kill",
		"/sys/fs/cgroup/unified/berth-plugins-9e1ad8a0e0e1/ADD.7.ARAMP4T": "/sys/fs/cgroup/unified/berth-plugins-X/ADD",
	} {
		if got := plain(path); got != want {
			t.Errorf("%s is %s, want %s", path, got, want)
		}
	}
}

func TestMessagesAreNamedByTheirOperation(t *testing.T) {
	for body, want := range map[string]string{
		`{"id":12,"op":"create","create":{"id":"x"}}`: "create", `{"op":"park","container":{}}`: "park", `{"version":1}`: "", "": "",
	} {
		frame := append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
		part := unix.Iovec{Base: &frame[0]}
		part.SetLen(len(frame))
		header := unix.Msghdr{Iov: &part, Iovlen: 1}
		n := &notification{PID: uint32(os.Getpid())}
		n.Data.Number, n.Data.Args[1] = unix.SYS_SENDMSG, uint64(uintptr(unsafe.Pointer(&header)))
		if want != "" {
			want = "sendmsg " + want
		}
		if got := describe(n); got != want {
			t.Errorf("%s is %q, want %q", body, got, want)
		}
	}
}
