package registries

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"berth/sandbox/regular"
)

// CheckConf reads a file as Config.RegistriesConf, with its drop-ins.
func CheckConf(path string) error {
	if path != "" {
		if _, err := os.Stat(path); err != nil {
			return err
		}
	}
	_, err := Config{RegistriesConf: path}.reload()
	return err
}

// CheckHosts reads a directory as Config.HostsDir: every hosts.toml in it, and
// the certificates that they name or that are in a directory without one. An empty
// path is none.
func CheckHosts(dir string) error {
	if dir == "" {
		return nil
	}
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var all []error
	for _, item := range list {
		file := filepath.Join(dir, item.Name(), "hosts.toml")
		data, err := regular.Read(file, regular.Most)
		if errors.Is(err, syscall.ENOTDIR) {
			continue
		}
		if errors.Is(err, fs.ErrNotExist) { // then it is laid out as certs.d
			all = append(all, checkCerts(filepath.Join(dir, item.Name())))
			continue
		}
		if err == nil {
			err = checkHostsFile(data, filepath.Join(dir, item.Name()))
		}
		if err != nil {
			all = append(all, fmt.Errorf("%s: %w", file, err))
		}
	}
	return errors.Join(all...)
}

func checkHostsFile(data []byte, dir string) error {
	host := filepath.Base(dir)
	if trimmed, ok := strings.CutSuffix(host, "_"); ok && strings.Contains(trimmed, "_") {
		i := strings.LastIndex(trimmed, "_")
		host = trimmed[:i] + ":" + trimmed[i+1:]
	}
	h, err := parseHosts(data, dir, host)
	if err != nil {
		return err
	}
	for _, s := range h.servers {
		if err := s.tls.load(&tls.Config{}); err != nil {
			return fmt.Errorf("host %q: %w", s.host, err)
		}
	}
	return nil
}

// CheckCerts reads a directory as Config.CertsDir: each certificate and key of each
// host. A directory that is not there, and an empty path, are none.
func CheckCerts(dir string) error {
	if dir == "" {
		return nil
	}
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var all []error
	for _, item := range list {
		at := filepath.Join(dir, item.Name())
		if info, err := os.Stat(at); err != nil {
			all = append(all, err)
		} else if info.IsDir() {
			all = append(all, checkCerts(at))
		}
	}
	return errors.Join(all...)
}

// checkCerts tells of every file of one host that a pull could not use.
func checkCerts(dir string) error {
	var files tlsFiles
	all := []error{files.scan(dir)}
	for _, path := range files.authorities {
		all = append(all, (&tlsFiles{authorities: []string{path}}).load(&tls.Config{}))
	}
	for _, pair := range files.pairs {
		all = append(all, (&tlsFiles{pairs: [][2]string{pair}}).load(&tls.Config{}))
	}
	return errors.Join(all...)
}

// CheckAuthFile reads a file as Config.AuthFile. The error has nothing of a
// login. An empty path is none.
func CheckAuthFile(path string) error {
	if path == "" {
		return nil
	}
	_, err := readAuthFile(path)
	return err
}
