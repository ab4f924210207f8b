package image

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/types"
)

// Builders write platforms in many ways: names of uname, levels of amd64, no
// platform at all. The best one that this CPU runs is taken, wherever it stands.
func TestPlatformsOfIndexes(t *testing.T) {
	level := amd64Level()
	mine, best, above := "linux/amd64", fmt.Sprint("linux/amd64/v", level), fmt.Sprint("linux/amd64/v", level+1)
	for _, c := range []struct {
		on, want string // want is the entry's text; "": none
		offers   []string
	}{
		{mine, mine, []string{"linux/arm64", mine}},
		{mine, "linux/amd64/v1", []string{above, "linux/amd64/v1"}},
		{mine, best, []string{mine, best, above}},
		{mine, mine, []string{above, mine}},
		{mine, "", []string{above, "linux/386", "windows/amd64"}},
		{mine, "linux/x86_64", []string{"linux/aarch64", "linux/x86_64"}},
		{mine, "", []string{"unknown/unknown", "linux/arm64"}},
		{mine, "none", []string{"unknown/unknown", "none"}},
		{mine, "/", []string{"/"}},
		{mine, mine, []string{"none", mine}},
		{mine, "", nil},
		{"linux/arm64", "linux/aarch64", []string{"linux/x86_64", "linux/aarch64"}},
		{"linux/arm64", "linux/arm64/v8", []string{"linux/arm/v7", "linux/arm64/v8"}},
	} {
		if c.on == mine && runtime.GOARCH != "amd64" {
			continue
		}
		index := ispec.Index{MediaType: ispec.MediaTypeImageIndex, Manifests: []ispec.Descriptor{}}
		index.SchemaVersion = 2
		for _, offer := range c.offers {
			m := ispec.Descriptor{MediaType: ispec.MediaTypeImageManifest, Digest: digest.FromString(offer), Size: 1}
			if offer != "none" {
				m.Platform = platformOf(offer)
			}
			index.Manifests = append(index.Manifests, m)
		}
		data, err := json.Marshal(index)
		if err != nil {
			t.Fatal(err)
		}
		on := platformOf(c.on)
		got, err := document{data: data, mediaType: index.MediaType}.choose(&types.SystemContext{OSChoice: on.OS, ArchitectureChoice: on.Architecture})
		if c.want == "" && err == nil || c.want != "" && (err != nil || got != digest.FromString(c.want)) {
			t.Errorf("on %s of %q: %s, %v; want %q", c.on, c.offers, got, err, c.want)
		}
	}
}

// platformOf reads os/architecture/variant.
func platformOf(text string) *ispec.Platform {
	parts := append(strings.Split(text, "/"), "")
	return &ispec.Platform{OS: parts[0], Architecture: parts[1], Variant: parts[2]}
}
