package admin

import (
	"encoding/json"
	"time"
)

// What the operator can ask about images. Names are references as in a pull, or
// ids, also in part.
const (
	ListImages   Method[ListImagesRequest, ListImagesReply]     = "ListImages"
	InspectImage Method[InspectImageRequest, InspectImageReply] = "InspectImage"
	RemoveImage  Method[RemoveImageRequest, RemoveImageReply]   = "RemoveImage"
	PinImage     Method[PinImageRequest, Image]                 = "PinImage"
	ImportImage  Method[ImportRequest, ImportReply]             = "ImportImage"
	ExportImage  Method[ExportRequest, ExportReply]             = "ExportImage"
)

// ListImagesRequest asks for all.
type ListImagesRequest struct{}

// ListImagesReply lists them by their first name, those without one last.
type ListImagesReply struct {
	Images []Image `json:"images"`
}

// Image is an image as lists show it.
type Image struct {
	ID      string   `json:"id"`
	Tags    []string `json:"tags"`
	Digests []string `json:"digests"`
	Size    uint64   `json:"size"` // bytes on disk, also those it shares with others
	Pinned  bool     `json:"pinned"`
	// Artifact is the type of an OCI artifact; empty for a container image.
	Artifact string `json:"artifact,omitempty"`
	// Created is when the image was made; nil when it does not say.
	Created  *time.Time `json:"created,omitempty"`
	PulledAt time.Time  `json:"pulledAt"` // or imported, or given another name
	UsedBy   []User     `json:"usedBy"`
}

// User is a container that uses an image, as its root or as a volume.
type User struct {
	Container string `json:"container"` // its id
	Name      string `json:"name"`
	Pod       string `json:"pod"` // namespace/name
}

// InspectImageRequest names an image.
type InspectImageRequest struct {
	Image string `json:"image"`
}

// InspectImageReply is everything that is stored of it.
type InspectImageReply struct {
	Image
	Manifest Manifest `json:"manifest"`
	// Others are indexes that the image was found through, and manifests of other
	// pulls.
	Others []Manifest      `json:"others"`
	Config json.RawMessage `json:"config"`
	Layers []Layer         `json:"layers"` // bottom first
}

// Manifest is a manifest or an index.
type Manifest struct {
	Digest    string          `json:"digest"`
	MediaType string          `json:"mediaType"`
	Content   json.RawMessage `json:"content"`
	// Signatures are the digests of what is stored of its signatures.
	Signatures []string `json:"signatures"`
}

// Layer is one of an image.
type Layer struct {
	DiffID    string `json:"diffID"`
	Blob      string `json:"blob"` // digest of what came
	MediaType string `json:"mediaType"`
	BlobSize  int64  `json:"blobSize"` // bytes
	BlobKept  bool   `json:"blobKept"`
	Size      uint64 `json:"size"` // bytes on disk, unpacked
	Inodes    uint64 `json:"inodes"`
	Dir       string `json:"dir"`
	// Durable: a power cut does not take it away.
	Durable  bool     `json:"durable"`
	SharedBy []string `json:"sharedBy"` // ids of other images
}

// RemoveImageRequest names an image.
type RemoveImageRequest struct {
	Image string `json:"image"`
}

// RemoveImageReply says what went. Layers that a container uses go with the last
// of those.
type RemoveImageReply struct {
	Image
	Freed uint64 `json:"freed"` // bytes of layers that no other image has
}

// PinImageRequest asks to keep the kubelet's garbage collection off an image, or no
// more.
type PinImageRequest struct {
	Image  string `json:"image"`
	Pinned bool   `json:"pinned"`
}

// ImportRequest names a docker or OCI archive on the node.
type ImportRequest struct {
	Path string `json:"path"` // absolute
	Pin  bool   `json:"pin,omitempty"`
}

// ImportReply says what the archive brought.
type ImportReply struct {
	Images []string `json:"images"` // a name of each image, or its id
}

// ExportRequest asks for an archive of an image.
type ExportRequest struct {
	Image string `json:"image"`
	Path  string `json:"path"` // absolute; must not exist
}

// ExportReply says what is in it.
type ExportReply struct {
	ID    string   `json:"id"` // that the image has where it is imported
	Names []string `json:"names"`
	Bytes int64    `json:"bytes"` // of the archive
	Exact bool     `json:"exact"` // digests are those of the registry
}
