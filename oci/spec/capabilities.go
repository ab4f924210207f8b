package spec

import (
	"fmt"
	"slices"
	"strings"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
)

// allCapabilities in the kernel's numbering (capability.h, 0 to 40); lists in
// specifications keep this order.
var allCapabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID",
	"CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP", "CAP_LINUX_IMMUTABLE",
	"CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_IPC_LOCK",
	"CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE",
	"CAP_SYS_PACCT", "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE",
	"CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD", "CAP_LEASE", "CAP_AUDIT_WRITE",
	"CAP_AUDIT_CONTROL", "CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG",
	"CAP_WAKE_ALARM", "CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF",
	"CAP_CHECKPOINT_RESTORE",
}

// CapabilityName is the name of a capability by its number in the kernel, or
// "" for one that this version does not know.
func CapabilityName(number int) string {
	if number < 0 || number >= len(allCapabilities) {
		return ""
	}
	return allCapabilities[number]
}

// DefaultCapabilities is the set of 14 that images have come to expect.
func DefaultCapabilities() []string {
	return []string{
		"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID",
		"CAP_SETUID", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SYS_CHROOT",
		"CAP_MKNOD", "CAP_AUDIT_WRITE", "CAP_SETFCAP",
	}
}

// CheckCapabilities tells which of some names is no capability; they are written
// as Options.Capabilities may have them.
func CheckCapabilities(names []string) error {
	for _, name := range names {
		if _, _, err := parseCapabilities("", []string{name}); err != nil {
			return fmt.Errorf("%q is no capability", name)
		}
	}
	return nil
}

const capabilityFields = security + ".capabilities."

// capabilitySet is a set of capabilities; sorted lists it by number.
type capabilitySet map[string]bool

func (s capabilitySet) sorted() []string {
	var list []string
	for _, name := range allCapabilities {
		if s[name] {
			list = append(list, name)
		}
	}
	return list
}

// parseCapabilities accepts names with or without CAP_, in either case, and ALL.
func parseCapabilities(field string, names []string) (set capabilitySet, all bool, err error) {
	set = capabilitySet{}
	for _, name := range names {
		upper := strings.ToUpper(name)
		if upper == "ALL" || upper == "CAP_ALL" {
			all = true
			continue
		}
		if !strings.HasPrefix(upper, "CAP_") {
			upper = "CAP_" + upper
		}
		if !slices.Contains(allCapabilities, upper) {
			return nil, false, Invalid(field, name, "no such capability")
		}
		set[upper] = true
	}
	return set, all, nil
}

func (b *builder) capabilities() (*rspec.LinuxCapabilities, error) {
	request := b.security.GetCapabilities()
	add, addAll, err := parseCapabilities(capabilityFields+"add_capabilities", request.GetAddCapabilities())
	if err != nil {
		return nil, err
	}
	drop, dropAll, err := parseCapabilities(capabilityFields+"drop_capabilities", request.GetDropCapabilities())
	if err != nil {
		return nil, err
	}
	ambient, ambientAll, err := parseCapabilities(capabilityFields+"add_ambient_capabilities", request.GetAddAmbientCapabilities())
	if err != nil {
		return nil, err
	}
	if ambientAll {
		ambient = capabilitySet{}
		fill(ambient, allCapabilities)
	}
	set, err := b.baseCapabilities(addAll, dropAll)
	if err != nil {
		return nil, err
	}
	if b.privileged() {
		drop = nil
	}
	fill(set, add.sorted())
	fill(set, ambient.sorted())
	for name := range drop {
		delete(set, name)
		delete(ambient, name)
	}
	b.cutToHost(set, ambient)
	return capabilityLists(set, ambient), nil
}

// baseCapabilities is the set that single names are added to and dropped from.
func (b *builder) baseCapabilities(addAll, dropAll bool) (capabilitySet, error) {
	set := capabilitySet{}
	switch {
	case b.privileged():
		fill(set, allCapabilities)
	case dropAll:
	case addAll:
		fill(set, allCapabilities)
	case b.in.Options.Capabilities != nil:
		names, all, err := parseCapabilities("default capabilities", b.in.Options.Capabilities)
		if err != nil {
			return nil, err
		}
		if all {
			fill(names, allCapabilities)
		}
		return names, nil
	default:
		fill(set, DefaultCapabilities())
	}
	return set, nil
}

func fill(set capabilitySet, names []string) {
	for _, name := range names {
		set[name] = true
	}
}

// cutToHost takes out what the daemon does not hold itself: a runtime that is
// told to raise it refuses the whole container.
func (b *builder) cutToHost(set, ambient capabilitySet) {
	if b.in.Host.Capabilities == nil {
		return
	}
	var cut []string
	for _, name := range set.sorted() {
		if !slices.Contains(b.in.Host.Capabilities, name) {
			delete(set, name)
			delete(ambient, name)
			cut = append(cut, name)
		}
	}
	if len(cut) > 0 {
		b.warn("capabilities left out because the daemon lacks them: %s", strings.Join(cut, ", "))
	}
}

// capabilityLists fills the five sets. Inheritable holds nothing but ambient
// capabilities (the kernel wants them there): anything more would let a file
// with inheritable capabilities raise a non-root process (CVE-2022-24769).
func capabilityLists(set, ambient capabilitySet) *rspec.LinuxCapabilities {
	return &rspec.LinuxCapabilities{
		Bounding:    set.sorted(),
		Effective:   set.sorted(),
		Permitted:   set.sorted(),
		Inheritable: ambient.sorted(),
		Ambient:     ambient.sorted(),
	}
}
