package spec

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func imageMount(change func(m *cri.Mount)) *cri.Mount {
	m := &cri.Mount{ContainerPath: "/c", Readonly: true, Image: &cri.ImageSpec{Image: "i"}}
	change(m)
	return m
}

func TestRefusalsImageMounts(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(m *cri.Mount)
		begins string
	}{
		"host path too":   {func(m *cri.Mount) { m.HostPath = "/h" }, `mounts[0].host_path "/h": image is given too`},
		"no image":        {func(m *cri.Mount) { m.Image.Image = "" }, "mounts[0].image.image: missing"},
		"writable":        {func(m *cri.Mount) { m.Readonly = false }, `mounts[0].readonly "false": an image is mounted read-only`},
		"slave":           {func(m *cri.Mount) { m.Propagation = cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER }, `mounts[0].propagation "PROPAGATION_HOST_TO_CONTAINER"`},
		"shared":          {func(m *cri.Mount) { m.Propagation = cri.MountPropagation_PROPAGATION_BIDIRECTIONAL }, `mounts[0].propagation "PROPAGATION_BIDIRECTIONAL"`},
		"no such mode":    {func(m *cri.Mount) { m.Propagation = 9 }, `mounts[0].propagation "9"`},
		"absolute":        {func(m *cri.Mount) { m.ImageSubPath = "/etc" }, `mounts[0].image_sub_path "/etc": must be relative`},
		"climbing":        {func(m *cri.Mount) { m.ImageSubPath = "a/../../b" }, `mounts[0].image_sub_path "a/../../b": must not contain ".."`},
		"climbing inside": {func(m *cri.Mount) { m.ImageSubPath = "a/.." }, `mounts[0].image_sub_path "a/.."`},
		"NUL":             {func(m *cri.Mount) { m.ImageSubPath = "a\x00b" }, `mounts[0].image_sub_path "a`},
		"long":            {func(m *cri.Mount) { m.ImageSubPath = strings.Repeat("x/", 2048) }, `mounts[0].image_sub_path "x/x`},
		"container path":  {func(m *cri.Mount) { m.ContainerPath = "c" }, `mounts[0].container_path "c"`},
		"in /proc":        {func(m *cri.Mount) { m.ContainerPath = "/proc/x" }, `mounts[0].container_path "/proc/x"`},
		"option":          {func(m *cri.Mount) { m.MountOptions = []string{"rw"} }, `mounts[0].mount_options "rw"`},
	} {
		in := base()
		mount(imageMount(tc.change))(&in)
		err := CheckContainer(in.Config, in.Sandbox)
		var field *FieldError
		if !errors.Is(err, ErrImageVolume) || !errors.Is(err, ErrInvalid) || !errors.As(err, &field) {
			t.Errorf("%s: %v is not an image volume's field error", name, err)
			continue
		}
		if !strings.HasPrefix(err.Error(), tc.begins) {
			t.Errorf("%s: %q does not begin with %q", name, err, tc.begins)
		}
	}
	in := base()
	mapping := []*cri.IDMapping{{HostId: 70000, Length: 65536}}
	mount(imageMount(func(m *cri.Mount) { m.UidMappings, m.GidMappings = mapping, mapping }))(&in)
	if err := CheckContainer(in.Config, in.Sandbox); !errors.Is(err, ErrImageVolume) || !errors.Is(err, ErrUnsupported) {
		t.Errorf("mappings of its own: %v", err)
	}
	in = base()
	mount(&cri.Mount{ContainerPath: "/c", HostPath: "h"})(&in)
	if err := CheckContainer(in.Config, in.Sandbox); err == nil || errors.Is(err, ErrImageVolume) {
		t.Errorf("a host path's error is an image volume's: %v", err)
	}
	if ImageVolume(nil) != nil {
		t.Error("nil became an error")
	}
}

// Images take the options of other mounts, and names that only look like "..".
func TestImageMountOptions(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(m *cri.Mount)
		want   string
	}{
		"plain":     {func(*cri.Mount) {}, "rbind rprivate ro"},
		"recursive": {func(m *cri.Mount) { m.RecursiveReadOnly = true }, "rbind rprivate rro"},
		"options":   {func(m *cri.Mount) { m.MountOptions = []string{"nosuid", "noexec"} }, "rbind rprivate ro noexec nosuid"},
		"sub path":  {func(m *cri.Mount) { m.ImageSubPath = "a/..b/c.." }, "rbind rprivate ro"},
	} {
		in := base()
		mount(imageMount(tc.change))(&in)
		in.Resolved.MountSources = []string{"/mounted/here"}
		spec, _, err := Container(in)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, m := range spec.Mounts {
			if m.Destination == "/c" && (m.Source != "/mounted/here" || m.Type != "bind" || strings.Join(m.Options, " ") != tc.want) {
				t.Errorf("%s: %+v, want options %q", name, m, tc.want)
			}
		}
	}
}

func TestStatusMounts(t *testing.T) {
	in := base()
	in.Config.Mounts = []*cri.Mount{
		{ContainerPath: "/h", HostPath: "/link", Readonly: true},
		imageMount(func(m *cri.Mount) { m.ImageSubPath = "s" }),
	}
	asked := proto.Clone(in.Config).(*cri.ContainerConfig)
	list := StatusMounts(in.Config, map[int]string{1: "sha256:1"})
	if len(list) != 2 || !proto.Equal(list[0], asked.Mounts[0]) || list[1].Image.ImageRef != "sha256:1" {
		t.Errorf("mounts %v", list)
	}
	list[1].Image.ImageRef = ""
	if !proto.Equal(list[1], asked.Mounts[1]) {
		t.Errorf("beside the reference the mount became %v", list[1])
	}
	list[0].HostPath = "/changed"
	if !proto.Equal(in.Config, asked) {
		t.Error("the request changed with the status")
	}
}
