package image

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"

	"berth/image/registries"
)

// name is a reference in full: registry, repository, and a tag or a digest.
type name struct {
	named reference.Named // has a tag or a digest, never both
}

// parseName completes a reference: "busybox" is docker.io/library/busybox:latest.
// With a tag and a digest the digest wins, as it says more.
func parseName(s string) (name, error) {
	named, err := reference.ParseNormalizedNamed(s)
	if err != nil {
		return name{}, fmt.Errorf("%w: %q: %v", ErrInvalidReference, s, err)
	}
	if digested, ok := named.(reference.Canonical); ok {
		canonical, err := reference.WithDigest(reference.TrimNamed(named), digested.Digest())
		if err != nil {
			return name{}, fmt.Errorf("%w: %q: %v", ErrInvalidReference, s, err)
		}
		return name{canonical}, nil
	}
	return name{reference.TagNameOnly(named)}, nil
}

// hub is the registry of names that name none.
const hub = "docker.io"

// wantedNames are what a pull may be about, read from the configuration as it is
// now: one name, or several for a short one.
func (s *Store) wantedNames(text string) ([]name, error) {
	n, err := parseName(text)
	if err != nil || !registries.IsShort(text) {
		return []name{n}, err
	}
	if err := s.options().registries().Reload(); err != nil {
		return nil, s.describe("pull image", text, err, nil)
	}
	list, err := s.longNames(text)
	if err != nil {
		return nil, s.describe("pull image", text, err, nil)
	}
	return list, nil
}

// readings are the names that a reference may mean, the likeliest first. What is
// here may have a name that could not be pulled now.
func (s *Store) readings(ref string) ([]name, error) {
	n, err := parseName(ref)
	if err != nil || !registries.IsShort(ref) {
		return []name{n}, err
	}
	if long, err := s.longNames(ref); err == nil {
		return append(long, n), nil
	}
	return []name{n}, nil
}

// longNames completes a short name by the configuration as it was read last.
func (s *Store) longNames(text string) ([]name, error) {
	full, err := s.options().registries().LongNames(text)
	if err != nil {
		return nil, err
	}
	var list []name
	for _, named := range full {
		n, err := parseName(named.String())
		if err != nil {
			return nil, err
		}
		list = append(list, n)
	}
	return list, nil
}

func (n name) String() string { return n.named.String() }

// repository is the name without tag or digest.
func (n name) repository() string { return n.named.Name() }

// tag is the name when it is a tag's, else "".
func (n name) tag() string {
	if _, ok := n.named.(reference.Tagged); ok {
		return n.String()
	}
	return ""
}

// withDigest is the repository at a digest.
func (n name) withDigest(d digest.Digest) string {
	return n.repository() + "@" + d.String()
}

var (
	fullID  = regexp.MustCompile(`^(sha256:)?[0-9a-f]{64}$`)
	partID  = regexp.MustCompile(`^(sha256:)?[0-9a-f]{4,63}$`)
	idStart = "sha256:"
)

// asID gives the id that s is in full or in part, "" when it cannot be one.
func asID(s string) (prefix string, full bool) {
	switch {
	case fullID.MatchString(s):
		full = true
	case !partID.MatchString(s):
		return "", false
	}
	return idStart + strings.TrimPrefix(s, idStart), full
}
