package registries

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"
	"go.podman.io/storage/pkg/configfile"

	"berth/sandbox/regular"
)

// Config says where a node's configuration of registries is. The zero value of
// each field means its default.
type Config struct {
	RegistriesConf string        // containers-registries.conf(5), drop-ins in <path>.d; the system's own
	HostsDir       string        // directory of containerd's hosts.toml files; none
	CertsDir       string        // certs.d; /etc/containers/certs.d and /etc/docker/certs.d
	AuthFile       string        // containers-auth.json(5); none
	Idle           time.Duration // an endpoint that sends nothing for so long is given up; 60 s
	Pause          time.Duration // before an endpoint is asked once more, doubled each time; 250 ms
	// Answer tells whether files answer that are about to be run, in time; nil: all do.
	Answer func(ctx context.Context, paths ...string) error
}

// agent is what this client calls itself.
const agent = "berth"

// nowhere is no file and never will be. The library is given it instead of
// files of root's own, which are not the node's configuration.
const nowhere = "/proc/none"

func (c Config) withDefaults() Config {
	if c.Idle <= 0 {
		c.Idle = time.Minute
	}
	if c.Pause <= 0 {
		c.Pause = 250 * time.Millisecond
	}
	return c
}

// system is the library's form of where registries.conf is.
func (c Config) system() *types.SystemContext {
	sys := &types.SystemContext{
		SystemRegistriesConfPath:   c.RegistriesConf,
		UserShortNameAliasConfPath: nowhere,
	}
	if c.RegistriesConf != "" {
		sys.SystemRegistriesConfDirPath = c.RegistriesConf + ".d"
	}
	return sys
}

// reload reads registries.conf anew. The library would keep what it read first.
func (c Config) reload() (*types.SystemContext, error) {
	if err := c.checkFiles(); err != nil {
		return nil, fmt.Errorf("%w: read registries.conf: %w", ErrConfig, err)
	}
	sys := c.system()
	if _, err := sysregistriesv2.TryUpdatingCache(sys); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrConfig, err)
	}
	return sys, nil
}

// checkFiles refuses files for which the library would wait, with all that wait for
// the library. Whether they are there, and what they say, is for the library.
func (c Config) checkFiles() error {
	sys := c.system()
	paths, err := configfile.GetSearchPaths(&configfile.File{
		Name: "registries", Extension: "conf", EnvironmentName: "CONTAINERS_REGISTRIES_CONF",
		CustomConfigFilePath: sys.SystemRegistriesConfPath, CustomConfigFileDropInDirectory: sys.SystemRegistriesConfDirPath,
	})
	if err != nil {
		return err
	}
	files := append(paths.MainFiles, paths.ExtraOverrideFile)
	for _, dir := range paths.DropInDirectories {
		list, _ := os.ReadDir(dir)
		for _, item := range list {
			if !item.IsDir() && filepath.Ext(item.Name()) == ".conf" {
				files = append(files, filepath.Join(dir, item.Name()))
			}
		}
	}
	for _, file := range files {
		if err := regular.Check(file, regular.Most); errors.Is(err, regular.ErrNot) {
			return err
		}
	}
	return nil
}
