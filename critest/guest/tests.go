package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// errNoTests: a folder holds nothing to run.
var errNoTests = errors.New("no test to run")

// slowness is what tests multiply their limits of time by, through BERTH_TEST_SLOW:
// an emulated processor's 6, up to three times as much when others wait for this
// machine's processors too. VM_SLOW says otherwise.
func slowness() string {
	if own := os.Getenv("VM_SLOW"); own != "" {
		return own
	}
	var load float64
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		_, _ = fmt.Sscan(string(text), &load) // stays 0
	}
	return strconv.Itoa(int(6 * min(max(load/float64(runtime.NumCPU()), 1), 3)))
}

// testFunction finds what `go test` runs.
var testFunction = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Za-z0-9_]+)\(`)

// suite is the compiled tests of one package.
type suite struct {
	folder  string // relative to the project's
	program string // of the compiled tests
	run     string // regular expression of test names
}

// compile builds the tests of a folder of the project at top into the folder out.
// Where a package marks its root tests by *_root_test.go only those are selected,
// for the others need no guest; pattern, unless empty, selects otherwise.
func compile(ctx context.Context, top, folder, out, pattern string) (suite, error) {
	folder = filepath.Clean(folder)
	s := suite{folder: folder, run: pattern}
	if s.run == "" {
		names, err := rootTests(filepath.Join(top, folder))
		if err != nil {
			return s, err
		}
		s.run = "^(" + strings.Join(names, "|") + ")$"
	}
	module, inside := top, folder
	if rest, ok := strings.CutPrefix(folder, "critest/"); ok {
		module, inside = filepath.Join(top, "critest"), rest // a module of its own
	}
	s.program = filepath.Join(out, strings.ReplaceAll(folder, "/", "-")+".test")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-tags", "containers_image_openpgp", "-o", s.program, "./"+inside)
	build.Dir = module
	// The guest's processor is the oldest that Go knows.
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOAMD64=v1")
	build.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if said, err := build.CombinedOutput(); err != nil {
		return s, fmt.Errorf("compile the tests of %s: %w: %s", folder, err, strings.TrimSpace(string(said)))
	}
	if _, err := os.Stat(s.program); err != nil {
		return s, fmt.Errorf("%w in %s", errNoTests, folder)
	}
	return s, nil
}

// rootTests lists the tests in the *_root_test.go of a folder, or all when there
// are no such files. ErrNoTests when it has none.
func rootTests(dir string) ([]string, error) {
	var names []string
	for _, pattern := range []string{"*_root_test.go", "*_test.go"} {
		files, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return nil, fmt.Errorf("list the tests of %s: %w", dir, err)
		}
		for _, file := range files {
			source, err := os.ReadFile(file)
			if err != nil {
				return nil, fmt.Errorf("list the tests of %s: %w", dir, err)
			}
			for _, match := range testFunction.FindAllSubmatch(source, -1) {
				if name := string(match[1]); name != "TestMain" {
					names = append(names, name)
				}
			}
		}
		if len(names) > 0 {
			return names, nil
		}
	}
	return nil, fmt.Errorf("%w in %s", errNoTests, dir)
}

// Lines that the script writes around the tests of a package: mark, at the end
// the exit status, and folder.
const (
	beginMark = "\x01begin "
	endMark   = "\x01end "
)

// script runs the suites one after the other.
func script(top string, suites []suite) string {
	var b strings.Builder
	deps, bin := os.Getenv("BERTH_DEPS"), os.Getenv("BERTH_BIN")
	if deps == "" {
		deps = filepath.Join(top, ".deps")
	}
	if bin == "" {
		bin = filepath.Join(top, "bin")
	}
	fmt.Fprintf(&b, "export BERTH_DEPS=%s BERTH_BIN=%s BERTH_GUEST=1 BERTH_TEST_SLOW=%s PATH=%s/bin:$PATH\n",
		shellWord(deps), shellWord(bin), shellWord(slowness()), shellWord(deps))
	for _, s := range suites {
		fmt.Fprintf(&b, "printf '%s%%s\\n' %s\n", `\001begin `, shellWord(s.folder))
		fmt.Fprintf(&b, "cd %s && %s -test.v -test.timeout 30m -test.run %s\n",
			shellWord(filepath.Join(top, s.folder)), shellWord(s.program), shellWord(s.run))
		fmt.Fprintf(&b, "printf '\\n%s%%s %%s\\n' $? %s\n", `\001end `, shellWord(s.folder))
	}
	return b.String()
}
