package stats

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// maxFile bounds one cgroup file; memory.stat takes 2 KiB.
const maxFile = 64 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, maxFile); return &b }}

// read hands the content of a file to parse, which must not keep it. Plain
// system calls: fifty containers are hundreds of files, and os.File costs
// more than these reads do. A file that is not there is ErrGone, and so is one
// whose cgroup went after it was opened (ENODEV).
func read(path string, parse func([]byte) error) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	n, err := readInto(path, *buf)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("read %s: %w: %w", path, ErrGone, err)
	}
	if err == nil {
		err = parse((*buf)[:n])
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

func readInto(path string, buf []byte) (int, error) {
	fd, err := retry(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	// One read: the kernel writes such a file in one piece, and to ask whether
	// there is more would cost as much again.
	n, err := retry(func() (int, error) { return unix.Read(fd, buf) })
	if err == nil && n == len(buf) {
		err = unix.EFBIG
	}
	return n, err
}

func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return n, err
		}
	}
}

// number reads a file of one number. The kernel's words for "no limit", "max"
// and version 1's largest page-aligned number, give nil.
func number(path string) (*uint64, error) {
	var value *uint64
	err := read(path, func(b []byte) error {
		b = bytes.TrimSpace(b)
		if string(b) == "max" {
			return nil
		}
		n, err := parseUint(b)
		if err == nil && n < unlimited {
			value = &n
		}
		return err
	})
	return value, err
}

// unlimited is below 2^63 less any page size, and above any machine's memory.
const unlimited = 1 << 62

// count reads a file of one number that has no "max".
func count(path string) (uint64, error) {
	var n uint64
	err := read(path, func(b []byte) (err error) {
		n, err = parseUint(bytes.TrimSpace(b))
		return err
	})
	return n, err
}

// fields reads the lines "key number" of a file into the wanted keys, and into
// figures what lines names. A key that is not there leaves its value as it was.
func fields(path string, want map[string]*uint64, f *Figures, lines map[string]Figure) error {
	return table(path, func(key []byte) func(uint64) {
		into := want[string(key)]
		also := f.line(key, lines)
		if into == nil {
			return also
		}
		return func(n uint64) {
			*into = n
			if also != nil {
				also(n)
			}
		}
	})
}

// table reads the lines "key number" of a file, those for whose key wanted says
// what to do with the number. Others may be anything.
func table(path string, wanted func(key []byte) func(n uint64)) error {
	return read(path, func(b []byte) error {
		for line := range bytes.Lines(b) {
			key, value, ok := bytes.Cut(line, []byte(" "))
			if !ok {
				continue
			}
			take := wanted(key)
			if take == nil {
				continue
			}
			n, err := parseUint(bytes.TrimSpace(value))
			if err != nil {
				return err
			}
			take(n)
		}
		return nil
	})
}

// numbers hands every line of a file of numbers to each; the file may be of
// any length.
func numbers(path string, each func(n uint64)) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	fd, err := retry(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err == nil {
		defer unix.Close(fd)
		err = numbersOf(fd, *buf, each)
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("read %s: %w: %w", path, ErrGone, err)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

func numbersOf(fd int, buf []byte, each func(n uint64)) error {
	n, within := uint64(0), false // the number that a block may have ended in
	for {
		got, err := retry(func() (int, error) { return unix.Read(fd, buf) })
		if err != nil {
			return err
		}
		for _, c := range buf[:got] {
			switch {
			case c >= '0' && c <= '9':
				n, within = n*10+uint64(c-'0'), true
			case within:
				each(n)
				n, within = 0, false
			}
		}
		if got == 0 {
			if within {
				each(n)
			}
			return nil
		}
	}
}

// pressure reads a file of pressure stall information. Kernels without it have
// no such file or refuse to read it: nil.
func pressure(path string) *Pressure {
	var p Pressure
	err := read(path, func(b []byte) error {
		for line := range bytes.Lines(b) {
			kind, rest, _ := bytes.Cut(line, []byte(" "))
			into := map[string]*Stall{"some": &p.Some, "full": &p.Full}[string(kind)]
			if into == nil {
				return fmt.Errorf("%w: %q", errFormat, kind)
			}
			if err := parseStall(rest, into); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil
	}
	return &p
}

// parseStall reads "avg10=0.00 avg60=0.00 avg300=0.00 total=0"; total is in
// microseconds.
func parseStall(b []byte, s *Stall) error {
	for _, part := range bytes.Fields(b) {
		key, value, _ := bytes.Cut(part, []byte("="))
		var err error
		switch string(key) {
		case "avg10":
			s.Avg10, err = strconv.ParseFloat(string(value), 64)
		case "avg60":
			s.Avg60, err = strconv.ParseFloat(string(value), 64)
		case "avg300":
			s.Avg300, err = strconv.ParseFloat(string(value), 64)
		case "total":
			s.Total, err = parseUint(value)
			s.Total *= 1000
		}
		if err != nil {
			return err
		}
	}
	return nil
}

var errFormat = errors.New("not in the kernel's format")

// parseUint is strconv.ParseUint without its copy of the text.
func parseUint(b []byte) (uint64, error) {
	var n uint64
	for _, c := range b {
		digit := uint64(c - '0')
		if c < '0' || c > '9' || n > (1<<64-1-digit)/10 {
			return 0, fmt.Errorf("%w: %q is no number", errFormat, b)
		}
		n = n*10 + digit
	}
	if len(b) == 0 {
		return 0, fmt.Errorf("%w: empty", errFormat)
	}
	return n, nil
}
