package image

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	"go.podman.io/image/v5/types"

	"berth/image/registries"
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

// caller is what the endpoints of a name are told about who asks; nil: nothing.
func (c *Credentials) caller() (*registries.Caller, error) {
	if c == nil {
		return nil, nil
	}
	user, password, err := c.login()
	if err != nil {
		return nil, err
	}
	return &registries.Caller{
		Login:  registries.Login{Username: user, Password: password, IdentityToken: c.IdentityToken, RegistryToken: c.RegistryToken},
		Server: c.ServerAddress,
	}, nil
}

// registries says where the configuration of registries is. It is read at each
// pull, so a changed file counts at once.
func (o Options) registries() registries.Config {
	return registries.Config{
		RegistriesConf: o.RegistriesConf, HostsDir: o.HostsDir, CertsDir: o.CertsDir, AuthFile: o.AuthFile, Idle: o.IdleTimeout,
	}
}

// system is what the library is told when it copies an image or reads an
// archive. It contacts no registry.
func (s *Store) system() *types.SystemContext {
	return &types.SystemContext{BlobInfoCacheDir: noCacheDir, BigFilesTemporaryDir: s.staging()}
}

func (s *Store) staging() string { return filepath.Join(s.root, "staging") }
