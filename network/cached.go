package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"berth/sandbox/regular"
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
	if err := m.cleanCache(); err != nil {
		return nil, err
	}
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

// Forget removes what libcni has cached of a pod that has given its addresses back: a
// disk that was read-only then has kept it. Idempotent.
func (m *Manager) Forget(pod string) error {
	files, err := filepath.Glob(filepath.Join(m.o.CacheDir, "results", "*-"+pod+"-"+IfName))
	for _, f := range files {
		err = errors.Join(err, os.Remove(f))
	}
	if err != nil {
		return fmt.Errorf("clean the cache of CNI: %w", err)
	}
	return nil
}

const maxCached = 64 << 20 // bytes of what is cached of one pod

// cleanCache deletes what libcni, which reads all that is there, could not read to
// its end. Nothing of it is needed but what it has written.
func (m *Manager) cleanCache() error {
	dir := filepath.Join(m.o.CacheDir, "results")
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read the cache of CNI: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if err := regular.Check(path, maxCached); errors.Is(err, regular.ErrNot) {
			if err := os.RemoveAll(path); err != nil {
				return fmt.Errorf("clean the cache of CNI: %w", err)
			}
		}
	}
	return nil
}
