// Package sandbox keeps the records of pod sandboxes and containers: their
// types, the durable store and the states derived from them.
//
// It does not run, mount or connect anything. A record is written before the
// first side effect it speaks of, and removed after the last one is undone, so
// whatever a crash leaves behind is named by a record.
//
// Terms: a record is one object's facts; its name is the metadata a kubelet
// gave it (name, namespace, uid, attempt), its id is berth's. State is never
// stored: it follows from the times in the record and from the boot id.
//
// On disk, below the root directory:
//
//	sandboxes/<id>/sandbox.json       beside resolv.conf, hosts, hostname
//	containers/<id>/container.json    beside upper/ and work/
//	trash/                            what is being deleted; emptied at start
//	quarantine/                       records that cannot be read, moved aside
//
// A record is JSON with a version and a checksum, replaced by rename. Only the
// first write of a sandbox is synced to the disk: after a power cut every
// container is dead anyway, but CNI must still be told to release what a pod had.
package sandbox

import "errors"

// Sentinels of the package; test with errors.Is.
var (
	// ErrNotFound: no object has that id.
	ErrNotFound = errors.New("not found")
	// ErrNameInUse: another object has that name.
	ErrNameInUse = errors.New("name in use")
	// ErrAmbiguous: a shortened id fits several objects.
	ErrAmbiguous = errors.New("ambiguous id")
)
