package images

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/critest/registry"
)

// Hosts are the registries whose names the standard images carry; a node's
// registries.conf points each at the local one.
var Hosts = []string{"registry.k8s.io", "k8s.gcr.io", "gcr.io", "public.ecr.aws", "docker.io"}

// References of standard images that tests use by name.
const (
	Busybox = "registry.k8s.io/e2e-test-images/busybox:1.29-2"
	Nginx   = "registry.k8s.io/e2e-test-images/nginx:1.14-2"
	Pause   = "registry.k8s.io/pause:3.9"
)

const staging = "k8s-staging-cri-tools/"

// Parts are the layers that images are put together from.
type Parts struct {
	Base    Layer // the busybox root
	standin []byte
}

// Load reads what `make deps` left under deps (the folder .deps) and packs the
// base layer. ErrParts when something is missing.
func Load(deps string) (*Parts, error) {
	entries, err := baseEntries(filepath.Join(deps, "images", "busybox", "bin", "busybox"))
	if err != nil {
		return nil, err
	}
	base, err := NewLayer(Gzip, entries...)
	if err != nil {
		return nil, err
	}
	standin, err := os.ReadFile(filepath.Join(deps, "images", "standin"))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrParts, err)
	}
	return &Parts{Base: base, standin: standin}, nil
}

// Program is a layer that holds the stand-in program at path; the name of the
// file decides what it does.
func (p *Parts) Program(path string, mode int64) (Layer, error) {
	return NewLayer(Gzip, File(path, mode, string(p.standin)))
}

// standard is one line of the table.
type standard struct {
	repository string
	tags       []string
	config     ispec.ImageConfig
	noBase     bool
	program    string // path of the stand-in inside the image; empty: none
	mode       int64  // of the program
	entries    []Entry
}

// table lists every image that critest 1.37 and our own tests name.
func table() []standard {
	shell := ispec.ImageConfig{Cmd: []string{"sh"}}
	list := []standard{
		{repository: "e2e-test-images/busybox", tags: []string{"1.29-2"}, config: shell},
		{repository: "docker/library/busybox", tags: []string{"1.35.0-glibc"}, config: shell},
		{repository: "e2e-test-images/nginx", tags: []string{"1.14-2"}, program: "usr/sbin/nginx",
			config: ispec.ImageConfig{Cmd: []string{"nginx"}}},
		{repository: "e2e-test-images/httpd", tags: []string{"2.4.39-4"}, program: "usr/sbin/httpd-foreground",
			config: ispec.ImageConfig{Cmd: []string{"httpd-foreground"}}},
		{repository: staging + "hostnet-nginx-" + runtime.GOARCH, tags: []string{"latest"}, program: "usr/sbin/hostnet-nginx",
			config: ispec.ImageConfig{Cmd: []string{"hostnet-nginx"}}},
		{repository: "e2e-test-images/nonewprivs", tags: []string{"1.3"}, program: "nnp", mode: 0o4755, noBase: true,
			config: ispec.ImageConfig{Entrypoint: []string{"/nnp"}}},
		{repository: "pause", tags: []string{"3.9"}, program: "pause", noBase: true,
			config: ispec.ImageConfig{Entrypoint: []string{"/pause"}}},
		{repository: staging + "test-image-tags", tags: []string{"1", "2", "3"}, config: shell},
		{repository: staging + "test-image-digest", tags: []string{"latest"}, config: shell},
		{repository: staging + "test-image-latest", tags: []string{"latest"}, config: shell},
		{repository: staging + "test-image-tag", tags: []string{"test"}, config: shell},
		{repository: staging + "test-image-tag", tags: []string{"all"}, config: shell},
		{repository: staging + "test-image-1", tags: []string{"latest"}, config: shell},
		{repository: staging + "test-image-2", tags: []string{"latest"}, config: shell},
		{repository: staging + "test-image-3", tags: []string{"latest"}, config: shell},
		{repository: staging + "test-image-predefined-group", tags: []string{"latest"},
			config: ispec.ImageConfig{Cmd: []string{"sh"}, User: "1000"},
			entries: []Entry{
				File("etc/passwd", 0o644, passwd+"default-user:x:1000:1000::/home/default-user:/bin/sh\n"),
				File("etc/group", 0o644, group+"default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n"),
			}},
	}
	for name, user := range map[string]string{
		"uid": "1002", "username": "www-data", "uid-group": "1003:users", "username-group": "www-data:www-data",
	} {
		list = append(list, standard{repository: staging + "test-image-user-" + name, tags: []string{"latest"},
			config: ispec.ImageConfig{Cmd: []string{"sh"}, User: user}})
	}
	return list
}

// Standard publishes the whole table. It returns the name@digest that critest's
// spec about digests can pull.
func (p *Parts) Standard(r *registry.Registry) (digestReference string, err error) {
	for _, s := range table() {
		image, err := p.build(s)
		if err != nil {
			return "", fmt.Errorf("build %s: %w", s.repository, err)
		}
		for _, tag := range s.tags {
			done, err := image.Publish(r, s.repository, tag)
			if err != nil {
				return "", err
			}
			if s.repository == staging+"test-image-digest" {
				digestReference = "gcr.io/" + s.repository + "@" + done.Manifest.String()
			}
		}
	}
	return digestReference, nil
}

// build puts one image of the table together; its name is its stamp, so that
// no two share an id.
func (p *Parts) build(s standard) (Image, error) {
	image := Image{Config: s.config, Stamp: s.repository + ":" + s.tags[0], Docker: true}
	image.Config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	if !s.noBase {
		image.Layers = append(image.Layers, p.Base)
	}
	if s.program != "" {
		mode := s.mode
		if mode == 0 {
			mode = 0o755
		}
		layer, err := p.Program(s.program, mode)
		if err != nil {
			return image, err
		}
		image.Layers = append(image.Layers, layer)
	}
	if len(s.entries) > 0 {
		layer, err := NewLayer(Gzip, s.entries...)
		if err != nil {
			return image, err
		}
		image.Layers = append(image.Layers, layer)
	}
	return image, nil
}
