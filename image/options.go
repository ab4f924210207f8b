package image

import (
	"fmt"
	"time"
)

// options are those in force. They can be others from one moment to the next, so
// what needs two of them that belong together takes them once.
func (s *Store) options() *Options { return s.config.Load() }

// Reconfigure puts other options in force, all but Root, which stays. Pulls that
// begin from now on follow them; what runs may. An error changes nothing.
func (s *Store) Reconfigure(o Options) error {
	o.Root = s.root
	s.change.Lock()
	defer s.change.Unlock()
	if err := s.use(o); err != nil {
		return fmt.Errorf("reconfigure image store: %w", err)
	}
	s.publishAnew() // records say what is pinned
	return nil
}

// use fills defaults in and puts options in force.
func (s *Store) use(o Options) error {
	if o.MaxConcurrentDownloads <= 0 {
		o.MaxConcurrentDownloads = 3
	}
	if o.ConnectionsPerLayer <= 0 {
		o.ConnectionsPerLayer = 4
	}
	if o.MaxConcurrentUnpacks <= 0 {
		o.MaxConcurrentUnpacks = 16
	}
	if o.IdleTimeout <= 0 {
		o.IdleTimeout = time.Minute
	}
	if o.MinRateWindow <= 0 {
		o.MinRateWindow = time.Minute
	}
	if o.PartialBytes == 0 {
		o.PartialBytes = 4 << 30
	}
	if o.PartialAge <= 0 {
		o.PartialAge = 24 * time.Hour
	}
	pins, err := parsePins(o.Pinned)
	if err != nil {
		return err
	}
	s.pins.Store(&pins)
	s.slots.resize(o.MaxConcurrentUnpacks)
	s.config.Store(&o)
	_ = o.registries().Reload() // so that Resolve need not; a broken file fails pulls, not the node
	return nil
}
