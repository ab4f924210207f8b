package cases

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream/spdy"
	"sigs.k8s.io/cri-tools/pkg/common"

	"berth/critest/node"
)

// info is a number of the daemon's verbose status.
func (e *env) info(key string, v any) {
	e.Helper()
	res, err := e.rt.Status(e.ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		e.Fatal(err)
	}
	if err := json.Unmarshal([]byte(res.GetInfo()[key]), v); err != nil {
		e.Fatalf("status info %s: %v", key, err)
	}
}

// usage is what a leak would show in: the daemon's goroutines, its descriptors
// and its monitor's.
type usage struct{ goroutines, daemon, monitor int }

func (e *env) usage() (u usage) {
	e.Helper()
	e.info("goroutines", &u.goroutines)
	for _, pid := range e.Daemons() {
		if pid == e.PID() {
			u.daemon = descriptors(e.T, pid)
		} else {
			u.monitor = descriptors(e.T, pid)
		}
	}
	return u
}

// settled waits until usage is as it was, give or take five.
func (e *env) settled(after string, before usage) {
	e.Helper()
	var now usage
	for end := time.Now().Add(40 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		now = e.usage()
		if now.goroutines <= before.goroutines+5 && now.daemon <= before.daemon+5 && now.monitor <= before.monitor+5 {
			return
		}
	}
	e.Errorf("after %s: %+v, before %+v", after, now, before)
}

// inParallel runs f n times, a few at once.
func inParallel(n int, f func(i int)) {
	var work sync.WaitGroup
	next := make(chan int)
	for range 8 {
		work.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	work.Wait()
}

// spdyTo opens a SPDY session and its streams, and returns its connection.
func (e *env) spdyTo(to string, streams ...string) (net.Conn, error) {
	u, err := url.Parse(to)
	if err != nil {
		return nil, err
	}
	c, err := net.Dial("tcp", u.Host)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n", u.Path, u.Host)
	res, err := http.ReadResponse(bufio.NewReaderSize(c, 16), nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
		return nil, fmt.Errorf("upgrade: %v, %v", res, err)
	}
	s, err := spdy.NewClientConnection(c)
	if err != nil {
		return nil, err
	}
	for _, name := range streams {
		if _, err := s.CreateStream(http.Header{"Streamtype": []string{name}}); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// B97: clients that vanish, commands that fail and handshakes that are cut off
// leave neither a goroutine nor a descriptor.
func TestB97VanishedClientsLeaveNothing(t *testing.T) {
	e := start(t, node.Options{})
	id := e.idle()
	e.exec(id, "true") // what is opened once is open now
	s := e.dial(common.TransportSpdy, e.execURL(id, false, true, "true"), false, true)
	if err := s.end(); err != nil {
		t.Fatal(err)
	}
	before := e.usage()
	const times = 500
	began := time.Now()
	step := func(what string) {
		t.Helper()
		e.settled(what, before)
		t.Logf("%s: %v; then %+v, before %+v", what, time.Since(began).Round(time.Millisecond), e.usage(), before)
		began = time.Now()
	}
	inParallel(times, func(i int) {
		streams := []string{"error", "stdout", "stderr"}
		c, err := e.spdyTo(e.attachURL(id, false, false), streams[:i%4]...)
		if err != nil {
			t.Errorf("attach: %v", err)
			return
		}
		if i%2 == 0 {
			_ = c.(*net.TCPConn).SetLinger(0) // a reset instead of an end
		}
		_ = c.Close()
	})
	step(fmt.Sprint(times, " times attach and drop"))
	inParallel(times, func(i int) {
		s := e.dial(transports[i%2], e.execURL(id, true, true, "/nope"), true, true)
		if err := s.end(); code(err) != -1 {
			t.Errorf("exec /nope: %v", err)
		}
	})
	step(fmt.Sprint(times, " times exec -it /nope"))
	inParallel(times, func(i int) {
		u, err := url.Parse(e.execURL(id, true, true, "sleep", "100000"))
		if err != nil {
			t.Error(err)
			return
		}
		c, err := net.Dial("tcp", u.Host)
		if err != nil {
			t.Error(err)
			return
		}
		request := fmt.Sprintf("GET %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"+
			"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n", u.Path, u.Host)
		_, _ = io.WriteString(c, request[:1+i*len(request)/times])
		_ = c.Close()
	})
	step(fmt.Sprint(times, " times half a WebSocket handshake"))
	inParallel(times/5, func(i int) {
		s := e.dial(transports[i%2], e.execURL(id, true, i%4 < 2, "sleep", "100000"), true, i%4 < 2)
		time.Sleep(time.Duration(i%10) * 10 * time.Millisecond) // while it starts, or when it runs
		s.hangUp()
		_ = s.end()
	})
	step(fmt.Sprint(times/5, " times exec and drop"))
	if left := e.processes(id); strings.Count(left, "sleep 100000") != 1 {
		t.Errorf("these processes run in the container: %s", left)
	}
}

// B101: the URL can be dialled with both protocols, once, and for a short time;
// helper sockets have paths and are root's.
func TestB101StreamingURL(t *testing.T) {
	e := start(t, node.Options{Settings: map[string]string{"streaming": `url_lifetime = "2s"`}})
	id := e.idle()
	for _, transport := range transports {
		to := e.execURL(id, false, false, "echo", "hi")
		u, err := url.Parse(to)
		if err != nil || u.Scheme != "http" || u.Hostname() != "127.0.0.1" || u.Port() == "0" || u.Port() == "" {
			t.Errorf("URL %s (%v), want http and a port of 127.0.0.1", to, err)
		}
		if s := e.dial(transport, to, false, false); s.end() != nil || s.out.String() != "hi\n" {
			t.Errorf("%s: %q", transport, s.out.String())
		}
		if err := e.dial(transport, to, false, false).end(); err == nil {
			t.Errorf("%s: the URL works twice", transport)
		}
		old := e.execURL(id, false, false, "echo", "hi")
		time.Sleep(2100 * time.Millisecond)
		if err := e.dial(transport, old, false, false).end(); err == nil {
			t.Errorf("%s: an old URL works", transport)
		}
	}
	ws, _, err := websocket.DefaultDialer.Dial(strings.Replace(e.execURL(id, false, false, "echo", "hi"), "http", "ws", 1), http.Header{"Sec-WebSocket-Protocol": {"v5.channel.k8s.io"}})
	if err != nil || ws.Subprotocol() != "v5.channel.k8s.io" {
		t.Errorf("version 5 of the protocol: %v", err)
	} else {
		_ = ws.Close()
	}
	e.onlyLoopback()
	e.onlyPathSockets()
}

// onlyLoopback checks that the daemon listens nowhere else.
func (e *env) onlyLoopback() {
	e.Helper()
	ours := map[string]bool{}
	for _, inode := range e.sockets(e.PID()) {
		ours[inode] = true
	}
	listening := 0
	for file, loopback := range map[string]string{"tcp": "0100007F:", "tcp6": "00000000000000000000000001000000:"} {
		data, err := os.ReadFile("/proc/net/" + file)
		if err != nil {
			e.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != "0A" || !ours[f[9]] {
				continue
			}
			listening++
			if !strings.HasPrefix(f[1], loopback) {
				e.Errorf("the daemon listens on %s", f[1])
			}
		}
	}
	if listening != 1 {
		e.Errorf("the daemon listens on %d TCP ports, want the streaming server's", listening)
	}
}

// sockets are the inodes of a process's.
func (e *env) sockets(pid int) (inodes []string) {
	e.Helper()
	fds, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "fd", "*"))
	if err != nil {
		e.Fatal(err)
	}
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err == nil && strings.HasPrefix(target, "socket:[") {
			inodes = append(inodes, strings.TrimSuffix(strings.TrimPrefix(target, "socket:["), "]"))
		}
	}
	return inodes
}

// onlyPathSockets checks, from a pod in the host's network and while an attach
// and an exec with a terminal run, that no socket of ours has an abstract name,
// and that none with a path is open to others.
func (e *env) onlyPathSockets() {
	e.Helper()
	config := e.sandbox()
	config.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	c := command("looker", "sleep 100000")
	c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	id := e.startContainer(e.run(config), c, config)
	shell := e.dial(common.TransportSpdy, e.execURL(id, true, true, "sh"), true, true)
	shell.types("echo re''ady\n")
	shell.sees("ready")
	attached := e.dial(common.TransportWebsocket, e.attachURL(id, false, false), false, false)
	ours := map[string]bool{}
	for _, pid := range e.Daemons() {
		for _, inode := range e.sockets(pid) {
			ours[inode] = true
		}
	}
	seen := 0
	for line := range strings.Lines(e.exec(id, "cat /proc/net/unix")) {
		f := strings.Fields(line)
		if len(f) < 7 || !ours[f[6]] {
			continue
		}
		seen++
		if len(f) < 8 {
			continue // without a name nobody can connect to it
		}
		if info, err := os.Stat(f[7]); err != nil || info.Mode().Perm()&0o002 != 0 {
			e.Errorf("socket %s of ours: %v, %v; want a path to which others cannot connect", f[7], info, err)
		}
		if strings.HasPrefix(f[7], "@") {
			e.Errorf("the pod can reach our abstract socket %s", f[7])
		}
	}
	if seen == 0 {
		e.Error("no socket of ours was seen from the pod")
	}
	shell.hangUp()
	attached.hangUp()
	_, _ = shell.end(), attached.end()
}

// resident is a process's memory in MiB.
func resident(t *testing.T, pid int, key string) int {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == key+":" {
			n, _ := strconv.Atoi(f[1])
			return n >> 10
		}
	}
	t.Fatalf("process %d has no %s", pid, key)
	return 0
}

// B75: a command with endless output costs the daemon what its reply may hold,
// and no file.
func TestB75EndlessOutputIsBounded(t *testing.T) {
	e := start(t, node.Options{})
	id := e.idle()
	e.exec(id, "true")
	files := func() int {
		list, err := filepath.Glob(filepath.Join(e.State(), "containers", id, "*"))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	base, before := resident(t, e.PID(), "VmRSS"), files()
	const parallel = 5
	var work sync.WaitGroup
	for i := range parallel {
		work.Go(func() {
			res, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"dd", "if=/dev/zero", "bs=1M", "count=500"}})
			if err != nil || res.GetExitCode() != 0 || len(res.GetStdout()) < 15<<20 || len(res.GetStdout()) > 16<<20 {
				t.Errorf("exec %d: %v, code %d, %d bytes; want the first 16 MiB", i, err, res.GetExitCode(), len(res.GetStdout()))
			}
		})
		work.Go(func() {
			_, err := e.rt.ExecSync(e.ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"yes"}, Timeout: 5})
			if err == nil || !strings.Contains(err.Error(), "timed out") {
				t.Errorf("endless exec %d: %v, want a timeout", i, err)
			}
		})
	}
	work.Wait()
	peak := resident(t, e.PID(), "VmHWM")
	t.Logf("%d execs of 500 MB and %d of endless output: %d MiB at most, %d MiB before", parallel, parallel, peak, base)
	// Ten replies of 16 MiB are kept, five of them are sent at the same time.
	if limit := base + 10*16*3; peak > limit {
		t.Errorf("the daemon had %d MiB, want at most %d", peak, limit)
	}
	if now := files(); now != before {
		t.Errorf("%d files in the bundle, %d before", now, before)
	}
	if left := e.processes(id); strings.Contains(left, "yes") {
		t.Errorf("these are left: %s", left)
	}
}
