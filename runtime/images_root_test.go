package runtime

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// apart puts a filesystem of its own under a directory below root.
func apart(sub string) func(*node) {
	return func(n *node) {
		dir := filepath.Join(n.dir, "root", sub)
		must(n.t, os.Mkdir(dir, 0o711))
		must(n.t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64m,mode=0711"))
		n.t.Cleanup(func() { must(n.t, unmount(dir)) })
	}
}

// du is what a directory takes, by another's count.
func du(t *testing.T, dir string) string {
	t.Helper()
	bytes, err := exec.Command("du", "-s", "--block-size=1", dir).Output()
	must(t, err)
	inodes, err := exec.Command("du", "-s", "--inodes", dir).Output()
	must(t, err)
	return strings.Fields(string(bytes))[0] + " bytes, " + strings.Fields(string(inodes))[0] + " inodes"
}

// Where writable layers lie on another disk than the images, in whichever way
// the disks were mounted, ImageFsInfo tells both apart and exactly; where they do
// not, it has images only. Containers come and go all the same.
func TestImageFsInfoOfTwoDisks(t *testing.T) {
	for name, prepare := range map[string][]func(*node){
		"images apart": {apart("images")}, "containers apart": {apart("containers")}, "one disk": nil,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, prepare...)
			pod := n.runPod(n.hostPod("web"))
			id := n.runContainer(pod, "writer", "mkdir -p /tmp/a/b && dd if=/dev/zero of=/tmp/a/b/file bs=4096 count=100 && echo x > /tmp/link && ln /tmp/link /tmp/other")
			if st := n.exited(id); st.GetExitCode() != 0 {
				t.Fatalf("the writer: %v", st)
			}
			images := &imageService{service: n.Service}
			info := func() *cri.ImageFsInfoResponse {
				reply, err := images.ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
				must(t, err)
				return reply
			}
			count := func(fs *cri.FilesystemUsage) string {
				return fmt.Sprintf("%d bytes, %d inodes", fs.GetUsedBytes().GetValue(), fs.GetInodesUsed().GetValue())
			}
			dirs := map[string]string{"images": filepath.Join(n.cfg.Root, "images"), "containers": filepath.Join(n.cfg.Root, "containers")}
			eventually(t, "the images' size is as du counts", func() bool {
				return count(info().ImageFilesystems[0]) == du(t, dirs["images"])
			})
			reply := info()
			if fs := reply.ImageFilesystems; len(fs) != 1 || fs[0].GetFsId().GetMountpoint() != dirs["images"] || fs[0].GetTimestamp() == 0 {
				t.Errorf("image filesystems %v", fs)
			}
			if prepare == nil {
				if len(reply.ContainerFilesystems) != 0 {
					t.Errorf("container filesystems %v on one disk", reply.ContainerFilesystems)
				}
			} else if fs := reply.ContainerFilesystems; len(fs) != 1 || fs[0].GetFsId().GetMountpoint() != dirs["containers"] || fs[0].GetTimestamp() == 0 {
				t.Errorf("container filesystems %v, want one at %s", fs, dirs["containers"])
			} else {
				// A measurement may have met a record that was being replaced.
				eventually(t, "the containers' size is as du counts", func() bool {
					return count(info().ContainerFilesystems[0]) == du(t, dirs["containers"])
				})
			}
			running := n.runContainer(pod, "on", forever)
			eventually(t, "a writable layer is measured", func() bool {
				stats, err := n.ContainerStats(t.Context(), &cri.ContainerStatsRequest{ContainerId: running})
				must(t, err)
				layer := stats.GetStats().GetWritableLayer()
				want := dirs["images"]
				if prepare != nil {
					want = dirs["containers"]
				}
				if layer != nil && layer.GetFsId().GetMountpoint() != want {
					t.Fatalf("the layer is on %s, want %s", layer.GetFsId().GetMountpoint(), want)
				}
				return layer != nil
			})
			n.removeContainerOf(running)
			n.removeContainerOf(id)
			if left, err := os.ReadDir(dirs["containers"]); err != nil || len(left) != 0 {
				t.Errorf("left of the containers: %v, %v", left, err)
			}
			if prepare != nil { // the next measurement is due after some seconds
				limit := time.Now().Add(20 * time.Second)
				for count(info().ContainerFilesystems[0]) != du(t, dirs["containers"]) {
					if time.Now().After(limit) {
						t.Fatalf("the removal is not counted: %v", info())
					}
					time.Sleep(100 * time.Millisecond)
				}
			}
			n.removePod(pod)
		})
	}
}
