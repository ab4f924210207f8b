package cases

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// A program that is there but cannot be begun fails its container's start with the
// kernel's reason, where other runtimes show an exit code of 255 alone.
func TestProgramsThatNeverRan(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	dir := t.TempDir()
	// An ELF header of another machine, and one that names a loader which is not there.
	foreign := append([]byte("\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xf3\x00\x01\x00\x00\x00"), make([]byte, 104)...)
	for name, text := range map[string]string{"interpreter": "#!/no/such/interpreter\n", "foreign": string(foreign), "headless": "echo hello\n"} {
		put(t, dir+"/"+name, text, 0o755)
	}
	for name, want := range map[string]string{
		"interpreter": "exec /bin2/interpreter: no such file or directory (the file is there, but not the loader",
		"foreign":     "exec /bin2/foreign: exec format error (it is for another machine",
		"headless":    "exec /bin2/headless: exec format error (it is for another machine, or a script",
	} {
		c := command(name, "")
		c.Command, c.LogPath = []string{"/bin2/" + name}, name+".log"
		c.Mounts = []*cri.Mount{{HostPath: dir, ContainerPath: "/bin2"}}
		id := e.create(pod, c, config)
		_, err := e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id})
		e.refused(name, err, codes.InvalidArgument, want)
		s := e.status(id)
		if s.GetState() != cri.ContainerState_CONTAINER_EXITED || s.GetReason() != "StartError" || s.GetExitCode() != 128 || !strings.Contains(s.GetMessage(), want) {
			t.Errorf("%s: status %v", name, s)
		}
		if out, code := e.berth("why", "--socket", e.Socket, name); code != 0 || !strings.Contains(out, want) || !strings.Contains(out, "its log: ") {
			t.Errorf("%s: berth why: code %d: %s", name, code, out)
		}
	}
	// One that runs and says the like is believed to have run.
	for i, c := range []string{"exit 255", "echo 'exec /bin/x: no such thing'; exit 255", "true"} {
		id := e.startContainer(pod, command(fmt.Sprintf("ran%d", i), c), config)
		if s := e.exited(id); s.GetReason() == "StartError" {
			t.Errorf("%s: status %v", c, s)
		}
	}
}
