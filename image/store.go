package image

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/content"
	"berth/image/fetch"
	"berth/image/layer"
	"berth/image/policy"
)

// Options configures a Store. The zero value of each means its default.
type Options struct {
	Root                   string        // required: the images directory
	Held                   []string      // ids of images that containers may run on as the store is opened
	MaxConcurrentDownloads int           // layers of one pull at the same time; 3
	ConnectionsPerLayer    int           // for a large layer whose registry is slow; 4
	MaxConcurrentUnpacks   int           // layers of all pulls and imports at the same time; 16
	RegistriesConf         string        // containers-registries.conf(5); its drop-ins are in <path>.d
	HostsDir               string        // containerd's directory of hosts.toml files; none
	CertsDir               string        // certs.d; /etc/containers/certs.d and /etc/docker/certs.d
	PolicyPath             string        // containers-policy.json(5); none admits every image
	PolicyDir              string        // of NAMESPACE.json, the policies of single namespaces; none: all have PolicyPath
	RegistriesDir          string        // containers-registries.d(5), where signatures are; none: the system's
	AuthFile               string        // containers-auth.json(5); none means only what a pull brings
	IdleTimeout            time.Duration // a registry that sends nothing for so long is given up; 60 s
	MinRate                int64         // bytes a second, over MinRateWindow, that a layer must bring; 0: no such rule
	MinRateWindow          time.Duration // 60 s
	PartialBytes           int64         // what broken pulls may leave for the next one; 4 GiB, negative: nothing
	PartialAge             time.Duration // and for how long; 24 h
	KeepLayerBlobs         bool          // keep layers as they were fetched, too
	Pinned                 []string      // images to report as pinned; see CheckPin
}

// Store is the node's images. All methods may be called at the same time.
type Store struct {
	root   string
	config atomic.Pointer[Options] // see options
	pins   atomic.Pointer[[]pin]   // of Options.Pinned
	blobs  *content.Store
	layers *layers
	left   *leftovers
	trash  *trash
	disk   *disk
	boot   string
	// recovered is what Recovered says.
	recovered string

	// change is held by whoever changes records, over the writing of them. No
	// reader ever takes it.
	change  sync.Mutex
	images  images                     // guarded by change
	lost    map[string]*lostImage      // by image id; guarded by change
	holders map[string]map[string]bool // holder → image ids; guarded by change
	configs map[string]ispec.Image     // guarded by change
	view    atomic.Pointer[view]       // what readers see

	verdicts policy.Verdicts

	checking chan struct{} // holds one token while a check runs

	flights flights
	board   board
	claims  claims
	slots   *slots
	ranges  *fetch.Memory
	durable *durability
	closing context.CancelFunc
	closed  sync.Once
	life    context.Context
}

// view is a consistent picture of the store for readers.
type view struct {
	list     []*Record // sorted by id
	byID     map[string]*Record
	byName   map[string]*Record // tags and digests in full
	overhead layer.Usage        // everything that is not a layer
}

// Scratch makes a directory for a caller's files that are as large as images. The
// caller removes it; what a killed daemon leaves there goes at the next start.
func (s *Store) Scratch() (string, error) {
	dir, err := s.disk.mkdirTemp(s.staging(), "scratch-")
	if err != nil {
		return "", fmt.Errorf("make scratch directory: %w", err)
	}
	return dir, nil
}

// Usage is what the store takes on its filesystem.
type Usage struct {
	Mountpoint string // the store's root directory
	Bytes      uint64 // allocated, as du counts
	Layers     uint64 // the part of Bytes that layers take
	Left       uint64 // the part that pulls take that broke off, to be resumed
	Inodes     uint64
}

// Open makes or opens a store. It empties staging, drops what a power cut may
// have torn (see the package comment) and images whose parts are missing. It
// blocks for as long as reading the records takes; deletions go on behind. Only
// one Store may be open on a root: the caller sees to that.
func Open(ctx context.Context, o Options) (*Store, error) {
	return openOn(ctx, o, &disk{boot: bootID()})
}

func openOn(ctx context.Context, o Options, d *disk) (*Store, error) {
	if o.Root == "" {
		return nil, fmt.Errorf("open image store: no root directory")
	}
	for _, dir := range []string{"", "layers", "staging", "blobs/sha256"} {
		if err := os.MkdirAll(filepath.Join(o.Root, dir), 0o700); err != nil {
			return nil, fmt.Errorf("open image store: %w", err)
		}
	}
	s := &Store{root: o.Root, disk: d, slots: newSlots(1), ranges: fetch.NewMemory(rangeMemory), holders: map[string]map[string]bool{}, configs: map[string]ispec.Image{}}
	s.checking = make(chan struct{}, 1)
	if err := s.use(o); err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	s.life, s.closing = context.WithCancel(context.Background())
	s.flights.running = map[string]*flight{}
	s.claims.open = map[digest.Digest]*claim{}
	if err := s.load(ctx); err != nil {
		s.closing()
		if s.left != nil {
			s.left.close()
		}
		if s.trash != nil {
			s.trash.close()
		}
		return nil, fmt.Errorf("open image store: %w", err)
	}
	s.durable = startDurability(s)
	s.restoreLost()
	return s, nil
}

func (s *Store) load(ctx context.Context) (err error) {
	s.boot = s.disk.boot
	if s.trash, err = openTrash(filepath.Join(s.root, "trash"), s.disk); err != nil {
		return err
	}
	dropTemporary(s.root)
	if err := s.emptyStaging(); err != nil {
		return err
	}
	if s.blobs, err = content.Open(filepath.Join(s.root, "blobs")); err != nil {
		return err
	}
	if s.layers, err = loadLayers(filepath.Join(s.root, "layers"), s.boot, s.trash); err != nil {
		return err
	}
	stored, err := s.recoverImages()
	if err != nil {
		return err
	}
	kept := images{}
	for id, img := range stored {
		if err := ctx.Err(); err != nil {
			return err
		}
		if s.adopt(id, img) {
			kept[id] = img
		}
	}
	s.spareHeld(stored, kept)
	if err := s.findLost(stored, kept); err != nil {
		return err
	}
	if !readable(s.root) || len(kept) != len(stored) {
		if err := s.disk.saveShorter(s.root, kept); err != nil {
			return err
		}
	}
	s.disk.keepReserve(s.root)
	s.images = kept
	if s.left, err = openLeftovers(filepath.Join(s.root, "partial"), s.options, s.layers, s.trash); err != nil {
		return err
	}
	s.layers.sweep()
	if err := s.blobs.Sweep(s.wantedBlobs()); err != nil {
		return err
	}
	s.publish()
	return nil
}

// adopt counts an image's layers as used when all its parts are whole.
func (s *Store) adopt(id string, img *saved) bool {
	config, err := s.readConfig(id, img)
	if err != nil || len(config.RootFS.DiffIDs) != len(img.Layers) {
		return false
	}
	for _, blob := range img.documents() {
		if _, err := s.blobs.Get(blob); err != nil {
			return false
		}
	}
	for i, n := range img.Layers {
		e := s.layers.byN[n]
		if e == nil || e.key.diffID != config.RootFS.DiffIDs[i] {
			return false
		}
	}
	s.layers.use(img.Layers)
	img.Replaced = slices.DeleteFunc(img.Replaced, func(r replaced) bool {
		return slices.ContainsFunc(r.Layers, func(n int) bool { return s.layers.byN[n] == nil })
	})
	for _, r := range img.Replaced {
		s.layers.use(r.Layers)
	}
	s.configs[id] = config
	return true
}

// readConfig reads an image's config, or makes that of an artifact, whose id is
// its manifest.
func (s *Store) readConfig(id string, img *saved) (ispec.Image, error) {
	var config ispec.Image
	data, err := s.blobs.Get(digest.Digest(id))
	if err != nil {
		return config, err
	}
	if img.Artifact == "" {
		err = json.Unmarshal(data, &config)
		return lean(config), err
	}
	b, err := document{data: data, mediaType: ispec.MediaTypeImageManifest}.parse()
	if err != nil || b.artifact == nil {
		return config, fmt.Errorf("%s is no artifact: %w", id, err)
	}
	return b.artifact.config(b.layers), nil
}

// lean drops what nobody asks for and what takes the most memory.
func lean(c ispec.Image) ispec.Image {
	c.History = nil
	return c
}

// RawConfig reads an image's config as it came, from the disk; that of an artifact
// need not be JSON, then it is a string of base64. ErrNotFound when there is no
// such image (any more).
func (s *Store) RawConfig(id string) (json.RawMessage, error) {
	r := s.view.Load().byID[id]
	if r == nil { // its blobs may still be there
		return nil, fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	at := digest.Digest(id)
	if r.Artifact != "" {
		at = r.saved.Config
	}
	data, err := s.blobs.Get(at)
	if err != nil {
		return nil, fmt.Errorf("read config of image %s: %w", id, err)
	}
	if !json.Valid(data) {
		return json.Marshal(data)
	}
	return data, nil
}

// wantedBlobs are those that images refer to. Called with change held.
func (s *Store) wantedBlobs() map[digest.Digest]bool {
	wanted := map[digest.Digest]bool{}
	layers := s.options().KeepLayerBlobs
	for id, img := range s.images {
		for _, d := range img.parts(id) {
			wanted[d] = true
		}
		for _, d := range img.LayerBlobs {
			wanted[d] = wanted[d] || layers
		}
	}
	for id, l := range s.lost {
		for _, d := range slices.Concat(l.parts(id), l.LayerBlobs) {
			wanted[d] = true
		}
	}
	return wanted
}

func (s *Store) emptyStaging() error {
	dir := filepath.Join(s.root, "staging")
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, item := range list {
		s.trash.take(filepath.Join(dir, item.Name()))
	}
	return nil
}

func bootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(data))
}

// Close ends running pulls and background work and waits for them. What was
// pulled stays; deletions go on at the next Open. Idempotent.
func (s *Store) Close() error {
	s.closed.Do(func() {
		s.closing()
		s.flights.wait()
		s.durable.close()
		s.left.close()
		s.trash.close()
	})
	return nil
}

// publish makes the current records visible. Those that have not changed stay: with
// hundreds of images it is they that would take the time. Called with change held,
// or before anybody else knows the store.
func (s *Store) publish() { s.show(s.view.Load()) }

// publishAnew is publish when sizes or pins may have changed.
func (s *Store) publishAnew() { s.show(nil) }

func (s *Store) show(before *view) {
	v := &view{byID: make(map[string]*Record, len(s.images)), byName: make(map[string]*Record, 2*len(s.images))}
	for id, img := range s.images {
		if img.Removed {
			continue
		}
		r := before.recordOf(id, img)
		if r == nil {
			r = s.record(id, img)
		}
		v.list = append(v.list, r)
		v.byID[id] = r
		for _, n := range r.RepoTags {
			v.byName[n] = r
		}
		for _, n := range r.RepoDigests {
			v.byName[n] = r
		}
	}
	slices.SortFunc(v.list, func(a, b *Record) int { return strings.Compare(a.ID, b.ID) })
	v.overhead = s.overhead()
	s.view.Store(v)
}

func (s *Store) record(id string, img *saved) *Record {
	r := &Record{
		ID: id, RepoTags: slices.Clone(img.Tags), RepoDigests: slices.Clone(img.Digests),
		Config: s.configs[id], Annotations: img.Annotations, PulledAt: img.PulledAt, Artifact: img.Artifact, saved: img,
	}
	slices.Sort(r.RepoTags)
	bottom := 0
	for i, e := range s.layers.entries(img.Layers) {
		if e.meta.Opaque {
			bottom = i
		}
		r.Layers = append(r.Layers, e.diff())
	}
	// An opaque root is beyond overlay: what it hides is not mounted.
	r.Layers = slices.Clip(r.Layers[bottom:])
	r.Size = s.layers.sizeOf(img.Layers)
	for _, blob := range append([]digest.Digest{digest.Digest(id)}, img.documents()...) {
		r.Size += uint64(s.blobs.Size(blob))
	}
	r.Pinned = img.Pinned || s.isPinned(r)
	return r
}

// overhead measures what is not a layer: records, blobs, the directories.
func (s *Store) overhead() layer.Usage {
	at := func(part string) string { return filepath.Join(s.root, part) }
	var u layer.Usage
	for _, dir := range []string{"", "layers", "staging", "trash", refsFile, reserveFile, preloadedFile, brokenFile, lostFile} {
		u = u.Add(layer.UsageOf(at(dir)))
	}
	current, err := os.Stat(at(refsFile))
	synced, syncedErr := os.Stat(at(durableFile))
	if syncedErr == nil && (err != nil || !os.SameFile(current, synced)) {
		u = u.Add(layer.UsageOf(at(durableFile)))
	}
	return u.Add(s.blobs.Usage())
}

// List returns all images, sorted by id, from memory. The records are shared:
// read only.
func (s *Store) List() []*Record { return s.view.Load().list }

// Usage says what the store takes, without looking at the disk. What waits in
// the trash or is being pulled is not in it.
func (s *Store) Usage() Usage {
	layers, left := s.layers.usage(), s.left.usage()
	u := s.view.Load().overhead.Add(layers).Add(left)
	return Usage{Mountpoint: s.root, Bytes: u.Bytes, Layers: layers.Bytes, Left: left.Bytes, Inodes: u.Inodes}
}

// Resolve finds an image by id (also in part, when it is the only one), by
// name:tag or by name@digest; a name without a registry is one of those it would
// be pulled by. From memory. ErrNotFound, ErrInvalidReference.
func (s *Store) Resolve(ref string) (*Record, error) {
	v := s.view.Load()
	prefix, full := asID(ref)
	if full {
		if r := v.byID[prefix]; r != nil {
			return r, nil
		}
		return nil, fmt.Errorf("%w: %s", ErrNotFound, ref)
	}
	names, err := s.readings(ref)
	if err == nil {
		for _, n := range names {
			if r := v.byName[n.String()]; r != nil {
				return r, nil
			}
		}
	}
	if prefix != "" {
		r, found := v.byPrefix(prefix)
		if found > 1 {
			return nil, fmt.Errorf("%w: %q begins the ids of %d images", ErrInvalidReference, ref, found)
		}
		if found == 1 {
			return r, nil
		}
	}
	if err != nil && prefix == "" {
		return nil, err
	}
	return nil, fmt.Errorf("%w: %s", ErrNotFound, ref)
}

// recordOf is the record that was made of img, nil when there is none.
func (v *view) recordOf(id string, img *saved) *Record {
	if v == nil {
		return nil
	}
	if r := v.byID[id]; r != nil && r.saved == img {
		return r
	}
	return nil
}

func (v *view) byPrefix(prefix string) (match *Record, found int) {
	for _, r := range v.list {
		if strings.HasPrefix(r.ID, prefix) {
			match = r
			found++
		}
	}
	return match, found
}

// heldBy lists the ids that anybody holds. Called with change held.
func (s *Store) heldBy() map[string]bool {
	held := map[string]bool{}
	for _, ids := range s.holders {
		maps.Copy(held, ids)
	}
	return held
}
