package layer

import (
	"strings"

	"golang.org/x/sys/unix"
)

// Lower is a layer below the one that is looked at.
type Lower struct {
	Dir string // its diff directory
	ID  string // what tells its content from any other's
}

// stack is the merged, read-only view of layers: what overlay would show,
// computed without mounting.
type stack struct {
	lowers []Lower // bottom first
	fds    []int
	known  map[string]place // what was looked up lately; the layers do not change
}

// place is what a name leads to, and the layers whose directories merge there,
// top first.
type place struct {
	hit  *hit // nil: nothing
	dirs []int
}

// maxKnown bounds the memory: a place may name every layer.
const maxKnown = 4096

// hit is where a name was found: the topmost layer that has it.
type hit struct {
	layer int
	path  string // resolved name
	st    *unix.Stat_t
}

func openStack(lowers []Lower) (*stack, error) {
	s := &stack{lowers: lowers, known: map[string]place{}}
	for _, l := range lowers {
		fd, err := openRoot(l.Dir)
		if err != nil {
			s.close()
			return nil, err
		}
		s.fds = append(s.fds, fd)
	}
	return s, nil
}

func (s *stack) close() {
	for _, fd := range s.fds {
		unix.Close(fd)
	}
}

// lookup finds a resolved name. It follows nothing: a name below something
// that is not a directory is absent, and absent is a nil hit.
func (s *stack) lookup(name string) (*hit, error) {
	active := make([]int, 0, len(s.fds))
	for i := len(s.fds) - 1; i >= 0; i-- {
		active = append(active, i)
	}
	if name == "" {
		return s.top(active, ".")
	}
	prefix := ""
	for part := range strings.SplitSeq(name, "/") {
		prefix = join(prefix, part)
		at, err := s.enter(active, prefix)
		if err != nil || at.hit == nil {
			return nil, err
		}
		if prefix == name {
			return at.hit, nil
		}
		if !isDir(at.hit.st) {
			return nil, nil
		}
		active = at.dirs
	}
	return nil, nil
}

func (s *stack) top(active []int, name string) (*hit, error) {
	if len(active) == 0 {
		return nil, nil
	}
	st, err := lstatAt(s.fds[active[0]], name)
	if err != nil {
		return nil, err
	}
	return &hit{layer: active[0], st: st}, nil
}

// enter looks name up in the layers that share its parent directory, top first.
// Names below the same directories come in numbers, so it remembers.
func (s *stack) enter(active []int, name string) (place, error) {
	if at, ok := s.known[name]; ok {
		return at, nil
	}
	at, err := s.look(active, name)
	if err != nil {
		return place{}, err
	}
	if len(s.known) >= maxKnown {
		clear(s.known)
	}
	s.known[name] = at
	return at, nil
}

func (s *stack) look(active []int, name string) (place, error) {
	var first *hit
	var dirs []int
	for _, i := range active {
		st, err := lstatAt(s.fds[i], name)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return place{}, failed("stat", name, err)
		}
		if isWhiteout(st) || first != nil && !isDir(st) {
			break
		}
		if first == nil {
			first = &hit{layer: i, path: name, st: st}
		}
		if !isDir(st) {
			break
		}
		dirs = append(dirs, i)
		opaque, err := isOpaque(s.fds[i], name)
		if err != nil {
			return place{}, err
		}
		if opaque {
			break
		}
	}
	return place{first, dirs}, nil
}

func isOpaque(root int, name string) (bool, error) {
	var value [1]byte
	n, err := unix.Lgetxattr(procPath(root, name), xattrOpaque, value[:])
	if err == unix.ENODATA || err == unix.ENOTSUP || err == unix.ERANGE {
		return false, nil
	}
	if err != nil {
		return false, failed("read opaque mark of", name, err)
	}
	return n == 1 && value[0] == 'y', nil
}

// follow resolves a name through symlinks, the last component too when last is
// set, with the merged root as "/". Absent is a nil hit.
func (s *stack) follow(name string, last bool) (*hit, error) {
	budget := maxSymlink
	return s.walk("", name, last, &budget)
}

// walk resolves name from the resolved directory at.
func (s *stack) walk(at, name string, last bool, budget *int) (*hit, error) {
	if strings.HasPrefix(name, "/") {
		at = ""
	}
	rest := name
	for rest != "" {
		part, after, _ := strings.Cut(rest, "/")
		rest = after
		switch part {
		case "", ".":
			continue
		case "..":
			at, _ = split(at)
			continue
		}
		h, err := s.lookup(join(at, part))
		if err != nil || h == nil {
			return nil, err
		}
		final := strings.Trim(rest, "/") == ""
		if isSymlink(h.st) && (!final || last) {
			if h, err = s.readAndWalk(h, at, budget); err != nil || h == nil {
				return nil, err
			}
		}
		if final {
			return h, nil
		}
		if !isDir(h.st) {
			return nil, nil
		}
		at = h.path
	}
	return s.lookup(at)
}

func (s *stack) readAndWalk(link *hit, at string, budget *int) (*hit, error) {
	if *budget--; *budget < 0 {
		return nil, nil // a loop leads nowhere
	}
	target, err := readlinkAt(s.fds[link.layer], link.path)
	if err != nil {
		return nil, failed("read link", link.path, err)
	}
	return s.walk(at, target, true, budget)
}
