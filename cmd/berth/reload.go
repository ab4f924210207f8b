package main

import (
	"context"
	"os"

	"github.com/sirupsen/logrus"

	"berth/runtime/config"
)

// reloader takes over at each SIGHUP what the configuration's files now say.
type reloader struct {
	file    string
	running config.Config // in force, as the files have it
	daemon  *assembled
	log     *logrus.Entry
}

// follow reloads at each signal until ctx ends.
func (r *reloader) follow(ctx context.Context, hangups <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-hangups:
			r.reload()
		}
	}
}

// reload checks the files whole before anything of them counts. What is wrong is
// one line of the log; all that was in force then stays.
func (r *reloader) reload() {
	next, changes, err := r.read()
	if err == nil {
		err = r.daemon.images.Reconfigure(imageOptions(next))
	}
	if err != nil {
		r.log.WithError(err).Error("the configuration is not reloaded, nothing of it: what was in force stays")
		return
	}
	r.daemon.service.Reconfigure(next)
	setLevel(next.LogLevel)
	r.running = next
	if err := r.daemon.certificate.reload(); err != nil {
		r.log.WithError(err).Error("the streaming server keeps its old certificate")
	}
	r.daemon.renewMonitor()
	live := 0
	for _, c := range changes {
		log := r.log.WithFields(logrus.Fields{"key": c.Key, "old": c.Old, "new": c.New})
		if c.Live {
			live++
			log.Info("configuration changed")
		} else {
			log.Warn("configuration changed, but this key counts only after a restart of the daemon")
		}
	}
	r.log.WithFields(logrus.Fields{"file": r.file, "changed": live, "waiting": len(changes) - live}).Info("configuration reloaded")
}

// read is what the files ask for, and what of it differs from what is in force.
func (r *reloader) read() (config.Config, []config.Change, error) {
	if err := r.daemon.outside.Answer(context.Background(), r.file, r.file+".d"); err != nil {
		return config.Config{}, nil, err
	}
	// By the daemon's own processes: of a path that hangs there is one, however often
	// the daemon is told to reload.
	f, err := config.Load(r.file, func(c config.Config) config.Problems { return unanswered(r.daemon.outside, c) }, checkNode)
	if err != nil {
		return config.Config{}, nil, err
	}
	return r.running.Reload(f.Config)
}
