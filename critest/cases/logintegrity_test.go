package cases

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// randomLines makes a file of lines of all lengths, some longer than a piece of a log,
// with any bytes, that does not end with a newline.
func randomLines(t *testing.T, path string, size int, seed uint64) (sum [sha256.Size]byte) {
	t.Helper()
	random := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	r := rand.New(random)
	data := make([]byte, size)
	_, _ = random.Read(data)
	for i, b := range data {
		if b == '\n' {
			data[i] = ' '
		}
	}
	for at := 0; at < size-1; {
		data[at] = '\n'
		switch r.IntN(50) {
		case 0:
			at += 1 + r.IntN(100_000)
		case 1:
			at++
		default:
			at += 1 + r.IntN(300)
		}
	}
	data[size-1] = 'x'
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return sha256.Sum256(data)
}

// rotated is a container's log in the files that rotation has made of it.
type rotated struct {
	id, path string
	files    int
	over     bool // the container has ended
}

// rotate does as the kubelet: the file is renamed, the log reopened; when that
// fails the file gets its name back.
func (e *env) rotate(r *rotated) {
	e.Helper()
	old := fmt.Sprintf("%s.%d", r.path, r.files)
	if err := os.Rename(r.path, old); err != nil {
		e.Errorf("rotate: %v", err)
		return
	}
	_, err := e.rt.ReopenContainerLog(e.ctx, &cri.ReopenContainerLogRequest{ContainerId: r.id})
	if err == nil {
		r.files++
		return
	}
	if r.over = status.Code(err) == codes.FailedPrecondition; !r.over {
		e.Errorf("reopen the log of a running container: %v", err)
	}
	if err := os.Rename(old, r.path); err != nil {
		e.Errorf("give the log its name back: %v", err)
	}
}

// sum rebuilds what the container wrote to stream from its files, parsing strictly.
func (e *env) sum(r *rotated, stream string) (sum [sha256.Size]byte) {
	e.Helper()
	h := sha256.New()
	for i := range r.files + 1 {
		path := r.path
		if i < r.files {
			path = fmt.Sprintf("%s.%d", r.path, i)
		}
		if err := rebuildInto(h, path, stream); err != nil {
			e.Errorf("log %s: %v", path, err)
		}
	}
	h.Sum(sum[:0])
	return sum
}

func rebuildInto(h hash.Hash, path, stream string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for r := bufio.NewReaderSize(f, 64<<10); ; {
		line, err := r.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("it ends with a torn line %.80q: %w", line, err)
		}
		part := bytes.SplitN(line, []byte(" "), 4)
		if len(part) != 4 || string(part[1]) != stream || len(part[2]) != 1 {
			return fmt.Errorf("line %.80q", line)
		}
		if _, err := time.Parse(time.RFC3339Nano, string(part[0])); err != nil {
			return err
		}
		switch part[2][0] {
		case 'F':
		case 'P':
			part[3] = part[3][:len(part[3])-1]
		default:
			return fmt.Errorf("line %.80q", line)
		}
		_, _ = h.Write(part[3])
	}
}

// Containers write while their logs are rotated, the daemon is restarted and
// killed and the monitor is killed: what they wrote is in the logs, by hash, and
// no line is torn. The long form is BERTH_LOG_CONTAINERS=20 BERTH_LOG_MB=50.
func TestLogsAreWholeThroughEverything(t *testing.T) {
	count, size := figure(t, "BERTH_LOG_CONTAINERS", 4), figure(t, "BERTH_LOG_MB", 5)<<20
	e := startFor(t, node.Options{LogLevel: "info"}, 30*time.Minute)
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	var logs []*rotated
	var sums [][sha256.Size]byte
	for i := range count {
		file := filepath.Join(e.Dir, fmt.Sprintf("noise%d", i))
		sums = append(sums, randomLines(t, file, size, uint64(i)))
		c := command(fmt.Sprintf("writer%d", i), fmt.Sprintf("i=0; while [ $i -lt %d ]; do "+
			"dd if=/noise bs=64k skip=$i count=1 2>/dev/null || exit 1; i=$((i+1)); sleep 0.05; done %s; exit 7", (size+65535)>>16, []string{"", ">&2"}[i%2]))
		c.Mounts = []*cri.Mount{{HostPath: file, ContainerPath: "/noise", Readonly: true}}
		id := e.startContainer(pod, c, config)
		logs = append(logs, &rotated{id: id, path: e.status(id).GetLogPath()})
	}
	begin := time.Now()
	rotations, restarts, kills := 0, 0, 0
	running := slices.Clone(logs)
	for round := 0; len(running) > 0; round++ {
		switch round % 4 {
		case 1:
			e.replaceMonitor()
			kills++
		case 3:
			end := []func() error{e.Kill, e.Terminate}[restarts%2]
			if err := end(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(200 * time.Millisecond) // the containers write on
			if err := e.Launch(e.ctx); err != nil {
				t.Fatal(err)
			}
			restarts++
		default:
			rotations++
			for _, r := range running {
				e.rotate(r)
			}
		}
		running = slices.DeleteFunc(running, func(r *rotated) bool {
			return r.over || e.status(r.id).GetState() == cri.ContainerState_CONTAINER_EXITED
		})
	}
	files := 0
	for i, r := range logs {
		if s := e.exitedIn(r.id, time.Minute); s.GetExitCode() != 7 {
			t.Errorf("writer %d ended with code %d (%s: %s), want 7", i, s.GetExitCode(), s.GetReason(), s.GetMessage())
		}
		if e.sum(r, []string{"stdout", "stderr"}[i%2]) != sums[i] {
			t.Errorf("the %d files of log %s are not what was written", r.files+1, r.path)
		}
		files += r.files + 1
	}
	t.Logf("%d containers wrote %d MiB each in %.0f s: %d rotations of all, %d restarts of the daemon, %d kills of the monitor, %d files",
		count, size>>20, time.Since(begin).Seconds(), rotations, restarts, kills, files)
}
