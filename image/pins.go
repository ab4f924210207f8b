package image

import (
	"fmt"
	"slices"
	"strings"

	"go.podman.io/image/v5/docker/reference"
)

// pin is a pattern of names; images that have one of them are reported as
// pinned: the kubelet's garbage collection leaves them alone.
type pin struct {
	text  string
	match func(name, text string) bool
}

// CheckPin tells whether a pattern can be one of Options.Pinned.
func CheckPin(pattern string) error {
	_, err := parsePin(pattern)
	return err
}

// parsePin reads "name" (completed as in a pull), "begin*" or "*part*".
func parsePin(pattern string) (pin, error) {
	word, open := strings.CutPrefix(pattern, "*")
	word, closed := strings.CutSuffix(word, "*")
	switch {
	case pattern == "*":
		return pin{"", strings.HasPrefix}, nil
	case word == "" || strings.Contains(word, "*") || open && !closed:
		return pin{}, fmt.Errorf("pinned %q: must be a name, the beginning of one and a *, or a part of one between two *", pattern)
	case open:
		return pin{word, strings.Contains}, nil
	case closed:
		return pin{word, strings.HasPrefix}, nil
	}
	n, err := parseName(word)
	if err != nil {
		return pin{}, fmt.Errorf("pinned: %w", err)
	}
	return pin{n.String(), func(name, text string) bool { return name == text }}, nil
}

func parsePins(patterns []string) ([]pin, error) {
	pins := make([]pin, len(patterns))
	for i, p := range patterns {
		var err error
		if pins[i], err = parsePin(p); err != nil {
			return nil, err
		}
	}
	return pins, nil
}

// isPinned looks at an image's names, in full and as they are commonly written:
// docker.io/library/busybox:latest is also busybox:latest.
func (s *Store) isPinned(r *Record) bool {
	for _, name := range slices.Concat(r.RepoTags, r.RepoDigests) {
		common := name
		if named, err := reference.ParseNormalizedNamed(name); err == nil {
			common = reference.FamiliarString(named)
		}
		for _, p := range *s.pins.Load() {
			if p.match(name, p.text) || p.match(common, p.text) {
				return true
			}
		}
	}
	return false
}

// Pin keeps the kubelet's garbage collection off an image, or no more (pinned
// false; ErrPinnedByConfig when Options.Pinned has it). The pin is the image's,
// whichever of its names or ids is given, and goes with it, or with the last of its
// tags when that moves to another image. Idempotent. ErrNotFound,
// ErrInvalidReference.
func (s *Store) Pin(ref string, pinned bool) (*Record, error) {
	r, err := s.Resolve(ref)
	if err != nil {
		return nil, fmt.Errorf("pin image: %w", err)
	}
	s.change.Lock()
	defer s.change.Unlock()
	img := s.images[r.ID].clone()
	if img == nil || img.Removed {
		return nil, fmt.Errorf("pin image: %w: %s", ErrNotFound, ref)
	}
	if !pinned && s.isPinned(r) {
		return nil, fmt.Errorf("unpin image %s: %w", ref, ErrPinnedByConfig)
	}
	if img.Pinned != pinned {
		img.Pinned = pinned
		if err := s.commit(s.images.with(r.ID, img)); err != nil {
			return nil, fmt.Errorf("pin image %s: %w", ref, err)
		}
	}
	return s.view.Load().byID[r.ID], nil
}
