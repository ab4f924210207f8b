// Package apparmor keeps berth's default AppArmor profile in the kernel: the one
// that containers get which ask for RuntimeDefault or for nothing.
//
// It owns the profile of the name Name and no other; profiles of the node's
// administrator (Localhost) are loaded by whoever wrote them. The text is that of
// github.com/moby/profiles, which every runtime uses; apparmor_parser, found in
// PATH, compiles and loads it. The profile stays in the kernel when berth ends:
// containers run under it.
package apparmor

import (
	"fmt"
	"sync"

	profiles "github.com/moby/profiles/apparmor"
)

// Name of the default profile.
const Name = "berth-default"

// Default is the default profile on a node that has AppArmor.
type Default struct {
	install func(name string) error
	loaded  func(name string) (bool, error)

	loading sync.Mutex // held while apparmor_parser runs
	mu      sync.Mutex
	problem error // why it is not in the kernel, guarded by mu
}

// New knows the profile but does not load it.
func New() *Default {
	return &Default{install: profiles.InstallDefault, loaded: profiles.IsLoaded}
}

// Load puts this version's text into the kernel, in place of what is there under
// the name. It runs apparmor_parser and waits for it. After an error an older
// text may be in force; Problem tells whether none is.
func (d *Default) Load() error {
	d.loading.Lock()
	defer d.loading.Unlock()
	return d.load()
}

// load is called with loading held.
func (d *Default) load() error {
	err := d.install(Name)
	if err == nil {
		d.set(nil)
		return nil
	}
	err = fmt.Errorf("load AppArmor profile %s: %w", Name, err)
	if there, listErr := d.loaded(Name); listErr == nil && there {
		d.set(nil)
	} else {
		d.set(err)
	}
	return err
}

func (d *Default) set(problem error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.problem = problem
}

// Ensure sees to it that the profile is there, also after somebody has unloaded
// it, as cleaning tools do. It only reads a list when it is, and waits for a Load
// in progress. Idempotent.
func (d *Default) Ensure() error {
	d.loading.Lock()
	defer d.loading.Unlock()
	if there, err := d.loaded(Name); err == nil && there {
		d.set(nil)
		return nil
	}
	return d.load()
}

// Problem is why the profile was not in the kernel when it was last looked for,
// nil if it was. It waits for nothing.
func (d *Default) Problem() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.problem
}
