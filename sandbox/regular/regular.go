// Package regular reads whole files that somebody else names or may replace:
// configuration, credentials, certificates, records. It owns the rule that such a
// file is a regular one of a bounded size, so that a FIFO, a device or a file
// without an end never holds up who reads it. It does not own what the files mean.
package regular

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Most bounds, in bytes, a file that an operator writes.
const Most = 16 << 20

// ErrNot: there is something by that name, but it is no regular file that could be
// read to its end: a FIFO, a device, a socket, a directory, a file of the kernel's,
// or one larger than allowed.
var ErrNot = errors.New("not a regular file of a bounded size")

// refusal is an ErrNot in words that name the file.
type refusal string

func (r refusal) Error() string        { return string(r) }
func (r refusal) Is(target error) bool { return target == ErrNot }

// Read gives the content of a file of at most so many bytes. It follows symlinks
// and never waits for anybody but the disk. Errors name the path: ErrNot, or those
// of os.Open.
func Read(path string, most int64) ([]byte, error) {
	fd, err := open(path, most)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	// Not by an os.File: that would wait where a descriptor says "not yet".
	data, err := io.ReadAll(io.LimitReader(descriptor(fd), most+1))
	switch {
	case errors.Is(err, unix.EAGAIN):
		return nil, refusal(path + " is no regular file")
	case err != nil:
		return nil, &fs.PathError{Op: "read", Path: path, Err: err}
	case int64(len(data)) > most:
		return nil, tooLarge(path, most)
	}
	return data, nil
}

// Open opens a file of any size to be read from its beginning, for those that do
// not want it whole. The caller closes it. The errors are those of Read.
func Open(path string) (*os.File, error) {
	fd, err := open(path, math.MaxInt64)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Check tells whether Read could read a file, for one that somebody else reads.
// The errors are those of Read.
func Check(path string, most int64) error {
	fd, err := open(path, most)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// open looks before it opens, for opening alone does something to some devices,
// and again at what it has opened.
func open(path string, most int64) (int, error) {
	info, err := os.Stat(path)
	if err != nil {
		return -1, err
	}
	if !info.Mode().IsRegular() {
		return -1, refusal(path + " is no regular file")
	}
	fd, err := uninterrupted(func() (int, error) {
		return unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	if err := opened(fd, path, most); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func opened(fd int, path string, most int64) error {
	var is unix.Stat_t
	var on unix.Statfs_t
	if err := errors.Join(unix.Fstat(fd, &is), unix.Fstatfs(fd, &on)); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	switch {
	case is.Mode&unix.S_IFMT != unix.S_IFREG:
		return refusal(path + " is no regular file")
	case kernels(int64(on.Type)):
		return refusal(path + " is no regular file but one of the kernel's")
	case is.Size > most:
		return tooLarge(path, most)
	}
	return nil
}

func tooLarge(path string, most int64) error {
	return refusal(fmt.Sprintf("%s is larger than %d bytes", path, most))
}

// kernels are filesystems whose files say that they are regular, but of which some
// wait, have no end, or lose what is read, such as /proc/kmsg and trace_pipe.
func kernels(magic int64) bool {
	return magic == unix.PROC_SUPER_MAGIC || magic == unix.TRACEFS_MAGIC || magic == unix.DEBUGFS_MAGIC
}

// descriptor is an io.Reader that never waits for the poller.
type descriptor int

func (d descriptor) Read(p []byte) (int, error) {
	n, err := uninterrupted(func() (int, error) { return unix.Read(int(d), p) })
	switch {
	case err != nil:
		return 0, err
	case n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return n, nil
}

func uninterrupted(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, syscall.EINTR) {
			return n, err
		}
	}
}
