package cases

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	specs "github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// platform is a member of an index.
func platform(p images.Published, os, arch string) ispec.Descriptor {
	return ispec.Descriptor{MediaType: p.Type, Digest: p.Manifest, Size: int64(len(p.Body)), Platform: &ispec.Platform{OS: os, Architecture: arch}}
}

// serveIndex serves an index of the type with these members.
func serveIndex(t *testing.T, repository, tag, mediaType string, members ...ispec.Descriptor) ispec.Descriptor {
	t.Helper()
	body, err := json.Marshal(ispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: mediaType, Manifests: members})
	if err != nil {
		t.Fatal(err)
	}
	return ispec.Descriptor{MediaType: mediaType, Digest: reg.PutManifest(repository, tag, mediaType, body), Size: int64(len(body))}
}

// B13: an index with attestations and other machines' images gives this machine's, in
// an index of an index too; without one the error says what is wanted and what there is.
func TestB13TheRightEntryOfAnIndex(t *testing.T) {
	const repository = "cases/b13"
	e := start(t, node.Options{})
	mine := publish(t, repository, "plain", ispec.ImageConfig{})
	foreign := "arm64"
	if runtime.GOARCH == foreign {
		foreign = "amd64"
	}
	layerType := "application/vnd.in-toto+json"
	blob := []byte(`{"_type":"https://in-toto.io/Statement/v0.1"}`)
	body := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":%q,"digest":%q,"size":2},"layers":[{"mediaType":%q,"digest":%q,"size":%d}]}`,
		ispec.MediaTypeImageManifest, ispec.MediaTypeImageConfig, reg.PutBlob([]byte("{}")), layerType, reg.PutBlob(blob), len(blob))
	proof := images.Published{Type: ispec.MediaTypeImageManifest, Body: []byte(body)}
	proof.Manifest = reg.PutManifest(repository, "", proof.Type, proof.Body)
	attestation := platform(proof, "unknown", "unknown")
	attestation.Annotations = map[string]string{"vnd.docker.reference.type": "attestation-manifest", "vnd.docker.reference.digest": mine.Manifest.String()}
	other, own := platform(mine, "linux", foreign), platform(mine, "linux", runtime.GOARCH)

	config := e.sandbox()
	pod := e.run(config)
	for kind, mediaType := range map[string]string{"oci": ispec.MediaTypeImageIndex, "docker": "application/vnd.docker.distribution.manifest.list.v2+json"} {
		serveIndex(t, repository, kind+"-none", mediaType, attestation, other)
		good := serveIndex(t, repository, kind+"-good", mediaType, attestation, other, own)
		serveIndex(t, repository, kind+"-nested", mediaType, attestation, good)
		serveIndex(t, repository, kind+"-only", mediaType, attestation)

		name := "docker.io/" + repository + ":" + kind
		_, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: name + "-none"}})
		e.refused("no entry for this machine, "+kind, err, codes.InvalidArgument, "linux/"+runtime.GOARCH, "offers linux/"+foreign)
		_, err = e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: name + "-only"}})
		e.refused("nothing but an attestation, "+kind, err, codes.InvalidArgument, "linux/"+runtime.GOARCH)
		for _, tag := range []string{"-good", "-nested"} {
			if id := e.pull(name + tag); id != mine.Config.String() {
				t.Errorf("%s%s: %s, want %s", name, tag, id, mine.Config)
			}
			c := command(kind+tag, "echo runs")
			c.Image.Image = name + tag
			if out := e.output(pod, c, config); out != "runs\n" {
				t.Errorf("%s%s: %q", name, tag, out)
			}
		}
	}
}

// B17: a document that is two things at once, or another one than it was served as, is
// refused whatever its Content-Type, and nothing of it is stored.
func TestB17AmbiguousManifests(t *testing.T) {
	const (
		repository = "cases/b17"
		docker     = "application/vnd.docker.distribution.manifest"
	)
	e := start(t, node.Options{})
	good := publish(t, repository, "good", ispec.ImageConfig{})
	image := string(good.Body)
	members := fmt.Sprintf(`,"manifests":[{"mediaType":%q,"digest":%q,"size":%d}]}`, good.Type, good.Manifest, len(good.Body))
	typed := fmt.Sprintf("%q:%q,", "mediaType", good.Type)
	if !strings.Contains(image, typed) {
		t.Fatalf("the manifest has no type: %s", image)
	}
	both := strings.TrimSuffix(image, "}") + members
	bodies := map[string]string{
		"both":         both,
		"both untyped": strings.Replace(both, typed, "", 1),
		"index typed":  strings.Replace(both, typed, fmt.Sprintf("%q:%q,", "mediaType", ispec.MediaTypeImageIndex), 1),
		"two configs":  strings.TrimSuffix(image, "}") + `,"Config":{}}`,
	}
	served := []string{ispec.MediaTypeImageManifest, ispec.MediaTypeImageIndex, docker + ".v2+json", docker + ".list.v2+json", "application/json", ""}
	refused := func(what, contentType, body string) {
		t.Helper()
		d := reg.PutManifest(repository, "bad", contentType, []byte(body))
		for _, reference := range []string{"docker.io/" + repository + ":bad", "docker.io/" + repository + "@" + d.String()} {
			_, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: reference}})
			e.refused(fmt.Sprintf("%s served as %q", what, contentType), err, codes.InvalidArgument, "manifest")
		}
	}
	for what, body := range bodies {
		for _, contentType := range served {
			refused(what, contentType, body)
		}
	}
	refused("an image", ispec.MediaTypeImageIndex, image)
	refused("an image", docker+".v2+json", image)
	refused("an index", ispec.MediaTypeImageManifest, fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q%s`, ispec.MediaTypeImageIndex, members))
	if list, err := e.im.ListImages(e.ctx, &cri.ListImagesRequest{}); err != nil || len(list.GetImages()) != 0 {
		t.Errorf("stored are %v, %v", list.GetImages(), err)
	}
	if blobs, err := os.ReadDir(filepath.Join(e.Root(), "images", "blobs", "sha256")); err != nil || len(blobs) != 0 {
		t.Errorf("stored blobs are %v, %v", blobs, err)
	}
	if id := e.pull("docker.io/" + repository + ":good"); id != good.Config.String() {
		t.Errorf("the image itself: %s", id)
	}
}
