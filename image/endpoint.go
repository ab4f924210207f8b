package image

import (
	"context"
	"errors"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/blobinfocache/none"
	"go.podman.io/image/v5/types"
)

// endpoint is both references that copy.Image is given: the run's image as it
// was inspected, and the store. It is a transport of its own, known to nobody
// else.
type endpoint struct {
	run  *run
	fail context.CancelCauseFunc // ends the copy
}

// noCacheDir cannot be made, which keeps the library's cache of blob locations
// in memory: it would be a database beside the store, and the store knows.
const noCacheDir = "/dev/null/none"

var (
	noCache      = none.NoCache
	errOnlyPulls = errors.New("the image store is written by pulls only")
)

// Transport of the reference.
func (e *endpoint) Transport() types.ImageTransport { return transport{} }

// StringWithinTransport is for messages.
func (e *endpoint) StringWithinTransport() string { return e.run.id }

// DockerReference is none: the copy must not compare or rewrite names.
func (e *endpoint) DockerReference() reference.Named { return nil }

// PolicyConfigurationIdentity is none: the policy was asked about the real
// source.
func (e *endpoint) PolicyConfigurationIdentity() string { return "" }

// PolicyConfigurationNamespaces are none, see PolicyConfigurationIdentity.
func (e *endpoint) PolicyConfigurationNamespaces() []string { return nil }

// NewImage is not needed for a copy.
func (e *endpoint) NewImage(context.Context, *types.SystemContext) (types.ImageCloser, error) {
	return nil, errOnlyPulls
}

// NewImageSource gives the image that was inspected.
func (e *endpoint) NewImageSource(context.Context, *types.SystemContext) (types.ImageSource, error) {
	return &source{endpoint: e}, nil
}

// NewImageDestination gives the store.
func (e *endpoint) NewImageDestination(context.Context, *types.SystemContext) (types.ImageDestination, error) {
	return &destination{endpoint: e}, nil
}

// DeleteImage is not what a copy does.
func (e *endpoint) DeleteImage(context.Context, *types.SystemContext) error { return errOnlyPulls }

type transport struct{}

func (transport) Name() string { return "berth" }

func (transport) ParseReference(string) (types.ImageReference, error) { return nil, errOnlyPulls }

func (transport) ValidatePolicyConfigurationScope(string) error { return errOnlyPulls }
