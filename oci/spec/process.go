package spec

import (
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
)

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func (b *builder) process() (*rspec.Process, error) {
	p := &rspec.Process{
		Terminal:        b.config.GetTty(),
		User:            rspecUser(b.in.Resolved.User),
		NoNewPrivileges: b.security.GetNoNewPrivs(),
		Rlimits:         b.rlimits(),
	}
	var err error
	if p.Args, err = b.args(); err != nil {
		return nil, err
	}
	if p.Env, err = b.env(); err != nil {
		return nil, err
	}
	if p.Cwd, err = b.cwd(); err != nil {
		return nil, err
	}
	if p.Capabilities, err = b.capabilities(); err != nil {
		return nil, err
	}
	if p.ApparmorProfile, err = b.apparmor(); err != nil {
		return nil, err
	}
	if err := b.checkSELinux(); err != nil {
		return nil, err
	}
	p.SelinuxLabel = b.in.Labels.Process
	score := b.oomScoreAdj(b.config.GetLinux().GetResources().GetOomScoreAdj())
	p.OOMScoreAdj = &score
	return p, nil
}

func rspecUser(u User) rspec.User {
	gids := append([]uint32{u.GID}, u.AdditionalGIDs...)
	slices.Sort(gids)
	return rspec.User{UID: u.UID, GID: u.GID, AdditionalGids: slices.Compact(gids)}
}

// args follows the table in the Kubernetes documentation: command replaces the
// image's entry point and makes its arguments meaningless; args alone replace
// only the arguments.
func (b *builder) args() ([]string, error) {
	command, args := b.config.GetCommand(), b.config.GetArgs()
	if len(command) == 0 {
		command = b.image.Config.Entrypoint
		if len(args) == 0 {
			args = b.image.Config.Cmd
		}
	}
	all := slices.Concat(command, args)
	if len(all) == 0 {
		return nil, Invalid("command", "", "no command specified, neither by the request nor by the image")
	}
	if all[0] == "" {
		return nil, Invalid("command", "", "the program's name is empty")
	}
	for _, a := range all {
		if strings.ContainsRune(a, 0) {
			return nil, Invalid("command", a, "contains a NUL byte")
		}
		if !utf8.ValidString(a) {
			return nil, Invalid("command", strings.ToValidUTF8(a, "?"), "is not UTF-8, which an OCI specification cannot carry")
		}
	}
	return all, nil
}

// environment keeps the order in which variables were first set; the last
// value wins.
type environment struct {
	list []string
	at   map[string]int
}

func (e *environment) set(key, value string) {
	entry := key + "=" + value
	if i, ok := e.at[key]; ok {
		e.list[i] = entry
		return
	}
	e.at[key] = len(e.list)
	e.list = append(e.list, entry)
}

func (e *environment) setDefault(key, value string) {
	if _, ok := e.at[key]; !ok {
		e.set(key, value)
	}
}

func (b *builder) env() ([]string, error) {
	env := &environment{at: map[string]int{}}
	for _, entry := range b.image.Config.Env {
		key, value, ok := strings.Cut(entry, "=")
		if !ok || key == "" {
			b.warn("image environment entry %q has no name and value; left out", clip(entry))
			continue
		}
		if err := checkEnv("image environment", key, value); err != nil {
			return nil, err
		}
		env.set(key, value)
	}
	for _, kv := range b.config.GetEnvs() {
		env.set(kv.GetKey(), string(kv.GetValue()))
	}
	for _, entry := range append(slices.Clone(b.base.Process.Env), defaultPath) {
		key, value, _ := strings.Cut(entry, "=")
		env.setDefault(key, value)
	}
	if b.config.GetTty() {
		env.setDefault("TERM", "xterm")
	}
	hostname := b.in.Hostname
	if hostname == "" {
		hostname = b.in.Sandbox.GetHostname()
	}
	if hostname != "" {
		env.setDefault("HOSTNAME", hostname)
	}
	return env.list, nil
}

func checkEnv(field, key, value string) error {
	switch {
	case key == "":
		return Invalid(field+".key", "", "missing")
	case strings.ContainsAny(key, "=\x00"):
		return Invalid(field+".key", key, "contains '=' or a NUL byte")
	case !utf8.ValidString(key):
		return Invalid(field+".key", strings.ToValidUTF8(key, "?"), "is not UTF-8")
	case strings.ContainsRune(value, 0):
		return Invalid(field+".value", "", "the value of "+key+" contains a NUL byte")
	case !utf8.ValidString(value):
		return Invalid(field+".value", "", "the value of "+key+" is not UTF-8, which an OCI specification cannot carry")
	}
	return nil
}

func (b *builder) cwd() (string, error) {
	field, dir := "working_dir", b.config.GetWorkingDir()
	if dir == "" {
		field, dir = "image WorkingDir", b.image.Config.WorkingDir
	}
	if dir == "" {
		return "/", nil
	}
	return checkCwd(field, dir)
}

// checkCwd refuses directories that stand for something else in each process.
// Through /proc/self/fd/N a descriptor that leaked from the runtime has led out
// of the container (CVE-2024-21626); nobody needs to start there.
func checkCwd(field, dir string) (string, error) {
	switch {
	case !path.IsAbs(dir):
		return "", Invalid(field, dir, "must be absolute")
	case strings.ContainsRune(dir, 0):
		return "", Invalid(field, dir, "contains a NUL byte")
	case len(dir) > 4095:
		return "", Invalid(field, dir, "is longer than 4095 bytes")
	case !utf8.ValidString(dir):
		return "", Invalid(field, strings.ToValidUTF8(dir, "?"), "is not UTF-8")
	}
	clean := path.Clean(dir)
	parts := strings.Split(clean[1:], "/")
	first, second := parts[0], ""
	if len(parts) > 1 {
		second = parts[1]
	}
	odd := first == "proc" && (second == "self" || second == "thread-self" || isDigits(second)) ||
		first == "dev" && (second == "fd" || second == "stdin" || second == "stdout" || second == "stderr")
	if odd {
		return "", Invalid(field, dir, "must not lie in a process's own part of /proc or in /dev/fd")
	}
	return clean, nil
}

func isDigits(s string) bool {
	return s != "" && strings.Trim(s, "0123456789") == ""
}

// rlimits gives the configured limits, cut to what the daemon may give: without
// CAP_SYS_RESOURCE a higher hard limit would make every start fail.
func (b *builder) rlimits() []rspec.POSIXRlimit {
	limits := slices.Clone(b.in.Host.Rlimits)
	if b.in.Host.Rlimits == nil {
		limits = DefaultRlimits()
	}
	limits = b.baseRlimits(limits)
	for i := range limits {
		l := &limits[i]
		if most, ok := b.in.Host.RlimitMax[l.Type]; ok && l.Hard > most {
			b.warn("%s hard limit %d cut to %d, the most that the daemon may give", l.Type, l.Hard, most)
			l.Hard = most
		}
		l.Soft = min(l.Soft, l.Hard)
	}
	return limits
}

// oomScoreAdj is always written, also when 0: otherwise the container would
// inherit the daemon's, which is usually -999.
func (b *builder) oomScoreAdj(wanted int64) int {
	score, cut := clampOOM(wanted, b.in.Host)
	if cut {
		b.warn("oom_score_adj %d raised to %d: the daemon lacks CAP_SYS_RESOURCE", wanted, score)
	}
	return score
}

func clampOOM(wanted int64, host Host) (score int, cut bool) {
	if !host.CanLowerOOM && wanted < int64(host.OOMScoreAdjMin) {
		return host.OOMScoreAdjMin, true
	}
	return int(wanted), false
}

// ExecProcess is the process of an exec without a terminal in a container whose
// init is base: same user, environment, directory, capabilities and limits. The
// seccomp filter is the container's and needs no mention. base is not changed
// and shares no memory with the result.
func ExecProcess(base *rspec.Process, args []string) *rspec.Process {
	p := *base
	p.Terminal = false
	p.ConsoleSize = nil
	p.Args = slices.Clone(args)
	p.Env = slices.Clone(base.Env)
	p.Rlimits = slices.Clone(base.Rlimits)
	p.User.AdditionalGids = slices.Clone(base.User.AdditionalGids)
	if c := base.Capabilities; c != nil {
		p.Capabilities = &rspec.LinuxCapabilities{
			Bounding:    slices.Clone(c.Bounding),
			Effective:   slices.Clone(c.Effective),
			Inheritable: slices.Clone(c.Inheritable),
			Permitted:   slices.Clone(c.Permitted),
			Ambient:     slices.Clone(c.Ambient),
		}
	}
	if base.OOMScoreAdj != nil {
		score := *base.OOMScoreAdj
		p.OOMScoreAdj = &score
	}
	return &p
}

// ExecTerminal is ExecProcess with a terminal. As for a container with one, TERM
// is xterm unless the environment has it.
func ExecTerminal(base *rspec.Process, args []string) *rspec.Process {
	p := ExecProcess(base, args)
	p.Terminal = true
	if !slices.ContainsFunc(p.Env, func(e string) bool { return strings.HasPrefix(e, "TERM=") }) {
		p.Env = append(p.Env, "TERM=xterm")
	}
	return p
}
