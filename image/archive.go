package image

import (
	"archive/tar"
	"encoding/json"
	"fmt"
	"io"
	"path"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Bounds of an archive of docker. It has three members for each layer; the library
// reads no larger list.
const (
	maxMembers    = 100_000
	maxDockerList = 1 << 20
)

const dockerList = "manifest.json"

// contents is what a first look into an archive finds.
type contents struct {
	oci, docker bool
	list        []byte            // docker's own
	members     map[string]string // clean name → the member that it is a link to, or ""
}

// lookInto looks for the marks of an OCI layout and of docker. New archives of docker
// are both; then the layout counts, as its digests are the registry's, and nothing
// else is looked for.
func lookInto(file string) (contents, error) {
	c := contents{members: map[string]string{}}
	err := each(file, func(h *tar.Header, body io.Reader) (bool, error) {
		name := path.Clean(h.Name)
		if name == ispec.ImageLayoutFile || name == ispec.ImageIndexFile {
			c.oci = true
			return true, nil
		}
		if name == dockerList && !c.docker {
			c.docker = true
			var err error
			if c.list, err = io.ReadAll(io.LimitReader(body, maxDockerList+1)); err != nil {
				return true, err
			}
		}
		return false, c.note(name, h)
	})
	if err == nil && !c.docker && !c.oci {
		err = fmt.Errorf("%w: neither an archive of docker nor one of an OCI layout", ErrInvalidImage)
	}
	return c, err
}

// note keeps a member's name. Of two with the same name the first counts.
func (c *contents) note(name string, h *tar.Header) error {
	if _, twice := c.members[name]; twice {
		return nil
	}
	if len(c.members) == maxMembers {
		return fmt.Errorf("%w: the archive has more than %d members", ErrInvalidImage, maxMembers)
	}
	switch h.Typeflag {
	case tar.TypeSymlink:
		c.members[name] = path.Join(path.Dir(name), h.Linkname)
	case tar.TypeLink:
		c.members[name] = path.Clean(h.Linkname)
	default:
		c.members[name] = ""
	}
	return nil
}

// checkDocker compares docker's list with what is there. The error is
// ErrInvalidImage.
func (c *contents) checkDocker() error {
	if len(c.list) > maxDockerList {
		return fmt.Errorf("%w: %s has more than %d bytes", ErrInvalidImage, dockerList, maxDockerList)
	}
	var items []dockerItem
	if err := json.Unmarshal(c.list, &items); err != nil {
		return fmt.Errorf("%w: %s: %v", ErrInvalidImage, dockerList, err)
	}
	if len(items) == 0 {
		return fmt.Errorf("%w: the archive has no image", ErrInvalidImage)
	}
	for _, item := range items {
		for _, named := range append([]string{item.Config}, item.Layers...) {
			target, there := c.members[path.Clean(named)]
			if !there {
				return fmt.Errorf("%w: %s names %.200q, which is not in the archive", ErrInvalidImage, dockerList, named)
			}
			if _, there = c.members[target]; target != "" && !there {
				return fmt.Errorf("%w: %s is a link to %.200q, which is not in the archive", ErrInvalidImage, named, target)
			}
		}
	}
	return nil
}
