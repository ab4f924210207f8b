package main

import (
	"bytes"
	"errors"
	"fmt"
	"log"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// logFile is a container's CRI log and the tape that feeds it.
type logFile struct {
	path     string // empty: output is dropped
	tape     *tape
	complain func(kind, text string) // tells the daemon, without waiting; nil: nobody yet
	released func()                  // called when the file is closed; nil: nobody asks

	reopening sync.Mutex // held by reopen
	inherited bool       // from a monitor that was killed, or another build
	lost      bool       // inherited without what was in the tape
	caughtUp  sync.Once
	stall     stall
	dropped   atomic.Int64 // the tape's wordDropped, also when that is gone

	mu       sync.Mutex // held while a batch is written, for as long as the filesystem takes
	lastSaid time.Time  // guarded by mu; when trouble was last told

	// fd may be read with either lock and is changed with both, so that nobody
	// waits for a hung filesystem to learn it.
	fdMu   sync.Mutex
	fd     int  // -1: none
	closed bool // guarded by fdMu
}

// buffers are borrowed for one batch; an idle container has none.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, batchLimit+64<<10); return &b }}

// openLog opens a log for appending. Its folder must exist; a symlink anywhere in
// the path is refused, for a pod that can write to the node's logs may exchange a
// folder for one.
func openLog(path string) (int, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		// Not to wait for the reader of a FIFO that somebody has put there.
		Flags: unix.O_WRONLY | unix.O_APPEND | unix.O_CREAT | unix.O_CLOEXEC | unix.O_NOCTTY | unix.O_NONBLOCK,
		Mode:  0o640, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return -1, &os.PathError{Op: "open log", Path: path, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		_ = unix.Close(fd)
		return -1, &os.PathError{Op: "open log", Path: path, Err: errors.New("not a regular file")}
	}
	_ = unix.Fchmod(fd, 0o640) // whatever the umask
	return fd, nil
}

// flush writes all whole pieces that the tape has of a stream, and with final
// also what has no newline.
func (l *logFile) flush(stream int, final bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	buf := buffers.Get().(*[]byte)
	defer func() {
		if cap(*buf) <= 2*batchLimit {
			*buf = (*buf)[:0]
			buffers.Put(buf)
		}
	}()
	b := batch{stream: stream, stamp: time.Now(), final: final}
	for {
		data := l.tape.data(stream)
		if l.fd < 0 {
			l.tape.set(wordDone+stream, l.tape.get(wordHead+stream)) // nobody wants it
			return
		}
		out, used := render((*buf)[:0], data, b, int(l.tape.get(wordMaxLine)))
		*buf = out
		if used == 0 {
			return
		}
		l.begin()
		l.commit(b, out, used)
		l.done()
	}
}

// commit writes one batch and marks its bytes as done. The journal comes first.
func (l *logFile) commit(b batch, out []byte, used int) {
	t := l.tape
	to := t.get(wordDone+b.stream) + int64(used)
	var st unix.Stat_t
	_ = unix.Fstat(l.fd, &st)
	t.set(wordTo, to)
	t.set(wordStamp, b.stamp.UnixNano())
	t.set(wordSize, st.Size)
	pending := int64(1 + b.stream)
	if b.final {
		pending |= pendingFinal
	}
	t.set(wordPending, pending)
	l.write(out, st.Size, int64(used))
	t.set(wordDone+b.stream, to)
	t.set(wordPending, 0)
}

// write appends out. When the file cannot take all of it, the rest is dropped
// and counted and the file ends with the last whole piece: a full disk must not
// stop the container.
func (l *logFile) write(out []byte, size, raw int64) {
	done := 0
	for done < len(out) {
		n, err := unix.Write(l.fd, out[done:])
		if err == unix.EINTR {
			continue
		}
		if n > 0 {
			done += n
		}
		if err != nil {
			l.drop(out, done, size, raw, err)
			return
		}
	}
}

func (l *logFile) drop(out []byte, done int, size, raw int64, cause error) {
	whole := bytes.LastIndexByte(out[:done], '\n') + 1
	if whole < done {
		_ = unix.Ftruncate(l.fd, size+int64(whole))
	}
	lost := raw * int64(len(out)-whole) / int64(len(out))
	l.tape.set(wordDropped, l.tape.get(wordDropped)+max(lost, 1))
	l.dropped.Store(l.tape.get(wordDropped))
	if time.Since(l.lastSaid) > time.Minute {
		l.lastSaid = time.Now()
		text := fmt.Sprintf("write %s: %v: output is dropped, about %d bytes until now", l.path, cause, l.tape.get(wordDropped))
		log.Print(text)
		l.tell(monitor.Dropped, text)
	}
}

// troubles are those that a new daemon does not know.
func (l *logFile) troubles() (list []monitor.Error) {
	if l.stalled() >= stallTold {
		list = append(list, monitor.Error{Kind: monitor.Stalled, Text: l.stalledText()})
	}
	if lost := l.dropped.Load(); lost > 0 {
		list = append(list, monitor.Error{Kind: monitor.Dropped, Text: fmt.Sprintf("about %d bytes of its output are not in %s, which could not be written", lost, l.path)})
	}
	return list
}

// catchUp is recover for a log that was inherited, once. It waits for the filesystem,
// so it is the pumps' first work.
func (l *logFile) catchUp() {
	if l.inherited {
		l.caughtUp.Do(l.recover)
	}
}

// use goes on with another descriptor and returns the one before. The caller holds mu.
func (l *logFile) use(fd int) (old int) {
	l.fdMu.Lock()
	defer l.fdMu.Unlock()
	old, l.fd = l.fd, fd
	return old
}

// recover brings the log up to the tape of a killed monitor: first the batch
// that it had begun, then what it had read besides.
func (l *logFile) recover() {
	l.mu.Lock()
	l.begin()
	if l.inherited && l.path != "" {
		l.rightFile()
	}
	l.finishBatch()
	l.done()
	l.mu.Unlock()
	for stream := range 2 {
		l.flush(stream, false)
	}
}

// finishBatch renders the same pieces again and writes them from where the file
// ends.
func (l *logFile) finishBatch() {
	t := l.tape
	pending := t.get(wordPending)
	if pending == 0 {
		return
	}
	defer t.set(wordPending, 0)
	b := batch{stream: int(pending&0xff) - 1, stamp: time.Unix(0, t.get(wordStamp)), final: pending&pendingFinal != 0}
	if b.stream < 0 || b.stream > 1 || l.fd < 0 {
		return
	}
	done, to := t.get(wordDone+b.stream), t.get(wordTo)
	if to <= done || to > t.get(wordHead+b.stream) {
		return // it was complete, all but the last store
	}
	b.limit = int(to - done)
	out, used := render(nil, t.data(b.stream), b, int(t.get(wordMaxLine)))
	var st unix.Stat_t
	if err := unix.Fstat(l.fd, &st); err != nil || used != int(to-done) {
		return
	}
	written := int64(0)
	if int64(st.Ino) == t.get(wordInode) {
		written = min(max(st.Size-t.get(wordSize), 0), int64(len(out)))
	}
	l.write(out[written:], st.Size, int64(used))
	t.set(wordDone+b.stream, to)
}

// trim cuts a torn piece off the end of a log whose tape is lost.
func trim(fd int, path string) {
	r, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(r)
	var a, b unix.Stat_t
	if unix.Fstat(fd, &a) != nil || unix.Fstat(r, &b) != nil || a.Ino != b.Ino || a.Dev != b.Dev {
		return
	}
	tail := make([]byte, min(a.Size, 2<<20))
	n, err := unix.Pread(r, tail, a.Size-int64(len(tail)))
	if err != nil || n != len(tail) {
		return
	}
	if whole := bytes.LastIndexByte(tail, '\n') + 1; whole < n {
		_ = unix.Ftruncate(fd, a.Size-int64(n-whole))
	}
}

// reopen goes on in a new file at the log's path. When that cannot be opened,
// or the log is closed, nothing changes and no new file is left.
func (l *logFile) reopen() error {
	if l.path == "" {
		return nil
	}
	if !l.reopening.TryLock() {
		return fmt.Errorf("reopen log: the reopening before it has not ended: %w", unix.EBUSY)
	}
	defer l.reopening.Unlock()
	if l.stalled() >= hangPatience {
		return fmt.Errorf("reopen log: %s: %w", l.stalledText(), unix.ETIMEDOUT)
	}
	_, err := os.Lstat(l.path)
	made := errors.Is(err, os.ErrNotExist)
	fd, err := openLog(l.path)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isClosed() {
		_ = unix.Close(fd)
		if made {
			_ = os.Remove(l.path)
		}
		return fmt.Errorf("reopen log: %w", monitor.ErrEnded)
	}
	l.begin()
	defer l.done()
	l.tape.set(wordInode, inode(fd))
	if old := l.use(fd); old >= 0 {
		_ = unix.Close(old)
	}
	return nil
}

func (l *logFile) isClosed() bool {
	l.fdMu.Lock()
	defer l.fdMu.Unlock()
	return l.closed
}

// inode is -1 for what is no descriptor.
func inode(fd int) int64 {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return -1
	}
	return int64(st.Ino)
}

// close waits for the filesystem: it may have kept something back.
func (l *logFile) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fdMu.Lock()
	fd := l.fd
	l.fd, l.closed = -1, true
	l.fdMu.Unlock()
	if fd >= 0 {
		l.begin()
		_ = unix.Close(fd)
		l.done()
	}
	l.tape.close()
	if l.released != nil {
		l.released()
	}
}

// duplicates are of the log file, -1 without one, and of the tape.
func (l *logFile) duplicates() (file, tape int) {
	l.fdMu.Lock()
	defer l.fdMu.Unlock()
	if l.closed {
		return -1, -1
	}
	return duplicate(l.fd), duplicate(l.tape.fd)
}

// duplicate is -1 for what is no descriptor.
func duplicate(fd int) int {
	if fd < 0 {
		return -1
	}
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	return dup
}
