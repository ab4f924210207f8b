package config

import "reflect"

// Change is a key whose value is another than before.
type Change struct {
	Key      string
	Old, New string // as TOML; empty: the key is not there (of a handler)
	Live     bool   // taken over; otherwise it waits for a restart
}

// Reload is what a daemon that runs with c goes on with when its files now say
// next: next's live keys, and c's others, with all keys that differ. Next is
// one that Load has returned. The result can be one that no file could have, two
// keys of which one has to wait for the other; then Problems say so.
func (c Config) Reload(next Config) (Config, []Change, error) {
	out := c
	var changes []Change
	wanted := map[string]leaf{}
	for _, l := range leaves(nil, reflect.ValueOf(next)) {
		wanted[l.key] = l
	}
	for _, l := range leaves(nil, reflect.ValueOf(&out).Elem()) {
		w, ok := wanted[l.key]
		delete(wanted, l.key)
		switch {
		case !ok:
			changes = append(changes, Change{Key: l.key, Old: l.text()})
		case !reflect.DeepEqual(l.value.Interface(), w.value.Interface()):
			changes = append(changes, Change{Key: l.key, Old: l.text(), New: w.text(), Live: l.live})
			if l.live {
				l.value.Set(w.value)
			}
		}
	}
	for _, w := range leaves(nil, reflect.ValueOf(next)) {
		if _, added := wanted[w.key]; added {
			changes = append(changes, Change{Key: w.key, New: w.text()})
		}
	}
	return out, changes, out.Check().err()
}
