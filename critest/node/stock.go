package node

import (
	"errors"

	"berth/critest/images"
	"berth/critest/registry"
)

// Stock is a registry that has the standard images.
type Stock struct {
	*registry.Registry
	Parts  *images.Parts // what images are made of
	Digest string        // of the image that is pulled by digest
}

// OpenStock starts a registry on loopback and fills it. Close ends it.
func OpenStock() (*Stock, error) {
	deps, err := Deps()
	if err != nil {
		return nil, err
	}
	parts, err := images.Load(deps)
	if err != nil {
		return nil, err
	}
	reg, err := registry.Start()
	if err != nil {
		return nil, err
	}
	digest, err := parts.Standard(reg)
	if err != nil {
		return nil, errors.Join(err, reg.Close())
	}
	return &Stock{Registry: reg, Parts: parts, Digest: digest}, nil
}
