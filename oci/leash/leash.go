// Package leash keeps hold of programs of others that the daemon runs on the node,
// with all that they start: CNI plugins, and commands of the OCI runtime, also those
// that the monitor runs for it. Each run has a cgroup of its own, so that a
// daemon that follows one that was killed finds what still runs and ends it, or
// waits for it, before it undoes what that may be doing. A process group or a
// parent-death signal does not reach what a program's children start.
//
// It does not own the programs, their deadlines or their output (network), nor the
// cgroups of containers (the OCI runtime).
//
// Terms: a run is one program's life, with a verb and the pod or container it is for;
// it is left when an earlier daemon began it, or it has outlived its end here.
//
// On disk: a cgroup of version 2 below the daemon's own, without controllers, and
// in the state directory the file leash, which says where that is. A kernel's v1
// hierarchies cannot have a process born into a cgroup; where version 2 is not
// mounted, nothing is held.
package leash

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"berth/oci/monitor"
	"berth/sandbox/regular"
)

// Delete is the verb of runs that are not ended but waited for: one that takes
// things away and is stopped halfway may no longer know what is left to be taken.
const Delete = "DEL"

// Leash holds the runs of one daemon. Safe for concurrent use.
type Leash struct {
	dir    string // the cgroup in which runs have theirs; empty: nothing is held
	opened time.Time

	mu   sync.Mutex
	left map[string]run // by directory, guarded by mu
}

const maxNote = 8 << 10 // bytes of a path

type run struct{ verb, pod, dir string } // pod: or container

// Open finds what an earlier daemon with the same state directory has left, and
// ends it, but for Delete; it does not wait for that end. With an error the Leash may
// be nil: then nothing can be held here. It is used like any other.
func Open(state string) (*Leash, error) {
	own, err := monitor.OwnCgroup()
	if err != nil {
		return nil, err
	}
	l := &Leash{dir: filepath.Join(own, "berth-plugins-"+short(state)), opened: time.Now(), left: map[string]run{}}
	note := filepath.Join(state, "leash")
	before, _ := regular.Read(note, maxNote) // without it they are where they are now
	if old := string(before); old != l.dir && filepath.IsAbs(old) {
		l.find(old)
	}
	l.find(l.dir)
	if err := os.Mkdir(l.dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("make cgroup for what is held: %w", err)
	}
	if string(before) == l.dir {
		return l, nil
	}
	err = os.WriteFile(note+".new", []byte(l.dir), 0o600)
	if err == nil {
		err = os.Rename(note+".new", note)
	}
	if err != nil {
		return l, fmt.Errorf("note where it runs: %w", err)
	}
	return l, nil
}

func short(state string) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(filepath.Clean(state)))
	return fmt.Sprintf("%016x", h.Sum64())
}

// find takes over the runs below a directory.
func (l *Leash) find(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return // there was none
	}
	for _, e := range entries {
		verb, rest, ok := strings.Cut(e.Name(), ".")
		if !ok || !e.IsDir() {
			continue
		}
		r := run{verb: verb, dir: filepath.Join(dir, e.Name())}
		r.pod = strings.TrimSuffix(rest, filepath.Ext(rest))
		if os.Remove(r.dir) == nil {
			continue // nothing runs there
		}
		l.left[r.dir] = r
		if r.verb != Delete {
			_ = os.WriteFile(filepath.Join(r.dir, "cgroup.kill"), []byte("1"), 0) // Settle does it in any case
		}
	}
}

// Hold makes the cgroup of a run, into which its program is to be started. It is
// nil where nothing is held. end must be called when the program has ended: it
// closes the cgroup, after killing what is left in it, or letting that go on
// unheld. It blocks until the killed are gone, for three seconds at most where the
// kernel does not let go of them; such are waited for by Settle.
func (l *Leash) Hold(verb, pod string) (cgroup *os.File, end func(kill bool), err error) {
	if l == nil {
		return nil, func(bool) {}, nil
	}
	r := run{verb, pod, filepath.Join(l.dir, verb+"."+pod+"."+rand.Text()[:8])}
	if err := l.mkdir(r.dir); err != nil {
		return nil, nil, fmt.Errorf("make cgroup for a command: %w", err)
	}
	if cgroup, err = os.Open(r.dir); err != nil {
		_ = os.Remove(r.dir)
		return nil, nil, fmt.Errorf("open cgroup of a command: %w", err)
	}
	return cgroup, func(kill bool) {
		_ = cgroup.Close()
		l.end(r, kill)
	}, nil
}

// mkdir makes a run's cgroup, and the one of all runs where somebody has removed it:
// empty, it looks like a leftover.
func (l *Leash) mkdir(dir string) error {
	err := os.Mkdir(dir, 0o755)
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Mkdir(l.dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return os.Mkdir(dir, 0o755)
}

func (l *Leash) end(r run, kill bool) {
	if os.Remove(r.dir) == nil {
		return
	}
	if !kill {
		if monitor.DissolveCgroup(r.dir, filepath.Dir(l.dir)) == nil {
			return
		}
	}
	if err := finish(context.Background(), r); err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.left[r.dir] = r
	}
}

// finish kills what runs and removes its cgroup.
func finish(ctx context.Context, r run) error {
	if err := monitor.KillCgroup(ctx, r.dir); err != nil {
		return err
	}
	return monitor.RemoveCgroup(r.dir)
}

// Settle returns when nothing that was left for a pod or container runs any more. What is not
// Delete is killed; that is waited for, but at most for patience since Open, then
// killed too. The error names the processes that the kernel does not let go of.
// Idempotent.
func (l *Leash) Settle(ctx context.Context, pod string, patience time.Duration) error {
	for _, r := range l.leftFor(pod) {
		if r.verb == Delete {
			l.await(ctx, r, patience)
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("wait for the %s of %q that an earlier daemon began: %w", r.verb, pod, err)
		}
		if err := finish(ctx, r); err != nil {
			return fmt.Errorf("end the %s of %q that was left: %w", r.verb, pod, err)
		}
		l.mu.Lock()
		delete(l.left, r.dir)
		l.mu.Unlock()
	}
	return nil
}

// await waits until a run has ended by itself.
func (l *Leash) await(ctx context.Context, r run, patience time.Duration) {
	limit := time.NewTimer(time.Until(l.opened.Add(patience)))
	defer limit.Stop()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for {
		if pids, err := monitor.Processes(r.dir); err != nil || len(pids) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-limit.C:
			return
		case <-look.C:
		}
	}
}

func (l *Leash) leftFor(pod string) (list []run) {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.left {
		if r.pod == pod {
			list = append(list, r)
		}
	}
	return list
}

// Left are the pods and containers for which something is left; one may be "", for a
// verb that is for none.
func (l *Leash) Left() (pods []string) {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	seen := map[string]bool{}
	for _, r := range l.left {
		if !seen[r.pod] {
			pods = append(pods, r.pod)
		}
		seen[r.pod] = true
	}
	return pods
}

// Close removes the cgroup where nothing is in it. Runs go on.
func (l *Leash) Close() {
	if l != nil {
		_ = os.Remove(l.dir)
	}
}
