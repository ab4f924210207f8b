// Package cdi puts the devices of the Container Device Interface into OCI
// specifications: what a vendor's file on the node says a named device needs
// (device nodes, mounts, environment, hooks).
//
// It owns the look at the node's CDI files; the format and its rules are those
// of tags.cncf.io/container-device-interface. It does not decide which devices a
// container gets (spec.CDIDevices reads that from the request, never from an
// image) and it writes no file.
//
// Terms: a "CDI file" is a *.json or *.yaml file in one of the directories; of
// two files that define one device, that in the later directory wins, and
// within one directory neither does. A file that cannot be read takes only its
// own devices with it.
package cdi

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	lib "tags.cncf.io/container-device-interface/pkg/cdi"
	format "tags.cncf.io/container-device-interface/specs-go"

	"berth/oci/spec"
)

// Devices looks devices up in the CDI files of some directories.
type Devices struct {
	// mu keeps the errors that a container is told those of its own look.
	mu    sync.Mutex
	dirs  []string   // guarded by mu
	cache *lib.Cache // made at the first look; guarded by mu
}

// Open is a look-up in dirs, which need not exist. Nothing is read before a
// container wants a device, nothing is watched and nothing must be closed.
func Open(dirs []string) *Devices { return &Devices{dirs: dirs} }

// Use looks in other directories from now on.
func (d *Devices) Use(dirs []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Equal(dirs, d.dirs) {
		d.dirs, d.cache = dirs, nil
	}
}

// look reads the CDI files anew. The library would also follow the directories
// itself; a look at each request for a device costs little and misses no change.
func (d *Devices) look() error {
	for _, dir := range d.dirs {
		files, _ := filepath.Glob(filepath.Join(dir, "*"))
		for _, file := range files {
			// The library would wait for the writer of a FIFO.
			info, err := os.Stat(file)
			if ext := filepath.Ext(file); err == nil && (ext == ".json" || ext == ".yaml") && !info.Mode().IsRegular() {
				return spec.Invalid("CDI_devices", "", file+" is no regular file; no CDI file can be read until it is gone")
			}
		}
	}
	var err error
	if d.cache == nil {
		d.cache, err = lib.NewCache(lib.WithSpecDirs(d.dirs...), lib.WithAutoRefresh(false))
	} else {
		// Its error is the list of broken files, which is told where it matters.
		_ = d.cache.Refresh()
	}
	if err != nil {
		return fmt.Errorf("read CDI directories %v: %w", d.dirs, err)
	}
	return nil
}

// Inject adds the named devices to a specification. Without names it does
// nothing; with them it reads the CDI files anew. ErrInvalid of package spec
// when no file defines a device; after an error the specification is of no use.
func (d *Devices) Inject(sp *rspec.Spec, names []string) error {
	if len(names) == 0 {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.look(); err != nil {
		return err
	}
	unknown, err := d.cache.InjectDevices(sp, names...)
	if len(unknown) > 0 {
		return spec.Invalid("CDI_devices", strings.Join(unknown, ","), d.whyUnknown())
	}
	if err != nil {
		return fmt.Errorf("inject CDI devices %s: %w", strings.Join(names, ","), err)
	}
	return nil
}

// HostPaths are the paths on the node of device nodes and mounts that the named
// devices want, read anew. A device that no file defines has none: Inject says so.
func (d *Devices) HostPaths(names []string) (paths []string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.look(); err != nil {
		return nil, err
	}
	for _, name := range names {
		dev := d.cache.GetDevice(name)
		if dev == nil {
			continue
		}
		for _, e := range []*format.ContainerEdits{&dev.ContainerEdits, &dev.GetSpec().ContainerEdits} {
			for _, n := range e.DeviceNodes {
				paths = append(paths, cmp.Or(n.HostPath, n.Path))
			}
			for _, m := range e.Mounts {
				paths = append(paths, m.HostPath)
			}
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths), nil
}

// whyUnknown names the directories, and the files in them that cannot be used.
func (d *Devices) whyUnknown() string {
	text := "no CDI file in " + strings.Join(d.dirs, ", ") + " defines it"
	broken := d.cache.GetErrors()
	for _, path := range slices.Sorted(maps.Keys(broken)) {
		for _, err := range broken[path] {
			text += fmt.Sprintf("; %s: %v", path, err)
		}
	}
	return text
}
