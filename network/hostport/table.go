package hostport

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// markBit says in a packet's mark that postrouting is to masquerade it. It is the
// bit that CNI's portmap plugin uses for the same purpose.
const markBit = 1 << 13

// chunk bounds the elements of one netlink attribute, which has 64 KiB.
const chunk = 200

// Register 8 is the first of the kernel's 32 bit registers; each field of a
// concatenation begins in one of its own.
const register = 8

// family is what differs between ip and ip6.
type family struct {
	name    string
	proto   byte   // NFPROTO
	address uint32 // bytes of an address
	source  uint32 // its offset in the IP header
	dest    uint32
	kind    nftables.SetDatatype
}

var families = []family{
	{"4", unix.NFPROTO_IPV4, 4, 12, 16, nftables.TypeIPAddr},
	{"6", unix.NFPROTO_IPV6, 16, 8, 24, nftables.TypeIP6Addr},
}

func familyOf(six bool) family {
	if six {
		return families[1]
	}
	return families[0]
}

// The sets of the table, by family, and with or without the node's address in
// the key.
const localnetSet = "localnet"

func mapName(f family, precise bool) string  { return name("ports", f, precise) }
func nearName(f family, precise bool) string { return name("near", f, precise) }

func name(what string, f family, precise bool) string {
	if precise {
		return what + f.name + "_at"
	}
	return what + f.name
}

// element of a set or a map.
type element struct{ value, owner string }

// content is all elements by set and key.
type content map[string]map[string]element

func (c content) put(set, key string, e element) {
	if c[set] == nil {
		c[set] = map[string]element{}
	}
	c[set][key] = e
}

func (c content) empty() bool { return len(c) == 0 }

// contentOf works out what the table has to hold.
func contentOf(pods map[string]*pod, localnet map[string]bool) content {
	c := content{}
	for id, p := range pods {
		for _, m := range p.ports {
			for _, t := range p.targets(m) {
				f, precise := familyOf(t.six), t.addr.IsValid()
				key := t.lookup()
				c.put(mapName(f, precise), key, element{value: string(t.end.addr.AsSlice()) + padded16(t.port), owner: id})
				if t.end.link != "" {
					c.put(nearName(f, precise), ifname(t.end.link)+key, element{owner: id})
				}
			}
		}
	}
	for link := range localnet {
		c.put(localnetSet, ifname(link), element{})
	}
	return c
}

// lookup is the key as the kernel makes it from a packet: each field at the
// beginning of a register.
func (k key) lookup() string {
	protocols := map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}
	s := string([]byte{protocols[k.protocol], 0, 0, 0}) + padded16(k.port)
	if k.addr.IsValid() {
		s = string(k.addr.AsSlice()) + s
	}
	return s
}

func padded16(v uint16) string { return string(binary.BigEndian.AppendUint16(nil, v)) + "\x00\x00" }

func ifname(link string) string {
	var b [unix.IFNAMSIZ]byte
	copy(b[:], link)
	return string(b[:])
}

// maxTransaction bounds one transaction, in bytes; 1000 ports need some 600 KiB.
const maxTransaction = 16 << 20

// connect opens a connection for each request anew, in the network namespace of
// the calling thread.
func connect() (*nftables.Conn, error) {
	return nftables.New(nftables.WithSockOptions(func(c *netlink.Conn) error { return c.SetWriteBuffer(maxTransaction) }))
}

// table is the table's name for the library.
func (m *Manager) table() *nftables.Table {
	return &nftables.Table{Name: m.o.Table, Family: nftables.TableFamilyINet}
}

func (m *Manager) listTables() error {
	c, err := connect()
	if err != nil {
		return err
	}
	_, err = c.ListTablesOfFamily(nftables.TableFamilyINet)
	return err
}

func (m *Manager) tableExists() (bool, error) {
	c, err := connect()
	if err != nil {
		return false, err
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	for _, t := range tables {
		if t.Name == m.o.Table {
			return true, nil
		}
	}
	return false, err
}

// readLocalnet reads from an earlier daemon's table where it has switched
// route_localnet on.
func (m *Manager) readLocalnet() (map[string]bool, error) {
	links := map[string]bool{}
	there, err := m.tableExists()
	if err != nil || !there {
		return links, err
	}
	c, err := connect()
	if err != nil {
		return links, err
	}
	elements, err := c.GetSetElements(&nftables.Set{Table: m.table(), Name: localnetSet})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return links, fmt.Errorf("read set %s of table %s: %w", localnetSet, m.o.Table, err)
	}
	for _, e := range elements {
		links[string(trimZero(e.Key))] = true
	}
	return links, nil
}

func trimZero(b []byte) []byte {
	for i, c := range b {
		if c == 0 {
			return b[:i]
		}
	}
	return b
}

// install makes the kernel serve the pods: route_localnet is on only while the
// table, with its guard, is there. On error nothing has changed but, perhaps,
// that setting.
func (m *Manager) install(pods map[string]*pod) error {
	settleLocalnet(m.localnet, pods)
	if err := m.write(contentOf(pods, m.localnet)); err != nil {
		return err
	}
	return switchOn(m.localnet)
}

// write brings the table from what it holds to next, in one transaction. Should
// the kernel refuse, because somebody has changed the table, it is replaced.
func (m *Manager) write(next content) error {
	if m.installed == nil || next.empty() {
		return m.replace(next)
	}
	c, err := connect()
	if err != nil {
		return err
	}
	for _, s := range m.sets() {
		gone, fresh := map[string]element{}, map[string]element{}
		for key, e := range m.installed[s.Name] {
			if next[s.Name][key] != e {
				gone[key] = e
			}
		}
		for key, e := range next[s.Name] {
			if old, ok := m.installed[s.Name][key]; !ok || old != e {
				fresh[key] = e
			}
		}
		if err := errors.Join(each(gone, s, c.SetDeleteElements), each(fresh, s, c.SetAddElements)); err != nil {
			return err
		}
	}
	if err := c.Flush(); err != nil {
		return m.replace(next)
	}
	m.installed = next
	return nil
}

// replace makes the table anew with all that it has to hold, or removes it when
// that is nothing, in one transaction: packets see the old one or the new one.
func (m *Manager) replace(next content) error {
	there, err := m.tableExists()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	c, err := connect()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	t := m.table()
	if there { // a transaction that also deletes takes the kernel twice as long
		c.DelTable(t)
	}
	if !next.empty() {
		c.AddTable(t)
		if err := m.build(c, t, next); err != nil {
			return fmt.Errorf("make table %s: %w", m.o.Table, err)
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("write table %s: %w", m.o.Table, err)
	}
	m.installed = next
	if next.empty() {
		m.installed = nil
	}
	return nil
}

// each hands the elements over in portions.
func each(elements map[string]element, s *nftables.Set, do func(*nftables.Set, []nftables.SetElement) error) error {
	var list []nftables.SetElement
	flush := func() (err error) {
		if len(list) > 0 {
			err, list = do(s, list), nil
		}
		return err
	}
	for key, e := range elements {
		list = append(list, nftables.SetElement{Key: []byte(key), Val: []byte(e.value), Comment: e.owner})
		if len(list) == chunk {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}

// sets lists the table's sets and maps.
func (m *Manager) sets() []*nftables.Set {
	t := m.table()
	list := []*nftables.Set{{Table: t, Name: localnetSet, KeyType: nftables.TypeIFName, KeyByteOrder: binaryutil.NativeEndian}}
	for _, f := range families {
		for _, precise := range []bool{true, false} {
			fields := []nftables.SetDatatype{nftables.TypeInetProto, nftables.TypeInetService}
			if precise {
				fields = append([]nftables.SetDatatype{f.kind}, fields...)
			}
			list = append(list,
				&nftables.Set{Table: t, Name: mapName(f, precise), IsMap: true, Concatenation: true,
					KeyType:  nftables.MustConcatSetType(fields...),
					DataType: nftables.MustConcatSetType(f.kind, nftables.TypeInetService)},
				&nftables.Set{Table: t, Name: nearName(f, precise), Concatenation: true,
					KeyType: nftables.MustConcatSetType(append([]nftables.SetDatatype{nftables.TypeIFName}, fields...)...)})
		}
	}
	return list
}

// build adds sets, chains, rules and elements to the transaction.
func (m *Manager) build(c *nftables.Conn, t *nftables.Table, next content) error {
	sets := map[string]*nftables.Set{}
	for _, s := range m.sets() {
		s.Table = t
		if err := errors.Join(c.AddSet(s, nil), each(next[s.Name], s, c.SetAddElements)); err != nil {
			return err
		}
		sets[s.Name] = s
	}
	ports := c.AddChain(&nftables.Chain{Name: "ports", Table: t})
	c.AddRule(&nftables.Rule{Table: t, Chain: ports, Exprs: leaveLoopback6()})
	for _, f := range families {
		for _, precise := range []bool{true, false} {
			near, found := sets[nearName(f, precise)], sets[mapName(f, precise)]
			c.AddRule(&nftables.Rule{Table: t, Chain: ports, Exprs: markNear(f, precise, near)})
			c.AddRule(&nftables.Rule{Table: t, Chain: ports, Exprs: leadOn(f, precise, found)})
		}
	}
	for _, hook := range []struct {
		name string
		at   *nftables.ChainHook
	}{{"prerouting", nftables.ChainHookPrerouting}, {"output", nftables.ChainHookOutput}} {
		chain := c.AddChain(&nftables.Chain{Name: hook.name, Table: t, Type: nftables.ChainTypeNAT,
			Hooknum: hook.at, Priority: nftables.ChainPriorityNATDest})
		c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: []expr.Any{
			&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
			&expr.Cmp{Register: 1, Op: expr.CmpOpEq, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)},
			&expr.Verdict{Kind: expr.VerdictJump, Chain: ports.Name},
		}})
	}
	post := c.AddChain(&nftables.Chain{Name: "postrouting", Table: t, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource})
	for _, exprs := range masquerades() {
		c.AddRule(&nftables.Rule{Table: t, Chain: post, Exprs: exprs})
	}
	guard := c.AddChain(&nftables.Chain{Name: "guard", Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw})
	for _, exprs := range guards() {
		c.AddRule(&nftables.Rule{Table: t, Chain: guard, Exprs: exprs})
	}
	return nil
}
