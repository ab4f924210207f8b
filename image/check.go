package image

import (
	"berth/image/policy"
	"berth/image/registries"
)

// CheckPolicy reads a file as Options.PolicyPath and tells what is wrong with it.
func CheckPolicy(path string) error {
	return policy.Check(path)
}

// CheckPolicies reads a directory as Options.PolicyDir and tells what is wrong with
// the policies in it.
func CheckPolicies(dir string) error { return policy.CheckDir(dir) }

// NamedByPolicies are the key and certificate files that the policy files name, by
// policy file; "" is no file, or no directory of them.
func NamedByPolicies(file, dir string) map[string][]string {
	return policy.Files{Default: file, Dir: dir}.Named()
}

// NamedByHosts are the certificate and key files that the hosts.toml files of a
// directory name, by that file; "" is none.
func NamedByHosts(dir string) map[string][]string {
	if dir == "" {
		return nil
	}
	return registries.NamedByHosts(dir)
}

// CheckSources reads a directory as Options.RegistriesDir and tells what is wrong
// with it.
func CheckSources(dir string) error {
	_, err := policy.ReadSources(dir)
	return err
}

// CheckRegistries reads a file and its drop-ins as Options.RegistriesConf and
// tells what is wrong with them. What is right counts from the next pull on.
func CheckRegistries(path string) error { return registries.CheckConf(path) }

// CheckHosts reads a directory as Options.HostsDir and tells what is wrong with
// it.
func CheckHosts(dir string) error { return registries.CheckHosts(dir) }

// CheckCerts reads a directory as Options.CertsDir and tells of every certificate and
// key in it that cannot be used.
func CheckCerts(dir string) error { return registries.CheckCerts(dir) }

// CheckAuthFile reads a file as Options.AuthFile and tells what is wrong with
// it. The error has nothing of a login.
func CheckAuthFile(path string) error { return registries.CheckAuthFile(path) }
