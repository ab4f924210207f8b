package runtime

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/runtime/admin"
)

// An export goes into a directory that is there and not the daemon's own, also by a
// link to that.
func TestWhereExportsGo(t *testing.T) {
	n := newNode(t)
	link := filepath.Join(n.dir, "link")
	must(t, os.Symlink(n.cfg.Root, link))
	for path, want := range map[string]string{
		filepath.Join(n.dir, "none", "x.tar"):           "none: no such file or directory",
		filepath.Join(n.cfg.Root, "x.tar"):              "the daemon's own directory " + n.cfg.Root,
		filepath.Join(n.cfg.Root, "images", "x.tar"):    "the daemon's own directory " + n.cfg.Root,
		filepath.Join(link, "images", "x.tar"):          "the daemon's own directory " + n.cfg.Root,
		filepath.Join(n.cfg.State, "x.tar"):             "the daemon's own directory " + n.cfg.State,
		filepath.Join(n.dir, "a", "..", "none", "x.gz"): "none: no such file or directory",
		"x.tar": "not absolute",
	} {
		_, err := n.exportImage(t.Context(), &admin.ExportRequest{Image: n.image, Path: path})
		if !errors.Is(err, errInvalid) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), ".partial") {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	out := filepath.Join(n.dir, "x.tar")
	if _, err := n.exportImage(t.Context(), &admin.ExportRequest{Image: n.image, Path: out}); err != nil {
		t.Error(err)
	}
	must(t, os.Remove(out))
}
