package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
)

// pulls measures cold pulls of an image of Debian packages, 300 MB in 8 layers,
// over loopback, by berth, by its peers and by hand, in turns. Each pull is of a
// daemon that has just started, onto a filesystem that has just been made: ext4
// creates files several times slower for minutes after many were deleted.
type pulls struct {
	peers  string
	rounds int

	deps     string
	registry *registry.Registry
}

// figures are what a pull took.
type figures struct {
	wall, cpu, remove time.Duration
	peak              float64 // KiB
}

func (p *pulls) run(ctx context.Context) (err error) {
	if p.deps, err = node.Deps(); err != nil {
		return err
	}
	if p.registry, err = registry.Start(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.registry.Close()) }()
	contenders := []contender{berthPuller{}, floorPuller{}}
	switch p.peers {
	case "":
	case "containerd":
		contenders = []contender{berthPuller{}, containerdPuller{}, floorPuller{}}
	default:
		return fmt.Errorf("no peer is called %q", p.peers)
	}
	for _, compression := range []images.Compression{images.Gzip, images.Zstd} {
		target, err := p.publish(compression)
		if err != nil {
			return err
		}
		got := map[string][]figures{}
		for range p.rounds {
			for _, c := range contenders {
				f, err := p.once(ctx, c, target)
				if err != nil {
					return fmt.Errorf("pull with %s: %w", c.name(), err)
				}
				got[c.name()] = append(got[c.name()], f)
			}
		}
		p.table(target, contenders, got)
		if compression == images.Gzip {
			if err := p.together(ctx, target, got["berth"]); err != nil {
				return err
			}
		}
	}
	return nil
}

// target is the image to pull.
type target struct {
	reference string
	layers    []string // addresses of the blobs
	tool      string   // that decompresses a layer
	text      string   // says what it is
}

func (p *pulls) publish(compression images.Compression) (target, error) {
	image, err := images.Common.Build(p.deps, compression)
	if err != nil {
		return target{}, err
	}
	name := "bench/" + compression.String()
	if _, err := image.Publish(p.registry, name, "1"); err != nil {
		return target{}, err
	}
	t := target{reference: "docker.io/" + name + ":1", tool: "gunzip -c"}
	if compression == images.Zstd {
		t.tool = "zstd -dc"
	}
	size := 0
	for _, l := range image.Layers {
		size += len(l.Blob)
		t.layers = append(t.layers, fmt.Sprintf("http://%s/v2/%s/blobs/%s", p.registry.Addr(), name, p.registry.PutBlob(l.Blob)))
	}
	t.text = fmt.Sprintf("%d MB in %d layers of %s", size>>20, len(image.Layers), compression)
	return t, nil
}

// once measures one pull.
func (p *pulls) once(ctx context.Context, c contender, t target) (f figures, err error) {
	disk, err := makeDisk()
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, disk.remove()) }()
	d, err := c.start(ctx, p, disk.dir)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	before, began := d.cpu(), time.Now()
	if err := d.pull(ctx, t); err != nil {
		return f, err
	}
	f.wall, f.cpu, f.peak = time.Since(began), d.cpu()-before, d.peak()
	began = time.Now()
	if err := d.remove(ctx, t); err != nil {
		return f, err
	}
	f.remove = time.Since(began)
	return f, nil
}

func (p *pulls) table(t target, contenders []contender, got map[string][]figures) {
	fmt.Printf("\ncold pull, %s; %d rounds\n", t.text, p.rounds)
	fmt.Printf("  %-12s %8s %8s %8s %8s %10s %10s\n", "", "wall, ms", "median", "CPU, ms", "median", "peak, MiB", "remove, ms")
	pick := func(name string, of func(figures) time.Duration) (least, middle time.Duration) {
		var all []time.Duration
		for _, f := range got[name] {
			all = append(all, of(f))
		}
		return slices.Min(all), median(all)
	}
	wall := func(f figures) time.Duration { return f.wall }
	cpu := func(f figures) time.Duration { return f.cpu }
	for _, c := range contenders {
		w, wm := pick(c.name(), wall)
		u, um := pick(c.name(), cpu)
		_, remove := pick(c.name(), func(f figures) time.Duration { return f.remove })
		peak := 0.0
		for _, f := range got[c.name()] {
			peak = max(peak, f.peak)
		}
		fmt.Printf("  %-12s %8.0f %8.0f %8.0f %8.0f %10.0f %10.1f\n", c.name(), ms(w), ms(wm), ms(u), ms(um), peak/1024, ms(remove))
	}
	for _, c := range contenders[1:] {
		mw, mwm := pick("berth", wall)
		mu, mum := pick("berth", cpu)
		w, wm := pick(c.name(), wall)
		u, um := pick(c.name(), cpu)
		fmt.Printf("  berth / %-10s wall %.2f (medians %.2f), CPU %.2f (medians %.2f)\n", c.name(),
			float64(mw)/float64(w), float64(mwm)/float64(wm), float64(mu)/float64(u), float64(mum)/float64(um))
	}
}

// together measures ten pulls of one image at the same time.
func (p *pulls) together(ctx context.Context, t target, alone []figures) (err error) {
	const many = 10
	var took []time.Duration
	for range p.rounds {
		disk, err := makeDisk()
		if err != nil {
			return err
		}
		d, err := berthPuller{}.start(ctx, p, disk.dir)
		if err != nil {
			return errors.Join(err, disk.remove())
		}
		began := time.Now()
		errs := make([]error, many)
		var all sync.WaitGroup
		for i := range many {
			all.Go(func() { errs[i] = d.pull(ctx, t) })
		}
		all.Wait()
		took = append(took, time.Since(began))
		if err := errors.Join(errors.Join(errs...), d.stop(), disk.remove()); err != nil {
			return err
		}
	}
	var single []time.Duration
	for _, f := range alone {
		single = append(single, f.wall)
	}
	fmt.Printf("  %d pulls of it at the same time: %.0f ms, median %.0f ms; ratio to one %.2f (medians %.2f)\n", many,
		ms(slices.Min(took)), ms(median(took)), float64(slices.Min(took))/float64(slices.Min(single)), float64(median(took))/float64(median(single)))
	return nil
}

// disk is a new ext4 filesystem in a file.
type disk struct{ file, dir string }

func makeDisk() (d disk, err error) {
	f, err := os.CreateTemp("", "bench-disk-")
	if err != nil {
		return d, err
	}
	d.file, d.dir = f.Name(), f.Name()+".d"
	err = errors.Join(f.Truncate(16<<30), f.Close(), os.Mkdir(d.dir, 0o711))
	ctx := context.Background()
	if err == nil {
		err = command(ctx, "mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,nodiscard", d.file)
	}
	if err == nil {
		err = command(ctx, "mount", "-o", "loop,noinit_itable", d.file, d.dir)
	}
	if err != nil {
		return d, errors.Join(err, os.Remove(d.dir), os.Remove(d.file))
	}
	return d, os.Chmod(d.dir, 0o711)
}

func (d disk) remove() error {
	return errors.Join(command(context.Background(), "umount", d.dir), os.Remove(d.dir), os.Remove(d.file))
}
