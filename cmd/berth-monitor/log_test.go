package main

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// rebuild is what a reader makes of a log: the texts, with a newline after F.
func rebuild(t testing.TB, log []byte, maxLine int) (streams [2][]byte) {
	t.Helper()
	for len(log) > 0 {
		stamp, rest, ok := bytes.Cut(log, []byte(" "))
		if _, err := time.Parse(time.RFC3339Nano, string(stamp)); err != nil || !ok {
			t.Fatalf("line begins with %.60q", log)
		}
		stream := 0
		switch {
		case bytes.HasPrefix(rest, []byte("stdout ")):
		case bytes.HasPrefix(rest, []byte("stderr ")):
			stream = 1
		default:
			t.Fatalf("no stream in %.60q", rest)
		}
		tag := rest[len("stdout ")]
		if tag != 'P' && tag != 'F' || rest[len("stdout ")+1] != ' ' {
			t.Fatalf("no tag in %.60q", rest)
		}
		text, after, ok := bytes.Cut(rest[len("stdout F "):], []byte("\n"))
		if !ok {
			t.Fatalf("line without end: %.60q", rest)
		}
		if len(text) > maxLine {
			t.Fatalf("piece of %d bytes, the limit is %d", len(text), maxLine)
		}
		streams[stream] = append(streams[stream], text...)
		if tag == 'F' {
			streams[stream] = append(streams[stream], '\n')
		}
		log = after
	}
	return streams
}

// bench is a log file with its tape and pipes to feed it.
type bench struct {
	c     *container
	write [2]*os.File
	path  string
}

func newBench(t testing.TB, maxLine int) *bench {
	t.Helper()
	b := &bench{path: filepath.Join(t.TempDir(), "0.log")}
	tp, err := newTape(maxLine)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := openLog(b.path)
	if err != nil {
		t.Fatal(err)
	}
	b.c = &container{log: &logFile{path: b.path, tape: tp, fd: fd}, pidfd: -1, stdin: -1, buffer: -1}
	b.c.info.ID = "test"
	for i := range b.c.streams {
		if b.c.streams[i], b.write[i], err = pipe(0, 0); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, w := range b.write {
			_ = w.Close()
		}
		b.c.drain()
		b.c.close()
	})
	return b
}

// read waits for the streams' end and returns the log.
func (b *bench) read(t testing.TB) []byte {
	t.Helper()
	for _, w := range b.write {
		_ = w.Close()
	}
	b.c.pumps.Wait()
	data, err := os.ReadFile(b.path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Outputs that a naive writer gets wrong.
var outputs = map[string]string{
	"nothing":            "",
	"no newline":         "abc",
	"only newlines":      "\n\n\n",
	"NUL and 0xff":       "a\x00b\xff\n",
	"a piece exactly":    strings.Repeat("x", 64) + "\n",
	"a piece and a byte": strings.Repeat("x", 65) + "\n",
	"two pieces":         strings.Repeat("x", 128) + "\n",
	"piece at the end":   strings.Repeat("x", 64),
	"1 MiB, newline":     strings.Repeat("y", 1<<20) + "\n",
	"1 MiB, no newline":  strings.Repeat("z", 1<<20),
	"carriage returns":   "a\r\nb\rc\r\n",
}

func TestB77OutputIsRebuiltExactly(t *testing.T) {
	for name, want := range outputs {
		for _, maxLine := range []int{64, 16384} {
			t.Run(fmt.Sprintf("%s by %d", name, maxLine), func(t *testing.T) {
				b := newBench(t, maxLine)
				b.c.start()
				if _, err := b.write[0].WriteString(want); err != nil {
					t.Fatal(err)
				}
				log := b.read(t)
				if got := rebuild(t, log, maxLine)[0]; string(got) != want {
					t.Errorf("rebuilt %d bytes %.80q, want %d", len(got), got, len(want))
				}
				// Only the last piece of a line is F, and whole lines have one.
				if n := bytes.Count(log, []byte(" stdout F ")); n != strings.Count(want, "\n") {
					t.Errorf("%d F pieces for %d lines", n, strings.Count(want, "\n"))
				}
			})
		}
	}
}

// Random outputs in random chunks on both streams come out as they went in,
// whatever the sizes of pieces and reads.
func TestB77RandomOutputOfBothStreams(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 77))
		maxLine := 1 + r.IntN(40000)
		b := newBench(t, maxLine)
		b.c.start()
		var want [2]bytes.Buffer
		var wrote [2]chan struct{}
		for i := range want {
			random(r, &want[i])
			wrote[i] = make(chan struct{})
			sizes := r.Uint64()
			go func() {
				defer close(wrote[i])
				chunks := rand.New(rand.NewPCG(sizes, 1))
				for rest := want[i].Bytes(); len(rest) > 0; {
					n := min(len(rest), 1+chunks.IntN(100000))
					_, _ = b.write[i].Write(rest[:n])
					rest = rest[n:]
				}
			}()
		}
		<-wrote[0]
		<-wrote[1]
		got := rebuild(t, b.read(t), maxLine)
		for i := range want {
			if !bytes.Equal(got[i], want[i].Bytes()) {
				t.Fatalf("seed %d, pieces of %d: %s is %d bytes, want %d", seed, maxLine, streamNames[i], len(got[i]), want[i].Len())
			}
		}
	}
}

func random(r *rand.Rand, w *bytes.Buffer) {
	for range r.IntN(60) {
		line := make([]byte, r.IntN(3)*r.IntN(60000)/2)
		for i := range line {
			line[i] = byte(r.UintN(256))
		}
		w.Write(line)
		if r.IntN(4) > 0 {
			w.WriteByte('\n')
		}
	}
}

func FuzzRender(f *testing.F) {
	for _, s := range outputs {
		if len(s) < 1000 {
			f.Add([]byte(s), 64, true)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte, maxLine int, final bool) {
		if maxLine < 1 || maxLine > 1<<20 || bytes.IndexByte(data, '\n') < 0 && !final {
			return
		}
		b := batch{stamp: time.Unix(1, 2), final: final}
		out, used := render(nil, data, b, maxLine)
		got := rebuild(t, out, maxLine)[0]
		if !bytes.Equal(got, data[:used]) {
			t.Fatalf("rebuilt %q of %q", got, data[:used])
		}
		if left := data[used:]; len(out) < batchLimit && (final && len(left) > 0 || len(left) > maxLine || bytes.IndexByte(left, '\n') >= 0) {
			t.Fatalf("left %q", left)
		}
		// A successor that knows only where the batch ended renders the same.
		b.limit = used
		if again, n := render(nil, data, b, maxLine); used > 0 && (n != used || !bytes.Equal(again, out)) {
			t.Fatalf("rendered again: %d bytes, want %d", n, used)
		}
	})
}

// A monitor that dies at any point of a write leaves a tape with which its
// successor completes the log.
func TestRecoverCompletesAWrite(t *testing.T) {
	text := strings.Repeat("some line of text\n", 50) + strings.Repeat("v", 700) + "\nrest"
	whole := -1
	for cut := 0; whole < 0 || cut <= whole; cut += 97 {
		b := newBench(t, 256)
		if _, err := b.write[1].WriteString(text); err != nil {
			t.Fatal(err)
		}
		l, tp := b.c.log, b.c.log.tape
		if _, err := b.c.take(1, rawFD(b.c.streams[1])); err != nil {
			t.Fatal(err)
		}
		// The journal of a batch, and a part of it in the file.
		at := batch{stream: 1, stamp: time.Unix(5, 5)}
		out, used := render(nil, tp.data(1), at, 256)
		whole = len(out)
		var st unix.Stat_t
		_ = unix.Fstat(l.fd, &st)
		tp.set(wordTo, tp.get(wordDone+1)+int64(used))
		tp.set(wordStamp, at.stamp.UnixNano())
		tp.set(wordSize, st.Size)
		tp.set(wordInode, int64(st.Ino))
		tp.set(wordPending, 2)
		_, _ = unix.Write(l.fd, out[:min(cut, whole)])

		dup, err := unix.Dup(tp.fd)
		if err != nil {
			t.Fatal(err)
		}
		next, err := openTape(dup, 256)
		if err != nil {
			t.Fatal(err)
		}
		tp.close()
		l.tape = next
		l.recover()
		b.c.start()
		log := b.read(t)
		if !bytes.HasPrefix(log, out) {
			t.Fatalf("cut at %d: the log does not begin with the batch", cut)
		}
		if got := rebuild(t, log, 256)[1]; string(got) != text {
			t.Fatalf("cut at %d: rebuilt %d bytes, want %d", cut, len(got), len(text))
		}
	}
}

// A monitor may die with a whole turn read and not logged, anywhere in the
// window; its successor must make room before it reads on.
func TestRecoverOfAFullTape(t *testing.T) {
	text := strings.Repeat("a line of 20 bytes.\n", 3*turn/20)
	for _, logged := range []int{0, turn / 2, turn - 20} {
		b := newBench(t, 16384)
		l, tp := b.c.log, b.c.log.tape
		wrote := make(chan struct{})
		go func() {
			defer close(wrote)
			_, _ = b.write[0].WriteString(text)
		}()
		fill := func(upTo int64) {
			for tp.get(wordHead)-tp.base(0) < upTo {
				if _, err := tp.fill(0, rawFD(b.c.streams[0])); err != nil && err != unix.EAGAIN {
					t.Fatal(err)
				}
			}
		}
		fill(int64(logged))
		logged -= logged % 20
		out, _ := render(nil, tp.data(0)[:logged], batch{stamp: time.Unix(5, 5)}, 16384)
		for i := logged; len(out) > 0 && bytes.Count(out, []byte("\n"))*20 < i; {
			more, _ := render(nil, tp.data(0)[bytes.Count(out, []byte("\n"))*20:logged], batch{stamp: time.Unix(5, 5)}, 16384)
			out = append(out, more...)
		}
		_, _ = unix.Write(l.fd, out)
		tp.set(wordDone, tp.base(0)+int64(logged))
		fill(tp.window - 4096) // as far as a monitor could ever get
		l.recover()
		b.c.start()
		<-wrote
		if got := rebuild(t, b.read(t), 16384)[0]; string(got) != text {
			t.Fatalf("%d bytes logged before: rebuilt %d bytes, want %d", logged, len(got), len(text))
		}
		if head := tp.get(wordHead); head > tp.base(1) {
			t.Errorf("the head is at %d, beyond the window's end %d", head, tp.base(1))
		}
	}
}

// Between the two stores that rewind makes, the tape still says what is left.
func TestOpenTapeAmidARewind(t *testing.T) {
	b := newBench(t, 64)
	tp := b.c.log.tape
	base := tp.base(0)
	copy(tp.mem[base:], "left")
	tp.set(wordDone, base+1000)
	tp.set(wordHead, base+4)
	dup, _ := unix.Dup(tp.fd)
	next, err := openTape(dup, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer next.close()
	if got := string(next.data(0)); got != "left" {
		t.Errorf("data = %q", got)
	}
	if dup, _ := unix.Dup(tp.fd); true {
		if _, err := openTape(dup, 65); err == nil {
			t.Error("a tape for pieces of 64 bytes was opened for 65")
		}
	}
}

// A stream that sleeps holds no memory of its tape but a partial line's.
func TestIdleTapeIsEmpty(t *testing.T) {
	b := newBench(t, 16384)
	b.c.start()
	blocks := func() int64 {
		var st unix.Stat_t
		if err := unix.Fstat(b.c.log.tape.fd, &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	if _, err := b.write[0].WriteString(strings.Repeat("line\n", 100000) + "partial"); err != nil {
		t.Fatal(err)
	}
	if !within(time.Second, func() bool { return blocks() <= 3*page && len(b.c.log.tape.data(0)) == 7 }) {
		t.Errorf("tape holds %d bytes of memory", blocks())
	}
	if _, err := b.write[0].WriteString(" line\n"); err != nil {
		t.Fatal(err)
	}
	if !within(time.Second, func() bool { return blocks() <= page }) {
		t.Errorf("empty tape holds %d bytes of memory", blocks())
	}
}

func within(limit time.Duration, ok func() bool) bool {
	for end := time.Now().Add(limit); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

func TestReopenGoesOnInANewFile(t *testing.T) {
	b := newBench(t, 64)
	b.c.start()
	_, _ = b.write[0].WriteString("one\npar")
	if !within(time.Second, func() bool { data, _ := os.ReadFile(b.path); return bytes.Count(data, []byte("\n")) == 1 }) {
		t.Fatal("the first line is not in the log")
	}
	if err := os.Rename(b.path, b.path+".1"); err != nil {
		t.Fatal(err)
	}
	if err := b.c.log.reopen(); err != nil {
		t.Fatal(err)
	}
	_, _ = b.write[0].WriteString("tial\ntwo\n")
	if got := rebuild(t, b.read(t), 64)[0]; string(got) != "partial\ntwo\n" {
		t.Errorf("new file = %q", got)
	}
	old, _ := os.ReadFile(b.path + ".1")
	if got := rebuild(t, old, 64)[0]; string(got) != "one\n" {
		t.Errorf("old file = %q", got)
	}
}

func TestOpenLogRefusesWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	if err := os.WriteFile(target, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	link, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, filepath.Join(dir, "folder")); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, filepath.Join(dir, "folder", "target"), filepath.Join(dir, "folder", "new"), dir, filepath.Join(dir, "none", "0.log"), "/dev/null"} {
		if fd, err := openLog(path); err == nil {
			_ = unix.Close(fd)
			t.Errorf("%s was opened", path)
		} else if !strings.Contains(err.Error(), path) {
			t.Errorf("%s is not named by %v", path, err)
		}
	}
	_ = fifo
	if _, err := os.Lstat(filepath.Join(dir, "new")); err == nil {
		t.Error("a file was made behind a symlink")
	}
	fd, err := openLog(target)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if info, _ := os.Stat(target); info.Mode().Perm() != 0o640 {
		t.Errorf("mode %v", info.Mode())
	}
}

// trim is for a log whose tape died with both processes.
func TestTrimCutsATornPiece(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"", ""}, {"whole\n", "whole\n"}, {"whole\ntorn", "whole\n"}, {"torn", ""},
	} {
		path := filepath.Join(t.TempDir(), "0.log")
		if err := os.WriteFile(path, []byte(c.in), 0o600); err != nil {
			t.Fatal(err)
		}
		fd, err := openLog(path)
		if err != nil {
			t.Fatal(err)
		}
		trim(fd, path)
		_ = unix.Close(fd)
		if got, _ := os.ReadFile(path); string(got) != c.want {
			t.Errorf("%q became %q", c.in, got)
		}
	}
}

func BenchmarkLogOf100ByteLines(b *testing.B) {
	n := newBench(b, 16384)
	n.c.start()
	lines := []byte(strings.Repeat(strings.Repeat("x", 99)+"\n", 655))
	b.SetBytes(int64(len(lines)))
	for b.Loop() {
		if _, err := n.write[0].Write(lines); err != nil {
			b.Fatal(err)
		}
	}
	_ = n.write[0].Close()
	_ = n.write[1].Close()
	n.c.pumps.Wait()
}
