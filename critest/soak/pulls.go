package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// imageCount is how many images each worker has for itself. All share a layer.
const imageCount = 4

func reference(worker, n int) string { return fmt.Sprintf("docker.io/soak/w%d:%d", worker, n) }

// publish makes the workers' images.
func publish(stock *node.Stock) error {
	bytes := func(seed uint64, n int) string {
		r, b := rand.New(rand.NewPCG(seed, 1)), make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return string(b)
	}
	shared, err := images.NewLayer(images.Gzip, images.File("shared", 0o644, bytes(1, 1<<20)))
	if err != nil {
		return err
	}
	for worker := range workers {
		for n := range imageCount {
			own, err := images.NewLayer(images.Compression(n%3), images.File("own", 0o644, bytes(uint64(10+worker*imageCount+n), 300_000)))
			if err != nil {
				return err
			}
			image := images.Image{Config: ispec.ImageConfig{Cmd: []string{"sh"}}, Layers: []images.Layer{stock.Parts.Base, shared, own}}
			if _, err := image.Publish(stock.Registry, fmt.Sprintf("soak/w%d", worker), fmt.Sprint(n)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *life) pull(ctx context.Context, n int) error {
	image := &cri.ImageSpec{Image: reference(l.worker, n)}
	id := ""
	err := l.request(ctx, "PullImage", func(ctx context.Context) error {
		res, err := l.im.PullImage(ctx, &cri.PullImageRequest{Image: image})
		id = res.GetImageRef()
		return err
	})
	if err != nil {
		return err
	}
	l.model.image(image.GetImage(), true)
	return l.request(ctx, "ImageStatus", func(ctx context.Context) error {
		res, err := l.im.ImageStatus(ctx, &cri.ImageStatusRequest{Image: image})
		if err == nil && (res.GetImage().GetId() != id || res.GetImage().GetSize() < 300_000) {
			return fmt.Errorf("%s is %v, pulled as %s", image.GetImage(), res.GetImage(), id)
		}
		return err
	})
}

func (l *life) removeImage(ctx context.Context, n int) error {
	image := &cri.ImageSpec{Image: reference(l.worker, n)}
	l.model.image(image.GetImage(), false)
	err := l.request(ctx, "RemoveImage", func(ctx context.Context) error {
		_, err := l.im.RemoveImage(ctx, &cri.RemoveImageRequest{Image: image})
		return err
	})
	if err != nil {
		return err
	}
	return l.request(ctx, "ImageStatus", func(ctx context.Context) error {
		res, err := l.im.ImageStatus(ctx, &cri.ImageStatusRequest{Image: image})
		if err == nil && res.GetImage() != nil {
			return fmt.Errorf("%s is there after its removal", image.GetImage())
		}
		return err
	})
}

// breakPull gives up a pull after a moment; the next one is as good as any.
func (l *life) breakPull(ctx context.Context, n int) error {
	if err := l.removeImage(ctx, n); err != nil {
		return err
	}
	err := l.request(ctx, "broken pull", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Duration(n+1)*15*time.Millisecond)
		defer cancel()
		_, err := l.im.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: reference(l.worker, n)}})
		if status.Code(err) == codes.DeadlineExceeded {
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	return l.pull(ctx, n)
}
