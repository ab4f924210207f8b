package registries

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"berth/sandbox/regular"
	"berth/sandbox/regular/keypair"
)

// tlsFiles are what a configuration names besides certs.d.
type tlsFiles struct {
	authorities []string
	pairs       [][2]string // certificate, key; may be one file
}

// defaultCertsDirs are looked through in order; the first that has the host counts.
var defaultCertsDirs = []string{"/etc/containers/certs.d", "/etc/docker/certs.d"}

// loadTLS adds to conf the authorities and client certificates for a place.
func (c Config) loadTLS(p place, conf *tls.Config) error {
	files := p.tls
	dirs, err := c.certsDirs(p.host)
	if err != nil {
		return fmt.Errorf("read certificates: %w", err)
	}
	for _, dir := range dirs {
		if err := files.scan(dir); err != nil {
			return err
		}
	}
	return files.load(conf)
}

// certsDirs are the directories with certificates for a host: the one of
// certs.d, and one of the hosts directory that has no hosts.toml.
func (c Config) certsDirs(host string) ([]string, error) {
	roots := defaultCertsDirs
	if c.CertsDir != "" {
		roots = []string{c.CertsDir}
	}
	var dirs []string
	for _, root := range roots {
		dir := filepath.Join(root, host)
		if ok, err := exists(dir); err != nil {
			return nil, err
		} else if ok {
			dirs = append(dirs, dir)
			break
		}
	}
	if c.HostsDir == "" {
		return dirs, nil
	}
	for _, name := range hostsDirs(host) {
		dir := filepath.Join(c.HostsDir, name)
		if ok, err := exists(dir); err != nil {
			return nil, err
		} else if !ok {
			continue
		}
		if ok, err := exists(filepath.Join(dir, "hosts.toml")); err != nil || ok {
			return dirs, err // it names its certificates itself
		}
		return append(dirs, dir), nil
	}
	return dirs, nil
}

func exists(path string) (bool, error) {
	_, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// scan finds the files of a directory laid out as certs.d is.
func (f *tlsFiles) scan(dir string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read certificates: %w", err)
	}
	for _, item := range list {
		path := filepath.Join(dir, item.Name())
		base, ext := strings.TrimSuffix(path, filepath.Ext(path)), filepath.Ext(path)
		other := map[string]string{".cert": ".key", ".key": ".cert"}[ext]
		if other != "" {
			if _, err := os.Stat(base + other); err != nil {
				return fmt.Errorf("read certificates: %s has no %s beside it", path, filepath.Base(base)+other)
			}
		}
		switch ext {
		case ".crt":
			f.authorities = append(f.authorities, path)
		case ".cert":
			f.pairs = append(f.pairs, [2]string{path, base + ".key"})
		}
	}
	return nil
}

func (f *tlsFiles) load(conf *tls.Config) error {
	for _, path := range f.authorities {
		data, err := regular.Read(path, regular.Most)
		if err != nil {
			return fmt.Errorf("read certificate authority: %w", err)
		}
		if conf.RootCAs == nil {
			if conf.RootCAs, err = x509.SystemCertPool(); err != nil {
				return fmt.Errorf("read the system's certificate authorities: %w", err)
			}
		}
		if !conf.RootCAs.AppendCertsFromPEM(data) {
			return fmt.Errorf("read certificate authority: %s holds no certificate", path)
		}
	}
	for _, pair := range f.pairs {
		cert, err := keypair.Read(pair[0], pair[1])
		if err != nil {
			return fmt.Errorf("read client certificate %s: %w", pair[0], err)
		}
		conf.Certificates = append(conf.Certificates, cert)
	}
	return nil
}
