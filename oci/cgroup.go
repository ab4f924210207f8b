package oci

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// ErrCgroupPath: a cgroup's path or a slice's name that means no cgroup.
var ErrCgroupPath = errors.New("not a cgroup path")

// CgroupDir is the directory, below each hierarchy's mount, of what a
// specification's cgroupsPath names: a path, or "slice:prefix:name" where
// systemd makes the cgroup, which it calls prefix-name.scope in the slice.
// ErrCgroupPath.
func CgroupDir(cgroupsPath string) (string, error) {
	if !strings.Contains(cgroupsPath, ":") {
		dir := path.Clean("/" + cgroupsPath)
		if dir == "/" {
			return "", fmt.Errorf("%w: %q is the root", ErrCgroupPath, cgroupsPath)
		}
		return dir, nil
	}
	part := strings.Split(cgroupsPath, ":")
	if len(part) != 3 || part[1] == "" || part[2] == "" || strings.ContainsAny(part[1]+part[2], "/") {
		return "", fmt.Errorf("%w: %q is not slice:prefix:name", ErrCgroupPath, cgroupsPath)
	}
	slice, err := SliceDir(part[0])
	if err != nil {
		return "", err
	}
	return slice + "/" + part[1] + "-" + part[2] + ".scope", nil
}

// SliceDir is the directory of a systemd slice, whose name spells its parents:
// a-b.slice is /a.slice/a-b.slice (systemd.slice(5)). ErrCgroupPath, also for
// the root slice.
func SliceDir(name string) (string, error) {
	stem, ok := strings.CutSuffix(name, ".slice")
	if !ok || strings.Contains(name, "/") {
		return "", fmt.Errorf("%w: %q is no slice's name", ErrCgroupPath, name)
	}
	dir, above := "", ""
	for _, part := range strings.Split(stem, "-") {
		if part == "" {
			return "", fmt.Errorf("%w: slice %q has an empty part between its dashes", ErrCgroupPath, name)
		}
		above += part
		dir += "/" + above + ".slice"
		above += "-"
	}
	return dir, nil
}
