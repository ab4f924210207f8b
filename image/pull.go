package image

import (
	"context"
	"errors"
	"fmt"

	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/types"

	"berth/image/fetch"
)

// PullRequest asks for an image by name, with a tag or a digest.
type PullRequest struct {
	Reference   string
	Credentials *Credentials // nil: those of the auth file, or none
}

// Pull fetches an image and returns its id. It blocks until the image is there.
//
// The registry is always asked, also when the image is present: a tag may have
// moved, and the credentials may not do any more. Layers that are here are not
// fetched again. Calls for the same image with the same credentials share one
// pull; a caller whose ctx ends leaves it, and when all have left it ends
// within two seconds. A failed pull leaves nothing behind.
//
// The error is an *Error, or ctx's; ErrInvalidReference for an id, which no
// registry knows.
func (s *Store) Pull(ctx context.Context, r PullRequest) (string, error) {
	if _, full := asID(r.Reference); full {
		return "", fmt.Errorf("%w: %q is an image id; pull by name", ErrInvalidReference, r.Reference)
	}
	n, err := parseName(r.Reference)
	if err != nil {
		return "", err
	}
	key := n.String() + "\x00" + r.Credentials.key()
	return s.flights.join(ctx, s.life, key, func(ctx context.Context) (string, error) {
		t := s.board.begin("pull", n.String())
		id, err := s.pull(ctx, n, r.Credentials, t)
		if err != nil {
			id, err = "", s.describe("pull image", n.String(), err, r.Credentials.secrets())
		}
		t.end(id, err)
		return id, err
	})
}

func (s *Store) pull(ctx context.Context, n name, c *Credentials, t *tracker) (string, error) {
	sys, err := s.system(reference.Domain(n.named), c)
	if err != nil {
		return "", err
	}
	ref, err := docker.NewReference(n.named)
	if err != nil {
		return "", fmt.Errorf("%w: %v", ErrInvalidReference, err)
	}
	endpoints, err := s.endpoints(sys, n.named)
	if err != nil {
		return "", err
	}
	j := job{ref: ref, sys: sys, repository: n, endpoints: endpoints, track: t}
	if tag := n.tag(); tag != "" {
		j.tags = []string{tag}
	}
	return s.fetch(ctx, j)
}

// job is one image to fetch from wherever.
type job struct {
	ref        types.ImageReference
	sys        *types.SystemContext
	tags       []string                 // names to give it
	repository name                     // for digests; zero when there is none to speak of
	tagsOf     func(id string) []string // more names, known by the image's id; may be nil
	endpoints  []fetch.Endpoint         // where the layers are; none: ref has them
	parallel   bool                     // the source may be read by several at once, whatever it says
	track      *tracker
}

// fetch runs a job. A second round is needed when a stored layer turns out to
// have been settled for other lower layers and must be unpacked anew.
func (s *Store) fetch(ctx context.Context, j job) (string, error) {
	policy, err := s.policy()
	if err != nil {
		return "", err
	}
	defer policy.Destroy()
	var stale *staleLayerError
	fresh := map[string]bool{}
	for range 3 {
		id, err := s.fetchOnce(ctx, j, policy, fresh)
		if !errors.As(err, &stale) {
			return id, err
		}
		fresh[stale.diffID] = true
	}
	return "", fmt.Errorf("settle layers: %w", stale)
}

func (s *Store) fetchOnce(ctx context.Context, j job, policy *signature.PolicyContext, fresh map[string]bool) (string, error) {
	src, err := s.openSource(ctx, j)
	if err != nil {
		return "", err
	}
	defer src.Close()
	r := &run{store: s, src: src, fresh: fresh, job: j}
	if len(j.endpoints) > 0 {
		r.remote = fetch.New(j.endpoints, userAgent, s.patience())
		defer r.remote.Close()
	}
	if err := r.inspect(ctx, policy); err != nil {
		return "", err
	}
	if err := r.copy(ctx); err != nil {
		return "", err
	}
	return r.id, nil
}

// openSource connects to where the image is. The first contact is bounded like
// everything that waits for a registry.
func (s *Store) openSource(ctx context.Context, j job) (types.ImageSource, error) {
	g := fetch.NewGuard(ctx, s.patience())
	defer g.Stop()
	src, err := j.ref.NewImageSource(g.Ctx, j.sys)
	return src, g.Explain(err)
}

// patience is how long a registry is waited for.
func (s *Store) patience() fetch.Patience {
	return fetch.Patience{Idle: s.opt.IdleTimeout, MinRate: s.opt.MinRate, Window: s.opt.MinRateWindow}
}

// policy is read at each pull, so a changed file counts at once.
func (s *Store) policy() (*signature.PolicyContext, error) {
	p := &signature.Policy{Default: signature.PolicyRequirements{signature.NewPRInsecureAcceptAnything()}}
	if s.opt.PolicyPath != "" {
		var err error
		if p, err = signature.NewPolicyFromFile(s.opt.PolicyPath); err != nil {
			return nil, fmt.Errorf("%w: read policy: %v", ErrSignature, err)
		}
	}
	ctx, err := signature.NewPolicyContext(p)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrSignature, err)
	}
	return ctx, nil
}
