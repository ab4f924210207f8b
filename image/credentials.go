package image

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"go.podman.io/image/v5/types"
)

// Credentials are what a caller brings for one pull (CRI's AuthConfig). They
// are never stored.
type Credentials struct {
	Username, Password string
	// Auth is base64 of "username:password". Used when Username is empty.
	Auth string
	// ServerAddress limits the credentials to one registry: for any other the
	// pull goes without.
	ServerAddress string
	// IdentityToken is exchanged for an access token at the registry.
	IdentityToken string
	// RegistryToken is sent as bearer token as it is.
	RegistryToken string
}

// key tells pulls with different credentials apart without keeping them.
func (c *Credentials) key() string {
	if c == nil {
		return ""
	}
	data, err := json.Marshal(c)
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// login decodes Auth. The password may hold colons.
func (c *Credentials) login() (user, password string, err error) {
	if c.Username != "" || c.Auth == "" {
		return c.Username, c.Password, nil
	}
	data, err := base64.StdEncoding.DecodeString(c.Auth)
	if err != nil {
		return "", "", fmt.Errorf("%w: auth is not base64", ErrInvalidReference)
	}
	user, password, ok := strings.Cut(string(data), ":")
	if !ok {
		return "", "", fmt.Errorf("%w: auth has no colon", ErrInvalidReference)
	}
	return user, strings.TrimRight(password, "\x00"), nil
}

// secrets are the strings that must not be printed.
func (c *Credentials) secrets() []string {
	if c == nil {
		return nil
	}
	_, password, _ := c.login()
	return []string{c.Password, c.Auth, c.IdentityToken, c.RegistryToken, password}
}

// fits says whether the credentials are meant for a registry.
func (c *Credentials) fits(registry string) bool {
	if c.ServerAddress == "" {
		return true
	}
	host := c.ServerAddress
	if strings.Contains(host, "://") {
		u, err := url.Parse(host)
		if err != nil {
			return false
		}
		host = u.Host
	} else {
		host, _, _ = strings.Cut(host, "/")
	}
	return hub(host) == hub(registry)
}

// hub knows Docker Hub by all its names.
func hub(host string) string {
	switch host {
	case "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com":
		return "docker.io"
	}
	return host
}

// system is the library's configuration for one pull.
func (s *Store) system(registry string, c *Credentials) (*types.SystemContext, error) {
	sys := &types.SystemContext{
		SystemRegistriesConfPath: s.opt.RegistriesConf,
		AuthFilePath:             s.opt.AuthFile,
		RegistriesDirPath:        s.opt.RegistriesDir,
		BlobInfoCacheDir:         noCacheDir,
		BigFilesTemporaryDir:     s.staging(),
		DockerRegistryUserAgent:  userAgent,
	}
	if s.opt.RegistriesConf != "" {
		sys.SystemRegistriesConfDirPath = registriesDir(s.opt.RegistriesConf)
	}
	if s.opt.AuthFile == "" {
		// Not root's own login: which registries the node may use is said by
		// its configuration or by the caller.
		sys.AuthFilePath = filepath.Join(s.opt.Root, "no-auth.json")
	} else if _, err := os.Stat(s.opt.AuthFile); err != nil {
		return nil, fmt.Errorf("read auth file: %w", err)
	}
	if c == nil || !c.fits(registry) {
		return sys, nil
	}
	user, password, err := c.login()
	if err != nil {
		return nil, err
	}
	sys.DockerBearerRegistryToken = c.RegistryToken
	if c.IdentityToken != "" || user != "" || password != "" {
		sys.DockerAuthConfig = &types.DockerAuthConfig{Username: user, Password: password, IdentityToken: c.IdentityToken}
	}
	return sys, nil
}

func (s *Store) staging() string { return filepath.Join(s.opt.Root, "staging") }
