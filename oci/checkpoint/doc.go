// Package checkpoint is the form that checkpoints have on disk: the archive of
// one container, and the directory of a whole pod.
//
// It owns names, bounds and the order of writing. It does not own the state of
// the processes (CRIU's, by way of the OCI runtime), the packing of the writable
// layer (image/layer), nor what may be taken from a checkpoint (the flows in
// package runtime).
//
// An archive is an OCI image layout in a tar, with one manifest of one layer.
// The layer has, by the names that other tools of the field look for:
//
//	checkpoint/        CRIU's images
//	spec.dump          the container's OCI specification
//	config.dump        which container and image it was, see Config
//	rootfs-diff.tar    the writable layer, as an OCI layer
//	dump.log           CRIU's log
//
// A pod's directory has pod.json, written last, and for each container, by its
// place in pod.json:
//
//	containers/<n>/checkpoint/
//	containers/<n>/rootfs-diff.tar
//
// Nothing in a checkpoint is believed but the state of processes and files:
// whoever reads one takes mounts, devices, names and limits from elsewhere.
package checkpoint
