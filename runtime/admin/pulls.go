package admin

import "time"

// Pulls tells how far each running pull and import is, and how those went that
// ended in the last seconds.
const Pulls Method[PullsRequest, PullsReply] = "Pulls"

// PullsRequest asks for all.
type PullsRequest struct{}

// PullsReply lists them in the order they began.
type PullsReply struct {
	Pulls []Pull `json:"pulls"`
}

// Pull is a pull or an import. Bytes are compressed ones, as the registry or
// archive has them, of the layers that are not reused; rates are bytes a second
// over the last seconds.
type Pull struct {
	Op      string    `json:"op"` // "pull" or "import"
	Image   string    `json:"image"`
	Began   time.Time `json:"began"`
	Seconds float64   `json:"seconds"`         // it runs, or ran
	Ended   bool      `json:"ended,omitempty"` // the stage is done or failed
	Stage   string    `json:"stage"`           // resolving, fetching, recording, done, failed
	ID      string    `json:"id,omitempty"`    // of the image, when done
	Error   string    `json:"error,omitempty"` // when failed
	Bytes   int64     `json:"bytes"`
	Total   int64     `json:"total"`
	Rate    float64   `json:"rate"`
	// Left is how many seconds the rest takes at this rate; nil: nobody knows.
	Left   *float64    `json:"left,omitempty"`
	Layers []PullLayer `json:"layers"` // bottom first; none while it resolves
}

// PullLayer is a layer of a Pull.
type PullLayer struct {
	Blob    string   `json:"blob"`
	Stage   string   `json:"stage"` // waiting, fetching, unpacking, verifying, done, reused
	Bytes   int64    `json:"bytes"`
	Total   int64    `json:"total"`
	Resumed int64    `json:"resumed,omitempty"` // what an earlier try had left, part of Bytes
	Rate    float64  `json:"rate"`
	Left    *float64 `json:"left,omitempty"`
}
