package runc

import (
	"errors"
	"io"
	"os"
	"regexp"
	"strings"
	"syscall"
	"time"

	"berth/oci"
	"berth/oci/monitor"
	"berth/sandbox/regular"
)

// initFailed is the code of the binary's init that could not become the program.
const initFailed = 255

// exitPatience is how long the record of an end may take that is there to be seen.
const exitPatience = time.Second

// execFailed is what the binary's init says then, as the last of the container's
// output: nobody else listens any more.
var execFailed = regexp.MustCompile(`^exec .+: [a-z ]+$`)

// neverRan says why the program of a container that has ended at once was never
// begun: its ELF loader or interpreter is missing, it is of another machine. Nil when
// it ran, as far as can be told.
func (r *Runtime) neverRan(ct monitor.Container) error {
	for end := time.Now().Add(exitPatience); ; time.Sleep(time.Millisecond) {
		x, ok := r.monitor.Exit(ct.ID)
		if ok && x.Code != initFailed || !ok && time.Now().After(end) {
			return nil
		}
		if ok {
			break
		}
	}
	said := lastOutput(ct.IO.LogPath)
	if !execFailed.MatchString(said) {
		return nil
	}
	for _, errno := range []syscall.Errno{syscall.ENOENT, syscall.ENOEXEC, syscall.EACCES, syscall.ELIBBAD, syscall.EINVAL, syscall.ELOOP, syscall.ENOTDIR, syscall.EISDIR} {
		if strings.HasSuffix(said, ": "+errno.Error()) {
			return &oci.ExecError{Args: []string{r.binary, "start", ct.ID}, ExitCode: -1, Stderr: said + hint(errno), Err: oci.ErrProgram}
		}
	}
	return nil
}

// hint says what an errno means where create has found the program's file.
func hint(errno syscall.Errno) string {
	switch errno {
	case syscall.ENOENT:
		return " (the file is there, but not the loader or interpreter that it names)"
	case syscall.ENOEXEC:
		return " (it is for another machine, or a script without a first line that names its interpreter)"
	}
	return ""
}

// lastOutput is the last line of a container's log without its head; "" where there
// is none.
func lastOutput(path string) string {
	if path == "" {
		return ""
	}
	f, err := regular.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	const most = 8 << 10
	if info, err := f.Stat(); err != nil || info.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return ""
		}
	}
	data, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil && !errors.Is(err, os.ErrClosed) {
		return ""
	}
	lines := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	head := strings.SplitN(lines[len(lines)-1], " ", 4) // time, stream, tag, text
	return head[len(head)-1]
}
