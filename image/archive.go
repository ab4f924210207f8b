package image

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"

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
	items       []dockerItem      // what it says; see checkDocker
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

// checkDocker reads docker's list and compares it with what is there. The error is
// ErrInvalidImage.
func (c *contents) checkDocker() error {
	if len(c.list) > maxDockerList {
		return fmt.Errorf("%w: %s has more than %d bytes", ErrInvalidImage, dockerList, maxDockerList)
	}
	if err := json.Unmarshal(c.list, &c.items); err != nil {
		return fmt.Errorf("%w: %s: %v", ErrInvalidImage, dockerList, err)
	}
	if len(c.items) == 0 {
		return fmt.Errorf("%w: the archive has no image", ErrInvalidImage)
	}
	for _, item := range c.items {
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

// withoutLinks is an archive of docker whose list names no links: an old docker saves
// a layer that two images have once, and the library takes the size of the link for
// the layer's. It is the file itself, or what is needed of it in staging, which the
// caller removes with done.
func (s *Store) withoutLinks(ctx context.Context, file string, c contents) (plain string, done func(), err error) {
	linked := false
	needed := map[string]bool{dockerList: true}
	follow := func(named string) string {
		name := path.Clean(named)
		if target := c.members[name]; target != "" {
			linked, name = true, target
		}
		needed[name] = true
		return name
	}
	for i := range c.items {
		item := &c.items[i]
		item.Config = follow(item.Config)
		for l := range item.Layers {
			item.Layers[l] = follow(item.Layers[l])
		}
	}
	if !linked {
		return file, func() {}, nil
	}
	if c.list, err = json.Marshal(c.items); err != nil {
		return "", nil, err
	}
	dir, err := s.disk.mkdirTemp(s.staging(), "import-")
	if err != nil {
		return "", nil, err
	}
	done = func() { _ = s.disk.removeAll(dir) }
	plain = filepath.Join(dir, "archive.tar")
	if err := copyMembers(ctx, file, plain, c.list, needed); err != nil {
		done()
		return "", nil, err
	}
	return plain, done, nil
}

// copyMembers copies an archive's members, each the first of its name, with another
// list.
func copyMembers(ctx context.Context, file, to string, list []byte, needed map[string]bool) error {
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	w := tar.NewWriter(out)
	err = each(file, func(h *tar.Header, body io.Reader) (bool, error) {
		name := path.Clean(h.Name)
		if !needed[name] || ctx.Err() != nil {
			return ctx.Err() != nil, ctx.Err()
		}
		needed[name] = false
		size := h.Size
		if name == dockerList {
			body, size = bytes.NewReader(list), int64(len(list))
		}
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o600, Size: size}); err != nil {
			return true, err
		}
		_, err := io.Copy(w, body)
		return err != nil, err
	})
	if err != nil {
		return err
	}
	return w.Close()
}
