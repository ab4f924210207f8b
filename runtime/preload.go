package runtime

import (
	"context"
	"path/filepath"
	"time"

	"github.com/sirupsen/logrus"

	"berth/image"
	"berth/runtime/operation"
)

// preload imports the archives of the preload directory, beside the daemon's start
// or a reload, and tells the log of each. It ends with the service; what it has not
// done then is done after the next start.
func (s *Service) preload() {
	s.preloading.Lock()
	defer s.preloading.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s.behind(func() {
		select {
		case <-s.closing:
			cancel()
		case <-ctx.Done():
		}
	})
	dir := s.Config().Image.PreloadDir
	if dir == "" {
		dir = filepath.Join(s.Config().Root, "preload")
	}
	r := operation.Request{Verb: "Preload", Object: dir, Quiet: operation.Endless}
	err := s.operations.Track(ctx, r, func(ctx context.Context, op *operation.Operation) error {
		op.Step("import archives")
		return s.preloadFrom(ctx, dir)
	})
	if err != nil && ctx.Err() == nil {
		s.Log.WithError(err).Error("the preload directory was not imported, or not all of it")
	}
}

// preloadFrom tells of a directory that does not answer before anything waits for it.
func (s *Service) preloadFrom(ctx context.Context, dir string) error {
	if err := s.answer(ctx, keyedPaths{"image.preload_dir", []string{dir}}); err != nil {
		return err
	}
	return s.Images.Preload(ctx, dir, s.bringArchive, s.logPreload)
}

func (s *Service) logPreload(p image.Preloaded) {
	log := s.Log.WithFields(logrus.Fields{"file": p.File, "images": p.Images, "pinned": p.Pinned, "took": p.Took.Round(time.Millisecond)})
	if p.Err != nil {
		s.metrics.Preload("failed")
		log.WithError(p.Err).Error("an archive of the preload directory is not imported; it is tried again at the next start or reload")
		return
	}
	s.metrics.Preload("imported")
	log.Info("an archive of the preload directory is imported")
}
