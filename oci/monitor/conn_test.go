package monitor

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pair is a connection between two ends in this process.
func pair(t testing.TB) (a, b *Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	end := func(fd int) *Conn {
		f := os.NewFile(uintptr(fd), "socket")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		n := NewConn(c.(*net.UnixConn))
		t.Cleanup(func() { _ = n.Close() })
		return n
	}
	return end(fds[0]), end(fds[1])
}

func openDescriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestMessagesArriveWithTheirDescriptors(t *testing.T) {
	a, b := pair(t)
	before := openDescriptors(t)
	const count = 200
	go func() {
		for i := range count {
			r, w, err := os.Pipe()
			if err != nil {
				return
			}
			_, _ = w.WriteString(strings.Repeat("x", i))
			_ = w.Close()
			m := &Message{ID: uint64(i), Op: OpPark, Target: strings.Repeat("t", i*37), Container: &Container{ID: "c", PID: i}}
			if i%2 == 0 {
				m.FDs = []string{"pipe", "log"}
				_ = a.Send(m, int(r.Fd()), int(r.Fd()))
			} else {
				_ = a.Send(m)
			}
			_ = r.Close()
		}
	}()
	for i := range count {
		m, err := b.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if m.ID != uint64(i) || m.Container.PID != i || len(m.Target) != i*37 {
			t.Fatalf("message %d is %+v", i, m)
		}
		fds := m.Take()
		if i%2 == 1 && len(fds) > 0 || i%2 == 0 && len(fds) != 2 {
			t.Fatalf("message %d has descriptors %v", i, fds)
		}
		for _, fd := range fds {
			flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
			if err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Fatalf("descriptor %d would leak into children", fd)
			}
		}
		if fd, ok := fds["pipe"]; ok {
			f := os.NewFile(uintptr(fd), "pipe")
			if data, err := io.ReadAll(f); err != nil || len(data) != i {
				t.Fatalf("pipe of message %d holds %d bytes, %v", i, len(data), err)
			}
			_ = f.Close()
			_ = unix.Close(fds["log"])
		}
	}
	if now := openDescriptors(t); now > before {
		t.Errorf("%d descriptors, before %d", now, before)
	}
}

func TestReceiveRefusesWhatIsMalformed(t *testing.T) {
	frame := func(n uint32, body string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, n), body...)
	}
	for name, c := range map[string]struct {
		bytes []byte
		want  error
	}{
		"nothing":             {nil, io.EOF},
		"half a length":       {[]byte{0, 0}, io.ErrUnexpectedEOF},
		"half a body":         {frame(10, "{"), io.ErrUnexpectedEOF},
		"no body":             {frame(10, ""), io.ErrUnexpectedEOF},
		"too long":            {frame(maxFrame+1, ""), ErrProtocol},
		"no JSON":             {frame(3, "abc"), ErrProtocol},
		"another type":        {frame(2, "[]"), ErrProtocol},
		"missing descriptors": {frame(14, `{"fds":["log"]}`[:14]), ErrProtocol},
		"promised descriptor": {frame(15, `{"fds":["log"]}`), ErrProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t)
			if _, err := a.c.Write(c.bytes); err != nil && len(c.bytes) > 0 {
				t.Fatal(err)
			}
			_ = a.Close()
			if m, err := b.Receive(); !errors.Is(err, c.want) {
				t.Errorf("receive = %+v, %v, want %v", m, err, c.want)
			}
		})
	}
}

func TestSendRefusesWhatIsTooLarge(t *testing.T) {
	a, _ := pair(t)
	if err := a.Send(&Message{Op: OpReopen, Target: strings.Repeat("x", maxFrame)}); !errors.Is(err, ErrProtocol) {
		t.Errorf("send: %v", err)
	}
	if err := a.Send(&Message{Op: OpPark, FDs: []string{"log"}}); !errors.Is(err, ErrProtocol) {
		t.Errorf("send without the descriptor: %v", err)
	}
}

// Descriptors that a broken message brought do not stay open.
func TestBrokenMessageLeaksNoDescriptor(t *testing.T) {
	for range 20 {
		a, b := pair(t)
		before := openDescriptors(t)
		if _, _, err := a.c.WriteMsgUnix([]byte{0, 0, 0, 3, 'a', 'b', 'c'}, unix.UnixRights(0, 1, 2), nil); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Receive(); !errors.Is(err, ErrProtocol) {
			t.Fatal(err)
		}
		if now := openDescriptors(t); now != before {
			t.Fatalf("%d descriptors, before %d", now, before)
		}
	}
}

func FuzzReceive(f *testing.F) {
	f.Add([]byte{0, 0, 0, 2, '{', '}'})
	f.Add([]byte{0, 0, 0, 15, '{', '"', 'f', 'd', 's', '"', ':', '[', '"', 'a', '"', ']', '}'})
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 100000 {
			return
		}
		a, b := pair(t)
		_, _ = a.c.Write(data)
		_ = a.Close()
		for {
			m, err := b.Receive()
			if err != nil {
				return
			}
			m.CloseFDs()
		}
	})
}

func TestRecordsSurviveAFile(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadExit(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no record: %v", err)
	}
	at := time.Unix(1700000000, 123456789).UTC()
	x := Exit{Version: Version, ID: "c", PID: 7, StartTime: 99, Code: 137, OOMKilled: true, At: at, Dropped: 5}
	if err := WriteExit(dir, x); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadExit(dir); err != nil || !reflect.DeepEqual(got, x) {
		t.Errorf("exit = %+v, %v", got, err)
	}
	c := Container{ID: "c", Bundle: dir, PID: 7, StartTime: 99, IO: IO{LogPath: "/l", MaxLine: 5}, Pipes: [2]uint64{1, 2}, Exit: &x}
	if err := WriteContainer(c); err != nil {
		t.Fatal(err)
	}
	c.Version, c.Exit = Version, nil
	if got, err := ReadContainer(dir); err != nil || !reflect.DeepEqual(got, c) {
		t.Errorf("container = %+v, %v", got, err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 2 {
		t.Errorf("the folder has %v", entries)
	}
	if err := os.WriteFile(dir+"/exit.json", []byte(`{"code":`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadExit(dir); err == nil {
		t.Error("a torn record was read")
	}
}
