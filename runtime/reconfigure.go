package runtime

import (
	"berth/oci/spec"
	"berth/runtime/config"
	"berth/runtime/resolve"
)

// Config is the configuration in force. Flows that need several keys of it take
// it once.
func (s *Service) Config() *config.Config {
	if c := s.reconfigured.Load(); c != nil {
		return c
	}
	return &s.Parts.Config
}

// Reconfigure puts another configuration in force, for what begins from now on;
// pods and containers that are there keep what they were made with. It differs
// from the one before in live keys only (see config.Config.Reload).
func (s *Service) Reconfigure(c config.Config) {
	c.Runtime.CgroupDriver = s.Config().Runtime.CgroupDriver // settled at the start
	s.reconfigured.Store(&c)
	s.cdi.Use(c.Runtime.CDIDirs)
	s.behind(s.preload)
}

// host is the node as containers are specified for it, with the configuration's
// limits.
func (s *Service) host() spec.Host {
	h, c := s.Host, s.Config()
	h.Rlimits = resolve.Nofile(c.Runtime.NofileSoft, c.Runtime.NofileHard)
	return h
}
