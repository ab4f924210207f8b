package main

import (
	"path/filepath"
	"time"

	"github.com/sirupsen/logrus"

	"berth/network"
	"berth/network/hostport"
	"berth/oci/leash"
	"berth/runtime"
	"berth/runtime/config"
)

// networks follows the node's CNI directory and those of handlers that have one of
// their own, each directory once.
func (d *assembled) networks(cfg config.Config, log *logrus.Entry, parts *runtime.Parts) error {
	var err error
	if parts.Leash, err = leash.Open(cfg.State); err != nil {
		log.WithError(err).Warn("what a CNI plugin starts may not be found again after this daemon is killed")
	}
	d.closers = append(d.closers, parts.Leash.Close)
	open := func(dir, template string) (*network.Manager, error) {
		m, err := network.New(network.Options{ConfDir: dir, BinDirs: cfg.CNI.BinDirs, CacheDir: filepath.Join(cfg.Root, "cni"),
			Timeout: time.Duration(cfg.CNI.Timeout), Template: template, Runs: parts.Leash, Answer: parts.Outside.Answer})
		if err == nil {
			d.closers = append(d.closers, func() { logError(log, m.Close()) })
		}
		return m, err
	}
	node, err := open(cfg.CNI.ConfDir, cfg.CNI.ConfTemplate)
	if err != nil {
		return err
	}
	parts.Network, parts.Networks = node, map[string]*network.Manager{}
	byDir := map[string]*network.Manager{filepath.Clean(cfg.CNI.ConfDir): node}
	for name, h := range cfg.Runtime.Handlers {
		if h.CNIConfDir == "" {
			continue
		}
		dir := filepath.Clean(h.CNIConfDir)
		if byDir[dir] == nil {
			if byDir[dir], err = open(dir, ""); err != nil {
				return err
			}
		}
		parts.Networks[name] = byDir[dir]
	}
	parts.HostPorts = hostport.New(hostport.Options{Table: hostPortTable(cfg.State)})
	return nil
}

// hostPortTable names the nftables table of a daemon: berth, or, for one that is
// not the node's ordinary daemon, a name that no other has.
func hostPortTable(state string) string {
	if state = filepath.Clean(state); state != config.Default().State {
		return "berth" + state
	}
	return "berth"
}
