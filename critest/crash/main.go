// Command crash kills the daemon, or the node's monitor, at every step of every
// request that changes something, and looks at what is left.
//
// The daemon is one built with the tag "faults" (package runtime/operation), which
// tells its steps and can be told to kill a process at one. A first life of a pod
// gives the list of steps. Then a pod lives once for each step and victim: at that
// step the victim is killed with SIGKILL; the daemon is started again where it was
// the victim; lists must be true; the same request is sent again and must succeed;
// the pod lives on to its end; the log of its container must have no hole; and
// nothing may be left: processes, mounts, namespaces, links, cgroups, leases,
// files. Everything is real: runc, CNI plugins, overlay.
//
// Usage: crash [-sample N] [-only REGEXP] [-v]
//
// -sample N takes N of the points, spread evenly; 0 takes all. Exit status 1 when
// any point went wrong.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"berth/critest/images"
	"berth/critest/node"
)

// errPoints: the lines above say which.
var errPoints = errors.New("some points went wrong")

func main() {
	sample := flag.Int("sample", 0, "how many points; 0: all")
	only := flag.String("only", "", "only points that match this regular expression")
	verbose := flag.Bool("v", false, "name each point before it runs")
	flag.Parse()
	if err := node.Isolate(); err != nil {
		fmt.Fprintln(os.Stderr, "crash:", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *sample, *only, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "crash:", err)
		os.Exit(1)
	}
}

// point is one step of one request of the life, and who is killed there.
type point struct {
	request int    // index in the life
	step    string // VERB/STEP
	victim  string // "daemon" or "monitor"
}

func (p point) String() string { return p.victim + " killed at " + p.step }

func run(ctx context.Context, sample int, only string, verbose bool) (err error) {
	begin := time.Now()
	stock, err := node.OpenStock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stock.Close()) }()
	faults, err := os.MkdirTemp("", "berth-faults-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(faults)
	if err := os.Setenv("BERTH_FAULTS", faults); err != nil {
		return err
	}
	n, err := node.Start(ctx, node.Options{Mirror: stock.Addr(), LogLevel: "info"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close(context.WithoutCancel(ctx))) }()
	if _, err := n.Crictl(ctx, "pull", images.Busybox); err != nil {
		return err
	}
	w := &world{Node: n, faults: faults}
	points, err := w.points(ctx)
	if err != nil {
		return fmt.Errorf("the life without a crash: %w", err)
	}
	return w.all(ctx, choose(points, sample, only), verbose, begin)
}

// choose takes the points that match, and of these a sample spread evenly.
func choose(points []point, sample int, only string) []point {
	if only != "" {
		pattern := regexp.MustCompile(only)
		points = slices.DeleteFunc(points, func(p point) bool { return !pattern.MatchString(p.String()) })
	}
	if sample <= 0 || sample >= len(points) {
		return points
	}
	var chosen []point
	for i := range sample {
		chosen = append(chosen, points[i*len(points)/sample])
	}
	return chosen
}

// all runs the points one after the other.
func (w *world) all(ctx context.Context, points []point, verbose bool, begin time.Time) error {
	wrong := 0
	for i, p := range points {
		if verbose {
			fmt.Printf("%d of %d: %s\n", i+1, len(points), p)
		}
		w.serial++
		if err := w.crash(ctx, p); err != nil {
			wrong++
			fmt.Printf("WRONG: %s: %v\n", p, err)
			fmt.Println(w.LogTail(12))
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	fmt.Printf("%d crashes at %d steps, %d wrong, %.0f s\n", len(points), steps(points), wrong, time.Since(begin).Seconds())
	if wrong > 0 || len(points) == 0 {
		return errPoints
	}
	return nil
}

func steps(points []point) int {
	seen := map[string]bool{}
	for _, p := range points {
		seen[p.step] = true
	}
	return len(seen)
}

// points lives a life without a crash and makes two points of each step.
func (w *world) points(ctx context.Context) ([]point, error) {
	var found []point
	l := w.life()
	for i, request := range l.requests {
		if err := os.RemoveAll(filepath.Join(w.faults, "trace")); err != nil {
			return nil, err
		}
		if err := request.send(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", request.name, err)
		}
		text, err := os.ReadFile(filepath.Join(w.faults, "trace"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		seen := map[string]bool{}
		for line := range strings.Lines(string(text)) {
			step := strings.TrimSpace(line)
			if seen[step] {
				continue
			}
			seen[step] = true
			for _, victim := range []string{"daemon", "monitor"} {
				found = append(found, point{request: i, step: step, victim: victim})
			}
		}
	}
	// Sorted, so that a sample has its share of both.
	slices.SortStableFunc(found, func(a, b point) int { return strings.Compare(a.victim, b.victim) })
	return found, l.whole()
}
