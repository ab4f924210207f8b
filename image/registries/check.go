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
// the certificates that they name. An empty path is none.
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
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
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

// CheckAuthFile reads a file as Config.AuthFile. The error has nothing of a
// login. An empty path is none.
func CheckAuthFile(path string) error {
	if path == "" {
		return nil
	}
	_, err := readAuthFile(path)
	return err
}
