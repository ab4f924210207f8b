// Package hung is a filesystem for tests that stops answering: FUSE with a server
// that takes requests and lets them lie, as one whose network is gone. Who waits for
// it then sleeps where SIGKILL does not reach.
//
// It owns the mount and its server; both end with Release, or with the process. Only
// tests use it.
package hung

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrNoFUSE: the kernel has no FUSE, or lets nobody use it.
var ErrNoFUSE = errors.New("no FUSE here")

// File is the name of the one file in the filesystem; its content is Text.
const (
	File = "file"
	Text = "text\n"
)

// FS is a mounted filesystem: a directory with one file, which answers until Hang.
type FS struct {
	dir string
	dev *os.File

	mu   sync.Mutex
	hung bool        // guarded by mu
	kept [][]byte    // requests that are not answered, guarded by mu
	once sync.Once   // of Release
	seen chan string // names of requests that are not answered; holds some
}

// Mount mounts it on a directory, which must exist. ErrNoFUSE.
func Mount(dir string) (*FS, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: open /dev/fuse: %w", ErrNoFUSE, err)
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd)
	if err := unix.Mount("hung", dir, "fuse", 0, options); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("%w: mount: %w", ErrNoFUSE, err)
	}
	dev := os.NewFile(uintptr(fd), "/dev/fuse") // only now can it be polled
	fs := &FS{dir: dir, dev: dev, seen: make(chan string, 64)}
	go fs.serve()
	return fs, nil
}

// Hang leaves every request from now on unanswered, until Go.
func (f *FS) Hang() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hung = true
}

// Go answers again, first what was not answered.
func (f *FS) Go() {
	f.mu.Lock()
	kept := f.kept
	f.hung, f.kept = false, nil
	f.mu.Unlock()
	for _, r := range kept {
		f.answer(r)
	}
}

// Held gives one value for each request that was not answered.
func (f *FS) Held() <-chan string { return f.seen }

// Release unmounts it; whoever waits for it gets an error. Idempotent.
func (f *FS) Release() (err error) {
	f.once.Do(func() {
		err = f.dev.Close()
		if uerr := unix.Unmount(f.dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); uerr != nil {
			err = errors.Join(err, fmt.Errorf("unmount %s: %w", f.dir, uerr))
		}
	})
	return err
}

// Operations of the FUSE protocol that are told apart.
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opOpen        = 14
	opRead        = 15
	opStatfs      = 17
	opRelease     = 18
	opFlush       = 25
	opInit        = 26
	opOpendir     = 27
	opReaddir     = 28
	opReleasedir  = 29
	opInterrupt   = 36
	opBatchForget = 42
)

const (
	inHeader = 40 // bytes
	rootNode = 1
	fileNode = 2
)

func (f *FS) serve() {
	buf := make([]byte, 1<<20)
	for {
		n, err := f.dev.Read(buf)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) { // ENOENT: a request was interrupted before it was read
			continue
		}
		if err != nil {
			return
		}
		r := append([]byte{}, buf[:n]...)
		op := binary.NativeEndian.Uint32(r[4:])
		f.mu.Lock()
		hold := f.hung && op != opInit && op != opForget && op != opBatchForget && op != opInterrupt
		if hold {
			f.kept = append(f.kept, r)
		}
		f.mu.Unlock()
		if !hold {
			f.answer(r)
			continue
		}
		select {
		case f.seen <- fmt.Sprintf("operation %d", op):
		default:
		}
	}
}

// answer sends the reply of one request.
func (f *FS) answer(r []byte) {
	e := binary.NativeEndian
	op, node := e.Uint32(r[4:]), e.Uint64(r[16:])
	var body []byte
	code := int32(0)
	switch op {
	case opForget, opBatchForget, opInterrupt:
		return
	case opInit:
		body = e.AppendUint32(e.AppendUint32(nil, 7), 31)
		body = append(body, make([]byte, 64-len(body))...)
		e.PutUint32(body[20:], 128<<10) // max_write
	case opGetattr:
		body = append(make([]byte, 16), attributes(node)...)
	case opLookup:
		if strings.TrimRight(string(r[inHeader:]), "\x00") != File {
			code = -int32(unix.ENOENT)
			break
		}
		body = append(e.AppendUint64(nil, fileNode), make([]byte, 32)...)
		body = append(body, attributes(fileNode)...)
	case opOpen, opOpendir:
		body = make([]byte, 16)
	case opRead:
		if offset := e.Uint64(r[inHeader+8:]); offset < uint64(len(Text)) {
			body = []byte(Text)[offset:]
		}
	case opStatfs:
		body = make([]byte, 80)
	case opReaddir, opRelease, opReleasedir, opFlush: // the file is not listed
	default:
		code = -int32(unix.ENOSYS)
	}
	out := e.AppendUint32(nil, uint32(16+len(body)))
	out = e.AppendUint32(out, uint32(code))
	out = append(out, r[8:16]...)
	_, _ = f.dev.Write(append(out, body...))
}

// attributes are those of the directory or the file.
func attributes(node uint64) []byte {
	e := binary.NativeEndian
	b := make([]byte, 88)
	e.PutUint64(b, node)
	mode, size := uint32(unix.S_IFDIR|0o755), uint64(0)
	if node == fileNode {
		mode, size = unix.S_IFREG|0o755, uint64(len(Text))
	}
	e.PutUint64(b[8:], size)
	e.PutUint32(b[60:], mode)
	e.PutUint32(b[64:], 1) // links
	e.PutUint32(b[80:], 4096)
	return b
}
