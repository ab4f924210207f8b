// Command guest runs root tests in a virtual machine with cgroup v2, systemd and
// AppArmor, on Debian's own kernel: what the machine at hand may lack.
//
// It owns the machine's image, its processes (qemu and one virtiofsd per shared
// folder), the compiled test programs and the report of what ran. It does not own
// the tests, which are those of the project's packages and of critest/guest/smoke,
// nor the tools in .deps, which the guest sees read-only at the same path.
//
// Terms: image, a kernel, an initramfs and a root filesystem, made once per
// release; snapshot, the state of a booted guest that waits for its script, from
// which every run starts in about a second; cold, booted instead, as kernel
// arguments of one's own need. Without real virtualisation the processor is
// emulated: everything in the guest is five to ten times slower than outside.
//
// Files, below .deps/guest/<release>: vmlinux, initrd, root.img, release (the
// kernel's), stamp (of the scripts that made them), snapshot-* (memory, state and
// disk) and lock. Compiled tests and sockets are in a temporary folder. A run
// writes to neither image nor snapshot.
//
// Usage: guest [FLAG...] PACKAGE_FOLDER...
//
//	guest [FLAG...] -c COMMAND
//
// Flags have defaults in the environment, for use through make: VM_SUITE,
// VM_APPEND, VM_RUN, VM_TIMEOUT, VM_VERBOSE; VM_SLOW is the factor for limits of
// time. `make guest PACKAGES=...` names the packages. Exit status: 0 all passed; 1 a
// test failed, none ran, or there is no guest; with -c, the command's own.
package main
