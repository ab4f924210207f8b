package policy

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.podman.io/image/v5/docker/policyconfiguration"
	"go.podman.io/image/v5/docker/reference"
	"go.yaml.in/yaml/v3"

	"berth/sandbox/regular"
)

// Source is where the signatures of a repository's images are.
type Source struct {
	// Lookaside is the URL of a directory, https, http or file, below which simple
	// signatures are: <it>/<repository>@sha256=<hex>/signature-<n>.
	Lookaside string
	// Attached: sigstore signatures are beside the image, in its repository.
	Attached bool
}

// Sources are all of them, as containers-registries.d(5) has it.
type Sources struct {
	places    map[string]place
	byDefault *place
}

// place is what a file says of a repository, of a namespace of them or of a host.
type place struct {
	Lookaside string `yaml:"lookaside"`
	Old       string `yaml:"sigstore"` // the former name of lookaside
	Attached  *bool  `yaml:"use-sigstore-attachments"`
}

func (p place) check() error {
	for _, text := range []string{p.Lookaside, p.Old} {
		u, err := url.Parse(text)
		if text != "" && (err != nil || !slices.Contains([]string{"file", "http", "https"}, u.Scheme) || u.Path == "" && u.Scheme == "file" || u.RawQuery != "") {
			return fmt.Errorf("lookaside %q is no URL of a directory with file, http or https", text)
		}
	}
	return nil
}

// defaultLookaside is where nothing else is said.
const defaultLookaside = "file:///var/lib/containers/sigstore"

// systemDirs are those of a node that names no directory: what the vendor
// ships, and over it what the operator writes.
var systemDirs = []string{"/usr/share/containers/registries.d", "/etc/containers/registries.d"}

// ReadSources reads the *.yaml files of a directory, of none the system's. What
// two files say of the same place contradicts: that, and whatever cannot be read,
// is ErrRefused with the name of the file.
func ReadSources(dir string) (*Sources, error) {
	dirs := systemDirs
	if dir != "" {
		dirs = []string{dir}
	}
	files := map[string]string{} // a later directory's counts
	var order []string
	for _, d := range dirs {
		list, err := os.ReadDir(d)
		if dir == "" && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%w: read where signatures are: %w", ErrRefused, err)
		}
		for _, item := range list {
			if name := item.Name(); strings.HasSuffix(name, ".yaml") {
				if files[name] == "" {
					order = append(order, name)
				}
				files[name] = filepath.Join(d, name)
			}
		}
	}
	s := &Sources{places: map[string]place{}}
	for _, name := range order {
		if err := s.read(files[name]); err != nil {
			return nil, fmt.Errorf("%w: read where signatures are: %w", ErrRefused, err)
		}
	}
	return s, nil
}

func (s *Sources) read(file string) error {
	data, err := regular.Read(file, regular.Most)
	if err != nil {
		return err
	}
	var says struct {
		Default *place           `yaml:"default-docker"`
		Docker  map[string]place `yaml:"docker"`
	}
	if err := yaml.Unmarshal(data, &says); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if says.Default != nil {
		if s.byDefault != nil {
			return fmt.Errorf("%s: default-docker is in another file too", file)
		}
		s.byDefault = says.Default
		if err := s.byDefault.check(); err != nil {
			return fmt.Errorf("%s: default-docker: %w", file, err)
		}
	}
	for name, p := range says.Docker {
		if _, ok := s.places[name]; ok {
			return fmt.Errorf("%s: %q is in another file too", file, name)
		}
		if err := p.check(); err != nil {
			return fmt.Errorf("%s: %q: %w", file, name, err)
		}
		s.places[name] = p
	}
	return nil
}

// Of finds where the signatures of an image are. Each setting is the first that
// is said of one of the repositories, of what is above it, or by default. The
// repositories are given with a tag or a digest.
func (s *Sources) Of(repositories ...reference.Named) Source {
	var list []place
	for _, r := range repositories {
		for _, name := range policyconfiguration.DockerReferenceNamespaces(r) {
			if p, ok := s.places[name]; ok {
				list = append(list, p)
			}
		}
	}
	if s.byDefault != nil {
		list = append(list, *s.byDefault)
	}
	found := Source{}
	decided := false
	for _, p := range list {
		if p.Lookaside == "" {
			p.Lookaside = p.Old
		}
		if found.Lookaside == "" {
			found.Lookaside = p.Lookaside
		}
		if !decided && p.Attached != nil {
			found.Attached, decided = *p.Attached, true
		}
	}
	if found.Lookaside == "" {
		found.Lookaside = defaultLookaside
	}
	return found
}
