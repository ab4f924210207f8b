package registries

import (
	"net/url"
	"strings"
)

// Login says who asks. The zero value is nobody.
type Login struct {
	Username, Password string
	// IdentityToken is exchanged for a token at the registry's token service.
	IdentityToken string
	// RegistryToken is sent as bearer token as it is.
	RegistryToken string
}

// Caller is the login that a pull brings. It goes to the endpoints it is meant
// for and to no other.
type Caller struct {
	Login
	// Server is the registry it is for: a host, or a URL with one. Empty: the
	// registry of the image's name.
	Server string
}

// fits says whether the login may be sent to an endpoint's host.
func (c *Caller) fits(host, upstream string) bool {
	if c == nil || c.Login == (Login{}) {
		return false
	}
	if c.Server == "" {
		return canonical(host) == canonical(upstream)
	}
	return canonical(hostOf(c.Server)) == canonical(host)
}

// hostOf is the host of a URL or of a host with a path.
func hostOf(server string) string {
	if strings.Contains(server, "://") {
		u, err := url.Parse(server)
		if err != nil {
			return ""
		}
		return u.Host
	}
	host, _, _ := strings.Cut(server, "/")
	return host
}

// dockerHub is where docker.io is served.
const dockerHub = "registry-1.docker.io"

// canonical knows Docker Hub by all its names.
func canonical(host string) string {
	switch host = strings.ToLower(host); host {
	case "index.docker.io", dockerHub, "registry.hub.docker.com":
		return "docker.io"
	}
	return strings.TrimSuffix(host, ":443")
}
