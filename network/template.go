package network

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"berth/sandbox/regular"
)

// templateFile is the configuration made from Options.Template. Its name sorts
// before most, so that a node which has it uses it.
const templateFile = "10-berth-net.conflist"

// ErrTemplate: the template cannot be read, or gives no valid configuration.
var ErrTemplate = errors.New("CNI configuration template")

// templateData are the names that a template may use; containerd gives its
// templates the same.
type templateData struct {
	PodCIDR       string   // the first range
	PodCIDRRanges []string // all of them
	Routes        []string // the default route of each family that has a range
}

// ApplyPodCIDR makes the node's network configuration from the template, with
// the given ranges of pod addresses (CIDR, one of each family, separated by a
// comma; bits of a host in them are dropped), and
// returns the file it has written; empty when there was nothing to do: there is no
// template, the file says that already, or another file configures the network,
// which is then its owner's to keep up to date. The file is replaced atomically.
// Idempotent. Errors: ErrInvalid for a range, ErrTemplate.
func (m *Manager) ApplyPodCIDR(cidrs string) (string, error) {
	data, err := parseCIDRs(cidrs)
	if err != nil || m.o.Template == "" {
		return "", err
	}
	m.applying.Lock()
	defer m.applying.Unlock()
	m.check()
	m.mu.Lock()
	used := m.loaded.file
	m.mu.Unlock()
	file := filepath.Join(m.o.ConfDir, templateFile)
	if used != "" && used != file {
		return "", nil
	}
	text, err := render(m.o.Template, m.o.ConfDir, data)
	if err != nil {
		return "", fmt.Errorf("%w %s: %w", ErrTemplate, m.o.Template, err)
	}
	if old, err := regular.Read(file, maxConfig); err == nil && bytes.Equal(old, text) {
		return "", nil
	}
	if err := replaceFile(file, text); err != nil {
		return "", fmt.Errorf("write CNI configuration: %w", err)
	}
	m.check()
	return file, nil
}

// CheckTemplate tells whether a file can be Options.Template: it gives a valid
// configuration for pods with IPv4 addresses, with IPv6 ones, or with both.
func CheckTemplate(file string) error {
	var first error
	for _, cidrs := range []string{"10.0.0.0/24,fd00::/64", "10.0.0.0/24", "fd00::/64"} {
		data, err := parseCIDRs(cidrs)
		if err == nil {
			_, err = render(file, filepath.Dir(file), data)
		}
		if err == nil {
			return nil
		}
		if first == nil {
			first = err
		}
	}
	return fmt.Errorf("%w %s: %w", ErrTemplate, file, first)
}

func parseCIDRs(list string) (templateData, error) {
	var d templateData
	var four, six bool
	for cidr := range strings.SplitSeq(list, ",") {
		prefix, err := netip.ParsePrefix(cidr)
		if err != nil || prefix.Addr().Is4In6() {
			return d, fmt.Errorf("%w: pod_cidr %q: %q is not a range of addresses", ErrInvalid, list, cidr)
		}
		is4 := prefix.Addr().Is4()
		if is4 && four || !is4 && six {
			return d, fmt.Errorf("%w: pod_cidr %q has two ranges of one family", ErrInvalid, list)
		}
		d.PodCIDRRanges = append(d.PodCIDRRanges, prefix.Masked().String())
		four, six = four || is4, six || !is4
	}
	d.PodCIDR = d.PodCIDRRanges[0]
	if four {
		d.Routes = append(d.Routes, "0.0.0.0/0")
	}
	if six {
		d.Routes = append(d.Routes, "::/0")
	}
	return d, nil
}

// render fills the template in and refuses what could not be loaded.
func render(file, confDir string, data templateData) ([]byte, error) {
	text, err := regular.Read(file, maxConfig)
	if err != nil {
		return nil, err
	}
	t, err := template.New(filepath.Base(file)).Parse(string(text))
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := t.Execute(&out, data); err != nil {
		return nil, err
	}
	if _, _, err := parseConfig(out.Bytes(), confDir); err != nil {
		return nil, fmt.Errorf("with %s it gives no valid configuration: %w", strings.Join(data.PodCIDRRanges, ","), err)
	}
	return out.Bytes(), nil
}

// replaceFile writes beside the file, under a name that nobody loads, and renames.
func replaceFile(file string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(file), ".berth-net-*.tmp")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}
