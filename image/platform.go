package image

import (
	"encoding/json"
	"fmt"
	"runtime"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"
	xcpu "golang.org/x/sys/cpu"
)

// choose picks the entry of an index for this platform: the best variant that
// this CPU runs, wherever it stands.
func (d document) choose(sys *types.SystemContext) (digest.Digest, error) {
	var index ispec.Index // a superset of docker's list in all that matters here
	if err := json.Unmarshal(d.data, &index); err != nil {
		return "", fmt.Errorf("%w: index: %v", ErrInvalidImage, err)
	}
	if n := len(index.Manifests); n > maxEntries {
		return "", fmt.Errorf("%w: index of %d entries, at most %d are allowed", ErrInvalidImage, n, maxEntries)
	}
	for i := range index.Manifests {
		normalize(&index.Manifests[i])
	}
	chosen, err := chooseEntry(index, sys)
	if err != nil {
		return "", fmt.Errorf("%w: index has nothing for this platform (%s), it offers %s", ErrInvalidImage, wanted(sys), d.offers())
	}
	if err := checkDigest(chosen); err != nil {
		return "", fmt.Errorf("%w: index: %v", ErrInvalidImage, err)
	}
	return chosen, nil
}

// chooseEntry looks for the variants of amd64 itself, which the library does
// not know; the library knows those of arm.
func chooseEntry(index ispec.Index, sys *types.SystemContext) (digest.Digest, error) {
	if wanted(sys) == "linux/amd64" && (sys == nil || sys.VariantChoice == "") {
		for level := amd64Level(); level > 1; level-- {
			for _, m := range index.Manifests {
				if p := m.Platform; p != nil && p.OS == "linux" && p.Architecture == "amd64" && p.Variant == fmt.Sprint("v", level) {
					return m.Digest, nil
				}
			}
		}
	}
	index.MediaType = ispec.MediaTypeImageIndex
	data, err := json.Marshal(index)
	if err != nil {
		return "", err
	}
	list, err := manifest.ListFromBlob(data, index.MediaType)
	if err != nil {
		return "", err
	}
	return list.ChooseInstance(sys)
}

// normalize gives an entry's platform the names that Go has for it, as builders
// also write those of uname; the first level of amd64 is amd64.
func normalize(m *ispec.Descriptor) {
	if m.Platform == nil {
		return
	}
	p := *m.Platform
	switch p.Architecture {
	case "x86_64", "x86-64":
		p.Architecture = "amd64"
	case "aarch64":
		p.Architecture = "arm64"
	case "i386":
		p.Architecture = "386"
	}
	if p.Architecture == "amd64" && p.Variant == "v1" {
		p.Variant = ""
	}
	m.Platform = &p
	if p.OS == "" && p.Architecture == "" {
		m.Platform = nil // says no more than none
	}
}

// amd64Level is the x86-64 level of this CPU, 1 to 4, by those of its features
// that can be asked for.
func amd64Level() int {
	x := xcpu.X86
	switch {
	case runtime.GOARCH != "amd64" || !(x.HasSSE3 && x.HasSSSE3 && x.HasSSE41 && x.HasSSE42 && x.HasPOPCNT && x.HasCX16):
		return 1
	case !(x.HasAVX && x.HasAVX2 && x.HasBMI1 && x.HasBMI2 && x.HasFMA):
		return 2
	case !(x.HasAVX512F && x.HasAVX512BW && x.HasAVX512CD && x.HasAVX512DQ && x.HasAVX512VL):
		return 3
	}
	return 4
}
