package registries

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"slices"
	"time"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
)

// place is an endpoint as the configuration has it, before anything is loaded
// for it.
type place struct {
	host       string // with port, as written; docker.io is docker.io
	scheme     string // empty: https, or if insecure what works
	path       string // of the API, usually /v2
	repository string
	namespace  string // sent as ns, for proxies of several registries; may be empty
	insecure   bool
	header     http.Header
	tls        tlsFiles
	dial       time.Duration // 0: the default
	noTags     bool          // asked for digests only
	noBlobs    bool          // asked for manifests of tags only
}

// places finds where a name can be fetched, in order, the upstream last, and
// whether a hosts.toml says so.
func (c Config) places(named reference.Named) (_ []place, byHosts bool, _ error) {
	sys, err := c.reload()
	if err != nil {
		return nil, false, err
	}
	entry, err := sysregistriesv2.FindRegistry(sys, named.Name())
	if err != nil {
		return nil, false, fmt.Errorf("%w: %v", ErrConfig, err)
	}
	hosts, err := c.hostsFor(reference.Domain(named))
	if err != nil {
		return nil, false, err
	}
	switch {
	case entry != nil && hosts != nil && !hosts.isDefault:
		return nil, false, fmt.Errorf("%w: %s is configured twice, in %s and with the prefix %q in registries.conf (%s): one must go",
			ErrConfig, reference.Domain(named), hosts.file, entry.Prefix, sysregistriesv2.ConfigurationSourceDescription(sys))
	case entry != nil:
		list, err := fromRegistry(entry, named, sysregistriesv2.ConfigurationSourceDescription(sys))
		return list, false, err
	case hosts != nil:
		list, err := hosts.places(named)
		return list, true, err
	}
	return []place{{host: reference.Domain(named), path: "/v2", repository: reference.Path(named)}}, false, nil
}

// fromRegistry translates an entry of registries.conf.
func fromRegistry(r *sysregistriesv2.Registry, named reference.Named, where string) ([]place, error) {
	if r.Blocked {
		return nil, fmt.Errorf("%w: %s is blocked by the prefix %q in registries.conf (%s)", ErrConfig, named.Name(), r.Prefix, where)
	}
	sources, err := r.PullSourcesFromReference(named)
	if err != nil {
		return nil, fmt.Errorf("%w: prefix %q in registries.conf (%s): %v", ErrConfig, r.Prefix, where, err)
	}
	var list []place
	for _, p := range sources {
		list = append(list, place{
			host: reference.Domain(p.Reference), path: "/v2", repository: reference.Path(p.Reference),
			insecure: p.Endpoint.Insecure, namespace: p.Endpoint.NamespaceProxy,
		})
	}
	return list, nil
}

// connect makes the endpoint of a place: certificates, login, client.
func (s *Source) connect(ctx context.Context, p place) (*endpoint, error) {
	e := &endpoint{
		name: p.host + "/" + p.repository, place: p, address: p.host,
		idle: s.config.Idle, pause: s.config.Pause, hidden: &s.hidden, turn: make(chan struct{}, 1),
	}
	if p.host == "docker.io" {
		e.address = dockerHub
	}
	conf := &tls.Config{InsecureSkipVerify: p.insecure, MinVersion: tls.VersionTLS12}
	if err := s.config.loadTLS(p, conf); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	for _, values := range p.header {
		s.hidden.add(values...)
	}
	switch login, err := s.loginFor(ctx, p); {
	case err != nil:
		return nil, err
	default:
		e.login = login
		s.hidden.add(login.Password, login.IdentityToken, login.RegistryToken)
	}
	e.client = newClient(e, conf)
	return e, nil
}

// loginFor chooses who asks: the caller, when its login is meant for this
// endpoint, else whom the auth file says.
func (s *Source) loginFor(ctx context.Context, p place) (Login, error) {
	if s.caller.fits(p.host, reference.Domain(s.named)) {
		return s.caller.Login, nil
	}
	return s.config.storedLogin(ctx, p.host, p.host+"/"+p.repository)
}

// candidates are the endpoints that may be asked for something, those that were
// told to wait at the end.
func (s *Source) candidates(allowed func(*endpoint) bool) []*endpoint {
	var list []*endpoint
	for _, e := range s.endpoints {
		if allowed(e) {
			list = append(list, e)
		}
	}
	slices.SortStableFunc(list, func(a, b *endpoint) int { return a.readyAt().Compare(b.readyAt()) })
	return list
}
