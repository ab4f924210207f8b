// Package runtime answers CRI's RuntimeService and ImageService over gRPC. It
// is the hub: it knows the leaves (sandbox, image, oci, network), puts their
// steps in order, and turns their errors into gRPC codes.
//
// Each RPC has a file named after it; read RunPodSandbox in sandbox_run.go and
// CreateContainer in container_create.go first. A flow that changes something
// runs as an operation (runtime/operation) apart from its caller, writes its
// record before its first effect, and is undone by the same idempotent remove
// that the RPC uses.
//
// Locks: one per object, held for an operation on it; a sandbox's before its
// containers'. Lists and statuses take none and touch neither disk nor runc. NRI
// plugins (runtime/nri, plugins.go) are asked with an object's lock held; what
// they ask of other containers waits for no lock that a plugin's caller holds.
package runtime
