package image

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/sandbox/regular"
)

// Record is what is known of one image. It is never changed once it is given
// out; a change of the image makes another.
type Record struct {
	ID          string   // "sha256:" and the config's digest; an artifact's is that of its manifest
	RepoTags    []string // full names with tag, sorted
	RepoDigests []string // repo@digest: as asked for first, then as found
	// Size is what the image takes on disk, in bytes: its layers unpacked
	// (each once, shared with other images or not), manifests and config.
	// It is what removing the image can free, which is what callers ask for.
	Size   uint64
	Config ispec.Image
	// Annotations are the manifest's, shared: read only. Nil when they are too
	// many to be carried along in every list.
	Annotations map[string]string
	Pinned      bool
	Layers      []string // diff directories, absolute, bottom first, as to be mounted
	PulledAt    time.Time
	// Artifact is the type of what is no container image but files, to be mounted
	// only; it has no Config to speak of.
	Artifact string

	saved *saved // read only
}

// saved is an image in refs.json.
type saved struct {
	Tags    []string        `json:"tags,omitempty"`
	Digests []string        `json:"digests,omitempty"`
	Blobs   []digest.Digest `json:"blobs"`  // manifests; the config is the image's id, but for an artifact
	Layers  []int           `json:"layers"` // bottom first, one per diffID of the config
	// Artifact is an artifact's type, Config its config: many have the same one.
	Artifact string        `json:"artifact,omitempty"`
	Config   digest.Digest `json:"config,omitempty"`
	// LayerBlobs are the layers as they were fetched, when those are kept.
	LayerBlobs []digest.Digest `json:"layerBlobs,omitempty"`
	PulledAt   time.Time       `json:"pulledAt"`
	// Signatures by the manifest they are of: blobs as package policy has them.
	Signatures map[digest.Digest][]digest.Digest `json:"signatures,omitempty"`
	// Imported says of which names (of "" where there is none) the image has by an
	// archive: see originOf.
	Imported map[string]string `json:"imported,omitempty"`
	// Annotations of the manifest that was pulled last; see Record.
	Annotations map[string]string `json:"annotations,omitempty"`
	// Pinned by the operator, whatever Options.Pinned says.
	Pinned bool `json:"pinned,omitempty"`
	// Replaced are layers that were damaged and that containers are mounted on.
	Replaced []replaced `json:"replaced,omitempty"`
	// Removed images are invisible; they are kept for containers that hold them.
	Removed bool `json:"removed,omitempty"`
}

// replaced are an image's layers of before a repair. They go with the last of
// the holders that held the image then.
type replaced struct {
	Layers  []int    `json:"layers"`
	Holders []string `json:"holders"`
}

// clone of nil is nil.
func (s *saved) clone() *saved {
	if s == nil {
		return nil
	}
	c := *s
	c.Tags = slices.Clone(s.Tags)
	c.Digests = slices.Clone(s.Digests)
	c.Blobs = slices.Clone(s.Blobs)
	c.LayerBlobs = slices.Clone(s.LayerBlobs)
	c.Signatures = maps.Clone(s.Signatures)
	c.Imported = maps.Clone(s.Imported)
	c.Replaced = slices.Clone(s.Replaced)
	return &c
}

// documents are the small blobs that an image needs beside its config:
// manifests and signatures, of an artifact also that.
func (s *saved) documents() []digest.Digest {
	all := slices.Concat(s.Blobs, s.proof())
	if s.Config != "" {
		all = append(all, s.Config)
	}
	return all
}

// parts are all blobs that an image cannot be without.
func (s *saved) parts(id string) []digest.Digest {
	return appendNew(s.documents(), digest.Digest(id))
}

// images is the content of refs.json. It is replaced, never changed.
type images map[string]*saved

// with returns a copy to change; records in it are still shared.
func (m images) with(id string, s *saved) images {
	c := maps.Clone(m)
	if s == nil {
		delete(c, id)
	} else {
		c[id] = s
	}
	return c
}

// takeTag removes a tag from the image that has it, unless that is keep.
func (m images) takeTag(tag, keep string) images {
	for id, s := range m {
		if id != keep && slices.Contains(s.Tags, tag) {
			c := s.clone()
			c.Tags = slices.DeleteFunc(c.Tags, func(t string) bool { return t == tag })
			c.Pinned = c.Pinned && len(c.Tags) > 0 // what has lost its last name is left to the garbage collection
			m = m.with(id, c)
		}
	}
	return m
}

// hasTags says whether an image has all of these tags.
func (m images) hasTags(tags []string, id string) bool {
	s := m[id]
	for _, tag := range tags {
		if s == nil || !slices.Contains(s.Tags, tag) {
			return false
		}
	}
	return true
}

const (
	refsFile    = "refs.json"
	durableFile = "refs.durable.json"
	syncedFile  = ".refs.synced" // becomes durableFile
	brokenFile  = "refs.json.broken"
	refsVersion = 1
)

// refs.json: the images and a checksum over them, so that a torn file is
// known for one.
type refs struct {
	Version int             `json:"version"`
	Sum     string          `json:"sum"`
	Images  json.RawMessage `json:"images"`
}

func encodeImages(m images) ([]byte, error) {
	raw, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(raw)
	// As json.Marshal would write a refs, without reading all of raw once more.
	head := fmt.Sprintf(`{"version":%d,"sum":%q,"images":`, refsVersion, hex.EncodeToString(sum[:]))
	return slices.Concat([]byte(head), raw, []byte("}")), nil
}

func decodeImages(data []byte) (images, error) {
	var r refs
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, err
	}
	if r.Version != refsVersion {
		return nil, fmt.Errorf("version %d %w, this build knows %d", r.Version, errVersion, refsVersion)
	}
	if sum := sha256.Sum256(r.Images); hex.EncodeToString(sum[:]) != r.Sum {
		return nil, errors.New("checksum does not match")
	}
	var m images
	if err := json.Unmarshal(r.Images, &m); err != nil {
		return nil, err
	}
	for id, s := range m {
		if s == nil || digest.Digest(id).Validate() != nil {
			return nil, fmt.Errorf("image %q is not one", id)
		}
	}
	return m, nil
}

// saveImages replaces refs.json without waiting for the disk.
func (d *disk) saveImages(root string, m images) error {
	data, err := encodeImages(m)
	if err != nil {
		return fmt.Errorf("encode image records: %w", err)
	}
	err = d.write(filepath.Join(root, refsFile), data)
	if err != nil {
		return fmt.Errorf("save image records: %w", err)
	}
	d.keepReserve(root)
	return nil
}

// readable says whether refs.json itself is there and whole.
func readable(root string) bool {
	data, err := regular.Read(filepath.Join(root, refsFile), maxRecords)
	if err == nil {
		_, err = decodeImages(data)
	}
	return err == nil
}

// maxRecords bounds a record file. Those of a hundred thousand images are below it.
const maxRecords = 1 << 30
