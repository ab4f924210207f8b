package network

import (
	"encoding/json"
	"fmt"
)

// Attachment is a pod that libcni's cache knows, with what Teardown needs.
type Attachment struct {
	Pod    PodNetwork // ID and NetNS alone
	Result *Result
}

// Cached lists the pods that have an address by libcni's cache: from the end of
// ADD until DEL. It is a second copy of what the pods' records have, for those
// whose record is lost. What in the cache cannot be read is left out.
func (m *Manager) Cached() ([]Attachment, error) {
	found, err := m.cni.GetCachedAttachments("")
	if err != nil {
		return nil, fmt.Errorf("read the cache of CNI: %w", err)
	}
	var list []Attachment
	for _, f := range found {
		if f.IfName != IfName {
			continue
		}
		r := &Result{Network: f.Network, Config: f.Config, Args: f.CniArgs, Capabilities: map[string]json.RawMessage{}}
		for name, value := range f.CapabilityArgs {
			if r.Capabilities[name], err = json.Marshal(value); err != nil {
				return nil, fmt.Errorf("read the cache of CNI: capability %s of %s: %w", name, f.ContainerID, err)
			}
		}
		list = append(list, Attachment{Pod: PodNetwork{ID: f.ContainerID, NetNS: f.NetNS}, Result: r})
	}
	return list, nil
}
