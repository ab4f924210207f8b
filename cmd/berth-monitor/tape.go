package main

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A tape is a memfd, mapped, with one page of words and a window of bytes for
// each of two streams. The daemon parks a duplicate, so it survives the
// monitor's kill -9, after which every store that was made is there to see.
//
// Reading a pipe is one splice(2) into the window with the stream's head word as
// its offset: the kernel moves the bytes and advances the head before the
// process can die. Bytes stand between done and head until they are in the log.
// Before a batch is written to the log the journal words say which bytes, with
// which timestamp, at which size of the file; the pieces follow from those, so
// a successor renders the same batch again and writes what is missing of it.
type tape struct {
	fd     int
	mem    []byte
	window int64 // bytes of one stream's window
}

// Words of the first page.
const (
	wordMagic   = iota
	wordMaxLine // bytes of one piece
	wordPending // 0, or 1 + the stream, and pendingFinal, of the batch on its way to the log
	wordTo      // the batch ends there
	wordStamp   // its time, ns since 1970
	wordSize    // of the log file before it
	wordInode   // of the log file, since it was opened
	wordDropped // bytes of output that the log could not take
	wordHead    // + stream: where the next byte goes
	wordDone    = wordHead + 2
	wordCount   = wordDone + 2

	tapeMagic    = 0x6265727468_0001
	pendingFinal = 1 << 8
)

// turn is how much one read moves at most, and the size of a pipe. It bounds
// the work before other containers get theirs.
const turn = 256 << 10

const page = 4096

func windowFor(maxLine int) int64 {
	return int64(2*maxLine+2*turn+page-1) &^ (page - 1)
}

// newTape makes an empty tape.
func newTape(maxLine int) (*tape, error) {
	fd, err := unix.MemfdCreate("berth-tape", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make tape: %w", err)
	}
	if err := unix.Ftruncate(fd, page+2*windowFor(maxLine)); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("size tape: %w", err)
	}
	t, err := mapTape(fd, maxLine)
	if err != nil {
		return nil, err
	}
	t.set(wordMaxLine, int64(maxLine))
	for stream := range 2 {
		t.set(wordHead+stream, t.base(stream))
		t.set(wordDone+stream, t.base(stream))
	}
	t.set(wordMagic, tapeMagic)
	return t, nil
}

// openTape takes over a parked tape; fd belongs to it, also on error.
func openTape(fd, maxLine int) (*tape, error) {
	t, err := mapTape(fd, maxLine)
	if err != nil {
		return nil, err
	}
	if t.get(wordMagic) != tapeMagic || t.get(wordMaxLine) != int64(maxLine) {
		t.close()
		return nil, fmt.Errorf("open tape: it is not one for pieces of %d bytes", maxLine)
	}
	for stream := range 2 {
		base, head, done := t.base(stream), t.get(wordHead+stream), t.get(wordDone+stream)
		if head < done {
			// Killed between the two stores of rewind, after its copy.
			done = base
			t.set(wordDone+stream, done)
		}
		if done < base || head > base+t.window {
			t.close()
			return nil, fmt.Errorf("open tape: stream %d from %d to %d is outside of its window", stream, done, head)
		}
	}
	return t, nil
}

func mapTape(fd, maxLine int) (*tape, error) {
	window := windowFor(maxLine)
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	if err == nil && st.Size != page+2*window {
		err = fmt.Errorf("size %d", st.Size)
	}
	var mem []byte
	if err == nil {
		mem, err = unix.Mmap(fd, 0, int(page+2*window), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("map tape: %w", err)
	}
	return &tape{fd: fd, mem: mem, window: window}, nil
}

func (t *tape) close() {
	_ = unix.Munmap(t.mem)
	_ = unix.Close(t.fd)
	t.mem = nil
}

func (t *tape) word(i int) *int64 { return (*int64)(unsafe.Pointer(&t.mem[8*i])) }

func (t *tape) get(i int) int64    { return atomic.LoadInt64(t.word(i)) }
func (t *tape) set(i int, v int64) { atomic.StoreInt64(t.word(i), v) }

func (t *tape) base(stream int) int64 { return page + int64(stream)*t.window }

// data is what was read of a stream and is not in the log.
func (t *tape) data(stream int) []byte {
	return t.mem[t.get(wordDone+stream):t.get(wordHead+stream)]
}

// last is the n bytes that were just read of a stream.
func (t *tape) last(stream int, n int64) []byte {
	head := t.get(wordHead + stream)
	return t.mem[head-n : head]
}

// fill moves up to a turn from a pipe; 0 at its end, EAGAIN when it is empty.
func (t *tape) fill(stream int, pipe int) (int64, error) {
	t.rewind(stream)
	for {
		n, err := unix.Splice(pipe, nil, t.fd, t.word(wordHead+stream), t.room(stream), unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		if err != unix.EINTR {
			return n, err
		}
	}
}

// read is fill for what splice cannot move to a file in one step, a pty: by way
// of a pipe that is parked too. Where not even that is possible, a kill between
// the read and the store after it loses these bytes.
func (t *tape) read(stream int, tty, buffer int) (int64, error) {
	n, err := t.fill(stream, buffer) // what an earlier monitor left there
	if err != unix.EAGAIN {
		return n, err
	}
	for {
		n, err = unix.Splice(tty, nil, buffer, nil, turn, unix.SPLICE_F_NONBLOCK)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EINVAL:
			return t.copy(stream, tty)
		case err != nil || n == 0:
			return 0, err
		}
		return t.fill(stream, buffer)
	}
}

func (t *tape) copy(stream int, fd int) (int64, error) {
	t.rewind(stream)
	head := t.get(wordHead + stream)
	for {
		n, err := unix.Read(fd, t.mem[head:head+int64(t.room(stream))])
		if err == unix.EINTR {
			continue
		}
		if n > 0 {
			t.set(wordHead+stream, head+int64(n))
		}
		return max(int64(n), 0), err
	}
}

// room is what one read may bring: a turn, and never more than the window has.
func (t *tape) room(stream int) int {
	return int(min(turn, t.base(stream)+t.window-t.get(wordHead+stream)))
}

// rewind makes room for a turn: it moves what is left to the beginning of the
// window. After a flush that is less than a line, so there is room. The source
// is intact until both stores are made, since it begins beyond the copy.
func (t *tape) rewind(stream int) {
	base, done, head := t.base(stream), t.get(wordDone+stream), t.get(wordHead+stream)
	if head+turn <= base+t.window && (done < head || head == base) {
		return
	}
	if done-base < head-done {
		return // they would overlap; room is smaller then, and a flush comes first
	}
	n := copy(t.mem[base:], t.mem[done:head])
	t.set(wordHead+stream, base+int64(n))
	t.set(wordDone+stream, base)
}

// release gives the memory of what is in the log back, before a stream sleeps.
func (t *tape) release(stream int) {
	base, done, head := t.base(stream), t.get(wordDone+stream), t.get(wordHead+stream)
	if done == head {
		t.rewind(stream)
		head = base
	}
	from := (head + page - 1) &^ (page - 1)
	_ = unix.Fallocate(t.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, base+t.window-from)
	if upTo := done &^ (page - 1); done < head && upTo > base {
		_ = unix.Fallocate(t.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, base, upTo-base)
	}
}

// pipe makes the pipe of a stream. The container gets a descriptor that can
// also read, so that its writes wait instead of failing when every reader has
// died, and a new monitor can open the pipe in the container.
func pipe(uid, gid uint32) (read *os.File, write *os.File, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("make pipe: %w", err)
	}
	defer unix.Close(p[1])
	read, err = ownPipe(p, uid, gid)
	if err != nil {
		_ = unix.Close(p[0])
		return nil, nil, err
	}
	w, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", p[1]), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		_ = read.Close()
		return nil, nil, fmt.Errorf("open pipe for its container: %w", err)
	}
	// Not os.NewFile's poller: this end only passes through.
	return read, os.NewFile(uintptr(w), "pipe"), nil
}

// bufferPipe is a pipe with both ends in one descriptor, so that it never ends.
func bufferPipe() (int, error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return -1, fmt.Errorf("make pipe: %w", err)
	}
	defer unix.Close(p[0])
	defer unix.Close(p[1])
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", p[0]), unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open pipe: %w", err)
	}
	return fd, nil
}

func ownPipe(p [2]int, uid, gid uint32) (*os.File, error) {
	_, _ = unix.FcntlInt(uintptr(p[1]), unix.F_SETPIPE_SZ, turn) // more throughput, where allowed
	if err := unix.Fchown(p[1], int(uid), int(gid)); err != nil {
		return nil, fmt.Errorf("give pipe to uid %d: %w", uid, err)
	}
	if err := unix.SetNonblock(p[0], true); err != nil {
		return nil, fmt.Errorf("set pipe nonblocking: %w", err)
	}
	return os.NewFile(uintptr(p[0]), "pipe"), nil
}
