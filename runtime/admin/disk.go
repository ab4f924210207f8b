package admin

// What the operator can ask about the disk under the images.
const (
	CheckImages Method[CheckRequest, CheckReply]         = "CheckImages"
	DiskUsage   Method[DiskUsageRequest, DiskUsageReply] = "DiskUsage"
)

// CheckRequest names images to check; none are all, with what belongs to no image.
type CheckRequest struct {
	Images []string `json:"images,omitempty"`
	Repair bool     `json:"repair,omitempty"`
}

// CheckReply is what a check has found.
type CheckReply struct {
	Images   int       `json:"images"` // looked at
	Layers   int       `json:"layers"`
	Findings []Finding `json:"findings"`
	Repairs  []Repair  `json:"repairs"` // none when no repair was asked for
}

// Finding is one thing that is not as it should be.
type Finding struct {
	Images  []string `json:"images"` // a name, or the id, of each image it harms; none: it belongs to no image
	Layer   string   `json:"layer,omitempty"`
	Where   string   `json:"where"`          // below the images' directory
	Path    string   `json:"path,omitempty"` // in the layer
	Problem string   `json:"problem"`
}

// Repair is what became of an image that had findings, or of what belongs to none.
type Repair struct {
	Image   string `json:"image,omitempty"`
	Done    bool   `json:"done"`
	Message string `json:"message"`
}

// DiskUsageRequest asks for all.
type DiskUsageRequest struct{}

// DiskUsageReply says what takes the disk. The kinds add up to Total.
type DiskUsageReply struct {
	Root   string      `json:"root"` // the images' directory
	Total  Usage       `json:"total"`
	Kinds  []Kind      `json:"kinds"`
	Images []ImageDisk `json:"images"`
	// Containers are their records and writable layers, which are outside Root.
	Containers Usage `json:"containers"`
}

// Usage counts as du does.
type Usage struct {
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
}

// Kind is what takes space for one reason.
type Kind struct {
	Name string `json:"name"`
	Usage
}

// ImageDisk is what an image takes.
type ImageDisk struct {
	ID         string   `json:"id"`
	Names      []string `json:"names"`
	Total      Usage    `json:"total"`
	Unique     Usage    `json:"unique"` // goes with the image, once no container uses it
	SharedWith []string `json:"sharedWith"`
	UsedBy     []User   `json:"usedBy"`
	Removed    bool     `json:"removed,omitempty"` // kept for its containers only
}
