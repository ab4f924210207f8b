package registries

import (
	"fmt"
	"strings"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"
)

// IsShort says whether a reference names no registry, such as "busybox:1" or
// "team/app".
func IsShort(text string) bool {
	ref, err := reference.Parse(text)
	named, ok := ref.(reference.Named)
	if err != nil || !ok {
		return false
	}
	domain := reference.Domain(named)
	return !strings.ContainsAny(domain, ".:") && domain != "localhost"
}

// LongNames are what a short name may stand for, as registries.conf says, in
// order: what its alias says, or else the name in each of the
// unqualified-search-registries. Without either it is Docker Hub's, as it has
// always been for a kubelet. ErrConfig when there are several registries and
// the mode is enforcing: nobody is there to be asked which.
//
// It answers from what Reload read last, and reads the files only when nobody
// has done so yet.
func (c Config) LongNames(short string) ([]reference.Named, error) {
	parsed, err := reference.Parse(short)
	named, ok := parsed.(reference.Named)
	if err != nil || !ok {
		return nil, fmt.Errorf("%w: %q is no name", ErrInvalid, short)
	}
	sys := c.system()
	alias, _, err := sysregistriesv2.ResolveShortNameAlias(sys, named.Name())
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrConfig, err)
	}
	if alias != nil {
		return normalized(alias.Name() + strings.TrimPrefix(short, named.Name()))
	}
	search, err := sysregistriesv2.UnqualifiedSearchRegistries(sys)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrConfig, err)
	}
	if len(search) == 0 {
		return normalized(short)
	}
	var full []string
	for _, registry := range search {
		full = append(full, registry+"/"+short)
	}
	mode, err := sysregistriesv2.GetShortNameMode(sys)
	if err == nil && mode == types.ShortNameModeEnforcing && len(search) > 1 {
		err = fmt.Errorf("%w: %q may be %s, and short-name-mode is enforcing: name the registry",
			ErrConfig, short, strings.Join(full, " or "))
	}
	if err != nil {
		return nil, err
	}
	return normalized(full...)
}

func normalized(texts ...string) ([]reference.Named, error) {
	var list []reference.Named
	for _, text := range texts {
		named, err := reference.ParseNormalizedNamed(text)
		if err != nil {
			return nil, fmt.Errorf("%w: %q: %v", ErrInvalid, text, err)
		}
		list = append(list, named)
	}
	return list, nil
}

// Reload reads registries.conf anew for LongNames. ErrConfig when it is broken;
// then what was read before stays.
func (c Config) Reload() error {
	_, err := c.reload()
	return err
}
