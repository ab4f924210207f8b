package spec

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func declares(volumes ...string) *ispec.Image {
	image := &ispec.Image{Config: ispec.ImageConfig{Volumes: map[string]struct{}{}}}
	for _, v := range volumes {
		image.Config.Volumes[v] = struct{}{}
	}
	return image
}

func TestDeclaredVolumes(t *testing.T) {
	mounts := []*cri.Mount{{ContainerPath: "/var/"}, {ContainerPath: "/mnt/a"}}
	got, err := DeclaredVolumes(declares("/data", "/data/", "data/sub", "/../up", "/var", "/var/lib/x", "/variety", "/mnt", "/mnt/a/b",
		"/proc/x", "/sys", "/dev/shm", "/etc/hosts", "/etc/hosts.d"), mounts)
	want := []string{"/data", "/data/sub", "/etc/hosts.d", "/mnt", "/up", "/variety"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("volumes %q, %v; want %q", got, err, want)
	}
	if got, err := DeclaredVolumes(nil, mounts); err != nil || got != nil {
		t.Errorf("no image: %q, %v", got, err)
	}
}

func TestDeclaredVolumesRefused(t *testing.T) {
	var many []string
	for i := range maxVolumes + 1 {
		many = append(many, fmt.Sprint("/v", i))
	}
	for name, image := range map[string]*ispec.Image{
		"many": declares(many...), "root": declares("/a/.."), "empty": declares(""), "NUL": declares("/a\x00"),
		"long": declares("/" + strings.Repeat("x", 4096)),
	} {
		if _, err := DeclaredVolumes(image, nil); !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), "image: config.Volumes") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := DeclaredVolumes(declares(many[:maxVolumes]...), nil); err != nil {
		t.Errorf("as many as are allowed: %v", err)
	}
}

// Volumes are mounted only where the root is read-only, and in the order of
// depth with all else.
func TestVolumeMounts(t *testing.T) {
	for _, readonly := range []bool{false, true} {
		in := base()
		sc(func(sc *cri.LinuxContainerSecurityContext) { sc.ReadonlyRootfs = readonly })(&in)
		in.Config.Mounts = []*cri.Mount{{ContainerPath: "/data/sub", HostPath: "/h"}}
		in.Resolved.MountSources = []string{"/h"}
		in.Resolved.Volumes = []Volume{{Path: "/data", Source: "/rootfs/srv/data"}, {Path: "/data/sub/x", Source: "/rootfs/y"}}
		spec, _, err := Container(in)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, m := range spec.Mounts {
			if strings.HasPrefix(m.Destination, "/data") {
				got = append(got, m.Source+" "+m.Destination+" "+strings.Join(m.Options, ","))
			}
		}
		want := []string{"/h /data/sub rbind,rprivate,rw"}
		if readonly {
			want = []string{"/rootfs/srv/data /data rbind,rprivate,rw", want[0], "/rootfs/y /data/sub/x rbind,rprivate,rw"}
		}
		if !slices.Equal(got, want) {
			t.Errorf("read-only %v: %q, want %q", readonly, got, want)
		}
	}
}
