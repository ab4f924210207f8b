package image

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Stage is what a pull or one of its layers is at.
type Stage string

// Stages of a pull: StageResolving, StageFetching, StageRecording, then
// StageDone or StageFailed. Those of a layer: StageWaiting, then StageReused,
// or StageFetching, StageUnpacking, StageVerifying and StageDone.
const (
	StageResolving Stage = "resolving" // what is the image made of?
	StageWaiting   Stage = "waiting"   // for its turn, or for another pull that fetches the layer
	StageFetching  Stage = "fetching"  // arrives, and is unpacked while it does
	StageUnpacking Stage = "unpacking" // has arrived
	StageVerifying Stage = "verifying" // is unpacked; digests are compared
	StageRecording Stage = "recording" // the layers are here and become an image
	StageReused    Stage = "reused"    // was here, or another pull fetched it
	StageDone      Stage = "done"
	StageFailed    Stage = "failed"
)

// Values of Progress.Op.
const (
	opPull   = "pull"
	opImport = "import"
)

// Progress is how far a pull or an import has come. Bytes are those of the
// layers as the registry or archive has them, mostly compressed.
type Progress struct {
	Op           string // "pull", "import" or "repair"
	Image        string // name in full; of an image without a name the archive
	Began, Ended time.Time
	Stage        Stage
	ID           string          // of the image, once it is done
	Err          error           // why it failed; an *Error, or ctx's
	Layers       []LayerProgress // bottom first, each blob once; none while it resolves
	Bytes, Total int64           // of the layers that are not reused
	Rate         float64         // bytes a second over the last seconds
}

// LayerProgress is how far a layer has come.
type LayerProgress struct {
	Blob    digest.Digest
	Stage   Stage
	Bytes   int64   // what is here
	Total   int64   // what the manifest says
	Resumed int64   // what an earlier try had left, part of Bytes
	Rate    float64 // bytes a second over the last seconds
}

// Left is how long the rest takes at this rate; false where nobody can know:
// while the image resolves, and while nothing arrives.
func (p *Progress) Left() (time.Duration, bool) { return left(p.Total-p.Bytes, p.Rate, p.Total > 0) }

// Left is how long the rest of the layer takes; see Progress.Left.
func (l *LayerProgress) Left() (time.Duration, bool) {
	return left(l.Total-l.Bytes, l.Rate, l.Stage == StageFetching)
}

func left(bytes int64, rate float64, known bool) (time.Duration, bool) {
	seconds := float64(bytes) / rate
	if !known || rate <= 0 || seconds > (1000*time.Hour).Seconds() {
		return 0, false
	}
	return time.Duration(seconds * float64(time.Second)), true
}

// Reason is the kind of failure in one word, for counting; "" when there is
// none.
func (p *Progress) Reason() string {
	if p.Err == nil {
		return ""
	}
	for _, r := range []struct {
		err  error
		word string
	}{
		{context.Canceled, "canceled"}, {ErrNotFound, "not_found"}, {ErrInvalidReference, "invalid_reference"},
		{ErrInvalidImage, "invalid_image"}, {ErrNoSpace, "no_space"}, {ErrUnauthorized, "unauthorized"},
		{ErrRegistryUnavailable, "registry_unavailable"}, {ErrSignature, "signature"},
	} {
		if errors.Is(p.Err, r.err) {
			return r.word
		}
	}
	return "other"
}

// lingering is how long a pull that has ended is still shown.
const lingering = 10 * time.Second

// board is where all pulls and imports are watched.
type board struct {
	pulled, imported atomic.Int64 // bytes

	mu    sync.Mutex
	all   []*tracker     // in the order they began; guarded by mu
	ended func(Progress) // guarded by mu; may be nil
}

// Progress tells of every pull and import that runs or ended in the last ten
// seconds, in the order they began. From memory.
func (s *Store) Progress() []Progress {
	now := time.Now()
	var list []Progress
	for _, t := range s.board.current(now) {
		list = append(list, t.snapshot(now))
	}
	return list
}

// Fetched are the bytes of layers that have come since the store was opened, from
// registries and from archives.
func (s *Store) Fetched() (pulled, imported int64) {
	return s.board.pulled.Load(), s.board.imported.Load()
}

// WatchPulls has f called with the last state of each pull and import as it
// ends. f must not block. To be called once, before the first.
func (s *Store) WatchPulls(f func(Progress)) {
	s.board.mu.Lock()
	defer s.board.mu.Unlock()
	s.board.ended = f
}

// current drops what ended long ago and lists the rest.
func (b *board) current(now time.Time) []*tracker {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all = slices.DeleteFunc(b.all, func(t *tracker) bool { return t.over(now) })
	return slices.Clone(b.all)
}

func (b *board) begin(op, image string) *tracker {
	now := time.Now()
	b.current(now)
	t := &tracker{board: b, p: Progress{Op: op, Image: image, Began: now, Stage: StageResolving}, meter: meter{began: now}}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all = append(b.all, t)
	return t
}

// tracker counts one pull. Layers are named by their blob; those that the
// image does not have are not counted.
type tracker struct {
	board *board

	mu     sync.Mutex
	p      Progress // without Layers and sums
	meter  meter
	layers []*layerTracker
}

type layerTracker struct {
	LayerProgress
	meter meter
}

// plan sets the layers there are to fetch. A second round begins anew.
func (t *tracker) plan(blobs []ispec.Descriptor) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.p.Stage, t.layers = StageFetching, nil
	for _, b := range blobs {
		if t.find(b.Digest) == nil {
			t.layers = append(t.layers, &layerTracker{LayerProgress: LayerProgress{Blob: b.Digest, Stage: StageWaiting, Total: b.Size}})
		}
	}
}

// find is called with mu held.
func (t *tracker) find(blob digest.Digest) *layerTracker {
	for _, l := range t.layers {
		if l.Blob == blob {
			return l
		}
	}
	return nil
}

// enter sets the stage of the pull itself.
func (t *tracker) enter(stage Stage) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.p.Stage = stage
}

// layer sets the stage of a layer.
func (t *tracker) layer(blob digest.Digest, stage Stage) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l := t.find(blob); l != nil {
		l.Stage = stage
		if stage == StageFetching {
			l.Bytes, l.Resumed, l.meter = 0, 0, meter{began: time.Now()}
		}
	}
}

// resume counts what an earlier try has left of a layer, after it entered
// StageFetching.
func (t *tracker) resume(blob digest.Digest, bytes int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l := t.find(blob); l != nil {
		l.Bytes += bytes
		l.Resumed += bytes
	}
}

// got counts bytes that came from the registry. The last byte ends
// StageFetching.
func (t *tracker) got(blob digest.Digest, bytes int) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.find(blob)
	if l == nil {
		return
	}
	if t.p.Op == opImport {
		t.board.imported.Add(int64(bytes))
	} else {
		t.board.pulled.Add(int64(bytes))
	}
	t.meter.add(now, int64(bytes))
	l.meter.add(now, int64(bytes))
	if l.Bytes += int64(bytes); l.Bytes >= l.Total && l.Stage == StageFetching {
		l.Stage = StageUnpacking
	}
}

// end sets the outcome.
func (t *tracker) end(id string, err error) {
	now := time.Now()
	t.mu.Lock()
	t.p.Ended, t.p.ID, t.p.Err, t.p.Stage = now, id, err, StageDone
	if err != nil {
		t.p.Stage = StageFailed
	}
	t.mu.Unlock()
	t.board.mu.Lock()
	tell := t.board.ended
	t.board.mu.Unlock()
	if tell != nil {
		tell(t.snapshot(now))
	}
}

func (t *tracker) over(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.p.Ended.IsZero() && now.Sub(t.p.Ended) > lingering
}

func (t *tracker) snapshot(now time.Time) Progress {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.p
	if p.Ended.IsZero() {
		p.Rate = t.meter.rate(now)
	}
	for _, l := range t.layers {
		one := l.LayerProgress
		if one.Stage == StageFetching && p.Ended.IsZero() {
			one.Rate = l.meter.rate(now)
		}
		p.Layers = append(p.Layers, one)
		if one.Stage != StageReused {
			p.Bytes += one.Bytes
			p.Total += one.Total
		}
	}
	return p
}

// meterSeconds is over how long a rate is taken.
const meterSeconds = 5

// meter counts bytes in slots of a second.
type meter struct {
	began time.Time
	slots [meterSeconds + 1]int64
	last  int64 // number of the slot that was written last, from began on
}

func (m *meter) add(now time.Time, bytes int64) {
	m.turn(now)
	m.slots[m.last%int64(len(m.slots))] += bytes
}

// turn empties the slots of seconds in which nothing came.
func (m *meter) turn(now time.Time) {
	current := int64(now.Sub(m.began) / time.Second)
	for n := 0; m.last < current && n < len(m.slots); n++ {
		m.last++
		m.slots[m.last%int64(len(m.slots))] = 0
	}
	m.last = max(m.last, current)
}

// rate is bytes a second over the last five seconds and what has passed of this
// one, or since the meter began.
func (m *meter) rate(now time.Time) float64 {
	m.turn(now)
	var sum int64
	for _, bytes := range m.slots {
		sum += bytes
	}
	since := now.Sub(m.began)
	over := min(since, meterSeconds*time.Second+since%time.Second)
	if over < 100*time.Millisecond {
		return 0 // too early to tell
	}
	return float64(sum) / over.Seconds()
}
