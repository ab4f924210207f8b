package cases

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// preloads are archives as docker save and OCI tools write them, in each compression.
func preloads(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(dir, "pinned"), 0o700); err != nil {
		t.Fatal(err)
	}
	for file, c := range map[string]images.Compression{"docker.tar": images.Plain, "oci.tar.gz": images.Gzip, "docker.tar.zst": images.Zstd, "pinned/oci.tar.zst": images.Zstd} {
		m := images.Image{Layers: []images.Layer{parts.Base}, Config: ispec.ImageConfig{Cmd: []string{"sh"}, Env: []string{"PATH=/bin"}}, Stamp: file}
		name := "docker.io/preload/" + strings.NewReplacer("/", "-", ".tar", "", ".", "-").Replace(file) + ":1"
		make := m.DockerArchive
		if strings.Contains(file, "oci") {
			make = m.OCIArchive
		}
		data, _, err := make(name)
		if err != nil {
			t.Fatal(err)
		}
		packed, err := images.Compress(c, data)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, file), packed.Blob, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "broken.tar.gz"), []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// told counts the lines of the daemon's log that match.
func (e *env) told(pattern string) int {
	e.Helper()
	log, err := os.ReadFile(filepath.Join(e.Dir, "berth.log"))
	if err != nil {
		e.Fatal(err)
	}
	return len(regexp.MustCompile(pattern).FindAll(log, -1))
}

// restart ends the daemon as systemd would and starts it anew.
func (e *env) restart() {
	e.Helper()
	if err := e.Terminate(); err != nil {
		e.Fatal(err)
	}
	if err := e.Launch(e.ctx); err != nil {
		e.Fatal(err)
	}
}

// Archives of the preload directory are there after a start without a registry,
// each is imported once, and what is removed stays away until its archive changes.
func TestPreload(t *testing.T) {
	dir := t.TempDir()
	preloads(t, dir)
	e := start(t, node.Options{Settings: map[string]string{"image": "preload_dir = '" + dir + "'"}, Mirror: "127.0.0.1:1"})
	const imported, failed = `msg="an archive of the preload directory is imported" file=\S+ images="\[\S+\]"`, `level=error msg="an archive of the preload directory is not imported.* error=.* file=\S+broken.tar.gz`
	round := func(when string, want, broken int) {
		t.Helper()
		e.eventually(when, func() bool { return e.told(failed) == broken && e.told(imported) >= want })
		if n := e.told(imported); n != want {
			t.Fatalf("%s: %d archives are imported, want %d", when, n, want)
		}
	}
	round("the first start", 4, 1)
	config := e.sandbox()
	pod := e.run(config)
	for name, pinned := range map[string]bool{"docker": false, "oci-gz": false, "docker-zst": false, "pinned-oci-zst": true} {
		reference := "docker.io/preload/" + name + ":1"
		img := e.image(reference)
		if img == nil || img.GetPinned() != pinned {
			t.Fatalf("%s: %v; want pinned %v", name, img, pinned)
		}
		c := command(name, "echo works")
		c.Image = &cri.ImageSpec{Image: reference}
		if out := e.output(pod, c, config); out != "works\n" {
			t.Errorf("%s says %q", name, out)
		}
	}
	e.removePod(pod)
	if _, err := e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: "docker.io/preload/oci-gz:1"}}); err != nil {
		t.Fatal(err)
	}
	e.restart()
	round("a restart", 4, 2)
	if img := e.image("docker.io/preload/oci-gz:1"); img != nil {
		t.Errorf("a removed image is back: %v", img)
	}
	now := time.Now()
	if err := os.Chtimes(filepath.Join(dir, "oci.tar.gz"), now, now); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(e.PID(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	round("a reload with a changed archive", 5, 3)
	if img := e.image("docker.io/preload/oci-gz:1"); img == nil {
		t.Error("a changed archive is not imported")
	}
}
