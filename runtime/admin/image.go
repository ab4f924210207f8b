package admin

// ImportImage takes in the images of an archive that lies on the node.
const ImportImage Method[ImportRequest, ImportReply] = "ImportImage"

// ImportRequest names a docker or OCI archive.
type ImportRequest struct {
	Path string `json:"path"` // absolute
}

// ImportReply says what the archive brought.
type ImportReply struct {
	Images []string `json:"images"` // a name of each image, or its id
}
