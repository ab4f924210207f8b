package registries

import (
	"fmt"
	"time"

	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"
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
	sys := c.system()
	if _, err := sysregistriesv2.TryUpdatingCache(sys); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrConfig, err)
	}
	return sys, nil
}
