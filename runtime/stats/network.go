package stats

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
)

// Network is what went through the interfaces of one network namespace, since
// each was made, without loopback.
type Network struct {
	At         time.Time
	Interfaces []Interface
}

// Interface counts one of them.
type Interface struct {
	Name           string
	Received, Sent Traffic
	Default        bool // the namespace's default route goes through it
}

// Traffic is in bytes and packets.
type Traffic struct{ Bytes, Packets, Errors, Dropped uint64 }

const loopback = "lo"

// ReadNetwork measures the network namespace that the calling thread is in. It
// needs no process inside: whoever wants another's enters it first. usual names
// the interface that is the default one if it is there.
func ReadNetwork(usual string) (Network, error) {
	return readNetwork("/proc/thread-self/net", usual, nil)
}

// ReadHostNetwork measures the host's own. The outer ends of other pods'
// interfaces (veth) are left out: their traffic is not the host's.
func ReadHostNetwork() (Network, error) {
	ends := map[string]bool{}
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // interrupted: the next reply has the rest
		return Network{}, fmt.Errorf("list host's links: %w", err)
	}
	for _, l := range links {
		ends[l.Attrs().Name] = l.Type() == "veth"
	}
	return readNetwork("/proc/self/net", "", ends)
}

func readNetwork(dir, usual string, leave map[string]bool) (Network, error) {
	n := Network{At: time.Now()}
	text, err := os.ReadFile(dir + "/dev")
	if err != nil {
		return Network{}, fmt.Errorf("measure network: %w", err)
	}
	for line := range bytes.Lines(text) {
		name, rest, ok := bytes.Cut(line, []byte(":"))
		if !ok {
			continue // the two lines of headings
		}
		i, err := parseInterface(strings.TrimSpace(string(name)), bytes.Fields(rest))
		if err != nil {
			return Network{}, fmt.Errorf("measure network: %w", err)
		}
		if i.Name != loopback {
			n.Interfaces = append(n.Interfaces, i)
		}
	}
	if !slices.ContainsFunc(n.Interfaces, func(i Interface) bool { return i.Name == usual }) {
		usual = defaultRoute(dir)
	}
	for k := range n.Interfaces {
		n.Interfaces[k].Default = n.Interfaces[k].Name == usual
	}
	n.Interfaces = slices.DeleteFunc(n.Interfaces, func(i Interface) bool { return leave[i.Name] && !i.Default })
	return n, nil
}

// parseInterface reads the 16 numbers of an interface: bytes, packets, errors,
// drops and four more received, then the same sent.
func parseInterface(name string, values [][]byte) (Interface, error) {
	i := Interface{Name: name}
	if len(values) < 16 {
		return i, fmt.Errorf("%w: interface %s has %d numbers", errFormat, name, len(values))
	}
	for at, into := range map[int]*Traffic{0: &i.Received, 8: &i.Sent} {
		for k, field := range []*uint64{&into.Bytes, &into.Packets, &into.Errors, &into.Dropped} {
			n, err := parseUint(values[at+k])
			if err != nil {
				return i, err
			}
			*field = n
		}
	}
	return i, nil
}

// defaultRoute is the interface of the default route with the lowest metric,
// of IPv4, else of IPv6; empty when there is none.
func defaultRoute(dir string) string {
	// Interface Destination Gateway Flags RefCnt Use Metric Mask …
	if name := bestRoute(dir+"/route", func(f [][]byte) (name, destination, mask string, metric uint64, ok bool) {
		if len(f) < 8 {
			return
		}
		metric, err := parseUint(f[6])
		return string(f[0]), string(f[1]), string(f[7]), metric, err == nil
	}); name != "" {
		return name
	}
	// destination prefix source prefix next-hop metric refcnt use flags interface
	return bestRoute(dir+"/ipv6_route", func(f [][]byte) (name, destination, mask string, metric uint64, ok bool) {
		if len(f) < 10 {
			return
		}
		var b [4]byte
		_, err := hex.Decode(b[:], f[5])
		return string(f[9]), string(f[0]), string(f[1]), uint64(binary.BigEndian.Uint32(b[:])), err == nil
	})
}

// bestRoute picks the line with a destination and mask of zeros.
func bestRoute(path string, parse func(fields [][]byte) (name, destination, mask string, metric uint64, ok bool)) string {
	best, lowest := "", ^uint64(0)
	text, err := os.ReadFile(path)
	if err != nil {
		return "" // a kernel without this protocol
	}
	for line := range bytes.Lines(text) {
		name, destination, mask, metric, ok := parse(bytes.Fields(line))
		if ok && name != loopback && strings.Trim(destination+mask, "0") == "" && metric < lowest {
			best, lowest = name, metric
		}
	}
	return best
}
