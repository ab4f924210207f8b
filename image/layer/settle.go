package layer

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// Plan is what a layer takes over from the layers below it: the looks of its
// implied directories, the place of directories that are symlinks below
// ("bin/x" where bin is a link to usr/bin), the targets of cross links, and
// which whiteouts have nothing to hide.
//
// Two stacks that give the same plan can share one settled copy of the layer.
type Plan struct {
	moves []move
	looks []look
	links []crossLink
	bared []string // directories whose whiteouts hide nothing and would show

	bare    map[string]bool // implied directories
	implied map[string]bool // where they end up
	looked  map[string]bool // names of looks
}

type move struct{ from, to string }

type look struct {
	name   string
	lower  Lower
	source string // in lower
	facts  string
}

type crossLink struct {
	name, target string
	lower        Lower // zero: the target is in the layer itself after the moves
	source       string
}

// Plan compares what a layer needs with what lies below it, bottom first. own
// is the layer as it was unpacked. A cross link without a target gives
// ErrInvalid.
func (n Needs) Plan(own string, lowers []Lower) (*Plan, error) {
	p := &Plan{bare: map[string]bool{}, implied: map[string]bool{}, looked: map[string]bool{}}
	if n.None() {
		return p, nil
	}
	s, err := openStack(lowers)
	if err != nil {
		return nil, err
	}
	defer s.close()
	root, err := openRoot(own)
	if err != nil {
		return nil, err
	}
	defer unix.Close(root)
	for _, name := range n.Implied {
		p.bare[string(name)] = true
	}
	for _, name := range n.Implied {
		if err := p.planDir(s, root, string(name)); err != nil {
			return nil, err
		}
	}
	for _, name := range n.Whiteouts {
		place := p.moved(string(name))
		h, err := s.lookup(place)
		if err != nil {
			return nil, err
		}
		if h == nil || !isDir(h.st) {
			p.bared = append(p.bared, place)
		}
	}
	for _, l := range n.Links {
		if err := p.planLink(s, root, string(l.Name), string(l.Target)); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// planDir decides about one implied directory. Parents come first, so their
// moves are known.
func (p *Plan) planDir(s *stack, root int, name string) error {
	place := p.moved(name)
	below, err := s.lookup(place)
	if err != nil || below == nil {
		return err
	}
	for _, at := range []string{name, place} {
		above, _ := split(at)
		if hidden, err := hides(root, above); err != nil || hidden {
			return err
		}
	}
	if st, err := lstatAt(root, place); err == nil && isDir(st) && !p.bare[place] {
		return nil // it has an entry where it goes
	}
	p.implied[place] = true
	if isSymlink(below.st) {
		target, err := p.leads(s, root, place, below)
		if err != nil || target == "" || within(target, place) || blocked(root, target) {
			return err // the directory covers a link that leads nowhere
		}
		if err := Defaults.fits(target); err != nil {
			return err
		}
		p.moves = append(p.moves, move{from: place, to: target})
		return p.lookLike(s, root, target)
	}
	if isDir(below.st) {
		return p.lookLike(s, root, place)
	}
	return nil
}

// leads gives the directory that a symlink of a lower layer leads to, "" when
// there is none: one of the layers below, or one that only this layer has.
func (p *Plan) leads(s *stack, root int, place string, link *hit) (string, error) {
	target, err := s.follow(place, true)
	if err != nil {
		return "", err
	}
	if target != nil && isDir(target.st) {
		return target.path, nil
	}
	text, err := readlinkAt(s.fds[link.layer], link.path)
	if err != nil {
		return "", failed("read link", link.path, err)
	}
	if !strings.HasPrefix(text, "/") {
		above, _ := split(place)
		text = above + "/" + text
	}
	name := strings.TrimPrefix(path.Clean("/"+text), "/")
	fd, err := openBeneath(root, name)
	if err != nil {
		return "", nil
	}
	unix.Close(fd)
	return name, nil
}

// hides says whether the layer itself hides what lower layers have at name:
// the directory or one above it is opaque.
func hides(root int, name string) (bool, error) {
	for at := name; at != ""; at, _ = split(at) {
		if st, err := lstatAt(root, at); err != nil || !isDir(st) {
			continue
		}
		opaque, err := isOpaque(root, at)
		if err != nil || opaque {
			return opaque, err
		}
	}
	return false, nil
}

// blocked says whether the layer itself has something else than directories on
// the way to name.
func blocked(root int, name string) bool {
	for at := name; at != ""; at, _ = split(at) {
		if st, err := lstatAt(root, at); err == nil && !isDir(st) {
			return true
		}
	}
	return false
}

// moved gives the place of a name after the moves decided so far.
func (p *Plan) moved(name string) string {
	for _, m := range p.moves {
		if within(name, m.from) {
			rest := strings.TrimPrefix(name[len(m.from):], "/")
			name = strings.Trim(m.to+"/"+rest, "/")
		}
	}
	return name
}

// lookLike notes that name and the directories above it look as below, except
// those that have an entry in this layer.
func (p *Plan) lookLike(s *stack, root int, name string) error {
	for at := name; at != ""; at, _ = split(at) {
		if p.looked[at] {
			continue
		}
		if _, err := lstatAt(root, at); err == nil && !p.implied[at] {
			continue
		}
		h, err := s.lookup(at)
		if err != nil {
			return err
		}
		if h == nil || !isDir(h.st) {
			continue
		}
		xattrs, err := listXattrs(procPath(s.fds[h.layer], h.path))
		if err != nil {
			return failed("read attributes of", at, err)
		}
		delete(xattrs, xattrOpaque)
		facts := fmt.Sprintf("%o %d %d %d %d %q", h.st.Mode, h.st.Uid, h.st.Gid, h.st.Mtim.Sec, h.st.Mtim.Nsec, xattrs)
		p.looked[at] = true
		p.looks = append(p.looks, look{name: at, lower: s.lowers[h.layer], source: h.path, facts: facts})
	}
	return nil
}

func (p *Plan) planLink(s *stack, root int, name, target string) error {
	place, wanted := p.moved(name), p.moved(target)
	link := crossLink{name: place, target: wanted}
	if wanted != target {
		if st, err := lstatAt(root, target); err == nil && !isWhiteout(st) {
			p.links = append(p.links, link) // moves bring it there
			return nil
		}
	}
	h, err := s.follow(wanted, false)
	if err != nil {
		return err
	}
	if h == nil || isDir(h.st) {
		return invalid(name, "hard link to %s, which is no file of this layer or one below", quote(target))
	}
	link.target, link.lower, link.source = h.path, s.lowers[h.layer], h.path
	dir, _ := split(h.path)
	p.links = append(p.links, link)
	return p.lookLike(s, root, dir)
}

// Key is the same for plans with the same outcome and "" when the layer stays
// as it was unpacked.
func (p *Plan) Key() string {
	if len(p.moves) == 0 && len(p.looks) == 0 && len(p.links) == 0 && len(p.bared) == 0 {
		return ""
	}
	sum := sha256.New()
	for _, m := range p.moves {
		fmt.Fprintf(sum, "move %q %q\n", m.from, m.to)
	}
	for _, l := range p.looks {
		fmt.Fprintf(sum, "look %q %s\n", l.name, l.facts)
	}
	for _, l := range p.links {
		fmt.Fprintf(sum, "link %q %q %q %q\n", l.name, l.target, l.lower.ID, l.source)
	}
	for _, dir := range p.bared {
		fmt.Fprintf(sum, "bared %q\n", dir)
	}
	return hex.EncodeToString(sum.Sum(nil)[:8])
}
