// Package selinux makes the SELinux contexts of pods and containers.
//
// It owns which pod has which categories, how a request's options change the
// node's base contexts, and which host paths may be given a container's label.
// What the labels do is the kernel's and the policy's: processes of container_t
// with categories A may touch files of container_file_t with categories A, and
// nothing of another pod. It is used where the node has SELinux and the key
// runtime.selinux is on; its state is in the records of the sandboxes.
//
// Terms: a context is user:role:type:level; the level is a sensitivity and, after
// a colon, categories (s0:c5,c17). A pod that names no level gets two categories
// that no other pod of the node has, and its containers share them.
package selinux

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/selinux/go-selinux"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
)

// ErrOff means that the kernel has no SELinux, or has it turned off.
var ErrOff = errors.New("SELinux is off")

// errPolicy: the node's policy names no contexts for containers.
var errPolicy = errors.New("the policy has no contexts for containers (package container-selinux)")

// allCategories is how many there are in the policies of all distributions.
const allCategories = 1024

// unconfined is the type of containers that SELinux lets do all; it can use any
// label, so none is changed for it.
const unconfined = "spc_t"

// kernel is what of SELinux needs a kernel that has it.
type kernel struct {
	known func(context string) error       // whether the policy has it
	label func(path, context string) error // one file
}

// Policy makes labels. It is for many goroutines.
type Policy struct {
	process, file parts
	categories    int // how many there are; the last two are those of privileged containers
	kernel        kernel

	mu   sync.Mutex
	used map[string]int // levels and the number of pods that have them, guarded by mu
}

// Open reads the node's contexts of containers. ErrOff.
func Open() (*Policy, error) {
	if !selinux.GetEnabled() {
		return nil, ErrOff
	}
	process, file := selinux.ContainerLabels()
	selinux.ReleaseLabel(process)
	return open(process, file, kernel{
		known: selinux.SecurityCheckContext,
		label: selinux.SetFileLabel,
	})
}

func open(process, file string, k kernel) (*Policy, error) {
	p := &Policy{process: split(process), file: split(file), categories: allCategories, kernel: k, used: map[string]int{}}
	if p.process.kind == "" || p.file.kind == "" {
		return nil, fmt.Errorf("read SELinux contexts of containers: %q, %q: %w", process, file, errPolicy)
	}
	return p, nil
}

// parts of a context.
type parts struct{ user, role, kind, level string }

func split(context string) parts {
	f := append(strings.SplitN(context, ":", 4), "", "", "", "")
	return parts{f[0], f[1], f[2], f[3]}
}

func (p parts) String() string {
	context := p.user + ":" + p.role + ":" + p.kind
	if p.level != "" {
		context += ":" + p.level
	}
	return context
}

// with lays the options set over the parts.
func (p parts) with(o *cri.SELinuxOption) parts {
	for _, set := range []struct {
		part  *string
		value string
	}{{&p.user, o.GetUser()}, {&p.role, o.GetRole()}, {&p.kind, o.GetType()}, {&p.level, o.GetLevel()}} {
		if set.value != "" {
			*set.part = set.value
		}
	}
	return p
}

// Pod makes a pod's labels and takes its level; Release gives it back. Without
// a level in the options it is one of its own. Errors: spec.ErrInvalid when the
// policy does not know what was asked for; then nothing is taken.
func (p *Policy) Pod(o *cri.SELinuxOption) (spec.Labels, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	base := p.process
	if base.level != "" && o.GetLevel() == "" {
		var err error
		if base.level, err = p.free(); err != nil {
			return spec.Labels{}, err
		}
	}
	l, err := p.labels(base, o)
	if err == nil {
		p.used[split(l.Process).level]++
	}
	return l, err
}

// Container makes a container's labels: its pod's, where it asks for nothing,
// else what it asks for, with the pod's level unless it names one.
func (p *Policy) Container(pod spec.Labels, o *cri.SELinuxOption) (spec.Labels, error) {
	if o.GetUser() == "" && o.GetRole() == "" && o.GetType() == "" && o.GetLevel() == "" {
		return pod, nil
	}
	base := p.process
	base.level = split(pod.Process).level
	return p.labels(base, o)
}

// Privileged are the labels of a privileged container: no confinement, and
// files that no other container has categories for.
func (p *Policy) Privileged() spec.Labels {
	file := p.file
	if file.level != "" {
		file.level = level(p.categories-2, p.categories-1)
	}
	return spec.Labels{Mount: file.String()}
}

func (p *Policy) labels(process parts, o *cri.SELinuxOption) (spec.Labels, error) {
	process = process.with(o)
	file := p.file
	file.level = process.level
	if o.GetUser() != "" {
		file.user = o.GetUser()
	}
	l := spec.Labels{Process: process.String(), Mount: file.String()}
	for _, context := range []string{l.Process, l.Mount} {
		if err := p.kernel.known(context); err != nil {
			return spec.Labels{}, spec.Invalid("linux.security_context.selinux_options", context, "the node's policy has no such context: "+err.Error())
		}
	}
	return l, nil
}

func level(low, high int) string { return fmt.Sprintf("s0:c%d,c%d", low, high) }

// free finds a level that no pod has. Called with mu held.
func (p *Policy) free() (string, error) {
	usable := p.categories - 2
	for range 10_000 {
		low, high := rand.IntN(usable), rand.IntN(usable)
		if l := level(min(low, high), max(low, high)); low != high && p.used[l] == 0 {
			return l, nil
		}
	}
	return "", fmt.Errorf("find two SELinux categories for a pod: %d pairs are taken", len(p.used))
}

// Reserve takes the level of a pod that an earlier daemon made.
func (p *Policy) Reserve(l spec.Labels) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used[split(l.Process).level]++
}

// Release gives a pod's level back, once for each Pod or Reserve.
func (p *Policy) Release(l spec.Labels) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := split(l.Process).level
	if p.used[key]--; p.used[key] <= 0 {
		delete(p.used, key)
	}
}

// Label gives one file of berth's own to a pod.
func (p *Policy) Label(path string, l spec.Labels) error {
	if err := p.kernel.label(path, l.Mount); err != nil {
		return fmt.Errorf("label %s as %s: %w", path, l.Mount, err)
	}
	return nil
}

// shielded are directories that are never relabelled: the node would stop
// working, as its own services could not read them any more. What holds one of
// them is shielded with it.
var shielded = []string{
	"/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin", "/srv", "/sys",
	"/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/libexec", "/usr/local", "/usr/sbin", "/usr/share",
	"/var", "/var/cache", "/var/lib", "/var/lib/kubelet", "/var/log", "/var/run", "/var/spool", "/var/tmp",
	"/etc/group", "/etc/pam.d", "/etc/passwd", "/etc/pki", "/etc/shadow", "/etc/ssh", "/etc/ssl",
}

// Relabels tells whether a tree of the host is to get a container's label, which the
// caller sets. path must be free of symlinks; what holds own, berth's directories, is
// refused like the node's own. A container of the type spc_t needs none. ErrInvalid of
// package spec.
func (p *Policy) Relabels(field, path string, l spec.Labels, own ...string) (bool, error) {
	if l.Mount == "" || split(l.Process).kind == unconfined {
		return false, nil
	}
	path = filepath.Clean(path)
	for _, dir := range slices.Concat(shielded, own) {
		if path == dir || path == "/" || strings.HasPrefix(dir, path+"/") {
			return false, spec.Invalid(field, path, "is the node's own and must not get a container's label")
		}
	}
	return true, nil
}
