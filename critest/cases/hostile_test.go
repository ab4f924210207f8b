package cases

import (
	"bufio"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// babble is what comes to a socket from somebody who does not speak its protocol.
func babble(i int) string {
	return []string{
		"", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", strings.Repeat("\x00", 4096),
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\xff", 64), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
		"POST /exec/" + strings.Repeat("A", 40) + " HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n",
		"GET /attach/x HTTP/1.1\r\nX: " + strings.Repeat("y", 200<<10) + "\r\n\r\n", "GET /exec",
	}[i%9]
}

// Whoever connects and speaks nonsense, says nothing or does not go away keeps
// nobody else from being served and leaves nothing behind.
func TestNoiseAtTheSockets(t *testing.T) {
	e := start(t, node.Options{})
	id := e.idle()
	e.exec(id, "true")
	address := e.execURL(id, false, false, "true")
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	before := e.usage()
	for _, to := range [][2]string{{"unix", e.Socket}, {"tcp", u.Host}, {"unix", filepath.Join(e.State(), "monitor.sock")}, {"unix", e.NRISocket()}} {
		var open []net.Conn
		for i := range 200 {
			c, err := net.DialTimeout(to[0], to[1], 5*time.Second)
			if err != nil {
				t.Fatalf("connection %d to %s: %v", i, to[1], err)
			}
			open = append(open, c)
			_ = c.SetDeadline(time.Now().Add(5 * time.Second))
			_, _ = c.Write([]byte(babble(i)))
		}
		if out := e.exec(id, "echo served"); out != "served\n" {
			t.Errorf("with noise at %s an exec says %q", to[1], out)
		}
		for _, c := range open {
			_ = c.Close()
		}
		e.settled("noise at "+to[1], before)
	}
	if s := e.dial(transports[0], address, false, false); s.end() != nil {
		t.Error("the URL of before does not work")
	}
}

// The streaming port is open to every process of the node, also of pods on its
// network. Without a URL that the daemon has just given out it answers nothing,
// and who says nothing is cut off.
func TestStrangersAtTheStreamingPort(t *testing.T) {
	e := start(t, node.Options{})
	id := e.idle()
	u, err := url.Parse(e.execURL(id, false, false, "true"))
	if err != nil {
		t.Fatal(err)
	}
	silent, err := net.Dial("tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	kind, token, _ := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	if len(token) < 22 {
		t.Errorf("the token %q has less than 128 bits", token)
	}
	used, err := url.Parse(e.execURL(id, false, false, "true"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/", "/exec", "/exec/", "/exec/AAAAAAAA", "/exec/" + token[:len(token)-1] + "!", "/exec/" + token[1:],
		strings.Replace(used.Path, "exec", "attach", 1), strings.Replace(used.Path, "exec", "portforward", 1), "/metrics", "/debug/pprof/"} {
		for _, method := range []string{"GET", "POST", "PUT"} {
			c, err := net.Dial("tcp", u.Host)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n", method, path)
			res, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil || res.StatusCode < 400 {
				t.Errorf("%s %s: %v, %v; want a refusal", method, path, res, err)
			}
			_ = c.Close()
		}
	}
	if s := e.dial(transports[0], u.String(), false, false); kind != "exec" || s.end() != nil {
		t.Errorf("the right URL, of kind %s, does not work after wrong ones", kind)
	}
	_ = silent.SetReadDeadline(time.Now().Add(60 * time.Second))
	if n, err := silent.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("a silent connection is kept: %d bytes, %v", n, err)
	}
}

// A request has a largest size; more is refused before it costs memory.
func TestRequestsAreBounded(t *testing.T) {
	e := start(t, node.Options{})
	config := e.sandbox()
	conn, err := grpc.NewClient("unix://"+e.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(1<<30)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	config.Annotations = map[string]string{"large": strings.Repeat("x", 100<<20)}
	base := resident(t, e.PID(), "VmHWM")
	for range 3 {
		_, err = cri.NewRuntimeServiceClient(conn).RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: config})
		if status.Code(err) != codes.ResourceExhausted {
			t.Errorf("a request of 100 MiB: %v, want ResourceExhausted", err)
		}
	}
	if peak := resident(t, e.PID(), "VmHWM"); peak > base+64 {
		t.Errorf("the daemon had %d MiB, before %d", peak, base)
	}
	e.empty("requests that are too large")
}

// No id, name or path of a request leads out of where it belongs.
func TestNamesThatLeadOut(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	e.output(pod, command("first", "true"), config) // directories that come with a first container
	before := e.tree()
	for _, bad := range []string{"..", "../..", "../../escaped", "/", "/tmp/../" + e.Dir, "a/../../b", ".", "x/y", strings.Repeat("a", 100_000)} {
		for what, err := range e.withID(bad) {
			if c := status.Code(err); err != nil && c != codes.NotFound && c != codes.InvalidArgument {
				t.Errorf("%s of %.40q: %v, want NotFound, InvalidArgument or success", what, bad, err)
			}
		}
		named := e.sandbox()
		named.Metadata = &cri.PodSandboxMetadata{Name: bad, Namespace: bad, Uid: bad}
		if res, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: named}); err == nil {
			e.removePod(res.GetPodSandboxId()) // a name is no path
		}
		c := command(bad, "true")
		c.LogPath = "plain.log"
		if res, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config}); err == nil {
			if _, err := e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: res.GetContainerId()}); err != nil {
				t.Errorf("remove the container %.40q: %v", bad, err)
			}
		}
	}
	for field, change := range map[string]func(*cri.ContainerConfig){
		"log_path":   func(c *cri.ContainerConfig) { c.LogPath = "../../escaped.log" },
		"absolute":   func(c *cri.ContainerConfig) { c.LogPath = filepath.Join(e.Dir, "escaped.log") },
		"image":      func(c *cri.ContainerConfig) { c.Image.Image = "../../../etc/passwd" },
		"sub path":   func(c *cri.ContainerConfig) { c.Mounts = []*cri.Mount{imageMount("/v", images.Busybox, "../../..")} },
		"mount":      func(c *cri.ContainerConfig) { c.Mounts = []*cri.Mount{{HostPath: "relative", ContainerPath: "/v"}} },
		"annotation": func(c *cri.ContainerConfig) { c.Annotations = map[string]string{"cdi.k8s.io/x": "../../x=y"} },
	} {
		c := command("c-"+field[:3], "true")
		change(c)
		_, err := e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
		if code := status.Code(err); code != codes.InvalidArgument && code != codes.NotFound && code != codes.Unknown {
			t.Errorf("%s: %v, want a refusal", field, err)
		}
	}
	other := e.sandbox()
	other.LogDirectory = "relative"
	_, err := e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: other})
	e.refused("a relative log directory", err, codes.InvalidArgument, "log_directory")
	_, err = e.rt.RunPodSandbox(e.ctx, &cri.RunPodSandboxRequest{Config: e.sandbox(), RuntimeHandler: "../runc"})
	e.refused("a handler with a path", err, codes.InvalidArgument, "../runc")
	for path := range e.tree() {
		if !before[path] {
			t.Errorf("%s was made", path)
		}
	}
}

// withID makes every call that takes an id with this one.
func (e *env) withID(id string) map[string]error {
	out := map[string]error{}
	_, out["PodSandboxStatus"] = e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})
	_, out["StopPodSandbox"] = e.rt.StopPodSandbox(e.ctx, &cri.StopPodSandboxRequest{PodSandboxId: id})
	_, out["RemovePodSandbox"] = e.rt.RemovePodSandbox(e.ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id})
	_, out["PodSandboxStats"] = e.rt.PodSandboxStats(e.ctx, &cri.PodSandboxStatsRequest{PodSandboxId: id})
	_, out["PortForward"] = e.rt.PortForward(e.ctx, &cri.PortForwardRequest{PodSandboxId: id, Port: []int32{80}})
	_, out["CreateContainer"] = e.rt.CreateContainer(e.ctx, &cri.CreateContainerRequest{PodSandboxId: id, Config: command("c", "true"), SandboxConfig: e.sandbox()})
	_, out["StartContainer"] = e.rt.StartContainer(e.ctx, &cri.StartContainerRequest{ContainerId: id})
	_, out["StopContainer"] = e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: id})
	_, out["RemoveContainer"] = e.rt.RemoveContainer(e.ctx, &cri.RemoveContainerRequest{ContainerId: id})
	_, out["ContainerStatus"] = e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: id})
	_, out["ContainerStats"] = e.rt.ContainerStats(e.ctx, &cri.ContainerStatsRequest{ContainerId: id})
	_, out["ReopenContainerLog"] = e.rt.ReopenContainerLog(e.ctx, &cri.ReopenContainerLogRequest{ContainerId: id})
	_, out["ExecSync"] = e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}})
	_, out["Exec"] = e.rt.Exec(e.ctx, &cri.ExecRequest{ContainerId: id, Cmd: []string{"true"}, Stdout: true})
	_, out["Attach"] = e.rt.Attach(e.ctx, &cri.AttachRequest{ContainerId: id, Stdout: true})
	_, out["ImageStatus"] = e.im.ImageStatus(e.ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: id}})
	_, out["RemoveImage"] = e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: id}})
	return out
}

// tree lists the node's files, but for those of images and logs.
func (e *env) tree() map[string]bool {
	e.Helper()
	files := map[string]bool{}
	err := filepath.WalkDir(e.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && (name == "logs" || name == "images" || name == "trash" || name == "leases" || name == "results") {
			return filepath.SkipDir
		}
		files[path] = true
		return nil
	})
	if err != nil {
		e.Fatal(err)
	}
	return files
}
