package network

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containernetworking/cni/libcni"
)

// STATUS is asked in the background and on demand: nothing runs while nobody
// asks for readiness.
const (
	statusTimeout = 10 * time.Second // of one STATUS of a whole chain
	goodStatusAge = 30 * time.Second // how long "ready" is believed
	badStatusAge  = 3 * time.Second  // how long "not ready" is believed
)

// errStatusPending stands until a network has answered for the first time.
var errStatusPending = errors.New("its plugins have not answered STATUS yet")

// status is what the plugins said last.
type status struct {
	err     error // nil: ready
	at      time.Time
	stale   bool // the configuration has changed since
	running bool
}

// refreshStatusLocked begins to ask again when the last answer is old. The
// caller holds m.mu.
func (m *Manager) refreshStatusLocked() {
	age := goodStatusAge
	if m.status.err != nil {
		age = badStatusAge
	}
	if m.status.running || m.ctx.Err() != nil || !m.status.stale && time.Since(m.status.at) < age {
		return
	}
	m.status.running = true
	list := m.loaded.list
	m.stopped.Go(func() { m.askStatus(list) })
}

// askStatus runs STATUS of the list, and of the one that has replaced it
// meanwhile, until the answer is about what is loaded.
func (m *Manager) askStatus(list *libcni.NetworkConfigList) {
	for list != nil {
		ctx, cancel := context.WithTimeout(m.ctx, statusTimeout)
		err := m.answer(ctx, list)
		if err == nil {
			err = m.cni.GetStatusNetworkList(ctx, list)
		}
		cancel()
		if err != nil {
			err = fmt.Errorf("STATUS: %w", pluginErrorOf(err))
		}
		m.mu.Lock()
		m.status = status{err: err, at: time.Now(), running: true}
		if m.loaded.list == list || !m.loaded.hasStatus() || m.ctx.Err() != nil {
			m.status.running = false
			list = nil
		} else {
			list = m.loaded.list
		}
		m.mu.Unlock()
	}
}
