package image

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/docker/config"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/pkg/tlsclientconfig"
	"go.podman.io/image/v5/types"

	"berth/image/fetch"
)

const userAgent = "berth"

// endpoints are where a reference's layers may be, in the order to try them:
// its mirrors and the registry itself, as registries.conf says.
func (s *Store) endpoints(sys *types.SystemContext, named reference.Named) ([]fetch.Endpoint, error) {
	registry, err := sysregistriesv2.FindRegistry(sys, named.Name())
	if err != nil {
		return nil, fmt.Errorf("read registries configuration: %w", err)
	}
	if registry == nil {
		registry = &sysregistriesv2.Registry{Endpoint: sysregistriesv2.Endpoint{Location: named.String()}, Prefix: named.String()}
	}
	sources, err := registry.PullSourcesFromReference(named)
	if err != nil {
		return nil, fmt.Errorf("read registries configuration: %w", err)
	}
	var list []fetch.Endpoint
	for _, source := range sources {
		e, err := endpointOf(sys, named, source)
		if err != nil {
			return nil, err
		}
		list = append(list, e)
	}
	return list, nil
}

func endpointOf(sys *types.SystemContext, named reference.Named, source sysregistriesv2.PullSource) (fetch.Endpoint, error) {
	host := reference.Domain(source.Reference)
	if host != reference.Domain(named) {
		// What the caller brings is for the registry, not for its mirrors.
		own := *sys
		own.DockerAuthConfig, own.DockerBearerRegistryToken = nil, ""
		sys = &own
	}
	login, err := config.GetCredentialsForRef(sys, source.Reference)
	if err != nil {
		return fetch.Endpoint{}, fmt.Errorf("read credentials for %s: %w", host, err)
	}
	certs, err := certificates(host)
	if err != nil {
		return fetch.Endpoint{}, err
	}
	e := fetch.Endpoint{
		Host: host, Repository: reference.Path(source.Reference), Insecure: source.Endpoint.Insecure,
		TLS: certs, Namespace: source.Endpoint.NamespaceProxy,
		Credential: fetch.Credential{
			Username: login.Username, Password: login.Password,
			IdentityToken: login.IdentityToken, RegistryToken: sys.DockerBearerRegistryToken,
		},
	}
	if host == "docker.io" {
		e.Host = "registry-1.docker.io"
	}
	return e, nil
}

// certificates reads the first certs.d directory that a host has
// (containers-certs.d(5)).
func certificates(host string) (*tls.Config, error) {
	c := &tls.Config{}
	for _, base := range []string{"/etc/containers/certs.d", "/etc/docker/certs.d"} {
		dir := filepath.Join(base, host)
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := tlsclientconfig.SetupCertificates(dir, c); err != nil {
			return nil, fmt.Errorf("read certificates of %s: %w", host, err)
		}
		break
	}
	return c, nil
}
