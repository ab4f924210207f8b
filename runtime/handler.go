package runtime

import (
	"fmt"
	"maps"

	"berth/network"
	"berth/oci"
	"berth/oci/spec"
	"berth/runtime/apparmor"
	"berth/sandbox"
)

// handlerName is the name in force for the one of a request: empty means the
// default handler. InvalidArgument when it is not configured.
func (s *Service) handlerName(requested string) (string, error) {
	name := requested
	if name == "" {
		name = s.Config().Runtime.DefaultHandler
	}
	if _, ok := s.Handlers[name]; !ok {
		return "", fmt.Errorf("%w: runtime_handler %q is not configured", errInvalid, requested)
	}
	return name, nil
}

// runtime finds the OCI runtime of an object that exists, by the handler in
// force when it was made.
func (s *Service) runtime(handler string) (oci.Runtime, error) {
	if handler == "" { // a record of a berth that had no name for the default
		handler = s.Config().Runtime.DefaultHandler
	}
	if rt, ok := s.Handlers[handler]; ok {
		return rt, nil
	}
	if rt, ok := s.Retired[handler]; ok {
		return rt, nil
	}
	return nil, fmt.Errorf("%w: handler %q is not configured any more", errPrecondition, handler)
}

// runtimeOf is the OCI runtime of a container; its sandbox may be gone.
func (s *Service) runtimeOf(c *sandbox.Container) (oci.Runtime, error) { return s.runtime(c.Handler) }

// runtimeOfPod is the OCI runtime of a pod's pause and containers.
func (s *Service) runtimeOfPod(sb *sandbox.Sandbox) (oci.Runtime, error) {
	return s.runtime(sb.Runtime)
}

// allRuntimes are the configured and the retired handlers.
func (s *Service) allRuntimes() map[string]oci.Runtime {
	all := maps.Clone(s.Handlers)
	maps.Copy(all, s.Retired)
	return all
}

// specOptions are what the configuration says of a pod's containers.
func (s *Service) specOptions(sb *sandbox.Sandbox) spec.Options {
	h := s.Config().Runtime.Handlers[sb.Runtime]
	profile, problem := s.appArmorDefault()
	return spec.Options{
		AppArmorDefault: profile, AppArmorProblem: problem,
		Capabilities:                 s.Config().Runtime.DefaultCapabilities,
		PrivilegedWithoutHostDevices: h.PrivilegedWithoutHostDevices,
		PrivilegedAllDevicesAllowed:  h.PrivilegedAllDevicesAllowed,
		CgroupWritable:               h.CgroupWritable,
		Base:                         s.BaseSpecs[sb.Runtime],
	}
}

// appArmorDefault is the profile that RuntimeDefault means, or why there is none
// although the node has AppArmor.
func (s *Service) appArmorDefault() (name, problem string) {
	if s.AppArmor == nil {
		return "", ""
	}
	if err := s.AppArmor.Ensure(); err != nil {
		return "", err.Error()
	}
	return apparmor.Name, ""
}

// networkFor finds the network that a pod's handler uses. A pod of a handler that
// is configured no more is taken down all the same: what DEL needs is in its record.
func (s *Service) networkFor(sb *sandbox.Sandbox) *network.Manager {
	if m, ok := s.Networks[sb.Runtime]; ok {
		return m
	}
	return s.Network
}
