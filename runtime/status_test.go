package runtime

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/network"
	"berth/network/hostport"
	"berth/oci"
	"berth/oci/spec"
	"berth/runtime/config"
	"berth/runtime/operation"
	"berth/sandbox"
)

func TestCodes(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want codes.Code
	}{
		{nil, codes.OK},
		{errors.New("anything"), codes.Unknown},
		{status.Error(codes.DataLoss, "kept"), codes.DataLoss},
		{errInvalid, codes.InvalidArgument},
		{spec.ErrInvalid, codes.InvalidArgument},
		{sandbox.ErrNotFound, codes.NotFound},
		{image.ErrNotFound, codes.NotFound},
		{image.ErrRegistryConfig, codes.FailedPrecondition},
		{oci.ErrExecTimeout, codes.DeadlineExceeded},
		{oci.ErrNotRunning, codes.FailedPrecondition},
		{&operation.StillRunning{Operation: &operation.Operation{}, Err: context.DeadlineExceeded}, codes.DeadlineExceeded},
		{context.Canceled, codes.Canceled},
		{fmt.Errorf("%w: %w", operation.ErrClosing, context.Canceled), codes.Unavailable},
		{syscall.ENOSPC, codes.ResourceExhausted},
		{operation.ErrPanic, codes.Internal},
		{oci.ErrProgram, codes.InvalidArgument},
		{image.ErrRegistryUnavailable, codes.Unknown},
		{image.ErrSignature, codes.Unknown},
		{network.ErrNotReady, codes.Unavailable},
		{network.ErrTemplate, codes.FailedPrecondition},
		{hostport.ErrInvalid, codes.InvalidArgument},
		{&hostport.TakenError{}, codes.FailedPrecondition},
		{hostport.ErrNoAddress, codes.FailedPrecondition},
		{hostport.ErrUnavailable, codes.FailedPrecondition},
		{sandbox.ErrNameInUse, codes.AlreadyExists},
		{oci.ErrMonitorUnavailable, codes.Unavailable},
	} {
		if got := status.Code(statusOf(tc.err)); got != tc.want {
			t.Errorf("%v: %v, want %v", tc.err, got, tc.want)
		}
		if tc.err != nil {
			if _, ok := status.FromError(tc.err); ok {
				continue
			}
			if got := status.Code(statusOf(fmt.Errorf("wrapped: %w", tc.err))); got != tc.want {
				t.Errorf("wrapped %v: %v, want %v", tc.err, got, tc.want)
			}
		}
	}
}

// The kubelet reads the first word of a pull's error; see cri-client.
func TestPullErrorsBeginWithTheirWord(t *testing.T) {
	err := statusOf(prefixed("RegistryUnavailable", fmt.Errorf("pull x: %w", image.ErrRegistryUnavailable)))
	if status.Code(err) != codes.Unknown || !strings.HasPrefix(status.Convert(err).Message(), "RegistryUnavailable: ") {
		t.Errorf("got %v", err)
	}
}

func TestSignals(t *testing.T) {
	for name, want := range map[string]syscall.Signal{
		"SIGTERM": 15, "TERM": 15, "term": 15, "9": 9, "SIGRTMIN": 34, "SIGRTMIN+3": 37, "RTMAX-2": 62, "RTMAX": 64,
		"SIGRTMINPLUS1": 35, "RTMAXMINUS14": 50, "SIGWINCH": 28, "37": 37,
	} {
		if got, err := signalNumber(name); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", name, got, err, want)
		}
	}
	for _, name := range []string{"", "SIGNOPE", "0", "65", "-1", "SIGRTMIN+31", "SIGRTMIN-1", "RTMAX+1", "SIG", "SIGRTMINx"} {
		if got, err := signalNumber(name); err == nil {
			t.Errorf("%q was read as %d", name, got)
		}
	}
}

// Each of CRI's signals must be understood and told back as itself.
func TestEveryCRISignal(t *testing.T) {
	for value, label := range cri.Signal_name {
		sig := cri.Signal(value)
		if sig == cri.Signal_SIGNAL_RUNTIME_DEFAULT {
			continue
		}
		name, err := stopSignal(sig, "SIGKILL")
		if err != nil {
			t.Errorf("%s: %v", label, err)
			continue
		}
		if n, err := signalNumber(name); n == 0 || err != nil || criSignal(name) != sig {
			t.Errorf("%s: is number %d (%v) and told back as %v", label, n, err, criSignal(name))
		}
	}
	if len(cri.Signal_name) != 66 {
		t.Errorf("CRI has %d signals and the default; 65 were known", len(cri.Signal_name)-1)
	}
	// An image names its signal in its own way; one of two names is told.
	for name, want := range map[string]cri.Signal{"15": cri.Signal_SIGNAL_SIGTERM, "term": cri.Signal_SIGNAL_SIGTERM, "CLD": cri.Signal_SIGNAL_SIGCHLD,
		"6": cri.Signal_SIGNAL_SIGABRT, "29": cri.Signal_SIGNAL_SIGIO, "RTMIN+3": cri.Signal_SIGNAL_SIGRTMINPLUS3, "SIGRTMAX-2": cri.Signal_SIGNAL_SIGRTMAXMINUS2,
		"SIGRTMIN+16": cri.Signal_SIGNAL_SIGRTMAXMINUS14, "50": cri.Signal_SIGNAL_SIGRTMAXMINUS14, "34": cri.Signal_SIGNAL_SIGRTMIN} {
		got, err := stopSignal(0, name)
		if err != nil || criSignal(got) != want {
			t.Errorf("image's %s: told as %v (%v), want %v", name, criSignal(got), err, want)
		}
	}
	if name, err := stopSignal(0, ""); name != "SIGTERM" || err != nil {
		t.Errorf("default: %s, %v", name, err)
	}
	if _, err := stopSignal(0, "SIGNOPE"); !errors.Is(err, errInvalid) {
		t.Errorf("image with a bad signal: %v", err)
	}
}

func TestLogPathStaysInside(t *testing.T) {
	if p, err := logPath("/var/log/pods/x", "c/0.log"); err != nil || p != "/var/log/pods/x/c/0.log" {
		t.Errorf("got %q, %v", p, err)
	}
	if p, err := logPath("", "c/0.log"); err != nil || p != "" {
		t.Errorf("no directory: got %q, %v", p, err)
	}
	for _, bad := range []string{"../x", "/etc/passwd", "a/../../b", strings.Repeat("a/", 2100) + "b", strings.Repeat("n", 256)} {
		if _, err := logPath("/var/log/pods/x", bad); !errors.Is(err, errInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestCgroupParents(t *testing.T) {
	for _, good := range []string{"", "/kubepods/burstable/pod1"} {
		if err := checkCgroupParent(good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	for _, bad := range []string{"/", "//", "kubepods", "/a/../..", "kubepods-pod1.slice", "/a/b.slice", "/a/b.slice/"} {
		if err := checkCgroupParent(bad); !errors.Is(err, errInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// The driver decides what a pod's cgroup may be, and the pod's record how its
// containers' are named.
func TestCgroupDrivers(t *testing.T) {
	for _, c := range []struct {
		driver, parent, dir, path, container string
		made                                 bool
	}{
		{"cgroupfs", "", "/berth/pod", "/berth/pod/ctr", "/berth/pod/ctr", true},
		{"cgroupfs", "/kubepods/pod1/", "/kubepods/pod1", "/kubepods/pod1/ctr", "/kubepods/pod1/ctr", false},
		{"cgroupfs", "kubepods-pod1.slice", "", "", "", false},
		{"systemd", "", "/system.slice", "system.slice:berth:ctr", "/system.slice/berth-ctr.scope", false},
		{"systemd", "kubepods-pod1.slice", "/kubepods.slice/kubepods-pod1.slice", "kubepods-pod1.slice:berth:ctr",
			"/kubepods.slice/kubepods-pod1.slice/berth-ctr.scope", false},
		{"systemd", "/kubepods.slice/kubepods-pod1.slice", "/kubepods.slice/kubepods-pod1.slice", "kubepods-pod1.slice:berth:ctr",
			"/kubepods.slice/kubepods-pod1.slice/berth-ctr.scope", false},
		{"systemd", "/elsewhere/kubepods-pod1.slice", "", "", "", false},
		{"systemd", "/kubepods/pod1", "", "", "", false},
		{"systemd", "-.slice", "", "", "", false},
	} {
		s := &Service{}
		s.Parts.Config.Runtime.CgroupDriver = c.driver
		dir, made, err := s.cgroupParent("pod", c.parent)
		if dir != c.dir || made != c.made || (err == nil) != (c.dir != "") || err != nil && !errors.Is(err, errInvalid) {
			t.Errorf("%s, %q: %q, %v, %v; want %q, %v", c.driver, c.parent, dir, made, err, c.dir, c.made)
			continue
		}
		if err != nil {
			continue
		}
		sb := &sandbox.Sandbox{CgroupParent: dir}
		if got := cgroupsPath(sb, "ctr"); got != c.path {
			t.Errorf("%s, %q: the specification says %q, want %q", c.driver, c.parent, got, c.path)
		}
		if got, err := oci.CgroupDir(cgroupsPath(sb, "ctr")); got != c.container || got != cgroupDir(sb, "ctr") || err != nil {
			t.Errorf("%s, %q: the container is at %q and %q (%v), want %q", c.driver, c.parent, got, cgroupDir(sb, "ctr"), err, c.container)
		}
		if reply, _ := s.RuntimeConfig(t.Context(), nil); strings.ToLower(reply.GetLinux().GetCgroupDriver().String()) != c.driver {
			t.Errorf("RuntimeConfig says %v, want %s", reply, c.driver)
		}
	}
}

func TestSandboxChecks(t *testing.T) {
	ok := func() *cri.PodSandboxConfig {
		return &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "n", Namespace: "ns", Uid: "u"},
			Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: &cri.NamespaceOption{}}}}
	}
	s := &Service{Parts: Parts{Handlers: map[string]oci.Runtime{"runc": nil}, Config: config.Default()}}
	if err := s.checkSandbox(&cri.RunPodSandboxRequest{Config: ok()}); err != nil {
		t.Fatal(err)
	}
	for want, spoil := range map[string]func(*cri.RunPodSandboxRequest){
		"config is missing":                func(r *cri.RunPodSandboxRequest) { r.Config = nil },
		"config.metadata.name is empty":    func(r *cri.RunPodSandboxRequest) { r.Config.Metadata.Name = "" },
		"config.metadata.uid is empty":     func(r *cri.RunPodSandboxRequest) { r.Config.Metadata.Uid = "" },
		`config.metadata.namespace "../x"`: func(r *cri.RunPodSandboxRequest) { r.Config.Metadata.Namespace = "../x" },
		`runtime_handler "kata"`:           func(r *cri.RunPodSandboxRequest) { r.RuntimeHandler = "kata" },
		`config.log_directory "logs"`:      func(r *cri.RunPodSandboxRequest) { r.Config.LogDirectory = "logs" },
		`config.linux.cgroup_parent "/"`:   func(r *cri.RunPodSandboxRequest) { r.Config.Linux.CgroupParent = "/" },
		"namespace_options.network":        func(r *cri.RunPodSandboxRequest) { nsOptions(r).Network = cri.NamespaceMode_CONTAINER },
		"namespace_options.ipc":            func(r *cri.RunPodSandboxRequest) { nsOptions(r).Ipc = cri.NamespaceMode_TARGET },
		"namespace_options.pid":            func(r *cri.RunPodSandboxRequest) { nsOptions(r).Pid = cri.NamespaceMode_TARGET },
		"run_as_group": func(r *cri.RunPodSandboxRequest) {
			r.Config.Linux.SecurityContext.RunAsGroup = &cri.Int64Value{Value: 5}
		},
		`config.hostname "a\nb"`:                 func(r *cri.RunPodSandboxRequest) { r.Config.Hostname = "a\nb" },
		"metadata.uid is longer":                 func(r *cri.RunPodSandboxRequest) { r.Config.Metadata.Uid = strings.Repeat("u", 2000) },
		"config.log_directory \"/a\\x00\"":       func(r *cri.RunPodSandboxRequest) { r.Config.LogDirectory = "/a\x00" },
		"config.linux.cgroup_parent \"/a\\x00\"": func(r *cri.RunPodSandboxRequest) { r.Config.Linux.CgroupParent = "/a\x00" },
		"config.hostname \"hh":                   func(r *cri.RunPodSandboxRequest) { r.Config.Hostname = strings.Repeat("h", 65) },
	} {
		r := &cri.RunPodSandboxRequest{Config: ok()}
		spoil(r)
		if err := s.checkSandbox(r); !errors.Is(err, errInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func nsOptions(r *cri.RunPodSandboxRequest) *cri.NamespaceOption {
	return r.Config.Linux.SecurityContext.NamespaceOptions
}
