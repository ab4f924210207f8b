package runtime

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go/features"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/rootfs"
	"berth/oci/spec"
	"berth/sandbox/namespaces"
)

// abilities are what a handler can do on this node. An error says why it cannot.
type abilities struct {
	recursiveReadOnly error
	idMappedMounts    error // of bind mounts, by the OCI runtime
	userNamespaces    error // and a root filesystem in one
	userVolumes       error // and every kind of volume that Kubernetes gives a pod
}

// readFeatures asks every handler's binary and the kernel once what they can do.
func (s *Service) readFeatures(ctx context.Context) {
	kernel := s.kernelAbilities()
	s.handlers, s.abilities = nil, map[string]abilities{}
	for _, name := range slices.Sorted(maps.Keys(s.Handlers)) {
		f, err := s.Handlers[name].Features(ctx)
		if err != nil {
			s.Log.WithError(err).WithField("handler", name).Warn("features of the runtime are unknown")
			f = &features.Features{}
		}
		a := kernel.with(f)
		s.abilities[name] = a
		has := &cri.RuntimeHandlerFeatures{RecursiveReadOnlyMounts: a.recursiveReadOnly == nil, UserNamespaces: a.userVolumes == nil}
		s.handlers = append(s.handlers, &cri.RuntimeHandler{Name: name, Features: has})
		if name == s.Config().Runtime.DefaultHandler {
			s.handlers = append(s.handlers, &cri.RuntimeHandler{Name: "", Features: has})
		}
	}
	s.features = &cri.RuntimeFeatures{SupplementalGroupsPolicy: true, MountOptions: true, UserNamespacesHostNetwork: true}
}

// kernelAbilities tries what the kernel can do, in the places where berth needs it.
func (s *Service) kernelAbilities() abilities {
	var a abilities
	if k := s.Host.Kernel; k.Major < 5 || k.Major == 5 && k.Minor < 12 {
		a.recursiveReadOnly = fmt.Errorf("kernel %d.%d has no recursive mount attributes", k.Major, k.Minor)
	}
	userNS, err := namespaces.OpenUser(*namespaceIDs(probeIDs))
	if err != nil {
		a.idMappedMounts, a.userNamespaces, a.userVolumes = err, err, err
		return a
	}
	defer userNS.Close()
	if err := searchable(s.Config().State); err != nil {
		a.userNamespaces, a.userVolumes = err, err
		return a
	}
	// Layers may lie on a disk of their own.
	if err := rootfs.CheckIDMap(filepath.Join(s.Config().Root, "images"), userNS); err != nil {
		a.userNamespaces, a.userVolumes = err, err
		return a
	}
	// Secrets and tokens are on a tmpfs; nearly every pod of a kubelet has some.
	a.userVolumes = rootfs.CheckIDMapTmpfs(userNS)
	return a
}

// searchable wants root of a pod's user namespace, who is just another user of the
// node, to reach the root filesystems below a directory.
func searchable(dir string) error {
	for ; dir != "/"; dir = filepath.Dir(dir) {
		st, err := os.Stat(dir)
		if err != nil {
			return fmt.Errorf("look at directory: %w", err)
		}
		if st.Mode()&0o001 == 0 {
			return fmt.Errorf("other users cannot search directory %s", dir)
		}
	}
	return nil
}

// with takes away what the OCI runtime lacks.
func (a abilities) with(f *features.Features) abilities {
	if !slices.Contains(f.MountOptions, "rro") {
		a.recursiveReadOnly = errLacks("mount option rro")
	}
	var m features.Linux
	if f.Linux != nil {
		m = *f.Linux
	}
	if m.MountExtensions == nil || m.MountExtensions.IDMap == nil || m.MountExtensions.IDMap.Enabled == nil || !*m.MountExtensions.IDMap.Enabled {
		err := errLacks("id-mapped mounts")
		a.idMappedMounts, a.userNamespaces, a.userVolumes = err, err, err
	}
	if !slices.Contains(m.Namespaces, "user") {
		err := errLacks("user namespaces")
		a.userNamespaces, a.userVolumes = err, err
	}
	return a
}

func errLacks(what string) error { return fmt.Errorf("the OCI runtime knows no %s", what) }

// checkUserNamespace refuses a user namespace where none can be made.
func (s *Service) checkUserNamespace(req *cri.RunPodSandboxRequest) error {
	ids, err := spec.SandboxIDMap(req.GetConfig())
	if err != nil || ids == nil {
		return err
	}
	handler, err := s.handlerName(req.GetRuntimeHandler())
	if err != nil {
		return err
	}
	if err := s.abilities[handler].userNamespaces; err != nil {
		return spec.Unsupported("config.linux.security_context.namespace_options.userns_options.mode", cri.NamespaceMode_POD, err.Error())
	}
	return nil
}

// checkAbilities refuses mounts that the handler cannot make.
func (s *Service) checkAbilities(handler string, config *cri.ContainerConfig) error {
	a := s.abilities[handler]
	for i, m := range config.GetMounts() {
		if m.GetRecursiveReadOnly() && a.recursiveReadOnly != nil {
			return spec.Unsupported(fmt.Sprintf("%s: mounts[%d].recursive_read_only", spec.RROUnsupported, i), true, a.recursiveReadOnly.Error())
		}
		if len(m.GetUidMappings()) > 0 && a.idMappedMounts != nil {
			return spec.Unsupported(fmt.Sprintf("mounts[%d].uidMappings", i), "", a.idMappedMounts.Error())
		}
	}
	return nil
}
