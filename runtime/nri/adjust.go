package nri

import (
	"errors"
	"fmt"
	"slices"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/runtime-tools/generate"
	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
)

// adjust changes a specification as plugins asked. What berth cannot do is an
// error, never left out in silence.
func (p *Plugins) adjust(sp *rspec.Spec, a *api.ContainerAdjustment) (Adjusted, error) {
	if a.Strip() == nil { // the adaptation answers with an empty one
		return Adjusted{}, nil
	}
	linux := a.GetLinux()
	if err := checkClasses(linux.GetResources()); err != nil {
		return Adjusted{}, err
	}
	if len(a.GetCDIDevices()) > 0 && p.InjectCDI == nil {
		return Adjusted{}, errors.New("CDI devices are not supported")
	}
	// A plugin's limit takes the place of the container's own: OCI refuses two of a kind.
	if sp.Process != nil {
		sp.Process.Rlimits = slices.DeleteFunc(sp.Process.Rlimits, func(l rspec.POSIXRlimit) bool {
			return slices.ContainsFunc(a.GetRlimits(), func(r *api.POSIXRlimit) bool { return r.GetType() == l.Type })
		})
	}
	e := newEditor(sp)
	g := generate.SpecGenerator(e, generate.WithCDIDeviceInjector(p.InjectCDI))
	if err := g.Adjust(a); err != nil {
		return Adjusted{}, fmt.Errorf("apply adjustments: %w", err)
	}
	if n := linux.GetSeccompPolicy().GetDefaultErrno(); n != nil { // the generator forgets it
		errno := uint(n.GetValue())
		sp.Linux.Seccomp.DefaultErrnoRet = &errno
	}
	r := linux.GetResources()
	if m := r.GetMemory(); m != nil { // of these the generator sets the limit alone
		setMore(e.memory(), m)
		set(&e.memory().Swap, m.GetSwap().Get())
	}
	out := Adjusted{Any: true}
	limits, err := toCRI(r)
	if err == nil && proto.Size(limits) > 0 {
		out.Resources = limits
	}
	return out, err
}
