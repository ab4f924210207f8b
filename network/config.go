package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"

	"berth/sandbox/regular"
)

// maxConfig bounds one configuration file, in bytes.
const maxConfig = 1 << 20

// loaded is the outcome of one reading of the directory; it is not changed
// after it was made.
type loaded struct {
	at        time.Time
	signature string // what the directory looked like, see signature
	file      string // of the network that was chosen
	list      *libcni.NetworkConfigList
	bytes     []byte            // the chosen conflist as recorded with each pod
	refused   map[string]string // file → reason
	dirErr    error             // the directory could not be read
	missing   error             // a plugin program that is not there
}

// ready says why no pod can be set up, from what is known without plugins.
func (l *loaded) ready(dir string) error {
	switch {
	case l.list != nil && l.missing != nil:
		return fmt.Errorf("%w: network %q of %s: %w", ErrNotReady, l.list.Name, l.file, l.missing)
	case l.list != nil:
		return nil
	case l.dirErr != nil:
		return fmt.Errorf("%w: read the CNI configuration: %w", ErrNotReady, l.dirErr)
	case len(l.refused) == 0:
		return fmt.Errorf("%w: no CNI configuration in %s", ErrNotReady, dir)
	}
	var reasons []string
	for _, file := range slices.Sorted(maps.Keys(l.refused)) {
		reasons = append(reasons, filepath.Base(file)+": "+l.refused[file])
	}
	return fmt.Errorf("%w: no valid CNI configuration in %s: %s", ErrNotReady, dir, strings.Join(reasons, "; "))
}

// hasStatus reports whether the network's version of CNI knows STATUS.
func (l *loaded) hasStatus() bool {
	return l.list != nil && knows(l.list, "1.1.0")
}

// check reads the directory again if it looks different from what is loaded. It
// gives up waiting for a directory that does not answer, which Ready then tells.
func (m *Manager) check() {
	patience := time.NewTimer(lookPatience)
	defer patience.Stop()
	select {
	case m.looks <- struct{}{}:
	case <-patience.C:
		return // as many as may hang do
	}
	began, over := time.Now(), make(chan struct{})
	go func() {
		defer func() { <-m.looks }()
		m.look()
		m.mu.Lock()
		m.silent = time.Time{}
		m.mu.Unlock()
		close(over)
	}()
	select {
	case <-over:
	case <-patience.C:
		m.mu.Lock()
		if m.silent.IsZero() {
			m.silent = began
		}
		m.mu.Unlock()
	}
}

// readyLocked says why no pod can be set up, from what is known without plugins.
func (m *Manager) readyLocked() error {
	if !m.silent.IsZero() {
		return fmt.Errorf("%w: the CNI configuration directory %s does not answer, since %s", ErrNotReady, m.o.ConfDir, m.silent.Format(time.RFC3339))
	}
	return m.loaded.ready(m.o.ConfDir)
}

// look is one look of check. Several may run at once: what began last wins.
func (m *Manager) look() {
	m.mu.Lock()
	m.turn++
	turn, old := m.turn, m.loaded
	m.mu.Unlock()

	now := signature(m.o.ConfDir)
	if now == old.signature && old.missing == nil {
		return
	}
	fresh := load(m.o.ConfDir)
	fresh.signature = now
	if old.list != nil && bytes.Equal(fresh.bytes, old.bytes) {
		fresh.list = old.list // the same network
	}
	if fresh.list != nil {
		fresh.missing = m.findPlugins(fresh.list)
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	if turn < m.turn && m.loaded != old {
		return // a later reading has come in before
	}
	m.loaded = fresh
	if !fresh.hasStatus() {
		m.status = status{err: errStatusPending, running: m.status.running}
		return
	}
	if old.missing == nil && fresh.list == old.list {
		return // what the plugins said stands
	}
	m.status.stale = true
	m.refreshStatusLocked()
}

// findPlugins reports the first plugin program that is not there. Plugins that
// others delegate to are theirs to find.
func (m *Manager) findPlugins(list *libcni.NetworkConfigList) error {
	ctx, cancel := context.WithTimeout(m.ctx, lookPatience/2)
	defer cancel()
	if err := m.answer(ctx, list); err != nil {
		return err
	}
	for _, p := range list.Plugins {
		if _, err := (&pluginExec{}).FindInPath(p.Network.Type, m.o.BinDirs); err != nil {
			return err
		}
	}
	return nil
}

// answer asks whether the programs of a list's plugins answer.
func (m *Manager) answer(ctx context.Context, list *libcni.NetworkConfigList) error {
	for _, p := range list.Plugins {
		for _, dir := range m.o.BinDirs {
			if err := m.o.Answer(ctx, filepath.Join(dir, p.Network.Type)); err != nil {
				return fmt.Errorf("CNI plugin %s: %w", p.Network.Type, err)
			}
		}
	}
	return nil
}

// grain is more than the step in which kernels before 6.13 give times to files:
// what is written twice within it may look the same.
const grain = 20 * time.Millisecond

// signature describes the directory by the identity, size and times of its
// files, so that it differs whenever reading it could give something else: what
// was written just now counts as different at every look.
func signature(dir string) string {
	var b strings.Builder
	info, err := os.Stat(dir)
	if err != nil {
		return err.Error()
	}
	describe(&b, ".", info)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err.Error()
	}
	for _, e := range entries {
		// Stat follows links: in a mounted ConfigMap the files are links.
		info, err := os.Stat(filepath.Join(dir, e.Name()))
		if err != nil {
			fmt.Fprintf(&b, "%s %v\n", e.Name(), err)
			continue
		}
		describe(&b, e.Name(), info)
		if info.IsDir() {
			describePlugins(&b, filepath.Join(dir, e.Name()))
		}
	}
	return b.String()
}

// describePlugins covers the plugins of a conflist that stand in files of their
// own, <name of the network>/*.conf.
func describePlugins(b *strings.Builder, dir string) {
	files, err := filepath.Glob(filepath.Join(dir, "*.conf"))
	if err != nil {
		return
	}
	for _, file := range files {
		if info, err := os.Stat(file); err == nil {
			describe(b, file, info)
		}
	}
}

func describe(b *strings.Builder, name string, info fs.FileInfo) {
	fmt.Fprintf(b, "%s %v %d %d %s\n", name, info.Mode(), info.Size(), info.ModTime().UnixNano(), identity(info))
	if now := time.Now(); now.Sub(info.ModTime()).Abs() < grain {
		fmt.Fprintf(b, "seen at %d\n", now.UnixNano())
	}
}

// load takes the first valid file by name.
func load(dir string) *loaded {
	l := &loaded{at: time.Now(), refused: map[string]string{}}
	entries, err := os.ReadDir(dir)
	if err != nil {
		l.dirErr = err
		return l
	}
	for _, e := range entries { // sorted by name
		switch filepath.Ext(e.Name()) {
		case ".conflist", ".conf", ".json":
		default:
			continue
		}
		file := filepath.Join(dir, e.Name())
		if info, err := os.Stat(file); err == nil && info.IsDir() {
			continue
		}
		list, raw, err := readConfig(file)
		if err != nil {
			l.refused[file] = err.Error()
			continue
		}
		if l.list == nil {
			l.file, l.list, l.bytes = file, list, raw
		}
	}
	return l
}

// readConfig reads a conflist, or one plugin's configuration, which becomes a
// conflist of one. It returns the list and its bytes, complete in themselves.
func readConfig(file string) (*libcni.NetworkConfigList, []byte, error) {
	data, err := regular.Read(file, maxConfig)
	if err != nil {
		return nil, nil, err
	}
	return parseConfig(data, filepath.Dir(file))
}

// parseConfig is readConfig for text that is, or is to be, in a directory.
func parseConfig(data []byte, dir string) (*libcni.NetworkConfigList, []byte, error) {
	var top map[string]json.RawMessage
	err := json.Unmarshal(data, &top)
	if err != nil {
		return nil, nil, fmt.Errorf("not a JSON object: %w", err)
	}
	if _, single := top["type"]; single && top["plugins"] == nil {
		if top, err = wrapSingle(top, data); err != nil {
			return nil, nil, err
		}
	} else if err := inlinePlugins(top, dir); err != nil {
		return nil, nil, err
	}
	raw, err := json.Marshal(top)
	if err != nil {
		return nil, nil, err
	}
	list, err := parseList(raw)
	return list, raw, err
}

// wrapSingle makes a conflist out of one plugin's configuration.
func wrapSingle(plugin map[string]json.RawMessage, data []byte) (map[string]json.RawMessage, error) {
	list := map[string]json.RawMessage{}
	for _, key := range []string{"name", "cniVersion"} {
		if value, ok := plugin[key]; ok {
			list[key] = value
		}
	}
	plugins, err := json.Marshal([]json.RawMessage{data})
	list["plugins"] = plugins
	return list, err
}

// inlinePlugins adds the plugins in <dir>/<name of the network>/*.conf to the
// list, unless it says that it is complete, so that what is recorded with a pod
// does not depend on files that may change.
func inlinePlugins(list map[string]json.RawMessage, dir string) error {
	var name string
	var inlined []json.RawMessage
	if json.Unmarshal(list["name"], &name) != nil || utils.ValidateNetworkName(name) != nil {
		return nil // parseList refuses it
	}
	if raw, ok := list["plugins"]; ok && json.Unmarshal(raw, &inlined) != nil {
		return nil // parseList refuses it
	}
	if complete := strings.Trim(string(list["loadOnlyInlinedPlugins"]), `"`); strings.EqualFold(complete, "true") {
		return nil
	}
	files, err := filepath.Glob(filepath.Join(dir, name, "*.conf"))
	if err != nil || len(files) == 0 {
		return nil // no such files
	}
	for _, file := range files { // sorted by name
		data, err := regular.Read(file, maxConfig)
		if err != nil {
			return err
		}
		if !json.Valid(data) {
			return fmt.Errorf("plugin in %s is not valid JSON", file)
		}
		inlined = append(inlined, data)
	}
	plugins, err := json.Marshal(inlined)
	if err != nil {
		return err
	}
	list["plugins"] = plugins
	list["loadOnlyInlinedPlugins"] = json.RawMessage("true")
	return nil
}

// parseList refuses what would only show when the first pod is set up.
func parseList(raw []byte) (*libcni.NetworkConfigList, error) {
	list, err := libcni.NetworkConfFromBytes(raw)
	if err != nil {
		return nil, err
	}
	if err := utils.ValidateNetworkName(list.Name); err != nil {
		return nil, fmt.Errorf("name %q: %w", list.Name, err)
	}
	if list.CNIVersion != "" && !slices.Contains(version.All.SupportedVersions(), list.CNIVersion) {
		return nil, fmt.Errorf("cniVersion %q is not known; known are %s", list.CNIVersion, strings.Join(version.All.SupportedVersions(), ", "))
	}
	if len(list.Plugins) == 0 {
		return nil, errors.New("no plugins in the list")
	}
	for _, p := range list.Plugins {
		if strings.ContainsAny(p.Network.Type, `/\`) || p.Network.Type == "." || p.Network.Type == ".." {
			return nil, fmt.Errorf("plugin type %q is not the name of a program", p.Network.Type)
		}
	}
	return list, nil
}
