package runtime

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	rspec "github.com/opencontainers/runtime-spec/specs-go"

	"berth/image"
	"berth/runtime/operation"
	"berth/sandbox/outside"
)

// What the daemon reads or writes itself although others may serve it: before, a
// process asks whether it answers (see package outside), and what is large goes to or
// from a file of the daemon's own by such a process.

// keyedPaths are what a key of the configuration names.
type keyedPaths struct {
	key   string
	paths []string
}

// answer fails with the key of the first paths that do not answer in their time.
func (s *Service) answer(ctx context.Context, list ...keyedPaths) error {
	for _, k := range list {
		if err := s.Outside.Answer(ctx, k.paths...); err != nil {
			return fmt.Errorf("key %q: %w", k.key, err)
		}
	}
	return nil
}

// answerNamed asks for what files of the configuration name that have answered.
func (s *Service) answerNamed(ctx context.Context, named map[string][]string) error {
	for _, file := range slices.Sorted(maps.Keys(named)) {
		if err := s.Outside.Answer(ctx, named[file]...); err != nil {
			return fmt.Errorf("named in %s: %w", file, err)
		}
	}
	return nil
}

// answerPolicy asks for the signature policies, and for the keys that they name.
func (s *Service) answerPolicy(ctx context.Context) error {
	c := s.Config().Image
	err := s.answer(ctx, keyedPaths{"image.policy", []string{c.Policy}}, keyedPaths{"image.policy_dir", []string{c.PolicyDir}})
	if err != nil {
		return err
	}
	return s.answerNamed(ctx, image.NamedByPolicies(c.Policy, c.PolicyDir))
}

// answerRegistries asks for all that a pull reads of the node's configuration, for
// those who ask why as a step of the pull.
func (s *Service) answerRegistries(ctx context.Context, ref string) error {
	c := s.Config().Image
	conf := []string{c.RegistriesConf}
	if c.RegistriesConf != "" {
		conf = append(conf, c.RegistriesConf+".d")
	}
	r := operation.Request{Verb: "PullImage", Object: ref}
	return s.operations.Track(ctx, r, func(ctx context.Context, op *operation.Operation) error {
		op.Step("look at the configuration of registries")
		err := s.answer(ctx, keyedPaths{"image.registries_conf", conf}, keyedPaths{"image.hosts_dir", []string{c.HostsDir}},
			keyedPaths{"image.certs_dir", []string{c.CertsDir}}, keyedPaths{"image.auth_file", []string{c.AuthFile}},
			keyedPaths{"image.registries_dir", []string{c.RegistriesDir}})
		if err != nil {
			return err
		}
		if err := s.answerNamed(ctx, image.NamedByHosts(c.HostsDir)); err != nil {
			return err
		}
		return s.answerPolicy(ctx)
	})
}

// brought is a file or directory of somebody's as the daemon may read it: where it is,
// or, where it is served, a copy in scratch, which done removes. field names it in
// errors.
func (s *Service) brought(ctx context.Context, field, path string) (at string, done func(), err error) {
	if err := s.Outside.Answer(ctx, path); err != nil {
		return "", nil, fmt.Errorf("%s: %w", field, err)
	}
	f, err := s.Outside.For(ctx).Find(path)
	if err != nil || f.Missing || !f.Served {
		return path, func() {}, nil // its reader says what is wrong
	}
	dir, err := s.Images.Scratch()
	if err != nil {
		return "", nil, err
	}
	done = func() { _ = os.RemoveAll(dir) }
	at = filepath.Join(dir, "copy")
	if err := s.Outside.Fetch(ctx, path, at); err != nil {
		done()
		return "", nil, fmt.Errorf("%s: copy %s: %w", field, path, err)
	}
	return at, done, nil
}

// placed is for a new file of somebody's: it is not there (fs.ErrExist), and its
// directory, which placed returns, is.
func (s *Service) placed(ctx context.Context, field, path string) (dir outside.Found, err error) {
	host := s.Outside.For(ctx)
	above := filepath.Dir(path)
	dir, err = host.Find(above)
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return dir, fmt.Errorf("%s: %w", field, err)
	case err == nil && (dir.Missing || dir.Broken != ""):
		err = syscall.ENOENT
	case err == nil && !dir.Mode.IsDir():
		err = syscall.ENOTDIR
	}
	if err != nil {
		return dir, fmt.Errorf("%w: %s %q: directory %s: %w", errInvalid, field, path, above, err)
	}
	f, err := host.Find(path)
	if err != nil {
		return dir, fmt.Errorf("%s: %w", field, err)
	}
	if !f.Missing || f.Broken != "" {
		return dir, fmt.Errorf("%s %q: %w", field, path, fs.ErrExist)
	}
	return dir, nil
}

// injectDevices adds CDI devices by their names. What they name on the node is looked
// at first: the library looks at devices itself, and the OCI runtime at all of it.
func (s *Service) injectDevices(ctx context.Context, sp *rspec.Spec, names []string) error {
	if len(names) == 0 {
		return nil
	}
	if err := s.answer(ctx, keyedPaths{"runtime.cdi_dirs", s.Config().Runtime.CDIDirs}); err != nil {
		return fmt.Errorf("CDI_devices: %w", err)
	}
	paths, err := s.cdi.HostPaths(names)
	if err != nil {
		return err
	}
	for _, path := range paths {
		if _, err := s.Outside.For(ctx).Find(path); errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			return fmt.Errorf("CDI_devices %v: hostPath in a file of runtime.cdi_dirs: %w", names, err)
		}
	}
	return s.cdi.Inject(sp, names)
}
