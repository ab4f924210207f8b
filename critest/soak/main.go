// Command soak lets random pods live on one node for a long time and watches
// that everything said of them is true and that nothing grows.
//
// Eight workers live pods' lives at once: networks, shared PID namespaces,
// containers that log, end by themselves, run out of memory or ignore SIGTERM;
// exec, attach, log rotation, statistics, updates, pulls, broken pulls, removals.
// The first third is a storm: the daemon is ended by SIGTERM and SIGKILL, at once
// back or down for a while, and the monitor by SIGKILL. What is left is calm: no
// process of berth is restarted any more, so that no restart hides a leak. Every
// few minutes all workers rest with no pod there, and the node must be as empty
// as it was at first.
//
// Checked throughout: lists agree with what the workers know (also while the
// daemon starts: complete or Unavailable), exit codes and reasons, output of
// execs and of attached sessions, every line of every log over rotations and
// crashes, errors (none outside a disturbance but those asked for; never a
// reserved name), and in the calm the daemon's memory, goroutines and
// descriptors, and the monitor's. Ends with the node's leak check.
//
// Usage: soak [-minutes M] [-seed S]
//
// What a worker does in its life number k follows from the seed alone; when it
// happens follows from the machine. Exit status 1 when anything was wrong.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"berth/critest/images"
	"berth/critest/node"
)

// errWrong: the lines above say what.
var errWrong = errors.New("something went wrong")

func main() {
	minutes := flag.Float64("minutes", 30, "how long")
	seed := flag.Uint64("seed", 0, "of the random lives; 0: any, which is printed")
	flag.Parse()
	klog.SetLogger(logr.Discard()) // client-go tells of every session that is cut off
	if err := node.Isolate(); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, time.Duration(*minutes*float64(time.Minute)), *seed); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, length time.Duration, seed uint64) (err error) {
	fmt.Printf("seed %d, %v, %d workers\n", seed, length, workers)
	stock, err := node.OpenStock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stock.Close()) }()
	n, err := node.Start(ctx, node.Options{Mirror: stock.Addr(), LogLevel: "info",
		Settings: map[string]string{"metrics": fmt.Sprintf("address = %q", metricsAddress)}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close(context.WithoutCancel(ctx))) }()
	if _, err := n.Crictl(ctx, "pull", images.Busybox); err != nil {
		return err
	}
	w, err := newWorld(n, stock, seed)
	if err != nil {
		return err
	}
	return w.soak(ctx, length)
}
