package main

import (
	"os"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"berth/oci/monitor"
)

// onset is a daemon's start until its socket listens. Nobody can ask it anything yet, so
// the log tells of a step that takes long.
type onset struct {
	log  *logrus.Entry
	over func() // the socket listens, or the start has failed; idempotent

	mu    sync.Mutex
	step  string    // guarded by mu
	since time.Time // guarded by mu
}

// onsetTold is after what time a step is told; the next time is four times as long, and
// so on.
const onsetTold = 2 * time.Second

func beginOnset(log *logrus.Entry, step string) *onset {
	ended := make(chan struct{})
	o := &onset{log: log, over: sync.OnceFunc(func() { close(ended) }), step: step, since: time.Now()}
	go o.watch(ended)
	return o
}

// at begins the next step.
func (o *onset) at(step string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.step, o.since = step, time.Now()
}

func (o *onset) watch(ended <-chan struct{}) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	var of time.Time // since when the step is there that next is about
	var next time.Duration
	for {
		select {
		case <-ended:
			return
		case <-tick.C:
		}
		o.mu.Lock()
		step, since := o.step, o.since
		o.mu.Unlock()
		if !since.Equal(of) {
			of, next = since, onsetTold
		}
		if took := time.Since(since); took >= next {
			next *= 4
			o.tell(step, took)
		}
	}
}

func (o *onset) tell(step string, took time.Duration) {
	log := o.log.WithFields(logrus.Fields{"step": step, "for": took.Round(time.Second)})
	if stuck := waits(); stuck != "" {
		log = log.WithField("waits", stuck)
	}
	log.Warn("the start takes long; nobody can connect yet")
}

// maxWaits bounds what is told of the daemon's threads.
const maxWaits = 8

// waits says where threads of this process are that the kernel does not let go.
func waits() string {
	var list []string
	for _, tid := range monitor.Threads(os.Getpid()) {
		if at, ok := monitor.Look(tid); ok && at.State == "D" {
			list = append(list, "a thread in state D at "+at.Channel)
		}
	}
	return strings.Join(list[:min(len(list), maxWaits)], "; ")
}
