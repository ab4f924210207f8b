package spec

import (
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
)

// ParseBase reads a runtime handler's base specification: what every container
// of that handler gets beside what its request says. These parts count: hooks,
// annotations, process.env, process.rlimits, mounts, linux.devices,
// linux.resources and linux.intelRdt. Anything else is berth's to decide and is
// refused by name, so that nobody believes in a setting without effect. The
// request wins over the base, the base over the defaults. ErrInvalid.
func ParseBase(data []byte) (*rspec.Spec, error) {
	base := &rspec.Spec{}
	if err := json.Unmarshal(data, base); err != nil {
		return nil, fmt.Errorf("%w: base specification: %w", ErrInvalid, err)
	}
	if key := foreign(base); key != "" {
		return nil, Invalid("base specification: "+key, "", "berth decides this itself; remove it")
	}
	for i, m := range base.Mounts {
		if err := checkAbsolute(fmt.Sprintf("base specification: mounts[%d].destination", i), m.Destination); err != nil {
			return nil, err
		}
	}
	if base.Process != nil {
		for _, entry := range base.Process.Env {
			key, value, _ := strings.Cut(entry, "=")
			if err := checkEnv("base specification: process.env", key, value); err != nil {
				return nil, err
			}
		}
	}
	return base, nil
}

// foreign names a part of a base specification that does not count; empty when
// there is none.
func foreign(base *rspec.Spec) string {
	rest := *base
	rest.Version, rest.Hooks, rest.Annotations, rest.Mounts = "", nil, nil, nil
	if base.Process != nil {
		p := *base.Process
		p.Env, p.Rlimits = nil, nil
		rest.Process = &p
	}
	if base.Linux != nil {
		l := *base.Linux
		l.Devices, l.Resources, l.IntelRdt = nil, nil, nil
		rest.Linux = &l
	}
	data, err := json.Marshal(rest)
	var tree any
	if err != nil || json.Unmarshal(data, &tree) != nil {
		return "(unreadable)"
	}
	return firstSet("", tree)
}

// firstSet is the path of the first value of a JSON tree that is not zero.
func firstSet(at string, tree any) string {
	switch v := tree.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if found := firstSet(strings.TrimPrefix(at+"."+key, "."), v[key]); found != "" {
				return found
			}
		}
		return ""
	case []any:
		if len(v) == 0 {
			return ""
		}
	case nil:
		return ""
	case string:
		if v == "" {
			return ""
		}
	case float64:
		if v == 0 {
			return ""
		}
	case bool:
		if !v {
			return ""
		}
	}
	return at
}

// baseSpec is the handler's base specification as a copy; never nil, nor are its
// parts.
func (b *builder) baseSpec() *rspec.Spec {
	base := &rspec.Spec{}
	if b.in.Options.Base != nil {
		data, err := json.Marshal(b.in.Options.Base)
		if err == nil {
			_ = json.Unmarshal(data, base) // what was read from JSON goes through it again
		}
	}
	if base.Process == nil {
		base.Process = &rspec.Process{}
	}
	if base.Linux == nil {
		base.Linux = &rspec.Linux{}
	}
	if base.Linux.Resources == nil {
		base.Linux.Resources = &rspec.LinuxResources{}
	}
	return base
}

// addBase completes a specification with what only the base has.
func (b *builder) addBase(spec *rspec.Spec) {
	spec.Hooks = b.base.Hooks
	for key, value := range b.base.Annotations {
		if _, ok := spec.Annotations[key]; !ok {
			spec.Annotations[key] = value
		}
	}
	spec.Linux.IntelRdt = b.base.Linux.IntelRdt
	addResources(spec.Linux.Resources, b.base.Linux.Resources)
}

// addResources fills each controller that r says nothing of.
func addResources(r, base *rspec.LinuxResources) {
	if r.CPU == nil {
		r.CPU = base.CPU
	}
	if r.Memory == nil {
		r.Memory = base.Memory
	}
	if r.Pids == nil {
		r.Pids = base.Pids
	}
	if r.BlockIO == nil {
		r.BlockIO = base.BlockIO
	}
	if r.Network == nil {
		r.Network = base.Network
	}
	if r.Rdma == nil {
		r.Rdma = base.Rdma
	}
	if len(r.HugepageLimits) == 0 {
		r.HugepageLimits = base.HugepageLimits
	}
	for key, value := range base.Unified {
		if _, ok := r.Unified[key]; ok {
			continue
		}
		if r.Unified == nil {
			r.Unified = map[string]string{}
		}
		r.Unified[key] = value
	}
}

// baseMounts stand in for default mounts at the same place.
func (b *builder) baseMounts(defaults []rspec.Mount) []rspec.Mount {
	at := map[string]bool{}
	for i := range b.base.Mounts {
		b.base.Mounts[i].Destination = path.Clean(b.base.Mounts[i].Destination)
		at[b.base.Mounts[i].Destination] = true
	}
	kept := slices.DeleteFunc(defaults, func(m rspec.Mount) bool { return at[m.Destination] })
	return append(kept, b.base.Mounts...)
}

// baseRlimits are the configured limits with the base's in place of those of
// the same name.
func (b *builder) baseRlimits(limits []rspec.POSIXRlimit) []rspec.POSIXRlimit {
	for _, own := range b.base.Process.Rlimits {
		i := slices.IndexFunc(limits, func(l rspec.POSIXRlimit) bool { return l.Type == own.Type })
		if i < 0 {
			limits = append(limits, own)
			continue
		}
		limits[i] = own
	}
	return limits
}
