package network

import (
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// ErrGC: GC has not succeeded; what it should have removed may be left.
var ErrGC = errors.New("collect what is left of pod networks")

// GC runs CNI's GC of the loaded network: its plugins remove every attachment
// that is not of a pod in keep (ids), also those that another runtime has made. It
// does nothing where the network does not know the verb (before version 1.1.0) or
// forbids it (disableGC), or where there is no network. No Setup may be under way,
// as GC would remove what it makes. It blocks for at most Options.Timeout.
// Errors: ErrGC.
func (m *Manager) GC(ctx context.Context, keep []string) error {
	m.check()
	m.mu.Lock()
	list := m.loaded.list
	m.mu.Unlock()
	if list == nil || !knows(list, "1.1.0") {
		return nil
	}
	args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}}
	for _, id := range keep {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: id, IfName: IfName})
	}
	ctx, cancel := context.WithTimeout(ctx, m.o.Timeout)
	defer cancel()
	err := m.answer(ctx, list)
	if err == nil {
		err = m.cni.GCNetworkList(ctx, list, args)
	}
	if err != nil {
		return fmt.Errorf("%w: network %q: %w", ErrGC, list.Name, pluginErrorOf(err))
	}
	return nil
}

// knows reports whether a network is of a version of CNI or a later one.
func knows(list *libcni.NetworkConfigList, since string) bool {
	ok, err := version.GreaterThanOrEqualTo(list.CNIVersion, since)
	return err == nil && ok
}
