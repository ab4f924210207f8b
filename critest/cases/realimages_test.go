package cases

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/sandbox/leakcheck"
)

// TestRealImages pulls images of Debian packages over loopback, with gzip and
// with zstd, and compares a container's root with the packages file by file.
// BERTH_REAL=all has images of ordinary and of unusual size besides (`make
// images-real`).
func TestRealImages(t *testing.T) {
	recipes := []images.Recipe{images.Small}
	if os.Getenv("BERTH_REAL") == "all" {
		recipes = append(recipes, images.Common, images.Many, images.Large)
	}
	deps, err := node.Deps()
	if err != nil {
		t.Fatal(err)
	}
	for _, recipe := range recipes {
		for _, compression := range []images.Compression{images.Gzip, images.Zstd} {
			t.Run(recipe.Name+"-"+compression.String(), func(t *testing.T) {
				image, err := recipe.Build(deps, compression)
				if errors.Is(err, images.ErrParts) {
					t.Skipf("the packages are not here: %v", err)
				}
				if err != nil {
					t.Fatal(err)
				}
				image.Layers = append([]images.Layer{parts.Base}, image.Layers...) // a shell for those without
				realImage(t, image)
			})
		}
	}
}

func realImage(t *testing.T, image images.Image) {
	e := startFor(t, node.Options{}, leakcheck.Patience(5*time.Minute))
	if _, err := image.Publish(reg, "cases/real", image.Stamp); err != nil {
		t.Fatal(err)
	}
	reference := "docker.io/cases/real:" + image.Stamp
	began := time.Now()
	e.pull(reference)
	pulled := time.Since(began)
	config := e.sandbox()
	config.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	config.Hostname = ""
	pod := e.run(config)
	c := command("c", "true")
	c.Image.Image = reference
	id := e.create(pod, c, config)
	var spec struct{ Root struct{ Path string } }
	data, err := os.ReadFile(filepath.Join(e.State(), "containers", id, "config.json"))
	if err == nil {
		err = json.Unmarshal(data, &spec)
	}
	if err != nil {
		t.Fatal(err)
	}
	root := spec.Root.Path
	if !filepath.IsAbs(root) {
		root = filepath.Join(e.State(), "containers", id, root)
	}
	files, err := image.Verify(root)
	if err != nil {
		t.Errorf("%s: %v", image.Stamp, err)
	}
	size := 0
	for _, l := range image.Layers {
		size += len(l.Blob)
	}
	t.Logf("%d entries in %d layers of %d MB, pulled in %v", files, len(image.Layers), size>>20, pulled.Round(time.Millisecond))
	e.removePod(pod)
}
