// Command crash has something go wrong at every step of every request that changes
// something, and looks at what is left.
//
// The daemon is one built with the tag "faults" (package runtime/operation), which
// tells each step before it takes it. Everything else is real: runc, CNI plugins,
// overlay, user namespaces, nftables and iptables. A life of each kind (see lives)
// without a fault gives the list of steps; it must be that of the table (see
// operations). Then there is one life for each point, in these suites:
//
//	daemon        the daemon is killed with SIGKILL at the step
//	monitor       the monitor is
//	fail          from the step on the disk is full or read-only; or runc, or a
//	              CNI plugin, refuses, fails behind its effect, is killed, talks
//	              nonsense or hangs
//	daemon-call   the daemon is killed in a system call that changes something, or
//	              sends the monitor a message
//	monitor-call  the monitor is, in one of its own
//	fail-call     the system call of either fails
//
// A daemon's start, after a kill or a reboot, is a request too: its steps fail, and
// kill, like any other's. Some lives have clients connected, by attach, exec and
// port-forward: their sessions end or go on, and can be opened again.
//
// After each the daemon is started again where it was the victim; the same request
// is sent again until it succeeds; the pod lives on to its end; the log of its
// container must have no hole; and nothing may be left: processes, mounts,
// namespaces, links, cgroups, leases, rules, files, descriptors, goroutines: a leak of
// each kind, made by the test before the first point, must be noticed (plants). All the
// time a watcher compares lists, statuses and events with the kernel and with what
// they said before.
//
// Usage: crash [-suite NAMES] [-sample N] [-only REGEXP] [-list] [-v]
//
// -sample N takes N of the points, spread evenly over the suites; 0 takes all. Exit
// status 1 when any point went wrong, or any step was not reached. A system call that
// does not come again, as some do but once in a daemon's life, is told and counted.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"berth/critest/node"
)

// errPoints: the lines above say which.
var errPoints = errors.New("some points went wrong")

// superviseVerb is the first argument of this program where it becomes the daemon.
const superviseVerb = "supervised"

// options are the command line.
type options struct {
	suites        []string // empty: all
	sample        int
	only          string
	verbose, list bool
}

func main() {
	if len(os.Args) > 2 && os.Args[1] == superviseVerb {
		fmt.Fprintln(os.Stderr, "crash:", beSupervised(os.Args[2:]))
		os.Exit(1)
	}
	var o options
	suites := flag.String("suite", "", "suites, separated by commas; empty: all")
	flag.IntVar(&o.sample, "sample", 0, "how many points; 0: all")
	flag.StringVar(&o.only, "only", "", "only points that match this regular expression")
	flag.BoolVar(&o.list, "list", false, "print the points, try none")
	flag.BoolVar(&o.verbose, "v", false, "name each point before it is tried")
	flag.Parse()
	if *suites != "" {
		o.suites = strings.Split(*suites, ",")
	}
	if err := node.Isolate(); err != nil {
		fmt.Fprintln(os.Stderr, "crash:", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "crash:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	stock, err := node.OpenStock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stock.Close()) }()
	for _, supervised := range []bool{false, true} {
		err = errors.Join(err, o.try(ctx, stock, supervised))
	}
	return err
}

// wants tells whether points of a suite were asked for.
func (o options) wants(suite string) bool {
	return len(o.suites) == 0 || slices.Contains(o.suites, suite)
}

// try makes a world of one kind and tries its points there.
func (o options) try(ctx context.Context, stock *node.Stock, kind bool) (err error) {
	all := []string{killDaemon, killMonitor, failStep, killDaemonCall, killMonitorCall, failCall}
	all = slices.DeleteFunc(all, func(suite string) bool { return supervised(suite) != kind || !o.wants(suite) })
	if len(all) == 0 {
		return nil
	}
	begun := time.Now()
	w, err := begin(ctx, stock, kind)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.end(context.WithoutCancel(ctx))) }()
	if err := publish(w); err != nil {
		return err
	}
	points, reached, err := w.points(ctx)
	if err != nil {
		return err
	}
	if err := w.complete(reached); err != nil {
		return err
	}
	if w.noCheckpoints != "" {
		fmt.Printf("skipped: %s: %s\n", strings.Join(untried, ", "), w.noCheckpoints)
	}
	if err := w.settled(); err != nil {
		return err
	}
	if err := w.left(ctx); err != nil {
		return fmt.Errorf("the lives without a fault: %w", err)
	}
	if err := w.notices(ctx); err != nil {
		return err
	}
	points = slices.DeleteFunc(points, func(p point) bool { return !o.wants(p.suite) })
	share := o.sample
	if len(o.suites) == 0 && share > 0 {
		share = (share + 1) / 2 // the other half is for the other kind of world
	}
	points = choose(points, share, o.only)
	if o.list {
		for _, p := range points {
			fmt.Println(p)
		}
		return nil
	}
	return w.all(ctx, points, o.verbose, begun)
}

// all tries the points one after the other and says how each suite went.
func (w *world) all(ctx context.Context, points []point, verbose bool, begun time.Time) error {
	tried, wrong, missed := map[string]int{}, map[string]int{}, map[string]int{}
	for i, p := range points {
		if verbose {
			fmt.Printf("%d of %d, after %.0f s: %s\n", i+1, len(points), time.Since(begun).Seconds(), p)
		}
		tried[p.suite]++
		err := w.crash(ctx, p)
		for again := 0; errors.Is(err, errUnreached) && again < 3; again++ {
			err = w.crash(ctx, p) // a call of the background may be in another request this time
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, errUnreached) && supervised(p.suite) {
			missed[p.suite]++
			fmt.Printf("not met again: %s\n", p)
			continue
		}
		if err != nil {
			wrong[p.suite]++
			fmt.Printf("WRONG: %s: %v\n%s\n", p, err, w.LogTail(6))
			if err := w.settled(); err != nil { // nothing is told twice
				return err
			}
		}
	}
	bad := 0
	for suite, n := range tried {
		fmt.Printf("%s: %d points, %d wrong, %d not met again\n", suite, n, wrong[suite], missed[suite])
		bad += wrong[suite]
	}
	fmt.Printf("%d points, %d wrong, %d looks at lists, %.0f s\n", len(points), bad, w.watcher.looked(), time.Since(begun).Seconds())
	if bad > 0 {
		return errPoints
	}
	return nil
}

// complete wants the steps that were reached to be those of the table.
func (w *world) complete(reached map[string]bool) error {
	missing := func(verb string) bool { return w.noCheckpoints == "" || !slices.Contains(untried, verb) }
	known := map[string]bool{}
	var wrong []string
	for verb, steps := range operations {
		for _, step := range steps {
			known[verb+"/"+step] = true
			if !reached[verb+"/"+step] && missing(verb) {
				wrong = append(wrong, "no life reaches "+verb+"/"+step)
			}
		}
	}
	for service, methods := range changers {
		for _, m := range methods {
			for _, end := range []string{"/request", "/reply"} {
				known[service+m+end] = true
				if !reached[service+m+end] && missing(m) {
					wrong = append(wrong, "no life reaches "+service+m+end)
				}
			}
		}
	}
	for step := range reached {
		if !known[step] {
			wrong = append(wrong, "the table lacks "+step)
		}
	}
	slices.Sort(wrong)
	if len(wrong) > 0 {
		return fmt.Errorf("the table and the lives differ: %q", wrong)
	}
	return nil
}
