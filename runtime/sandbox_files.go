package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox"
	"berth/sandbox/outside"
)

// writePodFiles writes the files that every container of the pod sees as
// /etc/resolv.conf, /etc/hosts and /etc/hostname. They lie beside the record
// and go with it. They belong to the pod's root, so that programs that edit
// them can.
func (s *Service) writePodFiles(ctx context.Context, sb *sandbox.Sandbox) error {
	host := s.Outside.For(ctx)
	files := map[string]func(outside.Host, *sandbox.Sandbox) ([]byte, error){
		"resolv.conf": resolvConf, "hosts": hostsFile, "hostname": hostnameFile,
	}
	for name, content := range files {
		b, err := content(host, sb)
		if err != nil {
			return err
		}
		if err := os.WriteFile(s.podFile(sb.ID, name), b, 0o644); err != nil {
			return fmt.Errorf("write %s of the pod: %w", name, err)
		}
		if err := s.labelFile(sb, s.podFile(sb.ID, name)); err != nil {
			return err
		}
		if ids := podIDs(sb); ids != nil {
			if err := os.Chown(s.podFile(sb.ID, name), int(ids.HostUID(0)), int(ids.HostGID(0))); err != nil {
				return fmt.Errorf("give %s to the pod's root: %w", name, err)
			}
		}
	}
	return nil
}

// resolvConf is the host's file when no DNS configuration was sent; one that
// was sent is taken literally, also when it is empty.
func resolvConf(host outside.Host, sb *sandbox.Sandbox) ([]byte, error) {
	d := sb.Config.Message.GetDnsConfig()
	if d == nil {
		return hostFile(host, "/etc/resolv.conf")
	}
	var b strings.Builder
	if len(d.GetSearches()) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(d.GetSearches(), " "))
	}
	for _, server := range d.GetServers() {
		fmt.Fprintf(&b, "nameserver %s\n", server)
	}
	if len(d.GetOptions()) > 0 {
		fmt.Fprintf(&b, "options %s\n", strings.Join(d.GetOptions(), " "))
	}
	return []byte(b.String()), nil
}

// hostsFile is the host's on the host's network, else a minimal one; the
// kubelet mounts its own over it.
func hostsFile(host outside.Host, sb *sandbox.Sandbox) ([]byte, error) {
	if sb.Namespaces().GetNetwork() == cri.NamespaceMode_NODE {
		return hostFile(host, "/etc/hosts")
	}
	return []byte("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t" + hostnameOf(sb) + "\n"), nil
}

func hostnameFile(_ outside.Host, sb *sandbox.Sandbox) ([]byte, error) {
	if sb.Namespaces().GetNetwork() == cri.NamespaceMode_NODE {
		h, err := os.Hostname()
		if err != nil {
			return nil, fmt.Errorf("read the node's hostname: %w", err)
		}
		return []byte(h + "\n"), nil
	}
	return []byte(hostnameOf(sb) + "\n"), nil
}

// maxHostFile bounds a file of the node's that pods get, in bytes.
const maxHostFile = 16 << 20

// hostFile reads a file of the node; a node without it gives an empty one.
func hostFile(host outside.Host, path string) ([]byte, error) {
	b, err := host.Read(path, maxHostFile)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read the node's file: %w", err)
	}
	return b, nil
}
