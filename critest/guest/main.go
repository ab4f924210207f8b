package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// errUsage: the command line makes no sense.
var errUsage = errors.New("usage: guest [-suite S] [-append ARGS] [-run REGEXP] [-timeout D] [-v] (-c COMMAND | PACKAGE_FOLDER...)")

// errFailed: tests ran and not all were good; the report has said which.
var errFailed = errors.New("not every package passed in the guest")

// options are the command line's.
type options struct {
	top     string // folder of the project
	suite   string
	append  string
	run     string
	timeout time.Duration
	command string
	verbose bool
	folders []string
}

func main() {
	// The kernel ends qemu and the helpers with the thread that started them.
	runtime.LockOSThread()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code, err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

func or(value, otherwise string) string {
	if value != "" {
		return value
	}
	return otherwise
}

// parse reads flags and environment.
func parse() (options, error) {
	var o options
	limit, err := time.ParseDuration(or(os.Getenv("VM_TIMEOUT"), "40m"))
	if err != nil {
		return o, fmt.Errorf("VM_TIMEOUT: %w", err)
	}
	flag.StringVar(&o.suite, "suite", or(os.Getenv("VM_SUITE"), "bookworm"), "Debian release of the guest (VM_SUITE)")
	flag.StringVar(&o.append, "append", os.Getenv("VM_APPEND"), "more kernel arguments; boots cold (VM_APPEND)")
	flag.StringVar(&o.run, "run", os.Getenv("VM_RUN"), "run the tests of these names, not just the root tests (VM_RUN)")
	flag.DurationVar(&o.timeout, "timeout", limit, "of everything in the guest (VM_TIMEOUT)")
	flag.BoolVar(&o.verbose, "v", os.Getenv("VM_VERBOSE") != "", "print everything that tests say (VM_VERBOSE)")
	flag.StringVar(&o.command, "c", "", "run this bash command instead of tests")
	flag.Parse()
	o.folders = flag.Args()
	if (o.command == "") == (len(o.folders) == 0) {
		return o, errUsage
	}
	if o.top, err = os.Getwd(); err != nil {
		return o, fmt.Errorf("find the project: %w", err)
	}
	for ; o.top != "/"; o.top = filepath.Dir(o.top) {
		if _, err := os.Stat(filepath.Join(o.top, "critest", "guest")); err == nil {
			return o, nil
		}
	}
	return o, errors.New("find the project: neither this folder nor one above it is berth's")
}

// run does everything; the code is that of a command inside.
func run(ctx context.Context) (int, error) {
	o, err := parse()
	if err != nil {
		return 2, err
	}
	if os.Geteuid() != 0 {
		return 1, fmt.Errorf("needs root, to make the image and to share folders; this is uid %d", os.Geteuid())
	}
	out, err := os.MkdirTemp("", "guest-tests-")
	if err != nil {
		return 1, fmt.Errorf("make a folder for compiled tests: %w", err)
	}
	defer os.RemoveAll(out)
	folders := []string{o.top, out}
	if o.command != "" {
		return runInside(ctx, o, folders, "cd "+shellWord(o.top)+"\n"+o.command+"\n", os.Stdout)
	}
	var suites []suite
	var broken []error
	for i, folder := range o.folders {
		o.folders[i] = filepath.Clean(folder)
		s, err := compile(ctx, o.top, folder, out, o.run)
		if err != nil {
			fmt.Fprintln(os.Stderr, "guest:", err) // at once: the run may take long
			broken = append(broken, fmt.Errorf("%s did not compile", s.folder))
			continue
		}
		suites = append(suites, s)
	}
	if ctx.Err() != nil {
		return 130, errors.New("interrupted")
	}
	r := &report{out: os.Stdout, verbose: o.verbose}
	_, err = runInside(ctx, o, folders, script(o.top, suites), r)
	if good := r.summary(o.folders); !good && err == nil {
		err = errFailed
	}
	return 0, errors.Join(append(broken, err)...)
}

// runInside makes what is missing of image and snapshot, and runs the script in a
// guest of its own, which is gone afterwards.
func runInside(ctx context.Context, o options, folders []string, text string, output io.Writer) (code int, err error) {
	dir := filepath.Join(or(os.Getenv("BERTH_DEPS"), filepath.Join(o.top, ".deps")), "guest", o.suite)
	ram, err := newMemory()
	if err != nil {
		return 1, err
	}
	defer ram.Close()
	d, err := prepare(ctx, dir, o, ram)
	if err != nil {
		return 1, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("%v are over (VM_TIMEOUT)", o.timeout))
	defer cancel()
	m, err := launch(ctx, d, folders)
	if m != nil {
		defer func() { err = errors.Join(err, m.close()) }()
	}
	if err != nil {
		return 1, err
	}
	code, err = m.run(ctx, mounts(folders, time.Now())+text, output)
	if err != nil {
		return 1, err
	}
	return code, nil
}

// prepared is what a run starts from.
type prepared struct {
	drive
	state string // to go on from, when the drive says resume
}

func prepare(ctx context.Context, dir string, o options, ram *os.File) (prepared, error) {
	p := prepared{drive: drive{image: dir, disk: filepath.Join(dir, "root.img"), append: o.append, memory: ram}}
	unlock, err := lock(dir)
	if err != nil {
		return p, err
	}
	defer unlock()
	mark, err := ensureImage(ctx, dir, o.suite)
	if err != nil {
		return p, err
	}
	if _, emulated := accelerator(); !emulated || strings.TrimSpace(o.append) != "" {
		return p, nil // boots
	}
	s, err := ensureSnapshot(ctx, dir, mark)
	if err != nil {
		return p, err
	}
	saved, err := os.Open(s.memory)
	if err != nil {
		return p, fmt.Errorf("read the snapshot: %w", err)
	}
	defer saved.Close()
	if err := copyData(ram, saved); err != nil {
		return p, fmt.Errorf("read the snapshot: %w", err)
	}
	p.disk, p.state, p.resume = s.disk, s.state, true
	return p, nil
}

// launch brings the machine to where it waits for its script. The machine is to
// be closed whenever one is returned.
func launch(ctx context.Context, p prepared, folders []string) (*machine, error) {
	m, err := start(p.drive, folders)
	if err != nil {
		return m, err
	}
	if p.resume {
		return m, m.monitor.transfer("migrate-incoming", "cat <"+shellWord(p.state))
	}
	boot, cancel := context.WithTimeoutCause(ctx, bootTimeout, fmt.Errorf("no boot within %v", bootTimeout))
	defer cancel()
	_, err = m.expect(boot, "awake")
	return m, err
}
