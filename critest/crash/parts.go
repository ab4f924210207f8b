package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// parts is the folder of the programs that stand before the OCI runtime and the
// CNI plugins. Each runs the real one, unless the file fault beside it names it:
// then it does, as often as the file says, what the file says, and a line in the
// file done tells that.
type parts struct{ dir string }

// script is such a program: it is told its name, the real program, and a shell
// word that is the verb of a call.
const script = `#!/bin/sh
here=%[1]q name=%[2]q real=%[3]q
echo $name %[4]s >> $here/called
case " $* " in *" --help "*) exec "$real" "$@";; esac # a daemon asks once what runc can do
if [ -e $here/fault ]; then
  read -r who verb mode times < $here/fault
  for word in %[4]s; do
    if [ "$who" = $name ] && [ "$verb" = "$word" ]; then
      times=$((times - 1))
      if [ $times = 0 ]; then rm $here/fault; else echo "$who $verb $mode $times" > $here/fault; fi
      echo "$who $verb" >> $here/done
      case $mode in
      refuses) %[5]s; exit 1;;
      loses) "$real" "$@" >/dev/null; %[5]s; exit 1;;
      killed) kill -9 $$;;
      babbles) echo '}{ what is this'; exit 0;;
      hangs) echo $$ > $here/hung; while :; do sleep 0.1; done;;
      esac
    fi
  done
fi
exec "$real" "$@"
`

// plugins are the CNI plugins that the node's networks are made of.
var plugins = []string{"bridge", "portmap", "host-local"}

// standBefore writes the programs: runc, and the plugins in the folder cni.
func standBefore(dir, deps string) (*parts, error) {
	p := &parts{dir: dir}
	const (
		says     = `echo 'the injected refusal' >&2`
		answers  = `echo '{"cniVersion":"1.0.0","code":11,"msg":"the injected refusal"}'`
		anyWord  = `"$@"`
		aCommand = `$CNI_COMMAND`
	)
	files := map[string]string{"runc": fmt.Sprintf(script, dir, "runc", filepath.Join(deps, "bin", "runc"), anyWord, says)}
	for _, name := range plugins {
		files["cni/"+name] = fmt.Sprintf(script, dir, name, filepath.Join(deps, "cni", name), aCommand, answers)
	}
	if err := os.MkdirAll(filepath.Join(dir, "cni"), 0o700); err != nil {
		return nil, err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// breaks has a part misbehave: who and its verb, how, and how often.
func (p *parts) breaks(who, verb, mode string, times int) error {
	p.mends()
	line := strings.Join([]string{who, verb, mode, strconv.Itoa(times)}, " ")
	return os.WriteFile(filepath.Join(p.dir, "fault"), []byte(line+"\n"), 0o600)
}

// begin forgets who was called.
func (p *parts) begin() { _ = os.Remove(filepath.Join(p.dir, "called")) }

// called tells whether a part was called with a verb since begin.
func (p *parts) called(who, verb string) bool {
	text, _ := os.ReadFile(filepath.Join(p.dir, "called"))
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 0 && words[0] == who && slices.Contains(words, verb) {
			return true
		}
	}
	return false
}

// broke tells whether a part has misbehaved since breaks.
func (p *parts) broke() bool {
	_, err := os.Stat(filepath.Join(p.dir, "done"))
	return err == nil
}

// mends has all parts behave again and ends the one that hangs.
func (p *parts) mends() {
	for _, name := range []string{"fault", "done"} {
		if err := os.Remove(filepath.Join(p.dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			panic(err) // the folder is the test's own
		}
	}
	text, err := os.ReadFile(filepath.Join(p.dir, "hung"))
	if err != nil {
		return
	}
	_ = os.Remove(filepath.Join(p.dir, "hung"))
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return
	}
	args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if strings.Contains(string(args), p.dir) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if _, lives := alive(pid); !lives {
			break
		}
		time.Sleep(time.Millisecond)
	}
}
