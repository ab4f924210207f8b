package images

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	fastgzip "github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Recipe is an image made of Debian packages, which `make`
// downloaded: real names, sizes, links and modes.
type Recipe struct {
	Name   string
	Layers [][]string // the packages of each layer
	Split  int        // >0: everything cut into so many layers with the same number of entries
}

var (
	base   = []string{"bash", "coreutils", "libc6", "dpkg", "perl-base", "util-linux"}
	perl   = []string{"perl-modules-5.36"}
	python = []string{"libpython3.11-stdlib", "python3.11-minimal", "libpython3.11-minimal"}
)

// Recipes of images as they are in use. Small needs what `make deps` downloads,
// the others what `make images-real` and `make bench` do.
var (
	Small  = Recipe{Name: "small", Layers: [][]string{perl, {"tzdata"}, {"libpython3.11-stdlib"}}}
	Common = Recipe{Name: "common", Layers: [][]string{base, perl, python, {"tzdata"}, {"libicu72"}, {"golang-1.19-src"}, {"python3-django"}, {"python3-sympy"}}}
	Large  = Recipe{Name: "large", Layers: [][]string{{"ghc", "openjdk-17-jdk-headless", "openjdk-17-jre-headless", "chromium", "libstd-rust-dev"}}}
	Many   = Recipe{Name: "many", Layers: [][]string{base, perl, python, {"tzdata"}}, Split: 126}
)

// madeOf is the description of a finished image in the cache.
type madeOf struct {
	Debs   []string
	Layers []cooked
}

type cooked struct {
	MediaType string
	DiffID    digest.Digest
}

// Build makes the recipe's image, or takes it from the cache below deps, the
// folder .deps. Layers are mapped files: they take memory as long as they are
// read. ErrParts when a package is missing.
func (r Recipe) Build(deps string, c Compression) (Image, error) {
	image := Image{Config: ispec.ImageConfig{Cmd: []string{"/bin/bash"}}, Stamp: r.Name}
	var layers [][]string
	made := madeOf{}
	for _, packages := range r.Layers {
		var debs []string
		for _, p := range packages {
			found, err := filepath.Glob(filepath.Join(deps, "debs", p+"_*.deb"))
			if err != nil || len(found) == 0 {
				return image, fmt.Errorf("%w: package %s is not in %s", ErrParts, p, filepath.Join(deps, "debs"))
			}
			debs = append(debs, found[len(found)-1])
		}
		layers = append(layers, debs)
		for _, deb := range debs {
			made.Debs = append(made.Debs, filepath.Base(deb))
		}
	}
	dir := filepath.Join(deps, "real", fmt.Sprintf("%s-%s", r.Name, c))
	var have madeOf
	data, err := os.ReadFile(filepath.Join(dir, "image.json"))
	if err != nil || json.Unmarshal(data, &have) != nil || !slices.Equal(have.Debs, made.Debs) {
		if have, err = r.cook(dir, layers, made, c); err != nil {
			return image, fmt.Errorf("make the image %s: %w", r.Name, err)
		}
	}
	for i, l := range have.Layers {
		blob, err := mapFile(layerFile(dir, i))
		if err != nil {
			return image, err
		}
		image.Layers = append(image.Layers, Layer{MediaType: l.MediaType, DiffID: l.DiffID, Blob: blob})
	}
	return image, nil
}

func layerFile(dir string, n int) string { return filepath.Join(dir, fmt.Sprintf("%03d.layer", n)) }

// mapFile gives a file's bytes without reading it. They stay mapped as long as
// the program runs.
func mapFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return syscall.Mmap(int(f.Fd()), 0, int(info.Size()), syscall.PROT_READ, syscall.MAP_SHARED)
}

// cook writes the image's layers and its description into dir.
func (r Recipe) cook(dir string, layers [][]string, made madeOf, c Compression) (madeOf, error) {
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		return made, err
	}
	total := 0 // of a layer; 0: all of its packages
	if r.Split > 0 {
		layers = [][]string{slices.Concat(layers...)}
		if err := each(layers[0], func(*tar.Header, io.Reader) error { total++; return nil }); err != nil {
			return made, err
		}
	}
	k := kitchen{dir: dir, compression: c}
	for _, debs := range layers {
		n := 0
		err := each(debs, func(h *tar.Header, body io.Reader) error {
			if total > 0 && n*r.Split/total > len(k.done) {
				if err := k.finish(); err != nil {
					return err
				}
			}
			n++
			return k.add(h, body)
		})
		if err == nil {
			err = k.finish()
		}
		if err != nil {
			return made, err
		}
	}
	made.Layers = k.done
	data, err := json.Marshal(made)
	if err != nil {
		return made, err
	}
	return made, os.WriteFile(filepath.Join(dir, "image.json"), data, 0o600)
}

// kitchen writes layers, one after the other.
type kitchen struct {
	dir         string
	compression Compression
	done        []cooked

	out    *os.File // of the layer in the making; nil between two
	packed io.WriteCloser
	sum    digest.Digester
	tar    *tar.Writer
	kind   string
}

// begin opens the next layer.
func (k *kitchen) begin() (err error) {
	if k.out, err = os.Create(layerFile(k.dir, len(k.done))); err != nil {
		return err
	}
	switch k.compression {
	case Zstd:
		k.kind = ispec.MediaTypeImageLayerZstd
		k.packed, err = zstd.NewWriter(k.out)
	case Gzip:
		k.kind = ispec.MediaTypeImageLayerGzip
		k.packed, err = fastgzip.NewWriterLevel(k.out, gzip.DefaultCompression)
	default:
		err = fmt.Errorf("a layer of packages is compressed, not %v", k.compression)
	}
	if err != nil {
		return errors.Join(err, k.out.Close())
	}
	k.sum = digest.SHA256.Digester()
	k.tar = tar.NewWriter(io.MultiWriter(k.packed, k.sum.Hash()))
	return nil
}

func (k *kitchen) add(h *tar.Header, body io.Reader) error {
	if k.out == nil {
		if err := k.begin(); err != nil {
			return err
		}
	}
	if err := k.tar.WriteHeader(h); err != nil {
		return err
	}
	_, err := io.Copy(k.tar, body)
	return err
}

// finish closes the layer.
func (k *kitchen) finish() error {
	if k.out == nil {
		return nil
	}
	err := errors.Join(k.tar.Close(), k.packed.Close(), k.out.Close())
	k.done = append(k.done, cooked{k.kind, k.sum.Digest()})
	k.out = nil
	return err
}

// each calls f for the entries of packages, directories once.
func each(debs []string, f func(h *tar.Header, body io.Reader) error) error {
	seen := map[string]bool{"./": true}
	for _, deb := range debs {
		cmd := exec.Command("dpkg-deb", "--fsys-tarfile", deb)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		pipe, err := cmd.StdoutPipe()
		if err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			return fmt.Errorf("read %s: %w", deb, err)
		}
		for tr := tar.NewReader(bufio.NewReaderSize(pipe, 1<<20)); ; {
			h, err := tr.Next()
			if err == io.EOF {
				break
			}
			if err == nil && !(h.Typeflag == tar.TypeDir && seen[h.Name]) {
				seen[h.Name] = true
				h.Name, h.Uname, h.Gname = strings.TrimPrefix(h.Name, "./"), "", ""
				h.Linkname = strings.TrimPrefix(h.Linkname, "./")
				h.Format = tar.FormatUnknown
				err = f(h, tr)
			}
			if err != nil {
				return errors.Join(fmt.Errorf("read %s: %w", deb, err), pipe.Close(), cmd.Wait())
			}
		}
		if _, err := io.Copy(io.Discard, pipe); err != nil {
			return fmt.Errorf("read %s: %w", deb, err)
		}
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("read %s: %w: %s", deb, err, stderr.String())
		}
	}
	return nil
}
