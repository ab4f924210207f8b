package cases

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// operator runs a verb of berth image and wants it to succeed, or not, and to say
// all of these words.
func (e *env) operator(succeeds bool, args []string, words ...string) string {
	e.Helper()
	out, code := e.berth(append([]string{"image", "--socket", e.Socket}, args...)...)
	if (code == 0) != succeeds {
		e.Errorf("berth image %v: exit code %d: %s", args, code, out)
	}
	for _, w := range words {
		if !strings.Contains(out, w) {
			e.Errorf("berth image %v says %q, want %q in it", args, out, w)
		}
	}
	return out
}

// asked is a verb's JSON.
func asked[T any](e *env, args ...string) (reply T) {
	e.Helper()
	out := e.operator(true, append(args, "-o", "json"))
	if err := json.Unmarshal([]byte(out), &reply); err != nil {
		e.Fatalf("berth image %v: %v: %s", args, err, out)
	}
	return reply
}

type listedImage struct {
	ID      string
	Tags    []string
	Digests []string
	Size    uint64
	Pinned  bool
	UsedBy  []struct{ Container, Name, Pod string }
}

// An operator sees what there is and who uses it, removes by any name, and is told
// what went.
func TestImagesByHand(t *testing.T) {
	e := start(t, node.Options{})
	more := layer(t, images.File("own", 0o644, strings.Repeat("x", 100_000)))
	used := publish(t, "cases/used", "1", ispec.ImageConfig{Cmd: []string{"sh"}})
	idle := publish(t, "cases/idle", "1", ispec.ImageConfig{Cmd: []string{"sh"}}, more)
	e.pull("docker.io/cases/used:1")
	e.pull("docker.io/cases/idle:1")
	config := e.sandbox()
	pod := e.run(config)
	c := command("user", "sleep 1000")
	c.Image.Image = "docker.io/cases/used:1"
	id := e.startContainer(pod, c, config)

	list := asked[struct{ Images []listedImage }](e, "list").Images
	if len(list) != 2 || list[0].ID != idle.Config.String() || list[1].ID != used.Config.String() || len(list[0].UsedBy) != 0 ||
		len(list[1].UsedBy) != 1 || list[1].UsedBy[0].Container != id || list[1].UsedBy[0].Name != "user" || list[1].UsedBy[0].Pod != "cases/pod1" {
		t.Fatalf("the list: %+v", list)
	}
	table := e.operator(true, []string{"ls"}, "NAME", "docker.io/cases/idle:1")
	if !regexp.MustCompile(`docker.io/cases/used:1 +` + used.Config.Encoded()[:12] + ` +\S+B .*cases/pod1/user`).MatchString(table) {
		t.Errorf("the table:\n%s", table)
	}
	e.operator(true, []string{"inspect", "cases/idle:1"}, idle.Config.String(), "docker.io/cases/idle@"+idle.Manifest.String(), "1 images", "LAYER")
	inspected := asked[struct {
		Manifest struct{ Digest string }
		Config   ispec.Image
		Layers   []struct {
			DiffID   string
			SharedBy []string
			Size     uint64
		}
	}](e, "inspect", idle.Config.Encoded()[:12])
	if len(inspected.Layers) != 2 || inspected.Layers[0].SharedBy[0] != used.Config.String() || len(inspected.Layers[1].SharedBy) != 0 ||
		inspected.Manifest.Digest != idle.Manifest.String() || inspected.Layers[1].DiffID != more.DiffID.String() || inspected.Config.Author == "" {
		t.Errorf("inspect: %+v", inspected)
	}

	e.operator(true, []string{"pin", "cases/idle:1"}, "pinned", idle.Config.String())
	if img := e.image("docker.io/cases/idle:1"); !img.GetPinned() {
		t.Error("the kubelet does not see the pin")
	}
	e.operator(true, []string{"list"}, "pinned")
	e.operator(true, []string{"unpin", idle.Config.Encoded()[:12]}, "unpinned")

	e.operator(false, []string{"remove", "nothing:1", "cases/idle:1"}, "untagged docker.io/cases/idle:1", "removed  "+idle.Config.String(), "106kB freed",
		"remove image: image not found: nothing:1 (NotFound)")
	e.operator(true, []string{"remove", "cases/used:1"}, "untagged docker.io/cases/used:1", "go with the last of its containers", "cases/pod1/user")
	if out := e.exec(id, "echo works"); out != "works\n" {
		t.Errorf("the container says %q", out)
	}
	if list := asked[struct{ Images []listedImage }](e, "list").Images; len(list) != 0 {
		t.Errorf("left: %+v", list)
	}
	e.operator(false, []string{"inspect", "Bad Name"}, "invalid image reference", "InvalidArgument")
}

// What is exported is imported again and runs, pinned when that is wanted; several
// archives go in at once and a broken one keeps none out.
func TestImageExportAndImport(t *testing.T) {
	e := start(t, node.Options{})
	publish(t, "cases/exported", "1", ispec.ImageConfig{Cmd: []string{"sh"}}, layer(t, images.File("hello", 0o644, "hello")))
	publish(t, "cases/exported", "2", ispec.ImageConfig{Cmd: []string{"sh"}}, layer(t, images.File("hello", 0o644, "again")))
	var files []string
	for _, tag := range []string{"1", "2"} {
		e.pull("docker.io/cases/exported:" + tag)
		file := filepath.Join(e.Dir, tag+".tar.zst")
		files = append(files, file)
		e.operator(true, []string{"export", "cases/exported:" + tag, file}, file, "docker.io/cases/exported:"+tag, "packed anew")
		e.operator(true, []string{"remove", "cases/exported:" + tag})
	}
	e.operator(false, []string{"export", "cases/exported:1", files[0] + ".new"}, "image not found")
	broken := filepath.Join(e.Dir, "broken.tar")
	if err := os.WriteFile(broken, []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	out := e.operator(false, []string{"import", "--pin", files[0], broken, files[1]}, "docker.io/cases/exported:1\n", "docker.io/cases/exported:2\n", broken, "InvalidArgument")
	if strings.Contains(out, "import "+broken+": import") {
		t.Errorf("an error twice: %s", out)
	}
	e.operator(false, []string{"export", "cases/exported:1", files[0]}, files[0], "the file exists", "AlreadyExists")
	config := e.sandbox()
	pod := e.run(config)
	for tag, want := range map[string]string{"1": "hello", "2": "again"} {
		c := command("c"+tag, "cat /hello")
		c.Image = &cri.ImageSpec{Image: "docker.io/cases/exported:" + tag}
		if out := e.output(pod, c, config); out != want {
			t.Errorf("a container of %s says %q, want %q", tag, out, want)
		}
		if img := e.image("docker.io/cases/exported:" + tag); !img.GetPinned() {
			t.Errorf("%s is not pinned", tag)
		}
	}
}
