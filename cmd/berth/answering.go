package main

import (
	"context"
	"errors"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"berth/image"
	"berth/oci/monitor"
	"berth/runtime/config"
	"berth/sandbox/outside"
)

// answering finds a key whose files and directories do not answer in their time:
// whoever read one would hang, and could not even be ended. It comes before all other
// looks at a configuration.
func answering(c config.Config) config.Problems {
	binary, err := monitorBinary(c)
	if err != nil {
		return nil // which checkNode says
	}
	l := outside.New(outside.Options{Command: []string{binary, "look"}, Limit: time.Duration(c.Runtime.HostPathTimeout),
		LimitKey: "runtime.host_path_timeout", Whereabouts: monitor.Whereabouts})
	defer l.Close()
	return unanswered(l, c)
}

// unanswered refuses the first of them: each takes its time. What files name that
// have answered is asked for then.
func unanswered(l *outside.Looker, c config.Config) (p config.Problems) {
	named := namedPaths(c)
	for _, key := range slices.Sorted(maps.Keys(named)) {
		err := l.Answer(context.Background(), named[key]...)
		if errors.Is(err, context.DeadlineExceeded) { // of the rest, those who read them speak
			p.Refuse(key, "%v", err)
			return p
		}
	}
	for _, in := range []struct {
		key   string
		named map[string][]string
	}{
		{"image.policy", image.NamedByPolicies(c.Image.Policy, "")},
		{"image.policy_dir", image.NamedByPolicies("", c.Image.PolicyDir)},
		{"image.hosts_dir", image.NamedByHosts(c.Image.HostsDir)},
	} {
		for _, file := range slices.Sorted(maps.Keys(in.named)) {
			if err := l.Answer(context.Background(), in.named[file]...); errors.Is(err, context.DeadlineExceeded) {
				p.Refuse(in.key, "named in %s: %v", file, err)
				return p
			}
		}
	}
	return nil
}

// namedPaths are the files and directories that each key of a configuration names and
// that somebody else than berth writes.
func namedPaths(c config.Config) map[string][]string {
	named := map[string][]string{
		"image.registries_conf": {c.Image.RegistriesConf}, "image.hosts_dir": {c.Image.HostsDir}, "image.certs_dir": {c.Image.CertsDir},
		"image.auth_file": {c.Image.AuthFile}, "image.policy": {c.Image.Policy}, "image.policy_dir": {c.Image.PolicyDir},
		"image.registries_dir": {c.Image.RegistriesDir}, "image.preload_dir": {c.Image.PreloadDir},
		"cni.conf_dir": {c.CNI.ConfDir}, "cni.conf_template": {c.CNI.ConfTemplate}, "cni.bin_dirs": c.CNI.BinDirs,
		"runtime.cdi_dirs":   c.Runtime.CDIDirs,
		"streaming.tls_cert": {c.Streaming.TLSCert}, "streaming.tls_key": {c.Streaming.TLSKey},
		"nri.plugin_path": {c.NRI.PluginPath}, "nri.plugin_config_path": {c.NRI.PluginConfigPath},
	}
	if c.Image.RegistriesConf != "" {
		named["image.registries_conf"] = append(named["image.registries_conf"], c.Image.RegistriesConf+".d")
	}
	for name, h := range c.Runtime.Handlers {
		named[config.HandlerKey(name, "base_spec")] = []string{h.BaseSpec}
		named[config.HandlerKey(name, "cni_conf_dir")] = []string{h.CNIConfDir}
		if program, err := lookPath(h.Path); err == nil {
			named[config.HandlerKey(name, "path")] = []string{program}
		}
	}
	return named
}

// lookPath is exec.LookPath of what has no slash; the rest is its own path.
func lookPath(name string) (string, error) {
	if filepath.Base(name) != name {
		return name, nil
	}
	return exec.LookPath(name)
}
