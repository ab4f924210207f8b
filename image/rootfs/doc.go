// Package rootfs makes the root filesystem of a container: an overlay mount of
// an image's layers and a writable directory; or, for an image that is mounted
// into a container, an overlay of its layers alone.
//
// It owns the mount and how its options reach the kernel. It does not own the
// layers, and it decides nothing about what a container sees inside.
//
// Terms: lower, one read-only layer; upper, the container's own changes; work,
// overlay's scratch space on the same filesystem as upper; shifted, said of a
// layer whose files show with the ids of a user namespace (an id-mapped mount).
// The files themselves stay as they are and are shared.
//
// Mounts are volatile: the kernel does not write the upper directory back when
// a container syncs or when the mount goes away. Nothing is lost by it that
// was kept before: no container survives a power cut, and its upper directory
// is removed with it, so fsync inside a container's own layer would only cost
// time, and unmounting would wait for the disk.
package rootfs
