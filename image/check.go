package image

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"

	"berth/image/policy"
)

// CheckPolicy reads a file as Options.PolicyPath and tells what is wrong with it.
func CheckPolicy(path string) error {
	return policy.Check(path)
}

// CheckRegistries reads a file and its drop-ins as Options.RegistriesConf and
// tells what is wrong with them. What is right counts from the next pull on.
func CheckRegistries(path string) error {
	if _, err := os.Stat(path); err != nil {
		return err // the library takes a missing file for an empty one
	}
	_, err := sysregistriesv2.TryUpdatingCache(&types.SystemContext{
		SystemRegistriesConfPath: path, SystemRegistriesConfDirPath: registriesDir(path),
	})
	return err
}

// registriesDir is where the drop-ins of a registries.conf are.
func registriesDir(path string) string { return path + ".d" }

// CheckAuthFile reads a file as Options.AuthFile and tells what is wrong with
// it. The error has nothing of a login.
func CheckAuthFile(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var file struct {
		Auths map[string]struct {
			Auth string `json:"auth"`
		} `json:"auths"`
		Helpers map[string]string `json:"credHelpers"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for registry, login := range file.Auths {
		text, err := base64.StdEncoding.DecodeString(login.Auth)
		if login.Auth != "" && (err != nil || !strings.Contains(string(text), ":")) {
			return fmt.Errorf("%s: auths: %s: auth is not user:password in base64", path, registry)
		}
	}
	return nil
}
