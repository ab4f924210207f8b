package image

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/types"

	"berth/image/fetch"
	"berth/image/policy"
	"berth/image/registries"
)

// PullRequest asks for an image by name, with a tag or a digest.
type PullRequest struct {
	Reference   string
	Credentials *Credentials // nil: those of the auth file, or none
	Namespace   string       // of the pod that wants it, for its signature policy; none: the default one
	// Answer tells whether files answer that are about to be run, in time; nil: all do.
	Answer func(ctx context.Context, paths ...string) error
}

// Pull fetches an image and returns its id. It blocks until the image is there.
//
// The registry is always asked, also when the image is present: a tag may have
// moved, and the credentials may not do any more. Layers that are here are not
// fetched again. Calls for the same image with the same credentials share one
// pull; a caller whose ctx ends leaves it, and when all have left it ends
// within two seconds. A failed pull leaves no image, only leftovers for the next
// try: see Options.PartialBytes.
//
// A name without a registry is looked for in those that registries.conf says,
// see registries.LongNames. The next of several is asked when one does not have
// the image or does not give it away, but not when one is merely out of reach:
// a name must not mean another image because a registry is down.
//
// The error is an *Error, or ctx's; ErrInvalidReference for an id, which no
// registry knows.
func (s *Store) Pull(ctx context.Context, r PullRequest) (string, error) {
	if _, full := asID(r.Reference); full {
		return "", fmt.Errorf("%w: %q is an image id; pull by name", ErrInvalidReference, r.Reference)
	}
	names, err := within(ctx, func() ([]name, error) { return s.wantedNames(r.Reference) })
	if err != nil {
		return "", err
	}
	if r.Credentials != nil && r.Credentials.ServerAddress == "" && registries.IsShort(r.Reference) {
		c := *r.Credentials
		c.ServerAddress = hub // what a kubelet takes such a name for when it looks for credentials
		r.Credentials = &c
	}
	var failed []error
	for _, n := range names {
		id, err := s.pullName(ctx, n, r)
		if err == nil {
			return id, nil
		}
		failed = append(failed, err)
		if !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrUnauthorized) {
			break
		}
	}
	return "", together(r.Reference, failed)
}

// pullName joins or starts the pull of one name.
func (s *Store) pullName(ctx context.Context, n name, r PullRequest) (string, error) {
	file, err := s.policies().Path(r.Namespace)
	if err != nil {
		return "", s.describe("pull image", n.String(), err, nil)
	}
	key := n.String() + "\x00" + r.Credentials.key() + "\x00" + file
	return s.flights.join(ctx, s.life, key, func(ctx context.Context) (string, error) {
		t := s.board.begin(opPull, n.String())
		id, err := s.pull(ctx, job{repository: n, track: t, answer: r.Answer}, r.Credentials, file)
		if err != nil {
			id, err = "", s.describe("pull image", n.String(), err, r.Credentials.secrets())
		}
		t.end(id, err)
		return id, err
	})
}

func (s *Store) pull(ctx context.Context, j job, c *Credentials, policyFile string) (string, error) {
	n := j.repository
	caller, err := c.caller()
	if err != nil {
		return "", err
	}
	ref, err := docker.NewReference(n.named)
	if err != nil {
		return "", fmt.Errorf("%w: %v", ErrInvalidReference, err)
	}
	j.ref, j.sys = ref, s.system()
	j.open = func(ctx context.Context) (types.ImageSource, error) {
		from, err := within(ctx, func() (*registries.Source, error) {
			from := s.options().registries()
			from.Answer = j.answer
			return registries.Open(ctx, from, n.named, caller)
		})
		if err != nil {
			return nil, err
		}
		return &remote{Source: from, ref: ref, answer: j.answer}, nil
	}
	if j.policy, err = within(ctx, func() (*policy.Policy, error) { return policy.Read(policyFile) }); err != nil {
		return "", err
	}
	if tag := n.tag(); tag != "" {
		j.tags = []string{tag}
	}
	return s.fetch(ctx, j)
}

// within waits for what reads the node's files no longer than ctx lasts: a disk
// that does not answer must not keep a pull that nobody wants. What comes later is
// forgotten.
func within[T any](ctx context.Context, read func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		value, err := read()
		done <- answer{value, err}
	}()
	select {
	case a := <-done:
		return a.value, a.err
	case <-ctx.Done():
		var none T
		return none, context.Cause(ctx)
	}
}

// names says whether the job gives the image this name.
func (j job) names(n string) bool {
	if n == "" {
		return len(j.tags) == 0 && j.repository.named == nil
	}
	if slices.Contains(j.tags, n) {
		return true
	}
	return j.repository.named != nil && strings.HasPrefix(n, j.repository.repository()+"@")
}

// job is one image to fetch from wherever.
type job struct {
	ref        types.ImageReference
	sys        *types.SystemContext
	tags       []string                                         // names to give it
	repository name                                             // for digests; zero when there is none to speak of
	tagsOf     func(id string) []string                         // more names, known by the image's id; may be nil
	open       func(context.Context) (types.ImageSource, error) // nil: as ref says
	parallel   bool                                             // the source may be read by several at once, whatever it says
	again      bool                                             // brings layers of an image that is here, and nothing else
	track      *tracker
	answer     func(ctx context.Context, paths ...string) error // as PullRequest.Answer
	policy     *policy.Policy                                   // who decides; nil admits
	origin     string                                           // of what an archive brings, see originOf; else empty
	pin        bool                                             // the image
}

// fetch runs a job. On a full disk it returns when what it had got is deleted;
// and when there was something to be deleted before, it tries once more then.
func (s *Store) fetch(ctx context.Context, j job) (string, error) {
	deleting := s.trash.busy()
	id, err := s.fetchSettled(ctx, j)
	if err != nil && classify(err) == ErrNoSpace {
		s.trash.wait(ctx)
		if deleting && ctx.Err() == nil {
			id, err = s.fetchSettled(ctx, j)
		}
	}
	return id, err
}

// fetchSettled runs a job. A second round is needed when a stored layer turns out to
// have been settled for other lower layers and must be unpacked anew, or when what an
// earlier try had left was no good.
func (s *Store) fetchSettled(ctx context.Context, j job) (string, error) {
	var stale *staleLayerError
	fresh := map[string]bool{}
	for range 3 {
		id, err := s.fetchOnce(ctx, j, fresh)
		if errors.As(err, new(*spoiledError)) {
			id, err = s.fetchOnce(ctx, j, fresh)
		}
		if !errors.As(err, &stale) {
			return id, err
		}
		fresh[stale.diffID] = true
	}
	return "", fmt.Errorf("settle layers: %w", stale)
}

func (s *Store) fetchOnce(ctx context.Context, j job, fresh map[string]bool) (string, error) {
	if j.open == nil {
		j.open = func(ctx context.Context) (types.ImageSource, error) { return j.ref.NewImageSource(ctx, j.sys) }
	}
	src, err := j.open(ctx)
	if err != nil {
		return "", err
	}
	defer src.Close()
	r := &run{store: s, src: src, fresh: fresh, job: j, signatures: map[digest.Digest][][]byte{}}
	if from, ok := src.(*remote); ok {
		r.remote = fetch.New(from, s.patience(), fetch.Ranges{Connections: s.options().ConnectionsPerLayer, Room: s.ranges})
	}
	if err := r.inspect(ctx); err != nil {
		return "", err
	}
	if err := r.copy(ctx); err != nil {
		return "", err
	}
	return r.id, nil
}

// patience is how long a registry is waited for.
func (s *Store) patience() fetch.Patience {
	o := s.options()
	return fetch.Patience{Idle: o.IdleTimeout, MinRate: o.MinRate, Window: o.MinRateWindow}
}
