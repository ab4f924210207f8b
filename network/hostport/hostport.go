// Package hostport makes ports of the node lead to pods, with nftables rules of
// its own.
//
// It owns one nftables table, the conntrack entries and the route_localnet
// settings that its rules need, and the knowledge which pod has which port. It
// does not own the networks of pods (network), and it is not used where a CNI
// plugin maps the ports; such pods only claim theirs here, so that two pods never
// get the same one.
//
// Terms: a pod claims ports before anything is done for it, in memory only; its
// ports are opened when its addresses are known and closed when it stops. The
// near link of a pod is the node's link that leads to it: the bridge, or the
// node's end of a veth pair. Traffic that comes from the near link and goes out
// through it again must be masqueraded, or the answer would bypass the node.
//
// Files on disk: none. The kernel keeps the table until a reboot, also while no
// daemon runs; what it must hold follows from the records of the pods, which the
// caller keeps and gives to Restore. Each element of the table's maps carries its
// pod's id as a comment. With no open port there is no table.
//
// The rules (families ip and ip6 alike; see table.go):
//
//	prerouting, output   to an address of the node: look the port up, first with
//	                     the address, then without; mark what came from the near
//	                     link; dnat
//	postrouting          masquerade what is marked or has a loopback source
//	guard                drop what comes from a link to or from 127.0.0.0/8, which
//	                     the kernel no longer does where route_localnet is set
package hostport

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
)

// Sentinels of the package; test with errors.Is.
var (
	// ErrTaken: another pod has the port; the error is a *TakenError.
	ErrTaken = errors.New("host port is taken")
	// ErrInvalid: a pod's mappings contradict each other.
	ErrInvalid = errors.New("invalid host port")
	// ErrNoAddress: the pod has no address of the family that a mapping is for.
	ErrNoAddress = errors.New("no address for a host port")
	// ErrUnavailable: the kernel offers no nftables to this process.
	ErrUnavailable = errors.New("host ports need nf_tables of the kernel")
)

// TakenError names the pod that has a port.
type TakenError struct {
	Wanted, Has Mapping
	Owner       string // id of the pod's sandbox
}

// Error names both mappings and the owner.
func (e *TakenError) Error() string {
	return fmt.Sprintf("%s: %s is wanted, sandbox %s has %s", ErrTaken, e.Wanted, e.Owner, e.Has)
}

// Unwrap returns ErrTaken.
func (e *TakenError) Unwrap() error { return ErrTaken }

// Mapping leads a port of the node to a port of a pod.
type Mapping struct {
	Protocol      string     // tcp, udp or sctp
	HostIP        netip.Addr // invalid: every address; 0.0.0.0 or ::, every one of the family
	HostPort      uint16
	ContainerPort uint16
}

// String is the node's side, as in 10.0.0.1:80/tcp.
func (m Mapping) String() string {
	host := "*"
	if m.HostIP.IsValid() {
		host = m.HostIP.String()
	}
	return fmt.Sprintf("%s:%d/%s", host, m.HostPort, m.Protocol)
}

// Pod is what Restore is told about one pod.
type Pod struct {
	ID    string
	Ports []Mapping
	IPs   []netip.Addr // none: the ports are claimed, and somebody else leads them
}

// Options of a Manager.
type Options struct {
	Table string // name of the table; no two daemons in a network namespace may share one
	// Enter runs f in the network namespace that the rules are for; nil: where the
	// process is.
	Enter func(f func() error) error
}

// Description is what verbose Status tells.
type Description struct {
	Table       string `json:"table"`
	Pods        int    `json:"pods"`  // with ports opened here
	Ports       int    `json:"ports"` // of these pods
	Unavailable string `json:"unavailable,omitempty"`
}

// Manager knows the host ports of all pods. It is safe for concurrent use.
type Manager struct {
	o Options

	kernel    sync.Mutex      // guards the next two, held while the kernel is changed; before mu
	installed content         // what the table holds; nil: there is none
	localnet  map[string]bool // links whose route_localnet was switched on here

	mu          sync.Mutex      // guards the fields below; never held across a call to the kernel
	pods        map[string]*pod // by sandbox id
	unavailable error
}

// pod is a pod with claimed ports. It is not changed after it was made.
type pod struct {
	ports []Mapping
	ends  []end // none: not opened
}

// end is where a family's traffic to a pod goes.
type end struct {
	addr netip.Addr
	link string // the near link; empty: not known
}

// New makes a Manager with no ports and asks the kernel whether it has
// nftables; what an earlier daemon left stands until Restore.
func New(o Options) *Manager {
	if o.Enter == nil {
		o.Enter = func(f func() error) error { return f() }
	}
	m := &Manager{o: o, pods: map[string]*pod{}, localnet: map[string]bool{}}
	m.probe()
	return m
}

func (m *Manager) probe() {
	err := m.o.Enter(m.listTables)
	if err != nil {
		err = fmt.Errorf("%w: list tables: %w", ErrUnavailable, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unavailable = err
}

// Available returns nil when ports can be opened. A kernel that had no nftables
// is asked again, for modules may have been loaded since. ErrUnavailable.
func (m *Manager) Available() error {
	if m.available() == nil {
		return nil
	}
	m.probe()
	return m.available()
}

func (m *Manager) available() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.unavailable
}

// Describe answers from memory.
func (m *Manager) Describe() Description {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := Description{Table: m.o.Table}
	for _, p := range m.pods {
		if len(p.ends) > 0 {
			d.Pods, d.Ports = d.Pods+1, d.Ports+len(p.ports)
		}
	}
	if m.unavailable != nil {
		d.Unavailable = m.unavailable.Error()
	}
	return d
}

// Claim reserves ports for a pod, in memory only. A second claim of the same pod
// replaces its first, which must not have been opened. Close gives them back.
// Errors: ErrInvalid, ErrTaken.
func (m *Manager) Claim(id string, ports []Mapping) error {
	if len(ports) == 0 {
		return nil
	}
	if err := consistent(ports); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for owner, p := range m.pods {
		for _, has := range p.ports {
			for _, wanted := range ports {
				if owner != id && wanted.overlaps(has) {
					return &TakenError{Wanted: wanted, Has: has, Owner: owner}
				}
			}
		}
	}
	m.pods[id] = &pod{ports: slices.Clone(ports)}
	return nil
}

// Open makes the ports that the pod has claimed lead to its addresses, of which
// the first of each family counts. When it returns, new connections arrive. On
// error nothing has changed. It waits for nothing but the kernel. Without a
// claim it does nothing. Errors: ErrNoAddress, ErrUnavailable.
func (m *Manager) Open(id string, ips []netip.Addr) error {
	m.kernel.Lock()
	defer m.kernel.Unlock()
	m.mu.Lock()
	claimed := m.pods[id]
	m.mu.Unlock()
	if claimed == nil {
		return nil
	}
	opened := &pod{ports: claimed.ports}
	if err := m.o.Enter(func() (err error) {
		opened.ends, err = findEnds(ips)
		return err
	}); err != nil {
		return fmt.Errorf("open host ports of %s: %w", id, err)
	}
	for _, port := range opened.ports {
		if len(opened.targets(port)) == 0 {
			return fmt.Errorf("open host ports of %s: %w: %s; the pod's addresses are %v", id, ErrNoAddress, port, ips)
		}
	}
	if err := m.change(id, opened); err != nil {
		return fmt.Errorf("open host ports of %s: %w", id, err)
	}
	return nil
}

// Close removes a pod's ports from the node and gives up its claim. It is
// idempotent; for a pod without ports it costs nothing. After an error the pod
// still has its ports, and Close is to be called again.
func (m *Manager) Close(id string) error {
	m.mu.Lock()
	p := m.pods[id]
	if p != nil && len(p.ends) == 0 {
		delete(m.pods, id)
		p = nil
	}
	m.mu.Unlock()
	if p == nil {
		return nil
	}
	m.kernel.Lock()
	defer m.kernel.Unlock()
	if err := m.change(id, nil); err != nil {
		return fmt.Errorf("close host ports of %s: %w", id, err)
	}
	return nil
}

// Restore takes over from an earlier daemon: the table is replaced, in one step,
// by what the given pods need, or removed. Pods that cannot be opened, because
// their link is gone, keep their claim only and are returned as an error each.
// To be called once, before Claim.
func (m *Manager) Restore(pods []Pod) error {
	m.kernel.Lock()
	defer m.kernel.Unlock()
	unavailable := m.available()
	var problems []error
	all := map[string]*pod{}
	for _, p := range pods {
		restored := &pod{ports: p.Ports}
		err := unavailable
		if err == nil && len(p.IPs) > 0 {
			err = m.o.Enter(func() (err error) { restored.ends, err = findEnds(p.IPs); return err })
		}
		if err != nil && len(p.IPs) > 0 {
			problems = append(problems, fmt.Errorf("open host ports of %s: %w", p.ID, err))
		}
		all[p.ID] = restored
	}
	m.mu.Lock()
	m.pods = all
	m.mu.Unlock()
	if unavailable != nil {
		return errors.Join(problems...) // there is no table either
	}
	err := m.o.Enter(func() (err error) { m.localnet, err = m.readLocalnet(); return err })
	if err == nil {
		err = m.reinstall()
	}
	if err != nil {
		problems = append(problems, fmt.Errorf("restore host ports: %w", err))
	}
	return errors.Join(problems...)
}

// Repair puts the table back when somebody has removed it (nft flush ruleset), or
// Restore could not make it, and reports whether it did. It is cheap when no port
// is open.
func (m *Manager) Repair() (repaired bool, err error) {
	m.kernel.Lock()
	defer m.kernel.Unlock()
	if m.Describe().Pods == 0 {
		return false, nil
	}
	there := false
	if err := m.o.Enter(func() (err error) { there, err = m.tableExists(); return err }); err != nil {
		return false, fmt.Errorf("look for the table of host ports: %w", err)
	}
	if there && m.installed != nil {
		return false, nil
	}
	if err := m.reinstall(); err != nil {
		return false, fmt.Errorf("put the table of host ports back: %w", err)
	}
	return true, nil
}

// change gives a pod other ends, or removes it when next is nil, in the kernel
// and then in memory. An opening that does not succeed is taken back; a closing
// stands once the table is written. The caller holds kernel.
func (m *Manager) change(id string, next *pod) error {
	pods := m.snapshot()
	before := pods[id]
	if before == nil {
		return nil // closed meanwhile
	}
	put(pods, id, next)
	return m.o.Enter(func() error {
		err := m.install(pods)
		if next == nil {
			if err != nil {
				return err
			}
			m.put(id, nil)
			return forgetFlows(before, true)
		}
		if err == nil {
			err = forgetFlows(next, false)
		}
		if err != nil {
			put(pods, id, before)
			return errors.Join(err, m.install(pods))
		}
		m.put(id, next)
		return nil
	})
}

// reinstall replaces the table whole. The caller holds kernel.
func (m *Manager) reinstall() error {
	m.installed = nil
	return m.o.Enter(func() error { return m.install(m.snapshot()) })
}

func (m *Manager) snapshot() map[string]*pod {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.pods)
}

func (m *Manager) put(id string, p *pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	put(m.pods, id, p)
}

func put(pods map[string]*pod, id string, p *pod) {
	if p == nil {
		delete(pods, id)
	} else {
		pods[id] = p
	}
}
