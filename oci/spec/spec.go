// Package spec turns a CRI request, an image's configuration and facts about
// the host into an OCI runtime specification.
//
// It owns every rule of that translation: command and environment, users and
// groups, capabilities, mounts and their order, devices, resources, seccomp,
// namespaces, and the refusal of contradictory requests. It is pure: it opens
// no file, reads no clock, draws no randomness, and the same input always gives
// the same output. What needs the machine (users of a rootfs, symlinks, device
// numbers, a seccomp profile's bytes) is gathered beforehand by
// runtime/resolve and handed in as data, the type Resolved.
//
// It does not own the specification's file (oci.WriteBundle) nor anything that
// is done with it (oci/runc). The specification is output only: no other part
// of berth reads it back to learn a fact (NRI plugins are shown it).
//
// Terms: the "config" is the CRI ContainerConfig, the "image" the OCI image
// configuration, a "default mount" is one that every container gets, a
// "requested mount" one of the config's.
//
// Decisions that the CRI leaves open:
//
//   - Command and arguments: the config's command replaces the image's
//     Entrypoint and drops its Cmd; the config's args replace Cmd only.
//   - Masked and read-only paths: protobuf cannot tell an absent list from an
//     empty one. The kubelet sends both lists filled for procMount Default and
//     both empty for Unmasked, and Kubernetes allows Unmasked only in a pod with
//     its own user namespace. So: when either list is filled, both are taken as
//     sent; when both are empty, a pod with a user namespace gets none and any
//     other the OCI defaults. Privileged containers get none.
//   - A user namespace goes with the pod's own PID and IPC namespaces only, and a
//     container that sends namespace options sends its pod's mappings. Users,
//     groups and mounts that cannot work inside are refused: ids that are not
//     mapped, and propagation to the node. A privileged container is allowed: it
//     has every capability over what its user namespace owns, and no other.
//   - An id-mapped mount maps the mount alone, not what is mounted below its source.
//   - A namespace mode POD means "the pod's", so in a host-network pod it is the
//     host's. NODE is refused in a pod that does not have it. A container without
//     namespace options takes those of its sandbox.
//   - An unset seccomp profile is Unconfined, as the CRI says.
//   - AppArmor: nothing asked for means RuntimeDefault. Where that profile is not
//     loaded, a container that asks for RuntimeDefault is refused, one that asks
//     for nothing runs unconfined, with a warning. A host without AppArmor takes
//     RuntimeDefault and refuses a profile by name. Privileged is unconfined.
//   - RuntimeDefault keeps a profile's sub-architectures (x86 and x32 on amd64)
//     although they cost an OCI runtime most of the filter's time: without them
//     libseccomp kills 32-bit programs instead of filtering them.
//   - Container paths are cleaned as text, so ".." never leaves the root.
//   - Dropping wins over adding for one capability; adding wins over dropping ALL.
//   - The primary group is always among the additional groups: otherwise a file's
//     "deny this group" could be escaped by a set-gid program.
//   - Sysctls and the hostname are not in a container's specification: they
//     belong to the pod's pinned namespaces.
//   - The version written is 1.0.2: older crun refuses anything else, and no
//     runtime makes a field depend on it.
package spec

import (
	"errors"
	"fmt"
)

// Version is the specification version written into every spec.
const Version = "1.0.2"

// Sentinels of the package; test with errors.Is.
var (
	// ErrInvalid: the request, or the image it names, asks for something
	// malformed or contradictory. The error is a *FieldError.
	ErrInvalid = errors.New("invalid request")
	// ErrUnsupported: the request is well formed, but berth or this host cannot
	// do it. The error is a *FieldError.
	ErrUnsupported = errors.New("not supported")
)

// FieldError names the part of a request that is refused. Its Unwrap is
// ErrInvalid or ErrUnsupported.
type FieldError struct {
	Field  string // as in the CRI, with its index: mounts[2].container_path
	Value  string // as sent; empty when the field is missing
	Reason string // in plain words
	Kind   error  // ErrInvalid or ErrUnsupported
}

// Error is "field "value": reason".
func (e *FieldError) Error() string {
	if e.Value == "" {
		return fmt.Sprintf("%s: %s", e.Field, e.Reason)
	}
	return fmt.Sprintf("%s %q: %s", e.Field, clip(e.Value), e.Reason)
}

// Unwrap makes errors.Is find the kind.
func (e *FieldError) Unwrap() error { return e.Kind }

// Invalid is a FieldError of kind ErrInvalid. The value is printed as it is.
func Invalid(field string, value any, reason string) error {
	return &FieldError{Field: field, Value: fmt.Sprint(value), Reason: reason, Kind: ErrInvalid}
}

// Unsupported is a FieldError of kind ErrUnsupported.
func Unsupported(field string, value any, reason string) error {
	return &FieldError{Field: field, Value: fmt.Sprint(value), Reason: reason, Kind: ErrUnsupported}
}

// clip keeps a hostile value from filling a log.
func clip(s string) string {
	const most = 256
	if len(s) <= most {
		return s
	}
	return s[:most] + "..."
}
