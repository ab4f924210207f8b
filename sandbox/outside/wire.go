package outside

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"syscall"
	"time"

	"berth/sandbox/regular"
)

// request is one look; what a look does not need is empty.
type request struct {
	Op, Path string
	Below    string // of Path
	Own      string // a path of the daemon's own
	Partial  string // name of what is not whole yet
	Label    string
	Most     int64
	Skip     []string
}

// reply answers a request.
type reply struct {
	Found   *Found
	Path    string
	Data    []byte
	Entries []Entry
	Error   *failure
	Alive   bool // no answer yet, but it gets on
}

// failure is an error on its way.
type failure struct {
	Text  string
	Errno syscall.Errno
	Not   bool // a regular.ErrNot
}

func (f *failure) Error() string { return f.Text }

func (f *failure) Unwrap() error {
	if f.Errno == 0 {
		return nil
	}
	return f.Errno
}

func (f *failure) Is(target error) bool { return f.Not && target == regular.ErrNot }

// Serve answers looks from in, one after the other, until that ends. It is what a
// Looker's process does.
func Serve(in io.Reader, out io.Writer) error {
	requests, replies := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var r request
		if err := requests.Decode(&r); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, os.ErrClosed) {
				return nil
			}
			return err
		}
		if err := replies.Encode(answer(r, signs(replies))); err != nil {
			return err
		}
	}
}

// signs gives what is to be called as something long gets on; it tells so once in a
// while.
func signs(replies *json.Encoder) func() {
	last := time.Now()
	return func() {
		if time.Since(last) < signEvery {
			return
		}
		last = time.Now()
		_ = replies.Encode(reply{Alive: true}) // whoever has gone does not read the answer either
	}
}

// signEvery is much less than any limit.
const signEvery = 100 * time.Millisecond

func answer(r request, alive func()) (a reply) {
	var err error
	var host Here
	switch r.Op {
	case "find":
		var f Found
		f, err = host.Find(r.Path)
		a.Found = &f
	case "dir":
		err = host.MakeDir(r.Path)
	case "log":
		a.Path, err = host.MakeLog(r.Path, r.Below)
	case "read":
		a.Data, err = host.Read(r.Path, r.Most)
	case "devices":
		a.Entries, err = host.Devices(r.Path, r.Skip)
	case "answer":
		touch(r.Path)
	case "fetch":
		err = fetch(r.Path, r.Own, alive)
	case "deliver":
		err = deliver(r, alive)
	case "remove":
		err = os.RemoveAll(r.Path)
	case "relabel":
		err = relabel(r.Path, r.Label, alive)
	default:
		err = errors.New("unknown look " + r.Op)
	}
	if err != nil {
		f := &failure{Text: err.Error(), Not: errors.Is(err, regular.ErrNot)}
		_ = errors.As(err, &f.Errno)
		a = reply{Error: f}
	}
	return a
}
