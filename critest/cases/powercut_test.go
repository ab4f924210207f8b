package cases

import (
	"crypto/md5"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// whole runs in an image of checkedImages and ends with 7 when all of its files are
// as they were published.
const whole = "md5sum -c /sum/* > /dev/null && exit 7; exit 99"

// checkedImages publishes images of layers that carry their own checksums.
func checkedImages(t *testing.T, n int) (references []string) {
	t.Helper()
	for i := range n {
		layers := []images.Layer{parts.Base}
		for l := range 3 {
			random := rand.NewChaCha8([32]byte{byte(i), byte(l)})
			data := make([]byte, 200_000)
			_, _ = random.Read(data)
			file := fmt.Sprintf("data-%d", l)
			layers = append(layers, layer(t, images.File(file, 0o644, string(data)),
				images.File(fmt.Sprintf("sum/%d", l), 0o644, fmt.Sprintf("%x  /%s\n", md5.Sum(data), file))))
		}
		repository := fmt.Sprintf("cases/checked-%d", i)
		if _, err := (images.Image{Layers: layers}).Publish(reg, repository, "1"); err != nil {
			t.Fatal(err)
		}
		references = append(references, "docker.io/"+repository+":1")
	}
	return references
}

// churner makes and removes pods, or images, until it is told to end. What fails
// then does not matter: the power is about to go.
type churner struct {
	*env
	*rand.Rand
	references []string
	serial     string
	stop       chan struct{}
}

func (c *churner) until(f func(n int)) {
	for n := 0; ; n++ {
		select {
		case <-c.stop:
			return
		default:
			f(n)
		}
	}
}

func (c *churner) pods(n int) {
	if n >= 12 {
		time.Sleep(20 * time.Millisecond)
		return
	}
	config := c.churned(fmt.Sprintf("%s-%d", c.serial, n))
	res, err := c.rt.RunPodSandbox(c.ctx, &cri.RunPodSandboxRequest{Config: config})
	if err != nil {
		return
	}
	for name, script := range map[string]string{"quick": whole, "slow": "sleep 100000"} {
		container := command(name, script)
		container.Image.Image = c.references[c.IntN(len(c.references))]
		made, err := c.rt.CreateContainer(c.ctx, &cri.CreateContainerRequest{PodSandboxId: res.GetPodSandboxId(), Config: container, SandboxConfig: config})
		if err == nil {
			_, _ = c.rt.StartContainer(c.ctx, &cri.StartContainerRequest{ContainerId: made.GetContainerId()})
		}
	}
	if c.IntN(2) == 0 {
		_, _ = c.rt.StopPodSandbox(c.ctx, &cri.StopPodSandboxRequest{PodSandboxId: res.GetPodSandboxId()})
	}
	if c.IntN(2) == 0 {
		_, _ = c.rt.RemovePodSandbox(c.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: res.GetPodSandboxId()})
	}
}

// churned is a pod's configuration that may be made beside others.
func (e *env) churned(name string) *cri.PodSandboxConfig {
	return &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "power", Uid: name}, Hostname: "p", LogDirectory: filepath.Join(e.LogDir(), name),
		PortMappings: []*cri.PortMapping{{ContainerPort: 80}},
		Linux:        &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}}},
	}
}

func (c *churner) images(int) {
	image := &cri.ImageSpec{Image: c.references[c.IntN(len(c.references))]}
	_, _ = c.im.PullImage(c.ctx, &cri.PullImageRequest{Image: image})
	if c.IntN(3) == 0 {
		_, _ = c.im.RemoveImage(c.ctx, &cri.RemoveImageRequest{Image: image})
	}
	time.Sleep(time.Duration(c.IntN(50)) * time.Millisecond)
}

// churn works on the node while the disk is copied so many times.
func (e *env) churn(references []string, copies int, seed uint64) (disks []string) {
	e.Helper()
	stop := make(chan struct{})
	var work sync.WaitGroup
	for i := range 3 {
		c := &churner{env: e, Rand: rand.New(rand.NewPCG(seed, uint64(i))), references: references, serial: fmt.Sprintf("%d-%d", seed, i), stop: stop}
		f := c.pods
		if i == 2 {
			f = c.images
		}
		work.Go(func() { c.until(f) })
	}
	random := rand.New(rand.NewPCG(seed, 99))
	for i := range copies {
		time.Sleep(time.Duration(random.IntN(2500)) * time.Millisecond)
		disk, err := e.CopyDisk(fmt.Sprintf("copy-%d-%d", seed, i))
		if err != nil {
			e.Fatal(err)
		}
		disks = append(disks, disk)
	}
	close(stop)
	work.Wait()
	return disks
}

// The power goes at some moment of the making and removing of pods and images. What
// the daemon finds then, it tells the truth about; all of it can be removed, and pods
// and images be made again. BERTH_POWER_CUTS=50 tries more moments than five.
func TestPowerCut(t *testing.T) {
	cuts := 5
	if text := os.Getenv("BERTH_POWER_CUTS"); text != "" {
		var err error
		if cuts, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	references := checkedImages(t, 4)
	e := startFor(t, node.Options{RootDisk: 96 << 20, LogLevel: "info"}, time.Duration(5+cuts)*time.Minute)
	e.pull(images.Busybox)
	for _, r := range references[1:] {
		e.pull(r)
	}
	for done := 0; done < cuts; done += 5 {
		disks := e.churn(references, min(5, cuts-done), uint64(done)+uint64(time.Now().UnixNano()))
		for i, disk := range disks {
			if err := e.UseDisk(disk); err != nil {
				t.Fatal(err)
			}
			e.reboot(nil)
			e.afterPowerCut(references)
			if t.Failed() {
				t.Fatalf("at cut %d", done+i)
			}
			if i < len(disks)-1 {
				if err := os.Remove(disk); err != nil { // in memory until it is unmounted
					t.Fatal(err)
				}
			}
		}
	}
}

// afterPowerCut checks what the daemon says, and that it can go on.
func (e *env) afterPowerCut(references []string) {
	e.Helper()
	e.tellsTheTruth()
	if err := e.Tidied(e.ctx); err != nil {
		e.Fatal(err)
	}
	pods, containers := e.tellsTheTruth()
	var begin struct {
		Trouble     int
		Troubles    []string
		Quarantined []string
	}
	if e.info("restore", &begin); begin.Trouble != 0 {
		e.Errorf("the start tells of %+v", begin)
	}
	torn := e.tornLeases()
	if left := e.leases(); len(left) != 0 {
		e.Errorf("leases %v are left", left)
	}
	config := e.churned(fmt.Sprint("after-", time.Now().UnixNano()))
	pod := e.run(config)
	present := 0
	for i, r := range references {
		if e.image(r) != nil {
			present++
		} else {
			e.pull(r)
		}
		c := command(fmt.Sprint("check", i), whole)
		c.Image.Image = r
		if s := e.exited(e.startContainer(pod, c, config)); s.GetExitCode() != 7 {
			e.Errorf("image %s is not as it was published: code %d", r, s.GetExitCode())
		}
	}
	if err := e.RemoveAll(e.ctx); err != nil {
		e.Error(err)
	}
	e.empty("removal")
	if leaks, err := e.Leaks(); err != nil || len(leaks) != 0 {
		e.Errorf("left: %q, %v", leaks, err)
	}
	e.Logf("%d pods, %d containers, %d of %d images; in quarantine %d, %d torn leases", pods, containers, present, len(references), len(begin.Quarantined), torn)
}

// tornLeases removes, as an operator has to, the files of addresses of which only
// the name came to the disk, and counts them: host-local does not wait for the disk,
// and nobody can tell whose such an address was.
func (e *env) tornLeases() (n int) {
	e.Helper()
	for _, ip := range e.leases() {
		files, err := filepath.Glob(filepath.Join(e.Leases, "*", ip))
		if err != nil {
			e.Fatal(err)
		}
		for _, f := range files {
			if info, err := os.Stat(f); err == nil && info.Size() == 0 {
				n++
				if err := os.Remove(f); err != nil {
					e.Fatal(err)
				}
			}
		}
	}
	return n
}

// tellsTheTruth checks that nothing is said to be up, and of no container that it
// ended in a way it did not.
func (e *env) tellsTheTruth() (pods, containers int) {
	e.Helper()
	list, err := e.rt.ListPodSandbox(e.ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		e.Fatal(err)
	}
	for _, p := range list.GetItems() {
		if p.GetState() != cri.PodSandboxState_SANDBOX_NOTREADY {
			e.Errorf("pod %s is %s", p.GetMetadata().GetName(), p.GetState())
		}
	}
	all, err := e.rt.ListContainers(e.ctx, &cri.ListContainersRequest{})
	if err != nil {
		e.Fatal(err)
	}
	for _, c := range all.GetContainers() {
		res, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: c.GetId()})
		if status.Code(err) == codes.NotFound {
			continue // its pod was lost, and it is being removed
		}
		if err != nil {
			e.Fatal(err)
		}
		s := res.GetStatus()
		if s.GetState() != cri.ContainerState_CONTAINER_EXITED {
			e.Errorf("container %s is %s", c.GetMetadata().GetName(), s.GetState())
		}
		ended := map[string]int32{"quick": 7, "slow": 137}[c.GetMetadata().GetName()]
		if code := s.GetExitCode(); code != ended && code != 137 && (code != 255 || s.GetReason() != "Unknown" || !strings.Contains(s.GetMessage(), "restarted")) {
			e.Errorf("container %s ended with %d, %s: %s", c.GetMetadata().GetName(), code, s.GetReason(), s.GetMessage())
		}
	}
	return len(list.GetItems()), len(all.GetContainers())
}
