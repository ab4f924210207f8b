package registries

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A FIFO, a device or a file without an end in place of any file that a pull reads
// is refused with its name, at once.
func TestNoFileHoldsAPullUp(t *testing.T) {
	for name, c := range map[string]Config{
		"registries.conf": {}, "registries.conf.d/x.conf": {}, "hosts/r.test/hosts.toml": {HostsDir: "hosts"},
		"hosts/r.test/ca.crt": {HostsDir: "hosts"}, "certs/r.test/ca.crt": {CertsDir: "certs"},
		"certs/r.test/c.cert": {CertsDir: "certs"}, "certs/r.test/c.key": {CertsDir: "certs"}, "auth.json": {AuthFile: "auth.json"},
	} {
		for kind, put := range map[string]func(path string) error{
			"FIFO":   func(path string) error { return syscall.Mkfifo(path, 0o600) },
			"device": func(path string) error { return os.Symlink("/dev/zero", path) },
			"kernel": func(path string) error { return os.Symlink("/proc/kmsg", path) },
		} {
			dir := t.TempDir()
			at := func(name string) string { return filepath.Join(dir, name) }
			for _, path := range []*string{&c.HostsDir, &c.CertsDir, &c.AuthFile} {
				if *path != "" {
					*path = at(filepath.Base(*path))
				}
			}
			c.RegistriesConf = at("registries.conf")
			file := at(name)
			errs := []error{os.MkdirAll(filepath.Dir(file), 0o700), put(file)}
			if name != "registries.conf" {
				errs = append(errs, os.WriteFile(c.RegistriesConf, nil, 0o600))
			}
			if base, ok := strings.CutSuffix(file, ".key"); ok {
				errs = append(errs, os.WriteFile(base+".cert", nil, 0o600))
			} else if base, ok := strings.CutSuffix(file, ".cert"); ok {
				errs = append(errs, os.WriteFile(base+".key", nil, 0o600))
			}
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			if _, err := hosts(t, c, "r.test/a:1"); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), file+" is no regular file") {
				t.Errorf("%s is a %s: %v", name, kind, err)
			}
		}
	}
}
