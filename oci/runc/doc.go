// Package runc drives runc, crun or any binary with the same command line and
// implements oci.Runtime with it.
//
// It owns the command lines, the reading of their failures, execs and the
// removal of what a failed create leaves. It does not own the processes: the
// node's monitor is their parent (oci/monitor), and they are signalled by pidfd
// and by cgroup. The binary is spawned for create (by the monitor), start, exec,
// update, delete, features and version; never for state, kill or delete --force.
//
// On disk: the binary's own state below Options.Root, one directory a container;
// in a bundle init.pid and runtime.log while a create runs.
//
// An exec is one `exec --detach`: the process gets its pipes directly and falls
// to the daemon, its subreaper. It runs in a cgroup of its own below the
// container's, so that all that it started can be found.
package runc
