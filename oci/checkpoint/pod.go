package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// ErrInvalid: a directory that is no checkpoint of a pod, or not one of this
// version.
var ErrInvalid = errors.New("not a checkpoint of a pod")

const (
	podFile    = "pod.json"
	podDir     = "containers"
	podVersion = 1
	maxPodFile = 8 << 20
	// Names in a container's directory.
	imagesDir  = "checkpoint"
	rootfsFile = "rootfs-diff.tar"
)

// Pod is pod.json.
type Pod struct {
	Version        int         `json:"version"`
	Engine         string      `json:"engineVersion"`
	Handler        string      `json:"handler"` // in force, never empty
	Namespaces     string      `json:"namespaces"`
	CheckpointedAt time.Time   `json:"checkpointedAt"`
	Containers     []Container `json:"containers"`
}

// Container is one of a pod's, with what a restore compares to its request.
type Container struct {
	Name    string  `json:"name"`
	ImageID string  `json:"imageID"`
	Process Process `json:"process"`
}

// Process is what a container's init was started as.
type Process struct {
	Args []string `json:"args"`
	Env  []string `json:"env"`
	Cwd  string   `json:"cwd"`
	UID  uint32   `json:"uid"`
	GID  uint32   `json:"gid"`
}

// Images is the directory of CRIU's images of the container at index i.
func Images(dir string, i int) string { return filepath.Join(containerDir(dir, i), imagesDir) }

// RootfsDiff is the file with the writable layer of the container at index i.
func RootfsDiff(dir string, i int) string { return filepath.Join(containerDir(dir, i), rootfsFile) }

func containerDir(dir string, i int) string {
	return filepath.Join(dir, podDir, strconv.Itoa(i))
}

// Begin makes the directories of n containers in the empty directory dir.
func Begin(dir string, n int) error {
	for i := range n {
		if err := os.MkdirAll(containerDir(dir, i), 0o700); err != nil {
			return fmt.Errorf("begin checkpoint: %w", err)
		}
	}
	return nil
}

// Finish writes pod.json, which makes the directory a checkpoint.
func Finish(dir string, p Pod) error {
	p.Version = podVersion
	data, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("finish checkpoint: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, podFile), data, 0o600); err != nil {
		return fmt.Errorf("finish checkpoint: %w", err)
	}
	return nil
}

// Made is what Begin and Finish make in a directory, in the order in which it is to be
// removed: what makes it a checkpoint goes first.
func Made(dir string) []string {
	return []string{filepath.Join(dir, podFile), filepath.Join(dir, podDir)}
}

// Read reads and checks the pod.json of a directory. ErrInvalid. Files are not
// looked at; Open opens them.
func Read(dir string) (*Pod, error) {
	f, err := Open(dir, filepath.Join(dir, podFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s has no %s", ErrInvalid, dir, podFile)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxPodFile+1))
	if err != nil {
		return nil, fmt.Errorf("read checkpoint: %w", err)
	}
	if len(data) > maxPodFile {
		return nil, fmt.Errorf("%w: %s is larger than %d bytes", ErrInvalid, podFile, maxPodFile)
	}
	p := &Pod{}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(p); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrInvalid, podFile, err)
	}
	if p.Version != podVersion {
		return nil, fmt.Errorf("%w: its version is %d, this berth reads %d", ErrInvalid, p.Version, podVersion)
	}
	if len(p.Containers) == 0 {
		return nil, fmt.Errorf("%w: it has no containers", ErrInvalid)
	}
	seen := map[string]bool{}
	for _, c := range p.Containers {
		if c.Name == "" || seen[c.Name] {
			return nil, fmt.Errorf("%w: the container name %q is empty or there twice", ErrInvalid, c.Name)
		}
		seen[c.Name] = true
	}
	return p, nil
}

// Open opens a regular file of a checkpoint for reading. A symlink on the way
// below dir is refused, and what is no regular file: a checkpoint made elsewhere
// must not lead to the node's own files. ErrInvalid; fs.ErrNotExist.
func Open(dir, path string) (*os.File, error) {
	rel, err := filepath.Rel(dir, path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	top, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(top)
	fd, err := unix.Openat2(top, rel, &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		if err == unix.ELOOP || err == unix.EXDEV {
			return nil, fmt.Errorf("%w: %s leads through a symlink or out of it", ErrInvalid, path)
		}
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		f.Close()
		return nil, fmt.Errorf("%w: %s is no regular file", ErrInvalid, path)
	}
	return f, nil
}

// CopyImages copies CRIU's images of the container at index i to the new
// directory to, mode 0700. Only regular files are taken.
func CopyImages(dir string, i int, to string) error {
	entries, err := os.ReadDir(Images(dir, i))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if err := os.Mkdir(to, 0o700); err != nil {
		return fmt.Errorf("copy checkpoint: %w", err)
	}
	for _, e := range entries {
		if err := copyFile(dir, filepath.Join(Images(dir, i), e.Name()), filepath.Join(to, e.Name())); err != nil {
			return fmt.Errorf("copy checkpoint: %w", err)
		}
	}
	return nil
}

func copyFile(dir, from, to string) error {
	in, err := Open(dir, from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	return err
}
