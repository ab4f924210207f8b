package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"berth/image"
	"berth/oci/monitor"
	"berth/runtime"
	"berth/runtime/apparmor"
	"berth/runtime/config"
	"berth/runtime/resolve"
	"berth/runtime/selinux"
	"berth/sandbox"
	"berth/sandbox/outside"
)

// stopPatience is how long a stopping daemon waits for operations in progress.
const stopPatience = 10 * time.Second

// replyPatience is how long it then waits for clients to take their replies.
const replyPatience = 2 * time.Second

// closePatience is how long everything else may then take, and the undoing of what
// is broken off. All of it stays below the time that systemd gives a service.
const closePatience = 6 * time.Second

func serveCommand() *cobra.Command {
	var file string
	c := &cobra.Command{
		Use: "serve", Short: "Run the CRI daemon", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			// From the first moment on: what nobody waits for ends a process.
			hangups := make(chan os.Signal, 1)
			signal.Notify(hangups, syscall.SIGHUP)
			o := beginOnset(logrus.NewEntry(logrus.StandardLogger()), "read and check the configuration")
			defer o.over()
			f, err := load(file)
			if err != nil {
				return err
			}
			return serve(file, f.Config, hangups, o)
		},
	}
	c.Flags().StringVar(&file, "config", "", "TOML configuration file; none: the defaults (see berth config default)")
	return c
}

// serve runs the daemon until SIGTERM or SIGINT. Containers outlive it.
func serve(file string, cfg config.Config, hangups <-chan os.Signal, o *onset) error {
	syscall.Umask(0o022) // a socket must not be everybody's for one moment, whoever has started the daemon
	setLevel(cfg.LogLevel)
	log := logrus.NewEntry(logrus.StandardLogger())
	if err := quietKlog(log); err != nil {
		return err
	}
	log.WithFields(logrus.Fields{"version": version, "pid": os.Getpid(), "root": cfg.Root, "state": cfg.State}).Info("berth starts")
	d := &assembled{onset: o}
	o.at("take the locks of root and state")
	d.systemd, d.shelved = takeSystemd()

	monitor.DefaultThreadSignals()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	unlock, err := prepare(cfg)
	if err != nil {
		return err
	}
	defer unlock()

	defer d.close()
	if err := d.assemble(ctx, cfg, log); err != nil {
		return err
	}
	go (&reloader{file: file, running: cfg, daemon: d, log: log}).follow(ctx, hangups)
	return d.run(ctx, cfg, log)
}

// setLevel is for a level that the configuration's check has passed.
func setLevel(name string) {
	if level, err := logrus.ParseLevel(name); err == nil {
		logrus.SetLevel(level)
	}
}

// parts of a daemon that must be closed, last first.
type assembled struct {
	onset        *onset
	service      *runtime.Service
	images       *image.Store
	outside      *outside.Looker
	certificate  *certificate // of the streaming server; nil: no TLS
	renewMonitor func()       // makes the running monitor the installed one
	closers      []func()
	systemd      systemd
	shelved      []monitor.Shelved // by an earlier daemon, with systemd
}

func (d *assembled) close() {
	for i := len(d.closers) - 1; i >= 0; i-- {
		d.closers[i]()
	}
}

// assemble opens every leaf and puts the service over them.
func (d *assembled) assemble(ctx context.Context, cfg config.Config, log *logrus.Entry) error {
	parts := runtime.Parts{Config: cfg, Version: version, Log: log}
	err := d.lookOutside(cfg, &parts)
	if err != nil {
		return err
	}
	d.onset.at("read records")
	if parts.Records, err = sandbox.Open(cfg.Root, func(p sandbox.Problem) {
		parts.Problems = append(parts.Problems, p)
		tellProblem(log, p)
	}); err != nil {
		return err
	}
	d.onset.at("open the image store")
	if parts.Images, err = openImages(ctx, cfg, parts.Records, log); err != nil {
		return err
	}
	d.images = parts.Images
	d.closers = append(d.closers, func() { logError(log, parts.Images.Close()) })
	d.onset.at("read network configurations")
	if err := d.networks(cfg, log, &parts); err != nil {
		return err
	}
	d.onset.at("look at the host's abilities")
	if parts.Host, err = resolve.HostFacts(); err != nil {
		return err
	}
	if parts.Config.Runtime.CgroupDriver, err = cgroupDriver(cfg.Runtime.CgroupDriver); err != nil {
		return fmt.Errorf("key \"runtime.cgroup_driver\": %w", err)
	}
	if parts.Host.AppArmorEnabled {
		parts.AppArmor = apparmor.New()
		// Beside the rest of the start: the first container waits for it, nobody else.
		go func(profile *apparmor.Default) {
			if err := profile.Load(); err != nil {
				log.WithError(err).Warn("the default AppArmor profile of this version is not in force")
			}
		}(parts.AppArmor)
	}
	if cfg.Runtime.SELinux {
		parts.SELinux, err = selinux.Open()
		if errors.Is(err, selinux.ErrOff) {
			log.Warn("runtime.selinux is on, but this node has no SELinux: pods run without it")
		} else if err != nil {
			return err
		}
	}
	d.onset.at("listen for streams")
	if parts.Streams, d.certificate, err = listenStreams(cfg.Streaming); err != nil {
		return err
	}
	d.closers = append(d.closers, parts.Streams.Close)
	return d.handlers(ctx, cfg, log, &parts)
}

// tellProblem logs that a record goes to quarantine before it does: the start may
// break off behind it. What was passed over is told by Restore.
func tellProblem(log *logrus.Entry, p sandbox.Problem) {
	if p.Moved != "" {
		log.WithError(p.Err).WithFields(logrus.Fields{"path": p.Path, "moved": p.Moved}).Error("a record cannot be read; it is moved to quarantine")
	}
}

// openImages tells of image records that were broken.
func openImages(ctx context.Context, cfg config.Config, records *sandbox.Store, log *logrus.Entry) (*image.Store, error) {
	o := imageOptions(cfg)
	for _, c := range records.Containers.Select(func(c *sandbox.Container) bool { return c.FinishedAt == 0 }) {
		o.Held = append(o.Held, c.ImageID)
		o.Held = append(o.Held, slices.Collect(maps.Values(c.VolumeImages))...)
	}
	images, err := image.Open(ctx, o)
	if err == nil && images.Recovered() != "" {
		log.Error(images.Recovered())
	}
	return images, err
}

func imageOptions(cfg config.Config) image.Options {
	partial := cfg.Image.PartialBytes
	if partial == 0 {
		partial = -1 // to the store, 0 is its default
	}
	return image.Options{
		Root: filepath.Join(cfg.Root, "images"), MaxConcurrentDownloads: cfg.Image.MaxConcurrentDownloads,
		RegistriesConf: cfg.Image.RegistriesConf, HostsDir: cfg.Image.HostsDir, CertsDir: cfg.Image.CertsDir, AuthFile: cfg.Image.AuthFile,
		PolicyPath: cfg.Image.Policy, PolicyDir: cfg.Image.PolicyDir, RegistriesDir: cfg.Image.RegistriesDir,
		IdleTimeout: time.Duration(cfg.Image.IdleTimeout), KeepLayerBlobs: cfg.Image.KeepLayerBlobs, Pinned: cfg.Image.Pinned,
		MinRate: cfg.Image.MinRate, MinRateWindow: time.Duration(cfg.Image.MinRateWindow),
		PartialBytes: partial, PartialAge: time.Duration(cfg.Image.PartialAge),
		ConnectionsPerLayer:  cfg.Image.ConnectionsPerLayer,
		MaxConcurrentUnpacks: cfg.Image.MaxConcurrentUnpacks,
	}
}

func logError(log *logrus.Entry, err error) {
	if err != nil {
		log.WithError(err).Warn("close")
	}
}

// run restores what an earlier daemon left and serves until ctx ends.
func (d *assembled) run(ctx context.Context, cfg config.Config, log *logrus.Entry) error {
	d.onset.at("listen at the CRI socket")
	l, err := runtime.Listen(cfg.Socket, log)
	if err != nil {
		return err
	}
	d.onset.over()
	g := d.service.Server()
	defer g.Stop()
	d.service.Starting() // until lists are true; but whoever asks why it takes long is told
	ended := make(chan error, 1)
	go func() { ended <- g.Serve(l) }()
	if err := d.service.Restore(ctx); err != nil {
		return err
	}
	if err := d.service.StartPlugins(); err != nil {
		return err
	}
	if err := d.serveMetrics(cfg.Metrics.Address, log); err != nil {
		return err
	}
	d.service.Started()
	log.WithFields(logrus.Fields{"socket": cfg.Socket, "version": version}).Info("serving CRI")
	if err := d.systemd.tell("READY=1"); err != nil {
		log.WithError(err).Warn("tell systemd that berth is ready")
	}
	select {
	case err := <-ended:
		return fmt.Errorf("serve CRI: %w", err)
	case <-ctx.Done():
	}
	log.Info("stopping; containers go on")
	endAnyway(log, d.service.Running)
	logError(log, d.systemd.tell("STOPPING=1"))
	patience, cancel := context.WithTimeout(context.Background(), stopPatience)
	defer cancel()
	d.service.Close(patience)
	hangUp(g)
	if err := <-ended; err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// endAnyway ends the process when something does not let it end: every record is
// on the disk, and the next daemon goes on from there.
func endAnyway(log *logrus.Entry, running func() []string) {
	time.AfterFunc(stopPatience+replyPatience+closePatience, func() {
		tellHeld(log, running())
		os.Exit(1)
	})
}

// tellHeld logs what keeps the daemon from being closed.
func tellHeld(log *logrus.Entry, running []string) {
	held := cmp.Or(strings.Join(running, "; "), "no operation and no pull")
	log.WithField("running", held).Error("the daemon cannot be closed, so it just ends")
}

// serveMetrics lets Prometheus scrape, where an address is configured.
func (d *assembled) serveMetrics(address string, log *logrus.Entry) error {
	if address == "" {
		return nil
	}
	s, err := d.service.Metrics().Listen(address)
	if err != nil {
		return fmt.Errorf("key \"metrics.address\": %w", err)
	}
	log.WithField("address", s.Addr()).Info("serving metrics")
	d.closers = append(d.closers, func() { logError(log, s.Close()) })
	return nil
}

// hangUp ends a server whose operations have ended: their replies still go out,
// and event streams come to their end. A client that does not read is cut off.
func hangUp(g *grpc.Server) {
	cut := time.AfterFunc(replyPatience, g.Stop)
	defer cut.Stop()
	g.GracefulStop()
}
